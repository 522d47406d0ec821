"""Appends on a full pool: a refused record leaves the file as if it had not been written, on every mount."""

import contextlib
import errno
import os
import shutil
import tempfile
from pathlib import Path

import pytest

from nvpool.core.units import MIB
from nvpool.testing.env.pool import RealPool
from tests.fuse.conftest import FLOOR, Mounted, wait_until

pytestmark = [pytest.mark.mount, pytest.mark.skipif(FLOOR, reason="memory has no such limit")]
ENGINES = ("kernel", "pyfuse3")
SIZE = 64 * MIB
RECORD_BYTES = 10_000
"""A record begins and ends inside a block, so that the last block is written again with each."""
REFUSALS = 3


def record(number):
    return b"%09d\n" % number * (RECORD_BYTES // 10)


@pytest.fixture
def small(engine):
    """A pool of one small drive, and its two mounts."""
    top = Path(tempfile.mkdtemp(prefix="nvpool-full-"))
    try:
        with contextlib.ExitStack() as stack:
            pool = stack.enter_context(RealPool(top / "pool", sizes=(SIZE,)))
            pool.make()
            pool.start()
            mounts = []
            for name, options in (("m1", ("--engine", engine)), ("m2", ())):
                mounts.append(Mounted(pool.path, top / name, *options))
                stack.callback(mounts[-1].end)
            yield pool, mounts[0].place, mounts[1].place
    finally:
        shutil.rmtree(top)


class Log:
    """A file to which records are appended: through one descriptor, or through a new one for each record."""

    FLAGS = os.O_CREAT | os.O_WRONLY | os.O_APPEND

    def __init__(self, path, is_kept_open):
        self.name, self._path, self.numbers = path.name, path, []
        self._fd = os.open(path, self.FLAGS) if is_kept_open else None

    def append(self, number):
        """Append a record and sync it. Whether it is stored; the only error allowed is ENOSPC."""
        fd = os.open(self._path, self.FLAGS) if self._fd is None else self._fd
        try:
            assert os.write(fd, record(number)) == RECORD_BYTES
            os.fsync(fd)
        except OSError as error:
            assert error.errno == errno.ENOSPC, error
            return False
        finally:
            if self._fd is None:
                with contextlib.suppress(OSError):  # the close may report the refusal again
                    os.close(fd)
        self.numbers.append(number)
        return True

    def expected(self):
        return b"".join(map(record, self.numbers))

    def is_as_expected(self, place):
        data = (place / self.name).read_bytes()
        assert b"\0" not in data, f"{data.count(0)} NUL bytes in place of a refused record"
        return data == self.expected() and os.stat(place / self.name).st_size == len(data)

    def close(self):
        if self._fd is not None:
            os.close(self._fd)


def fill(path):
    """Write a file until the pool refuses more."""
    ballast = os.urandom(MIB)
    with pytest.raises(OSError) as refused, open(path, "wb", buffering=0) as file:
        for _ in range(2 * SIZE // MIB):
            file.write(ballast)
            os.fsync(file.fileno())
    assert refused.value.errno == errno.ENOSPC


def test_append_refused_on_a_full_pool_does_not_grow_the_file(small):
    pool, here, there = small
    logs = [Log(here / "open", True), Log(here / "reopened", False)]
    for number in range(3):
        assert all([log.append(number) for log in logs])
    fill(here / "ballast")
    for log in logs:
        number, refused = 3, 0
        while refused < REFUSALS:
            assert number < 2 * SIZE // RECORD_BYTES, "the pool never refuses a record"
            refused += not log.append(number)
            number += 1
    for log in logs:
        for place in (here, there):
            wait_until(
                lambda log=log, place=place: log.is_as_expected(place), f"{log.name} as it was, at {place}"
            )
    os.unlink(here / "ballast")
    for log in logs:
        wait_until(lambda log=log: log.append(9_999_999), "space for one more record")
    for log in logs:
        log.close()
        assert log.numbers[-1] == 9_999_999
        for place in (here, there):
            wait_until(
                lambda log=log, place=place: log.is_as_expected(place), f"{log.name} with it, at {place}"
            )
    assert pool.fsck() == []
