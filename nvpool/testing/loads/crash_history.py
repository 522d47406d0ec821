"""Writing load whose history can be compared with the state after a power loss.

`python -m nvpool.testing.loads.crash_history POOL SEED SECONDS WORKERS` changes files through the SDK, one
directory a worker, and prints one JSON line for each operation that was answered, with CLOCK_MONOTONIC before
and after. `judge` says whether a tree can be the result of a power loss at a given moment:

* The names of a directory are those after some of the worker's operations, in order: at least those that were
  answered before a sync (of any worker) began, or three seconds ago. At most one more than were answered.
* A file has a size that it had at or after its last fsync. Each of its 4 KiB blocks holds what it held at or after
  that. If the fsync was the last operation on it, all of it is one state. A block of a hole holds nothing older than
  the hole.
* A file that was renamed over another one holds at least what it held then, also without a sync: old bytes or new.

Contents come from seeds, so that the lines are short. Used by fault tests.
"""

from __future__ import annotations

import json
import random
import sys
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

BLOCK = 4096
INTERVAL_S = 3.0
"""Longer than a sync interval and a sync take on a busy machine."""
_FILES_MAX = 12


def content(seed: int, length: int) -> bytes:
    return random.Random(seed).randbytes(length)


def now_ns() -> int:
    return time.clock_gettime_ns(time.CLOCK_MONOTONIC)


class HistoryWorker(threading.Thread):
    """Changes files in one directory until it is stopped or something fails."""

    def __init__(self, pool, number: int, seed: int, stop: threading.Event, lock: threading.Lock):
        super().__init__(daemon=True)
        self.pool, self.number, self.stop, self.lock = pool, number, stop, lock
        self.chance = random.Random(f"{seed}-{number}")
        self.top = f"/w{number}"
        self.names: dict[str, int] = {}
        self.count = 0
        self.error = ""

    def run(self) -> None:
        try:
            self.log("top", lambda: self.pool.mkdir(self.top))
            while not self.stop.is_set():
                self.step()
        except BaseException as error:
            self.error = f"w{self.number}: {error!r}"

    def log(self, kind: str, work, **said) -> None:
        begin = now_ns()
        work()
        line = json.dumps({"w": self.number, "kind": kind, "begin": begin, "end": now_ns(), **said})
        with self.lock:
            print(line, flush=True)

    def step(self) -> None:
        kinds = {
            "create": 5,
            "write": 5,
            "wsync": 5,
            "fsync": 2,
            "truncate": 2,
            "punch": 2,
            "rename": 2,
            "replace": 3,
            "unlink": 2,
        }
        if len(self.names) > _FILES_MAX:
            kinds |= {"create": 0, "unlink": 8}
        kind = self.chance.choices(list(kinds), list(kinds.values()))[0] if len(self.names) > 2 else "create"
        name = self.chance.choice(list(self.names)) if self.names else ""
        getattr(self, kind)(name)

    def fresh(self) -> str:
        self.count += 1
        return f"f{self.count}"

    def bytes(self) -> tuple[int, int]:
        return self.chance.getrandbits(40), self.chance.choice(
            (1, 600, 4096, 10_000, 70_000, 300_000, 75 * 4096, 160 * 4096)
        )

    def create(self, _name: str) -> str:
        name, (seed, length) = self.fresh(), self.bytes()

        def work() -> None:
            with self.pool.open(f"{self.top}/{name}", "xb", buffering=0) as file:
                file.write(content(seed, length))

        self.log("create", work, file=self.count, name=name, seed=seed, length=length)
        self.names[name] = self.count
        return name

    def write(self, name: str, sync: bool = False) -> None:
        seed, length = self.bytes()
        offset = self.chance.choice((0, 100, 4096, 8192 + 77))

        def work() -> None:
            with self.pool.open(f"{self.top}/{name}", "r+b", buffering=0) as file:
                file.seek(offset)
                file.write(content(seed, length))
                if sync:
                    file.fsync()

        self.log(
            "wsync" if sync else "write", work, file=self.names[name], seed=seed, length=length, offset=offset
        )

    def wsync(self, name: str) -> None:
        self.write(name, sync=True)

    def fsync(self, name: str) -> None:
        def work() -> None:
            with self.pool.open(f"{self.top}/{name}", "r+b", buffering=0) as file:
                file.fsync()

        self.log("fsync", work, file=self.names[name])

    def truncate(self, name: str) -> None:
        size = self.chance.choice((0, 100, 5000, 100_000))
        self.log(
            "truncate",
            lambda: self.pool.truncate(f"{self.top}/{name}", size),
            file=self.names[name],
            size=size,
        )

    def punch(self, name: str) -> None:
        offset, length = (
            self.chance.choice((0, 100, 4096, 50_000)),
            self.chance.choice((10, 4096, 40_000, 300_000)),
        )

        def work() -> None:
            with self.pool.open(f"{self.top}/{name}", "r+b", buffering=0) as file:
                file.punch(offset, length)

        self.log("punch", work, file=self.names[name], offset=offset, length=length)

    def rename(self, name: str) -> None:
        new = self.fresh()
        self.log(
            "rename",
            lambda: self.pool.rename(f"{self.top}/{name}", f"{self.top}/{new}"),
            file=self.names[name],
            name=new,
        )
        self.names[new] = self.names.pop(name)

    def replace(self, name: str) -> None:
        new = self.create("")
        self.log(
            "rename",
            lambda: self.pool.rename(f"{self.top}/{new}", f"{self.top}/{name}"),
            file=self.names[new],
            name=name,
        )
        self.names[name] = self.names.pop(new)

    def unlink(self, name: str) -> None:
        self.log("unlink", lambda: self.pool.remove(f"{self.top}/{name}"), file=self.names[name])
        del self.names[name]


def main(pool_path: str, seed: int, seconds: float, workers: int) -> None:
    import nvpool

    stop, lock = threading.Event(), threading.Lock()
    with nvpool.connect(pool_path) as pool:
        threads = [HistoryWorker(pool, number, seed, stop, lock) for number in range(workers)]
        for thread in threads:
            thread.start()
        stop.wait(seconds)
        stop.set()
        for thread in threads:
            thread.join(60)
        errors = [
            thread.error or f"w{thread.number} hangs"
            for thread in threads
            if thread.error or thread.is_alive()
        ]
    if errors:
        sys.exit("; ".join(errors))


# -- comparison with the state after a power loss --------------------------------------------------------------------------


@dataclass
class _FileHistory:
    """States of one file: (number of the operation, whole content), and the last operation that made it
    durable."""

    versions: list[tuple[int, bytes]] = field(default_factory=list)
    durable: int = -1
    replaced: int = -1
    """The operation that renamed it over another file."""
    holes: list[tuple[int, int, int]] = field(default_factory=list)
    """For each hole that was answered: the operation, its first block, and the block behind its last."""


class CrashHistory:
    """The operations that a load printed."""

    def __init__(self, lines: str):
        self.operations: list[dict[str, Any]] = [
            json.loads(line) for line in lines.splitlines() if line.startswith("{")
        ]
        self.syncs = [op for op in self.operations if op["kind"] in ("wsync", "fsync")]
        self.workers = sorted({op["w"] for op in self.operations})

    def judge(self, found: dict[int, dict[str, bytes] | None], at_ns: int) -> str:
        """Return why `found` cannot be the state after a power loss at `at_ns`, or "".

        `found`: worker -> name -> content; None: no directory.
        """
        certain_ns = max(
            [op["begin"] for op in self.syncs if op["end"] <= at_ns] + [at_ns - int(INTERVAL_S * 1e9)]
        )
        for worker in self.workers:
            own = [op for op in self.operations if op["w"] == worker and op["begin"] <= at_ns]
            reason = self._worker(own, found[worker], at_ns, sum(op["end"] <= certain_ns for op in own))
            if reason:
                return f"w{worker}: {reason}"
        return ""

    def _worker(self, own: list[dict], found: dict[str, bytes] | None, at_ns: int, least: int) -> str:
        names: list[dict[str, int] | None] = [None]
        files: dict[int, _FileHistory] = {}
        for number, op in enumerate(own):
            names.append(_names_after(names[-1], op, files, number, op["end"] <= at_ns))
        reasons = []
        for count in range(least, len(names)):
            if (names[count] or {}).keys() != (found or {}).keys() or (names[count] is None) != (
                found is None
            ):
                continue
            reason = ""
            for name, number in (names[count] or {}).items():
                reason = reason or _content_wrong(
                    files[number], found[name], count, f"{name} (file {number})"
                )
            if not reason:
                return ""
            reasons.append(f"after {count} operations: {reason}")
        if reasons:
            return "; ".join(reasons)
        shown = None if found is None else sorted(found)
        return (
            f"{shown} are the names after none of {least} to {len(names) - 1} operations; after {least} they are "
            f"{None if names[least] is None else sorted(names[least])}, the next are {own[least - 1 : least + 3]}"
        )


def _names_after(
    before: dict[str, int] | None, op: dict, files: dict[int, _FileHistory], number: int, answered: bool
) -> dict[str, int]:
    """Return the names after `op`, and record in `files` what it does to contents."""
    kind = op["kind"]
    if kind == "top":
        return {}
    names = dict(before or {})
    file = files.setdefault(op["file"], _FileHistory())
    if kind == "create":
        names[op["name"]] = op["file"]
        file.versions += [(number, b""), (number, content(op["seed"], op["length"]))]
    elif kind in ("write", "wsync"):
        last = bytearray(file.versions[-1][1].ljust(op["offset"], b"\0"))
        last[op["offset"] : op["offset"] + op["length"]] = content(op["seed"], op["length"])
        file.versions.append((number, bytes(last)))
    elif kind == "truncate":
        last_bytes = file.versions[-1][1]
        file.versions.append((number, last_bytes[: op["size"]].ljust(op["size"], b"\0")))
    elif kind == "punch":
        last = bytearray(file.versions[-1][1])
        end = min(len(last), op["offset"] + op["length"])
        last[op["offset"] : end] = bytes(max(0, end - op["offset"]))
        file.versions.append((number, bytes(last)))
        if answered:
            file.holes.append((number, -(-op["offset"] // BLOCK), (op["offset"] + op["length"]) // BLOCK))
    elif kind == "rename":
        names = {name: one for name, one in names.items() if one != op["file"]}
        if op["name"] in names:
            file.replaced = number
        names[op["name"]] = op["file"]
    elif kind == "unlink":
        names = {name: one for name, one in names.items() if one != op["file"]}
    if answered and kind in ("wsync", "fsync"):
        file.durable = number
    return names


def _content_wrong(file: _FileHistory, found: bytes, count: int, what: str) -> str:
    durable = max(file.durable, file.replaced if file.replaced < count else -1)
    floor = max((at for at, (number, _) in enumerate(file.versions) if number <= durable), default=0)
    possible = [version for _, version in file.versions[floor:]]
    if len(found) not in {len(version) for version in possible}:
        return f"{what} has {len(found)} bytes, possible are {[len(version) for version in possible]}"
    for at in range(0, len(found), BLOCK):
        block = found[at : at + BLOCK]
        oldest = max([number for number, first, end in file.holes if first <= at // BLOCK < end], default=-1)
        if not any(
            version[at : at + BLOCK].ljust(len(block), b"\0")[: len(block)] == block
            for number, version in file.versions[floor:]
            if number >= oldest
        ):
            return f"{what}: block {at // BLOCK} of {len(found)} bytes is in none of its {len(possible)} possible states"
    return ""


async def read_tree(pool, workers: list[int]) -> dict[int, dict[str, bytes] | None]:
    """Read the tree for `judge` through an AsyncFileSystem."""
    found: dict[int, dict[str, bytes] | None] = {}
    for worker in workers:
        top = f"/w{worker}"
        there = await pool.exists(top)
        found[worker] = (
            {name: await pool.read_bytes(f"{top}/{name}") for name in await pool.list(top)} if there else None
        )
    return found


if __name__ == "__main__":
    main(str(Path(sys.argv[1]).absolute()), int(sys.argv[2]), float(sys.argv[3]), int(sys.argv[4]))
