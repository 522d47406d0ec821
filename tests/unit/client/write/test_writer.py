"""The writer against scripted stores: order, errors, memory, truncations."""

from __future__ import annotations

import asyncio
import os
import random

import pytest

from nvpool.client.data.unstable_writes import Stored
from nvpool.client.state.client_events import ClientEvents
from nvpool.client.state.metadata_cache import OpenInode
from nvpool.client.state.options import ClientOptions
from nvpool.client.write.writeback import Writer
from nvpool.core.clock import SYSTEM_CLOCK
from nvpool.core.errors import DeadlineExceeded, NoSpace, StaleCut
from nvpool.core.units import KIB, MIB
from nvpool.rpc.messages.meta_messages import Attr

CHUNK_BITS = 16


class Stores:
    """Receives writes as the chunk client does; each waits until the test releases it."""

    submitter = None  # each write is sent by a task

    def __init__(self) -> None:
        self.content = bytearray()
        self.waiting: list[tuple[int, int, asyncio.Future]] = []
        self.immediate = True
        self.errors: list[Exception] = []
        self.flushed: list[int] = []
        self.lost: set[tuple[int, int]] = set()
        self.pieces: list[tuple[int, int]] = []

    async def write(self, file, index, offset, length, parts, checksums, deadline_s) -> Stored:
        start = (index << CHUNK_BITS) + offset
        self.pieces.append((start, length))
        data = b"".join(parts)
        assert len(data) == length
        if not self.immediate:
            future = asyncio.get_running_loop().create_future()
            for first, count, _ in self.waiting:
                assert (
                    first // 4096 > (start + length - 1) // 4096
                    or (first + count - 1) // 4096 < start // 4096
                )
            self.waiting.append((start, length, future))
            try:
                await future
            finally:
                self.waiting.remove((start, length, future))
        if self.errors:
            raise self.errors.pop(0)
        if len(self.content) < start + length:
            self.content.extend(bytes(start + length - len(self.content)))
        self.content[start : start + length] = data
        return Stored((1, index % 2), 1, file.cut)

    async def flush(self, places) -> set:
        self.flushed += [1 + number for _, number in places]
        return self.lost

    def release(self) -> None:
        for _, _, future in list(self.waiting):
            if not future.done():
                future.set_result(None)


class Case:
    def __init__(self, **options) -> None:
        self.stores = Stores()
        self.reports: list[tuple[int, bool, bool]] = []
        self.refreshed = 0
        self.report_errors: list[Exception] = []
        self.writer = Writer(
            self.stores,
            ClientOptions(**options),
            SYSTEM_CLOCK,
            ClientEvents(),
            refresh=self.refresh,
            report=self.report,
        )
        self.file = OpenInode(Attr(inode=5, table=1, chunk_bits=CHUNK_BITS, cut=3))
        self.file.handles = 1

    async def refresh(self, file, rights) -> None:
        self.refreshed += 1
        file.cut += 1
        file.written.was_cut()

    async def report(self, file, end, stored, wrote, sync) -> None:
        self.reports.append((end, wrote, sync))
        if self.report_errors:
            raise self.report_errors.pop(0)
        file.attr = Attr(inode=5, size=max(end, file.attr.size), change=file.attr.change + 1, cut=file.cut)

    async def flush(self) -> None:
        await self.writer.store(self.file)
        await self.writer.settle(self.file)


def run(work) -> None:
    asyncio.run(asyncio.wait_for(work, 120))


async def settled() -> None:
    """Let all tasks go on until they wait for the test.

    On a busy machine the sleep may end after a single turn of the loop.
    """
    await asyncio.sleep(0.01)
    for _ in range(50):
        await asyncio.sleep(0)


def test_small_file_is_one_write_and_one_report():
    async def main() -> None:
        case = Case()
        await case.writer.write(case.file, 0, b"a" * 3000)
        await case.writer.write(case.file, 3000, b"b" * 1096)
        assert case.stores.pieces == [] and case.file.size == 4096
        await case.flush()
        assert case.stores.pieces == [(0, 4096)]
        assert case.reports == [(4096, True, False)]
        await case.flush()
        assert len(case.reports) == 1
        assert case.file.written.clean and case.writer.held_bytes() == 0

    run(main())


def test_sequential_writes_are_sent_in_complete_chunks():
    async def main() -> None:
        case = Case()
        for at in range(0, 4 << CHUNK_BITS, 4096):
            await case.writer.write(case.file, at, bytes([at >> CHUNK_BITS]) * 4096)
        for _ in range(3):
            await asyncio.sleep(0)
        first, *others = case.stores.pieces
        assert first == (0, 4096), "the first bytes of a new file do not wait"
        assert others[0] == (4096, (1 << CHUNK_BITS) - 4096)
        assert others[1:] == [(n << CHUNK_BITS, 1 << CHUNK_BITS) for n in range(1, 4)]

    run(main())


def test_writes_to_one_block_are_never_concurrent():
    async def main() -> None:
        case = Case()
        case.stores.immediate = False
        await case.writer.write(case.file, 0, b"a" * 100)
        first = asyncio.create_task(case.writer.store(case.file))
        await settled()
        await case.writer.write(case.file, 100, b"b" * 100)
        second = asyncio.create_task(case.writer.store(case.file))
        await settled()
        assert len(case.stores.waiting) == 1
        case.stores.release()
        await settled()
        assert first.done() and [piece[0] for piece in case.stores.waiting] == [100]
        case.stores.release()
        await second
        assert case.stores.content == b"a" * 100 + b"b" * 100

    run(main())


def test_random_writes_end_as_the_last_of_each_byte():
    async def main() -> None:
        dice = random.Random(11)
        case = Case(write_buffer_bytes=300 * KIB, write_flight_bytes=100 * KIB)
        case.stores.immediate = False
        expected = bytearray()

        async def serve() -> None:
            while True:
                await asyncio.sleep(0.0005)
                for _, _, future in list(case.stores.waiting):
                    if dice.random() < 0.5 and not future.done():
                        future.set_result(None)

        server = asyncio.create_task(serve())
        for step in range(400):
            offset = dice.choice([dice.randrange(200_000), len(expected)])
            data = os.urandom(dice.choice([1, 100, 4096, 10_000, 40_000]))
            await case.writer.write(case.file, offset, data if dice.random() < 0.5 else bytearray(data))
            expected.extend(bytes(max(0, offset + len(data) - len(expected))))
            expected[offset : offset + len(data)] = data
            laid = case.writer.overlay(case.file, max(0, offset - 10), offset + len(data) + 10)
            seen = bytearray(len(expected) + 10)
            for start, end, part in laid:
                seen[start:end] = part
            assert seen[offset : offset + len(data)] == data
            if step % 40 == 0:
                await case.flush()
            elif step % 17 == 0:
                case.writer.mark_all_due(case.file.written)
                case.writer.pump(case.file.written)
        await case.flush()
        server.cancel()
        assert case.stores.content == expected
        assert case.file.attr.size == len(expected)
        assert case.writer.held_bytes() == 0

    run(main())


def test_error_is_reported_once_at_the_next_write():
    async def main() -> None:
        case = Case()
        case.stores.errors = [NoSpace()]
        await case.writer.write(case.file, 0, b"x" * 10)
        await case.flush()
        await case.flush()
        with pytest.raises(NoSpace):
            await case.writer.write(case.file, 10, b"y")
        assert case.file.size == 0
        assert await case.writer.write(case.file, 0, b"z") == 1
        await case.flush()
        case.writer.raise_error(case.file)
        assert case.stores.content == b"z"

    run(main())


def test_full_buffer_makes_writers_wait_until_the_deadline():
    async def main() -> None:
        case = Case(write_buffer_bytes=64 * KIB, deadline_s=0.1)
        case.stores.immediate = False
        await case.writer.write(case.file, 0, bytes(60 * KIB))
        with pytest.raises(DeadlineExceeded):
            await case.writer.write(case.file, 60 * KIB, bytes(60 * KIB))
        assert case.writer.held_bytes() == 60 * KIB
        waiting = asyncio.create_task(case.writer.write(case.file, 60 * KIB, bytes(60 * KIB)))
        await settled()
        case.stores.release()
        assert await waiting == 60 * KIB

    run(main())


def test_bytes_in_flight_are_bounded_and_files_take_turns():
    async def main() -> None:
        case = Case(write_flight_bytes=128 * KIB)
        case.stores.immediate = False
        for number in range(8):
            await case.writer.write(case.file, number << CHUNK_BITS, bytes(1 << CHUNK_BITS))
        await settled()
        assert len(case.stores.waiting) == 2
        done = asyncio.create_task(case.writer.store(case.file))
        while not done.done():
            case.stores.release()
            await asyncio.sleep(0)
        assert len(case.stores.content) == 8 << CHUNK_BITS

    run(main())


def test_write_that_meets_a_truncation_is_sent_again():
    async def main() -> None:
        case = Case()
        case.stores.errors = [StaleCut(), StaleCut()]
        await case.writer.write(case.file, 10, b"after")
        await case.flush()
        assert case.refreshed == 2 and case.file.cut == 5
        assert case.reports == [(15, True, False)]
        case.writer.raise_error(case.file)

    run(main())


def test_size_truncated_before_its_report_is_not_reported():
    async def main() -> None:
        case = Case()
        await case.writer.write(case.file, 0, bytes(5000))
        await case.writer.store(case.file)
        case.report_errors = [StaleCut()]
        await case.writer.settle(case.file)
        assert [report[0] for report in case.reports] == [5000, 0]
        assert case.file.size == 0

    run(main())


def test_truncation_drops_bytes_behind_it_and_keeps_the_rest():
    async def main() -> None:
        case = Case()
        case.stores.immediate = False
        await case.writer.write(case.file, 0, b"a" * (1 << CHUNK_BITS))
        await case.writer.write(case.file, 1 << CHUNK_BITS, b"b" * 100)
        cut = asyncio.create_task(case.writer.begin_cut(case.file, (1 << CHUNK_BITS) + 50))
        await settled()
        assert not cut.done()
        case.stores.release()
        await cut
        assert case.file.written.end == (1 << CHUNK_BITS) + 50
        await case.writer.write(case.file, 1 << CHUNK_BITS, b"c" * 10)
        case.stores.immediate = True
        stored = asyncio.create_task(case.writer.store(case.file))
        await settled()
        assert not stored.done()
        case.writer.end_cut(case.file)
        await stored
        assert case.stores.content[1 << CHUNK_BITS :] == b"c" * 10 + b"b" * 40

    run(main())


def test_old_bytes_are_sent_and_reported_in_the_background():
    async def main() -> None:
        case = Case(write_age_s=0.0)
        await case.writer.write(case.file, 0, b"log line")
        await case.writer.run_once()
        await settled()
        await case.writer.run_once()
        await settled()
        assert case.stores.content == b"log line" and case.reports[-1][0] == 8

    run(main())


def test_flush_goes_once_to_each_target_with_new_bytes():
    async def main() -> None:
        case = Case()
        await case.writer.write(case.file, 0, bytes(3 << CHUNK_BITS))
        await case.flush()
        await case.writer.make_durable(5)
        await case.writer.make_durable(5)
        assert case.stores.flushed == [1, 2]
        assert not case.writer.has_unstable_writes(5)

    run(main())


def test_two_concurrent_flushes_both_wait_for_the_stores():
    async def main() -> None:
        case = Case()
        await case.writer.write(case.file, 0, bytes(100))
        await case.flush()
        gate = asyncio.Event()
        flush = case.stores.flush

        async def slow(targets) -> set:
            await gate.wait()
            return await flush(targets)

        case.stores.flush = slow
        both = [asyncio.create_task(case.writer.make_durable(5)) for _ in range(2)]
        await settled()
        assert not both[0].done() and not both[1].done()
        assert case.writer.has_unstable_writes(5)
        await case.writer.write(case.file, 0, bytes(100))
        await case.flush()  # not covered by these flushes: it may reach the store after them
        gate.set()
        await asyncio.gather(*both)
        assert case.writer.has_unstable_writes(5)
        await case.writer.make_durable(5)
        assert not case.writer.has_unstable_writes(5)

    run(main())


def test_waiter_for_truncated_bytes_is_woken():
    async def main() -> None:
        case = Case()
        await case.writer.begin_cut(case.file, 0)  # nothing has been written
        await case.writer.write(case.file, 0, b"kept")
        await case.writer.begin_cut(case.file, 1000)
        await case.writer.write(case.file, 2000, b"dropped")
        waiting = asyncio.create_task(case.writer.store(case.file))
        await settled()
        await case.writer.begin_cut(case.file, 0)
        await asyncio.wait_for(waiting, 120)

    run(main())


def test_bytes_stored_after_their_report_are_reported_again():
    async def main() -> None:
        case = Case(write_age_s=0.0)
        case.file.attr = Attr(inode=5, size=100, table=1, chunk_bits=CHUNK_BITS)
        case.stores.immediate = False
        await case.writer.write(case.file, 0, b"new")
        await case.writer.run_once()
        await settled()
        assert case.reports == [(0, True, False)] and len(case.stores.waiting) == 1
        case.stores.release()
        await case.flush()
        assert case.reports[1:] == [(3, True, False)], "a reader that opened in between has old bytes"

    run(main())


def test_large_bytes_are_kept_without_a_copy():
    async def main() -> None:
        case = Case()
        content = os.urandom(40 * KIB)
        await case.writer.write(case.file, 64 * KIB, content)
        assert case.file.written.dirty[64 * KIB >> CHUNK_BITS][0].parts[0] is content
        mutable = bytearray(b"x" * 40 * KIB)
        await case.writer.write(case.file, MIB, mutable)
        mutable[:] = b"y" * 40 * KIB
        await case.flush()
        assert case.stores.content[MIB:] == b"x" * 40 * KIB

    run(main())
