"""One pool, two mounts: a change is seen at the next open after its close; names within the kernel's cache time."""

import errno
import os
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.fuse.conftest import wait_until

pytestmark = pytest.mark.mount

KEPT_S = 120.0
"""One second for names and attributes, with time for a busy machine."""


@pytest.fixture
def there(here, second, mounted):
    """The same directory through the other mount."""
    place = second.place / here.relative_to(mounted.place)
    wait_until(place.exists, "the directory at the other mount", KEPT_S)
    return place


def test_closed_file_is_read_at_the_next_open(here, there):
    (here / "f").write_bytes(b"0")
    for number in range(20):
        content = f"version {number} ".encode() * (number + 1)
        (here if number % 2 else there).joinpath("f").write_bytes(content)
        assert (there if number % 2 else here).joinpath("f").read_bytes() == content


def test_cached_pages_of_a_changed_file_are_dropped(here, there):
    (here / "f").write_bytes(b"a" * 300_000)
    assert (there / "f").read_bytes() == b"a" * 300_000
    with open(here / "f", "r+b") as file:
        file.seek(200_000)
        file.write(b"b")
    content = (there / "f").read_bytes()
    assert len(content) == 300_000 and content[200_000:200_001] == b"b"


def test_synced_bytes_are_seen_by_direct_reads(here, there):
    import mmap

    with open(here / "f", "wb", buffering=0) as writer:
        writer.write(b"x" * 8192)
        os.fsync(writer.fileno())
        fd = os.open(there / "f", os.O_RDONLY | os.O_DIRECT)
        page = mmap.mmap(-1, 8192)
        assert os.preadv(fd, [page], 0) == 8192 and page[:] == b"x" * 8192
        os.close(fd)


def test_changed_names_are_seen_within_the_cache_time(here, there):
    assert not (there / "new").exists()
    (here / "new").write_bytes(b"1")
    wait_until((there / "new").exists, "a new name", KEPT_S)
    (here / "other").write_bytes(b"2")
    os.rename(here / "other", here / "new")
    wait_until(lambda: (there / "new").read_bytes() == b"2", "the replacement", KEPT_S)
    os.unlink(here / "new")
    wait_until(lambda: not (there / "new").exists(), "the removal", KEPT_S)


def test_replaced_file_is_found_again(here, there):
    """The other kernel still caches the old inode: it looks the path up again, with neither the old bytes nor an error."""
    for number in range(10):
        (here / "tmp").write_bytes(b"%d" % number)
        os.rename(here / "tmp", here / "f")
        assert (there / "f").read_bytes() == b"%d" % number


def test_unlinked_file_is_readable_while_open(here, there):
    (here / "f").write_bytes(b"kept" * 1000)
    with open(there / "f", "rb") as file:
        os.unlink(here / "f")
        assert file.read() == b"kept" * 1000


def test_truncation_is_seen(here, there):
    (here / "f").write_bytes(b"x" * 100_000)
    assert len((there / "f").read_bytes()) == 100_000
    os.truncate(here / "f", 10)
    assert (there / "f").read_bytes() == b"x" * 10
    os.truncate(there / "f", 20)
    assert (here / "f").read_bytes() == b"x" * 10 + bytes(10)


def test_appends_of_both_mounts_do_not_overlap(here, there):
    def append(place, who):
        with open(place / "log", "ab", buffering=0) as file:
            for number in range(100):
                file.write(f"{who} {number}\n".encode().rjust(64))

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(append, (here, there), "ab"))
    lines = [line.strip() for line in (here / "log").read_bytes().decode().splitlines()]
    assert sorted(lines) == sorted(f"{who} {number}" for who in "ab" for number in range(100))
    for who in "ab":
        assert [line for line in lines if line[0] == who] == [f"{who} {number}" for number in range(100)]


def test_exclusive_create_succeeds_once(here, there):
    won = []
    barrier = threading.Barrier(2)

    def make(place):
        for number in range(40):
            barrier.wait()
            try:
                os.close(os.open(place / f"n{number}", os.O_CREAT | os.O_EXCL))
                won.append(number)
            except FileExistsError:
                pass

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(make, (here, there)))
    assert sorted(won) == list(range(40))


def test_removed_directory_refuses_new_files(here, there):
    (here / "d").mkdir()
    wait_until((there / "d").exists, "the directory", KEPT_S)
    (there / "d").rmdir()
    with pytest.raises(OSError) as refused:
        (here / "d" / "x").write_bytes(b"")
    assert refused.value.errno in (errno.ENOENT, errno.ESTALE)


def test_changed_attributes_are_seen_within_the_cache_time(here, there):
    (here / "f").write_bytes(b"")
    assert (there / "f").stat().st_mode & 0o777 == 0o644
    os.chmod(here / "f", 0o600)
    wait_until(lambda: (there / "f").stat().st_mode & 0o777 == 0o600, "the mode", KEPT_S)
