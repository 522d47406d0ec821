"""A mount outlives its serving process and its holder: killed again and again, nobody who uses the mount meets an error or a
wrong byte, what was carried out is not carried out twice, locks hold. Each pause is printed."""

import contextlib
import ctypes
import fcntl
import hashlib
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import pytest
from conftest import FLOOR, Pool, is_mounted, needs, nvpool, wait_until

from nvpool.fuse.engine import RESEND_MIN, kernel_version

pytestmark = [pytest.mark.mount, pytest.mark.skipif(FLOOR, reason="the floor has no daemons"),
              pytest.mark.skipif(kernel_version() < RESEND_MIN, reason="this kernel does not hand requests out again")]

SECONDS = 6.0
"""Of each load in the usual run; the soak has a minute."""
GAP_S = 0.5


@pytest.fixture(scope="module")
def own():
    place = Path(tempfile.mkdtemp(prefix="nvpool-held-"))
    made = Pool(place / "pool")
    yield made
    nvpool("fsck", made.directory)  # fails where anything is wrong
    made.close()
    shutil.rmtree(place)


@pytest.fixture
def here(held, request):
    """A directory of the mount for this test alone."""
    place = held.place / hashlib.sha1(request.node.name.encode()).hexdigest()[:8]
    place.mkdir()
    return place


@pytest.fixture
def held(own, request):
    made = own.mount(own.directory.parent / f"m-{hashlib.sha1(request.node.name.encode()).hexdigest()[:8]}", "--holder",
                     "--drain-s", "2")
    yield made
    assert made.end() == 0, made.log.read_text()
    said = made.log.read_text()
    assert "Traceback" not in said and " ERROR " not in said, said


def processes(place, module):
    found = []
    for entry in os.listdir("/proc"):
        with contextlib.suppress(OSError):
            if entry.isdigit():
                words = Path("/proc", entry, "cmdline").read_bytes().split(b"\0")
                if module.encode() in words and os.fsencode(str(place)) in words:
                    found.append(int(entry))
    return found


def serving(held):
    """The pid of the one process that serves the mount, once there is one."""
    wait_until(lambda: processes(held.place, "nvpool.run.mount_daemon"), "a serving process")
    return processes(held.place, "nvpool.run.mount_daemon")[0]


def pauses(held):
    return [int(text) for text in re.findall(r"after a pause of (\d+) ms", held.log.read_text())]


def kill_serving(held):
    """On return another process serves."""
    before = len(pauses(held))
    os.kill(serving(held), signal.SIGKILL)
    wait_until(lambda: len(pauses(held)) > before, "the next serving process")


class Killer:
    """Kills the serving process whenever it has served for GAP_S, while the `with` block runs."""

    def __init__(self, held, kill=kill_serving):
        self.held, self.kill = held, kill
        self.over = threading.Event()
        self.failed = None
        self.kills = 0
        self.thread = threading.Thread(target=self.run)

    def run(self):
        try:
            while not self.over.wait(GAP_S):
                self.kill(self.held)
                self.kills += 1
        except BaseException as error:
            self.failed = error

    def __enter__(self):
        self.thread.start()
        return self

    def __exit__(self, *_):
        self.over.set()
        self.thread.join(90)
        seen = pauses(self.held)[-self.kills:] if self.kills else []
        print(f"\n{self.kills} times killed, pauses in ms: {seen}")
        assert self.failed is None and self.kills, self.failed


def together(*works):
    """Run them in threads; the first error of any."""
    errors = []

    def guarded(work):
        try:
            work()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=guarded, args=(work,)) for work in works]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(300)
        assert not thread.is_alive(), "a call hangs"
    if errors:
        raise errors[0]


# -- loads -------------------------------------------------------------------------------------------------------------


def run_fio(place, seconds):
    job = place.parent / f"{place.name}.fio"
    job.write_text(f"""[global]
directory={place}
ioengine=psync
verify=crc32c
verify_fatal=1
verify_backlog=32
fallocate=none
time_based=1
runtime={int(seconds)}
size=8m
[small]
rw=randwrite
bs=4k
fsync=64
[mixed]
rw=randwrite
bsrange=512-96k
numjobs=2
[direct]
rw=randrw
bs=16k
direct=1
[stream]
rw=write
bs=1m
""")
    done = subprocess.run(["fio", str(job), "--output-format=json"], capture_output=True, text=True, timeout=seconds * 10 + 120,
                          check=False, cwd=place.parent)  # where it leaves what it has verified
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    jobs = json.loads(done.stdout[done.stdout.index("{"):])["jobs"]
    assert not any(job["error"] for job in jobs) and sum(job["write"]["total_ios"] for job in jobs) > 100


def load_files(place, seconds, count=300, readers=4):
    """As a data loader does: many small files, opened, read whole and closed in random order; what is read is compared."""
    chance = random.Random(7)
    expected = []
    for number in range(count):
        content = chance.randbytes(chance.randrange(1, 60_000))
        (place / f"sample-{number}").write_bytes(content)
        expected.append(hashlib.sha256(content).digest())
    end = time.monotonic() + seconds
    read = [0] * readers

    def reader(me):
        order = random.Random(me)
        while time.monotonic() < end:
            number = order.randrange(count)
            with open(place / f"sample-{number}", "rb", buffering=0) as file:
                content = b"".join(iter(lambda: file.read(17_000), b""))
            assert hashlib.sha256(content).digest() == expected[number], number
            read[me] += 1

    together(*(lambda me=me: reader(me) for me in range(readers)))
    assert all(read)


class Model:
    """A thread's own directory and what must be in it."""

    def __init__(self, place, me, shared, seconds):
        self.place, self.me, self.shared = place / f"thread-{me}", me, shared
        self.chance = random.Random(me)
        self.end = time.monotonic() + seconds
        self.files: dict[str, bytes] = {}
        self.directories: set[str] = set()
        self.appended = 0
        self.serial = 0

    def name(self):
        self.serial += 1
        return f"n{self.serial}"

    def run(self):
        self.place.mkdir()
        log = os.open(self.shared, os.O_WRONLY | os.O_APPEND)
        own = os.open(self.place / "log", os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_EXCL)
        try:
            while time.monotonic() < self.end:
                for step in self.chance.sample((self.make, self.create, self.move, self.remove, self.link, self.attribute), 6):
                    step()
                record = b"%04d %010d\n" % (self.me, self.appended)
                assert os.write(log, record) == os.write(own, record) == len(record)
                self.appended += 1
        finally:
            os.close(log)
            os.close(own)
        self.check()

    def make(self):
        name = self.name()
        os.mkdir(self.place / name)
        self.directories.add(name)
        if len(self.directories) > 20:
            os.rmdir(self.place / self.directories.pop())

    def create(self):
        name, content = self.name(), self.chance.randbytes(self.chance.randrange(9000))
        file = os.open(self.place / name, os.O_CREAT | os.O_EXCL | os.O_WRONLY)
        try:
            assert os.write(file, content) == len(content)
        finally:
            os.close(file)
        self.files[name] = content

    def move(self):
        if self.files:
            name, new = self.chance.choice(sorted(self.files)), self.name()
            os.rename(self.place / name, self.place / new)
            self.files[new] = self.files.pop(name)

    def remove(self):
        if len(self.files) > 30:
            name = self.chance.choice(sorted(self.files))
            os.unlink(self.place / name)
            del self.files[name]

    def link(self):
        if self.files:
            name, new = self.chance.choice(sorted(self.files)), self.name()
            os.link(self.place / name, self.place / new)
            self.files[new] = self.files[name]

    def attribute(self):
        if self.files:
            name = self.chance.choice(sorted(self.files))
            os.setxattr(self.place / name, b"user." + self.name().encode(), b"1", os.XATTR_CREATE)
            os.truncate(self.place / name, len(self.files[name]))

    def check(self):
        assert set(os.listdir(self.place)) == {"log"} | self.files.keys() | self.directories
        for name, content in self.files.items():
            assert (self.place / name).read_bytes() == content, name
        assert (self.place / "log").read_bytes() == b"".join(b"%04d %010d\n" % (self.me, n) for n in range(self.appended))


def run_model(place, seconds, threads=3):
    shared = place / "shared"
    shared.touch()
    models = [Model(place, me, shared, seconds) for me in range(threads)]
    together(*(model.run for model in models))
    found = shared.read_bytes().splitlines()
    assert sorted(found) == sorted(b"%04d %010d" % (model.me, n) for model in models for n in range(model.appended))
    assert sum(model.appended for model in models) > 10


LOADS = {"fio": pytest.param(run_fio, marks=needs("fio"), id="fio"), "loader": pytest.param(load_files, id="loader"),
         "model": pytest.param(run_model, id="model")}


@pytest.mark.parametrize("load", LOADS.values())
def test_killed_every_half_second_nobody_notices_more_than_a_pause(held, here, load):
    with Killer(held):
        load(here, SECONDS)


@pytest.mark.soak
@pytest.mark.timeout(600)
@pytest.mark.parametrize("load", LOADS.values())
def test_killed_every_half_second_for_a_minute(held, here, load):
    with Killer(held):
        load(here, 60.0)


def kill_holder(held):
    """On return there is another holder."""
    before, = processes(held.place, "nvpool.run.mount_holder")
    os.kill(before, signal.SIGKILL)
    if before == held.process.pid:
        held.process.wait(10)
    wait_until(lambda: [pid for pid in processes(held.place, "nvpool.run.mount_holder") if pid != before] != []
               and f"holder[{processes(held.place, 'nvpool.run.mount_holder')[0]}]" in held.log.read_text(), "another holder")


def end_orphans(held):
    """The holder that the test has started is gone: end what serves now."""
    nvpool("umount", held.place)
    wait_until(lambda: not processes(held.place, "nvpool.run.mount_daemon")
               and not processes(held.place, "nvpool.run.mount_holder"), "the end of both")


def test_holder_and_serving_process_each_start_the_other_again(own):
    held = own.mount(own.directory.parent / "m-both", "--holder")
    try:
        (held.place / "f").write_bytes(b"1" * 100_000)
        for _ in range(2):
            kill_holder(held)
            assert (held.place / "f").read_bytes() == b"1" * 100_000
            kill_serving(held)
            (held.place / "g").write_bytes(b"2")
            assert (held.place / "f").read_bytes() == b"1" * 100_000
        seen = json.loads(nvpool("status", own.directory, "--json").stdout)
        holder, = (one for one in seen["processes"] if one["role"] == "holder" and one["mountpoint"] == str(held.place))
        assert holder["pid"] == processes(held.place, "nvpool.run.mount_holder")[0] and not seen["problems"]
        print(f"\npauses in ms: {pauses(held)}")
    finally:
        end_orphans(held)
    assert not is_mounted(held.place)


def test_holders_killed_under_load_are_no_pause_at_all(own):
    held = own.mount(own.directory.parent / "m-holders", "--holder")
    try:
        (held.place / "under-holders").mkdir()
        with Killer(held, kill_holder):
            run_model(held.place / "under-holders", SECONDS / 2)
    finally:
        end_orphans(held)


def test_the_serving_process_is_replaced_on_purpose_under_load(held, here):
    def replace(_):
        before = serving(held)
        told = json.loads(nvpool("mount", "upgrade", held.place, "--json").stdout)
        assert told["pid"] == serving(held) != before and told["pause_ms"] >= 0

    with Killer(held, replace):
        run_model(here, SECONDS)
    with Killer(held, replace):
        load_files(here, SECONDS / 2, count=50)


def test_an_open_file_stays_what_it_was(held, here):
    """Also without a name, and with bytes that nobody has stored or flushed."""
    (here / "there").touch()
    path = here / "f"
    file = os.open(path, os.O_RDWR | os.O_CREAT)
    os.write(file, b"a" * 5000)
    reader = os.open(path, os.O_RDONLY)
    listing = os.scandir(here)
    kill_serving(held)
    os.pwrite(file, b"b" * 5000, 5000)
    os.unlink(path)
    kill_serving(held)
    assert os.pread(reader, 20_000, 0) == os.pread(file, 20_000, 0) == b"a" * 5000 + b"b" * 5000
    os.fsync(file)
    os.ftruncate(file, 6000)
    os.write(file, b"c")
    kill_serving(held)
    assert os.pread(reader, 20_000, 0) == b"a" * 5000 + b"c" + b"b" * 999
    assert os.fstat(file).st_size == 6000 and os.fstat(file).st_nlink == 0
    os.posix_fallocate(file, 0, 9000)
    kill_serving(held)
    assert os.fstat(reader).st_size == 9000 and list(listing)
    os.close(file)
    os.close(reader)
    assert not path.exists()


def test_a_hole_and_a_copy_are_made_also_after_a_kill(held, here):
    with open(here / "from", "wb+", buffering=0) as origin, open(here / "to", "wb+", buffering=0) as target:
        content = random.Random(1).randbytes(3 << 20)
        origin.write(content)
        kill_serving(held)
        assert os.copy_file_range(origin.fileno(), target.fileno(), len(content), 0, 0) == len(content)
        kill_serving(held)
        mebibyte = ctypes.c_long(1 << 20)
        assert ctypes.CDLL(None).fallocate(target.fileno(), 3, mebibyte, mebibyte) == 0
        kill_serving(held)
        assert os.pread(target.fileno(), len(content), 0) == content[:1 << 20] + bytes(1 << 20) + content[2 << 20:]


def test_what_was_written_is_stored_though_nobody_is_left_to_ask(held, here, own):
    """Killed right behind a close that was answered, and behind writes that were."""
    expected = {}
    files = []
    for number in range(40):
        content = random.Random(number).randbytes(3000 * number + 1)
        file = os.open(here / f"f{number}", os.O_WRONLY | os.O_CREAT)
        os.write(file, content)
        if number % 2:
            os.close(file)
        else:
            files.append(file)
        expected[number] = content
    kill_serving(held)
    for number, content in expected.items():
        assert (here / f"f{number}").read_bytes() == content
    for file in files:
        os.close(file)
    again = own.mount(own.directory.parent / "m-again", "--no-holder")
    for number, content in expected.items():
        assert (again.place / here.name / f"f{number}").read_bytes() == content
    assert again.end() == 0


@pytest.fixture
def other(own):
    made = own.mount(own.directory.parent / "m-other", "--no-holder")
    yield made
    assert made.end() == 0


@pytest.mark.parametrize("lock", [fcntl.lockf, fcntl.flock], ids=["fcntl", "flock"])
def test_locks_hold_through_a_kill(held, here, other, lock):
    with open(here / "l", "wb+") as mine, open(other.place / here.name / "l", "rb+") as theirs:
        lock(mine, fcntl.LOCK_EX)
        for _ in range(2):
            kill_serving(held)
            with pytest.raises(BlockingIOError):
                lock(theirs, fcntl.LOCK_EX | fcntl.LOCK_NB)
        lock(mine, fcntl.LOCK_UN)
        lock(theirs, fcntl.LOCK_EX | fcntl.LOCK_NB)
        kill_serving(held)
        with pytest.raises(BlockingIOError):
            lock(mine, fcntl.LOCK_EX | fcntl.LOCK_NB)
        lock(theirs, fcntl.LOCK_UN)
        lock(mine, fcntl.LOCK_EX | fcntl.LOCK_NB)
        kill_serving(held)
    with open(other.place / here.name / "l", "rb+") as theirs:  # closed through the successor: given back
        wait_until(lambda: _gets(lock, theirs), "the lock of who has closed")


def _gets(lock, file):
    try:
        lock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


@pytest.mark.parametrize("lock", [fcntl.lockf, fcntl.flock], ids=["fcntl", "flock"])
def test_who_waits_for_a_lock_gets_it_once_and_keeps_it(held, here, other, lock):
    got = threading.Event()
    with open(here / "w", "wb+") as mine, open(other.place / here.name / "w", "rb+") as theirs:
        lock(theirs, fcntl.LOCK_EX)

        def wait():
            lock(mine, fcntl.LOCK_EX)
            got.set()

        waiting = threading.Thread(target=wait)
        waiting.start()
        for _ in range(2):
            time.sleep(0.1)
            kill_serving(held)
        assert not got.wait(0.2)
        lock(theirs, fcntl.LOCK_UN)
        assert got.wait(30)
        waiting.join(30)
        kill_serving(held)
        with pytest.raises(BlockingIOError):
            lock(theirs, fcntl.LOCK_EX | fcntl.LOCK_NB)


def test_sigterm_after_a_kill_stores_everything_and_leaves_no_mount(own):
    held = own.mount(own.directory.parent / "m-term", "--holder", "--drain-s", "2")
    (held.place / "t").write_bytes(b"t" * 70_000)
    kill_serving(held)
    with open(held.place / "t", "ab", buffering=0) as file:
        file.write(b"u" * 10)
        held.process.send_signal(signal.SIGTERM)
        wait_until(lambda: not is_mounted(held.place), "the detaching")
        assert held.process.wait(30) == 0
        with contextlib.suppress(OSError):
            file.close()
    again = own.mount(held.place, "--no-holder")
    assert (again.place / "t").read_bytes() == b"t" * 70_000 + b"u" * 10
    assert again.end() == 0


def test_a_successor_that_can_not_start_is_tried_again_until_it_can(own):
    held = own.mount(own.directory.parent / "m-config", "--holder", "--drain-s", "2")
    (held.place / "config").write_bytes(b"1" * 9000)
    node = own.directory / "node.toml"
    before = node.read_bytes()
    try:
        node.write_bytes(before + b"\n[nothing]\nsense = 1\n")
        os.kill(serving(held), signal.SIGKILL)
        wait_until(lambda: held.log.read_text().count("before it served") >= 2, "attempts")
        assert held.process.poll() is None
    finally:
        node.write_bytes(before)
    assert (held.place / "config").read_bytes() == b"1" * 9000
    assert held.end() == 0


def test_a_mount_that_can_not_outlive_its_process_says_so_where_it_is_asked_to(own, tmp_path):
    done = subprocess.run([sys.executable, "-P", "-m", "nvpool.run.mount_daemon", "--holder", "--engine", "pyfuse3",
                           own.directory, tmp_path], capture_output=True, text=True, timeout=30, check=False)
    assert done.returncode == 1 and "--holder" in done.stderr
    plain = own.mount(tmp_path / "m", "--no-holder")
    told = subprocess.run([sys.executable, "-P", "-m", "nvpool.cli.main", "mount", "upgrade", str(plain.place)],
                          capture_output=True, text=True, timeout=60, check=False)
    assert told.returncode == 1 and "does not outlive" in told.stderr
    assert plain.end() == 0
