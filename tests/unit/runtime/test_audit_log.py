"""The audit log: content of a record, bounds, redacted secrets, and which requests are recorded."""

import asyncio
import json
import os
import stat

import pytest
from click.testing import CliRunner

from nvpool.cli.commands import audit as command
from nvpool.core.clock import ManualClock
from nvpool.core.config import parse
from nvpool.core.errors import AccessDenied, AlreadyExists, InUse, WrongShard
from nvpool.host.pool_directory import FORMAT_TEXT, PoolDirectory
from nvpool.rpc.peer_roles import Credentials, Peer
from nvpool.rpc.v1 import meta_pb2 as pb
from nvpool.rpc.v1 import wire_pb2 as wire
from nvpool.runtime import audit_log
from nvpool.runtime.audit_events import MetaAudit, actor_of, audited, settings_of
from nvpool.runtime.audit_log import Actor, AuditLog
from nvpool.security import audit_format
from nvpool.security.audit_format import read_audit

US = Actor(uid=os.geteuid(), pid=os.getpid())
UNKNOWN_PEER = Actor(address="10.0.0.9:4711")


@pytest.fixture
def path(tmp_path):
    return tmp_path / "audit.log"


@pytest.fixture
def log(path, tmp_path):
    made = AuditLog(path, tmp_path / "audit.lock", "nvpoold")
    yield made
    made.close()


def close_and_read(log, path):
    log.close()
    return list(read_audit(path))


def test_audit_record_has_actor_event_and_result(log, path):
    log.note("drive-add", US, {"path": "/mnt/nvme0", "force": False})
    client = Actor(member="client/ws1.0a1b2c3d", address="10.0.0.9:4711")
    log.note("volume-grant", client, {"inode": 7}, AccessDenied("not you"), refused=True)
    log.note("join", UNKNOWN_PEER, {"kind": "node"}, InUse("x"))
    first, second, third = close_and_read(log, path)
    assert (
        first["who"]["uid"] == os.geteuid() and first["who"]["pid"] == os.getpid() and first["who"]["command"]
    )
    assert (first["event"], first["result"], first["from"], first["process"]) == (
        "drive-add",
        "done",
        "unix",
        "nvpoold",
    )
    assert first["what"] == {"path": "/mnt/nvme0", "force": False} and first["time"].endswith("Z")
    assert second["who"] == {"member": "client/ws1.0a1b2c3d"} and second["from"] == "10.0.0.9:4711"
    assert (second["result"], second["error"]) == ("refused", "not you")
    assert third["who"] == {"unknown": True} and third["result"] == "failed"


def test_audit_log_is_unreadable_for_other_users(log, path):
    log.note("token", US, {})
    log.close()
    assert stat.S_IMODE(path.stat().st_mode) == 0o640


def test_audit_record_redacts_secrets(log, path):
    log.note(
        "x",
        US,
        {
            "token": "nvp1.AAAA",
            "etcd": {"client_key": "PEM", "urls": ["http://a"]},
            "Password": "p",
            "new_key": True,
        },
    )
    (record,) = close_and_read(log, path)
    assert record["what"] == {
        "token": "...",
        "etcd": {"client_key": "...", "urls": ["http://a"]},
        "Password": "...",
        "new_key": True,
    }


def test_audit_record_is_bounded_printable_ascii(log, path):
    log.note(
        "join",
        UNKNOWN_PEER,
        {"name": "\x1b[2J\n" + "ü" * 10_000, "more": {str(n): "x" * 300 for n in range(50)}},
    )
    (record,) = close_and_read(log, path)
    raw = path.read_bytes()
    assert (
        raw.isascii() and raw.count(b"\n") == 1 and len(raw) <= audit_format.LINE_MAX and b"\x1b" not in raw
    )
    assert record["what"] == {"left_out": "too long"}


def test_audit_log_is_rotated_and_bounded(path, tmp_path, monkeypatch):
    monkeypatch.setattr(audit_log, "BYTES_MAX", 2000)
    logs = [AuditLog(path, tmp_path / "audit.lock", name) for name in ("one", "two")]
    for number in range(200):
        logs[number % 2].note("x", US, {"number": number})
    for one in logs:
        one.close()
    files = sorted(file.name for file in tmp_path.iterdir())
    assert files == ["audit.lock", "audit.log", *(f"audit.log.{n}" for n in range(1, audit_format.KEPT + 1))]
    assert all(file.stat().st_size < 2600 for file in tmp_path.iterdir())
    kept = [record["what"]["number"] for record in read_audit(path)]
    assert {198, 199} & set(kept) and not {0, 1} & set(kept)
    for which in (0, 1):
        mine = [number for number in kept if number % 2 == which]
        assert mine == sorted(mine), "the oldest first"


def test_refusals_are_rate_limited(path, tmp_path):
    log = AuditLog(path, tmp_path / "audit.lock", "nvpoold", ManualClock())
    for _ in range(500):
        log.note("join", UNKNOWN_PEER, {}, AccessDenied("no"), refused=True)
    log.note("token", US, {})
    records = close_and_read(log, path)
    assert len(records) == audit_log.REFUSED_MAX + 1
    assert records[-1]["event"] == "token" and records[-1]["left_out"] == 500 - audit_log.REFUSED_MAX


def test_events_of_one_client_are_rate_limited(path, tmp_path, monkeypatch):
    monkeypatch.setattr(audit_log, "DONE_MAX", 5)
    clock = ManualClock()
    log = AuditLog(path, tmp_path / "audit.lock", "nvpoold", clock)
    one, other = (Actor(member, address="10.0.0.9:1") for member in ("client/a.1", "client/b.2"))
    node, user = Actor("node/a.1", address="10.0.0.8:1"), Actor(uid=os.geteuid() + 1, pid=7)
    for _ in range(20):
        for actor in (one, node, US, user):
            log.note("volume-set", actor, {})
    log.note("volume-set", other, {})
    clock.advance(1.0)
    log.note("trash-purge", one, {})
    records = close_and_read(log, path)

    def count(**who):
        return sum(who.items() <= record["who"].items() for record in records)

    assert count(member="client/a.1") == 6 and count(member="client/b.2") == 1
    assert count(member="node/a.1") == count(uid=US.uid) == 20 and count(uid=user.uid) == 5
    assert sum(record.get("left_out", 0) for record in records) == 30
    assert records[-1]["event"] == "trash-purge"


def test_unwritable_audit_log_warns_once(tmp_path, caplog):
    log = AuditLog(tmp_path / "none" / "audit.log", tmp_path / "audit.lock", "nvpoold")
    for _ in range(3):
        log.note("token", US, {})
    log.close()
    assert caplog.text.count("cannot be written") == 1


def test_read_audit_skips_broken_lines(path):
    path.write_text('{"event": "a"}\nnonsense\n[1]\n{"event": "b"')
    assert [record["event"] for record in read_audit(path)] == ["a"]


def test_audited_operation_records_its_result(log, path):
    async def work(error=None):
        if error is not None:
            raise error
        return 7

    assert asyncio.run(audited(log, "drive-add", US, {}, work())) == 7
    for error in (AccessDenied("no"), InUse("busy")):
        with pytest.raises(type(error)):
            asyncio.run(audited(log, "drive-add", US, {}, work(error)))
    assert [record["result"] for record in close_and_read(log, path)] == ["done", "refused", "failed"]


def test_actor_is_the_certificate_or_the_local_user():
    credentials = Credentials(1000, frozenset({1000}), 77)
    assert actor_of(Peer("x", "unix", True, credentials=credentials)) == Actor(
        uid=1000, pid=77, address="unix"
    )
    assert actor_of(Peer("x", "10.0.0.9:1", False, "client/a.1")) == Actor("client/a.1", address="10.0.0.9:1")
    assert actor_of(Peer("x", "10.0.0.9:1", False)) == Actor(address="10.0.0.9:1")


def test_changed_settings_are_recorded():
    assert settings_of(parse('[network]\nhost = "10.0.0.1"\n[log]\nlevel = "info"\n')) == {
        "network": {"host": "10.0.0.1"}
    }


class FakeCall:
    """A fake call, as a handler receives it."""

    def __init__(self, method, message):
        self.method, self.message = method, message.SerializeToString()
        self.peer = Peer("x", "10.0.0.9:1", False, "client/a.1")
        self.answered = []

    def reply(self, message=b"", payload=()):
        self.answered.append(bytes(message))

    def fail(self, error):
        self.answered.append(error)


REQUEST = pb.VolumeRequest
EVENTS = [
    (
        wire.META_CREATE,
        pb.CreateRequest(name=b"data", volume=pb.VolumePolicy(bytes_max=9)),
        "volume-create",
        {"volume": "data", "bytes_max": 9},
    ),
    (
        wire.META_VOLUME,
        REQUEST(inode=5, action=REQUEST.GRANT, grant=pb.VolumeGrant(client="client/b.2", write=True)),
        "volume-grant",
        {"inode": 5, "client": "client/b.2", "right": "rw"},
    ),
    (
        wire.META_VOLUME,
        REQUEST(inode=5, action=REQUEST.REVOKE, grant=pb.VolumeGrant(client="client/b.2")),
        "volume-revoke",
        {"inode": 5, "client": "client/b.2"},
    ),
    (wire.META_VOLUME, REQUEST(inode=5, action=REQUEST.SEAL), "volume-seal", {"inode": 5}),
    (
        wire.META_VOLUME,
        REQUEST(inode=5, action=REQUEST.DETACH, holder="pod-7"),
        "volume-detach",
        {"inode": 5, "holder": "pod-7"},
    ),
    (wire.META_VOLUME, REQUEST(inode=5, action=REQUEST.KEY), "volume-key", {"inode": 5}),
    (wire.META_VOLUME, REQUEST(inode=5, action=REQUEST.REWRAP), "volume-rewrap", {"inode": 5}),
    (wire.META_VOLUME, REQUEST(inode=5, action=REQUEST.REMOVE), "volume-remove", {"inode": 5}),
    (
        wire.META_VOLUME,
        REQUEST(inode=5, action=REQUEST.SET, bytes_max=3),
        "volume-set",
        {"inode": 5, "bytes_max": 3},
    ),
    (
        wire.META_TRASH,
        pb.TrashRequest(inode=5, action=pb.TrashRequest.PURGE),
        "trash-purge",
        {"inode": 5, "entry": 0},
    ),
    (wire.META_DUMP, pb.DumpRequest(), "dump", {}),
    (wire.META_FSCK, pb.FsckRequest(repair=True), "fsck-repair", {}),
    (
        wire.META_FSCK_CLIMB,
        pb.FsckClimbRequest(loose=7, parent=5),
        "fsck-move",
        {"inode": 7, "parent": 5},
    ),
]


@pytest.mark.parametrize("method, message, event, what", EVENTS, ids=[event for _, _, event, _ in EVENTS])
def test_volume_change_is_recorded(log, path, method, message, event, what):
    call = FakeCall(method, message)
    MetaAudit(log).watched(call).reply(b"")
    (record,) = close_and_read(log, path)
    assert (record["event"], record["what"], record["who"]) == (event, what, {"member": "client/a.1"})
    assert call.answered == [b""]


@pytest.mark.parametrize(
    "method, message",
    [
        (wire.META_CREATE, pb.CreateRequest(name=b"jjj")),
        (wire.META_VOLUME, REQUEST(inode=5)),
        (wire.META_VOLUME, REQUEST(inode=5, action=REQUEST.ATTACH)),
        (wire.META_TRASH, pb.TrashRequest(inode=5)),
        (wire.META_FSCK, pb.FsckRequest()),
        (wire.META_FSCK, pb.FsckRequest(repair=True, cursor=b"next")),
        (wire.META_FSCK_CLIMB, pb.FsckClimbRequest(inodes=bytes(8))),
        (wire.META_GETATTR, pb.GetAttrRequest(inode=5)),
    ],
)
def test_ordinary_request_is_not_recorded(log, method, message):
    call = FakeCall(method, message)
    assert MetaAudit(log).watched(call) is call


def test_record_names_the_volume_of_the_reply(log, path):
    call = MetaAudit(log).watched(FakeCall(wire.META_VOLUME, REQUEST(inode=5, action=REQUEST.SEAL)))
    call.reply(pb.VolumeReply(volume=pb.VolumeState(inode=5, name="data")).SerializeToString())
    assert close_and_read(log, path)[0]["what"] == {"inode": 5, "volume": "data"}


@pytest.mark.parametrize(
    "error, results",
    [(AccessDenied("no"), ["refused"]), (AlreadyExists("there"), ["failed"]), (WrongShard("elsewhere"), [])],
)
def test_failed_volume_change_is_recorded(log, path, error, results):
    call = FakeCall(wire.META_VOLUME, REQUEST(inode=5, action=REQUEST.SEAL))
    MetaAudit(log).watched(call).fail(error)
    assert call.answered == [error]
    assert [record["result"] for record in close_and_read(log, path)] == results


def test_audit_command_prints_the_log(tmp_path):
    directory = PoolDirectory(tmp_path)
    directory.log.mkdir()
    directory.format.write_text(FORMAT_TEXT)
    old = {
        "time": "2020-01-01T00:00:00.000Z",
        "event": "token",
        "result": "done",
        "who": {"unknown": True},
        "from": "x",
        "what": {"kind": "node"},
    }
    new = old | {
        "time": "2120-01-01T00:00:00.000Z",
        "event": "drive-add",
        "who": {"uid": 0, "user": "root", "pid": 7, "command": "nvpool"},
    }
    (directory.log / audit_format.FILE).write_text(json.dumps(old) + "\n" + json.dumps(new) + "\n")
    shown = CliRunner().invoke(command.audit, [str(tmp_path)]).output
    assert "token\tdone\tunknown\tx\tkind=node" in shown and "root (nvpool 7)" in shown
    for since in ("7d", "2050-01-01", "2050-01-01T00:00:00Z"):
        done = CliRunner().invoke(command.audit, [str(tmp_path), "--json", "--since", since])
        assert [one["event"] for one in json.loads(done.output)] == ["drive-add"], since
    assert (
        "write how long ago" in CliRunner().invoke(command.audit, [str(tmp_path), "--since", "soon"]).output
    )
