"""Look-ups and reads of small files without a task (fast path): same results and errors as with one (slow path)."""

from __future__ import annotations

import asyncio
import os

import pytest

from nvpool.client.state.options import ClientOptions
from nvpool.client.state.vfs_types import Caller
from nvpool.core.errors import BadHandle, Disconnected, NotFound, NvpoolError, StaleSession
from nvpool.core.ids import ROOT_INODE
from nvpool.core.units import KIB
from nvpool.meta.operations import queries as lookup_operations
from nvpool.meta.server.service import MetaOptions
from nvpool.meta.state import records
from nvpool.rpc.api import Call
from nvpool.rpc.v1 import meta_pb2
from nvpool.rpc.v1.wire_pb2 import Method
from nvpool.testing.fakes.in_process_pool import InProcessPool
from tests.unit.client.state.test_small_file_cache import EXACT, LONG, ME, Case, put, run, state_of, until


async def outcome_of(later):
    """Wait for a look-up or read; return its result, or raise its error."""
    if not later.done():
        ended = asyncio.get_running_loop().create_future()
        later.on_end = lambda found, error: ended.set_result(None)
        await ended
    found, error = later.outcome
    if error is not None:
        raise error
    return found


async def begun(vfs, names: list[bytes], parent: int = ROOT_INODE) -> list:
    """Start look-ups in one batch and wait for them: attributes, or the errors."""
    vfs.hold_reads()
    asked = [vfs.begin_lookup(parent, name) for name in names]
    vfs.send_reads()
    assert None not in asked
    return await asyncio.gather(*map(outcome_of, asked), return_exceptions=True)


def test_names_of_a_batch_are_one_message_and_are_cached():
    async def main() -> None:
        async with Case(meta=LONG) as case:
            there = (await case.other.mkdir(ROOT_INODE, b"there", 0o755, ME)).inode
            for number in range(20):
                await put(case.other, b"%d" % number, b"x" * number)
            await put(case.other, b"below", b"", there)
            names = [b"%d" % number for number in range(20)]
            found, sent = await case.counted(begun(case.one, names[1:3]))
            assert sent == {"META_LOOKUP_MANY": 1} and [attr.size for attr in found] == [1, 2]
            case.one.hold_reads()
            several = [
                case.one.begin_lookup(ROOT_INODE, b"no such name"),
                case.one.begin_lookup(there, b"below"),
                case.one.begin_lookup(there, b"nothing"),
                case.one.begin_lookup(there, b"there"),
            ]
            _, sent = await case.counted(asyncio.to_thread(lambda: None))
            assert not sent  # before the end of the batch
            case.one.send_reads()
            answers = await asyncio.gather(*map(outcome_of, several), return_exceptions=True)
            assert [type(answer) for answer in answers[::2]] == [NotFound] * 2 and answers[1].inode
            assert case.pool.sent["META_LOOKUP_MANY"] == 1
            for name, attr in zip(names[1:3], found, strict=True):
                again, sent = await case.counted(case.one.lookup(ROOT_INODE, name))
                assert again == attr and not sent
                handle = case.one.open_now(attr.inode, os.O_RDONLY)  # with a grant
                assert handle is not None
                await case.one.release(handle)
            with pytest.raises(NotFound):  # no lease covers a missing name: it is looked up again
                await case.one.lookup(ROOT_INODE, b"no such name")

    run(main())


def test_look_ups_outside_a_batch_are_sent_in_the_next_turn():
    async def main() -> None:
        async with Case() as case:
            await put(case.other, b"a", b"1")
            await put(case.other, b"b", b"22")
            case.pool.sent.clear()
            asked = [case.one.begin_lookup(ROOT_INODE, name) for name in (b"a", b"b")]
            assert [(await outcome_of(one)).size for one in asked] == [1, 2]
            assert case.pool.sent["META_LOOKUP_MANY"] == 1 and not case.pool.sent["META_LOOKUP"]

    run(main())


def test_successive_look_ups_prefetch_the_next_names():
    async def main() -> None:
        async with Case(meta=LONG) as case:
            for number in range(10):
                await put(case.other, b"%d" % number, b"")
            begun_so, waited = 0, 0
            for number in range(10):
                if case.one.lookup_now(ROOT_INODE, b"%d" % number) is not None:
                    continue
                asked = case.one.begin_lookup(ROOT_INODE, b"%d" % number)
                if asked is None:
                    waited += 1
                    await case.one.lookup(ROOT_INODE, b"%d" % number)
                else:
                    begun_so += 1
                    await outcome_of(asked)
            assert begun_so == 3 and waited >= 1

    run(main())


def test_look_up_sees_the_size_of_unstored_writes():
    async def main() -> None:
        async with Case() as case:
            attr, handle = await case.one.create(ROOT_INODE, b"file", 0o644, os.O_RDWR, ME)
            await case.one.write(handle, 0, b"12345")
            case.one.cache.forget_entry(ROOT_INODE, b"file")
            (found,) = await begun(case.one, [b"file"])
            assert found.size == 5 and found.inode == attr.inode
            await case.one.release(handle)

    run(main())


def test_cancelled_look_up_does_not_affect_the_others():
    async def main() -> None:
        async with Case() as case:
            for name in (b"a", b"b", b"c"):
                await put(case.other, name, name)
            there = (await case.other.mkdir(ROOT_INODE, b"there", 0o755, ME)).inode
            case.one.hold_reads()
            asked = [case.one.begin_lookup(ROOT_INODE, name) for name in (b"a", b"b", b"c")]
            assert asked[0].cancel() and not asked[0].cancel()
            case.one.send_reads()
            assert asked[1].cancel()
            assert (await outcome_of(asked[2])).size == 1
            for one in asked[:2]:
                with pytest.raises(asyncio.CancelledError):
                    await outcome_of(one)
            case.one.hold_reads()
            alone = case.one.begin_lookup(there, b"d")
            alone.cancel()
            _, sent = await case.counted(asyncio.sleep(0, case.one.send_reads()))
            assert not sent

    run(main())


class Refusing(Case):
    """`answer(call)` may answer a batch of look-ups; False: the shard answers."""

    def __init__(self, *arguments, **named) -> None:
        super().__init__(*arguments, **named)
        self.answer = lambda call: False
        listen = self.pool.listen

        async def refusing(role: str, number: int, handler) -> None:
            def handle(call: Call) -> None:
                if call.method != Method.Value("META_LOOKUP_MANY") or not self.answer(call):
                    handler(call)

            await listen(role, number, handle)

        self.pool.listen = refusing


@pytest.mark.parametrize(
    "answer",
    [
        lambda call: call.fail(Disconnected("on the way")),
        lambda call: call.fail(StaleSession("as if it had ended")),
        lambda call: call.reply(b""),
        lambda call: call.reply(b"\xff\xff\xff"),
    ],
    ids=["lost", "stale", "too few", "none at all"],
)
def test_unusual_reply_makes_each_look_up_a_request(answer):
    async def main() -> None:
        async with Refusing() as case:
            for name in (b"a", b"b"):
                await put(case.other, name, name * 3)
            case.answer = lambda call: answer(call) or True
            found = await begun(case.one, [b"a", b"b", b"nothing"])
            assert [one.size for one in found[:2]] == [3, 3] and type(found[2]) is NotFound
            assert not case.one.parts.tasks.running

    run(main())


def test_no_fast_path_without_a_session_or_a_watch():
    async def main() -> None:
        async with Case() as case:
            await put(case.other, b"a", b"1")
            state_of(case.one).watching.cancel()
            await asyncio.sleep(0)
            assert case.one.begin_lookup(ROOT_INODE, b"a") is None
            await case.one.lookup(ROOT_INODE, b"a")
            case.one.cache.forget_entry(ROOT_INODE, b"a")
            assert case.one.begin_lookup(ROOT_INODE, b"a") is not None
            await case.pool.stop_shard()
            await until(lambda: not case.one.meta.is_ready(case.one.meta.shard_of(ROOT_INODE)))
            assert case.one.begin_lookup(ROOT_INODE, b"b") is None
            await case.pool.start_shard()
            assert (await case.one.lookup(ROOT_INODE, b"a")).size == 1

    run(main())


@pytest.mark.parametrize("shards", [2, 3])
def test_names_and_inodes_of_several_shards(shards):
    async def main() -> None:
        async with InProcessPool(shards=shards) as pool:
            other, one = (await pool.client()).vfs, (await pool.client()).vfs
            striped = (await other.mkdir(ROOT_INODE, b"wide", 0o755, ME, wide=True)).inode
            parents = [
                (await other.mkdir(ROOT_INODE, b"d%d" % number, 0o755, ME)).inode for number in range(6)
            ] + [striped]
            places = []
            for number in range(60):
                parent = parents[number % len(parents)]
                await put(other, b"%d" % number, b"x" * number, parent)
                places.append((parent, b"%d" % number))
            for number in range(6):  # names of inodes of other shards
                await other.link(
                    (await other.lookup(*places[number])).inode, parents[(number + 1) % 6], b"link", ME
                )
                places.append((parents[(number + 1) % 6], b"link"))
            for vfs in (one,):
                for parent in (ROOT_INODE, *parents):
                    await vfs.getattr(parent)
                vfs.hold_reads()
                asked = [vfs.begin_lookup(parent, name) for parent, name in places]
                vfs.send_reads()
                for (parent, name), begun_so in zip(places, asked, strict=True):
                    attr = await (outcome_of(begun_so) if begun_so is not None else vfs.lookup(parent, name))
                    assert attr.inode == (await other.lookup(parent, name)).inode
                assert sum(begun_so is not None for begun_so in asked) > 10

    run(main())


def test_batch_of_names_equals_single_look_ups():
    async def main() -> None:
        async with Case() as case:
            vfs, meta = case.other, case.pool.meta
            striped = (await vfs.mkdir(ROOT_INODE, b"wide", 0o755, ME, wide=True)).inode
            await put(vfs, b"file", b"content")
            await vfs.link((await vfs.lookup(ROOT_INODE, b"file")).inode, ROOT_INODE, b"second", ME)
            await vfs.symlink(ROOT_INODE, b"link", b"file", ME)
            await vfs.mknod(ROOT_INODE, b"node", 0o020600, 0x103, ME)
            await vfs.mkdir(ROOT_INODE, b"below", 0o755, ME)
            cut = await put(vfs, b"cut", b"x" * 9000)
            await vfs.setattr(cut, size=100, caller=ME)
            handle = await vfs.open(cut, os.O_RDWR, ME)
            await vfs.setxattr(cut, b"user.x", b"1", 0, ME)
            await vfs.fallocate(handle, 0, 10, 3)
            await vfs.release(handle)
            await put(vfs, b"in wide", b"1", striped)
            session = state_of(case.one).session
            names = [b"file", b"second", b"nothing", b"link", b"node", b"below", b"wide", b"cut"]

            def many(parent: int, some: list[bytes], rights: int) -> list:
                request = meta_pb2.LookupManyRequest(session=session, rights=rights)
                request.directories.add(parent=parent, names=some)
                return list(
                    list(lookup_operations.lookup_many(meta.parts.view, request, lambda: 10**18))[-1].found
                )

            def each(parent: int, some: list[bytes], rights: int) -> list:
                return [one for name in some for one in many(parent, [name], rights)]

            for rights in (0, 1):
                assert many(ROOT_INODE, names, rights) == each(ROOT_INODE, names, rights)
                assert many(striped, [b"in wide", b"no"], rights) == each(
                    striped, [b"in wide", b"no"], rights
                )
                assert many(ROOT_INODE, [b"file", b"", b"a/b"], rights) == each(
                    ROOT_INODE, [b"file", b"", b"a/b"], rights
                )
                assert many(cut, [b"file", b"x"], rights) == each(cut, [b"file", b"x"], rights)
                assert many(1 << 40, [b"file", b"x"], rights) == each(1 << 40, [b"file", b"x"], rights)
            found = many(ROOT_INODE, names, 1)
            assert [bool(one.entry.grant) for one in found] == [
                True,
                True,
                False,
                False,
                False,
                False,
                False,
                True,
            ]
            assert (
                all(one.entry.lease_ms or one.error for one in found) and found[2].error == NotFound.wire_code
            )
            meta.parts.view.cutting[cut] = None
            cutting = many(ROOT_INODE, names, 1)
            assert (
                cutting == each(ROOT_INODE, names, 1)
                and not cutting[-1].entry.grant
                and not cutting[-1].entry.lease_ms
            )
            del meta.parts.view.cutting[cut]
            meta.parts.kv.apply([(records.inode_key(cut), b"\xff")])
            damaged = many(ROOT_INODE, names, 1)
            assert (
                damaged == each(ROOT_INODE, names, 1)
                and damaged[-1].error
                and damaged[0].entry == found[0].entry
            )

    run(main())


def test_batch_of_many_directories_equals_single_look_ups():
    async def main() -> None:
        async with Case() as case:
            vfs, meta = case.other, case.pool.meta
            parents = []
            for number in range(150):
                parents.append((await vfs.mkdir(ROOT_INODE, b"d%d" % number, 0o755, ME)).inode)
                for name in (b"f", b"g")[: number % 3]:
                    await put(vfs, name, b"%d" % number, parents[-1])
            file = await put(vfs, b"file", b"1")
            striped = (await vfs.mkdir(ROOT_INODE, b"wide", 0o755, ME, wide=True)).inode
            await put(vfs, b"f", b"1", striped)
            gone = (await vfs.mkdir(ROOT_INODE, b"gone", 0o755, ME)).inode
            held = await case.one.opendir(gone)
            await vfs.rmdir(ROOT_INODE, b"gone", ME)
            session = state_of(case.one).session

            def many(asked: list[tuple[int, list[bytes]]], rights: int) -> list:
                request = meta_pb2.LookupManyRequest(session=session, rights=rights)
                for parent, names in asked:
                    request.directories.add(parent=parent, names=names)
                return list(
                    list(lookup_operations.lookup_many(meta.parts.view, request, lambda: 10**18))[-1].found
                )

            def same(asked: list[tuple[int, list[bytes]]]) -> None:
                for rights in (0, 1):
                    assert many(asked, rights) == [
                        one
                        for parent, names in asked
                        for name in names
                        for one in many([(parent, [name])], rights)
                    ]

            plain = [(parent, [b"f", b"g", b"no"][: number % 4]) for number, parent in enumerate(parents)]
            same(plain)
            assert sum(bool(one.entry.grant) for one in many(plain, 1)) == 100
            for odd in (
                [(file, [b"x"])],
                [(1 << 40, [b"f", b"g"])],
                [(gone, [b"f"])],
                [(striped, [b"f", b"no"])],
                [(parents[2], [b"", b"f"])],
                [(parents[5], [b"f"] * 300)],
                [(parents[7], [])],
            ):
                same([*plain[:10], *odd, *plain[10:20]])
                same(odd)
            inode = (await vfs.lookup(parents[2], b"f")).inode
            meta.parts.view.cutting[inode] = None
            same(plain)
            del meta.parts.view.cutting[inode]
            meta.parts.kv.apply([(records.inode_key(inode), b"\xff")])
            same(plain)
            del held

    run(main())


# -- small files -----------------------------------------------------------------------------------------------------------


async def opened(case: Case, name: bytes):
    attr = await case.one.lookup(ROOT_INODE, name)
    handle = case.one.open_now(attr.inode, os.O_RDONLY)
    assert handle is not None
    return handle


def test_reads_of_a_small_file_share_one_complete_read():
    async def main() -> None:
        async with Case() as case:
            content = os.urandom(10_000)
            await put(case.other, b"file", content)
            handle = await opened(case, b"file")
            case.pool.sent.clear()
            parts = [
                case.one.begin_read(handle, at, size)
                for at, size in ((0, 20_000), (5000, 100), (9_999, 4096))
            ]
            waiting = asyncio.create_task(case.one.read(handle, 1, 5))
            assert parts[1].cancel()
            assert bytes(await outcome_of(parts[0])) == content
            assert bytes(await outcome_of(parts[2])) == content[9_999:]
            assert bytes(await waiting) == content[1:6]
            with pytest.raises(asyncio.CancelledError):
                await outcome_of(parts[1])
            assert case.pool.sent["DATA_READ"] == 1
            assert bytes(case.one.read_now(handle, 100, 50)) == content[100:150]
            assert (
                case.one.begin_read(handle, 10_000, 1) is None
                and await case.one.read(handle, 10_000, 1) == b""
            )
            assert (
                case.one.release_now(handle) and not case.one.release_now(handle) and not case.one.cache.open
            )
            assert case.one.begin_read(handle, 0, 1) is None
            with pytest.raises(BadHandle):
                await case.one.read(handle, 0, 1)

    run(main())


def test_bytes_changed_during_a_read_are_not_cached():
    async def main() -> None:
        async with Case() as case:
            await put(case.other, b"file", b"first")
            handle = await opened(case, b"file")
            part = case.one.begin_read(handle, 0, 100)
            case.one.reader.changed(handle.file)
            assert bytes(await outcome_of(part)) == b"first"
            assert case.one.read_now(handle, 0, 100) is None
            writer = await case.one.open(handle.inode, os.O_WRONLY, ME)
            part = case.one.begin_read(handle, 0, 100)
            await case.one.write(writer, 0, b"other")
            await outcome_of(part)
            assert case.one.read_now(handle, 0, 100) is None and case.one.begin_read(handle, 0, 100) is None
            assert bytes(await case.one.read(handle, 0, 100)) == b"other"
            assert case.one.release_now(writer)  # the last handle stores the rest
            assert not case.one.release_now(handle)
            await case.one.release(handle)
            assert not case.one.cache.open

    run(main())


def test_error_reaches_all_waiting_reads_and_is_not_cached():
    async def main() -> None:
        async with Case(ClientOptions(deadline_s=0.3, release_s=0.01)) as case:
            await put(case.other, b"file", b"content")
            handle = await opened(case, b"file")
            for target in list(case.pool.stores):
                await case.pool.stop_store(target)
            parts = [case.one.begin_read(handle, 0, 4), case.one.begin_read(handle, 4, 4)]
            for part in parts:
                with pytest.raises(NvpoolError):
                    await outcome_of(part)
            for target in range(1, len(case.pool.pool_map.targets) + 1):
                await case.pool.start_store(target)
            assert bytes(await outcome_of(case.one.begin_read(handle, 0, 100))) == b"content"
            await case.one.release(handle)

    run(main())


def test_bytes_read_without_a_lease_are_validated():
    async def main() -> None:
        async with Case(
            EXACT._replace(report_opens_s=60.0), meta=MetaOptions(watch_s=1.0, linger_s=0.0)
        ) as case:
            for name in (b"kept", b"gone"):
                await put(case.other, name, b"content")
            while case.pool.meta.parts.sessions.holders:  # noqa: ASYNC110 - until the service knows what was closed
                await asyncio.sleep(0.01)
            kept, gone = await opened(case, b"kept"), await opened(case, b"gone")
            case.one.meta.shards[1].unreported.pop(gone.inode)  # as if the report of it were lost
            part = case.one.begin_read(kept, 0, 7)
            assert kept.file.unreported
            case.one.leases.forget(kept.inode)
            assert bytes(await outcome_of(part)) == b"content" and not kept.file.unreported
            await case.other.unlink(ROOT_INODE, b"gone", ME)
            await case.pool.meta.parts.collector.run_once()
            assert not case.one.leases.keeps_bytes(gone.inode)
            with pytest.raises(NotFound):
                await outcome_of(case.one.begin_read(gone, 0, 7))
            for handle in (kept, gone):
                await case.one.release(handle)
            assert not case.one.parts.tasks.running

    run(main())


def test_handle_with_locks_is_not_released_immediately():
    async def main() -> None:
        async with Case() as case:
            await put(case.other, b"file", b"content")
            handle = await opened(case, b"file")
            await case.one.flock(handle, 7, 1, 99)
            assert not case.one.release_now(handle)
            await case.one.release(handle)
            other = await case.other.open(handle.inode, os.O_RDWR, Caller(0, 0))
            await case.other.flock(other, 8, 2, 99)
            await case.other.release(other)

    run(main())


def test_large_file_is_not_read_completely():
    async def main() -> None:
        async with Case() as case:
            content = os.urandom(200 * KIB)
            await put(case.other, b"file", content)
            handle = await case.one.open((await case.one.lookup(ROOT_INODE, b"file")).inode, os.O_RDWR, ME)
            assert (
                bytes(await outcome_of(case.one.begin_read(handle, 100_000, 10))) == content[100_000:100_010]
            )
            assert case.one.release_now(handle)

    run(main())
