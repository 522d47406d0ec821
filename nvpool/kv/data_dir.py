"""The directory of an engine: one owner at a time, one version, made completely or not at all.

    lock        flock of the owner; the kernel gives it up when the owner dies
    FORMAT      text, "nvpool kv 1\\n": the directory is whole, and of this version
    FORMAT.new  the same text while the directory is being made; what else is in it then is thrown away at the next try
    journal-0, journal-1, data.mdb, lock.mdb   see kv/journal and kv/lmdb_env
    snapshot-*  old values for a snapshot that is being read (kv/snapshot_spill); thrown away when the directory is opened

Called by the LMDB engine when it opens. Syncs what it makes, so it waits for the drive for some milliseconds.
"""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

from nvpool.core.errors import CorruptRecord, InUse, WrongFormat, from_os_error
from nvpool.kv.snapshot_spill import remove_leftovers

FORMAT = "nvpool kv 1\n"


class EngineDirectory:
    def __init__(self, path: Path) -> None:
        """Make the directory if need be, its parent being there, and become its owner. InUse: it has one."""
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
        """Whether the directory was made completely before. If not, it is ready to be made: FORMAT.new says durably
        that what is in it is not whole yet, until `finish`.

        WrongFormat    another version, or another program, made what is there
        CorruptRecord  it was whole, and is not any more
        """
        path = self.path
        try:
            remove_leftovers(path)
            if (path / "FORMAT").exists():
                text = (path / "FORMAT").read_bytes()
                if text != FORMAT.encode():
                    raise WrongFormat(f"{path} has the format {text[:40]!r}; this nvpool knows only {FORMAT.strip()!r}; "
                                      "use the version of nvpool that made it")
                if not (path / "data.mdb").exists():
                    raise CorruptRecord(f"{path}/data.mdb is missing: restore the directory from its backup or dump")
                return True
            if (path / "FORMAT.new").exists():
                for name in ("data.mdb", "lock.mdb", "journal-0", "journal-1"):
                    (path / name).unlink(missing_ok=True)
            elif (path / "data.mdb").exists():
                raise WrongFormat(f"{path} has a database but no FORMAT: if nvpool made it, restore that file, "
                                  f"it says {FORMAT.strip()!r}")
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
        """Say durably that the directory is whole. Everything in it has been synced by those who wrote it."""
        try:
            _sync_directory(self.path)  # the names of data.mdb and the journals before that of FORMAT
            os.rename(self.path / "FORMAT.new", self.path / "FORMAT")
            _sync_directory(self.path)
        except OSError as error:
            raise from_os_error(error, f"make {self.path}") from error

    def unfinish(self) -> None:
        """Say durably that what is here is not whole: the next `prepare` throws it away."""
        try:
            if (self.path / "FORMAT").exists():
                os.rename(self.path / "FORMAT", self.path / "FORMAT.new")
                _sync_directory(self.path)
        except OSError as error:
            raise from_os_error(error, f"empty {self.path}") from error

    def release(self) -> None:
        """May be called twice."""
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1


def _sync_directory(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
