"""Data directory of an engine: one owner at a time, one format version, and atomic creation.

    lock        flock of the owner; the kernel releases it when the owner dies
    FORMAT      text, "nvpool kv 1\\n": the directory is complete and has this version
    FORMAT.new  the same text while the directory is being created; the next attempt deletes the rest
    journal-0, journal-1, data.mdb, lock.mdb   see kv/journal and kv/lmdb_env
    snapshot-*  old values for an open snapshot (kv/snapshot); deleted when the directory is opened

The LMDB engine calls this module when it opens. The module syncs what it creates, so a call waits some
milliseconds for the drive.
"""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

from nvpool.core.errors import CorruptRecord, InUse, WrongFormat, from_os_error
from nvpool.kv.snapshot import remove_leftovers

FORMAT = "nvpool kv 1\n"


class EngineDirectory:
    def __init__(self, path: Path) -> None:
        """Create the directory if it is missing (its parent must exist) and lock it.

        InUse: the directory has an owner.
        """
        self.path = path
        self._lock = -1
        try:
            if not path.is_dir():
                path.mkdir(mode=0o700)
                _sync_directory(path.parent)
            self._lock = os.open(path / "lock", os.O_RDWR | os.O_CREAT, 0o600)
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self.release()
            raise InUse(f"{path} is open already; stop the other daemon, or wait for it to end") from None
        except OSError as error:
            self.release()
            raise from_os_error(error, f"open {path}") from error

    def prepare(self) -> bool:
        """Return whether the directory is complete; if not, prepare its creation.

        During the creation, FORMAT.new records durably that the content is incomplete, until `finish`.

        WrongFormat: another version or another program created the content.
        CorruptRecord: the directory was complete, but files are missing.
        """
        path = self.path
        try:
            remove_leftovers(path)
            if (path / "FORMAT").exists():
                text = (path / "FORMAT").read_bytes()
                if text != FORMAT.encode():
                    raise WrongFormat(
                        f"{path} has the format {text[:40]!r}; this nvpool knows only {FORMAT.strip()!r}; "
                        "use the version of nvpool that made it"
                    )
                if not (path / "data.mdb").exists():
                    raise CorruptRecord(
                        f"{path}/data.mdb is missing: restore the directory from its backup or dump"
                    )
                return True
            if (path / "FORMAT.new").exists():
                for name in ("data.mdb", "lock.mdb", "journal-0", "journal-1"):
                    (path / name).unlink(missing_ok=True)
            elif (path / "data.mdb").exists():
                raise WrongFormat(
                    f"{path} has a database but no FORMAT: if nvpool made it, restore that file, "
                    f"it says {FORMAT.strip()!r}"
                )
            descriptor = os.open(path / "FORMAT.new", os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
            try:
                os.write(descriptor, FORMAT.encode())
                os.fsync(descriptor)
            finally:
                os.close(descriptor)
            _sync_directory(path)
        except OSError as error:
            raise from_os_error(error, f"open {path}") from error
        return False

    def finish(self) -> None:
        """Record durably that the directory is complete. The callers have synced all of its files before."""
        try:
            _sync_directory(self.path)  # the names of data.mdb and the journals must be durable before FORMAT
            os.rename(self.path / "FORMAT.new", self.path / "FORMAT")
            _sync_directory(self.path)
        except OSError as error:
            raise from_os_error(error, f"make {self.path}") from error

    def unfinish(self) -> None:
        """Record durably that the content is incomplete: the next `prepare` deletes it."""
        try:
            if (self.path / "FORMAT").exists():
                os.rename(self.path / "FORMAT", self.path / "FORMAT.new")
                _sync_directory(self.path)
        except OSError as error:
            raise from_os_error(error, f"empty {self.path}") from error

    def release(self) -> None:
        """Release the lock. May be called twice."""
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1


def _sync_directory(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
