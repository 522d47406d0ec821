"""A load that checks: threads that change a directory and know, byte for byte, what it must hold.

For fault tests: run it on a mount while daemons are killed, drives fill up or links break, then `verify`. Each thread owns a
subdirectory and a model of it; an operation that returned is in the model, one that raised stops the thread and is reported.
"""

from __future__ import annotations

import ctypes
import errno
import os
import random
import threading
from pathlib import Path

from nvpool.base.checksum import crc32c

_libc = ctypes.CDLL(None, use_errno=True)
_libc.fallocate.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_long, ctypes.c_long]
_KEEP_SIZE, _PUNCH_HOLE = 1, 2


class _Worker(threading.Thread):
    def __init__(self, top: Path, seed: int, stop: threading.Event, file_bytes_max: int) -> None:
        super().__init__(name=f"load-{seed}", daemon=True)
        self.top, self.chance, self.stop, self.file_bytes_max = top, random.Random(seed), stop, file_bytes_max
        self.files: dict[str, bytearray] = {}
        self.counter = 0
        self.operations = 0
        self.error: str | None = None
        self.doing = ""

    def run(self) -> None:
        try:
            self.top.mkdir()
            while not self.stop.is_set():
                self.step()
                self.operations += 1
        except BaseException as error:  # noqa: BLE001 - whatever it is, the test must see it
            self.error = f"{self.doing}: {error!r}"

    def step(self) -> None:
        weights = {"create": 6, "overwrite": 5, "append": 4, "truncate": 2, "rename": 3, "unlink": 2, "check": 5, "replace": 2,
                   "punch": 2, "copy": 2}
        if len(self.files) > 60:
            weights |= {"create": 0, "unlink": 8}
        kinds = list(weights) if self.files else ["create"]
        kind = self.chance.choices(kinds, [weights[k] for k in kinds])[0]
        name = self.chance.choice(list(self.files)) if self.files else ""
        self.doing = f"{kind} {self.top.name}/{name}"
        getattr(self, kind)(name)

    def _fresh(self) -> str:
        self.counter += 1
        return f"f{self.counter}"

    def _bytes(self) -> bytes:
        return self.chance.randbytes(self.chance.choice((1, 100, 4096, 5000, 70_000, self.file_bytes_max // 4)))

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
        model[offset:offset + len(content)] = content

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
        """A hole; zeros where the mount makes none."""
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
                f"{content[first:first + 8].hex()} instead of {bytes(model[first:first + 8]).hex()}")


class CheckingLoad:
    """`with CheckingLoad(directory) as load: …faults…` then `load.verify()`."""

    def __init__(self, directory: Path, *, threads: int = 4, seed: int = 1, file_bytes_max: int = 3 << 20) -> None:
        self._stop = threading.Event()
        self.workers = [_Worker(Path(directory) / f"w{seed}-{i}", seed * 1000 + i, self._stop, file_bytes_max)
                        for i in range(threads)]

    def __enter__(self) -> CheckingLoad:
        for worker in self.workers:
            worker.start()
        return self

    def __exit__(self, *_exc) -> None:
        self.finish()

    @property
    def operations(self) -> int:
        return sum(worker.operations for worker in self.workers)

    def finish(self, timeout_s: float = 120.0) -> None:
        """Stop the threads and wait for the operation that each is in. AssertionError when one hangs."""
        self._stop.set()
        for worker in self.workers:
            worker.join(timeout_s)
            assert not worker.is_alive(), f"{worker.name} hangs in: {worker.doing}"

    def verify(self) -> None:
        """The directory holds exactly what the model says; AssertionError names the first difference and every error met."""
        errors = [worker.error for worker in self.workers if worker.error]
        assert not errors, "; ".join(errors)
        for worker in self.workers:
            assert sorted(os.listdir(worker.top)) == sorted(worker.files), worker.top
            for name in worker.files:
                worker.compare(name)
