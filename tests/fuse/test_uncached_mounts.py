"""Two mounts without kernel caches (`--attr-timeout-s 0 --entry-timeout-s 0`) behave as one directory on the drive.

Each call goes to either of them, and has the same outcome as on a plain directory. Directories are not moved: a kernel that
finds one in another place returns ESTALE for the rename of its lookup.
"""

import ctypes
import errno
import os
import random
import stat

import pytest

from tests.fuse.conftest import FLOOR

pytestmark = [pytest.mark.mount, pytest.mark.skipif(FLOOR, reason="the floor has one mount")]

ENGINES = ("kernel", "pyfuse3")
STEPS = 1500
NAMES = ("a", "b", "c", "d", "D0/a", "D0/b", "D1/a", "D1/b", "D1/S/a", "D1/S/b")
OFFSETS = (0, 1, 100, 4095, 4096, 65_536, 262_143, 262_144, 1_048_577)
LENGTHS = (1, 10, 4096, 5000, 70_000, 300_000)
libc = ctypes.CDLL(None, use_errno=True)


def rename_with(source, target, flags):
    if libc.renameat2(-100, os.fsencode(source), -100, os.fsencode(target), flags):
        raise OSError(ctypes.get_errno(), "renameat2")


def comparable(found):
    """The attributes that do not depend on the file system."""
    if stat.S_ISDIR(found.st_mode):
        return found.st_mode
    return (
        found.st_mode,
        found.st_nlink,
        found.st_size,
        found.st_mtime_ns if found.st_mtime_ns % 1_000_000_007 == 0 else None,
    )


def whole(path):
    with open(path, "rb") as file:
        return file.read()


def everything(top):
    found = {}
    for place, directories, files in os.walk(top):
        for name in directories + files:
            path = os.path.join(place, name)
            is_file = stat.S_ISREG(os.lstat(path).st_mode)
            found[os.path.relpath(path, top)] = comparable(os.lstat(path)), whole(path) if is_file else None
    return found


class Scene:
    """`plain`: on the drive; `mounts`: the same directory through each mount."""

    def __init__(self, plain, mounts, seed):
        self.plain, self.mounts, self.random = plain, mounts, random.Random(seed)
        self.open = {}
        self.said = []

    def outcome(self, call, *words):
        try:
            return call(*words)
        except OSError as error:
            return errno.errorcode[error.errno]

    def by_name(self, call, *words, names=1):
        chosen = [self.random.choice(NAMES) for _ in range(names)]
        self.at(call, chosen, *words)

    def at(self, call, chosen, *words):
        mount = self.random.choice(self.mounts)
        self.said.append((call.__name__, chosen, str(words)[:60], mount))
        expected = self.outcome(call, *[self.plain / name for name in chosen], *words)
        assert self.outcome(call, *[mount / name for name in chosen], *words) == expected, self.said[-15:]

    def by_handle(self, call, *words):
        if not self.open:
            return
        name, (ours, theirs) = self.random.choice(sorted(self.open.items()))
        self.said.append((call.__name__, name, str(words)[:60]))
        expected = self.outcome(call, ours, *words)
        assert self.outcome(call, theirs, *words) == expected, self.said[-15:]
        if isinstance(expected, int):
            os.fsync(theirs)  # others see written bytes once they are synced or closed

    def opened(self):
        flags = self.random.choice(
            (
                os.O_RDWR | os.O_CREAT,
                os.O_RDWR | os.O_CREAT | os.O_EXCL,
                os.O_RDONLY,
                os.O_RDWR | os.O_TRUNC,
                os.O_WRONLY | os.O_CREAT | os.O_TRUNC,
                os.O_WRONLY | os.O_APPEND | os.O_CREAT,
            )
        )
        name, mount = self.random.choice(NAMES), self.random.choice(self.mounts)
        self.said.append(("open", name, oct(flags), mount))
        ours, theirs = (
            self.outcome(os.open, top / name, flags | os.O_NOFOLLOW, 0o640) for top in (self.plain, mount)
        )
        assert ours == theirs if str in (type(ours), type(theirs)) else True, (ours, theirs, self.said[-15:])
        if isinstance(ours, int):
            self.open[len(self.said)] = ours, theirs
        if len(self.open) > 6:
            self.close(self.random.choice(sorted(self.open)))

    def close(self, which):
        self.said.append(("close", which))
        for descriptor in self.open.pop(which):
            os.close(descriptor)

    def step(self):
        chance = self.random
        offset, length = chance.choice(OFFSETS), chance.choice(LENGTHS)
        steps = (
            self.opened,
            self.opened,
            lambda: self.by_handle(os.pwrite, chance.randbytes(length), offset),
            lambda: self.by_handle(os.pwrite, chance.randbytes(length), offset),
            lambda: self.by_handle(os.pread, length, offset),
            lambda: self.by_handle(os.pread, length, offset),
            lambda: self.by_handle(os.ftruncate, offset),
            lambda: self.by_handle(os.fchmod, chance.choice((0o600, 0o644))),
            lambda: self.by_name(os.rename, names=2),
            lambda: self.by_name(rename_with, chance.choice((1, 2)), names=2),
            lambda: self.by_name(os.link, names=2),
            lambda: self.by_name(os.unlink),
            lambda: self.by_name(os.unlink),
            lambda: self.at(os.mkdir, [chance.choice(("D0", "D1", "D1/S"))]),
            lambda: self.at(os.rmdir, [chance.choice(("D0", "D1", "D1/S"))]),
            lambda: self.by_name(symlinked, chance.choice(("a", "D1/S", "nowhere"))),
            lambda: self.by_name(os.truncate, offset),
            lambda: self.by_name(looked_at),
            lambda: self.by_name(whole),
            lambda: self.by_name(whole),
            lambda: self.by_name(attribute_set, b"x" * chance.choice((0, 5, 300)), chance.choice((0, 1, 2))),
            lambda: self.by_name(attributes),
            lambda: self.by_name(timed, 1_000_000_007 * chance.randrange(1 << 30)),
            lambda: self.at(listed, [chance.choice(("", "D0", "D1", "D1/S"))]),
        )
        chance.choice(steps)()


def symlinked(path, to):
    os.symlink(to, path)


def looked_at(path):
    return comparable(os.lstat(path))


def attribute_set(path, value, flags):
    os.setxattr(path, "user.x", value, flags, follow_symlinks=False)


def attributes(path):
    names = sorted(name for name in os.listxattr(path, follow_symlinks=False) if name.startswith("user."))
    return [(name, os.getxattr(path, name, follow_symlinks=False)) for name in names]


def timed(path, now_ns):
    os.utime(path, ns=(now_ns, now_ns), follow_symlinks=False)


def listed(path):
    return sorted(os.listdir(path))


@pytest.mark.t3
def test_two_uncached_mounts_behave_as_one_directory(own, tmp_path, engine):
    options = ("--engine", engine, "--attr-timeout-s=0", "--entry-timeout-s=0")
    both = [own.mount(own.directory.parent / f"strict-{engine}-{number}", *options) for number in range(2)]
    try:
        for seed in range(2):
            top = f"strict-{engine}-{seed}"
            (tmp_path / top).mkdir()
            (both[0].place / top).mkdir()
            scene = Scene(tmp_path / top, [one.place / top for one in both], seed)
            for name in ("D0", "D1", "D1/S"):
                scene.at(os.mkdir, [name])
            for _ in range(STEPS):
                scene.step()
            for which in list(scene.open):
                scene.close(which)
            for mount in scene.mounts:
                assert everything(mount) == everything(tmp_path / top)
    finally:
        assert [one.end() for one in both] == [0, 0]
