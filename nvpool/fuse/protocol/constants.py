"""Constants of the FUSE kernel protocol: operations, notifications and flags, as in linux/fuse.h of 7.45."""

from __future__ import annotations

from enum import IntEnum, IntFlag

MAJOR = 7
MINOR = 45
"""The newest version known here. With a kernel of another minor version the smaller of the two is used."""
MINOR_MIN = 31
"""The version of Linux 5.4."""

ROOT = 1
RESENT = 1 << 63
"""Bit of `unique`: the kernel sends this request again (Notice.RESEND)."""

PAGE = 4096
READ_BUFFER_MIN = 8192
CLONE = 0x8004E500
"""ioctl(2) FUSE_DEV_IOC_CLONE of a second /dev/fuse, with a pointer to the first descriptor (u32)."""
BACKING_OPEN, BACKING_CLOSE = 0x4010E501, 0x4004E502


class Op(IntEnum):
    """Operation of a request."""

    LOOKUP = 1
    FORGET = 2
    GETATTR = 3
    SETATTR = 4
    READLINK = 5
    SYMLINK = 6
    MKNOD = 8
    MKDIR = 9
    UNLINK = 10
    RMDIR = 11
    RENAME = 12
    LINK = 13
    OPEN = 14
    READ = 15
    WRITE = 16
    STATFS = 17
    RELEASE = 18
    FSYNC = 20
    SETXATTR = 21
    GETXATTR = 22
    LISTXATTR = 23
    REMOVEXATTR = 24
    FLUSH = 25
    INIT = 26
    OPENDIR = 27
    READDIR = 28
    RELEASEDIR = 29
    FSYNCDIR = 30
    GETLK = 31
    SETLK = 32
    SETLKW = 33
    ACCESS = 34
    CREATE = 35
    INTERRUPT = 36
    BMAP = 37
    DESTROY = 38
    IOCTL = 39
    POLL = 40
    NOTIFY_REPLY = 41
    BATCH_FORGET = 42
    FALLOCATE = 43
    READDIRPLUS = 44
    RENAME2 = 45
    LSEEK = 46
    COPY_FILE_RANGE = 47
    SETUPMAPPING = 48
    REMOVEMAPPING = 49
    SYNCFS = 50
    TMPFILE = 51
    STATX = 52
    COPY_FILE_RANGE_64 = 53


OP_COUNT = 64
"""Operations below it have a place in tables; numbers above are no operation of a file system."""

UNANSWERED = frozenset((Op.FORGET, Op.BATCH_FORGET, Op.INTERRUPT, Op.NOTIFY_REPLY))
"""Requests for which the kernel expects no reply, and refuses one."""


class Notice(IntEnum):
    """Notification: a message to the kernel that is not a reply."""

    POLL = 1
    INVAL_INODE = 2
    INVAL_ENTRY = 3
    STORE = 4
    RETRIEVE = 5
    DELETE = 6
    RESEND = 7
    INC_EPOCH = 8
    PRUNE = 9


class Init(IntFlag):
    """Features that kernel and daemon agree on.

    Bits from 32 on are in `flags2`, which is valid if INIT_EXT is set.
    """

    ASYNC_READ = 1 << 0
    POSIX_LOCKS = 1 << 1
    FILE_OPS = 1 << 2
    ATOMIC_O_TRUNC = 1 << 3
    EXPORT_SUPPORT = 1 << 4
    BIG_WRITES = 1 << 5
    DONT_MASK = 1 << 6
    SPLICE_WRITE = 1 << 7
    SPLICE_MOVE = 1 << 8
    SPLICE_READ = 1 << 9
    FLOCK_LOCKS = 1 << 10
    HAS_IOCTL_DIR = 1 << 11
    AUTO_INVAL_DATA = 1 << 12
    DO_READDIRPLUS = 1 << 13
    READDIRPLUS_AUTO = 1 << 14
    ASYNC_DIO = 1 << 15
    WRITEBACK_CACHE = 1 << 16
    NO_OPEN_SUPPORT = 1 << 17
    PARALLEL_DIROPS = 1 << 18
    HANDLE_KILLPRIV = 1 << 19
    POSIX_ACL = 1 << 20
    ABORT_ERROR = 1 << 21
    MAX_PAGES = 1 << 22
    CACHE_SYMLINKS = 1 << 23
    NO_OPENDIR_SUPPORT = 1 << 24
    EXPLICIT_INVAL_DATA = 1 << 25
    MAP_ALIGNMENT = 1 << 26
    SUBMOUNTS = 1 << 27
    HANDLE_KILLPRIV_V2 = 1 << 28
    SETXATTR_EXT = 1 << 29
    INIT_EXT = 1 << 30
    SECURITY_CTX = 1 << 32
    HAS_INODE_DAX = 1 << 33
    CREATE_SUPP_GROUP = 1 << 34
    HAS_EXPIRE_ONLY = 1 << 35
    DIRECT_IO_ALLOW_MMAP = 1 << 36
    PASSTHROUGH = 1 << 37
    NO_EXPORT_SUPPORT = 1 << 38
    HAS_RESEND = 1 << 39
    ALLOW_IDMAP = 1 << 40
    OVER_IO_URING = 1 << 41
    REQUEST_TIMEOUT = 1 << 42


class Opening(IntFlag):
    """Flags in the reply to OPEN, CREATE and OPENDIR."""

    DIRECT_IO = 1 << 0
    KEEP_CACHE = 1 << 1
    NONSEEKABLE = 1 << 2
    CACHE_DIR = 1 << 3
    STREAM = 1 << 4
    NOFLUSH = 1 << 5
    PARALLEL_DIRECT_WRITES = 1 << 6
    PASSTHROUGH = 1 << 7


class Valid(IntFlag):
    """Flags of SETATTR: which fields are valid."""

    MODE = 1 << 0
    UID = 1 << 1
    GID = 1 << 2
    SIZE = 1 << 3
    ATIME = 1 << 4
    MTIME = 1 << 5
    HANDLE = 1 << 6
    ATIME_NOW = 1 << 7
    MTIME_NOW = 1 << 8
    LOCK_OWNER = 1 << 9
    CTIME = 1 << 10
    KILL_SUIDGID = 1 << 11


GETATTR_HANDLE = 1 << 0
WRITE_CACHE, WRITE_LOCK_OWNER, WRITE_KILL_SUIDGID = 1 << 0, 1 << 1, 1 << 2
READ_LOCK_OWNER = 1 << 1
RELEASE_FLUSH, RELEASE_FLOCK_UNLOCK = 1 << 0, 1 << 1
OPEN_KILL_SUIDGID = 1 << 0
FSYNC_DATA_ONLY = 1 << 0
SETXATTR_ACL_KILL_SGID = 1 << 0
LOCK_FLOCK = 1 << 0
EXPIRE_ONLY = 1 << 0
"""Flag of INVAL_ENTRY: the kernel looks the name up again and keeps what is open below it."""
