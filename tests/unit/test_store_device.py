"""Two ways to the same drive, through the page cache and past it, show the same bytes."""

import os

import pytest

from nvpool.store.device import DIRECT_WRITE_BYTES, FileDevice


@pytest.fixture
def device(tmp_path):
    path = tmp_path / "data"
    with path.open("wb") as file:
        file.truncate(8 << 20)
    device = FileDevice(str(path))
    yield device
    device._direct_fd = device._close_direct()
    os.close(device.fd)


def read(device: FileDevice, offset: int, length: int) -> bytes:
    into = memoryview(bytearray(length))
    missed = device.read_now([offset], [length], [0], into)
    return bytes(device.read_whole(offset, length) if missed else into)


def test_a_large_write_past_the_page_cache_replaces_what_was_cached(device):
    for size in (DIRECT_WRITE_BYTES, 1 << 20):
        old, new = os.urandom(size), os.urandom(size)
        for at in range(0, size, 4096):
            device.write([old[at:at + 4096]], at)
        assert read(device, 0, size) == old
        device.write([new[:size // 2], memoryview(new)[size // 2:]], 0)
        assert read(device, 0, size) == new
        device.write([old[:4096]], 4096)
        assert read(device, 0, size) == new[:4096] + old[:4096] + new[8192:]


def test_where_a_write_can_not_go_past_the_page_cache_it_goes_through_it(device):
    if device._direct_fd < 0:
        pytest.skip("this file system knows no O_DIRECT")
    content = os.urandom(DIRECT_WRITE_BYTES)
    device.write([content], 100)  # refused with EINVAL past the cache, as all writes are by a drive with larger blocks
    assert device._direct_fd == -1
    assert read(device, 100, len(content)) == content
    device.write([content], 4096)
    assert read(device, 4096, len(content)) == content
