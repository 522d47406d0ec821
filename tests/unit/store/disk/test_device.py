"""Drive access through the page cache and past it shows the same bytes."""

import asyncio
import mmap
import os
import select
import signal
import threading

import pytest

from nvpool.blockio import uring_reader
from nvpool.store.disk.device import DIRECT_WRITE_BYTES, FileDevice, begins_at_page


def with_device(tmp_path, work) -> None:
    async def run():
        path = tmp_path / "data"
        with path.open("wb") as file:
            file.truncate(8 << 20)
        device = FileDevice(str(path))
        try:
            if not device.direct_write_bytes:
                pytest.skip("this file system knows no O_DIRECT")
            await work(device)
        finally:
            await device.close()

    asyncio.run(run())


def read(device: FileDevice, offset: int, length: int) -> bytes:
    into = memoryview(bytearray(length))
    missed = device.read_now([offset], [length], [0], into)
    return bytes(device.read_whole(offset, length) if missed else into)


def test_direct_write_replaces_cached_bytes(tmp_path):
    async def work(device):
        for size in (DIRECT_WRITE_BYTES, 1 << 20):
            old, new = os.urandom(size), os.urandom(size)
            for at in range(0, size, 4096):
                device.write([old[at : at + 4096]], at)
            assert read(device, 0, size) == old
            await device.write_direct(new, [(0, size // 2), (size // 2, size // 2)])
            assert read(device, 0, size) == new
            device.write([old[:4096]], 4096)
            assert read(device, 0, size) == new[:4096] + old[:4096] + new[8192:]
        assert device.writes == "direct"

    with_device(tmp_path, work)


def test_direct_write_accepts_any_buffer_alignment(tmp_path):
    async def work(device):
        content = os.urandom(DIRECT_WRITE_BYTES)
        memory = mmap.mmap(-1, DIRECT_WRITE_BYTES + 4096, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        for skip in (0, 16, 512, 4096):
            buffer = memoryview(memory)[skip : skip + DIRECT_WRITE_BYTES]
            assert begins_at_page(buffer) == (not skip % 4096)
            buffer[:] = content
            for form in (buffer, buffer.toreadonly(), bytes(buffer), bytearray(buffer)):
                await device.write_direct(bytes(DIRECT_WRITE_BYTES), [(0, DIRECT_WRITE_BYTES)])
                await device.write_direct(form, [(0, 8192), (8192, DIRECT_WRITE_BYTES - 8192)])
                assert read(device, 0, DIRECT_WRITE_BYTES) == content
        assert device.writes == "direct"

    with_device(tmp_path, work)


def test_direct_write_falls_back_to_the_cache_with_one_warning(tmp_path, caplog):
    async def work(device):
        content = os.urandom(DIRECT_WRITE_BYTES)
        await device.write_direct(
            content, [(100, DIRECT_WRITE_BYTES)]
        )  # EINVAL, the reply of a drive with larger blocks
        assert device.writes == "cached" and device.direct_write_bytes == 0
        assert read(device, 100, len(content)) == content

    with_device(tmp_path, work)
    assert len(caplog.records) == 1 and "page cache" in caplog.text


@pytest.mark.compiled
def test_signal_does_not_interrupt_the_drive_probe():
    """An early end would free memory into which the kernel still writes."""
    there, here = os.pipe()
    writing = threading.Timer(0.5, os.write, (here, bytes(4096)))
    before = signal.signal(signal.SIGALRM, lambda *_: None)
    try:
        ring = uring_reader.compiled.Ring(1)
    except OSError:
        pytest.skip("the kernel forbids io_uring here")
    try:
        writing.start()
        signal.setitimer(signal.ITIMER_REAL, 0.1)
        ring.probe(there)
        assert not writing.is_alive() or writing.finished.wait(60)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
        writing.join()
        ring.close()
        os.close(there)
        os.close(here)


@pytest.mark.compiled
@pytest.mark.parametrize("refused", [1, 3])
def test_reads_refused_by_the_kernel_are_submitted_again(tmp_path, refused):
    class Short:
        """A ring whose kernel refuses the first submissions."""

        def __init__(self, ring):
            self.ring, self.left = ring, refused

        def __getattr__(self, name):
            return getattr(self.ring, name)

        def submit(self):
            if self.left:
                self.left -= 1
                return 1
            return self.ring.submit()

    async def main():
        path = tmp_path / "data"
        path.write_bytes(os.urandom(8192))
        fd = os.open(path, os.O_RDONLY)
        reader = uring_reader.UringReader.probe(fd)
        if reader is None:
            os.close(fd)
            pytest.skip("the kernel forbids io_uring here")
        reader.ring = Short(reader.ring)
        for _ in range(2):
            into, done = memoryview(bytearray(8192)), asyncio.get_running_loop().create_future()
            reader.begin(fd, [0, 4096], [4096, 4096], [0, 4096], into, done.set_result)
            assert await asyncio.wait_for(done, 60) == [None, None] and bytes(into) == path.read_bytes()
        reader.ring.left = 2
        reader.begin(fd, [0], [4096], [0], into, lambda outcome: None)
        await reader.close()
        os.close(fd)

    asyncio.run(main())


@pytest.mark.compiled
def test_failing_callback_does_not_block_other_reads(tmp_path):
    async def main():
        path = tmp_path / "data"
        path.write_bytes(os.urandom(8192))
        fd = os.open(path, os.O_RDONLY)
        reader = uring_reader.UringReader.probe(fd)
        if reader is None:
            os.close(fd)
            pytest.skip("the kernel forbids io_uring here")
        loop = asyncio.get_running_loop()
        raised, done, into = [], loop.create_future(), memoryview(bytearray(8192))
        loop.set_exception_handler(lambda _, context: raised.append(context["exception"]))

        def refuse(outcome):
            raise ZeroDivisionError

        reader.begin(fd, [0], [4096], [0], into, refuse)
        reader.begin(fd, [4096], [4096], [4096], into, done.set_result)
        reader.submit()
        select.select([reader.ring.fileno], [], [], 60)
        assert await asyncio.wait_for(done, 60) == [None] and bytes(into) == path.read_bytes()
        assert [type(error) for error in raised] == [ZeroDivisionError]
        await asyncio.wait_for(reader.close(), 60)
        os.close(fd)

    asyncio.run(main())
