"""POSIX, system call by system call: results, errnos, link counts, times, sticky and set-id bits, as root and other users.

A compact relative of pjdfstest (https://github.com/pjd/pjdfstest); each line of the tables is one expectation.
"""

import ctypes
import errno
import os
import socket
import stat
import time

import pytest

from tests.fuse.conftest import as_user

pytestmark = pytest.mark.mount
ENGINES = ("kernel", "pyfuse3")

ALICE, BOB, STAFF = 1001, 1002, 2001
LIBC = ctypes.CDLL(None, use_errno=True)
NOREPLACE, EXCHANGE = 1, 2


def rename2(old, new, flags):
    if LIBC.renameat2(-100, os.fsencode(old), -100, os.fsencode(new), flags):
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


def touch(path, content=b"", mode=0o644):
    fd = os.open(path, os.O_CREAT | os.O_WRONLY, mode)
    os.write(fd, content)
    os.close(fd)
    return path


def number_of(call):
    """The errno that `call` raises, or 0."""
    try:
        call()
    except OSError as error:
        return error.errno
    return 0


@pytest.fixture
def tree(here):
    """f: file · d: directory with a file · e: an empty one · l: link to f · b: broken link · o: link to itself · p: fifo"""
    touch(here / "f", b"content")
    (here / "d").mkdir()
    touch(here / "d" / "inside")
    (here / "e").mkdir()
    (here / "l").symlink_to("f")
    (here / "b").symlink_to("nowhere")
    (here / "o").symlink_to("o")
    os.mkfifo(here / "p")
    return here


LONG = "x" * 255
TOO_LONG = "x" * 256

REFUSALS = [
    ("open", "missing", errno.ENOENT),
    ("open", "f/x", errno.ENOTDIR),
    ("open", "o", errno.ELOOP),
    ("open", "b", errno.ENOENT),
    ("open", TOO_LONG, errno.ENAMETOOLONG),
    ("open_rw", "d", errno.EISDIR),
    ("open_excl", "f", errno.EEXIST),
    ("open_excl", "b", errno.EEXIST),
    ("open_dir", "f", errno.ENOTDIR),
    ("open_nofollow", "l", errno.ELOOP),
    ("open_new", "missing/x", errno.ENOENT),
    ("open_new", TOO_LONG, errno.ENAMETOOLONG),
    ("open_new", "d", errno.EISDIR),
    ("mkdir", "f", errno.EEXIST),
    ("mkdir", "d", errno.EEXIST),
    ("mkdir", "b", errno.EEXIST),
    ("mkdir", "f/x", errno.ENOTDIR),
    ("mkdir", "missing/x", errno.ENOENT),
    ("mkdir", TOO_LONG, errno.ENAMETOOLONG),
    ("rmdir", "d", errno.ENOTEMPTY),
    ("rmdir", "f", errno.ENOTDIR),
    ("rmdir", "missing", errno.ENOENT),
    ("rmdir", "l", errno.ENOTDIR),
    ("rmdir", "e/.", errno.EINVAL),
    ("rmdir", "d/..", errno.ENOTEMPTY),
    ("rmdir", TOO_LONG, errno.ENAMETOOLONG),
    ("unlink", "missing", errno.ENOENT),
    ("unlink", "d", errno.EISDIR),
    ("unlink", "f/x", errno.ENOTDIR),
    ("unlink", TOO_LONG, errno.ENAMETOOLONG),
    ("symlink", "f", errno.EEXIST),
    ("symlink", "missing/x", errno.ENOENT),
    ("symlink", TOO_LONG, errno.ENAMETOOLONG),
    ("mknod", "f", errno.EEXIST),
    ("mknod", "f/x", errno.ENOTDIR),
    ("mknod", TOO_LONG, errno.ENAMETOOLONG),
    ("readlink", "f", errno.EINVAL),
    ("readlink", "d", errno.EINVAL),
    ("readlink", "missing", errno.ENOENT),
    ("listdir", "f", errno.ENOTDIR),
    ("listdir", "missing", errno.ENOENT),
    ("truncate", "d", errno.EISDIR),
    ("truncate", "missing", errno.ENOENT),
    ("truncate", "o", errno.ELOOP),
    ("chmod", "missing", errno.ENOENT),
    ("chmod", "f/x", errno.ENOTDIR),
    ("chown", "missing", errno.ENOENT),
    ("utime", "missing", errno.ENOENT),
    ("stat", TOO_LONG, errno.ENAMETOOLONG),
    ("stat", "o", errno.ELOOP),
]
CALLS = {
    "open": lambda p: os.close(os.open(p, os.O_RDONLY)),
    "open_rw": lambda p: os.open(p, os.O_RDWR),
    "open_excl": lambda p: os.open(p, os.O_CREAT | os.O_EXCL | os.O_WRONLY),
    "open_dir": lambda p: os.open(p, os.O_DIRECTORY),
    "open_nofollow": lambda p: os.open(p, os.O_NOFOLLOW),
    "open_new": lambda p: os.open(p, os.O_CREAT | os.O_WRONLY, 0o644),
    "mkdir": os.mkdir,
    "rmdir": os.rmdir,
    "unlink": os.unlink,
    "symlink": lambda p: os.symlink("target", p),
    "mknod": lambda p: os.mknod(p, stat.S_IFREG | 0o600),
    "readlink": os.readlink,
    "listdir": os.listdir,
    "truncate": lambda p: os.truncate(p, 0),
    "chmod": lambda p: os.chmod(p, 0o600),
    "chown": lambda p: os.chown(p, 1, 1),
    "utime": lambda p: os.utime(p, (1, 1)),
    "stat": os.stat,
}


def test_calls_fail_with_the_right_errno(tree):
    before = sorted(os.listdir(tree))
    wrong = [
        (call, name[:20], errno.errorcode[expected], errno.errorcode.get(got, got))
        for call, name, expected in REFUSALS
        if (got := number_of(lambda call=call, name=name: CALLS[call](f"{tree}/{name}"))) != expected
    ]
    assert not wrong
    assert sorted(os.listdir(tree)) == before


RENAMES = [  # from, to, flags, errno
    ("missing", "x", 0, errno.ENOENT),
    ("f", "d", 0, errno.EISDIR),
    ("d", "f", 0, errno.ENOTDIR),
    ("e", "d", 0, errno.ENOTEMPTY),
    ("d", "d/x", 0, errno.EINVAL),
    ("f", "missing/x", 0, errno.ENOENT),
    ("f", TOO_LONG, 0, errno.ENAMETOOLONG),
    ("f", "f/x", 0, errno.ENOTDIR),
    ("f", "l", NOREPLACE, errno.EEXIST),
    ("d", "e", NOREPLACE, errno.EEXIST),
    ("f", "missing", EXCHANGE, errno.ENOENT),
    ("missing", "f", EXCHANGE, errno.ENOENT),
    ("f", "x", 3, errno.EINVAL),
    ("d", "d/inside", EXCHANGE, errno.EINVAL),
    ("d/inside", "d", EXCHANGE, errno.ENOTEMPTY),
]


def test_refused_renames_change_nothing(tree):
    wrong = [
        (old, new[:20], flags, errno.errorcode[expected], errno.errorcode.get(got, got))
        for old, new, flags, expected in RENAMES
        if (got := number_of(lambda a=f"{tree}/{old}", b=f"{tree}/{new}", flags=flags: rename2(a, b, flags)))
        != expected
        and not (expected == errno.ENOTEMPTY and got in (errno.EEXIST, errno.EINVAL))
    ]
    assert not wrong
    assert sorted(os.listdir(tree)) == ["b", "d", "e", "f", "l", "o", "p"]


def test_rename_replaces_files_and_empty_directories(tree):
    inode = os.stat(tree / "f").st_ino
    touch(tree / "other", b"gone")
    os.rename(tree / "f", tree / "other")
    assert os.stat(tree / "other").st_ino == inode and not (tree / "f").exists()
    os.rename(tree / "d", tree / "e")
    assert os.listdir(tree / "e") == ["inside"]
    os.rename(tree / "other", tree / "e" / "moved")
    assert (tree / "e" / "moved").read_bytes() == b"content"
    os.rename(tree / "p", tree / "b")
    assert stat.S_ISFIFO(os.lstat(tree / "b").st_mode)


def test_rename_onto_the_same_file_does_nothing(tree):
    os.link(tree / "f", tree / "f2")
    os.rename(tree / "f", tree / "f2")
    assert (tree / "f").exists() and (tree / "f2").exists()
    os.rename(tree / "f", tree / "f")


def test_rename_with_noreplace_and_exchange(tree):
    rename2(tree / "f", tree / "new", NOREPLACE)
    assert (tree / "new").read_bytes() == b"content"
    rename2(tree / "new", tree / "d", EXCHANGE)
    assert (tree / "d").read_bytes() == b"content" and os.listdir(tree / "new") == ["inside"]
    links = os.stat(tree / "e").st_nlink, os.stat(tree).st_nlink
    rename2(tree / "new", tree / "e", EXCHANGE)
    assert (os.stat(tree / "new").st_nlink, os.stat(tree).st_nlink) == links


def test_directory_links_count_subdirectories(here):
    assert os.stat(here).st_nlink == 2
    (here / "a").mkdir()
    (here / "a" / "b").mkdir()
    assert os.stat(here).st_nlink == 3 and os.stat(here / "a").st_nlink == 3
    os.rename(here / "a" / "b", here / "b")
    assert os.stat(here).st_nlink == 4 and os.stat(here / "a").st_nlink == 2
    os.rename(here / "b", here / "a")
    assert os.stat(here).st_nlink == 3
    (here / "a").rmdir()
    assert os.stat(here).st_nlink == 2


def test_link_count_is_the_number_of_names(tree):
    os.link(tree / "f", tree / "f2")
    os.link(tree / "f", tree / "e" / "f3")
    assert os.stat(tree / "f").st_nlink == 3
    with open(tree / "f") as file:
        for name in ("f", "f2", "e/f3"):
            os.unlink(tree / name)
        assert os.fstat(file.fileno()).st_nlink == 0
        assert file.read() == "content"


def test_invalid_hard_links_are_refused(tree):
    assert number_of(lambda: os.link(tree / "d", tree / "x")) == errno.EPERM
    assert number_of(lambda: os.link(tree / "f", tree / "d")) == errno.EEXIST
    assert number_of(lambda: os.link(tree / "missing", tree / "x")) == errno.ENOENT
    os.link(tree / "b", tree / "x", follow_symlinks=False)
    assert os.readlink(tree / "x") == "nowhere" and os.lstat(tree / "b").st_nlink == 2


def times(path):
    found = os.lstat(path)
    return found.st_mtime_ns, found.st_ctime_ns


@pytest.mark.parametrize(
    "call, mtime, ctime, parent",
    [
        ("write", True, True, False),
        ("truncate", True, True, False),
        ("chmod", False, True, False),
        ("chown", False, True, False),
        ("link", False, True, True),
        ("unlink", False, True, True),
        ("rename", False, True, True),
        ("setxattr", False, True, False),
        ("create", None, None, True),
        ("mkdir", None, None, True),
        ("rmdir", None, None, True),
        ("symlink", None, None, True),
        ("read", False, False, False),
        ("stat", False, False, False),
    ],
)
def test_calls_update_the_right_times(here, call, mtime, ctime, parent):
    file = touch(here / "f", b"12")
    os.link(file, here / "f2")
    (here / "e").mkdir()
    before, above = times(file), times(here)
    time.sleep(0.02)
    {
        "write": lambda: file.write_bytes(b"34"),
        "truncate": lambda: os.truncate(file, 1),
        "chmod": lambda: file.chmod(0o600),
        "chown": lambda: os.chown(file, 5, 5),
        "link": lambda: os.link(file, here / "f3"),
        "unlink": lambda: os.unlink(here / "f2"),
        "rename": lambda: os.rename(here / "f2", here / "f4"),
        "setxattr": lambda: os.setxattr(file, "user.a", b"1"),
        "create": lambda: touch(here / "g"),
        "mkdir": lambda: (here / "g").mkdir(),
        "rmdir": lambda: (here / "e").rmdir(),
        "symlink": lambda: (here / "g").symlink_to("x"),
        "read": file.read_bytes,
        "stat": lambda: os.stat(file),
    }[call]()
    after, above_after = times(file), times(here)
    if mtime is not None:
        assert (after[0] > before[0], after[1] > before[1]) == (mtime, ctime)
    assert (above_after[0] > above[0], above_after[1] > above[1]) == (parent, parent)


def test_times_have_nanosecond_resolution(here):
    file = touch(here / "f")
    for moment in (0, 1, 1_600_000_000_123_456_789, 4_000_000_000_999_999_999, -1_500_000_001):
        os.utime(file, ns=(moment, moment + 1))
        assert (os.stat(file).st_atime_ns, os.stat(file).st_mtime_ns) == (moment, moment + 1)
    os.symlink("f", here / "l")
    os.utime(here / "l", ns=(5, 6), follow_symlinks=False)
    assert os.lstat(here / "l").st_mtime_ns == 6 and os.stat(file).st_mtime_ns != 6


@pytest.mark.parametrize(
    "seconds", [-11_644_473_600, -9_246_182_400, 9_223_372_800, 10_413_792_000, 253_402_300_799, 1 << 40]
)
def test_times_out_of_range_are_clamped(here, seconds):
    file = touch(here / "f")
    os.utime(file, ns=(seconds * 10**9, seconds * 10**9))
    kept = -1 << 63 if seconds < 0 else (1 << 63) - 1
    assert (os.stat(file).st_atime_ns, os.stat(file).st_mtime_ns) == (kept, kept)
    touch(here / "other")  # a later change stores the record with these times again
    os.link(file, here / "again")
    assert os.stat(here / "again").st_mtime_ns == kept


def test_utime_without_times_sets_the_present_time(here):
    file = touch(here / "f")
    os.utime(file, ns=(0, 0))
    os.utime(file)
    assert abs(os.stat(file).st_mtime - time.time()) < 5


@pytest.mark.parametrize("mode", [0o000, 0o777, 0o640, 0o4755, 0o2755, 0o1777, 0o7777])
def test_all_mode_bits_are_stored(here, mode):
    file = touch(here / "f")
    os.chmod(file, mode)
    assert stat.S_IMODE(os.stat(file).st_mode) == mode
    (here / "d").mkdir()
    os.chmod(here / "d", mode)
    assert stat.S_IMODE(os.stat(here / "d").st_mode) == mode


def test_umask_is_applied_once(here):
    before = os.umask(0o027)
    try:
        os.close(os.open(here / "f", os.O_CREAT | os.O_WRONLY, 0o666))
        os.mkdir(here / "d", 0o777)
        os.mknod(here / "n", stat.S_IFREG | 0o666)
    finally:
        os.umask(before)
    assert [stat.S_IMODE(os.stat(here / name).st_mode) for name in "fdn"] == [0o640, 0o750, 0o640]


def test_special_files_keep_type_and_device_number(here):
    os.mkfifo(here / "fifo", 0o600)
    os.mknod(here / "null", stat.S_IFCHR | 0o666, os.makedev(1, 3))
    os.mknod(here / "disk", stat.S_IFBLK | 0o660, os.makedev(259, 300))
    with socket.socket(socket.AF_UNIX) as listener:
        os.chdir(here)
        try:
            listener.bind("socket")
        finally:
            os.chdir("/")
    kinds = {entry.name: stat.S_IFMT(entry.stat(follow_symlinks=False).st_mode) for entry in os.scandir(here)}
    assert kinds == {
        "fifo": stat.S_IFIFO,
        "null": stat.S_IFCHR,
        "disk": stat.S_IFBLK,
        "socket": stat.S_IFSOCK,
    }
    assert os.stat(here / "null").st_rdev == os.makedev(1, 3)
    assert os.stat(here / "disk").st_rdev == os.makedev(259, 300)


def test_symlinks_keep_their_target(here):
    for target in (b"a", b"x" * 4095, b"\xff\xfe not text", b"/absolute/../path"):
        os.symlink(target, os.fsencode(here / "l"))
        assert os.readlink(os.fsencode(here / "l")) == target and os.lstat(here / "l").st_size == len(target)
        os.unlink(here / "l")


# -- as another user ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def owned(here):
    """a: Alice's file 0600 · g: hers of group STAFF 0640 · w: anybody's 0666 · s: a sticky directory with a file of each"""
    for name, mode, group in (("a", 0o600, ALICE), ("g", 0o640, STAFF), ("w", 0o666, ALICE)):
        touch(here / name, b"secret")
        os.chown(here / name, ALICE, group)
        os.chmod(here / name, mode)
    (here / "s").mkdir()
    os.chmod(here / "s", 0o1777)
    for name, owner in (("of-alice", ALICE), ("of-bob", BOB)):
        touch(here / "s" / name)
        os.chown(here / "s" / name, owner, owner)
    (here / "closed").mkdir(0o700)
    touch(here / "closed" / "x")
    return here


def bob(call, *groups):
    return number_of(lambda: as_user(BOB, BOB, call, groups))


def alice(call, *groups):
    return number_of(lambda: as_user(ALICE, ALICE, call, groups))


def test_permissions_are_enforced(owned):
    read = lambda name: lambda: len((owned / name).read_bytes())  # noqa: E731
    assert alice(read("a")) == 0 and bob(read("a")) == errno.EACCES
    assert bob(read("g")) == errno.EACCES and bob(read("g"), STAFF) == 0
    assert bob(lambda: (owned / "g").write_bytes(b"x"), STAFF) == errno.EACCES
    assert bob(read("w")) == 0 and bob(lambda: (owned / "w").write_bytes(b"x")) == 0
    assert bob(lambda: os.stat(owned / "closed" / "x").st_size) == errno.EACCES
    assert bob(lambda: os.listdir(owned / "closed")) == errno.EACCES
    assert not as_user(BOB, BOB, lambda: os.access(owned / "a", os.R_OK))


def test_only_owners_change_attributes(owned):
    assert bob(lambda: os.chmod(owned / "w", 0o600)) == errno.EPERM
    assert bob(lambda: os.chown(owned / "w", BOB, BOB)) == errno.EPERM
    assert bob(lambda: os.utime(owned / "w", (1, 1))) == errno.EPERM
    assert bob(lambda: os.utime(owned / "w")) == 0
    assert bob(lambda: os.utime(owned / "g"), STAFF) == errno.EACCES
    assert alice(lambda: os.chown(owned / "a", BOB, -1)) == errno.EPERM
    assert alice(lambda: os.chown(owned / "a", -1, STAFF)) == errno.EPERM
    assert alice(lambda: os.chown(owned / "a", -1, STAFF), STAFF) == 0
    assert os.stat(owned / "a").st_gid == STAFF


def test_sticky_directory_protects_names(owned):
    sticky = owned / "s"
    assert bob(lambda: os.unlink(sticky / "of-alice")) == errno.EPERM
    assert bob(lambda: os.rename(sticky / "of-alice", sticky / "x")) == errno.EPERM
    assert bob(lambda: os.rename(sticky / "of-bob", sticky / "of-alice")) == errno.EPERM
    assert bob(lambda: os.unlink(sticky / "of-bob")) == 0
    assert alice(lambda: os.unlink(sticky / "of-alice")) == 0


def test_new_files_belong_to_their_creator(here):
    def make():
        touch(here / "f")
        os.mkdir(here / "d")
        os.symlink("x", here / "l")
        os.mkfifo(here / "p")

    assert alice(make) == 0
    assert {(os.lstat(here / name).st_uid, os.lstat(here / name).st_gid) for name in "fdlp"} == {
        (ALICE, ALICE)
    }


def test_set_gid_directory_passes_on_its_group(here):
    os.chown(here, -1, STAFF)
    os.chmod(here, 0o2777)

    def make():
        touch(here / "f")
        os.mkdir(here / "d")
        os.mkdir(here / "d" / "deeper")

    assert alice(make) == 0
    for name in ("f", "d", "d/deeper"):
        assert os.stat(here / name).st_gid == STAFF
    assert os.stat(here / "d").st_mode & stat.S_ISGID and os.stat(here / "d/deeper").st_mode & stat.S_ISGID
    assert not os.stat(here / "f").st_mode & stat.S_ISGID


@pytest.mark.parametrize("call", ["write", "append", "truncate", "chown", "ftruncate", "pwrite_direct"])
def test_set_id_bits_are_cleared_by_other_users_changes(here, call):
    file = touch(here / "f", b"program")
    os.chown(file, ALICE, ALICE)
    os.chmod(file, 0o6777)

    def write(flags=0):
        fd = os.open(file, os.O_WRONLY | flags)
        os.write(fd, b"changed")
        os.fsync(fd)
        os.close(fd)

    def ftruncate():
        fd = os.open(file, os.O_WRONLY)
        os.ftruncate(fd, 1)
        os.close(fd)

    if call == "chown":
        assert alice(lambda: os.chown(file, -1, STAFF), STAFF) == 0
    else:
        assert (
            bob(
                {
                    "write": write,
                    "append": lambda: write(os.O_APPEND),
                    "truncate": lambda: os.truncate(file, 1),
                    "ftruncate": ftruncate,
                    "pwrite_direct": lambda: write(os.O_SYNC),
                }[call]
            )
            == 0
        )
    assert stat.S_IMODE(os.stat(file).st_mode) == 0o777


@pytest.mark.parametrize("call", ["write", "ftruncate", "fallocate", "chown"])
def test_set_gid_without_group_execute_needs_the_group(here, engine, call):
    if engine == "pyfuse3":
        pytest.skip("the kernel decides there, and keeps the bit (docs/reference/semantics.md)")

    def change():
        fd = os.open(file, os.O_RDWR)
        {
            "write": lambda: os.pwrite(fd, b"x", 0),
            "ftruncate": lambda: os.ftruncate(fd, 1),
            "fallocate": lambda: os.posix_fallocate(fd, 0, 100),
            "chown": lambda: os.chown(file, -1, ALICE),
        }[call]()
        os.close(fd)

    file = touch(here / "f", b"program")
    for groups, left in (((), 0o666), ((STAFF,), 0o2666)):
        os.chown(file, ALICE, STAFF)
        os.chmod(file, 0o6666)
        assert alice(change, *groups) == 0
        assert stat.S_IMODE(os.stat(file).st_mode) == left


def test_set_gid_is_dropped_for_non_members(here):
    file = touch(here / "f")
    os.chown(file, ALICE, STAFF)
    assert alice(lambda: os.chmod(file, 0o2755)) == 0
    assert stat.S_IMODE(os.stat(file).st_mode) == 0o755
    assert alice(lambda: os.chmod(file, 0o2755), STAFF) == 0
    assert stat.S_IMODE(os.stat(file).st_mode) == 0o2755


def test_descriptor_keeps_its_access_after_chmod(here):
    file = touch(here / "f", b"abc")
    os.chown(file, ALICE, ALICE)

    def work():
        fd = os.open(file, os.O_RDWR)
        os.chmod(file, 0)
        os.pwrite(fd, b"x", 1)
        os.ftruncate(fd, 2)
        return os.pread(fd, 10, 0)

    assert as_user(ALICE, ALICE, work) == b"ax"


# -- extended attributes -------------------------------------------------------------------------------------------------------


def test_extended_attributes_are_stored(here):
    file = touch(here / "f")
    assert os.listxattr(file) == []
    values = {
        "user.a": b"1",
        "user.empty": b"",
        "user.big": bytes(range(256)) * 16,
        "user." + "n" * 250: b"x",
        "trusted.t": b"t",
    }
    for name, value in values.items():
        os.setxattr(file, name, value)
    assert {name: os.getxattr(file, name) for name in os.listxattr(file)} == values
    os.setxattr(file, "user.a", b"2")
    assert os.getxattr(file, "user.a") == b"2"
    os.removexattr(file, "user.a")
    assert number_of(lambda: os.getxattr(file, "user.a")) == errno.ENODATA
    assert number_of(lambda: os.removexattr(file, "user.a")) == errno.ENODATA
    os.setxattr(here, "user.of-a-directory", b"yes")
    assert os.getxattr(here, "user.of-a-directory") == b"yes"


def test_extended_attribute_flags_are_applied(here):
    file = touch(here / "f")
    assert number_of(lambda: os.setxattr(file, "user.a", b"1", os.XATTR_REPLACE)) == errno.ENODATA
    os.setxattr(file, "user.a", b"1", os.XATTR_CREATE)
    assert number_of(lambda: os.setxattr(file, "user.a", b"2", os.XATTR_CREATE)) == errno.EEXIST
    os.setxattr(file, "user.a", b"3", os.XATTR_REPLACE)
    assert os.getxattr(file, "user.a") == b"3"


def test_removed_current_directory_is_empty(here):
    (here / "d").mkdir()
    fd = os.open(here / "d", os.O_DIRECTORY)
    os.rmdir(here / "d")
    assert number_of(lambda: os.open("x", os.O_CREAT | os.O_WRONLY, dir_fd=fd)) in (
        errno.ENOENT,
        errno.ESTALE,
    )
    os.close(fd)


def test_statvfs_reports_the_size(here):
    found = os.statvfs(here)
    assert (
        found.f_namemax == 255
        and found.f_blocks > found.f_bfree >= found.f_bavail > 0
        and found.f_files > found.f_ffree > 0
    )
