"""Error classes of nvpool, in five families by what the caller does next.

    Refused      report to the user: repeating the same request gives the same answer
    Stale        refresh the pool map, lease or grant, then repeat what still applies
    Unavailable  try elsewhere or later, within the deadline; `may_be_applied` says whether the request may
                 have been executed
    Damaged      use another replica; the damaged one is quarantined and repaired
    Bug          an invariant does not hold: the process fences itself and stops

Each class states its errno (for applications), its wire code (sent in messages; never changed, never reused)
and its remedy. Errors are translated at the borders only: `rpc/error_codec`, `fuse/ops/operations`,
`cli/output`. The adapter of a third-party library translates the exceptions of the library into ours, by type
and never by message text. Only the client's metaclient and chunkclient retry.

A remedy may name a command. The code that raises an error often does not know the pool's directory or address
(a decision, or a daemon of another node), so its text has the placeholder POOL. The program that displays the
text inserts the name with `with_pool`: the CLI or the pool status. A house test checks that the commands are
complete.

The first line of a class docstring is the default message of the error, so it is a runtime text.
"""

from __future__ import annotations

import errno
import re
import shlex
from typing import ClassVar

WIRE_OK = 0

_PLACE = re.compile(r"(\bnvpool [a-z][^`;,()\n]*? )POOL(?=[\s:`;,.)]|$)")
"""Matches POOL within one command; a command that means another pool uses another word, such as NEW_POOL."""


class NvpoolError(Exception):
    """Base of all. `str(error)` is one sentence for a person, with the remedy where there is one."""

    errno: ClassVar[int] = errno.EIO
    wire_code: ClassVar[int] = 0
    may_be_applied: bool = False
    retry_after_s: float = 0.0

    remedy: str = ""
    """The remedy as a separate text, if known; only the text of the error is sent over the wire."""

    def __init__(
        self,
        text: str = "",
        *,
        may_be_applied: bool | None = None,
        retry_after_s: float | None = None,
        remedy: str = "",
    ):
        text = text or (type(self).__doc__ or type(self).__name__).split("\n")[0].rstrip(".")
        super().__init__(f"{text}; {remedy}" if remedy else text)
        if remedy:
            self.remedy = remedy
        if may_be_applied is not None:
            self.may_be_applied = may_be_applied
        if retry_after_s is not None:
            self.retry_after_s = retry_after_s


class Refused(NvpoolError):
    """The request cannot be carried out."""

    errno = errno.EINVAL
    wire_code = 100


class Stale(NvpoolError):
    """The caller's knowledge is older than ours; refresh it and repeat."""

    errno = errno.ESTALE
    wire_code = 200


class Unavailable(NvpoolError):
    """Not to be had here and now; try elsewhere or later."""

    errno = errno.EIO
    wire_code = 300


class Damaged(NvpoolError):
    """Stored data is not the data that was written."""

    errno = errno.EIO
    wire_code = 400


class Bug(NvpoolError):
    """An invariant of nvpool does not hold."""

    errno = errno.EIO
    wire_code = 500


# -- Refused ---------------------------------------------------------------------------------------------------------


class NotFound(Refused):
    """No such file or directory."""

    errno = errno.ENOENT
    wire_code = 101


class AlreadyExists(Refused):
    """The name exists already."""

    errno = errno.EEXIST
    wire_code = 102


class NotADirectory(Refused):
    """Not a directory."""

    errno = errno.ENOTDIR
    wire_code = 103


class IsADirectory(Refused):
    """Is a directory."""

    errno = errno.EISDIR
    wire_code = 104


class DirectoryNotEmpty(Refused):
    """The directory is not empty."""

    errno = errno.ENOTEMPTY
    wire_code = 105


class NotPermitted(Refused):
    """Operation not permitted."""

    errno = errno.EPERM
    wire_code = 106


class AccessDenied(Refused):
    """Permission denied."""

    errno = errno.EACCES
    wire_code = 107


class InvalidRequest(Refused):
    """The request makes no sense."""

    errno = errno.EINVAL
    wire_code = 108


class NameTooLong(Refused):
    """The name is longer than 255 bytes."""

    errno = errno.ENAMETOOLONG
    wire_code = 109


class FileTooLarge(Refused):
    """The file would grow past the largest size."""

    errno = errno.EFBIG
    wire_code = 110


class NoSpace(Refused):
    """No space left. Removing files and truncating them always works."""

    errno = errno.ENOSPC
    wire_code = 111


class QuotaExceeded(Refused):
    """The volume's quota is used up."""

    errno = errno.EDQUOT
    wire_code = 112


class TooManyLinks(Refused):
    """Too many links to the file."""

    errno = errno.EMLINK
    wire_code = 113


class CrossesVolumes(Refused):
    """The two names are in different volumes."""

    errno = errno.EXDEV
    wire_code = 114


class NoAttribute(Refused):
    """No such extended attribute."""

    errno = errno.ENODATA
    wire_code = 115


class TooBig(Refused):
    """The value or message is larger than is allowed."""

    errno = errno.E2BIG
    wire_code = 116


class RangeTooSmall(Refused):
    """The given buffer is too small for the answer."""

    errno = errno.ERANGE
    wire_code = 117


class NotSupported(Refused):
    """Not supported."""

    errno = errno.EOPNOTSUPP
    wire_code = 118


class WouldLoop(Refused):
    """The directory would become its own ancestor."""

    errno = errno.EINVAL
    wire_code = 119


class BadConfiguration(Refused):
    """The configuration is wrong."""

    errno = errno.EINVAL
    wire_code = 120


class WrongFormat(Refused):
    """Stored in a format that this version of nvpool does not know."""

    errno = errno.EINVAL
    wire_code = 121


class InUse(Refused):
    """In use by another process."""

    errno = errno.EBUSY
    wire_code = 122


class ReadOnly(Refused):
    """The file system, volume or handle is read-only."""

    errno = errno.EROFS
    wire_code = 123


class TooManyOpen(Refused):
    """No more file descriptors, sessions or handles. Close some, or raise the limit."""

    errno = errno.ENFILE
    wire_code = 124


class BadHandle(Refused):
    """The handle is closed, or does not allow this."""

    errno = errno.EBADF
    wire_code = 125


class ProtocolMismatch(Refused):
    """The other side speaks no protocol version that we know."""

    errno = errno.EPROTO
    wire_code = 126


class TooManySymlinks(Refused):
    """Too many levels of symbolic links."""

    errno = errno.ELOOP
    wire_code = 127


class WouldBlock(Refused):
    """Another process holds the lock."""

    errno = errno.EAGAIN
    wire_code = 128


class WouldDeadlock(Refused):
    """Deadlock: the owner of the lock waits for a lock that the caller holds."""

    errno = errno.EDEADLK
    wire_code = 129


class TooManyLocks(Refused):
    """No more locks, or processes that wait for one. Release some."""

    errno = errno.ENOLCK
    wire_code = 130


class LockLost(Refused):
    """The locks on this file ended with the client's session, so the file may have been changed by others: open it again."""

    errno = errno.EIO
    wire_code = 131


class BeyondData(Refused):
    """There is no such place in the file: nothing but a hole follows, or its end."""

    errno = errno.ENXIO
    wire_code = 132


class DirectoryGone(NotFound):
    """The directory was removed; its name must be looked up again."""

    errno = errno.ENOENT
    wire_code = 133
    may_be_stale = True
    """Whether the caller may have found the directory by an outdated name; set by a mount."""


class KeyMissing(Refused):
    """The key of an encrypted volume is not to be had here: a daemon has no pool key, or not the one that protects it."""

    errno = errno.ENOKEY
    wire_code = 134


# -- Stale -----------------------------------------------------------------------------------------------------------


class StaleEpoch(Stale):
    """The caller's pool map is older than ours: fetch the map, choose again, repeat."""

    wire_code = 201


class StaleSession(Stale):
    """The session is unknown or has ended: open a new one. Its locks, open files and slots are gone."""

    wire_code = 202


class StaleGrant(Stale):
    """The grant has ended or is not valid: ask the metadata service for a new one, then repeat."""

    wire_code = 203


class StaleCut(Stale):
    """The file was truncated since: refresh its attributes, then send again what still applies."""

    wire_code = 204


class StaleSequence(Stale):
    """The slot has served a later request; the answer to this one is gone. Only a client at fault sees this."""

    wire_code = 205


class StaleCursor(Stale):
    """The cursor is not one of ours: begin the listing again."""

    wire_code = 206


class WrongShard(Stale):
    """This shard does not hold the partition: fetch the map, choose again, repeat."""

    wire_code = 207


class WrongTarget(Stale):
    """This target does not hold the chunk's chain: fetch the map, choose again, repeat."""

    wire_code = 208


class StaleLease(Stale):
    """The lease under which this was asked for has ended, or is somebody else's by now: what it stood for is not ours."""

    wire_code = 209


class StaleVersion(Stale):
    """A chunk's version was given before: the head of its chain gives a higher one."""

    wire_code = 210
    version: int = 0
    """The version that was issued before, if the chain reported it."""


class SpreadDirectory(Stale):
    """The directory is wide, and another shard has the name's partition: ask that one."""

    wire_code = 211


class StaleTenure(Stale):
    """This target may not serve at the moment what others hold too: fetch the map, ask another target of the chain."""

    wire_code = 220


class StaleIdentity(Stale):
    """The member of this certificate is not in the pool map known here: wait for a newer map, or join the pool again."""

    errno = errno.EACCES
    wire_code = 225


class StaleTerm(Stale):
    """The shard has a later primary: who said this is none any more, or speaks for one who is not."""

    wire_code = 230


class StaleMember(Stale):
    """The members of the shard have changed since this was asked for: ask again with what the map says now."""

    wire_code = 231


# -- Unavailable -----------------------------------------------------------------------------------------------------


class Disconnected(Unavailable):
    """The connection ended before the answer came."""

    wire_code = 301
    may_be_applied = True


class DeadlineExceeded(Unavailable):
    """No answer within the deadline."""

    errno = errno.ETIMEDOUT
    wire_code = 302
    may_be_applied = True


class Busy(Unavailable):
    """Another request holds what this one needs: wait `retry_after_s`, then repeat."""

    errno = errno.EAGAIN
    wire_code = 303
    retry_after_s = 0.01


class Draining(Unavailable):
    """The daemon is stopping and takes no new requests."""

    wire_code = 304
    retry_after_s = 0.1


class Fenced(Unavailable):
    """The target or shard has stopped serving because it cannot vouch for what it holds."""

    wire_code = 305
    retry_after_s = 0.5


class Unreachable(Unavailable):
    """Nobody answers at any of the addresses."""

    wire_code = 306


class Cancelled(Unavailable):
    """The caller gave up waiting."""

    errno = errno.EINTR
    wire_code = 307
    may_be_applied = True


class NotLeader(Unavailable):
    """The node that was asked does not lead the pool, or no node does at the moment: ask again shortly."""

    wire_code = 308
    retry_after_s = 0.1


# -- Damaged ---------------------------------------------------------------------------------------------------------


class ChecksumMismatch(Damaged):
    """A block does not have the checksum that its writer gave it."""

    wire_code = 401
    damaged: tuple[int, int, int] | None = None
    """Inode, chunk index and block of a damaged stored block that prevented a partial write of this block."""


class CorruptRecord(Damaged):
    """A stored record cannot be decoded."""

    wire_code = 402
    key: bytes = b""
    """Key of the record, if an ordered store found the damage during a scan: the scan can continue after this
    key. Not sent over the wire."""


class CorruptFrame(Damaged):
    """A message on the wire is malformed; its connection ends."""

    errno = errno.EPROTO
    wire_code = 403


class DriveFailed(Damaged):
    """The drive gave an error."""

    wire_code = 404


class WritesLost(Damaged):
    """Writes without a flush were lost where they were stored, as in a power failure of that machine."""

    wire_code = 405


class BytesLost(Damaged):
    """Data was given up with the drives that held it; rewrite it, or remove the file."""

    wire_code = 406


# -- Bug -------------------------------------------------------------------------------------------------------------


class InvariantBroken(Bug):
    """Two facts that cannot both be true are."""

    wire_code = 501


def every_error() -> list[type[NvpoolError]]:
    """Return all error classes of this module, families first; each wire code occurs once.

    No other module may define an error class.
    """
    found: list[type[NvpoolError]] = []
    waiting: list[type[NvpoolError]] = list(NvpoolError.__subclasses__())
    while waiting:
        cls = waiting.pop(0)
        found.append(cls)
        waiting.extend(cls.__subclasses__())
    return found


BY_WIRE_CODE: dict[int, type[NvpoolError]] = {cls.wire_code: cls for cls in every_error()}


def from_os_error(error: OSError, doing: str) -> NvpoolError:
    """Translate an OSError of a local file or drive; `doing` names the failed action, for the message."""
    text = f"{doing}: {error.strerror or error}"
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return NoSpace(text)
    if error.errno in (errno.EMFILE, errno.ENFILE):
        return TooManyOpen(text)
    if error.errno == errno.ENOENT:
        return NotFound(text)
    if error.errno in (errno.EACCES, errno.EPERM):
        return AccessDenied(text)
    if error.errno == errno.EROFS:
        return ReadOnly(text)
    return DriveFailed(text)


def with_pool(text: str, pool: str) -> str:
    """Return `text` with `pool` inserted into its commands, so that users can copy them; "" leaves `text`
    unchanged."""
    if not pool or "POOL" not in text:
        return text
    name = shlex.quote(pool)
    return _PLACE.sub(lambda found: found[1] + name, text)
