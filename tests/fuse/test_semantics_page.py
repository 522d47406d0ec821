"""Every example of docs/reference/semantics.md, run as printed there, and the refusals of its tables."""

import ctypes
import errno
import fcntl
import mmap
import os
import re
import sqlite3
import time

import pytest

from tests.fuse.conftest import ROOT, wait_until

pytestmark = pytest.mark.mount
ENGINES = ("kernel", "pyfuse3")

PAGE = ROOT / "docs" / "reference" / "semantics.md"
EXAMPLES = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(), re.MULTILINE | re.DOTALL)


WEAKER_ON_PYFUSE3 = ("posix_fallocate", "SEEK_HOLE", "lockf(other", "flock(other", "O_TMPFILE")
"""Examples with one of these differ with `--engine pyfuse3`, as the tables say: zeros are written until the pool is full,
the whole file is data, locks apply to one node, and each file has a name.
"""


@pytest.fixture
def there(here, second, mounted):
    place = second.place / here.relative_to(mounted.place)
    wait_until(place.exists, "the directory at the other mount", 3)
    return place


@pytest.mark.parametrize("example", EXAMPLES, ids=[text.splitlines()[0][:50] for text in EXAMPLES])
def test_examples_of_the_page_are_true(here, there, engine, example):
    if engine == "pyfuse3" and any(word in example for word in WEAKER_ON_PYFUSE3):
        pytest.skip("the tables say that this is weaker with --engine pyfuse3")
    known = {
        "errno": errno,
        "os": os,
        "time": time,
        "fcntl": fcntl,
        "sqlite3": sqlite3,
        "here": here,
        "there": there,
    }
    exec(compile(example, PAGE.name, "exec"), known)


def refused(call):
    with pytest.raises(OSError) as error:
        call()
    return error.value.errno


def test_refused_calls_have_the_documented_errno(here):
    libc = ctypes.CDLL(None, use_errno=True)
    libc.fallocate.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_long, ctypes.c_long]
    with open(here / "f", "w+b") as file, open(here / "a", "ab") as append:
        for collapse_insert_or_unshare in (8, 32, 64):
            assert libc.fallocate(file.fileno(), collapse_insert_or_unshare, 0, 4096) == -1
            assert ctypes.get_errno() == errno.EOPNOTSUPP
        file.write(b"x" * 4096)
        file.flush()
        with open(here / "g", "wb") as other:
            ficlone = 0x40049409
            assert refused(lambda: fcntl.ioctl(other, ficlone, file.fileno())) == errno.EOPNOTSUPP
        append.write(b"x" * 4096)
        append.flush()
        assert refused(lambda: mmap.mmap(append.fileno(), 4096, prot=mmap.PROT_WRITE)) in (
            errno.ENODEV,
            errno.EACCES,
        )
    with open(here / "b", "a+b") as both:
        both.write(b"x" * 4096)
        both.flush()
        assert refused(lambda: mmap.mmap(both.fileno(), 4096)) == errno.ENODEV


def test_copy_file_range_copies(here):
    (here / "a").write_bytes(os.urandom(100_000))
    with open(here / "a", "rb") as source, open(here / "b", "wb") as target:
        copied = 0
        while copied < 100_000:
            copied += os.copy_file_range(source.fileno(), target.fileno(), 100_000)
    assert (here / "a").read_bytes() == (here / "b").read_bytes()


def test_reading_leaves_the_access_time(here):
    (here / "f").write_bytes(b"x")
    os.utime(here / "f", ns=(1, 1))
    (here / "f").read_bytes()
    assert os.stat(here / "f").st_atime_ns == 1
