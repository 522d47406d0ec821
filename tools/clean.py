"""Removes from a checkout all that its Makefile made: the quickstart's mount and pool first, then files.

Order, because each step is only safe after the one before: unmount, end the pool's processes, see that no mount is left below
what is to go, remove. Nothing is removed while a mount is below it, no symbolic link is followed, no file system border is
crossed (devices are compared at each step down), the mount point itself is removed only when it is empty.

Called by `make clean`. Runs on any Python 3.8 or later with its standard library alone, since .venv may be broken or absent.
Exit code 0: nothing is left; 1: something is, and the reason was printed. May be repeated.
"""

import fnmatch
import hashlib
import os
import signal
import stat
import subprocess
import sys
import time

sys.dont_write_bytecode = True
sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
from nvpool.core import programs  # noqa: E402 (needs the path above; programs imports the standard library alone)

MOUNT_POINT = "pool"
POOL = ".quickstart"
TREES = (
    POOL,
    ".venv",
    "build",
    "dist",
    ".pytest_cache",
    ".ruff_cache",
    ".mypy_cache",
    ".hypothesis",
    "htmlcov",
    "nvpool.egg-info",
)
GENERATED = ("*.so", "*.pyc", "_*.c")
"""Files made by the set-up inside the sources."""
STOP_S = 45.0
"""Longer than a supervisor gives its children to drain."""


class Kept(Exception):
    """Something must not be removed; the text says what and why."""


def mounts_below(path, mountinfo=None):
    """(mount point, its type and source) at or below `path` in the order of mounting; bind mounts are among them."""
    if mountinfo is None:
        with open("/proc/self/mountinfo", "rb") as file:
            mountinfo = file.read()
    path = os.fsencode(path).rstrip(b"/")
    found = []
    for line in mountinfo.splitlines():
        # The kernel writes blanks, tabs, newlines and backslashes of a path as three octal digits.
        parts = line.split(b" ")[4].split(b"\\")
        point = parts[0] + b"".join(bytes([int(part[:3], 8)]) + part[3:] for part in parts[1:])
        if point == path or point.startswith(path + b"/"):
            found.append(
                (os.fsdecode(point), os.fsdecode(b" ".join(line.split(b" - ", 1)[1].split(b" ")[:2])))
            )
    return found


def leave_sockets(pool):
    """Remove the directory of the pool's unix sockets that stands elsewhere because the pool's own path is too long."""
    name = "nvpool-" + hashlib.sha256(os.fsencode(pool)).hexdigest()[:16]
    for place in ("/run/" + name, "/tmp/" + name):
        if os.path.isdir(place) and not os.path.islink(place) and os.stat(place).st_uid == os.geteuid():
            remove_tree(place)


def unmount(root):
    """Unmount what nvpool has mounted below `root`, last first. Kept, with who uses it, when one is in use."""
    for point, kind in reversed(mounts_below(root)):
        if not kind.startswith("fuse") or "nvpool" not in kind:
            continue
        print("unmounting " + point)
        command = ["umount", point] if os.geteuid() == 0 else ["fusermount3", "-u", point]
        try:
            done = subprocess.run(command, capture_output=True, timeout=STOP_S)
        except subprocess.TimeoutExpired:
            raise Kept(point + " does not answer; `umount -l " + point + "` lets go of it") from None
        if done.returncode:
            users = ", ".join(f"{name} (pid {pid})" for pid, name in users_of(point))
            reason = done.stderr.decode(errors="replace").strip()
            raise Kept(f"{point} cannot be unmounted: {reason}" + (f"; in use by {users}" if users else ""))


def users_of(point):
    """(pid, name) of processes that stand in, or have open, something below `point`. Never touches the mount itself."""
    found = []
    for pid in filter(str.isdigit, os.listdir("/proc")):
        places = ["cwd", "root"]
        try:
            places += ["fd/" + fd for fd in os.listdir(f"/proc/{pid}/fd")]
        except OSError:
            pass
        for place in places:
            try:
                target = os.readlink(f"/proc/{pid}/{place}")
            except OSError:
                continue
            if target == point or target.startswith(point + "/"):
                with open(f"/proc/{pid}/comm") as file:
                    found.append((int(pid), file.read().strip()))
                break
    return found


def daemons_of(pool, *wanted):
    """pids of nvpool's daemons, or of those programs, that were started for the pool directory `pool`, as `python -m
    MODULE <pool> …`."""
    found = []
    for pid, words in programs.processes(*wanted):
        try:
            stands = os.readlink(f"/proc/{pid}/cwd")
            # Only what has its name is looked at: another word may be a mount point whose mount does not answer.
            if any(
                os.path.basename(word.rstrip("/")) == os.path.basename(pool)
                and os.path.realpath(os.path.join(stands, word)) == pool
                for word in words
            ):
                found.append(pid)
        except OSError:
            continue  # it ended meanwhile, or is not ours to look at
    return found


def stop(pool):
    """End the processes of the pool directory `pool`: the supervisor first, which ends the others in order (one that is
    missed would be started again); what is left is asked then, and killed after STOP_S."""
    for wanted, sign in (
        ([programs.Program.SUPERVISOR], signal.SIGTERM),
        ([], signal.SIGTERM),
        ([], signal.SIGKILL),
    ):
        pids = daemons_of(pool, *wanted)
        if pids:
            print(f"stopping the pool in {pool} (pids {' '.join(map(str, pids))})")
        for pid in pids:
            try:
                os.kill(pid, sign)
            except ProcessLookupError:
                pass
        deadline = time.monotonic() + STOP_S
        while daemons_of(pool, *wanted) and time.monotonic() < deadline:
            time.sleep(0.05)
    if daemons_of(pool):
        raise Kept(f"processes of the pool in {pool} cannot be ended: {daemons_of(pool)}")


def remove_tree(path):
    """Remove `path` and all below it. Kept, and nothing of it removed, when a mount is below; Kept when a border of a file
    system is met further down (what was before it is gone then)."""
    try:
        found = os.lstat(path)
    except FileNotFoundError:
        return
    if stat.S_ISLNK(found.st_mode) or not stat.S_ISDIR(found.st_mode):
        os.unlink(path)
        return
    below = mounts_below(os.path.realpath(path))
    if below:
        raise Kept(f"{below[0][0]} is mounted below {path}; nothing of it was removed")
    parent = os.open(os.path.dirname(path) or ".", os.O_RDONLY | os.O_DIRECTORY)
    try:
        _remove_below(parent, os.path.basename(path), os.fstat(parent).st_dev, path)
    finally:
        os.close(parent)


def _remove_below(parent, name, device, shown):
    # By descriptors, so that nobody can swap a directory for a link between the look and the step.
    fd = os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=parent)
    try:
        if os.fstat(fd).st_dev != device:
            raise Kept(shown + " is another file system")
        for entry in os.listdir(fd):
            kind = os.stat(entry, dir_fd=fd, follow_symlinks=False)
            if stat.S_ISDIR(kind.st_mode):
                _remove_below(fd, entry, device, shown + "/" + entry)
            else:
                os.unlink(entry, dir_fd=fd)
    finally:
        os.close(fd)
    os.rmdir(name, dir_fd=parent)


def generated_files(root):
    """Compiled files between the sources, not below what is removed whole, on the root's file system."""
    device = os.stat(root).st_dev
    for folder, folders, files in os.walk(root, topdown=True):
        folders[:] = [
            name
            for name in folders
            if name not in (".git", ".venv", POOL, MOUNT_POINT)
            and not os.path.islink(os.path.join(folder, name))
            and os.stat(os.path.join(folder, name)).st_dev == device
        ]
        if os.path.basename(folder) == "__pycache__":
            folders[:] = []
            yield folder
        else:
            for name in files:
                if any(fnmatch.fnmatch(name, pattern) for pattern in GENERATED):
                    yield os.path.join(folder, name)


def clean(root):
    """Remove all that the Makefile made below `root`; Kept says why something stays."""
    unmount(root)
    stop(os.path.join(root, POOL))
    leave_sockets(os.path.join(root, POOL))
    mount_point = os.path.join(root, MOUNT_POINT)
    if os.path.isdir(mount_point):
        try:
            os.rmdir(mount_point)
        except OSError as error:
            raise Kept(
                f"{mount_point} is not removed: {error.strerror}. Is something of yours in it?"
            ) from None
    for found in list(generated_files(root)):
        remove_tree(found)
    for tree in TREES:
        remove_tree(os.path.join(root, tree))


if __name__ == "__main__":
    sys.dont_write_bytecode = True
    try:
        clean(os.path.realpath(os.path.join(os.path.dirname(os.path.abspath(__file__)), os.pardir)))
    except (Kept, OSError) as problem:
        print("clean: " + str(problem), file=sys.stderr)
        sys.exit(1)
