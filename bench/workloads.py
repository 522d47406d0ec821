"""Loads of the comparison: the same for any directory, each run by one process in C.

fio reads and writes the large file, and `files_load` (bench/files_load.c) runs all loads with many files. nvpool's SDK is
measured by sdk_loads.py, beside `socket_floor` (bench/socket_floor.c). Every subject that mounts holds, before
the first round: `large`, a file of random bytes, and `files`, one directory of 4 KiB files.

Cold: `Subject.forget` was called right before, and nothing is read twice: each thread of a random read has a
region of its own and reads each block of it at most once; each name is looked up only once. Random reads use
O_DIRECT, so that neither the kernel's page cache nor its read-ahead stands between the load and the subject;
sequential ones do not, as `cp` does not. Warm means: read whole WARM_PASSES times just before, and again by another
process. The kernel moves pages between its lists at the first pass, and a subject that is measured twice (with the
processors awake, and not) would have an advantage.

Order: loads of `last` run when all rounds of the others are over. ext4 creates files five to ten times slower after many were
unlinked, and what one subject unlinks all of them would pay for. Each create has a new directory, each write a new file.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from subjects.contract import PROBE, Failed, Subject

KIB, MIB = 1 << 10, 1 << 20
FILE_BYTES = 4 * KIB
WARM_PASSES = 3
WAIT_S = 300.0
"""Seconds that a load may take beyond its time, for write-back and for a peer that pauses."""


SDK_BYTES = 64 * MIB
"""Part of the large file for the SDK's loads; it is read once before, so that it is in the page cache."""


class Sizes(NamedTuple):
    """`seconds` of each load at most; `file_bytes` of the large file; `write_bytes` of those written in each round; `files` in
    the one directory."""

    seconds: float
    file_bytes: int
    write_bytes: int
    files: int


class Place:
    """The files of one subject, and the program that works on them. `turn` names a round and so its new files."""

    def __init__(self, subject: Subject, mount: Path, outside: Path, program: Path, sizes: Sizes) -> None:
        self.subject, self.mount, self.outside, self.program = subject, mount, outside, program
        self.sizes = sizes._replace(
            file_bytes=min(sizes.file_bytes, subject.file_bytes_max or sizes.file_bytes)
        )
        self.large, self.files = mount / "large", mount / "files"

    def prepare(self) -> None:
        """Make the files that are read. Failed when the subject does not take them."""
        if "mount" not in self.subject.offers:
            return
        self.subject.run(
            "dd",
            "if=/dev/zero",
            f"of={self.mount / PROBE}",
            "bs=4096",
            "count=1",
            "status=none",
            "conv=fsync",
        )
        fio(self, self.large, "write", MIB, 1, end_fsync=True, size_bytes=self.sizes.file_bytes)
        self.subject.run("mkdir", self.files)
        self.load("create", self.files, 16, 3600, self.sizes.files, FILE_BYTES, timeout_s=1800)
        self.names(self.files)

    def names(self, directory: Path) -> str:
        """The names in it, in the order of the subject's listing; read once and kept outside, for reading them warms."""
        kept = self.outside / directory.name
        if not kept.exists():
            kept.write_text(self.subject.run(self.program, "names", directory, timeout_s=WAIT_S))
        return kept.read_text()

    def load(
        self, verb: str, directory: Path, *words: object, names: str = "", timeout_s: float | None = None
    ) -> dict:
        said = self.subject.run(
            self.program,
            verb,
            directory,
            *words,
            text=names,
            timeout_s=timeout_s or self.sizes.seconds + WAIT_S,
        )
        found = json.loads(said)
        seconds = max(found["seconds"], 1e-9)
        return found | {"rate": found["count"] / seconds, "bytes_rate": found["bytes"] / seconds}

    # -- what is measured --------------------------------------------------------------------------------------------------

    def read(self, turn: str, pattern: str, block_bytes: int, threads: int, direct: bool) -> dict:
        return fio(self, self.large, pattern, block_bytes, threads, direct=direct)

    def reread(self, turn: str) -> dict:
        for _ in range(WARM_PASSES):
            self.subject.run(
                "dd", f"if={self.large}", "of=/dev/null", "bs=1M", "status=none", timeout_s=WAIT_S
            )  # all of it
        return fio(self, self.large, "read", MIB, 1)

    def write(self, turn: str) -> dict:
        return fio(
            self,
            self.mount / f"written-{turn}",
            "write",
            MIB,
            1,
            end_fsync=True,
            size_bytes=self.sizes.write_bytes,
        )

    def create(self, turn: str, threads: int, size_bytes: int, files_max: int) -> dict:
        made = self.mount / f"created-{size_bytes}-{turn}"
        self.subject.run("mkdir", made)
        return self.load("create", made, threads, self.sizes.seconds, files_max, size_bytes)

    def stat(self, turn: str) -> dict:
        return self.load("stat", self.files, self.sizes.seconds, names=self.names(self.files))

    def list(self, turn: str) -> dict:
        return self.load("list", self.files)

    def whole_files(self, turn: str) -> dict:
        return self.load("read", self.files, 16, self.sizes.seconds, names=self.names(self.files))

    def unlink(self, turn: str) -> dict:
        made = self.mount / f"created-{FILE_BYTES}-{turn}"
        return self.load("unlink", made, self.sizes.seconds, names=self.names(made))

    # -- what the SDK does, and the floor under a request of it -------------------------------------------------------------

    def sdk(self, verb: str) -> dict:
        path = f"/{(self.files if verb == 'files' else self.large).name}"
        return json.loads(
            self.subject.sdk(
                verb, path, "--region", min(SDK_BYTES, self.sizes.file_bytes), seconds=self.sizes.seconds
            )
        )

    def socket(self) -> dict:
        return json.loads(
            self.subject.run(self.subject.program, self.sizes.seconds, timeout_s=self.sizes.seconds + WAIT_S)
        )


class Load(NamedTuple):
    """`key` is for --only and JSON, `name` for tables. `goals`: times the best peer in the columns "same host" and "tcp".
    `durable`: the result hangs on whether fsync reaches the drive. `needs`: the load that made its files. `by`: mount, sdk
    (nvpool's own) or socket. `for_all`: also for the variants of nvpool that stand in no column."""

    key: str
    name: str
    unit: str
    do: Callable[[Place, str], dict]
    cold: bool = False
    goals: tuple[float, float] | None = None
    durable: bool = False
    last: bool = False
    needs: str | None = None
    by: str = "mount"
    for_all: bool = False

    def suits(self, subject: Subject) -> bool:
        return self.by in subject.offers and (self.for_all or not subject.in_part)


LOADS = (
    Load(
        "read4k-1",
        "4 KiB random read, 1 thread",
        "reads/s",
        lambda place, turn: place.read(turn, "randread", 4 * KIB, 1, True),
        True,
        (2, 1.5),
        for_all=True,
    ),
    Load(
        "read4k-16",
        "4 KiB random read, 16 threads",
        "reads/s",
        lambda place, turn: place.read(turn, "randread", 4 * KIB, 16, True),
        True,
        (3.5, 2.5),
        for_all=True,
    ),
    Load(
        "read128k-16",
        "128 KiB random read, 16 threads",
        "MiB/s",
        lambda place, turn: place.read(turn, "randread", 128 * KIB, 16, True),
        True,
        (1.6, 1.3),
        for_all=True,
    ),
    Load(
        "readseq",
        "sequential read, 1 MiB, cold",
        "MiB/s",
        lambda place, turn: place.read(turn, "read", MIB, 1, False),
        True,
        (1.0, 0.8),
    ),
    Load("reread", "the same again, warm", "MiB/s", Place.reread),
    Load(
        "socket",
        "C sockets over TCP: question and 4 KiB answer",
        "reads/s",
        lambda place, turn: place.socket(),
        by="socket",
    ),
    Load(
        "sdk-one",
        "SDK: 4 KiB random read, one at a time, warm",
        "reads/s",
        lambda place, turn: place.sdk("one"),
        by="sdk",
        for_all=True,
    ),
    Load(
        "sdk-thread",
        "SDK: the same from a thread (File.pread)",
        "reads/s",
        lambda place, turn: place.sdk("one-thread"),
        by="sdk",
    ),
    Load(
        "sdk-many",
        "SDK: read_many of 1,024 × 4 KiB, warm",
        "reads/s",
        lambda place, turn: place.sdk("many"),
        by="sdk",
        for_all=True,
    ),
    Load(
        "sdk-files",
        "SDK: read_many of 1,024 whole 4 KiB files, cold",
        "files/s",
        lambda place, turn: place.sdk("files"),
        True,
        by="sdk",
    ),
    Load("writeseq", "sequential write with fsync", "MiB/s", Place.write, goals=(1.1, 1.0), durable=True),
    Load(
        "create4k",
        "create, write, close 4 KiB, 1 thread",
        "files/s",
        lambda place, turn: place.create(turn, 1, FILE_BYTES, place.sizes.files),
        goals=(2, 2),
        for_all=True,
    ),
    Load(
        "create0-16",
        "create empty, 16 threads in one directory",
        "files/s",
        lambda place, turn: place.create(turn, 16, 0, 2 * place.sizes.files),
        goals=(1.5, 1.5),
    ),
    Load("stat", "stat, cold, 1 thread, in the order of a listing", "files/s", Place.stat, True, (1.4, 1.3)),
    Load(
        "files4k-16",
        "random whole 4 KiB files, 16 threads, cold",
        "files/s",
        Place.whole_files,
        True,
        (3, 2.5),
    ),
    Load("list", "list with stat, cold, 1 thread", "files/s", Place.list, True, (1.0, 1.0)),
    Load(
        "unlink", "unlink, 1 thread", "files/s", Place.unlink, goals=(1.2, 1.2), last=True, needs="create4k"
    ),
)


def fio(
    place: Place,
    path: Path,
    pattern: str,
    block_bytes: int,
    threads: int,
    *,
    direct: bool = False,
    end_fsync: bool = False,
    size_bytes: int | None = None,
    parts: int = 1,
) -> dict:
    """One pass over the file by `threads`, each with a region of its own and one request under way; at most the seconds of a
    load, unless it writes, and one of so many `parts` of it. Without hints to the kernel about what comes."""
    size = (size_bytes or place.sizes.file_bytes) // threads // block_bytes * block_bytes
    command = [
        "fio",
        "--name=load",
        f"--filename={path}",
        f"--rw={pattern}",
        f"--bs={block_bytes}",
        f"--size={size}",
        f"--offset_increment={size}",
        "--ioengine=psync",
        "--thread",
        f"--numjobs={threads}",
        "--group_reporting",
        f"--direct={int(direct)}",
        "--randrepeat=0",
        "--invalidate=0",
        "--fadvise_hint=0",
        "--fallocate=none",
        "--percentile_list=50:99",
        "--output-format=json",
    ]
    command += [f"--io_size={size // parts}"] * (parts > 1)
    command += (
        ["--end_fsync=1", "--refill_buffers"]
        if end_fsync
        else [f"--runtime={int(place.sizes.seconds * 1000)}ms"]
    )
    text = place.subject.run(*command, timeout_s=place.sizes.seconds + WAIT_S)
    # fio may say something before its JSON.
    job = json.loads(text[text.index("{") :])["jobs"][0]
    if job["error"]:
        raise Failed(f"fio ended with error {job['error']}")
    found = job["write" if "write" in pattern else "read"]
    latency = found["clat_ns"]["percentile"]
    return {
        "rate": found["iops"],
        "bytes_rate": found["bw_bytes"],
        "count": found["total_ios"],
        "p50_us": latency["50.000000"] / 1e3,
        "p99_us": latency["99.000000"] / 1e3,
    }


def value_of(load: Load, found: dict) -> float:
    return found["bytes_rate"] / MIB if load.unit == "MiB/s" else found["rate"]
