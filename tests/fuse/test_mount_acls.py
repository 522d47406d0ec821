"""POSIX access control lists and O_TMPFILE on real mounts, as in the groups `acl` and `tmpfile` of xfstests."""

import contextlib
import ctypes
import errno
import fcntl
import os
import stat
import struct
import subprocess
import time

import pytest

from tests.fuse.conftest import FLOOR, as_user, needs, wait_until
from tests.fuse.kill_loads import end, kill_serving

pytestmark = [pytest.mark.mount, pytest.mark.skipif(FLOOR, reason="memory keeps no access control lists")]
ENGINES = ("kernel", "pyfuse3")

ALICE, BOB, CAROL, STAFF = 1001, 1002, 1003, 2001
USER_OBJ, USER, GROUP_OBJ, GROUP, MASK, OTHER = 1, 2, 4, 8, 16, 32
ACCESS, DEFAULT = "system.posix_acl_access", "system.posix_acl_default"
LIBC = ctypes.CDLL(None, use_errno=True)


def of(*entries):
    """The kernel's format of (tag, permissions[, id])."""
    return struct.pack("<I", 2) + b"".join(
        struct.pack("<HHI", *(*entry, 0xFFFFFFFF)[:3]) for entry in entries
    )


BOB_READS = of((USER_OBJ, 6), (USER, 4, BOB), (GROUP_OBJ, 0), (MASK, 4), (OTHER, 0))
HANDED_DOWN = of((USER_OBJ, 7), (USER, 7, BOB), (GROUP_OBJ, 5), (MASK, 7), (OTHER, 0))


def number_of(call):
    try:
        call()
    except OSError as error:
        return error.errno
    return 0


def by(uid, call, *groups):
    return number_of(lambda: as_user(uid, uid, call, groups))


def mode(path):
    return stat.S_IMODE(os.stat(path).st_mode)


@pytest.fixture
def file(here):
    (here / "f").write_bytes(b"secret")
    os.chown(here / "f", ALICE, ALICE)
    os.chmod(here / "f", 0o600)
    return here / "f"


@contextlib.contextmanager
def umask(bits):
    before = os.umask(bits)
    try:
        yield
    finally:
        os.umask(before)


def unnamed(directory, mode=0o666, flags=0):
    return os.open(directory, os.O_TMPFILE | os.O_RDWR | flags, mode)


def link(fd, path):
    """linkat(2) of an open file, through /proc."""
    if LIBC.linkat(-100, b"/proc/self/fd/%d" % fd, -100, os.fsencode(path), 0x400):
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


# -- rights -------------------------------------------------------------------------------------------------------------


def test_acl_grants_access_to_named_users_and_groups(file):
    read, write = file.read_bytes, lambda: file.write_bytes(b"other")
    assert by(BOB, read) == errno.EACCES
    assert by(ALICE, lambda: os.setxattr(file, ACCESS, BOB_READS)) == 0
    assert (by(BOB, read), by(BOB, write), by(CAROL, read)) == (0, errno.EACCES, errno.EACCES)
    os.setxattr(
        file,
        ACCESS,
        of((USER_OBJ, 6), (USER, 0, BOB), (GROUP_OBJ, 0), (GROUP, 6, STAFF), (MASK, 6), (OTHER, 4)),
    )
    assert (by(BOB, read), by(BOB, read, STAFF), by(CAROL, read)) == (errno.EACCES, errno.EACCES, 0)
    assert (by(CAROL, write), by(CAROL, write, STAFF)) == (errno.EACCES, 0)
    os.chmod(file, 0o640)  # the mask
    assert (by(CAROL, read, STAFF), by(CAROL, write, STAFF)) == (0, errno.EACCES)


def test_directory_acl_grants_access_to_named_users(here):
    (here / "d").mkdir()
    os.chmod(here / "d", 0o700)
    enter, make = (lambda: os.listdir(here / "d")), (lambda: (here / "d" / "new").touch())
    os.setxattr(here / "d", ACCESS, of((USER_OBJ, 7), (USER, 5, BOB), (GROUP_OBJ, 0), (MASK, 7), (OTHER, 0)))
    assert (by(BOB, enter), by(BOB, make), by(CAROL, enter)) == (0, errno.EACCES, errno.EACCES)
    os.setxattr(here / "d", ACCESS, of((USER_OBJ, 7), (USER, 7, BOB), (GROUP_OBJ, 0), (MASK, 7), (OTHER, 0)))
    assert by(BOB, make) == 0
    os.removexattr(here / "d", ACCESS)
    assert by(BOB, enter) == errno.EACCES


def test_acl_is_changed_by_the_owner_only(file):
    assert by(BOB, lambda: os.setxattr(file, ACCESS, BOB_READS)) == errno.EPERM
    assert by(ALICE, lambda: os.setxattr(file, ACCESS, BOB_READS)) == 0
    assert by(BOB, lambda: os.removexattr(file, ACCESS)) == errno.EPERM
    assert os.getxattr(file, ACCESS) == BOB_READS and by(CAROL, lambda: os.getxattr(file, ACCESS)) == 0


def test_acl_change_changes_ctime(file):
    for change in (lambda: os.setxattr(file, ACCESS, BOB_READS), lambda: os.removexattr(file, ACCESS)):
        before = os.stat(file).st_ctime_ns
        time.sleep(0.01)
        change()
        assert os.stat(file).st_ctime_ns > before


# -- list and mode ------------------------------------------------------------------------------------------------------


def test_mode_and_acl_follow_each_other(file):
    os.setxattr(file, ACCESS, of((USER_OBJ, 7), (USER, 7, BOB), (GROUP_OBJ, 1), (MASK, 5), (OTHER, 4)))
    assert mode(file) == 0o754
    os.chmod(file, 0o630)
    assert os.getxattr(file, ACCESS) == of(
        (USER_OBJ, 6), (USER, 7, BOB), (GROUP_OBJ, 1), (MASK, 3), (OTHER, 0)
    )
    assert os.listxattr(file) == [ACCESS]
    os.setxattr(file, ACCESS, of((USER_OBJ, 6), (GROUP_OBJ, 4), (OTHER, 4)))
    assert mode(file) == 0o644 and os.listxattr(file) == []
    assert number_of(lambda: os.getxattr(file, ACCESS)) == errno.ENODATA


def test_invalid_acl_is_refused(here, file):
    for path, name, value, number in (
        (file, ACCESS, of((USER_OBJ, 6), (GROUP_OBJ, 4)), errno.EINVAL),
        (file, ACCESS, b"abc", errno.EINVAL),
        (file, ACCESS, of((USER_OBJ, 6), (USER, 6, BOB), (GROUP_OBJ, 4), (OTHER, 0)), errno.EINVAL),
        (file, DEFAULT, HANDED_DOWN, errno.EACCES),
        (here, "system.other", b"x", errno.EOPNOTSUPP),
    ):
        assert number_of(lambda path=path, name=name, value=value: os.setxattr(path, name, value)) == number
    os.symlink("f", here / "l")
    assert (
        number_of(lambda: os.setxattr(here / "l", ACCESS, BOB_READS, follow_symlinks=False))
        == errno.EOPNOTSUPP
    )
    os.removexattr(file, ACCESS)
    os.removexattr(file, DEFAULT)
    os.setxattr(file, DEFAULT, of())
    assert mode(file) == 0o600 and os.listxattr(file) == []


def test_acl_set_by_a_non_member_clears_set_gid(here, file):
    os.chown(file, ALICE, STAFF)
    for groups, left in (((), 0), ((STAFF,), stat.S_ISGID)):
        os.chmod(file, 0o2755)
        assert by(ALICE, lambda: os.setxattr(file, ACCESS, BOB_READS), *groups) == 0
        assert os.stat(file).st_mode & stat.S_ISGID == left
    (here / "d").mkdir()
    os.chown(here / "d", ALICE, STAFF)
    os.chmod(here / "d", 0o2755)
    assert by(ALICE, lambda: os.setxattr(here / "d", DEFAULT, HANDED_DOWN)) == 0
    assert mode(here / "d") == 0o2755


def test_acl_that_does_not_fit_leaves_the_mode(file):
    for number in range(128):
        os.setxattr(file, f"user.{number}", b"")
    everything = of((USER_OBJ, 7), (USER, 7, BOB), (GROUP_OBJ, 7), (MASK, 7), (OTHER, 7))
    assert number_of(lambda: os.setxattr(file, ACCESS, everything)) == errno.ENOSPC
    assert mode(file) == 0o600 and ACCESS not in os.listxattr(file)


# -- inheritance --------------------------------------------------------------------------------------------------------


def test_default_acl_replaces_the_umask(here, engine):
    os.setxattr(here, DEFAULT, HANDED_DOWN)
    with umask(0o077):
        (here / "f").touch()
        (here / "d").mkdir()
        os.mkfifo(here / "p")
        os.symlink("f", here / "l")
        os.close(os.open(here / "private", os.O_CREAT | os.O_WRONLY, 0o600))
        (here / "d" / "deeper").touch()
    if engine == "pyfuse3":  # the kernel has applied the umask before (docs/reference/semantics.md)
        assert (mode(here / "f"), mode(here / "d")) == (0o600, 0o700) and os.listxattr(here / "f") == [ACCESS]
        return
    assert os.getxattr(here / "f", ACCESS) == of(
        (USER_OBJ, 6), (USER, 7, BOB), (GROUP_OBJ, 5), (MASK, 6), (OTHER, 0)
    )
    assert {name: mode(here / name) for name in ("f", "d", "p", "private", "d/deeper")} == {
        "f": 0o660,
        "d": 0o770,
        "p": 0o660,
        "private": 0o600,
        "d/deeper": 0o660,
    }
    assert os.getxattr(here / "d", DEFAULT) == HANDED_DOWN == os.getxattr(here / "d", ACCESS)
    assert os.listxattr(here / "l", follow_symlinks=False) == []
    os.chmod(here, 0o755)
    assert by(BOB, lambda: (here / "f").write_bytes(b"bob")) == 0
    os.removexattr(here, DEFAULT)
    with umask(0o077):
        (here / "plain").touch()
    assert mode(here / "plain") == 0o600 and os.listxattr(here / "plain") == []


def test_set_gid_and_default_acl_are_both_inherited(here):
    os.chown(here, ALICE, STAFF)
    os.chmod(here, 0o2777)
    os.setxattr(here, DEFAULT, HANDED_DOWN)
    assert by(ALICE, lambda: (os.mkdir(here / "d"), (here / "f").touch())) == 0
    assert os.stat(here / "d").st_gid == os.stat(here / "f").st_gid == STAFF
    assert os.stat(here / "d").st_mode & stat.S_ISGID and not os.stat(here / "f").st_mode & stat.S_ISGID
    assert os.getxattr(here / "d", DEFAULT) == HANDED_DOWN


def test_many_files_are_created_around_a_default_acl(here):
    with umask(0o022):
        for number in range(200):
            if number == 100:
                os.setxattr(here, DEFAULT, of((USER_OBJ, 6), (GROUP_OBJ, 6), (OTHER, 0)))
            (here / f"f{number}").touch()
    expected = 0o640 if "pyfuse3" in str(here) else 0o660
    assert {mode(here / f"f{number}") for number in range(100)} == {0o644}
    assert {mode(here / f"f{number}") for number in range(100, 200)} == {expected}


# -- tools, other nodes -------------------------------------------------------------------------------------------------


def shown(path, *options):
    text = subprocess.run(
        ["getfacl", "-ncp", *options, str(path)], check=True, capture_output=True, text=True
    ).stdout
    return sorted(line.split("\t")[0] for line in text.splitlines() if line)


@needs("setfacl", "getfacl", "rsync", "tar")
def test_tools_set_show_and_copy_acls(here):
    def tool(*words):
        subprocess.run(list(map(str, words)), check=True, capture_output=True)

    source = here / "source"
    (source / "d").mkdir(parents=True)
    (source / "f").write_bytes(b"x")
    os.chmod(source / "f", 0o640)
    tool("setfacl", "-m", f"u:{BOB}:rw,g:{STAFF}:r", source / "f")
    tool("setfacl", "-d", "-m", f"u:{BOB}:rwx", source / "d")
    assert shown(source / "f") == sorted(
        ["group::r--", f"group:{STAFF}:r--", "mask::rw-", "other::---", "user::rw-", f"user:{BOB}:rw-"]
    )
    tool("cp", "-a", source, here / "cp")
    tool("rsync", "-aA", f"{source}/", here / "rsync")
    tool("tar", "-C", here, "--acls", "-cf", here / "t.tar", "source")
    (here / "tar").mkdir()
    tool("tar", "-C", here / "tar", "--acls", "-xpf", here / "t.tar")
    for copy in (here / "cp", here / "rsync", here / "tar" / "source"):
        for name in ("f", "d"):
            assert shown(copy / name) == shown(source / name), copy
    tool("setfacl", "-b", source / "f")
    assert shown(source / "f") == ["group::r--", "other::---", "user::rw-"] and mode(source / "f") == 0o640
    tool("setfacl", "-k", source / "d")
    assert os.listxattr(source / "d") == []


def test_acl_applies_on_another_node(here, second, file):
    there = second.place / here.name / "f"
    assert by(BOB, there.read_bytes) == errno.EACCES
    os.setxattr(file, ACCESS, BOB_READS)
    wait_until(lambda: by(BOB, there.read_bytes) == 0, "the granted right", 10)
    assert os.getxattr(there, ACCESS) == BOB_READS
    os.setxattr(there, ACCESS, of((USER_OBJ, 6), (USER, 0, BOB), (GROUP_OBJ, 0), (MASK, 4), (OTHER, 0)))
    wait_until(lambda: by(BOB, file.read_bytes) == errno.EACCES, "the revoked right", 10)
    os.setxattr(there.parent, DEFAULT, HANDED_DOWN)
    os.close(os.open(here / "g", os.O_CREAT | os.O_WRONLY, 0o660))
    assert os.listxattr(here / "g") == [ACCESS]


# -- files without names ------------------------------------------------------------------------------------------------


@pytest.fixture
def has_unnamed(engine, here):
    if engine == "pyfuse3":
        assert number_of(lambda: unnamed(here)) == errno.EOPNOTSUPP
        pytest.skip("no O_TMPFILE with this engine (docs/reference/semantics.md)")


def test_unnamed_file_is_private_until_it_is_linked(here, has_unnamed):
    with umask(0o027):
        fd = unnamed(here)
    assert (os.fstat(fd).st_nlink, stat.S_IMODE(os.fstat(fd).st_mode), os.listdir(here)) == (0, 0o640, [])
    os.write(fd, b"x" * 100_000)
    assert os.pread(fd, 3, 99_998) == b"xx"
    (here / "d").mkdir()
    link(fd, here / "d" / "f")
    assert os.fstat(fd).st_nlink == os.stat(here / "d" / "f").st_nlink == 1
    os.write(fd, b"y")
    os.close(fd)
    assert (here / "d" / "f").read_bytes() == b"x" * 100_000 + b"y"
    os.link(here / "d" / "f", here / "again")
    os.unlink(here / "d" / "f")
    assert os.stat(here / "again").st_nlink == 1


def test_exclusive_unnamed_file_gets_no_name(here, has_unnamed):
    fd = unnamed(here, flags=os.O_EXCL)
    assert number_of(lambda: link(fd, here / "f")) == errno.ENOENT
    os.close(fd)
    assert os.listdir(here) == []


def test_unnamed_file_inherits_the_default_acl(here, has_unnamed):
    os.setxattr(here, DEFAULT, HANDED_DOWN)
    with umask(0o077):
        fd = unnamed(here)
    link(fd, here / "f")
    os.close(fd)
    assert mode(here / "f") == 0o660
    assert os.getxattr(here / "f", ACCESS) == of(
        (USER_OBJ, 6), (USER, 7, BOB), (GROUP_OBJ, 5), (MASK, 6), (OTHER, 0)
    )


def test_unnamed_file_needs_a_writable_directory(here, has_unnamed):
    (here / "d").mkdir()
    os.chmod(here / "d", 0o755)
    assert by(BOB, lambda: unnamed(here / "d")) == errno.EACCES
    fd = unnamed(here / "d")
    os.write(fd, b"once")
    with open(f"/proc/self/fd/{fd}", "rb") as again:
        assert again.read() == b"once"
    os.close(fd)
    os.rmdir(here / "d")


def test_unnamed_file_and_acls_survive_the_serving_process(own, engine):
    if engine == "pyfuse3":
        pytest.skip("its mounts end with their process")
    held = own.mount(own.directory.parent / "m-unnamed", "--holder")
    try:
        os.setxattr(held.place, DEFAULT, HANDED_DOWN)
        fd = unnamed(held.place)
        os.write(fd, b"before")
        kill_serving(held)
        assert os.pread(fd, 10, 0) == b"before" and os.fstat(fd).st_nlink == 0
        os.write(fd, b" and after")
        link(fd, held.place / "f")
        os.close(fd)
        assert (held.place / "f").read_bytes() == b"before and after" and mode(held.place / "f") == 0o660
        assert os.listxattr(held.place / "f") == [ACCESS]
        os.setxattr(held.place / "f", ACCESS, BOB_READS)
        assert mode(held.place / "f") == 0o640
    finally:
        end(held)


# -- further results of stat ---------------------------------------------------------------------------------------------


@needs("stat")
def test_birth_time_is_the_creation_time(here, engine):
    before = time.time()
    (here / "f").touch()
    os.utime(here / "f", (5, 5))
    birth_s = float(
        subprocess.run(
            ["stat", "-c", "%.9W", str(here / "f")], check=True, capture_output=True, text=True
        ).stdout
    )
    assert birth_s == 0 if engine == "pyfuse3" else before - 1 < birth_s < time.time() + 1


@needs("lsattr")
def test_file_flags_are_not_supported(here):
    (here / "f").touch()
    for path in (here, here / "f"):
        fd = os.open(path, os.O_RDONLY)
        for command in (0x80086601, 0x801C581F):  # FS_IOC_GETFLAGS, FS_IOC_FSGETXATTR
            assert (
                number_of(lambda fd=fd, command=command: fcntl.ioctl(fd, command, bytearray(64)))
                == errno.ENOTTY
            )
        os.close(fd)
    assert (
        "not supported" in subprocess.run(["lsattr", "-d", str(here)], capture_output=True, text=True).stderr
    )
