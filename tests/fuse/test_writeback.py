"""Mounts with --writeback beside a plain directory: the same calls give the same results and bytes.

With several descriptors of a file, with any flags, and across the death of the serving process. A mount with a holder
creates files on the compiled fast path if there is one; without a holder all requests take the slow path. With write-back
the engine is always `kernel`.
"""

import errno
import hashlib
import mmap
import os
import random
import stat
from concurrent.futures import ThreadPoolExecutor

import pytest

import nvpool as sdk
from nvpool.core.units import MIB
from nvpool.fuse.engines import RESEND_MIN, kernel_version
from tests.fuse.conftest import FLOOR, as_user, nvpool, wait_until
from tests.fuse.kill_loads import kill_serving, serving

pytestmark = [pytest.mark.mount, pytest.mark.skipif(FLOOR, reason="the floor writes nothing back")]
OUTLIVES = pytest.param(
    "--holder",
    marks=pytest.mark.skipif(
        kernel_version() < RESEND_MIN, reason="this kernel does not hand requests out again"
    ),
)
PAGE = 4096


@pytest.fixture(params=[OUTLIVES, "--no-holder"])
def back(pool, request):
    """A mount with write-back, for the tests of this module."""
    made = pool.__dict__.setdefault("written_back", {})
    if request.param not in made:
        made[request.param] = pool.mount(
            pool.directory.parent / f"m{request.param}", "--writeback", request.param
        )
    yield made[request.param]
    said = made[request.param].log.read_text(errors="replace")
    assert "Traceback" not in said and " ERROR " not in said, said


@pytest.fixture
def places(pool, back, request):
    """A directory of the mount, and a plain one."""
    name = hashlib.sha1(request.node.name.encode()).hexdigest()[:8]
    made = back.place / name, pool.directory.parent / f"plain-{name}"
    for place in made:
        place.mkdir()
        place.chmod(0o777)
    return made


@pytest.fixture
def same(places):
    """Calls `play(directory)` for both; the results must be the same."""

    def call(play):
        there, plain = (play(place) for place in places)
        assert there == plain
        return there

    return call


def drop_pages(file):
    os.fsync(file)
    os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)


def test_append_follows_unstored_writes(same):
    def play(place):
        first = os.open(place / "f", os.O_CREAT | os.O_RDWR)
        os.write(first, b"A" * 10_000)
        second = os.open(place / "f", os.O_RDWR | os.O_APPEND)
        os.write(second, b"B" * 10)
        seen = [os.fstat(first).st_size, os.pread(first, 20, 9995), os.pread(second, 20, 9995)]
        os.write(first, b"C" * 5)  # at its own offset
        os.close(first)
        os.close(second)
        return seen, (place / "f").read_bytes()

    assert same(play)[1] == b"A" * 10_000 + b"C" * 5 + b"B" * 5


def test_append_has_the_offset_of_ext4(same):
    def play(place):
        first = os.open(place / "f", os.O_CREAT | os.O_RDWR)
        os.write(first, b"A" * 10_000)
        second = os.open(place / "f", os.O_WRONLY | os.O_APPEND)
        os.write(second, b"B" * 10)
        os.close(first)
        os.close(second)
        return (place / "f").read_bytes()

    assert same(play) == b"A" * 10_000 + b"B" * 10


@pytest.mark.parametrize("flags", [os.O_RDWR, os.O_WRONLY])
def test_pages_of_an_appending_handle_are_stored_in_place(same, flags):
    """The kernel uses the handle of any writer."""

    def play(place):
        appends = os.open(place / "f", os.O_CREAT | os.O_EXCL | flags | os.O_APPEND)
        os.write(appends, b"a" * 3000)
        other = os.open(place / "f", os.O_RDWR)
        for offset in (0, 100_000, 50_000, 2990):
            os.pwrite(other, b"o" * 5000, offset)
        os.write(appends, b"b" * 3000)
        os.close(other)
        drop_pages(appends)
        os.write(appends, b"c" * 3000)
        os.close(appends)
        drop_pages(last := os.open(place / "f", os.O_RDONLY))
        os.close(last)
        return (place / "f").read_bytes()

    content = same(play)
    assert len(content) == 111_000


def test_appending_descriptor_reads_and_maps_other_writes(same):
    def play(place):
        other = os.open(place / "f", os.O_CREAT | os.O_RDWR)
        appends = os.open(place / "f", os.O_RDWR | os.O_APPEND)
        os.write(other, b"1" * PAGE)
        seen = os.read(appends, 2 * PAGE)
        with mmap.mmap(appends, PAGE) as mapping:
            mapping[10:12] = b"mm"
            os.write(appends, b"end")
        os.close(appends)
        os.close(other)
        return seen, (place / "f").read_bytes()

    same(play)


@pytest.mark.parametrize(
    "flags",
    [os.O_CREAT | os.O_TRUNC, os.O_CREAT | os.O_EXCL, os.O_CREAT | os.O_APPEND],
    ids=["truncate", "new", "append"],
)
def test_partial_page_is_written_by_a_write_only_handle(same, flags):
    def play(place):
        file = os.open(place / "f", flags | os.O_WRONLY, 0o644)
        os.write(file, b"a" * 100)
        for turn in range(3):
            drop_pages(file)
            os.write(file, b"%d" % turn * 100)
        os.ftruncate(file, 3 * PAGE)
        for offset, length in (
            (PAGE, PAGE),
            (1, 30_000),
            (65_536, 30_000),
            (PAGE, 100),
            (0, 10),
            (70_000, 10),
        ):
            drop_pages(file)
            os.pwrite(file, b"x" * length, offset)
        os.close(file)
        return (place / "f").read_bytes()

    same(play)


def test_concurrent_appends_lose_no_record(places):
    place, _ = places

    def work(number):
        file = os.open(place / "f", os.O_CREAT | os.O_WRONLY | os.O_APPEND, 0o644)
        for record in range(200):
            os.write(file, b"%d %d;" % (number, record))
            if record % 50 == 49:
                drop_pages(file)
        os.close(file)

    with ThreadPoolExecutor(4) as threads:
        list(threads.map(work, range(4)))
    records = (place / "f").read_bytes().split(b";")[:-1]
    assert len(records) == 800
    for number in range(4):
        assert [one for one in records if one.startswith(b"%d " % number)] == [
            b"%d %d" % (number, one) for one in range(200)
        ]


@pytest.mark.parametrize("flags", [os.O_WRONLY, os.O_WRONLY | os.O_APPEND], ids=["write", "append"])
def test_write_by_another_user_clears_set_id_bits(same, flags):
    def play(place):
        (place / "f").write_bytes(b"program")
        (place / "f").chmod(0o6777)

        def write():
            file = os.open(place / "f", flags)
            os.write(file, b"x")
            os.close(file)

        as_user(1000, 1000, write)
        return stat.S_IMODE(os.stat(place / "f").st_mode), (place / "f").read_bytes()

    same(play)


class FilePair:
    """A file of the mount and a plain one; each call is made on both. `between`: called before some calls."""

    def __init__(self, places, seed, between=None):
        self.chance, self.places, self.files, self.log = random.Random(seed), places, [], []
        self.between = between

    def both(self, what, call, with_file=None):
        answers = []
        for at in (0, 1):
            try:
                answers.append(call(self.places[at] / "f" if with_file is None else with_file[at]))
            except OSError as error:
                answers.append(error)
        one, other = ((type(one), one.errno) if isinstance(one, OSError) else one for one in answers)
        self.log.append(what)
        refused = isinstance(one, tuple) or isinstance(other, tuple)
        assert one == other or (with_file is None and not refused), self.log[-20:]
        return answers

    def open(self):
        chance = self.chance
        flags = chance.choice([os.O_WRONLY, os.O_WRONLY, os.O_RDWR, os.O_RDONLY])
        flags |= chance.choice([0, os.O_CREAT, os.O_CREAT, os.O_CREAT | os.O_EXCL]) | chance.choice(
            [0, 0, os.O_APPEND]
        )
        flags |= os.O_TRUNC if flags & 3 and chance.random() < 0.2 else 0
        made = self.both(("open", oct(flags)), lambda path: os.open(path, flags, 0o644))
        if not isinstance(made[0], OSError):
            self.files.append(made)

    def step(self):
        chance, where = (
            self.chance,
            self.chance.choice([0, 1, 100, 4095, 4096, 60_000, 65_536, self.chance.randrange(100_000)]),
        )
        content = chance.randbytes(chance.choice([1, 10, 100, 4096, 4097, 30_000]))
        if len(self.files) < 2 or (len(self.files) < 8 and chance.random() < 0.1):
            self.open()
            return
        file = chance.choice(self.files)
        what = chance.choices(
            ["close", "pwrite", "write", "pread", "cut", "size", "drop", "unlink", "whole"],
            [4, 30, 15, 20, 3, 5, 8, 1, 4],
        )[0]
        if what == "close":
            self.files.remove(file)
            self.both(what, os.close, file)
        elif what == "pwrite":
            self.both((what, len(content), where), lambda fd: os.pwrite(fd, content, where), file)
        elif what == "write":
            self.both((what, len(content)), lambda fd: os.write(fd, content), file)
        elif what == "pread":
            self.both((what, where), lambda fd: os.pread(fd, 100_000, where), file)
        elif what == "cut":
            self.both((what, where), lambda fd: os.ftruncate(fd, where), file)
        elif what == "size":
            self.both(what, lambda fd: os.fstat(fd).st_size, file)
        elif what == "drop":
            self.both(what, drop_pages, file)
        elif what == "unlink":
            self.both(what, os.unlink)
        else:
            one, other = self.both(what, lambda path: path.read_bytes())
            assert isinstance(one, OSError) or one == other, self.log[-20:]

    def run(self, steps):
        for number in range(steps):
            if self.between is not None:
                self.between(number)
            self.step()
        for file in self.files:
            self.both("close", os.close, file)
        one, other = self.both("read", lambda path: path.read_bytes())
        assert isinstance(one, OSError) or one == other


@pytest.mark.few(2)
@pytest.mark.parametrize("seed", range(4))
def test_descriptors_agree_with_a_plain_file(places, seed):
    FilePair(places, seed).run(700)


@pytest.mark.few(1)
@pytest.mark.parametrize("back", [OUTLIVES], indirect=True)
@pytest.mark.parametrize("seed", range(2))
def test_descriptors_agree_with_a_plain_file_over_kills(places, back, seed):
    def between(number):
        if number % 100 == 50:
            kill_serving(back)
        elif number == 200:
            before = serving(back)
            nvpool("mount", "upgrade", back.place)
            wait_until(lambda: serving(back) != before, "the next process")

    FilePair(places, 100 + seed, between).run(400)


def refused(calls):
    """The errno of the first of these calls that fails."""
    found = []
    for call in calls:
        try:
            call()
        except OSError as error:
            found.append(error.errno)
    return found[0] if found else 0


def test_write_past_the_largest_file_leaves_the_size(back):
    path = back.place / "past-the-largest"
    fd = os.open(path, os.O_CREAT | os.O_RDWR)
    os.write(fd, b"head")
    os.fsync(fd)
    assert (
        refused([lambda: os.pwrite(fd, b"hello", (1 << 63) - 20), lambda: os.fsync(fd), lambda: os.close(fd)])
        == errno.EFBIG
    )
    wait_until(lambda: os.stat(path).st_size == 4, "the real size of the file")
    assert path.read_bytes() == b"head"
    path.unlink()


def test_bytes_over_a_quota_are_not_shown_after_the_error(pool, back):
    name = f"back{abs(hash(str(back.place))) % 10**6}"
    nvpool("volume", "create", pool.directory, name, "--size", "1MiB")
    path = back.place / "volumes" / name / "f"
    fd = os.open(path, os.O_CREAT | os.O_RDWR)
    content = bytes(range(1, 251)) * 12_345
    os.write(fd, content)
    assert refused([lambda: os.fsync(fd), lambda: os.close(fd)]) == errno.EDQUOT
    wait_until(lambda: os.stat(path).st_size <= MIB, "the real size of the file")
    seen = path.read_bytes()
    with sdk.connect(str(pool.directory)) as fs:
        assert fs.read_bytes(f"/volumes/{name}/f") == seen
    assert len(seen) <= MIB and seen == content[: len(seen)]
    path.unlink()
    nvpool("volume", "rm", pool.directory, name, "--wait", "--force")
