"""Lease recall after a pause of the client: its leases hold from the first reply, which does not wait for a recall."""

from __future__ import annotations

import asyncio

from nvpool.client.state.options import ClientOptions
from nvpool.core.clock import ManualClock
from nvpool.core.errors import NotFound
from nvpool.core.ids import ROOT_INODE
from nvpool.meta.server.service import MetaOptions
from nvpool.meta.sessions.lease_table import LeaseTable
from nvpool.rpc.messages import read_write_codec
from nvpool.rpc.v1 import meta_pb2
from tests.unit.client.state.test_small_file_cache import ME, Case, StandingClock, run, state_of

WATCH_S = 3.0
ONE, OTHER = 11, 12


class Asked:
    """A pending WATCH call."""

    def __init__(self) -> None:
        self.answer: meta_pb2.WatchReply | None = None
        self.error: BaseException | None = None

    def reply(self, message) -> None:
        assert self.answer is None
        self.answer = meta_pb2.WatchReply.FromString(bytes(message))

    def fail(self, error: BaseException) -> None:
        self.error = error

    @property
    def inodes(self) -> list[int]:
        return list(read_write_codec.unpack_inodes(self.answer.inodes))


class Shard:
    def __init__(self) -> None:
        self.clock = ManualClock()
        self.watches = LeaseTable(self.clock, 1, WATCH_S, 60.0)

    def ask(self, session: int, watch: int, seen: int = 0) -> Asked:
        call = Asked()
        self.watches.ask(call, meta_pb2.WatchRequest(session=session, watch=watch, seen=seen))
        return call


async def notified(call: Asked) -> list[int]:
    """Inodes that are notified in this iteration of the loop, or the next."""
    for _ in range(3):
        await asyncio.sleep(0)
    return call.inodes


def test_watch_waits_for_a_recall_while_leases_hold():
    async def main() -> None:
        shard = Shard()
        number, _ = shard.watches.begin(ONE)
        call = shard.ask(ONE, number)
        assert call.answer is None and shard.watches.issue_leases(ONE, (7,)) == {7}
        shard.clock.advance(WATCH_S / 2)
        shard.watches.recall(OTHER, (7,))
        assert await notified(call) == [7]

    run(main())


def test_watch_after_a_pause_is_answered_immediately():
    async def main() -> None:
        shard = Shard()
        number, _ = shard.watches.begin(ONE)
        shard.watches.begin(OTHER)
        assert shard.watches.issue_leases(ONE, (7,)) == {7}
        shard.clock.advance(WATCH_S + 1)
        assert shard.watches.issue_leases(ONE, (8,)) == (), "a client that does not watch gets no lease"
        first = shard.ask(ONE, number)
        assert first.answer.watch == number and first.answer.watch_ms == 1000 * WATCH_S and not first.inodes
        assert shard.watches.issue_leases(ONE, (8,)) == {8}
        second = shard.ask(ONE, number, first.answer.number)
        assert second.answer is None, "now the lease holds, and no recall is pending"
        done = asyncio.ensure_future(shard.watches.recall(OTHER, (8,))())
        assert await notified(second) == [8] and not done.done()
        shard.ask(ONE, number, second.answer.number)
        await done

    run(main())


def test_changes_during_the_pause_are_in_the_first_reply():
    async def main() -> None:
        shard = Shard()
        number, _ = shard.watches.begin(ONE)
        shard.watches.begin(OTHER)
        shard.watches.issue_leases(ONE, (7, 8))
        shard.clock.advance(WATCH_S + 1)
        assert shard.watches.recall(OTHER, (7,)) is None, "a client without valid leases is not waited for"
        first = shard.ask(ONE, number)
        assert first.inodes == [7]
        # from now on the lease on the other inode holds again, and the client is notified before each change
        done = asyncio.ensure_future(shard.watches.recall(OTHER, (8,))())
        second = shard.ask(ONE, number, first.answer.number)
        assert await notified(second) == [8] and not done.done()
        shard.ask(ONE, number, second.answer.number)
        await done

    run(main())


def test_lost_reply_after_a_pause_is_repeated():
    async def main() -> None:
        shard = Shard()
        number, _ = shard.watches.begin(ONE)
        shard.watches.begin(OTHER)
        shard.watches.issue_leases(ONE, (7,))
        shard.clock.advance(WATCH_S + 1)
        shard.watches.recall(OTHER, (7,))
        assert shard.ask(ONE, number).inodes == [7]
        assert shard.ask(ONE, number).inodes == [7], "the client has not acknowledged it"

    run(main())


def test_session_that_leaves_is_not_waited_for():
    async def main() -> None:
        shard = Shard()
        number, _ = shard.watches.begin(ONE)
        shard.watches.begin(OTHER)
        assert shard.watches.issue_leases(ONE, (7, 8)) == {7, 8}
        waiting = asyncio.ensure_future(shard.watches.recall(OTHER, (7,))())
        left = Asked()
        shard.watches.ask(left, meta_pb2.WatchRequest(session=ONE, watch=number, leaves=True))
        assert left.answer.watch != number, "all its leases have ended"
        await waiting
        assert shard.watches.recall(OTHER, (8,)) is None
        assert shard.watches.issue_leases(ONE, (9,)) == ()
        first = shard.ask(ONE, left.answer.watch, left.answer.number)
        assert first.answer.watch == left.answer.watch and shard.watches.issue_leases(ONE, (9,)) == {9}

    run(main())


def test_idle_client_releases_its_leases_at_the_shard():
    async def main() -> None:
        async with Case(
            ClientOptions(deadline_s=10.0, release_s=0.01), MetaOptions(watch_s=0.9), clock=StandingClock()
        ) as case:
            state, watches = state_of(case.one), case.pool.meta.parts.watches
            await case.one.mkdir(ROOT_INODE, b"there", 0o755, ME)
            await case.one.lookup(ROOT_INODE, b"there")
            await asyncio.sleep(0.5)
            case.pool.clock.ahead_s += 61.0
            await asyncio.wait([state.watching], timeout=30)
            assert state.watching.done()
            assert watches.by_session[state.session].until_s == 0.0, (
                "a change of another client does not wait"
            )
            await case.one.getattr(ROOT_INODE)
            assert not state.watching.done(), "the next request starts a watch"

    run(main())


def test_names_created_after_a_pause_are_not_looked_up():
    async def main() -> None:
        async with Case(
            ClientOptions(deadline_s=10.0, release_s=0.01), MetaOptions(watch_s=6.0), clock=StandingClock()
        ) as case:
            vfs, clock, state = case.one, case.pool.clock, state_of(case.one)
            state.watching.cancel()  # as after a minute without use of leases
            await asyncio.wait([state.watching])
            clock.ahead_s += 10.0
            parent = (await vfs.mkdir(ROOT_INODE, b"new", 0o755, ME)).inode
            for number in range(50):
                name, sent_before = b"%d" % number, dict(case.pool.sent)
                try:
                    await vfs.lookup(parent, name)
                    raise AssertionError("it was not created")
                except NotFound:
                    pass
                asked = {
                    method for method, count in case.pool.sent.items() if count > sent_before.get(method, 0)
                }
                assert number < 2 or not asked & {"META_LOOKUP", "META_GETATTR"}, number
                await vfs.mknod(parent, name, 0o644, 0, ME)

    run(main())


def delegated(shard: Shard) -> Asked:
    """The waiting WATCH of a session to which file 7 is delegated."""
    number, _ = shard.watches.begin(ONE)
    shard.watches.begin(OTHER)
    assert shard.watches.delegate(ONE, 7) and shard.watches.issue_lease(ONE, 7)
    return shard.ask(ONE, number)


def test_reports_of_the_delegate_do_not_wait_for_its_own_acknowledgement():
    async def main() -> None:
        shard = Shard()
        call = delegated(shard)
        wait = shard.watches.recall_delegation(OTHER, 7, 0.0)
        assert wait is not None and await notified(call) == [7]
        assert shard.watches.recall(ONE, (7,)) is None
        shard.watches.end_delegation(7)  # its first report
        assert shard.watches.recall(ONE, (7,)) is None, "there may be a second one before it acknowledges"
        shard.ask(ONE, call.answer.watch, call.answer.number)
        await asyncio.wait_for(wait(), 1.0)
        assert not shard.watches.delegated and shard.watches.recall_delegation(OTHER, 7, 0.0) is None
        assert shard.watches.issue_lease(OTHER, 7), "nothing was changed, so leases are given again"

    run(main())


def test_silent_delegate_is_waited_for_until_its_watch_ends():
    async def main() -> None:
        shard = Shard()
        delegated(shard)
        assert shard.watches.recall_delegation(ONE, 7, 0.0) is None
        assert shard.watches.recall_delegation(OTHER, 7, 0.0) is not None
        shard.clock.advance(WATCH_S + 1)
        shard.watches.end(ONE)
        assert shard.watches.recall_delegation(OTHER, 7, 0.0) is None and not shard.watches.delegated

    run(main())


def test_young_empty_files_count_as_delegated_after_a_restart():
    async def main() -> None:
        shard = Shard()
        shard.watches.after_restart([ONE, OTHER])
        assert shard.watches.recall_delegation(OTHER, 7, 0.0) is not None
        assert shard.watches.recall_delegation(OTHER, 7, 61.0) is None, "older than a lease"
        for session in (ONE, OTHER):
            number, _ = shard.watches.begin(session)
            shard.ask(session, number)
        assert shard.watches.recall_delegation(OTHER, 7, 0.0) is None

    run(main())
