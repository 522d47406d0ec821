"""Large reads of clients that cache the data: past the page cache, and through it when they are repeated."""

import asyncio
import contextlib
import os

import pytest

from nvpool.blockio.api import WaitingReader
from nvpool.blockio.reader import DIRECT_READ_BYTES, cached_pages, cached_pages_plain
from nvpool.core.clock import ManualClock
from nvpool.core.units import KIB, MIB
from nvpool.store.disk import direct_reads
from nvpool.store.disk.device import FileDevice


class Place:
    """A device over a file of random bytes, with an empty page cache."""

    def __init__(self, path, **options):
        self.content = os.urandom(4 * MIB)
        path.write_bytes(self.content)
        self.device = FileDevice(str(path), **options)
        if self.device.direct_reads.direct_fd < 0:
            pytest.skip("this file system or kernel has no reads past the page cache")
        self.forget()

    def forget(self):
        os.fsync(self.device.fd)
        os.posix_fadvise(self.device.fd, 0, 0, os.POSIX_FADV_DONTNEED)

    def cached(self):
        return cached_pages(self.device.fd, 0, 4 * MIB)

    async def read(self, offsets, lengths, keeps=True):
        positions = [sum(lengths[:at]) for at in range(len(lengths))]
        into = self.device.buffer(sum(lengths))
        missed = self.device.read_now(offsets, lengths, positions, into, keeps)
        if missed:
            done = asyncio.get_running_loop().create_future()
            self.device.begin_read(
                *[[column[at] for at in missed] for column in (offsets, lengths, positions)],
                into,
                keeps,
                done.set_result,
            )
            assert not any(await done)
        assert bytes(into) == b"".join(
            self.content[at : at + count] for at, count in zip(offsets, lengths, strict=True)
        )
        return missed


def at_place(work, path, **options):
    async def run():
        place = Place(path, **options)
        try:
            await work(place)
        finally:
            await place.device.close()

    asyncio.run(asyncio.wait_for(run(), 120))
    for number in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # of another process, closed meanwhile
            assert not os.readlink(f"/proc/self/fd/{number}").startswith(str(path)), (
                "descriptors are left open"
            )


@pytest.mark.parametrize("uring", [True, False])
def test_only_repeated_reads_enter_the_page_cache(tmp_path, uring):
    async def work(place):
        for offsets, lengths in (([0], [MIB]), ([MIB, 3 * MIB + 4096], [DIRECT_READ_BYTES, 300 * KIB])):
            await place.read(offsets, lengths)
            assert not place.cached()
        await place.read([0], [128 * KIB])
        assert not place.cached(), "different ranges"
        await place.read([0], [MIB])
        assert place.cached() >= 256, "the same ranges again"
        assert await place.read([0], [MIB]) == []

    at_place(work, tmp_path / "data", uring=uring)


def test_old_reads_do_not_count_as_repeated(tmp_path):
    clock = ManualClock()

    async def work(place):
        place.device.direct_reads.close()
        place.device.direct_reads = direct_reads.DirectReads(place.device.fd, place.device.reader, clock)
        for _ in range(3):
            await place.read([0], [MIB])
            assert not place.cached()
            clock.advance(2 * direct_reads.AGAIN_S)
        await place.read([0], [MIB])
        clock.advance(direct_reads.AGAIN_S - 1)
        for _ in range(10):  # another test may drop the machine's caches in this moment
            await place.read([0], [MIB])
            if place.cached():
                break
        assert place.cached()

    at_place(work, tmp_path / "data")


def test_small_or_uncached_client_reads_use_the_page_cache(tmp_path):
    async def work(place):
        await place.read([0, 2 * MIB], [MIB, 4096])
        assert place.cached() >= 257
        place.forget()
        await place.read([0], [MIB], keeps=False)
        assert place.cached() >= 256

    at_place(work, tmp_path / "data")


def test_cached_and_written_pages_are_read_from_the_cache(tmp_path):
    async def work(place):
        await place.read([0], [MIB], keeps=False)
        assert await place.read([0], [MIB]) == []
        place.device.write([new := os.urandom(8192)], 2 * MIB + 4096)
        place.content = place.content[: 2 * MIB + 4096] + new + place.content[2 * MIB + 4096 + 8192 :]
        assert await place.read([2 * MIB], [MIB])

    at_place(work, tmp_path / "data")


def test_drive_without_direct_reads_uses_the_page_cache(tmp_path):
    async def work(place):
        directory = os.open(tmp_path, os.O_RDONLY)
        os.dup2(directory, place.device.direct_reads.direct_fd)
        os.close(directory)
        await place.read([0], [MIB])
        assert place.cached() >= 256
        await place.read([2 * MIB], [MIB])
        assert place.cached() >= 512

    at_place(work, tmp_path / "data")


def test_remembered_reads_are_bounded(monkeypatch, tmp_path):
    monkeypatch.setattr(direct_reads, "PLACES_MAX", 10)

    class Nothing(WaitingReader):
        def begin(self, fd, offsets, lengths, positions, into, on_done):
            on_done([None])

    (tmp_path / "data").write_bytes(bytes(4096))
    fd = os.open(tmp_path / "data", os.O_RDONLY)
    reads = direct_reads.DirectReads(fd, Nothing())
    for at in range(100):
        reads.begin([at * MIB], [MIB], [0], memoryview(b""), lambda outcome: None)
        assert len(reads.young) <= 11 and len(reads.old) <= 11
    reads.close()
    os.close(fd)


def test_kernel_reports_cached_pages(tmp_path):
    (tmp_path / "data").write_bytes(bytes(MIB))
    fd = os.open(tmp_path / "data", os.O_RDONLY)
    for function in (cached_pages, cached_pages_plain):
        if function(fd, 0, MIB) < 0:
            pytest.skip("this kernel does not report cached pages")
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_RANDOM)
        os.fsync(fd)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        assert function(fd, 0, MIB) == 0
        os.pread(fd, 8192, 64 * KIB)
        assert (function(fd, 0, MIB), function(fd, 68 * KIB, MIB), function(fd, 0, 64 * KIB)) == (2, 1, 0)
    os.close(fd)
    assert cached_pages(fd, 0, MIB) == cached_pages_plain(fd, 0, MIB) == -1


def test_repeated_reads_cause_no_kernel_read_ahead(tmp_path):
    async def work(place):
        for _ in range(2):
            await place.read([0], [MIB])
            await place.read([MIB], [MIB])
        assert place.cached() == 512, (
            "otherwise the next block would be cached, and its read would cache the one after it"
        )

    at_place(work, tmp_path / "data")
