"""Small files that a mount reads whole on the compiled fast path: bytes, errors and state as on the slow path."""

import asyncio
import errno
import os
import random
import socket
from contextlib import asynccontextmanager

import pytest

from nvpool.client.state import leases
from nvpool.client.state.options import ClientOptions
from nvpool.core import errors
from nvpool.core.units import KIB
from nvpool.fuse.protocol import replies
from nvpool.fuse.protocol.constants import Op
from nvpool.poolmap.file_layout import chain_of
from nvpool.rpc.stats import RPC_STATS
from nvpool.rpc.v1.wire_pb2 import DATA_READ
from tests.fuse.read_kernel import WAYS, ChunkedTransport, path_decorators, replace_transports, until
from tests.fuse.test_fast_remote_reads import FAR, Far, Mounted
from tests.unit.client.data.test_short_circuit import BLOCK, ME, evict, run_whole, some

SHORT = ClientOptions(deadline_s=20.0)
SIZES = [1, 100, BLOCK - 1, BLOCK, BLOCK + 1, 3 * BLOCK, 5 * BLOCK + 7, 60 * KIB, 64 * KIB - 1, 64 * KIB]


class Small(Mounted):
    """The kernel of a mount that reads small files of others; `began` counts the reads of the fast path."""

    async def make(self, contents):
        """Create small files with these contents by another client; their inodes."""
        writer = await self.host.writer()
        made = []
        for content in contents:
            self.made = getattr(self, "made", 0) + 1
            theirs = await self.host.file(content, writer, b"small%d" % self.made)
            await writer.fsync(theirs, False)
            made.append(theirs.inode)
            await writer.release(theirs)
        return made

    async def open(self, inode):
        opened = await self.request(Op.OPEN, (os.O_RDONLY, 0), node=inode)
        return int.from_bytes(opened[:8], "little")

    async def close(self, number):
        await self.request(Op.RELEASE, (number, os.O_RDONLY, 0, 0), node=self.handle(number).inode)

    async def connect(self):
        """Connect every store."""
        for inode in await self.make([some(BLOCK, 1000 + seed) for seed in range(24)]):
            number = await self.open(inode)
            await self.read(number, 0, BLOCK)
            await self.close(number)

    async def answers(self, asked):
        """{unique: (error, reply)} of all of these."""
        found = {}
        while len(found) < len(asked):
            unique, error, answer = await self.receive()
            assert unique in asked and unique not in found
            found[unique] = error, answer
        return found

    @property
    def began(self):
        compiled = self.engine.fast_paths.small_files.compiled
        return compiled.taken if compiled is not None else 0


@asynccontextmanager
async def mounted(way="compiled", options=FAR, replicas=1):
    host = Far(replicas=replicas)
    host.options = options
    async with host, Small(host) as kernel:
        await kernel.init()
        if way == "ordinary":
            await kernel.engine.fast_paths.stop()
        await kernel.connect()
        yield kernel
        kernel.assert_nothing_left()
        assert not [file for file in kernel.vfs.cache.open.values() if file.fetching is not None]


on_a_mount, on_both_paths, on_fast_path = path_decorators(mounted)


@on_both_paths
async def test_concurrent_reads_of_every_length_are_right(kernel):
    contents = [some(size, seed) for seed, size in enumerate(SIZES * 6)]
    chance = random.Random(1)
    numbers = [
        (await kernel.open(inode), content)
        for inode, content in zip(await kernel.make(contents), contents, strict=True)
    ]
    for wide in (True, False):
        asked = {}
        for number, content in numbers:
            offset = 0 if wide else chance.randrange(len(content))
            length = 128 * KIB if wide else chance.choice([1, 10, BLOCK, len(content)])
            asked[kernel.send_read(number, offset, length)] = content[offset : offset + length]
        for unique, (error, answer) in (await kernel.answers(asked)).items():
            assert not error and answer == asked[unique]
    assert kernel.vfs.reader.contents.counters["small_hits"] >= len(numbers), (
        "the second read needs no message"
    )
    for inode in (handle.inode for handle in map(kernel.handle, (number for number, _ in numbers))):
        assert kernel.vfs.reader.contents.kept[inode][1] in contents


@on_both_paths
async def test_cache_and_statistics_are_the_same(kernel):
    contents = [some(size, seed) for seed, size in enumerate(SIZES)]
    chunks, kept = kernel.vfs.chunks, kernel.vfs.reader.contents
    inodes = await kernel.make(contents)
    numbers = [await kernel.open(inode) for inode in inodes]
    before = (
        chunks.counters["reads"],
        kept.counters["small_reads"],
        kept.byte_count,
        kernel.engine.requests.read_bytes + kernel.engine.fast_paths.read_bytes,
    )
    asked = {kernel.send_read(number, 0, 64 * KIB) for number in numbers}
    assert not [error for error, _ in (await kernel.answers(asked)).values() if error]
    assert chunks.counters["reads"] - before[0] == kept.counters["small_reads"] - before[1] == len(SIZES)
    assert kept.byte_count - before[2] == sum(SIZES) + 300 * len(SIZES)
    assert kernel.engine.requests.read_bytes + kernel.engine.fast_paths.read_bytes - before[3] == sum(SIZES)
    for inode in inodes:
        change, content, read_s = kept.kept[inode]
        assert (
            change == kernel.vfs.cache.open[inode].attr.change
            and content in contents
            and type(content) is bytes
        )
        assert read_s <= kernel.vfs.clock.boottime_s()
        assert inode in kernel.engine.ops.cached_pages.paged
        assert kernel.vfs.cache.open[inode].grant_used


@on_both_paths
async def test_cache_stays_within_its_limit(kernel):
    kept = kernel.vfs.reader.contents
    kept.bytes_max = kept.byte_count + 3 * (BLOCK + 300)
    contents = [some(BLOCK, seed) for seed in range(12)]
    inodes = await kernel.make(contents)
    numbers = [await kernel.open(inode) for inode in inodes]
    asked = {
        kernel.send_read(number, 0, BLOCK): content for number, content in zip(numbers, contents, strict=True)
    }
    for unique, (error, answer) in (await kernel.answers(asked)).items():
        assert not error and answer == asked[unique]
    assert kept.byte_count <= kept.bytes_max
    assert kept.byte_count == sum(len(content) + 300 for _, content, _ in kept.kept.values())


@on_both_paths
async def test_concurrent_readers_share_one_request(kernel):
    content = some(50 * KIB, 3)
    (inode,) = await kernel.make([content])
    first, second = await kernel.open(inode), await kernel.open(inode)
    reads = kernel.vfs.chunks.counters["reads"]
    asked = {
        kernel.send_read(number, offset, length): content[offset : offset + length]
        for number, offset, length in (
            (first, 0, 16 * KIB),
            (second, 0, 64 * KIB),
            (first, 16 * KIB, 128 * KIB),
            (second, 5, 1),
        )
    }
    other = asyncio.ensure_future(kernel.vfs.read(kernel.handle(second), 7, 100))
    for unique, (error, answer) in (await kernel.answers(asked)).items():
        assert not error and answer == asked[unique]
    assert bytes(await other) == content[7:107]
    assert kernel.vfs.chunks.counters["reads"] == reads + 1


@on_both_paths
async def test_writes_of_all_clients_are_seen_by_the_next_open(kernel):
    content = bytearray(some(9000, 1))
    (inode,) = await kernel.make([bytes(content)])
    other = await kernel.host.writer()
    chance = random.Random(3)
    for turn in range(40):
        at, new = chance.randrange(len(content)), chance.randbytes(chance.choice([10, 5000]))
        vfs = kernel.vfs if turn % 3 == 2 else other
        theirs = await vfs.open(inode, os.O_RDWR, ME)
        await vfs.write(theirs, at, new)
        await vfs.flush(theirs)
        await vfs.release(theirs)
        content[at : at + len(new)] = new
        content = content[:40000]
        if len(content) == 40000:
            await other.setattr(inode, size=40000, caller=ME)
        number = await kernel.open(inode)
        assert await kernel.read(number, 0, 64 * KIB) == content
        await kernel.close(number)


@on_both_paths
async def test_holes_are_zeros(kernel):
    other = await kernel.host.writer()
    (inode,) = await kernel.make([b"begin"])
    theirs = await other.open(inode, os.O_RDWR, ME)
    await other.write(theirs, 40000, b"end")
    await other.fsync(theirs, False)
    await other.release(theirs)
    (empty,) = await kernel.make([b"x"])
    await other.setattr(empty, size=0, caller=ME)
    await other.setattr(empty, size=20000, caller=ME)
    whole = some(BLOCK, 3)
    (beside,) = await kernel.make([whole])
    contents = b"begin" + bytes(39995) + b"end", bytes(20000), whole
    numbers = [await kernel.open(one) for one in (inode, empty, beside)]
    asked = {
        kernel.send_read(number, 0, 64 * KIB): content
        for number, content in zip(numbers, contents, strict=True)
    }
    for unique, (error, answer) in (await kernel.answers(asked)).items():
        assert not error and answer == asked[unique]


@on_both_paths
async def test_flipped_byte_is_an_error_of_its_file(kernel):
    contents = [some(BLOCK + 5, seed) for seed in range(16)]
    inodes = await kernel.make(contents)
    numbers = [await kernel.open(inode) for inode in inodes]
    spoiled = set(inodes[3:16:5])
    for service in kernel.host.pool.stores.values():
        for inode in spoiled:
            chunk = service.store.index.chunk(inode, 0)
            if chunk is not None and chunk.segments:
                place = chunk.segments[0].disk[1]
                fd = os.open(service.store.device.path, os.O_RDWR)
                os.pwrite(fd, bytes([os.pread(fd, 1, place * BLOCK + 2)[0] ^ 1]), place * BLOCK + 2)
                os.close(fd)
        evict(service.store.device.path)
    asked = {kernel.send_read(number, 0, 2 * BLOCK): at for at, number in enumerate(numbers)}
    for unique, (error, answer) in (await kernel.answers(asked)).items():
        at = asked[unique]
        assert error == -errno.EIO if inodes[at] in spoiled else not error and answer == contents[at]
    assert kernel.vfs.chunks.counters["mismatches"] >= 1


class ChangedCall:
    """A call whose reply differs from the service's."""

    def __init__(self, call, change):
        self._call, self._change = call, change

    def __getattr__(self, name):
        return getattr(self._call, name)

    def room(self, byte_count):
        return None

    def reply(self, message=b"", payload=()):
        self._call.reply(*self._change(bytes(message), b"".join(payload)))


def proxy_of(kernel, call):
    return kernel.host.proxies[bytes(call.message)[10]]


@on_both_paths
async def test_changed_reply_gives_right_bytes_or_an_error(kernel):
    chance = random.Random(9)
    changed = 0

    def change(message, payload):
        nonlocal changed
        changed += 1
        kind = changed % 5
        if kind == 0:
            at = chance.randrange(len(payload))
            payload = payload[:at] + bytes([payload[at] ^ 1 << chance.randrange(8)]) + payload[at + 1 :]
        elif kind == 1:
            at = chance.randrange(9, len(message))
            message = message[:at] + bytes([message[at] ^ 1 << chance.randrange(8)]) + message[at + 1 :]
        elif kind == 2:
            payload = payload[: chance.randrange(len(payload))]
        elif kind == 3:
            payload += bytes(BLOCK)
        else:
            message = chance.choice(
                [b"", message[:20], message + message, chance.randbytes(33), message + b"\x20\x01"]
            )
        return message, [payload]

    def instead(call):
        kernel.host.instead(None)
        proxy_of(kernel, call).service.handle(ChangedCall(call, change))

    contents = [some(size, seed) for seed, size in enumerate([BLOCK, 5000, 9000] * 4)]
    inodes = await kernel.make(contents)
    for turn in range(60):
        kernel.vfs.reader.forget_contents()
        numbers = [await kernel.open(inode) for inode in inodes[: chance.randrange(1, 13)]]
        kernel.host.instead(instead)
        asked = {
            kernel.send_read(number, 0, 64 * KIB): content
            for number, content in zip(numbers, contents, strict=False)
        }
        for unique, (error, answer) in (await kernel.answers(asked)).items():
            assert error or answer == asked[unique], turn
        for number in numbers:
            await kernel.close(number)
    assert changed == 60


@pytest.mark.few(7)  # all on the compiled path
@pytest.mark.parametrize(
    "error",
    [
        errors.StaleGrant,
        errors.StaleEpoch,
        errors.Busy,
        errors.WrongTarget,
        errors.StaleTenure,
        errors.ChecksumMismatch,
        errors.Unavailable,
    ],
)
@pytest.mark.parametrize("way", WAYS[::-1])
def test_temporary_refusal_is_retried(way, error):
    @on_a_mount
    async def refused(kernel):
        contents = [some(5000, seed) for seed in range(10)]
        numbers = [await kernel.open(inode) for inode in await kernel.make(contents)]

        def instead(call):
            kernel.host.instead(None)
            call.fail(error())

        kernel.host.instead(instead)
        asked = {
            kernel.send_read(number, 0, 8 * KIB): content
            for number, content in zip(numbers, contents, strict=True)
        }
        for unique, (failure, answer) in (await kernel.answers(asked)).items():
            assert not failure and answer == asked[unique]
        assert kernel.vfs.chunks.counters["repeats"] >= 1

    refused(way)


@on_both_paths
async def test_permanent_refusal_is_an_error_without_retry(kernel):
    inode, other = await kernel.make([some(5000, 1), some(5000, 2)])
    number, asked = await kernel.open(inode), []

    def instead(call):
        asked.append(call)
        call.fail(errors.AccessDenied("a test"))

    kernel.host.instead(instead)
    with pytest.raises(OSError) as refused:
        await kernel.read(number, 0, BLOCK)
    assert refused.value.errno == errno.EACCES and len(asked) == 1
    kernel.host.instead(None)
    assert await kernel.read(number, 0, BLOCK) == some(5000, 1)[:BLOCK]
    assert await kernel.read(await kernel.open(other), 0, BLOCK) == some(5000, 2)[:BLOCK]


@pytest.mark.parametrize("way", WAYS)
def test_silent_store_is_an_error_at_the_deadline(way):
    async def silent(kernel):
        (inode,) = await kernel.make([some(5000, 1)])
        number = await kernel.open(inode)
        kernel.host.instead(lambda call: None)
        began_s = asyncio.get_running_loop().time()
        with pytest.raises(OSError) as refused:
            await kernel.read(number, 0, BLOCK)
        took_s = asyncio.get_running_loop().time() - began_s
        assert refused.value.errno == errors.DeadlineExceeded.errno and 2.5 < took_s < 5.5
        kernel.host.instead(None)
        assert await kernel.read(number, 0, 8 * KIB) == some(5000, 1)

    on_a_mount(silent, FAR._replace(deadline_s=3.0))(way)


async def wait_for_requests(kernel, calls):
    """Wait until the stores have the requests."""
    kernel.engine.take_requests()
    async with asyncio.timeout(60):
        while not calls:  # noqa: ASYNC110
            await asyncio.sleep(0.001)
    await asyncio.sleep(0.02)


@on_both_paths
async def test_interrupted_reader_does_not_affect_others(kernel):
    contents = [some(6000, seed) for seed in range(12)]
    numbers = [await kernel.open(inode) for inode in await kernel.make(contents)]
    calls, nobody = [], 1 << 22  # there is no such process
    kernel.host.instead(calls.append)
    late = [kernel.send_read(number, 0, BLOCK, pid=nobody) for number in numbers]
    stays = {
        kernel.send_read(number, 0, 8 * KIB): content
        for number, content in zip(numbers[:5], contents[:5], strict=True)
    }
    await wait_for_requests(kernel, calls)
    for unique in late:
        kernel.send(Op.INTERRUPT, (unique,))
    kernel.engine.take_requests()
    for _ in late:
        heard, error, _ = await kernel.receive()
        assert heard in late and error == -errno.EINTR
    kernel.host.instead(None)
    for call in calls:
        proxy_of(kernel, call).service.handle(call)
    for unique, (error, answer) in (await kernel.answers(stays)).items():
        assert not error and answer == stays[unique]
    await asyncio.sleep(0.05)
    for number, content in zip(numbers, contents, strict=True):
        assert await kernel.read(number, 0, 8 * KIB) == content
    await kernel.expect_no_reply()


@on_both_paths
async def test_reads_survive_a_lost_connection(kernel):
    contents = [some(6000, seed) for seed in range(40)]
    numbers = [await kernel.open(inode) for inode in await kernel.make(contents)]
    calls = []
    kernel.host.instead(calls.append)
    asked = {
        kernel.send_read(number, 0, 8 * KIB): content
        for number, content in zip(numbers, contents, strict=True)
    }
    await wait_for_requests(kernel, calls)
    kernel.host.instead(None)
    for connection in kernel.connections():
        connection.frames.transport.abort()
    for unique, (error, answer) in (await kernel.answers(asked)).items():
        assert not error and answer == asked[unique]
    kernel.vfs.reader.forget_contents()
    for served in [
        served for listener in kernel.host.pool.listeners.values() for served in list(listener.connections)
    ]:
        served.frames.transport.abort()
    asked = {
        kernel.send_read(number, 0, 8 * KIB): content
        for number, content in zip(numbers, contents, strict=True)
    }
    for unique, (error, answer) in (await kernel.answers(asked)).items():
        assert not error and answer == asked[unique]


@on_both_paths
async def test_replies_arrive_in_pieces(kernel):
    chance = random.Random(5)
    contents = [some(size, seed) for seed, size in enumerate(SIZES * 5)]
    numbers = [await kernel.open(inode) for inode in await kernel.make(contents)]
    replace_transports(kernel.host, lambda transport: ChunkedTransport(transport, chance))
    for _ in range(3):
        kernel.vfs.reader.forget_contents()
        asked = {
            kernel.send_read(number, 0, 64 * KIB): content
            for number, content in zip(numbers, contents, strict=True)
        }
        for unique, (error, answer) in (await kernel.answers(asked)).items():
            assert not error and answer == asked[unique]


@on_both_paths
async def test_file_written_during_the_read_is_not_cached(kernel):
    (inode,) = await kernel.make([some(6000, 1)])
    number, calls = await kernel.open(inode), []
    kernel.host.instead(calls.append)
    unique = kernel.send_read(number, 0, 8 * KIB)
    await wait_for_requests(kernel, calls)
    handle = await kernel.vfs.open(inode, os.O_RDWR, ME)
    await kernel.vfs.write(handle, 0, b"new")
    kernel.host.instead(None)
    for call in calls:
        proxy_of(kernel, call).service.handle(call)
    assert await kernel.receive() == (unique, 0, some(6000, 1))
    assert inode not in kernel.vfs.reader.contents
    assert await kernel.read(number, 0, 8 * KIB) == b"new" + some(6000, 1)[3:]
    await kernel.vfs.flush(handle)
    await kernel.vfs.release(handle)


@on_both_paths
async def test_file_closed_during_the_read_leaves_nothing(kernel):
    (inode,) = await kernel.make([some(6000, 1)])
    number, calls = await kernel.open(inode), []
    kernel.host.instead(calls.append)
    unique = kernel.send_read(number, 0, 8 * KIB)
    await wait_for_requests(kernel, calls)
    await kernel.close(number)
    kernel.host.instead(None)
    for call in calls:
        proxy_of(kernel, call).service.handle(call)
    assert await kernel.receive() == (unique, 0, some(6000, 1))
    assert inode not in kernel.vfs.reader.contents and inode not in kernel.vfs.cache.open


async def opened_by_lease(kernel, content):
    """The number of a handle that its shard does not know of yet, and its file."""
    (inode,) = await kernel.make([content])
    entry = replies.read("entry", await kernel.request(Op.LOOKUP, names=(b"small%d" % kernel.made,)))
    assert entry.nodeid == inode
    number = await kernel.open(inode)
    file = kernel.handle(number).file
    assert file.unreported
    return number, file


@on_both_paths
async def test_unreported_open_is_valid_during_its_lease(kernel):
    number, file = await opened_by_lease(kernel, some(6000, 1))
    assert await kernel.read(number, 0, 8 * KIB) == some(6000, 1)
    number, file = await opened_by_lease(kernel, some(6000, 2))
    calls = []
    kernel.host.instead(calls.append)
    unique = kernel.send_read(number, 0, 8 * KIB)
    await wait_for_requests(kernel, calls)
    kernel.host.instead(None)
    file.unreported = True
    kernel.vfs.leases.by_inode.pop(file.inode, None)
    for call in calls:
        proxy_of(kernel, call).service.handle(call)
    assert await kernel.receive() == (unique, 0, some(6000, 2))
    assert not file.unreported, "the open is reported to its shard"


@on_both_paths
async def test_zeros_of_a_removed_file_are_an_error(kernel):
    number, file = await opened_by_lease(kernel, some(6000, 1))
    calls = []
    kernel.host.instead(calls.append)
    unique = kernel.send_read(number, 0, 8 * KIB)
    await wait_for_requests(kernel, calls)
    kernel.host.instead(None)
    file.unreported = True
    kernel.vfs.leases.by_inode.pop(file.inode, None)

    async def gone(inode):
        raise errors.NotFound

    kernel.vfs.meta.report_opens = gone
    for call in calls:
        proxy_of(kernel, call).service.handle(call)
    heard, error, _ = await kernel.receive()
    assert heard == unique and error in (-errno.ENOENT, -errno.ESTALE)
    del kernel.vfs.meta.report_opens
    kernel.vfs.reader.forget_contents()


@on_both_paths
async def test_end_of_a_file_without_lease_is_refreshed(kernel):
    (inode,) = await kernel.make([some(6000, 1)])
    number = await kernel.open(inode)
    file = kernel.handle(number).file
    kernel.vfs.leases.by_inode.pop(inode, None)
    file.attr_born_s = leases.NEVER_S
    asked = []
    refresh, kernel.vfs.reader.refresh = (
        kernel.vfs.reader.refresh,
        lambda *what: asked.append(what) or refresh(*what),
    )
    assert await kernel.read(number, 0, 8 * KIB) == some(6000, 1)
    assert len(asked) == 1
    kernel.vfs.reader.refresh = refresh


@pytest.mark.parametrize("way", WAYS)
def test_short_cut_reads_only_the_first_time(way):
    async def short(kernel):
        content = some(6000, 1)
        (inode,) = await kernel.make([content])
        number = await kernel.open(inode)
        began = kernel.began
        assert await kernel.read(number, 0, 8 * KIB) == content
        assert kernel.began == began + (way == "compiled")
        assert kernel.handle(number).file.missed
        for _ in range(3):
            kernel.vfs.reader.forget_contents()
            assert await kernel.read(number, 0, 8 * KIB) == content
        assert kernel.began == began + (way == "compiled")

    on_a_mount(short, SHORT)(way)


# -- fast path only ---------------------------------------------------------------------------------------------------------


@on_fast_path
async def test_reads_are_batched_up_to_a_burst(kernel):
    contents = [some(BLOCK, seed) for seed in range(150)]
    numbers = [await kernel.open(inode) for inode in await kernel.make(contents)]
    chunks, began = kernel.vfs.chunks, kernel.began
    targets = {kernel.handle(number).file.lanes.get(0) for number in numbers}
    before = chunks.counters["messages"]
    asked = {
        kernel.send_read(number, 0, BLOCK): content for number, content in zip(numbers, contents, strict=True)
    }
    kernel.engine.take_requests()
    for unique, (error, answer) in (await kernel.answers(asked)).items():
        assert not error and answer == asked[unique]
    assert kernel.began == began + 150 and targets
    assert chunks.counters["messages"] - before <= 3 * 2 * max(1, len(kernel.host.proxies)) + 2


@pytest.mark.compiled
@pytest.mark.parametrize("replicas", [1, 2])
def test_chosen_target_agrees_with_the_slow_path(replicas):
    async def same(kernel):
        chunks, chosen = kernel.vfs.chunks, set()
        began = kernel.began
        inodes = await kernel.make([some(100, seed) for seed in range(40)])
        for turn in range(3):
            for inode in inodes:
                number = await kernel.open(inode)
                kernel.vfs.reader.forget_contents()
                assert await kernel.read(number, 0, BLOCK)
                file = kernel.handle(number).file
                found = file.lanes[0]
                chain = chunks.replicas.of_chain(file, chain_of(inode, 0))
                file.lanes.clear()
                assert chunks.find_lane(file, 0) is found
                assert turn or chain.targets[inode % replicas] == found.target
                chosen.add(found)
                await kernel.close(number)
            if replicas > 1:
                kernel.vfs.chunks.replicas.failed(found)
        assert kernel.began == began + 3 * len(inodes) and len(chosen) == 2

    on_a_mount(same, FAR, replicas)("compiled")


@on_fast_path
async def test_unsent_reads_continue_on_the_slow_path(kernel):
    contents = [some(6000, seed) for seed in range(20)]
    numbers = [await kernel.open(inode) for inode in await kernel.make(contents)]
    submit, began = kernel.engine.fast_paths.submit, kernel.began

    def lost_before():
        for connection in kernel.connections():
            connection.abandon("a test")
        kernel.engine.fast_paths.submit = submit
        submit()

    kernel.engine.fast_paths.submit = lost_before
    asked = {
        kernel.send_read(number, 0, 8 * KIB): content
        for number, content in zip(numbers, contents, strict=True)
    }
    for unique, (error, answer) in (await kernel.answers(asked)).items():
        assert not error and answer == asked[unique]
    assert kernel.began > began


@on_fast_path
async def test_reply_that_the_kernel_does_not_take_is_an_error(kernel):
    content = some(60 * KIB, 1)
    inode, after = await kernel.make([content, some(100, 2)])
    number = await kernel.open(inode)
    kernel.theirs.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 8 * KIB)
    unique = kernel.send_read(number, 0, 60 * KIB)
    assert (await kernel.receive())[:2] == (unique, -errno.EIO)
    assert await kernel.read(await kernel.open(after), 0, BLOCK) == some(100, 2)


@on_fast_path
async def test_bug_before_the_request_is_an_error(kernel):
    first, second = await kernel.make([some(100, 1), some(100, 2)])
    number = await kernel.open(first)
    epoch, kernel.vfs.chunks.epoch = kernel.vfs.chunks.epoch, "no number"
    async with asyncio.timeout(20):
        with pytest.raises(OSError) as raised:
            await kernel.read(number, 0, BLOCK)
    assert raised.value.errno == errno.EIO
    kernel.vfs.chunks.epoch = epoch
    assert await kernel.read(number, 0, BLOCK) == some(100, 1)
    assert await kernel.read(await kernel.open(second), 0, BLOCK) == some(100, 2)


@on_fast_path
async def test_bug_in_the_fallback_is_an_error(kernel):
    (inode,) = await kernel.make([some(5000, 1)])
    number = await kernel.open(inode)
    submit, chunks = kernel.engine.fast_paths.submit, kernel.vfs.chunks
    send = chunks.send

    def broken(lane, reads):
        chunks.send = send
        raise RuntimeError("a bug")

    def lost_before():
        for connection in kernel.connections():
            connection.abandon("a test")
        kernel.engine.fast_paths.submit, chunks.send = submit, broken
        submit()

    kernel.engine.fast_paths.submit = lost_before
    unique = kernel.send_read(number, 0, 8 * KIB)
    async with asyncio.timeout(20):
        assert (await kernel.receive())[:2] == (unique, -errno.EIO)
        assert await kernel.read(number, 0, 8 * KIB) == some(5000, 1)


@on_fast_path
async def test_calls_are_counted_as_on_the_slow_path(kernel):
    calls = RPC_STATS.calls
    numbers = [
        await kernel.open(inode) for inode in await kernel.make([some(BLOCK, seed) for seed in range(10)])
    ]
    times = kernel.engine.requests.spent.times[Op.READ]

    def counted():
        reads = sum(calls.by_method[DATA_READ].counts)
        others = sum(sum(one.counts) for one in calls.by_method.values()) - reads  # requests of the sessions
        return calls.begun - others, calls.ended - others, reads, kernel.began, sum(times.counts)

    before = counted()
    for number in numbers:
        await kernel.read(number, 0, BLOCK)
    assert [now - then for now, then in zip(counted(), before, strict=True)] == [10] * 5


@pytest.mark.compiled
def test_unmounted_engine_does_not_wait_for_replies():
    async def work():
        async with Far() as host:
            kernel = Small(host)
            calls = []
            async with kernel:
                await kernel.init()
                await kernel.connect()
                numbers = [
                    await kernel.open(inode)
                    for inode in await kernel.make([some(BLOCK, seed) for seed in range(9)])
                ]
                host.instead(calls.append)
                asked = [kernel.send_read(number, 0, BLOCK) for number in numbers]
                await wait_for_requests(kernel, calls)
                assert not kernel.engine.can_read_on(OSError(errno.ENODEV, "it was unmounted"))
                await asyncio.wait_for(asyncio.gather(kernel.serving, return_exceptions=True), 60)
                assert (
                    not kernel.engine.requests.work and kernel.engine.fast_paths.small_files.compiled is None
                )
                answered = [await kernel.receive() for _ in asked]
                assert {unique for unique, _, _ in answered} == set(asked)
                assert {error for _, error, _ in answered} == {-errno.EINTR}
            host.instead(None)
            for call in calls:
                proxy_of(kernel, call).service.handle(call)
            await until(lambda: not [lane for lane in host.vfs.chunks.lanes.values() if lane.in_flight])

    run_whole(work(), 120)


@pytest.mark.compiled
def test_leaving_engine_waits_for_replies():
    async def work():
        async with Far() as host, Small(host) as kernel:
            await kernel.init()
            await kernel.connect()
            contents = [some(BLOCK, seed) for seed in range(9)]
            numbers = [await kernel.open(inode) for inode in await kernel.make(contents)]
            calls = []
            host.instead(calls.append)
            asked = {
                kernel.send_read(number, 0, BLOCK): content
                for number, content in zip(numbers, contents, strict=True)
            }
            await wait_for_requests(kernel, calls)
            leaving = asyncio.ensure_future(kernel.engine.leave(60))
            await asyncio.sleep(0.05)
            assert not leaving.done()
            host.instead(None)
            for call in calls:
                proxy_of(kernel, call).service.handle(call)
            for unique, (error, answer) in (await kernel.answers(asked)).items():
                assert not error and answer == asked[unique]
            await asyncio.wait_for(leaving, 60)

    run_whole(work(), 120)
