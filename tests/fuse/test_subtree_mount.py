"""Mounts of a subtree, and read-only mounts: nothing outside can be seen or named, with either engine.

Also over crashes and upgrades of the process; changes by others, also the removal of the subtree, are seen.
"""

import contextlib
import ctypes
import errno
import json
import os
import subprocess
import sys

import pytest

from nvpool import connect
from nvpool.core.programs import Program, command
from nvpool.fuse.engines import RESEND_MIN, kernel_version
from nvpool.fuse.mount_point import mount_at
from tests.fuse.conftest import FLOOR, nvpool, wait_until
from tests.fuse.kill_loads import kill_serving, run_model, serving, together

ENGINES = ("kernel", "pyfuse3")
pytestmark = [pytest.mark.mount, pytest.mark.skipif(FLOOR, reason="the floor has no subtrees")]


@pytest.fixture(scope="module")
def whole(own):
    """The pool, mounted at its root."""
    made = own.mount(own.directory.parent / "whole")
    yield made
    assert made.end() == 0


@pytest.fixture
def tree(whole, request):
    """A directory of the pool with some files, and some beside it; its name."""
    name = f"t{abs(hash(request.node.name)) % 10**8}"
    place = whole.place / name
    (place / "in" / "deep").mkdir(parents=True)
    (place / "in" / "f").write_bytes(b"inside")
    (place / "beside").write_bytes(b"outside")
    (place / "in" / "link").symlink_to("../beside")
    os.link(place / "beside", place / "in" / "hard")
    return name


def mounted_part(own, name, *options):
    return own.mount(own.directory.parent / f"part-{name}", f"--subtree=/{name}/in", *options)


def test_only_the_subtree_is_visible(own, whole, tree, engine):
    part = mounted_part(own, tree, "--engine", engine)
    inside = whole.place / tree / "in"
    try:
        assert sorted(os.listdir(part.place)) == ["deep", "f", "hard", "link"]
        assert (part.place / "f").read_bytes() == b"inside" and (
            part.place / "hard"
        ).read_bytes() == b"outside"
        with pytest.raises(FileNotFoundError):  # '..' leads to the parent of the mount point, as in any mount
            (part.place / "link").read_bytes()
        assert os.path.samefile(part.place / "..", part.place.parent)
        assert os.path.samefile(part.place / "deep" / "..", part.place)
        assert part.place.stat().st_ino == inside.stat().st_ino
        with os.scandir(part.place) as entries:
            assert {entry.name: entry.inode() for entry in entries} == {
                entry.name: entry.inode() for entry in os.scandir(inside)
            }
        (part.place / "new").mkdir(mode=0o750)
        (part.place / "new" / "f").write_bytes(b"1" * 300_000)
        os.rename(part.place / "new" / "f", part.place / "moved")
        os.link(part.place / "moved", part.place / "again")
        os.setxattr(part.place, "user.here", b"1")
        os.chmod(part.place, 0o711)
        assert (inside / "again").read_bytes() == b"1" * 300_000 and inside.stat().st_mode & 0o777 == 0o711
        assert os.getxattr(inside, "user.here") == b"1" and not (whole.place / "moved").exists()
        assert (inside / "new").stat().st_mode & 0o777 == 0o750
        found = mount_at(part.place)
        assert (
            found.type == "fuse.nvpool"
            and found.source.startswith("nvpool:")
            and found.source.endswith(f":/{tree}/in")
        )
    finally:
        assert part.end() == 0, part.log.read_text()
    assert "Traceback" not in part.log.read_text() and " ERROR " not in part.log.read_text()


def test_changes_of_the_top_directory_are_seen(own, whole, tree, engine):
    part = mounted_part(own, tree, "--engine", engine, "--attr-timeout-s=3600", "--entry-timeout-s=3600")
    inside = whole.place / tree / "in"
    try:
        part.place.stat()
        assert (part.place / "f").read_bytes() == b"inside"
        (inside / "f2").write_bytes(b"changed")
        os.replace(inside / "f2", inside / "f")
        inside.chmod(
            0o700
        )  # notified with the root's own inode number: else the kernel would trust the old mode for an hour
        wait_until(lambda: (part.place / "f").read_bytes() == b"changed", "the invalidation of the name", 10)
        wait_until(lambda: part.place.stat().st_mode & 0o777 == 0o700, "the invalidation of the mode", 10)
        os.unlink(inside / "f")
        wait_until(lambda: not (part.place / "f").exists(), "the name to go", 10)
    finally:
        assert part.end() == 0, part.log.read_text()


def test_df_of_a_volume_shows_its_quota(own, whole, engine):
    name = f"volume-{engine}"
    nvpool("volume", "create", own.directory, name, "--size", "64MiB", "--files", "100")
    part = own.mount(own.directory.parent / name, f"--subtree=/volumes/{name}", "--engine", engine)
    try:
        (part.place / "f").write_bytes(b"1" * (8 << 20))
        wait_until(
            lambda: os.statvfs(part.place).f_bfree * os.statvfs(part.place).f_frsize <= 56 << 20,
            "df to show it",
            30,
        )
        seen = os.statvfs(part.place)
        assert seen.f_blocks * seen.f_frsize == 64 << 20 and seen.f_files == 100
        with pytest.raises(OSError) as refused, open(part.place / "g", "wb") as file:
            for _ in range(64):
                file.write(b"2" * (2 << 20))
                file.flush()
                os.fsync(file.fileno())
        assert refused.value.errno == errno.EDQUOT
    finally:
        assert part.end() == 0, part.log.read_text()


def open_by_handle(place, handle):
    """open_by_handle_at(2) of (type, bytes) on the mount at `place`; the descriptor, or OSError."""
    libc = ctypes.CDLL(None, use_errno=True)
    kind, content = handle
    found = (len(content)).to_bytes(4, sys.byteorder) + kind.to_bytes(4, sys.byteorder) + content
    with open_directory(place) as fd:
        number = libc.open_by_handle_at(fd, ctypes.create_string_buffer(found, len(found)), os.O_RDONLY)
    if number < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return number


@contextlib.contextmanager
def open_directory(place):
    descriptor = os.open(place, os.O_RDONLY | os.O_DIRECTORY)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def handle_of(path):
    """name_to_handle_at(2)."""
    libc = ctypes.CDLL(None, use_errno=True)
    buffer = ctypes.create_string_buffer((128).to_bytes(4, sys.byteorder) + bytes(132), 136)
    mount_id = ctypes.c_int()
    if libc.name_to_handle_at(-100, os.fsencode(path), buffer, ctypes.byref(mount_id), 0) < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    length, kind = (int.from_bytes(buffer.raw[at : at + 4], sys.byteorder) for at in (0, 4))
    return kind, buffer.raw[8 : 8 + length]


def test_handle_from_outside_opens_nothing(own, whole, tree, engine):
    """open_by_handle_at(2) names inodes by number, as in the whole pool."""
    part = mounted_part(own, tree, "--engine", engine)
    try:
        (part.place / "f").stat()
        inside = handle_of(part.place / "f")
        os.close(open_by_handle(part.place, inside))
        for outside in (whole.place, whole.place / tree, whole.place / tree / "beside2"):
            if outside.name == "beside2":
                outside.write_bytes(b"never seen in the part")
            with pytest.raises(OSError) as refused:
                number = open_by_handle(part.place, handle_of(outside))
                # 1 is the root of any mount, so of this one
                if os.fstat(number).st_ino == part.place.stat().st_ino:
                    os.close(number)
                    raise OSError(errno.ESTALE, "the part's own root")
            assert refused.value.errno == errno.ESTALE
    finally:
        assert part.end() == 0


def test_removed_subtree_is_stale(own, whole, tree, engine):
    part = mounted_part(own, tree, "--engine", engine)
    gone = whole.place / tree / "in"
    try:
        with open(part.place / "f", "rb") as file:
            subprocess.run(["rm", "-r", gone], check=True)
            for use in (
                lambda: os.listdir(part.place),
                lambda: (part.place / "x").mkdir(),
                lambda: (part.place / "f").stat(),
                lambda: (part.place / "deep" / "x").write_bytes(b""),
            ):
                # until its caches expire after a second, the kernel may answer by itself
                def stale(use=use):
                    try:
                        use()
                    except OSError as error:
                        assert error.errno in (errno.ESTALE, errno.ENOENT), error
                        return True
                    return False

                wait_until(stale, "it to be stale", 10)
            wait_until(lambda: part.place.stat().st_nlink == 0, "the removed directory to have no links", 10)
            assert file.read() == b"inside"  # an open file is readable after its removal by another user
    finally:
        assert part.end() == 0
    said = part.log.read_text()
    assert "Traceback" not in said and " ERROR " not in said, said


def test_renamed_subtree_stays_mounted(own, whole, tree, engine):
    part = mounted_part(own, tree, "--engine", engine)
    try:
        os.rename(whole.place / tree / "in", whole.place / tree / "elsewhere")
        (whole.place / tree / "in").mkdir()
        (whole.place / tree / "in" / "other").touch()
        assert (part.place / "f").read_bytes() == b"inside" and "other" not in os.listdir(part.place)
    finally:
        assert part.end() == 0


@pytest.mark.parametrize(
    "path, said",
    [
        ("none/x", "does not exist in the pool"),
        ("f", "is not a directory"),
        ("link", "symbolic link"),
        ("../beside", "without '..'"),
    ],
)
def test_invalid_subtree_is_refused_with_the_reason(own, whole, tree, engine, path, said):
    if engine != "kernel":
        pytest.skip("refused before an engine is chosen")
    place = own.directory.parent / "refused"
    place.mkdir(exist_ok=True)
    done = subprocess.run(
        command(Program.CLI, "mount", f"{own.directory}:/{tree}/in/{path}", place),
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
        cwd="/",
    )
    assert done.returncode == 1 and said in done.stderr, done.stderr
    assert mount_at(place) is None


@pytest.mark.few(1)
@pytest.mark.skipif(kernel_version() < RESEND_MIN, reason="this kernel does not hand requests out again")
@pytest.mark.parametrize("workers", [1, 3])
def test_subtree_survives_kills_and_an_upgrade(own, whole, tree, engine, workers):
    if engine != "kernel":
        pytest.skip("engine pyfuse3 has no holder")
    place = own.directory.parent / f"part-{tree}"
    place.mkdir()
    mounted = json.loads(
        nvpool(
            "mount", f"{own.directory}:/{tree}/in/", place, "--holder", "--workers", workers, "--json"
        ).stdout
    )
    assert mounted["subtree"] == f"/{tree}/in"
    held = type(
        "Held", (), {"place": place, "log": next((own.directory / "log").glob(f"mount*part-{tree}.log"))}
    )
    try:
        (place / "large").write_bytes(bytes(range(256)) * 4096)
        top = os.open(place, os.O_RDONLY | os.O_DIRECTORY)

        def trouble():
            for _ in range(3):
                kill_serving(held)
            # found by its number, not by its path, which now leads to another directory
            os.rename(whole.place / tree / "in", whole.place / tree / "elsewhere")
            (whole.place / tree / "in").mkdir()
            kill_serving(held)
            before = serving(held)
            assert json.loads(nvpool("mount", "upgrade", place, "--json").stdout)["pid"] != before

        (place / "work").mkdir()
        together(lambda: run_model(place / "work", 6.0), trouble)
        assert (
            sorted(os.listdir(top))
            == sorted(os.listdir(place))
            == ["deep", "f", "hard", "large", "link", "work"]
        )
        assert (place / "large").read_bytes() == bytes(range(256)) * 4096
        assert os.path.samefile(place / "work" / "..", place) and not os.listdir(whole.place / tree / "in")
        os.close(top)
    finally:
        nvpool("umount", place)
    assert "Traceback" not in held.log.read_text()


def test_read_only_mount_refuses_changes_after_a_remount(own, whole, tree, engine):
    part = mounted_part(own, tree, "--engine", engine, "-o", "ro")
    try:
        again = subprocess.run(
            ["mount", "-i", "-o", "remount,rw", part.place], capture_output=True, text=True, check=False
        )
        writable = "rw" in mount_at(part.place).options.split(",")
        assert writable == (again.returncode == 0), again.stderr
        before = (whole.place / tree / "in" / "f").stat()
        for use in (
            lambda: (part.place / "x").mkdir(),
            lambda: (part.place / "x").touch(),
            lambda: (part.place / "f").unlink(),
            lambda: (part.place / "f").write_bytes(b"x"),
            lambda: os.truncate(part.place / "f", 0),
            lambda: os.utime(part.place / "f"),
            lambda: os.rename(part.place / "f", part.place / "g"),
            lambda: os.setxattr(part.place / "f", "user.x", b""),
            lambda: os.link(part.place / "f", part.place / "g"),
            lambda: os.symlink("f", part.place / "g"),
            lambda: os.chmod(part.place, 0o700),
        ):
            with pytest.raises(OSError) as refused:
                use()
            assert refused.value.errno == errno.EROFS
        assert (part.place / "f").read_bytes() == b"inside"
    finally:
        assert part.end() == 0, part.log.read_text()
    after = (whole.place / tree / "in" / "f").stat()
    assert (after.st_mtime_ns, after.st_ctime_ns, after.st_size) == (
        before.st_mtime_ns,
        before.st_ctime_ns,
        before.st_size,
    )


def test_sdk_connects_to_a_mount_point(own, whole, tree):
    (whole.place / tree / "in" / "f").read_bytes()
    with connect(whole.place) as pool:
        assert pool.read_bytes(f"/{tree}/in/f") == b"inside"
    with pytest.raises(OSError, match="lies inside the pool that is mounted at"):
        connect(whole.place / tree)
    part = mounted_part(own, tree)
    try:
        with pytest.raises(OSError, match=f"shows the directory /{tree}/in of the pool"):
            connect(part.place)
    finally:
        assert part.end() == 0
