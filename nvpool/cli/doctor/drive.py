"""Doctor checks of a drive, or of a future drive: a directory on a file system, or a raw block device.

`nvpool doctor` calls `drives`. The checks write nothing but a small unnamed file in a directory (O_TMPFILE),
which the kernel removes. `root` is the place of /sys, as in doctor/machine; tests pass a tree of their own.
"""

from __future__ import annotations

import errno
import mmap
import os
import stat
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from nvpool.cli.doctor.check_results import Check, all_of, bad, ok, warn
from nvpool.core.units import BLOCK_BYTES, format_bytes
from nvpool.host.mountinfo import Mount, mounts

FREE_BAD, FREE_WARN = 0.02, 0.10
_OF_MEMORY = ("tmpfs", "ramfs")
_OF_THE_NETWORK = ("nfs", "nfs4", "cifs", "smb3", "ceph", "glusterfs", "fuse", "9p", "virtiofs")
_WITHOUT_BARRIERS = ("nobarrier", "barrier=0")


def mount_of(path: Path, all_mounts: Iterable[Mount] | None = None) -> Mount:
    """Return the mount that `path` is on: the deepest, and the uppermost of several at one place."""
    place = path.resolve()
    return max(
        (one for one in all_mounts or mounts() if place.is_relative_to(one.point)),
        key=lambda one: len(one.point.parts),
    )


def file_system(path: Path, found: Mount) -> Check:
    name = f"file system of {path}"
    seen = f"{found.type} on {found.source} ({found.options})"
    options = set(found.options.split(","))
    if found.type in _OF_MEMORY:
        return bad(name, seen, "what is stored there is gone with the next loss of power: use a drive")
    if found.type.split(".")[0] in _OF_THE_NETWORK:
        return bad(
            name,
            seen,
            "use a drive of this machine: what a server on the network has in memory no fdatasync reaches "
            "for sure",
        )
    if found.type == "overlay":
        return warn(name, seen, "this is the layer of a container: give it a volume or a device of its own")
    if options & set(_WITHOUT_BARRIERS):
        return bad(
            name, seen, "without barriers a loss of power takes what was synced: mount it with barriers"
        )
    if "sync" in options:
        return warn(name, seen, "every write waits: mount it without sync")
    if found.type not in ("ext4", "xfs"):
        return warn(name, seen, "nvpool is tested on ext4 and xfs")
    return ok(name, seen)


def _queue(device: int, root: Path) -> Path | None:
    """Return /sys/…/queue of a block device, or of the whole disk of a partition."""
    place = root / "sys/dev/block" / f"{os.major(device)}:{os.minor(device)}"
    for queue in (place / "queue", place / ".." / "queue", place.resolve().parent / "queue"):
        if queue.exists():
            return queue
    return None


def device_of(path: Path) -> int:
    there = path.stat()
    return there.st_rdev if stat.S_ISBLK(there.st_mode) else there.st_dev


def device(path: Path, number: int, root: Path = Path("/")) -> Iterator[Check]:
    queue = _queue(number, root)
    if queue is None:
        yield warn(
            f"device of {path}",
            f"{os.major(number)}:{os.minor(number)} is not a known block device",
            "see what the file system lies on: nvpool wants local drives",
        )
        return
    if (queue / "rotational").read_text().strip() == "1":
        yield warn(
            f"device of {path}", "it turns", "a hard disk answers 100 random reads a second: use NVMe drives"
        )
    else:
        yield ok(f"device of {path}", "it does not turn")
    cache = (queue / "write_cache").read_text().strip() if (queue / "write_cache").exists() else "unknown"
    yield ok(
        f"write cache of {path}",
        "written back, and flushed by fdatasync"
        if cache == "write back"
        else "written through: the drive says that it keeps nothing that a loss of power could take",
    )
    block = int((queue / "logical_block_size").read_text())
    if block > BLOCK_BYTES:
        yield bad(
            f"blocks of {path}",
            f"{block} bytes",
            f"a drive with blocks of {BLOCK_BYTES} bytes or less is needed",
        )
    else:
        yield ok(f"blocks of {path}", f"{block} bytes")


def direct(path: Path, opened: Callable[[Path, int, int], int] = os.open) -> Check:
    """Check with one block whether O_DIRECT works."""
    name = f"direct reads of {path}"
    remedy = (
        "reads go through the page cache, which costs processor time and memory: use ext4 or xfs on a drive"
    )
    is_directory = path.is_dir()
    try:
        descriptor = opened(
            path, os.O_DIRECT | (os.O_RDWR | os.O_TMPFILE if is_directory else os.O_RDONLY), 0o600
        )
    except OSError as error:
        if error.errno in (errno.EINVAL, errno.EOPNOTSUPP):
            return warn(name, f"they are refused: {error.strerror}", remedy)
        raise
    try:
        with mmap.mmap(-1, BLOCK_BYTES) as block:
            if is_directory:
                os.pwrite(descriptor, block, 0)
            os.preadv(descriptor, [block], 0)
    except OSError as error:
        return warn(name, f"they fail: {error.strerror}", remedy)
    finally:
        os.close(descriptor)
    return ok(name, "they work")


def space(path: Path, what: str, found: tuple[int, int] | None = None) -> Check:
    """Check the free space. `found` is (free bytes, total bytes); default: those of the file system."""
    if found is None:
        seen = os.statvfs(path)
        found = seen.f_bavail * seen.f_frsize, seen.f_blocks * seen.f_frsize
    free, total = found
    free_text = f"{format_bytes(free)} of {format_bytes(total)} are free"
    if free < FREE_BAD * total:
        return bad(
            f"space of {what}",
            free_text,
            "remove what is not the pool's, or add a drive (nvpool drive add POOL PATH)",
        )
    if free < FREE_WARN * total:
        return warn(
            f"space of {what}",
            free_text,
            "add a drive (nvpool drive add POOL PATH), or remove what is not needed",
        )
    return ok(f"space of {what}", free_text)


def apart(paths: Iterable[Path]) -> Check:
    """Check that each drive has a device of its own."""
    at: dict[int, list[str]] = {}
    for path in paths:
        at.setdefault(device_of(path), []).append(str(path))
    together = [" and ".join(some) for some in at.values() if len(some) > 1]
    if together:
        return warn(
            "drives apart",
            f"{'; '.join(together)} lie on one device",
            "they share its speed, and are lost together: one drive of a pool for each device",
        )
    return ok("drives apart", "each has a device of its own" if at else "there are none on this machine")


def drives(paths: list[Path], root: Path = Path("/")) -> Iterator[Check]:
    """Run all checks of this module on each path."""
    there = []
    for path in paths:
        try:
            mode = path.stat().st_mode
        except PermissionError:
            yield warn(
                f"drive {path}", "this user may not look at it", "run this as root, or as the daemons' user"
            )
            continue
        except (OSError, ValueError) as error:
            gone = isinstance(error, FileNotFoundError)
            seen = (
                "it is not there"
                if gone
                else f"it cannot be looked at: {getattr(error, 'strerror', None) or error}"
            )
            yield bad(
                f"drive {path}",
                seen,
                "put it in and mount it; when it will not come back: nvpool drive "
                f"replace POOL {path} NEW_PATH --lost",
            )
            continue
        if not stat.S_ISDIR(mode) and not stat.S_ISBLK(mode):
            yield bad(f"drive {path}", "it is neither a directory nor a block device", "name one of these")
            continue
        there.append(path)
        yield from _drive(path, root)
    yield from all_of("drives apart", lambda: apart(there))


def _drive(path: Path, root: Path) -> Iterator[Check]:
    if path.is_dir():
        yield from all_of(f"file system of {path}", lambda: file_system(path, mount_of(path)))
        yield from all_of(f"space of {path}", lambda: space(path, str(path)))
    yield from all_of(f"device of {path}", lambda: list(device(path, device_of(path), root)))
    yield from all_of(f"direct reads of {path}", lambda: direct(path))
