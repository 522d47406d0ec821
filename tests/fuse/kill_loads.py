"""Loads under which processes of a mount are killed, and the killer.

The loads run for a number of seconds and compare every byte and name with the expected ones. Used by the tests of mounts
that survive their processes.
"""

import contextlib
import hashlib
import json
import mmap
import os
import random
import re
import signal
import statistics
import subprocess
import threading
import time
from pathlib import Path

import pytest

from nvpool.core import programs
from nvpool.core.programs import Program
from tests.fuse.conftest import needs, nvpool, wait_until

GAP_S = 0.5
PROBE_S = 0.005
APPENDED_MIN = 4
UNHEARD_MAX = 3
"""Kills in a row without a reply between them: where a start takes longer than GAP_S, no request would ever complete."""
MIB = 1 << 20


def processes(place, program):
    """The pids of the processes that run `program` for the mount at `place`."""
    return [pid for pid, _ in programs.processes(program, naming=place)]


def keep_device(place):
    """The pids of the serving process and the holder that have /dev/fuse open. The mount ends with the last of them, so none
    is killed before the other one has it again (docs/internals/mount-state.md).
    """
    found = set()
    for pid in [*processes(place, Program.MOUNT), *processes(place, Program.MOUNT_HOLDER)]:
        with contextlib.suppress(OSError):
            if any(os.readlink(entry) == "/dev/fuse" for entry in Path(f"/proc/{pid}/fd").iterdir()):
                found.add(pid)
    return found


def serving(held):
    """The pid of the process that serves the mount, once there is exactly one."""
    wait_until(lambda: processes(held.place, Program.MOUNT), "a serving process")
    return processes(held.place, Program.MOUNT)[0]


def pauses(held):
    return [int(text) for text in re.findall(r"after a pause of (\d+) ms", held.log.read_text())]


def kill_serving(held):
    """On return another process serves."""
    before = len(pauses(held))
    os.kill(serving(held), signal.SIGKILL)
    wait_until(lambda: len(pauses(held)) > before, "the next serving process")


class Probe:
    """Sends a request to the mount repeatedly while the `with` block runs."""

    def __init__(self, place):
        self.place, self.over, self.failed, self.answers = place, threading.Event(), None, []
        self.thread = threading.Thread(target=self.run)

    def run(self):
        try:
            while not self.over.wait(PROBE_S):
                asked = time.monotonic()
                os.statvfs(self.place)
                self.answers.append((asked, time.monotonic()))
        except BaseException as error:
            self.failed = error

    def pause_ms(self, since):
        """Time to the first reply to a request that was sent after `since`; None if there was none."""
        return next(
            (round((answered - since) * 1000) for asked, answered in self.answers if asked >= since), None
        )

    def __enter__(self):
        self.thread.start()
        return self

    def __exit__(self, *_):
        self.over.set()
        self.thread.join(120)
        assert not self.thread.is_alive(), "a call hangs"
        assert self.failed is None, self.failed


class Killer:
    """Kills processes while the `with` block runs: every GAP_S one that runs one of `programs`, in any state of the mount;
    without one, the next that starts.
    """

    def __init__(self, held, *programs):
        self.held, self.programs = held, programs
        self.over, self.failed, self.killed = threading.Event(), None, []
        self.thread = threading.Thread(target=self.run)
        self.probe = Probe(held.place)

    def run(self):
        at = time.monotonic()
        try:
            while not self.over.wait(max(0.0, at + GAP_S - time.monotonic())):
                wait_until(lambda: self.over.is_set() or self.has_replied(), "a reply")
                at = max(at + GAP_S, self.kill() - GAP_S / 10)
        except BaseException as error:
            self.failed = error

    def has_replied(self):
        """Whether the mount has replied lately."""
        return len(self.killed) < UNHEARD_MAX or self.probe.pause_ms(self.killed[-UNHEARD_MAX]) is not None

    def kill(self):
        chance, end = random.sample(self.programs, len(self.programs)), time.monotonic() + 120
        while not (
            found := next(filter(None, (processes(self.held.place, program) for program in chance)), None)
        ):
            assert time.monotonic() < end, f"no process runs {chance}"
            time.sleep(0.001)
        while not self.over.is_set() and keep_device(self.held.place) == {found[0]}:
            assert time.monotonic() < end, "the mount's device stays with one process"
            time.sleep(0.001)
        with contextlib.suppress(ProcessLookupError):
            self.killed.append(time.monotonic())
            os.kill(found[0], signal.SIGKILL)
        self.held.process.poll()
        return self.killed[-1]

    def __enter__(self):
        self.probe.__enter__()
        self.thread.start()
        return self

    def __exit__(self, *_):
        self.over.set()
        self.thread.join(120)
        self.probe.__exit__()
        seen = [pause_ms for at in self.killed if (pause_ms := self.probe.pause_ms(at)) is not None]
        assert self.failed is None and seen, self.failed
        print(
            f"{len(self.killed)} kills, pauses in ms: median {statistics.median(seen):.0f}, worst {max(seen)}; {seen}"
        )


def together(*works):
    """Run functions in threads; raise the first error of any."""
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
        thread.join(500)
        assert not thread.is_alive(), "a call hangs"
    if errors:
        raise errors[0]


# -- loads -------------------------------------------------------------------------------------------------------------


def reread(place, said):
    """Read the place again, three times, where fio met wrong bytes: is the error transient or permanent?

    Returns also the bytes that fio read, and the log of the mount.
    """
    found = []
    for name, offset in re.findall(r"at file (\S+) offset (\d+)", said):
        for _ in range(3):
            with open(place / Path(name).name, "rb") as file:
                file.seek(int(offset))
                found.append(f"{name} at {offset}: {file.read(48).hex(' ', 4)}")
            time.sleep(0.3)
    found += [
        f"{path.name}: {path.read_bytes()[:48].hex(' ', 4)}"
        for path in sorted(place.parent.iterdir())
        if path.suffix in (".received", ".expected")
    ]
    return "\n".join(["", *found, Path(f"{place.parent}.log").read_text()[-6000:]])


def run_fio(place, seconds):
    job = place.parent / f"{place.name}.fio"
    job.write_text(f"""[global]
directory={place}
ioengine=psync
verify=crc32c
verify_fatal=1
verify_dump=1
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
    done = subprocess.run(
        ["fio", str(job), "--output-format=json"],
        capture_output=True,
        text=True,
        timeout=seconds * 10 + 240,
        check=False,
        cwd=place.parent,
    )  # where fio leaves its verify state
    said = done.stdout[-4000:] + done.stderr[-2000:]
    assert done.returncode == 0, said + reread(place, done.stdout + done.stderr)
    jobs = json.loads(done.stdout[done.stdout.index("{") :])["jobs"]
    assert not any(job["error"] for job in jobs) and sum(job["write"]["total_ios"] for job in jobs) > 10


def load_files(place, seconds, count=300, readers=4):
    """As a data loader does: many small files, opened, read whole and closed in random order; every byte is compared."""
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
        while time.monotonic() < end or not read[me]:
            number = order.randrange(count)
            with open(place / f"sample-{number}", "rb", buffering=0) as file:
                content = b"".join(iter(lambda: file.read(17_000), b""))
            assert hashlib.sha256(content).digest() == expected[number], number
            read[me] += 1

    together(*(lambda me=me: reader(me) for me in range(readers)))
    assert all(read)


class Model:
    """A thread's own directory and its expected content."""

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
            while time.monotonic() < self.end or self.appended < APPENDED_MIN:
                for step in self.chance.sample(
                    (self.make, self.create, self.move, self.remove, self.link, self.attribute), 6
                ):
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
        assert (self.place / "log").read_bytes() == b"".join(
            b"%04d %010d\n" % (self.me, n) for n in range(self.appended)
        )


def run_model(place, seconds, threads=3):
    shared = place / "shared"
    shared.touch()
    models = [Model(place, me, shared, seconds) for me in range(threads)]
    together(*(model.run for model in models))
    found = shared.read_bytes().splitlines()
    assert sorted(found) == sorted(
        b"%04d %010d" % (model.me, n) for model in models for n in range(model.appended)
    )


def read_at_random(path, content, seed, count=200, length=64 << 10):
    """Past the kernel's page cache, and compared."""
    chance, buffer = random.Random(seed), mmap.mmap(-1, length)
    file = os.open(path, os.O_RDONLY | os.O_DIRECT)
    try:
        for _ in range(count):
            offset = chance.randrange(len(content)) & -4096
            read = os.preadv(file, [buffer], offset)
            assert buffer[:read] == content[offset : offset + length], offset
    finally:
        os.close(file)


def load_large(place, seconds):
    """Readers read files that are written and read alternately."""
    end = threading.Event()
    timer = threading.Timer(seconds, end.set)
    timer.start()

    def work(me):
        chance, turn = random.Random(me), 0
        while not (end.is_set() and turn):
            content = chance.randbytes(MIB + chance.randrange(MIB))
            (place / f"large-{me}").write_bytes(content)
            for _ in range(3):
                read_at_random(place / f"large-{me}", content, turn, 30)
            assert (place / f"large-{me}").read_bytes() == content
            turn += 1

    together(*(lambda me=me: work(me) for me in range(3)))


def load_direct(place, seconds, block_bytes=16 << 10, block_count=256):
    """Past the kernel's page cache: blocks and runs of them are written, read back at random and at the end. Each place
    says of which write it is.
    """
    end = time.monotonic() + seconds
    run = MIB // block_bytes

    def work(me):
        chance, written = random.Random(me), [0] * block_count
        one, many = mmap.mmap(-1, block_bytes), mmap.mmap(-1, MIB)

        def content(block):
            return b"%07d %07d %07d;" % (me, block, written[block]) * (block_bytes // 24) + bytes(
                block_bytes % 24
            )

        def check(block):
            assert os.preadv(file, [one], block * block_bytes) == block_bytes
            assert one[:] == content(block), (me, block, written[block], one[:24])

        file = os.open(place / f"direct-{me}", os.O_CREAT | os.O_RDWR | os.O_DIRECT)
        try:
            while time.monotonic() < end or not any(written):
                first = chance.randrange(0, block_count, run)
                for block in range(first, first + run):
                    written[block] += 1
                    many[(block - first) * block_bytes : (block - first + 1) * block_bytes] = content(block)
                assert os.pwritev(file, [many], first * block_bytes) == MIB
                for block in chance.sample(range(first, first + run), 8):
                    written[block] += 1
                    one[:] = content(block)
                    assert os.pwritev(file, [one], block * block_bytes) == block_bytes
                for block in chance.sample(range(first, first + run), 16):
                    check(block)
            for block in range(block_count):
                if written[block]:
                    check(block)
        finally:
            os.close(file)

    together(*(lambda me=me: work(me) for me in range(3)))


LOADS = {
    "fio": pytest.param(run_fio, marks=needs("fio"), id="fio"),
    "loader": pytest.param(load_files, id="loader"),
    "model": pytest.param(run_model, id="model"),
    "large": pytest.param(load_large, id="large"),
    "direct": pytest.param(load_direct, id="direct"),
}


def end(held):
    """Unmount; every process has ended then, and no log has an error."""
    nvpool("umount", held.place)
    wait_until(
        lambda: not any(processes(held.place, program) for program in programs.OF_A_MOUNT), "the end of all"
    )
    held.process.wait(120)
    said = held.log.read_text()
    assert "Traceback" not in said and " ERROR " not in said, said
