"""Checking loads: threads that change a pool and know, byte for byte, what it must hold.

For fault tests and failure benchmarks: run a load while daemons are killed, drives fill up or links break,
then call `verify`. Each thread owns its files and a model of them. An operation that returned is in the
model; one that raised stops the thread and is reported. `CheckingLoad` uses a mount in every way that a
program may, `ClientLoad` uses the SDK; `FillingLoad` fills a pool and continues when it is full; `Pauses`
creates, reads or writes slowly and measures its waits.
"""

from __future__ import annotations

import ctypes
import errno
import hashlib
import mmap
import os
import random
import threading
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

from nvpool.core.checksum import crc32c

_libc = ctypes.CDLL(None, use_errno=True)
_libc.fallocate.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_long, ctypes.c_long]
_KEEP_SIZE, _PUNCH_HOLE = 1, 2


class _Worker(threading.Thread):
    """Thread that repeats its step until it is stopped or a step fails."""

    WAIT_S = 0.1
    rest_s = 0.0
    """Pause after each step, in seconds."""

    def __init__(self, name: str, seed: int, stop: threading.Event) -> None:
        super().__init__(name=name, daemon=True)
        self.chance, self.stop = random.Random(seed), stop
        self.operations = 0
        self.longest_s = 0.0
        """Duration of the longest step: the pause that an application saw."""
        self.longest = ""
        """Description of the longest step."""
        self.began = 0.0
        """Time at which the present step began; 0 if there is none."""
        self.waits: deque[tuple[float, float, str]] = deque(maxlen=1000)
        """Begin and end (monotonic clock) and name of each step that took longer than WAIT_S."""
        self.error: str | None = None
        self.doing = ""

    def run(self) -> None:
        try:
            self.begin()
            while not self.stop.is_set():
                self.began = time.monotonic()
                self.step()
                began, now, self.began = self.began, time.monotonic(), 0.0
                if now - began > self.longest_s:
                    self.longest_s, self.longest = now - began, self.doing
                if now - began > self.WAIT_S:
                    self.waits.append((began, now, self.doing))
                self.operations += 1
                if self.rest_s:
                    self.stop.wait(self.rest_s)
            self.end()
        except BaseException as error:
            self.error, self.began = f"{self.name}: {self.doing}: {error!r}", 0.0

    def begin(self) -> None:
        """Run before the first step."""

    def step(self) -> None:
        raise NotImplementedError

    def end(self) -> None:
        """Run after the last step."""

    def verify(self) -> None:
        """Check that the results of all steps that returned are there. AssertionError."""


class _Load:
    """Context manager that runs workers. A worker that fails ends, and `verify` reports its error."""

    def __init__(self, workers: list[_Worker], stop: threading.Event) -> None:
        self.workers, self._stop = workers, stop

    def __enter__(self):
        for worker in self.workers:
            worker.start()
        return self

    def __exit__(self, *_exc) -> None:
        self.finish()

    @property
    def operations(self) -> int:
        return sum(worker.operations for worker in self.workers)

    @property
    def longest_s(self) -> float:
        return max(worker.longest_s for worker in self.workers)

    @property
    def longest(self) -> str:
        """Description of the longest step of all workers."""
        return max(self.workers, key=lambda worker: worker.longest_s).longest

    def waits_since(self, moment: float) -> list[tuple[float, float, str]]:
        """Return begin, end and name of each step of more than 0.1 s that ended after `moment` (monotonic
        clock).

        A step that is in progress counts as if it ended now.
        """
        found = []
        for worker in self.workers:
            began, now = worker.began, time.monotonic()
            found += [wait for wait in tuple(worker.waits) if wait[1] > moment]
            if began and now - began > worker.WAIT_S:
                found.append((began, now, f"{worker.doing}, not ended yet"))
        return found

    @property
    def errors(self) -> list[str]:
        return [worker.error for worker in self.workers if worker.error]

    def goes_on(self, more: int = 10, wait_s: float = 120.0) -> None:
        """Return when each worker has done that many more steps. AssertionError: a worker failed, or it takes
        too long."""
        goals = [worker.operations + more for worker in self.workers]
        end = time.monotonic() + wait_s
        while any(worker.operations < goal for worker, goal in zip(self.workers, goals, strict=True)):
            assert not self.errors, "; ".join(self.errors)
            assert time.monotonic() < end, (
                f"no {more} steps of each within {wait_s} s: {[w.doing for w in self.workers]}"
            )
            time.sleep(0.01)

    def finish(self, timeout_s: float = 240.0) -> None:
        """Stop the threads and wait for their present steps. AssertionError if one hangs."""
        self._stop.set()
        for worker in self.workers:
            worker.join(timeout_s)
            assert not worker.is_alive(), f"{worker.name} hangs in: {worker.doing}"

    def verify(self) -> None:
        """Check that the results of all steps that returned are there, and nothing else.

        AssertionError: names the first difference, or every error of a worker.
        """
        assert not self.errors, "; ".join(self.errors)
        for worker in self.workers:
            worker.verify()


class _Changing(_Worker):
    """Changes its own files in every way, and knows what they must hold."""

    def __init__(
        self, top: Path, seed: int, stop: threading.Event, file_bytes_max: int, directories: int
    ) -> None:
        super().__init__(f"load-{seed}", seed, stop)
        self.top, self.file_bytes_max = top, file_bytes_max
        self.places = [f"d{number}/" for number in range(directories)] or [""]
        self.files: dict[str, bytearray] = {}
        self.counter = 0

    def begin(self) -> None:
        self.top.mkdir()
        for place in filter(None, self.places):
            (self.top / place).mkdir()

    def step(self) -> None:
        weights = {
            "create": 6,
            "overwrite": 5,
            "append": 4,
            "truncate": 2,
            "rename": 3,
            "unlink": 2,
            "check": 5,
            "replace": 2,
            "punch": 2,
            "copy": 2,
        }
        if len(self.files) > 60:
            weights |= {"create": 0, "unlink": 8}
        kinds = list(weights) if self.files else ["create"]
        kind = self.chance.choices(kinds, [weights[k] for k in kinds])[0]
        name = self.chance.choice(list(self.files)) if self.files else ""
        self.doing = f"{kind} {self.top.name}/{name}"
        getattr(self, kind)(name)

    def _fresh(self) -> str:
        self.counter += 1
        return f"{self.chance.choice(self.places)}f{self.counter}"

    def _bytes(self) -> bytes:
        return self.chance.randbytes(
            self.chance.choice((1, 100, 4096, 5000, 70_000, self.file_bytes_max // 4))
        )

    def _write(self, name: str, offset: int, content: bytes, flags: int = 0) -> None:
        file = os.open(self.top / name, os.O_WRONLY | os.O_CREAT | flags, 0o644)
        try:
            at = 0
            while at < len(content):
                at += os.pwrite(file, content[at:], offset + at)
            if self.chance.random() < 0.3:
                os.fsync(file)
        finally:
            os.close(file)

    def create(self, _name: str) -> None:
        name, content = self._fresh(), self._bytes()
        self.doing += name
        self._write(name, 0, content, os.O_EXCL)
        self.files[name] = bytearray(content)

    def overwrite(self, name: str) -> None:
        model = self.files[name]
        offset, content = self.chance.randrange(len(model) + 1), self._bytes()
        if offset + len(content) > self.file_bytes_max:
            return
        self._write(name, offset, content)
        if len(model) < offset:
            model.extend(bytes(offset - len(model)))
        model[offset : offset + len(content)] = content

    def append(self, name: str) -> None:
        content = self._bytes()
        if len(self.files[name]) + len(content) > self.file_bytes_max:
            return
        with open(self.top / name, "ab", buffering=0) as file:
            assert file.write(content) == len(content)
        self.files[name] += content

    def truncate(self, name: str) -> None:
        size = self.chance.randrange(len(self.files[name]) * 2 + 1)
        os.truncate(self.top / name, size)
        model = self.files[name]
        del model[size:]
        model.extend(bytes(size - len(model)))

    def punch(self, name: str) -> None:
        """Punch a hole, or write zeros if the mount has no holes."""
        model = self.files[name]
        if not model:
            return
        offset, length = self.chance.randrange(len(model)), self.chance.choice((1, 4096, 50_000, 1 << 20))
        file = os.open(self.top / name, os.O_RDWR)
        try:
            if _libc.fallocate(file, _PUNCH_HOLE | _KEEP_SIZE, offset, length):
                if ctypes.get_errno() != errno.EOPNOTSUPP:
                    raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
                length = min(length, len(model) - offset)
                assert os.pwrite(file, bytes(length), offset) == length
        finally:
            os.close(file)
        end = min(len(model), offset + length)
        model[offset:end] = bytes(end - offset)

    def copy(self, name: str) -> None:
        new, model = self._fresh(), self.files[name]
        with open(self.top / name, "rb") as source, open(self.top / new, "xb") as target:
            done = 0
            while done < len(model):
                copied = os.copy_file_range(source.fileno(), target.fileno(), len(model) - done)
                assert copied, f"nothing was copied at {done} of {len(model)} bytes"
                done += copied
        self.files[new] = bytearray(model)

    def rename(self, name: str) -> None:
        new = self._fresh()
        os.rename(self.top / name, self.top / new)
        self.files[new] = self.files.pop(name)

    def replace(self, name: str) -> None:
        new, content = self._fresh(), self._bytes()
        self._write(new, 0, content)
        self.files[new] = bytearray(content)
        os.replace(self.top / new, self.top / name)
        self.files[name] = self.files.pop(new)

    def unlink(self, name: str) -> None:
        os.unlink(self.top / name)
        del self.files[name]

    def check(self, name: str) -> None:
        self.compare(name)

    def compare(self, name: str) -> None:
        content = (self.top / name).read_bytes()
        model = self.files[name]
        if content != model:
            shorter = min(len(content), len(model))
            first = next((i for i in range(shorter) if content[i] != model[i]), shorter)
            raise AssertionError(
                f"{self.top.name}/{name}: {len(content)} bytes crc {crc32c(content):08x}, should be {len(model)} bytes crc "
                f"{crc32c(bytes(model)):08x}; they differ from byte {first} (block {first // 4096}) on: "
                f"{content[first : first + 8].hex()} instead of {bytes(model[first : first + 8]).hex()}"
            )

    def verify(self) -> None:
        found = [place + name for place in self.places for name in os.listdir(self.top / place)]
        assert sorted(found) == sorted(self.files), self.top
        for name in self.files:
            self.compare(name)


class CheckingLoad(_Load):
    """Load on a mount: `with CheckingLoad(directory) as load: …faults…`, then `load.verify()`.

    `directories`: number for each thread, which moves files between them, usually from shard to shard; 0: its
    files have no directory of their own. `rest_s`: pause of each thread after each step.
    """

    def __init__(
        self,
        directory: Path,
        *,
        threads: int = 4,
        seed: int = 1,
        file_bytes_max: int = 3 << 20,
        directories: int = 0,
        rest_s: float = 0.0,
    ) -> None:
        stop = threading.Event()
        top = Path(directory)
        super().__init__(
            [
                _Changing(top / f"w{seed}-{number}", seed * 1000 + number, stop, file_bytes_max, directories)
                for number in range(threads)
            ],
            stop,
        )
        for worker in self.workers:
            worker.rest_s = rest_s


class _Filling(_Worker):
    """Creates files until the pool is full, and continues after that.

    Flushed files stay; a file that did not fit can be removed.
    """

    FILE_BYTES = 1 << 20

    def __init__(self, top: Path, number: int, stop: threading.Event) -> None:
        super().__init__(f"filling-{number}", number, stop)
        self.top, self.held, self.counter, self.refused = top, dict[str, bytes](), 0, 0
        self.make_room = threading.Event()
        """Request to remove half of its files; cleared when that is done."""

    def begin(self) -> None:
        self.top.mkdir()

    def step(self) -> None:
        if self.make_room.is_set():
            for name in list(self.held)[::2]:
                self.doing = f"unlink {name}"
                os.unlink(self.top / name)
                del self.held[name]
            self.make_room.clear()
        self.counter += 1
        name, seed = f"f{self.counter}", self.chance.randbytes(32)
        self.doing = f"create {name}"
        try:
            with open(self.top / name, "xb", buffering=0) as file:
                assert file.write(self.content(seed)) == self.FILE_BYTES
                os.fsync(file.fileno())
            self.held[name] = seed
        except OSError as error:
            if error.errno != errno.ENOSPC:
                raise
            self.refused += 1
            self.doing = f"unlink {name}, which was refused"
            (self.top / name).unlink(missing_ok=True)
            self.stop.wait(0.05)  # removed files free space only when they are collected
        if self.held:
            self.compare(self.chance.choice(list(self.held)))

    def content(self, seed: bytes) -> bytes:
        return hashlib.shake_128(seed).digest(self.FILE_BYTES)

    def compare(self, name: str) -> None:
        self.doing = f"read {name}"
        assert (self.top / name).read_bytes() == self.content(self.held[name]), (
            f"{name} is not what was flushed"
        )

    def verify(self) -> None:
        assert sorted(os.listdir(self.top)) == sorted(self.held), self.top
        for name in self.held:
            self.compare(name)


class FillingLoad(_Load):
    """Fills the pool and continues when it is full: ENOSPC is the only permitted error."""

    def __init__(self, directory: Path, *, threads: int = 3) -> None:
        stop = threading.Event()
        super().__init__(
            [_Filling(Path(directory) / f"filling-{number}", number, stop) for number in range(threads)], stop
        )

    @property
    def held(self) -> int:
        """Number of files that were created and flushed, and not removed since."""
        return sum(len(worker.held) for worker in self.workers)

    def until_full(self, refusals: int = 3, wait_s: float = 240.0) -> None:
        """Return when each worker got that many more ENOSPC errors."""
        goals = [worker.refused + refusals for worker in self.workers]
        self._until(
            lambda: all(worker.refused >= goal for worker, goal in zip(self.workers, goals, strict=True)),
            "it never fills up",
            wait_s,
        )

    def make_room(self, wait_s: float = 120.0) -> None:
        """Let each worker remove half of its files. Return when that is done and more was written since."""
        for worker in self.workers:
            worker.make_room.set()
        self._until(
            lambda: not any(worker.make_room.is_set() for worker in self.workers),
            "nothing can be removed",
            wait_s,
        )
        goals = [len(worker.held) + 3 for worker in self.workers]
        self._until(
            lambda: all(len(worker.held) >= goal for worker, goal in zip(self.workers, goals, strict=True)),
            "nothing can be written although there is room",
            wait_s,
        )

    def _until(self, holds: Callable[[], bool], otherwise: str, wait_s: float) -> None:
        end = time.monotonic() + wait_s
        while not holds():
            assert not self.errors, "; ".join(self.errors)
            assert time.monotonic() < end, (
                f"{otherwise}: {[(w.doing, len(w.held), w.refused) for w in self.workers]}"
            )
            time.sleep(0.01)


class _Rewriting(_Worker):
    """Writes into its own file through its own client, and reads the file."""

    FILE_BYTES = 3 << 20

    def __init__(self, connect: Callable[[], Any], number: int, stop: threading.Event) -> None:
        super().__init__(f"client-{number}", number, stop)
        self.connect, self.path, self.model = connect, f"/w{number}", bytearray(self.FILE_BYTES)

    def begin(self) -> None:
        self.client = self.connect()
        self.client.write_bytes(self.path, bytes(self.model))
        self.file = self.client.open(self.path, "r+b", buffering=0)

    def step(self) -> None:
        size = len(self.model)
        offset = self.chance.randrange(size - 150_000)
        piece = self.chance.randbytes(self.chance.choice((10, 4096, 5000, 131072)))
        self.doing = f"write of {len(piece)} bytes at {offset}"
        self.file.pwrite(piece, offset)
        self.model[offset : offset + len(piece)] = piece
        if self.chance.random() < 0.3:
            self.file.fsync()
        offset = self.chance.randrange(size - 100_000)
        self.doing = f"read at {offset}"
        assert self.file.pread(100_000, offset) == self.model[offset : offset + 100_000], (
            "not what was written"
        )

    def end(self) -> None:
        self.doing = "read of all at the end"
        with self.client:
            with self.file:
                self.file.fsync()
            assert self.client.read_bytes(self.path) == self.model, "not what was written"


class _Naming(_Worker):
    """Creates, moves, reads and removes files in its own directories through its own client."""

    DIRECTORIES = 4

    def __init__(self, connect: Callable[[], Any], number: int, stop: threading.Event) -> None:
        super().__init__(f"names-{number}", number, stop)
        self.connect = connect
        self.directories = [f"/n{number}-{each}" for each in range(self.DIRECTORIES)]
        self.files: dict[str, bytes] = {}

    def begin(self) -> None:
        self.client = self.connect()
        for directory in self.directories:
            self.client.mkdir(directory)

    def step(self) -> None:
        fresh = f"{self.chance.choice(self.directories)}/{self.operations}"
        kind = self.chance.choice(("move", "read", "remove")) if len(self.files) > 20 else "make"
        name = self.chance.choice(list(self.files)) if self.files else ""
        self.doing = f"{kind} {name} {fresh}"
        if kind == "make":
            content = self.chance.randbytes(self.chance.choice((0, 10, 5000, 100_000)))
            self.client.write_bytes(fresh, content)
            self.files[fresh] = content
        elif kind == "move":
            self.client.rename(name, fresh)
            self.files[fresh] = self.files.pop(name)
        elif kind == "remove":
            self.client.remove(name)
            del self.files[name]
        else:
            assert self.client.read_bytes(name) == self.files[name], "not what was written"

    def end(self) -> None:
        self.doing = "look at all at the end"
        with self.client:
            found = [
                f"{directory}/{name}"
                for directory in self.directories
                for name in self.client.list(directory)
            ]
            assert sorted(found) == sorted(self.files), "not the names that are to be there"
            for name, content in self.files.items():
                assert self.client.read_bytes(name) == content, f"{name}: not what was written"


class ClientLoad(_Load):
    """Load through the SDK: `connect` makes a client for each thread. `names`: number of further threads that
    change names."""

    def __init__(self, connect: Callable[[], Any], *, threads: int = 3, names: int = 0) -> None:
        stop = threading.Event()
        super().__init__(
            [
                *(_Rewriting(connect, number, stop) for number in range(threads)),
                *(_Naming(connect, number, stop) for number in range(names)),
            ],
            stop,
        )


class _Resting(_Worker):
    """Pauses between steps, so that the waits are measured and not the throughput."""

    rest_s = 0.005

    def __init__(self, name: str, directory: Path, stop: threading.Event) -> None:
        super().__init__(name, 1, stop)
        self.directory = directory


class _Creating(_Resting):
    """Creates empty files one after the other."""

    def step(self) -> None:
        self.doing = f"create {self.operations}"
        (self.directory / f"pause-{self.operations}").touch()

    def verify(self) -> None:
        there = {name for name in os.listdir(self.directory) if name.startswith("pause-")}
        assert there == {f"pause-{number}" for number in range(self.operations)}


class _Renaming(_Resting):
    """Creates a file, renames it and removes it: each step changes a name."""

    rest_s = 0.02

    def step(self) -> None:
        turn, number = self.operations % 3, self.operations // 3
        made, renamed = self.directory / f"made-{number}", self.directory / f"renamed-{number}"
        self.doing = f"{('create', 'rename', 'unlink')[turn]} {number}"
        if turn == 0:
            made.touch()
        elif turn == 1:
            made.rename(renamed)
        else:
            renamed.unlink()

    def verify(self) -> None:
        assert len(os.listdir(self.directory)) == bool(self.operations % 3), self.directory


class _Blocks(_Resting):
    """Uses a file of blocks that contain their index and a number."""

    BLOCK, COUNT = 4096, 8192

    def begin(self) -> None:
        self.numbers = [0] * self.COUNT
        self.path = self.directory / f"{self.name}.blocks"
        with open(self.path, "xb") as file:
            for place in range(self.COUNT):
                file.write(self.content(place))
            file.flush()
            os.fsync(file.fileno())
        self.file = os.open(self.path, os.O_RDWR | os.O_DIRECT)
        self.buffer = mmap.mmap(-1, self.BLOCK)  # aligned, as O_DIRECT requires

    def content(self, place: int) -> bytes:
        return (place.to_bytes(8, "little") + self.numbers[place].to_bytes(8, "little")) * (self.BLOCK // 16)

    def end(self) -> None:
        os.close(self.file)

    def compare(self, place: int) -> None:
        self.doing = f"read of block {place}"
        assert os.preadv(self.file, [self.buffer], place * self.BLOCK) == self.BLOCK
        assert self.buffer[:] == self.content(place), f"block {place} is not what was written"

    def verify(self) -> None:
        found = self.path.read_bytes()
        wrong = [
            place
            for place in range(self.COUNT)
            if found[place * self.BLOCK : (place + 1) * self.BLOCK] != self.content(place)
        ]
        assert not wrong and len(found) == self.COUNT * self.BLOCK, (
            f"{self.path}: blocks {wrong[:10]} are not what was written"
        )


class _Reading(_Blocks):
    """Reads blocks at random, without the page cache."""

    def step(self) -> None:
        self.compare(self.chance.randrange(self.COUNT))


class _Writing(_Blocks):
    """Writes blocks at random and flushes each."""

    def step(self) -> None:
        place = self.chance.randrange(self.COUNT)
        self.numbers[place] += 1
        self.doing = f"write of block {place}"
        self.buffer[:] = self.content(place)
        assert os.pwritev(self.file, [self.buffer], place * self.BLOCK) == self.BLOCK
        os.fsync(self.file)


class Pauses(_Load):
    """One thread of each kind (create, read, write) in this directory, and their longest steps.

    `longest_s` is the longest of all; `taken` returns those of each kind since the last call.
    """

    KINDS: ClassVar = {"create": _Creating, "read": _Reading, "write": _Writing, "change": _Renaming}

    def __init__(self, directory: Path, kinds: tuple[str, ...] = ("create",)) -> None:
        stop = threading.Event()
        super().__init__([self.KINDS[kind](kind, directory, stop) for kind in kinds], stop)

    def taken(self) -> dict[str, float]:
        """Return kind -> seconds of its longest step since the last call, including the present one."""
        found = {}
        for worker in self.workers:
            began = worker.began
            found[worker.name] = max(worker.longest_s, time.monotonic() - began if began else 0.0)
            worker.longest_s = 0.0
        return found
