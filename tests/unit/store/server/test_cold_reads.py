"""Reads that wait for the drive: completed without a task, for each result of the drive and for clients that have left."""

import asyncio
from functools import partial

import pytest

from nvpool.core import errors
from nvpool.rpc.peer_roles import Peer
from nvpool.rpc.v1 import data_pb2 as pb
from nvpool.rpc.v1.wire_pb2 import Method
from nvpool.store.chunks.api import create_chunk_store
from nvpool.store.chunks.block_store import open_chunk_store
from nvpool.store.chunks.read_batch import READ, RESULT
from nvpool.store.server import waiting_calls
from nvpool.testing.fakes.meta_shard import PEER
from tests.unit.store.server.test_store_service import CLIENT, Bench, FakeCall

BLOCK = 4096
CONTENT = b"".join(bytes([number]) * BLOCK for number in range(1, 9))


class Cold(Bench):
    """A store on a drive with an empty cache that replies when the test says so."""

    def __init__(self, store):
        super().__init__(store)
        device = store.device
        device.read_now = lambda offsets, *_: list(range(len(offsets)))
        self._begin, self.waiting = device.begin_read, []
        device.begin_read = lambda *arguments: self.waiting.append(arguments)

    def ask(self, *blocks, verify=False, peer=PEER):
        """A call that reads these blocks, started."""
        reads = b"".join(READ.pack(1, 0, block * BLOCK, BLOCK, 0, 0) for block in blocks)
        request = pb.ReadRequest(target=1, grants=[self.grant()], reads=reads, verify=verify)
        call = FakeCall(Method.DATA_READ, request.SerializeToString())
        call.peer = peer
        self.service.handle(call)
        return call

    async def let_go(self):
        """The drive reads the requested blocks; returns when all consequences are complete."""
        waiting, self.waiting = self.waiting, []
        done = [asyncio.get_running_loop().create_future() for _ in waiting]
        for future, (*what, on_done) in zip(done, waiting, strict=True):
            self._begin(*what, partial(self._came, on_done, future))
        await asyncio.wait_for(asyncio.gather(*done), 120)

    @staticmethod
    def _came(on_done, future, outcome):
        on_done(outcome)
        future.set_result(None)


def cold(test):
    def run(tmp_path):
        async def main():
            create_chunk_store(tmp_path / "t", 1, "pool", 64 << 20)
            bench = Cold(await open_chunk_store(tmp_path / "t", 1))
            await bench.write([(1, 0, 1, 0, 0, CONTENT)])
            await test(bench)
            await bench.service.close()

        asyncio.run(main())

    run.__name__ = test.__name__
    return run


def outcome(call):
    """Status of each read, and the bytes."""
    assert call.error is None
    return [
        one[0] for one in RESULT.iter_unpack(pb.ReadReply.FromString(call.message_out).results)
    ], call.payload_out


def part(*blocks):
    return b"".join(CONTENT[block * BLOCK : (block + 1) * BLOCK] for block in blocks)


@cold
async def test_cold_read_completes_without_a_task(bench):
    tasks = asyncio.all_tasks()
    calls = [bench.ask(3), bench.ask(0, 7, 5)]
    assert asyncio.all_tasks() == tasks and not any(call.answered.is_set() for call in calls)
    await bench.let_go()
    assert [outcome(call) for call in calls] == [([0], part(3)), ([0, 0, 0], part(0, 7, 5))]
    assert not bench.service.waiting_count and bench.store.readings.oldest() == float("inf")


@cold
async def test_drive_error_is_reported_for_its_read_only(bench):
    call, other = bench.ask(0, 1, 2), bench.ask(4)
    (*_, first), (*_, second) = bench.waiting
    first([None, errors.DriveFailed("a bad sector"), None])
    second([errors.DriveFailed("another")])
    status, payload = outcome(call)
    assert status == [0, errors.DriveFailed.wire_code, 0] and len(payload) == 2 * BLOCK
    assert outcome(other) == ([errors.DriveFailed.wire_code], b"")


@cold
async def test_cold_block_with_a_wrong_checksum_is_recorded(bench):
    place = bench.store.index.chunk(1, 0).segments[0].disk[2]
    bench.store.device.write([b"\xff" * BLOCK], place * BLOCK)
    call = bench.ask(1, 2, verify=True)
    await bench.let_go()
    status, payload = outcome(call)
    assert status == [0, errors.ChecksumMismatch.wire_code] and payload == part(1)
    assert [bad[:3] for bad in bench.store.bad_blocks()] == [(1, 0, 2)]


@cold
async def test_failed_reply_does_not_block_others(bench):
    spoiled, good = bench.ask(1), bench.ask(2)
    (*_, first), (*_, second) = bench.waiting
    first([None, errors.DriveFailed("of no read")])
    second([None])
    assert isinstance(spoiled.error, ValueError) and outcome(good)[0] == [0]
    assert not bench.service.waiting_count and bench.store.readings.oldest() == float("inf")


@cold
async def test_close_waits_for_reads_for_the_given_time(bench):
    call = bench.ask(6)
    closing = asyncio.create_task(bench.service.close(10.0))
    await asyncio.sleep(0)
    with pytest.raises(errors.Draining):
        bench.ask(1)
    await bench.let_go()
    await asyncio.wait_for(closing, 120)
    assert outcome(call) == ([0], part(6))


@cold
async def test_close_without_drain_fails_each_read_once(bench):
    call = bench.ask(6)
    ((*_, on_done),) = bench.waiting
    await bench.service.close()
    assert isinstance(call.error, errors.Draining)
    on_done([errors.Cancelled()])
    assert call.message_out is None


@cold
async def test_waiting_reads_are_bounded(bench):
    before, waiting_calls.WAITING_MAX = waiting_calls.WAITING_MAX, 2
    try:
        calls = [bench.ask(1), bench.ask(2)]
        with pytest.raises(errors.Busy):
            bench.ask(3)
        await bench.let_go()
        assert [outcome(call)[0] for call in calls] == [[0], [0]]
        bench.ask(3)
        await bench.let_go()
    finally:
        waiting_calls.WAITING_MAX = before


@cold
async def test_waiting_reads_of_one_client_are_bounded(bench):
    other = Peer("two", "10.0.0.3:1", False, "client/two.0a1b2c3d")
    before, waiting_calls.WAITING_PER_PEER_MAX = waiting_calls.WAITING_PER_PEER_MAX, 2
    try:
        calls = [bench.ask(number, peer=CLIENT) for number in (1, 2)]
        with pytest.raises(errors.Busy, match=CLIENT.member):
            bench.ask(3, peer=CLIENT)
        calls += [bench.ask(3, peer=peer) for peer in (other, PEER, PEER, PEER)]
        await bench.let_go()
        assert [outcome(call)[0] for call in calls] == [[0]] * 6
        calls = [bench.ask(number, peer=CLIENT) for number in (1, 2)]
        await bench.let_go()
        assert [outcome(call)[0] for call in calls] == [[0]] * 2
    finally:
        waiting_calls.WAITING_PER_PEER_MAX = before


@pytest.mark.parametrize("missing", [[], [1], [0, 1, 2]])
def test_client_memory_is_filled_only_from_cached_blocks(tmp_path, missing):
    """Blocks from the drive go to the store's own buffer: the client may leave meanwhile, and reuse its memory."""

    async def main():
        create_chunk_store(tmp_path / "t", 1, "pool", 64 << 20)
        bench = Bench(await open_chunk_store(tmp_path / "t", 1))
        await bench.write([(1, 0, 1, 0, 0, CONTENT)])
        store, device = bench.store, bench.store.device
        reads = b"".join(READ.pack(1, 0, block * BLOCK, BLOCK, 0, 0) for block in (4, 0, 6))
        wanted = b"".join(CONTENT[block * BLOCK :][:BLOCK] for block in (4, 0, 6))
        theirs, read_now = memoryview(bytearray(3 * BLOCK)), device.read_now

        def partly(offsets, lengths, positions, into, *rest):
            had = [at for at in range(len(offsets)) if at not in missing]
            assert not read_now(
                *([values[at] for at in had] for values in (offsets, lengths, positions)), into, *rest
            )
            return missing

        device.read_now = partly
        batch = store.read_now(reads, [1], room=lambda count: theirs[:count])
        if missing:
            theirs[:] = b"?" * len(theirs)  # reused for other data
            await store.finish_read(batch)
            assert theirs == b"?" * len(theirs), "memory was written after the client left"
        assert (batch.payload[0].obj is theirs.obj) == (not missing)
        assert b"".join(batch.payload) == wanted
        theirs[:] = bytes(len(theirs))
        device.read_now = read_now
        checked = store.read_now(reads, [1], True, lambda count: theirs[:count])
        assert b"".join(checked.payload) == wanted and not any(theirs), (
            "the checksum was verified in memory that the client can change"
        )
        await bench.service.close()

    asyncio.run(main())
