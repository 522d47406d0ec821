"""`make quickstart`: a pool on this machine, a real tree in it, every byte compared, and how fast it is beside the local drive.

Run by .venv's Python in the checkout. Uses the `nvpool` command as anybody would, and the SDK where the command has no verb.
May be stopped at any time and run again: it finds what is there and goes on. It leaves the pool running and mounted at ./pool;
`make clean` removes everything. Exit code 0 when all that this machine allows was shown and every byte was right.
"""

from __future__ import annotations

# ruff: noqa: E402
import signal

signal.signal(
    signal.SIGINT, signal.SIG_DFL
)  # until main: nobody wants to see where importing was when Ctrl-C came

import argparse
import asyncio
import os
import shutil
import stat
import sys
import sysconfig
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from nvpool.cli.main import main as run_command
from nvpool.cli.output import print_table, show_error
from nvpool.cli.pool_path import find, session
from nvpool.cli.progress import ProgressSample, shown
from nvpool.client.state.vfs_types import Caller
from nvpool.core.checksum import crc32c
from nvpool.core.errors import DriveFailed, Refused
from nvpool.core.units import MIB, format_bytes
from nvpool.sdk.bench.random_reads import Measured, read_local, read_pool

CHECKOUT = Path(__file__).resolve().parent.parent
FILES_MEASURED = 256
"""Few enough to keep open, enough that their contents are spread over all targets."""
INSTALLED_LATER = ("site-packages", "dist-packages")
"""Folders of the standard library's directory that are not of it, and may be of any size."""
COMPARISONS_IN_PARALLEL = 8
KEPT_FREE_BYTES = 512 * MIB
CAP_SYS_ADMIN = 21


def title(text: str) -> None:
    print(f"\n\033[1m{text}\033[0m" if sys.stdout.isatty() else f"\n{text}", flush=True)


def nvpool(*words: str) -> None:
    """As `nvpool words…`, in this process. Failed when its exit code is not 0; what went wrong it has said."""
    sys.stdout.flush()
    code = run_command(list(words))
    if code == 130:
        raise KeyboardInterrupt
    if code:
        raise Failed(f"`nvpool {words[0]}` ended with exit code {code}")


class Failed(Exception):
    """Shown as one line; exit code 1."""


class Quickstart:
    def __init__(self, source: Path, directory: Path, mount: Path, seconds: float, exclude: tuple[str, ...]):
        self.source = source
        self.directory = directory
        self.mount = mount
        self.seconds = seconds
        self.exclude = exclude
        self.name = source.name or "root"
        self.mounted = False

    def run(self) -> None:
        self.start()
        self.bring_in()
        self.compare()
        self.measure()
        self.farewell()

    # -- steps ---------------------------------------------------------------------------------------------------------

    def start(self) -> None:
        title("1. A pool on this machine: one metadata shard, two drives of different size")
        why_not = no_mount_because()
        command = ["dev", "up", str(self.directory)]
        if not self.directory.exists():
            need = tree_bytes(self.source, self.exclude) * 5 // 4 + KEPT_FREE_BYTES
            free = shutil.disk_usage(self.directory.parent).free
            if need > free:
                raise Failed(
                    f"{self.source} needs {format_bytes(need)} here, {format_bytes(free)} are free; name a smaller "
                    f"tree with SOURCE="
                )
            # The sizes differ as drives of a real pool do: the larger one gets twice as many chunks. Sparse until written.
            for share in (1, 2):
                command += ["--size", str(max(share << 30, need * share // 2) // MIB * MIB)]
        else:
            print("it is there from an earlier run")
        if why_not:
            print(
                f"It cannot be mounted here: {why_not}. Everything else works; the SDK takes the mount's place."
            )
        else:
            command += ["--mount", str(self.mount)]
        nvpool(*command)
        self.mounted = not why_not

    def bring_in(self) -> None:
        title(f"2. Import {self.source}")
        exclude = [word for pattern in self.exclude for word in ("--exclude", pattern)]
        nvpool("import", str(self.source), f"{self.directory}:/{self.name}", *exclude)

    def compare(self) -> None:
        title(f"3. Compare every byte {'through the mount' if self.mounted else 'through the SDK'}")
        counted = Counted()
        work = self._compare_mount(counted) if self.mounted else self._compare_sdk(counted)
        began = time.monotonic()
        asyncio.run(
            shown(
                "compare",
                work,
                lambda: ProgressSample(counted.bytes, counted.total or None, f"{counted.files:,} files"),
            )
        )
        if counted.wrong:
            raise Failed(f"{len(counted.wrong)} files are not what they were, first: {counted.wrong[0]}")
        if not counted.files:
            raise Failed(f"there are no files in {self.source}")
        print(
            f"{counted.files:,} files, {format_bytes(counted.bytes)}: equal, byte for byte "
            f"({format_bytes(counted.bytes / max(time.monotonic() - began, 1e-3))}/s)"
        )

    async def _compare_mount(self, counted: Counted) -> None:
        def work() -> None:
            pairs = [
                (path, self.mount / self.name / path.relative_to(self.source))
                for path in regular_files(self.source, self.exclude)
            ]
            counted.total = sum(path.lstat().st_size for path, _ in pairs)
            with ThreadPoolExecutor(COMPARISONS_IN_PARALLEL) as threads:
                for (path, there), (here, in_pool) in zip(
                    pairs, threads.map(lambda pair: tuple(map(checksum, pair)), pairs), strict=True
                ):
                    equal = here == in_pool
                    if not equal and there.exists() and path.lstat().st_mtime_ns != there.lstat().st_mtime_ns:
                        print(f"{path} was changed since it was imported", flush=True)
                        equal = True
                    counted.one(path, there, equal)

        await asyncio.to_thread(work)

    async def _compare_sdk(self, counted: Counted) -> None:
        async with session(str(self.directory), "quickstart") as client:
            vfs, caller = client.vfs, Caller(os.geteuid(), os.getegid())
            counted.total = tree_bytes(self.source, self.exclude)
            for path in regular_files(self.source, self.exclude):
                relative = path.relative_to(self.source)
                attr = await find(vfs, os.fsencode(f"/{self.name}/{relative}"))
                handle = await vfs.open(attr.inode, os.O_RDONLY, caller)
                value, offset = 0, 0
                while len(piece := await vfs.read(handle, offset, MIB)):
                    value, offset = crc32c(piece, value), offset + len(piece)
                await vfs.release(handle)
                counted.one(path, Path(self.name) / relative, value == checksum(path))

    def measure(self) -> None:
        title(f"4. Read 4 KiB at random places of the {FILES_MEASURED} largest files")
        here = [str(path) for path in self.largest(FILES_MEASURED) if path.lstat().st_size >= 4096]
        if not here:
            print("no file is large enough")
            return
        inside = [os.fsencode(f"/{self.name}/{os.path.relpath(path, self.source)}") for path in here]
        rows: list[tuple[str, str, Measured]] = []

        def add(name: str, caches: str, measured: Callable[[], Measured]) -> None:
            print(f"{name} ({caches}): ", end="", flush=True)
            try:
                found = measured()
            except (Refused, DriveFailed) as error:
                print(f"not measured: {error}")  # a file system without O_DIRECT
                return
            rows.append((name, caches, found))
            print(f"{found.rate:,.0f} reads/s", flush=True)

        short = self.seconds / 3
        for path in here:
            checksum(Path(path))  # so that "in memory" is true
        add("local drive", "in the kernel's page cache", lambda: read_local(here, seconds=short))
        add(
            "local drive",
            "past the page cache (O_DIRECT): the drive itself",
            lambda: read_local(here, seconds=short, direct=True),
        )
        if self.mounted:
            there = [str(self.mount / self.name / Path(path).relative_to(self.source)) for path in here]
            add("mount", "in the kernel's page cache", lambda: read_local(there, seconds=short))
            add(
                "mount, 1 thread",
                "past the page cache; the stores have it in memory",
                lambda: read_local(there, seconds=self.seconds, direct=True),
            )
            add(
                "mount, 16 threads",
                "past the page cache; the stores have it in memory",
                lambda: read_local(there, seconds=short, threads=16, direct=True),
            )
        add(
            "SDK read_many, 64 a call",
            "no cache; the stores have it in memory",
            lambda: asyncio.run(self._read_pool(inside)),
        )
        print()
        print_table(
            ("4 KiB random reads", "caches", "reads/s", "throughput", "p50", "p99"),
            [
                (
                    name,
                    caches,
                    f"{found.rate:,.0f}",
                    f"{format_bytes(found.bytes_rate)}/s",
                    duration(found.p50_us),
                    duration(found.p99_us),
                )
                for name, caches, found in rows
            ],
        )
        print(
            "(The latency of read_many is that of a call of 64 reads. Everything shares this machine's "
            f"{os.cpu_count()} cores; bench/README.md measures with less in the way.)"
        )

    def largest(self, count: int) -> list[Path]:
        return sorted(
            regular_files(self.source, self.exclude), key=lambda path: (-path.lstat().st_size, path)
        )[:count]

    async def _read_pool(self, paths: Iterable[bytes]) -> Measured:
        async with session(str(self.directory), "quickstart") as client:
            caller, handles = Caller(os.geteuid(), os.getegid()), []
            for path in paths:
                attr = await find(client.vfs, path)
                handles.append(await client.vfs.open(attr.inode, os.O_RDONLY, caller))
            found = await read_pool(client.vfs, handles, seconds=self.seconds)
            for handle in handles:
                await client.vfs.release(handle)
            return found

    def farewell(self) -> None:
        title("The pool goes on serving. Try next:")
        command, place, mount = map(
            shown_path, (Path(sys.executable).parent / "nvpool", self.directory, self.mount)
        )
        largest = self.largest(1)[0].relative_to(self.source)
        tries = [
            (f"{command} status {place}", "its processes and drives"),
            (f"{command} file info {place}:/{self.name}/{largest}", "which chunks, on which drives"),
            (f"{command} fsck {place}", "check everything, while it serves"),
            (f"{command} bench {place}", "measure it"),
        ]
        if self.mounted:
            tries.insert(0, (f"ls -l {mount}/{self.name}", "the same tree, from the pool"))
        else:
            tries.insert(0, (f"{command} export {place}:/{self.name} /tmp/{self.name}", "and out again"))
        for line, what in tries:
            print(f"  {line}\n      {what}")
        print(
            f"  . {shown_path(Path(sys.executable).parent / 'activate')}\n      and `nvpool` alone will do, as in the README"
        )
        print("  kill -9 any process that `status` names and go on reading: it comes back")
        stop = f"kill $(cut -d' ' -f1 {place}/lock)"
        if self.mounted:
            stop = f"{command} umount {mount} && {stop}"
        print(
            f"\nStop it, losing nothing: {stop}\nand `make quickstart` starts it again, also after a reboot. "
            "`make clean` stops it and removes everything."
        )


class Counted:
    """Counts of the comparison, and the files that differ."""

    def __init__(self) -> None:
        self.files = self.bytes = self.total = 0
        self.wrong: list[str] = []

    def one(self, path: Path, there: Path, equal: bool) -> None:
        self.files += 1
        self.bytes += path.lstat().st_size
        if not equal:
            self.wrong.append(str(there))


def shown_path(path: Path) -> str:
    """As a person in this directory would write it."""
    relative = os.path.relpath(path)
    return str(path) if relative.startswith("..") else relative


def regular_files(root: Path, exclude: tuple[str, ...]) -> Iterable[Path]:
    for folder, folders, names in os.walk(root):
        folders[:] = sorted(name for name in folders if name not in exclude)
        for name in sorted(names):
            path = Path(folder, name)
            if stat.S_ISREG(path.lstat().st_mode):
                yield path


def tree_bytes(root: Path, exclude: tuple[str, ...]) -> int:
    return sum(path.lstat().st_size for path in regular_files(root, exclude))


def checksum(path: Path) -> int | None:
    """CRC32C of the contents; None where there is no such file."""
    value = 0
    try:
        with open(path, "rb", buffering=0) as file:
            while piece := file.read(MIB):
                value = crc32c(piece, value)
    except FileNotFoundError:
        return None
    return value


def duration(microseconds: float) -> str:
    return f"{microseconds:.3g} µs" if microseconds < 1000 else f"{microseconds / 1000:.3g} ms"


def no_mount_because() -> str:
    """Why nothing can be mounted here; empty where it can."""
    hint = "(a container gets it with --device /dev/fuse --cap-add SYS_ADMIN)"
    try:
        device = os.open("/dev/fuse", os.O_RDWR)
        number = os.fstat(device).st_rdev
        os.close(device)
    except OSError as error:
        return f"/dev/fuse: {error.strerror} {hint}"
    if number != os.makedev(10, 229):
        return f"/dev/fuse is not the FUSE device {hint}"
    if os.geteuid():
        return "" if shutil.which("fusermount3") else "fusermount3 is missing"
    with open("/proc/self/status") as file:
        rights = next(int(line.split()[1], 16) for line in file if line.startswith("CapEff"))
    return (
        ""
        if rights >> CAP_SYS_ADMIN & 1
        else "this container may not mount (it would with --cap-add SYS_ADMIN)"
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--source", type=Path, help="a directory; default: the Python standard library")
    parser.add_argument("--directory", type=Path, default=CHECKOUT / ".quickstart", help="of the pool")
    parser.add_argument("--mount", type=Path, default=CHECKOUT / "pool")
    parser.add_argument("--seconds", type=float, default=10.0, help="of the random reads")
    arguments = parser.parse_args()
    source = Path(arguments.source or sysconfig.get_paths()["stdlib"]).resolve()
    if not source.is_dir():
        parser.error(f"{arguments.source} is not a directory")
    for own in (arguments.directory, arguments.mount):
        if own.absolute().is_relative_to(source):
            parser.error(f"{source} holds {own}, where this pool is going to be; choose another tree")
    try:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        Quickstart(
            source,
            arguments.directory.resolve(),
            arguments.mount.absolute(),
            arguments.seconds,
            () if arguments.source else INSTALLED_LATER,
        ).run()
    except Failed as error:
        print(f"quickstart: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\ninterrupted; `make quickstart` goes on, `make clean` removes everything", file=sys.stderr)
        return 130
    except Exception as error:
        return show_error(error)
    return 0


if __name__ == "__main__":
    sys.exit(main())
