"""Limits per peer: names, shares, memory and time, without sockets."""

import pytest

from nvpool.core import config
from nvpool.core.clock import ManualClock
from nvpool.core.errors import Busy
from nvpool.host.subordinate_uids import LOOK_S as LOOK_SUBUID_S
from nvpool.host.subordinate_uids import SubordinateUids
from nvpool.rpc import peer_limits as limits_module
from nvpool.rpc.peer_limits import LOOK_S, Bounds, Limits, identify
from nvpool.rpc.peer_roles import Credentials, Peer
from nvpool.rpc.stats import RPC_STATS

MIB = 1 << 20
SMALL = Bounds(
    connections=32,
    connections_per_peer=6,
    memory_bytes=64 * MIB,
    memory_bytes_per_peer=16 * MIB,
    message_s=5.0,
    requests_per_peer=100,
)


class Loop:
    """No timers: the tests call `run_once`."""

    def call_later(self, *_):
        return self

    def cancel(self):
        pass


@pytest.fixture(autouse=True)
def no_timers(monkeypatch):
    monkeypatch.setattr("nvpool.rpc.peer_limits.asyncio.get_running_loop", Loop)
    monkeypatch.setattr("nvpool.rpc.peer_limits.physical_bytes", lambda: 1 << 40)


class Ticking:
    now_s = 1000.0

    def boottime_s(self):
        return self.now_s


class End:
    """A connection, as limits see it."""

    def __init__(self, limits, peer):
        self.cut = ""
        self.reads = True
        self.frame = None
        self.out = (0, 0)
        self.work = (0, 0)
        self.share = limits.enter(self, peer, "meta-1")

    def load(self):
        return self.work

    def unfinished(self):
        return self.frame

    def unsent(self):
        return self.out

    def hold_back(self):
        self.reads = False

    def go_on(self):
        self.reads = True

    def cut_off(self, reason):
        self.cut = reason
        self.share.leave()


def user(uid=1000):
    return Peer("x", "unix", True, "", Credentials(uid, frozenset((uid,)), 7))


ROOT = user(0)
NODE, CLIENT = Peer("x", "10.0.0.1:99", False, "node/alpha"), Peer("x", "10.0.0.1:98", False, "client/ws1")


def far(host, port=77):
    return Peer("x", f"{host}:{port}", False)


def make(bounds=SMALL):
    clock = Ticking()
    return Limits(bounds, clock), clock


def met(limit):
    return RPC_STATS.limits_met.get(limit, 0)


@pytest.mark.parametrize(
    ("peer", "name", "trusted"),
    [
        (NODE, "node/alpha", True),
        (CLIENT, "client/ws1", False),
        (ROOT, "uid 0", True),
        (user(), "uid 1000", False),
        (far("10.1.2.3"), "address 10.1.2.3", False),
        (far("::ffff:10.1.2.3"), "address 10.1.2.3", False),
        (far("fd00:1:2:3:4:5:6:7"), "address fd00:1:2:3::/64", False),
        (far("::1"), "address ::1", False),
        (far("fe80::5%eth0"), "address fe80::/64", False),
        (Peer("x", "inproc", True), "this process", True),
    ],
)
def test_peer_is_certificate_then_user_then_address(peer, name, trusted):
    assert identify(peer) == (name, trusted)


def test_operators_are_trusted():
    peer = Peer("x", "unix", True, "", Credentials(1000, frozenset((1000, 4711)), 7))
    assert identify(peer, 4711) == ("uid 1000", True) and identify(peer, 4712) == ("uid 1000", False)


def test_other_hosts_are_trusted_in_plain_text():
    assert (
        identify(far("10.1.2.3"), plain_text=True)[1] and not identify(far("127.0.0.1"), plain_text=True)[1]
    )
    assert not identify(far("::1"), plain_text=True)[1] and not identify(user(), plain_text=True)[1]


def test_subordinate_uids_count_for_the_owner_of_their_range(monkeypatch, tmp_path):
    subuid, clock = tmp_path / "subuid", ManualClock()
    subuid.write_text("# comment\nalice:100000:65536\nbob:170000:10\n1002:x:10\n:1:9\n")
    monkeypatch.setattr(limits_module, "SUBORDINATE_UIDS", SubordinateUids(subuid, clock))
    for uid, name in (
        (99_999, "uid 99999"),
        (100_000, "subordinate uids of alice"),
        (165_535, "subordinate uids of alice"),
        (165_536, "uid 165536"),
        (170_009, "subordinate uids of bob"),
        (170_010, "uid 170010"),
    ):
        assert identify(user(uid)) == (name, False)
    limits, _ = make()
    for uid in range(100_000, 100_006):
        End(limits, user(uid))
    with pytest.raises(Busy, match="subordinate uids of alice"):
        End(limits, user(100_006))
    assert identify(Peer("x", "unix", True, "", Credentials(100_000, frozenset((4711,)), 7)), 4711)[1]


def test_subuid_is_read_for_new_users_only_and_seldom(tmp_path):
    subuid, clock = tmp_path / "subuid", ManualClock()
    uids = SubordinateUids(subuid, clock)
    assert uids.owner_of(100_000) == ""
    subuid.write_text("alice:100000:65536\n")
    assert uids.owner_of(100_001) == "", "within LOOK_S"
    clock.advance(LOOK_SUBUID_S)
    assert uids.owner_of(100_001) == "", "known already"
    assert uids.owner_of(100_002) == uids.owner_of(100_001) == "alice"
    subuid.unlink()
    clock.advance(LOOK_SUBUID_S)
    assert uids.owner_of(5) == uids.owner_of(100_002) == ""


def test_bounds_match_the_configuration():
    assert Bounds(**config.as_dict(config.Config())["limits"]) == Bounds()


def test_peer_has_no_more_connections_than_its_share():
    limits, _ = make()
    ends = [End(limits, far("10.1.2.3", port)) for port in range(6)]
    before = met("connections_per_peer")
    with pytest.raises(Busy) as raised:
        End(limits, far("10.1.2.3"))
    assert all(
        word in str(raised.value)
        for word in (
            "meta-1",
            "6 connections",
            "address 10.1.2.3",
            "limits.connections_per_peer in node.toml",
        )
    )
    assert met("connections_per_peer") == before + 1
    others = [End(limits, peer) for peer in (far("10.1.2.4"), user(), CLIENT, ROOT, NODE)]
    ends[0].share.leave()
    End(limits, far("10.1.2.3"))
    assert not any(end.cut for end in ends + others)


def test_quarter_of_the_connections_is_kept_for_the_trusted():
    limits, _ = make()
    for n in range(24):
        End(limits, far(f"10.1.2.{n}"))
    with pytest.raises(Busy, match=r"limits\.connections in node\.toml"):
        End(limits, far("10.1.3.1"))
    for n in range(8):
        End(limits, (ROOT, NODE)[n % 2])
    with pytest.raises(Busy):
        End(limits, ROOT)


def test_one_peer_never_gets_all_connections():
    limits, _ = make(SMALL._replace(connections_per_peer=1_000_000))
    count = 0
    with pytest.raises(Busy):
        for _ in range(100):
            End(limits, user())
            count += 1
    assert count == 12
    End(limits, user(1001))


def test_handshakes_count_for_their_address():
    limits, _ = make()
    names = [limits.shakes_hands("10.1.2.3") for _ in range(6)]
    assert set(names) == {"address 10.1.2.3"} and limits.shakes_hands("10.1.2.3") is None
    assert limits.shakes_hands("10.1.2.4")
    End(limits, CLIENT)
    limits.has_shaken_hands(names[0])
    assert limits.shakes_hands("10.1.2.3")


def test_leaving_twice_counts_once():
    limits, _ = make()
    one, other = End(limits, user()), End(limits, user())
    one.share.admit(MIB)
    one.share.leave()
    one.share.leave()
    one.share.done(MIB)
    assert (
        limits.bytes == 0
        and other.share.account.bytes == 0
        and list(other.share.account.shares) == [other.share]
    )


def test_large_requests_of_a_peer_are_serialized():
    limits, _ = make()
    first, second, third = (End(limits, user()) for _ in range(3))
    foreign = End(limits, user(1001))
    assert first.share.admit(10 * MIB) and not second.share.admit(10 * MIB) and not second.reads
    assert not third.share.admit(7 * MIB) and not third.reads and foreign.share.admit(10 * MIB)
    first.share.arrived(10 * MIB + 100)
    assert not second.reads
    first.share.done(10 * MIB + 100)
    assert second.reads and third.reads and limits.bytes == 10 * MIB
    assert second.share.admit(10 * MIB)


def test_refused_retry_keeps_its_place_in_the_queue():
    limits, _ = make()
    first, second, third = (End(limits, user()) for _ in range(3))
    assert first.share.admit(8 * MIB) and first.share.admit(8 * MIB) and limits.bytes == 8 * MIB
    first.share.arrived(8 * MIB)
    assert first.share.admit(8 * MIB) and limits.bytes == 16 * MIB
    assert not second.share.admit(12 * MIB) and not third.share.admit(MIB)
    second.go_on = lambda: setattr(second, "reads", second.share.admit(12 * MIB))
    first.share.done(8 * MIB)
    assert not second.reads and not third.reads
    first.share.leave()
    assert second.reads and third.reads


def test_message_longer_than_the_share_is_taken_alone():
    limits, _ = make()
    assert End(limits, user()).share.admit(36 * MIB)


def test_trusted_peers_are_not_held_back():
    limits, clock = make()
    end = End(limits, ROOT)
    assert not end.share.limited
    end.frame, end.out, end.work = (b"frame", 10), (100, 100), (5000, 0)
    for _ in range(100):
        clock.now_s += 10
        limits.run_once()
    assert end.reads and not end.cut


def test_largest_user_is_disconnected_when_memory_is_full():
    limits, _ = make()
    ends = [End(limits, user(n)) for n in range(1000, 1008)]
    sizes = [8, 8, 8, 15, 8, 8, 8]
    for end, size in zip(ends, sizes, strict=False):
        assert end.share.admit(size * MIB)
    assert ends[7].share.admit(8 * MIB)
    assert [bool(end.cut) for end in ends] == [n == 3 for n in range(8)]
    assert all(word in ends[3].cut for word in ("uid 1003", "limits.memory_bytes in node.toml"))
    assert limits.bytes == 56 * MIB


def test_largest_user_itself_is_not_admitted():
    limits, _ = make(SMALL._replace(memory_bytes=20 * MIB))
    hog, other = End(limits, user()), End(limits, user(1001))
    assert hog.share.admit(12 * MIB) and other.share.admit(8 * MIB)
    hog.share.arrived(12 * MIB)
    assert not hog.share.admit(2 * MIB) and hog.cut and not other.cut and limits.bytes == 8 * MIB


def test_unsent_replies_count_toward_total_memory():
    limits, _ = make()
    ends = [End(limits, user(n)) for n in range(1000, 1004)]
    for n, end in enumerate(ends):
        end.out = ((15 + n) * MIB, 100 * MIB)
    limits.run_once()
    assert [bool(end.cut) for end in ends] == [False, False, False, True]
    limits.run_once()
    assert not ends[2].cut and limits.unsent == (15 + 16 + 17) * MIB
    for end in ends[:3]:
        end.share.leave()
    assert limits.unsent == limits.bytes == 0


def test_incomplete_message_ends_the_connection():
    limits, clock = make()
    slow, good = End(limits, user()), End(limits, user())
    before = met("message_s")
    for second in range(12):
        slow.frame = b"0123456789ab"[: second + 1], 2 * MIB  # one byte per second
        good.frame = b"%012d" % second, 2 * MIB
        limits.run_once()
        clock.now_s += LOOK_S
    assert "within 7 s" in slow.cut and "limits.message_s in node.toml" in slow.cut and not good.cut
    assert met("message_s") == before + 1 and len(good.share.account.shares) == 1


def test_message_is_not_timed_while_reading_is_paused():
    limits, clock = make()
    end = End(limits, user())
    for second in range(40):
        end.frame = None if second % 5 == 4 else (b"same", 0)
        limits.run_once()
        clock.now_s += LOOK_S
    assert not end.cut


def test_unread_replies_end_the_connection():
    limits, clock = make()
    never, slow, good = (End(limits, user()) for _ in range(3))
    for second in range(20):
        never.out = (2 * MIB, 3 * MIB)
        slow.out = (2 * MIB - second, 3 * MIB)
        good.out = (2 * MIB, (3 + second) * MIB)
        limits.run_once()
        clock.now_s += LOOK_S
    assert "2048 KiB of answers" in never.cut and slow.cut and not good.cut


def test_requests_in_flight_of_a_peer_are_bounded():
    limits, _ = make()
    busy, idle, foreign = End(limits, user()), End(limits, user()), End(limits, user(1001))
    busy.work, idle.work, foreign.work = (101, 0), (2, 0), (90, 0)
    before = met("requests_per_peer")
    limits.run_once()
    assert not busy.reads and idle.reads and foreign.reads and met("requests_per_peer") == before + 1
    busy.work = (60, 0)
    limits.run_once()
    assert not busy.reads
    busy.work = (40, 0)
    limits.run_once()
    assert busy.reads and not busy.cut


def test_refusals_are_logged_once(caplog):
    limits, clock = make()
    for _ in range(6):
        End(limits, user())
    for _ in range(50):
        with pytest.raises(Busy):
            End(limits, user())
    assert len(caplog.records) == 1
    clock.now_s += 11
    with pytest.raises(Busy):
        End(limits, user())
    assert len(caplog.records) == 2 and "49 times more" in caplog.records[1].getMessage()
