"""Pool directory of a node: paths, locks and announced processes.

The layout:

    node.toml          configuration of this node (core/config)
    FORMAT             "nvpool pool 1\\n"; written last when a pool is made
    lock               flock of the supervisor; its text is the holder's identity; mode 0600, as for all locks
    secret/grant.key   32 random bytes, mode 0600
    secret/            authority.crt, member.crt, member.key: identity of this node (security/tls);
                       authority.key on nodes that may lead
    node.json          number of this node in the pool; absent on the first node
    map/               the embedded coordinator's records
    poolmap.json       the newest pool map, replaced atomically; mode 0640
    meta/shard-N/      records of a metadata shard
    run/               NAME.json: state of a process; NAME.lock: its flock; unix sockets
    log/               one file per process, mode 0640; audit.log
    reserve            blocks reserved for poolmap.json and run/ on a full drive
    targets/N          chunk stores of pools that live in one directory

Used by the daemons, the client (poolmap.json) and the CLI. Readers always see complete files, also while a
file is replaced and after a power loss. Only state files of processes that have ended are removed.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import os
import stat
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from nvpool.core.errors import AccessDenied, InUse, InvalidRequest, NotFound, WrongFormat, from_os_error
from nvpool.core.units import KIB
from nvpool.host.mountinfo import mount_at, mounts
from nvpool.host.process_identity import ProcessIdentity, boot_id, own_identity, runs

FORMAT_TEXT = "nvpool pool 1\n"
BEING_MADE_TEXT = "nvpool pool being made\n"
FIRST_NODE = 1
SOCKET_PATH_BYTES_MAX = 107
"""Size of sun_path in sockaddr_un, without the terminating zero."""

RESERVE_BYTES = 256 * KIB
"""Enough for the pool map of a large pool and the state files of its processes."""

PRIVATE_MODE, MAP_MODE = 0o600, 0o640
"""Modes of lock files, which other users must not lock, and of the pool map and state files, which operators
may read."""
PASSED_THROUGH_MODE, RECORDS_MODE = 0o751, 0o750
"""Modes of the pool directory and run/, in which other users reach a socket by its name, and of the
directories in them. See host/pool_directory_modes."""

SUPERVISOR_SOCKET = "supervisor.sock"
_SOCKET_NAME_BYTES_MAX = len("/target-99999.sock")
_MEMORY = Path("/dev/shm")


class ProcessState(msgspec.Struct, frozen=True):
    """State that a serving process announces in run/NAME.json. `number` is its shard or target."""

    role: str
    pid: int
    start: int
    boot: str
    number: int = 0
    state: str = "serving"
    since_ms: int = 0
    endpoints: tuple[str, ...] = ()
    mountpoint: str = ""
    software: str = ""
    engine: str = ""
    pause_ms: int = 0
    """For a mount whose process replaced another one: how long no process served the mount."""

    @property
    def identity(self) -> ProcessIdentity:
        return ProcessIdentity(self.pid, self.start, self.boot)


def memory_file(pool_id: str, process: str) -> Path | None:
    """Return the path of a file in memory for a daemon: it survives the process, but not a power loss.

    None if POSIX shared memory (shm_overview(7)) is not a tmpfs. The code that opens the file verifies its
    owner.
    """
    found = mount_at(_MEMORY)
    return _MEMORY / f"nvpool-{pool_id}-{process}" if found is not None and found.type == "tmpfs" else None


def write_whole(path: Path, content: bytes, mode: int = 0o644) -> None:
    """Replace the file at `path` atomically and durably.

    Readers see the old content or the new; after a power loss the file has one of the two.
    """
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    descriptor = os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, mode)
    try:
        with open(descriptor, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(descriptor)
        os.replace(beside, path)
    except BaseException:
        beside.unlink(missing_ok=True)
        raise
    sync_directory(path.parent)


def _write(path: Path, content: bytes, mode: int) -> None:
    with open(path, "wb", opener=lambda name, flags: os.open(name, flags, mode)) as file:
        file.write(content)


def sync_directory(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


class Flock:
    """Exclusive flock on a file whose text names the holder. Child programs do not inherit the lock unless it
    is passed."""

    def __init__(self, descriptor: int, path: Path):
        self.descriptor = descriptor
        self.path = path

    @classmethod
    def take(cls, path: Path, what: str, *, wait: bool = False) -> Flock:
        """Acquire the lock.

        InUse: another process holds the lock; the message names it. With `wait`, the call blocks without
        limit instead (use a separate thread).
        """
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, PRIVATE_MODE)
        except OSError as error:
            raise from_os_error(error, f"open {path}") from error
        try:
            _make_private(descriptor)
            fcntl.flock(descriptor, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
            if os.fstat(descriptor).st_nlink == 0:  # removed with its pool while we waited
                raise NotFound(f"{path} was removed")
        except BlockingIOError:
            os.close(descriptor)
            holder = holder_of(path)
            raise InUse(
                f"{what} is in use by {f'process {holder.pid}' if holder else 'another process'}, "
                f"which has to end first"
            ) from None
        except BaseException:
            os.close(descriptor)
            raise
        lock = cls(descriptor, path)
        lock.sign()
        return lock

    @classmethod
    def inherited(cls, descriptor: int, path: Path) -> Flock:
        """Take over the lock that the parent process held and passed on.

        The lock belongs to this process alone once the parent closes its own descriptor.
        """
        os.set_inheritable(descriptor, False)
        if not os.path.samestat(os.fstat(descriptor), os.stat(path)):
            raise InUse(f"descriptor {descriptor} is not {path}")
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        lock = cls(descriptor, path)
        lock.sign()
        return lock

    def sign(self) -> None:
        """Write our identity into the file, in place, so that other processes know the holder."""
        text = " ".join(map(str, own_identity())).encode() + b"\n"
        os.pwrite(self.descriptor, text, 0)
        os.ftruncate(self.descriptor, len(text))

    def release(self) -> None:
        if self.descriptor >= 0:
            os.close(self.descriptor)
            self.descriptor = -1


def make_passed_through(path: Path) -> None:
    """Make a directory, and its parents, in which other users can reach a socket by its name.

    The mode does not depend on the umask.

    An existing directory stays unchanged.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        path.mkdir(mode=PASSED_THROUGH_MODE)
    except FileExistsError:
        return
    path.chmod(PASSED_THROUGH_MODE)


def _make_private(descriptor: int) -> None:
    """Remove the permissions of other users from our own lock: they could lock it (versions up to 0.1 allow
    that)."""
    found = os.fstat(descriptor)
    if found.st_mode & 0o077 and found.st_uid == os.geteuid():
        os.fchmod(descriptor, PRIVATE_MODE)


def holder_of(path: Path) -> ProcessIdentity | None:
    """Return the identity in a lock file if that process still runs. Does not touch the lock."""
    try:
        pid, start, boot = path.read_text().split()
        identity = ProcessIdentity(int(pid), int(start), boot)
    except (OSError, ValueError):
        return None
    return identity if runs(identity) else None


class PoolDirectory:
    def __init__(self, path: str | os.PathLike[str]):
        self.path = Path(os.path.abspath(path))
        self.node_toml = self.path / "node.toml"
        self.format = self.path / "FORMAT"
        self.lock = self.path / "lock"
        self.secret = self.path / "secret"
        self.grant_key = self.secret / "grant.key"
        self.node_json = self.path / "node.json"
        self.map = self.path / "map"
        self.poolmap = self.path / "poolmap.json"
        self.run = self.path / "run"
        self.log = self.path / "log"
        self.reserve = self.path / "reserve"

    def shard(self, number: int) -> Path:
        return self.path / "meta" / f"shard-{number}"

    def ended(self, number: int) -> Path:
        """File of a target that stopped cleanly, in sync with the others of its chains: the map epoch at that
        time.

        Valid only while the pool map still has that epoch.
        """
        return self.run / f"target-{number}.ended"

    def fenced(self, number: int) -> Path:
        """File that exists while a target is fenced because of its drive, until it is reopened.

        A target that cannot write the file is fenced nevertheless.
        """
        return self.run / f"target-{number}.fenced"

    def target(self, number: int) -> Path:
        return self.path / "targets" / str(number)

    def store(self, drive_path: str, number: int) -> Path:
        """Return the directory of a target's chunk store: on its drive, or in targets/ (`data` may link to a
        device)."""
        inside = self.target(number)
        return inside if inside.is_dir() else Path(drive_path)

    def exists(self) -> bool:
        return self.format.exists()

    @property
    def node(self) -> int:
        """Number of this node in the pool map."""
        try:
            return int(msgspec.json.decode(self.node_json.read_bytes())["node"])
        except FileNotFoundError:
            return FIRST_NODE
        except (OSError, msgspec.MsgspecError, KeyError, TypeError, ValueError) as error:
            raise WrongFormat(f"{self.node_json} cannot be read: {error}") from None

    @property
    def member(self) -> str:
        """Name in this node's certificate; empty if the node did not join or the file is unreadable."""
        try:
            return str(msgspec.json.decode(self.node_json.read_bytes())["member"])
        except (OSError, msgspec.MsgspecError, KeyError, TypeError):
            return ""

    def check(self) -> None:
        """Verify that this is a complete pool directory.

        NotFound: there is no pool.
        WrongFormat: the pool has another version or is incomplete; the text has the remedy.
        """
        if not self.path.is_dir():
            raise NotFound(
                f"{self.path} is not a directory"
                if os.path.lexists(self.path)
                else f"{self.path} does not exist"
            )
        try:
            text = self.format.read_text()
        except FileNotFoundError:
            raise NotFound(f"{self.path} is not a pool directory (it has no file FORMAT)") from None
        except (OSError, UnicodeDecodeError) as error:
            raise WrongFormat(f"{self.format} cannot be read: {error}") from None
        if text == BEING_MADE_TEXT:
            raise WrongFormat(
                f"the making of the pool in {self.path} was interrupted; run the same command (pool create or "
                f"dev up) again"
            )
        if text != FORMAT_TEXT:
            raise WrongFormat(
                f"{self.path} has the format {text.strip()[:60]!r}, this nvpool knows {FORMAT_TEXT.strip()!r}; "
                f"use the version of nvpool that made it"
            )

    def supervisor(self) -> ProcessIdentity | None:
        return holder_of(self.lock)

    def socket_directory(self) -> Path:
        """Return the directory of the unix sockets: run/, or a shorter path if run/ exceeds the system's
        limit."""
        if len(os.fsencode(self.run)) + _SOCKET_NAME_BYTES_MAX <= SOCKET_PATH_BYTES_MAX:
            return self.run
        name = self._short_name()
        return Path("/run" if os.geteuid() == 0 and os.path.isdir("/run") else "/tmp") / name

    def make_socket_directory(self) -> Path:
        """Create the socket directory if it is missing (a reboot empties /run).

        AccessDenied: another user owns a directory of that name.
        """
        path = self.socket_directory()
        make_passed_through(path)
        found = os.lstat(path)
        if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid() or found.st_mode & 0o022:
            raise AccessDenied(f"{path} is not ours alone; remove it and try again")
        return path

    def show_socket(self, paths: Sequence[str]) -> None:
        """Link the supervisor's socket under a fixed name, for users who may not read the pool map."""
        for path in paths[:1]:
            link = self.socket_directory() / SUPERVISOR_SOCKET
            beside = link.with_name(f".{SUPERVISOR_SOCKET}.{os.getpid()}")
            beside.unlink(missing_ok=True)
            beside.symlink_to(os.path.basename(path))
            os.replace(beside, link)

    def shown_sockets(self) -> list[str]:
        """Return possible paths of the supervisor's socket, for users other than the daemons' user.

        Only directories owned by root or by the owner of the pool count.
        """
        name = self._short_name()
        places = [self.run, Path("/run", name), Path("/tmp", name)]
        owners = {0, os.stat(self.path).st_uid}
        found = []
        for place in places:
            with contextlib.suppress(OSError):
                if os.lstat(place).st_uid in owners and os.path.exists(place / SUPERVISOR_SOCKET):
                    found.append(str(place / SUPERVISOR_SOCKET))
        return found

    def _short_name(self) -> str:
        return "nvpool-" + hashlib.sha256(os.fsencode(self.path)).hexdigest()[:16]

    def announce(self, name: str, state: ProcessState) -> None:
        """Write run/NAME.json with the current state of a process. Not synced: it is meaningless after a
        reboot."""
        beside = self.run / f".{name}.{os.getpid()}"
        self.on_reserve(lambda: _write(beside, msgspec.json.encode(state), MAP_MODE))
        os.replace(beside, self.run / f"{name}.json")

    def publish(self, pool_map: bytes) -> None:
        """Replace poolmap.json, also on a full drive: daemons start only after their pool map is written."""
        self.on_reserve(lambda: write_whole(self.poolmap, pool_map, MAP_MODE))

    def on_reserve(self, write: Callable[[], object]) -> None:
        """Call `write`; if the drive is full, release the reserve and call `write` once more.

        Several processes may call this; a process that finds the reserve empty gets the error.
        """
        try:
            write()
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise
            self.reserve.unlink(missing_ok=True)
            try:
                write()
            finally:
                self.keep_reserve()

    def keep_reserve(self) -> None:
        """Allocate the reserve, up to RESERVE_BYTES or as much as the drive has."""
        try:
            with open(
                self.reserve, "ab", buffering=0, opener=lambda path, flags: os.open(path, flags, PRIVATE_MODE)
            ) as file:
                while file.tell() < RESERVE_BYTES:
                    file.write(bytes(4 * KIB))
        except OSError:
            pass  # the drive is full: the reserve has what was left

    def withdraw(self, name: str) -> None:
        """Remove run/NAME.json if it is this process's."""
        state = self.state_of(name)
        if state is not None and state.pid == os.getpid():
            (self.run / f"{name}.json").unlink(missing_ok=True)

    def state_of(self, name: str) -> ProcessState | None:
        """Return the announced state of a process, running or not.

        The result is None if there is no readable state file.
        """
        try:
            return msgspec.json.decode((self.run / f"{name}.json").read_bytes(), type=ProcessState)
        except (OSError, msgspec.MsgspecError):
            return None

    def states(self, prefix: str = "") -> dict[str, ProcessState]:
        """Return the announced states of running processes, by name.

        Removes the state files of mounts and holders that have ended, except those of mount points that are
        still mounted (see `dead_mounts`).
        """
        found = {
            path.stem: state
            for path in sorted(self.run.glob(f"{prefix}*.json"))
            if (state := self.state_of(path.stem)) is not None
        }
        running = {name: state for name, state in found.items() if runs(state.identity)}
        gone = {
            name: state
            for name, state in found.items()
            if name not in running and state.role in ("mount", "holder", "reader")
        }
        for name in gone.keys() - _still_mounted(gone, running).keys():
            (self.run / f"{name}.json").unlink(missing_ok=True)
        return running

    def dead_mounts(self) -> dict[str, ProcessState]:
        """Return the last announced state of each dead mount: still mounted, but without a process (kill -9).

        Every access there fails with ENOTCONN until the mount point is unmounted. Changes nothing.
        """
        running = self.states("mount-") | self.states("holder-")
        found = {path.stem: self.state_of(path.stem) for path in sorted(self.run.glob("mount-*.json"))}
        return _still_mounted(
            {name: state for name, state in found.items() if state is not None and name not in running},
            running,
        )


def _still_mounted(
    gone: dict[str, ProcessState], running: dict[str, ProcessState]
) -> dict[str, ProcessState]:
    if not gone:
        return {}
    places = {str(mount.point) for mount in mounts() if mount.ours} - {
        state.mountpoint for state in running.values()
    }
    found = {
        name: state for name, state in gone.items() if state.mountpoint in places and state.boot == boot_id()
    }
    last = {
        (state.role, state.mountpoint): name
        for name, state in sorted(found.items(), key=lambda one: one[1].since_ms)
    }
    return {name: found[name] for name in last.values()}


def being_made(directory: PoolDirectory) -> bool:
    """Return whether pool creation was started and has not finished."""
    try:
        return directory.format.read_text() == BEING_MADE_TEXT
    except OSError:
        return False


def announcement(
    role: str,
    *,
    now_ms: int,
    number: int = 0,
    endpoints: tuple[str, ...] = (),
    mountpoint: str = "",
    software: str = "",
    engine: str = "",
    pause_ms: int = 0,
    identity: ProcessIdentity | None = None,
) -> ProcessState:
    """Return the state of this process, or of the one with `identity`, for `PoolDirectory.announce`."""
    pid, start, boot = identity or own_identity()
    return ProcessState(
        role, pid, start, boot, number, "serving", now_ms, endpoints, mountpoint, software, engine, pause_ms
    )


def check_name(name: str) -> None:
    """Raise InvalidRequest for a pool name that is no valid label, file name and part of a URL."""
    if not (0 < len(name) <= 63 and name.replace("-", "").replace("_", "").isalnum() and name.isascii()):
        raise InvalidRequest(f"{name!r} is not a name for a pool: use up to 63 letters, digits, - and _")
