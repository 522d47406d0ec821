"""A client against a real shard and fault-injecting stores: batches, retries, grants, sessions, a second client."""

from __future__ import annotations

import asyncio
import os

import pytest
from msgspec.structs import replace

from nvpool.client.rpc.backoff import at_the_deadline, reason_of
from nvpool.client.state.options import ClientOptions
from nvpool.client.state.pool_map_cache import PoolView
from nvpool.client.state.vfs_types import Caller
from nvpool.client.vfs import attributes
from nvpool.core.errors import (
    Busy,
    ChecksumMismatch,
    DeadlineExceeded,
    Disconnected,
    NoAttribute,
    NotFound,
    StaleEpoch,
    StaleGrant,
    StaleSession,
    Unavailable,
)
from nvpool.core.ids import ROOT_INODE
from nvpool.core.units import KIB, MIB
from nvpool.meta.server.service import MetaOptions
from nvpool.poolmap.model import changed, encode_map
from nvpool.rpc.api import Reply
from nvpool.rpc.v1 import meta_pb2, pool_pb2, wire_pb2
from nvpool.testing.fakes.in_process_pool import InProcessPool
from nvpool.testing.fakes.store import PlainStore

ME = Caller(1000, 1000)
FAST = ClientOptions(deadline_s=5.0, fresh_s=0.0, attr_s=0.0, release_s=0.01)


class Case:
    """A pool with in-memory stores whose chunks survive a restart, and a first client."""

    def __init__(self, options: ClientOptions = FAST, **pool_options):
        self.chunks: dict[int, dict] = {}
        self.options = options
        self.pool = InProcessPool(make_store=self.make, **pool_options)

    async def make(self, pool: InProcessPool, target: int) -> PlainStore:
        return PlainStore(target, pool.grant_secret, chunks=self.chunks.setdefault(target, {}))

    async def __aenter__(self) -> Case:
        await self.pool.__aenter__()
        self.client = await self.pool.client("first", self.options)
        self.vfs = self.client.vfs
        return self

    async def __aexit__(self, *failure) -> None:
        await self.pool.__aexit__(*failure)

    @property
    def stores(self) -> list[PlainStore]:
        return list(self.pool.stores.values())

    def chunks_in_flight(self) -> int:
        return sum(lane.in_flight for lane in self.vfs.chunks.lanes.values())

    async def file(self, content: bytes = b"", name: bytes = b"file", flags: int = os.O_RDWR):
        handle = (await self.vfs.create(ROOT_INODE, name, 0o644, flags, ME))[1]
        if content:
            await self.vfs.write(handle, 0, content)
            await self.vfs.flush(handle)
        return handle


def run(work) -> None:
    asyncio.run(asyncio.wait_for(work, 120))


def test_concurrent_reads_of_a_target_share_one_message():
    async def main() -> None:
        async with Case() as case:
            content = os.urandom(256 * KIB)
            handle = await case.file(content)
            for store in case.stores:
                store.reads_per_call.clear()
            found = await asyncio.gather(
                *[case.vfs.read(handle, at, 4096) for at in range(0, 256 * KIB, 4096)]
            )
            assert b"".join(found) == content
            assert sum(len(store.reads_per_call) for store in case.stores) <= 3

    run(main())


@pytest.mark.parametrize(
    ("count", "each", "messages"),
    [(7, 4 * KIB, [7]), (64, 4 * KIB, [32, 32]), (7, 128 * KIB, [4, 3]), (16, 64 * KIB, [8, 8])],
)
def test_held_reads_are_batched_when_they_are_sent(count, each, messages):
    async def main() -> None:
        async with Case() as case:
            content = os.urandom(MIB)
            handle = await case.file(content)
            for store in case.stores:
                store.reads_per_call.clear()
            places = [number * MIB // count // each * each for number in range(count - 1, -1, -1)]
            case.vfs.hold_reads()
            steps = [case.vfs.read(handle, place, each) for place in places]
            futures = [step.send(None) for step in steps]  # as a FUSE engine drives them
            for future in futures:
                future._asyncio_future_blocking = False
            assert not case.chunks_in_flight()
            case.vfs.send_reads()
            await asyncio.wait(futures)
            for step, place, future in zip(steps, places, futures, strict=True):
                assert bytes(future.result()) == content[place : place + each]
                step.close()
            assert [calls for store in case.stores if (calls := list(store.reads_per_call))] == [messages]

    run(main())


def test_read_many_is_one_message_for_each_target():
    async def main() -> None:
        async with Case() as case:
            content = os.urandom(8 * MIB + 100)
            handle = await case.file(content)
            for store in case.stores:
                store.reads_per_call.clear()
            reads = [(handle, at * 37_000, 5000) for at in range(100)]
            reads += [(handle, len(content) - 60, 100), (handle, 1 << 30, 8)]
            into = bytearray(sum(length for _, _, length in reads))
            lengths = await case.vfs.read_many(reads, memoryview(into))
            place = 0
            for (_, offset, asked), length in zip(reads, lengths, strict=True):
                assert into[place : place + length] == content[offset : offset + asked]
                place += asked
            assert lengths[-2:] == [60, 0]
            across = sum(1 for _, offset, length in reads if offset >> 20 != (offset + length - 1) >> 20)
            assert sum(len(store.reads_per_call) for store in case.stores) <= 2 + 2 * across

    run(main())


def test_damaged_block_is_read_again_and_never_returned():
    async def main() -> None:
        async with Case() as case:
            handle = await case.file(b"good" * 3000)
            spoilt = []

            def once(payload: bytearray) -> None:
                if not spoilt:
                    payload[-1] ^= 1
                    spoilt.append(True)

            def always(payload: bytearray) -> None:
                payload[-1] ^= 1

            for store in case.stores:
                store.spoil = once
            assert bytes(await case.vfs.read(handle, 0, 12_000)) == b"good" * 3000
            for store in case.stores:
                store.spoil = always
            with pytest.raises(ChecksumMismatch):
                await case.vfs.read(handle, 0, 12_000)
            into = memoryview(bytearray(8192))
            with pytest.raises(ChecksumMismatch):
                await case.vfs.read_many([(handle, 0, 4096), (handle, 4096, 4096)], into)

    run(main())


def test_write_with_a_lost_reply_is_replayed():
    async def main() -> None:
        async with Case() as case:
            handle = await case.file()
            for store in case.stores:
                store.lose_answer = 2
            await case.vfs.write(handle, 0, b"once")
            await case.vfs.flush(handle)
            writes = sum(store.calls.count(wire_pb2.DATA_WRITE) for store in case.stores)
            assert writes == 3 and sum(len(store.done) for store in case.stores) == 1
            assert bytes(await case.vfs.read(handle, 0, 10)) == b"once"

    run(main())


def test_restart_of_a_store_only_delays_calls():
    async def main() -> None:
        async with Case() as case:
            handle = await case.file(os.urandom(5 * MIB))
            before = bytes(await case.vfs.read(handle, 0, 5 * MIB))
            for target in (1, 2):
                await case.pool.stop_store(target)
            reading = asyncio.create_task(case.vfs.read(handle, 1000, 3 * MIB))
            await case.vfs.write(handle, 5 * MIB, b"more")
            writing = asyncio.create_task(case.vfs.fsync(handle, False))
            into = memoryview(bytearray(8192))
            many = asyncio.create_task(case.vfs.read_many([(handle, 0, 4096), (handle, MIB, 4096)], into))
            await asyncio.sleep(0.1)
            assert not reading.done() and not writing.done() and not many.done()
            for target in (1, 2):
                await case.pool.start_store(target)
            assert bytes(await reading) == before[1000 : 1000 + 3 * MIB]
            assert await many == [4096, 4096]
            await writing
            assert bytes(await case.vfs.read(handle, 5 * MIB, 10)) == b"more"

    run(main())


def test_unavailable_store_fails_calls_at_the_deadline():
    async def main() -> None:
        async with Case(FAST._replace(deadline_s=0.3)) as case:
            handle = await case.file(b"stored")
            for target in (1, 2):
                await case.pool.stop_store(target)
            with pytest.raises(Unavailable):
                await case.vfs.read(handle, 0, 6)
            with pytest.raises(Unavailable):
                await case.vfs.read_many([(handle, 0, 6)], memoryview(bytearray(6)))
            await case.vfs.write(handle, 0, b"lost")
            with pytest.raises(Unavailable):
                await case.vfs.fsync(handle, False)
            await case.vfs.flush(handle)
            for target in (1, 2):
                await case.pool.start_store(target)
            assert bytes(await case.vfs.read(handle, 0, 6)) == b"stored"

    run(main())


@pytest.mark.parametrize("question", [False, True])
def test_last_refusal_of_a_shard_is_in_the_error(question):
    async def main() -> None:
        async with Case(FAST._replace(deadline_s=0.5)) as case:
            await case.vfs.mkdir(ROOT_INODE, b"before", 0o755, ME)
            handle = case.pool.meta.handle
            for listener in case.pool.listeners.values():
                if listener.handler == handle:
                    for served in listener.connections:
                        served.handler = lambda call: call.fail(Busy("shard 1 has no room just now"))
            with pytest.raises(Unavailable, match="shard 1 has no room just now"):
                await (
                    case.vfs.lookup(ROOT_INODE, b"x")
                    if question
                    else case.vfs.mkdir(ROOT_INODE, b"d", 0o755, ME)
                )
            await case.pool.stop_shard()
            with pytest.raises(Unavailable, match="there is no such listener"):
                await (
                    case.vfs.lookup(ROOT_INODE, b"x")
                    if question
                    else case.vfs.mkdir(ROOT_INODE, b"d", 0o755, ME)
                )
            await case.pool.start_shard()

    run(main())


def test_size_is_reported_for_a_write_after_a_truncation():
    async def main() -> None:
        async with Case() as case:
            handle = await case.file(b"x" * 10_000)
            other = await case.pool.client("other", FAST)
            await other.vfs.setattr(handle.inode, size=100, caller=ME)
            refused = []

            def refuse(call):
                if call.method == wire_pb2.DATA_WRITE and not refused:
                    refused.append(call)
                    raise StaleGrant  # with the new grant the client learns of the truncation

            for store in case.stores:
                store.fault = refuse
            await case.vfs.write(handle, 50_000, b"tail")
            await case.vfs.fsync(handle, False)
            assert refused
            assert (await other.vfs.look(ROOT_INODE, b"file")).size == 50_004

    run(main())


def test_uncertain_session_open_is_repeated():
    async def main() -> None:
        async with Case() as case:
            asked = []
            listener = next(
                listener
                for listener in case.pool.listeners.values()
                if listener.handler == case.pool.meta.handle
            )

            def handle(call, before=listener.handler) -> None:
                asked.append(call.method)
                if asked == [wire_pb2.META_OPEN_SESSION]:
                    call.fail(Unavailable("the shard changes its primary", may_be_applied=True))
                else:
                    before(call)

            listener.handler = handle
            await case.vfs.mkdir(ROOT_INODE, b"d", 0o755, ME)
            assert asked.count(wire_pb2.META_OPEN_SESSION) == 2

    run(main())


def test_last_refusal_of_a_store_is_in_the_error():
    async def main() -> None:
        async with Case(FAST._replace(deadline_s=0.5)) as case:
            handle = await case.file(b"stored")

            def refuse(call):
                raise Busy("target has no room just now")

            for store in case.stores:
                store.fault = refuse
            with pytest.raises(Unavailable, match="target has no room just now"):
                await case.vfs.read(handle, 0, 6)
            await case.vfs.write(handle, 0, b"lost")
            with pytest.raises(Unavailable, match="target has no room just now"):
                await case.vfs.fsync(handle, False)
            for store in case.stores:
                store.fault = None

    run(main())


def test_deadline_error_has_the_reason_of_the_retries():
    lost, late = (
        Disconnected("lost on the way"),
        DeadlineExceeded("no connection within the deadline", may_be_applied=False),
    )
    reason = reason_of(late, reason_of(late, reason_of(lost, None)))
    final = at_the_deadline(late, reason)
    assert (type(final), str(final), final.may_be_applied) == (
        DeadlineExceeded,
        "no connection within the deadline; last: lost on the way",
        True,
    )
    refused = StaleGrant("an old grant")
    final = at_the_deadline(refused, reason_of(refused, lost))
    assert (type(final), str(final), final.may_be_applied) == (DeadlineExceeded, "an old grant", False)
    assert at_the_deadline(refused, refused, uncertain=True).may_be_applied
    assert reason_of(late, None) is late


def test_closing_a_client_is_bounded_in_time():
    async def main() -> None:
        async with Case() as case:
            handle = await case.file(b"stored")
            for target in (1, 2):
                await case.pool.stop_store(target)
            await case.pool.stop_shard()
            await case.vfs.write(handle, 0, b"lost")
            await asyncio.wait_for(case.client.close(0.2), 120)
            await case.pool.start_shard()

    run(main())


@pytest.mark.parametrize("error", [StaleGrant, StaleEpoch])
def test_stale_grant_or_map_is_refreshed_and_retried(error):
    async def main() -> None:
        async with Case() as case:
            handle = await case.file(b"x" * 5000)
            left = [3]

            def fault(call):
                if left[0] and call.method in (wire_pb2.DATA_READ, wire_pb2.DATA_WRITE):
                    left[0] -= 1
                    raise error()

            for store in case.stores:
                store.fault = fault
            asked = case.vfs.meta.counters["questions"]
            assert bytes(await case.vfs.read(handle, 0, 5000)) == b"x" * 5000
            if error is StaleGrant:
                assert case.vfs.meta.counters["questions"] > asked
            left[0] = 2
            await case.vfs.write(handle, 0, b"y")
            await case.vfs.flush(handle)
            assert bytes(await case.vfs.read(handle, 0, 2)) == b"yx"

    run(main())


async def until(holds) -> None:
    async with asyncio.timeout(60):
        while not holds():  # noqa: ASYNC110 - renewals have no event
            await asyncio.sleep(0.01)


def test_grants_are_renewed_before_they_expire():
    async def main() -> None:
        async with Case(meta_options=MetaOptions(grant_s=0.2)) as case:
            handle = await case.file(b"x" * 100)
            first = handle.file.grant
            await asyncio.sleep(0.15)
            await case.vfs.read(handle, 0, 1)
            await case.vfs.run_once()
            await until(lambda: handle.file.grant != first)

    run(main())


def test_restart_of_a_shard_only_delays_and_reopens_files():
    async def main() -> None:
        async with Case(meta_options=MetaOptions(session_lease_s=3.0, linger_s=0.0)) as case:
            handle = await case.file(b"still here")
            await case.vfs.unlink(ROOT_INODE, b"file", ME)
            await case.pool.stop_shard()
            making = asyncio.create_task(case.vfs.mkdir(ROOT_INODE, b"d", 0o755, ME))
            await asyncio.sleep(0.1)
            assert not making.done()
            await case.pool.start_shard()
            await making
            await asyncio.sleep(
                3.5
            )  # longer than the lease: an orphan that no session names would be collected
            await case.pool.meta.run_once()
            assert (await case.vfs.getattr(handle.inode)).links == 0
            assert bytes(await case.vfs.read(handle, 0, 20)) == b"still here"
            await case.vfs.release(handle)
            assert case.vfs.meta.counters["sessions"] == 1

    run(main())


def test_change_with_a_lost_reply_is_made_once():
    async def main() -> None:
        async with Case() as case:
            await case.vfs.mkdir(ROOT_INODE, b"before", 0o755, ME)
            handle = case.pool.meta.handle

            class Losing:
                def __init__(self, call):
                    self._call = call

                def __getattr__(self, name):
                    return getattr(self._call, name)

                def reply(self, message=b"", payload=()):
                    self._call.fail(Disconnected("lost on the way"))

            lost = []

            def losing(call):
                if call.method == wire_pb2.META_CREATE and not lost:
                    lost.append(call)
                    call = Losing(call)
                handle(call)

            for listener in case.pool.listeners.values():
                if listener.handler == handle:
                    for served in listener.connections:
                        served.handler = losing
            attr = await case.vfs.mkdir(ROOT_INODE, b"d", 0o755, ME)
            assert lost and (await case.vfs.lookup(ROOT_INODE, b"d")).inode == attr.inode

    run(main())


def test_ended_session_is_replaced_and_files_stay_usable():
    async def main() -> None:
        async with Case() as case:
            handle = await case.file(b"hello")
            state = next(iter(case.vfs.meta.shards.values()))
            old = state.session
            service = case.pool.meta
            service.session_handlers.end_session(
                service.parts.sessions.get(old), service.parts.clock.boottime_s()
            )
            await asyncio.sleep(0.05)
            await case.vfs.mkdir(ROOT_INODE, b"d", 0o755, ME)
            assert state.session != old
            await case.vfs.write(handle, 5, b" again")
            await case.vfs.flush(handle)
            assert bytes(await case.vfs.read(handle, 0, 20)) == b"hello again"
            assert service.parts.sessions.get(state.session).opens == {handle.inode: 1}

    run(main())


@pytest.mark.parametrize(
    "pieces", [[(0, 8 * MIB)], [(0, 64 * KIB), (64 * KIB, 64 * KIB)], [(100, 50), (4 * MIB, 10)]]
)
def test_cancelled_read_does_not_write_to_its_buffer(pieces):
    async def main() -> None:
        async with Case() as case:
            handle = await case.file(os.urandom(8 * MIB))
            for store in case.stores:
                store.fault = lambda call: 0.05 if call.method == wire_pb2.DATA_READ else None
            memory = bytearray(8 * MIB)
            reading = asyncio.create_task(
                case.vfs.read_many([(handle, *piece) for piece in pieces], memoryview(memory))
            )
            await asyncio.sleep(0.02)
            reading.cancel()
            await asyncio.gather(reading, return_exceptions=True)
            await asyncio.sleep(0)
            memory[:] = b"!" * len(memory)
            await until(lambda: all(lane.in_flight == 0 for lane in case.vfs.chunks.lanes.values()))
            await asyncio.sleep(0.2)
            assert memory == b"!" * len(memory)

    run(main())


def test_pending_reads_end_when_the_client_is_closed():
    async def main() -> None:
        async with Case(FAST._replace(deadline_s=60.0)) as case:
            handle = await case.file(os.urandom(3 * MIB))
            for target in list(case.pool.stores):
                await case.pool.stop_store(target)
            reading = [
                asyncio.create_task(case.vfs.read(handle, 0, 100)),
                asyncio.create_task(case.vfs.read(handle, 0, 3 * MIB)),
                asyncio.create_task(case.vfs.read_many([(handle, 0, 100)], memoryview(bytearray(100)))),
            ]
            await asyncio.sleep(0.05)
            await case.client.close(0.2)
            done, pending = await asyncio.wait(reading, timeout=30)  # half of the deadline
            assert not pending and all(task.exception() for task in done)

    run(main())


def test_open_files_are_named_until_the_shard_replies():
    async def main() -> None:
        async with Case(meta_options=MetaOptions(session_lease_s=3.0)) as case:
            handle = await case.file(b"still here")
            meta = case.vfs.meta
            state = next(iter(meta.shards.values()))
            send = meta.send
            lost = []

            async def losing(of, method, request, deadline_s):
                if method == wire_pb2.META_RENEW_SESSION and request.opened and len(lost) < most:
                    lost.append(request)
                    raise Disconnected("lost on the way", may_be_applied=False)
                return await send(of, method, request, deadline_s)

            meta.send = losing
            most = 2
            await case.pool.stop_shard()
            await case.pool.start_shard()
            await until(
                lambda: (
                    len(lost) == 2
                    and case.pool.meta.parts.sessions.get(state.session).opens == {handle.inode: 1}
                )
            )
            most = 3
            service = case.pool.meta
            service.session_handlers.end_session(
                service.parts.sessions.get(state.session), service.parts.clock.boottime_s()
            )
            await case.vfs.mkdir(ROOT_INODE, b"d", 0o755, ME)
            await until(
                lambda: (
                    len(lost) == 3 and service.parts.sessions.get(state.session).opens == {handle.inode: 1}
                )
            )

    run(main())


@pytest.mark.parametrize("asked", [wire_pb2.META_RENEW_SESSION, wire_pb2.META_OPEN_SESSION])
def test_waiting_for_a_shared_request_respects_the_deadline(asked):
    async def main() -> None:
        async with Case() as case:
            await case.vfs.mkdir(ROOT_INODE, b"d", 0o755, ME)
            meta, held = case.vfs.meta, []
            state = meta.shard_session(ROOT_INODE)
            before = case.pool.meta.routes[asked]
            case.pool.meta.routes[asked] = held.append
            state.met = None
            if asked == wire_pb2.META_OPEN_SESSION:
                meta.session_lost(state, state.session)
            asking = asyncio.create_task(case.vfs.mkdir(ROOT_INODE, b"e", 0o755, ME))
            await until(lambda: held)
            soon_s = case.pool.clock.boottime_s() + 0.05
            with pytest.raises(DeadlineExceeded) as refused:
                if state.session:
                    await meta.send(
                        state, wire_pb2.META_RELEASE, meta_pb2.ReleaseRequest(session=state.session), soon_s
                    )
                else:
                    await meta.ensure_session(state, soon_s)
            assert not refused.value.may_be_applied
            assert not (state.meeting if state.session else state.opening).done()
            case.pool.meta.routes[asked] = before
            for call in held:
                before(call)
            await asking

    run(main())


def test_request_finds_a_moved_shard_without_a_watch():
    async def main() -> None:
        async with Case(FAST._replace(leases=False), serves_map=True) as case:
            pool = case.pool
            await case.vfs.mkdir(ROOT_INODE, b"d", 0o755, ME)
            await pool.stop_shard()
            name = pool.endpoints
            pool.endpoints = lambda role, number: name(role, number) + ("-moved" if role == "meta" else "")
            at = pool.new_shard(1).endpoints
            await pool.change_map(
                lambda now: changed(
                    now,
                    shards=tuple(
                        replace(shard, endpoints=at) if shard.id == 1 else shard for shard in now.shards
                    ),
                )
            )
            await pool.start_shard()
            request = meta_pb2.MetaStatusRequest()
            reply = await case.vfs.meta.ask_shard(1, wire_pb2.META_STATUS, request, meta_pb2.MetaStatusReply)
            assert reply.state == "serving" and case.vfs.meta.view.map.epoch == pool.pool_map.epoch

    run(main())


def test_late_refusal_of_an_old_session_is_ignored():
    async def main() -> None:
        async with Case() as case:
            await case.vfs.mkdir(ROOT_INODE, b"d", 0o755, ME)
            meta = case.vfs.meta
            state = next(iter(meta.shards.values()))
            service = case.pool.meta
            send = meta.send
            held = asyncio.Event()

            async def slow(of, method, request, deadline_s):
                try:
                    return await send(of, method, request, deadline_s)
                except StaleSession:
                    if request.DESCRIPTOR.name == "GetAttrRequest":
                        await held.wait()
                    raise

            meta.send = slow
            service.session_handlers.end_session(service.parts.sessions.get(state.session), 0.0)
            asking = asyncio.create_task(case.vfs.getattr(ROOT_INODE))
            await asyncio.sleep(0.01)
            await case.vfs.mkdir(ROOT_INODE, b"e", 0o755, ME)
            newer = state.session
            held.set()
            await asking
            assert state.session == newer and meta.counters["sessions"] == 2

    run(main())


def test_end_of_a_growing_file_is_not_served_from_read_ahead():
    async def main() -> None:
        async with Case() as case:
            content = os.urandom(MIB + 256 * KIB + 1000)
            writer = await case.file(content)
            other = (await case.pool.client("second", FAST)).vfs
            reader = await other.open(writer.inode, os.O_RDONLY, ME)
            at = 0
            while len(part := await other.read(reader, at, 64 * KIB)):
                at += len(part)
            assert other.reader.counters["ahead_hits"]
            await case.vfs.write(writer, len(content), b"a new line")
            await case.vfs.flush(writer)
            assert bytes(await other.read(reader, at, 64 * KIB)) == b"a new line"

    run(main())


def test_closed_handles_are_released_in_batches():
    async def main() -> None:
        async with Case() as case:
            handles = [await case.file(b"x", b"f%d" % number) for number in range(20)]
            session = next(iter(case.pool.meta.parts.sessions.by_number.values()))
            assert len(session.opens) == 20
            for handle in handles:
                await case.vfs.release(handle)
            await until(lambda: not session.opens and not case.vfs.cache.open)

    run(main())


def test_another_client_sees_the_bytes_after_a_close():
    async def main() -> None:
        async with Case() as case:
            other = (await case.pool.client("second", FAST)).vfs
            handle = await case.file(b"one")
            seen = await other.open((await other.lookup(ROOT_INODE, b"file")).inode, os.O_RDWR, ME)
            assert bytes(await other.read(seen, 0, 10)) == b"one"
            await case.vfs.write(handle, 3, b" two")
            await case.vfs.flush(handle)
            assert bytes(await other.read(seen, 0, 10)) == b"one two"
            await other.setattr(seen.inode, size=4, caller=ME)
            await case.vfs.write(handle, 4, b"2")
            await case.vfs.flush(handle)
            assert bytes(await case.vfs.read(handle, 0, 10)) == b"one 2"
            assert (await other.getattr(seen.inode)).size == 5

    run(main())


def test_appends_of_two_clients_never_overlap():
    async def main() -> None:
        async with Case() as case:
            other = (await case.pool.client("second", FAST)).vfs
            await case.file(name=b"log")
            inode = (await case.vfs.lookup(ROOT_INODE, b"log")).inode

            async def append(vfs, mark: bytes) -> None:
                handle = await vfs.open(inode, os.O_WRONLY | os.O_APPEND, ME)
                for _ in range(30):
                    await vfs.write(handle, 0, mark * 100)
                await vfs.flush(handle)

            await asyncio.gather(append(case.vfs, b"a"), append(other, b"b"))
            handle = await case.vfs.open(inode, os.O_RDONLY, ME)
            content = bytes(await case.vfs.read(handle, 0, 10_000))
            records = [content[at : at + 100] for at in range(0, 6000, 100)]
            assert sorted(records) == [b"a" * 100] * 30 + [b"b" * 100] * 30

    run(main())


def test_attributes_known_to_be_missing_need_no_request():
    async def main() -> None:
        async with Case(FAST._replace(attr_s=60.0)) as case:
            handle = await case.file(b"x")
            asked = case.vfs.meta.counters["questions"]
            with pytest.raises(NoAttribute):
                await case.vfs.getxattr(handle.inode, b"security.capability")
            assert case.vfs.meta.counters["questions"] == asked
            await case.vfs.setxattr(handle.inode, b"user.a", b"1", 0, ME)
            assert await case.vfs.getxattr(handle.inode, b"user.a") == b"1"
            assert await case.vfs.listxattr(handle.inode) == [b"user.a"]

    run(main())


def test_explicit_mtime_survives_the_close():
    async def main() -> None:
        async with Case() as case:
            handle = await case.file()
            await case.vfs.write(handle, 0, b"content")
            await case.vfs.setattr(handle.inode, mtime_ns=123, atime_ns=456, caller=ME)
            await case.vfs.flush(handle)
            await case.vfs.release(handle)
            assert (await case.vfs.getattr(handle.inode)).mtime_ns == 123

    run(main())


def test_stat_is_the_same_before_and_after_the_close():
    async def main() -> None:
        async with Case() as case:
            handle = await case.file()
            await case.vfs.write(handle, 0, b"content")
            before = await case.vfs.getattr(handle.inode)
            await case.vfs.flush(handle)
            after = await case.vfs.getattr(handle.inode)
            assert before == after and before.size == 7 and before.mtime_ns

    run(main())


def test_file_is_flushed_before_it_replaces_another():
    async def main() -> None:
        async with Case() as case:
            await case.file(b"old", b"target")
            handle = await case.file(b"new", b"beside")
            await case.vfs.release(handle)
            await case.vfs.rename(ROOT_INODE, b"beside", ROOT_INODE, b"target", 0, ME)
            assert sum(store.calls.count(wire_pb2.DATA_FLUSH) for store in case.stores) == 1
            with pytest.raises(NotFound):
                await case.vfs.lookup(ROOT_INODE, b"beside")
            assert (await case.vfs.lookup(ROOT_INODE, b"target")).inode == handle.inode

    run(main())


def test_read_ahead_never_returns_bytes_from_before_a_write():
    async def main() -> None:
        async with Case(FAST._replace(read_ahead_bytes=4 * MIB)) as case:
            content = bytearray(os.urandom(6 * MIB))
            handle = await case.file(bytes(content))
            second = await case.vfs.open(handle.inode, os.O_RDWR, ME)
            for at in range(0, 6 * MIB, 64 * KIB):
                if at % (320 * KIB) == 0:
                    place = min(at + 700 * KIB, 6 * MIB - 10_000)
                    content[place : place + 10_000] = b"!" * 10_000
                    await case.vfs.write(second, place, b"!" * 10_000)
                    if at % (640 * KIB) == 0:
                        await case.vfs.flush(second)
                assert bytes(await case.vfs.read(handle, at, 64 * KIB)) == content[at : at + 64 * KIB]
            assert case.vfs.reader.counters["ahead_hits"] > 0
            await case.vfs.release(handle)
            await case.vfs.release(second)
            assert case.vfs.reader.ahead_bytes == 0

    run(main())


def test_sequential_reader_is_served_from_read_ahead():
    async def main() -> None:
        async with Case() as case:
            content = os.urandom(9 * MIB + 77)
            handle = await case.file(content)
            found = []
            at = 0
            while len(part := await case.vfs.read(handle, at, 128 * KIB)):
                found.append(bytes(part))
                at += len(part)
            assert b"".join(found) == content
            counters = case.vfs.reader.counters
            assert counters["ahead_hits"] > 60 and counters["ahead_bytes"] < 10 * MIB

    run(main())


def test_newer_map_is_taken_and_older_is_not(tmp_path):
    async def main() -> None:
        async with Case() as case:
            first = case.pool.pool_map
            newer = changed(first, name="renamed")
            (tmp_path / "poolmap.json").write_bytes(encode_map(newer))
            view = PoolView(first, directory=str(tmp_path), dialer=None, clock=case.pool.clock)
            published = []
            view.changed.append(published.append)
            assert await view.refresh() and view.map.epoch == newer.epoch and len(published) == 1
            assert not await view.refresh()
            assert not view.offer(first)

    run(main())


def test_silent_or_outdated_node_does_not_block_a_newer_map():
    class Answers:
        """Replies of two nodes; None: never a reply."""

        def __init__(self):
            self.of = {}

        async def call(self, endpoints, method, message, deadline_s):
            found = self.of[endpoints[0]]
            if found is None:
                await asyncio.get_running_loop().create_future()
            return Reply(pool_pb2.MapReply(map=found).SerializeToString(), ())

    async def check():
        async with Case() as case:
            node = case.pool.pool_map.nodes[0]
            nodes = tuple(replace(node, id=number, endpoints=(f"stream://h{number}:1",)) for number in (1, 2))
            first = changed(case.pool.pool_map, nodes=nodes)
            second, third = changed(first), changed(changed(first))
            answers = Answers()
            view = PoolView(first, directory=None, dialer=answers, clock=case.pool.clock)
            answers.of = {"stream://h1:1": None, "stream://h2:1": encode_map(second)}
            assert await view.refresh() and view.map.epoch == second.epoch
            answers.of = {"stream://h1:1": b"", "stream://h2:1": encode_map(third)}
            assert await view.refresh() or await view.refresh()
            assert view.map.epoch == third.epoch
            await view.close()

    run(check())


def test_next_map_comes_from_any_node():
    async def check():
        async with Case() as case:
            node = case.pool.pool_map.nodes[0]
            nodes = tuple(
                replace(node, id=number, endpoints=(f"stream://h{number}:1",)) for number in range(1, 5)
            )
            first = changed(case.pool.pool_map, nodes=nodes)
            second = changed(first)
            published = asyncio.get_running_loop().create_future()
            asked = []

            class Answers:
                """One node is silent, one knows nothing and does not wait, one refuses, one waits for the next map."""

                async def call(self, endpoints, method, message, deadline_s):
                    number = int(endpoints[0][len("stream://h") : -len(":1")])
                    asked.append((number, pool_pb2.MapRequest.FromString(message).wait_s))
                    if number == 3:
                        raise Unavailable
                    if number == 1:
                        await asyncio.get_running_loop().create_future()
                    return Reply(
                        pool_pb2.MapReply(map=await published if number == 4 else b"").SerializeToString(), ()
                    )

            view = PoolView(first, directory=None, dialer=Answers(), clock=case.pool.clock)
            assert not await view.newer(0.0)
            waiting = [asyncio.create_task(view.newer(60.0)) for _ in range(100)]
            await until(lambda: {1, 2, 3, 4} <= {number for number, _ in asked})
            assert all(wait_s > 0 for _, wait_s in asked) and not any(one.done() for one in waiting)
            published.set_result(encode_map(second))
            assert all(await asyncio.gather(*waiting)) and view.map.epoch == second.epoch
            await view.close()

    run(check())


def test_next_map_comes_from_the_directory(tmp_path):
    async def main() -> None:
        async with Case() as case:
            first = case.pool.pool_map
            (tmp_path / "poolmap.json").write_bytes(encode_map(first))
            view = PoolView(first, directory=str(tmp_path), dialer=None, clock=case.pool.clock)
            assert not await view.newer(0.1)
            waiting = asyncio.create_task(view.newer(60.0))
            await asyncio.sleep(0)  # let it start to wait
            (tmp_path / "next").write_bytes(encode_map(changed(first)))
            (tmp_path / "next").rename(tmp_path / "poolmap.json")
            assert await waiting and view.map.epoch == first.epoch + 1
            await view.close()

    run(main())


def test_df_shows_what_fits_until_the_first_target_is_full():
    async def main() -> None:
        async with InProcessPool(capacities=(64 * MIB, 192 * MIB)) as pool:
            vfs = (await pool.client()).vfs
            found = await vfs.statfs()
            total = found.blocks_total * found.block_bytes
            assert 0.9 * 256 * MIB < total <= 256 * MIB
            assert 0 < found.blocks_available <= found.blocks_free < found.blocks_total
            assert found.name_bytes_max == 255

    run(main())


def test_df_keeps_the_last_report_of_a_silent_target(monkeypatch):
    def silent(call):
        return 60.0

    async def main() -> None:
        async with Case(FAST._replace(deadline_s=1.0)) as case:
            before = await case.vfs.statfs()
            monkeypatch.setattr(attributes, "STATFS_AGE_S", 0.0)
            monkeypatch.setattr(attributes, "STATFS_SILENT_S", 0.1)
            case.vfs.space.forget()
            case.stores[0].fault = silent
            assert await case.vfs.statfs() == before
            other = await case.pool.client("second", FAST._replace(deadline_s=0.3))
            with pytest.raises(Unavailable):
                await other.vfs.statfs()
            monkeypatch.setattr(attributes, "STATFS_KEPT_S", 0.0)
            with pytest.raises(Unavailable):
                await case.vfs.statfs()
            case.stores[0].fault = None
            assert await case.vfs.statfs() == before and await other.vfs.statfs() == before

    run(main())


def test_open_file_is_readable_while_its_shard_is_silent():
    async def main() -> None:
        async with Case(FAST._replace(deadline_s=20.0)) as case:
            content = os.urandom(2 * MIB + 100)
            handle = await case.file(content)
            other = await case.file(b"other", b"other")
            await case.vfs.release(other)
            await case.pool.stop_shard()
            async with asyncio.timeout(120):
                assert await case.vfs.read(handle, MIB, 4096) == content[MIB : MIB + 4096]
                assert await case.vfs.read(handle, 2 * MIB, 4096) == content[2 * MIB :], (
                    "across the known end"
                )
                assert (await case.vfs.getattr(handle.inode)).size == len(content)
                into = bytearray(4096)
                assert await case.vfs.read_many([(handle, 2 * MIB, 4096)], memoryview(into)) == [100]
            while case.vfs.leases.held(other.inode):  # noqa: ASYNC110 (it ends by the clock)
                await asyncio.sleep(0.1)
            with pytest.raises(TimeoutError):  # a file that is not open waits
                await asyncio.wait_for(case.vfs.getattr(other.inode), 2)
            await case.pool.start_shard()
            assert (await case.vfs.getattr(other.inode)).size == 5

    run(main())
