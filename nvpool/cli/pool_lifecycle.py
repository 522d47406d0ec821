"""Life cycle of a pool on this node: create, start, stop and remove.

`pool create|destroy` and `dev up|down` use this module. Guarantees of a removal: nothing is removed while
something is mounted below the directory or a process of the pool runs, nor across the border of a file
system. The file FORMAT is removed last, so an interrupted removal can be repeated. No symbolic link is
followed.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import select
import shutil
import signal
import subprocess
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from nvpool.cli.mount.control import pause
from nvpool.cli.pool_connection import status_of
from nvpool.core import config as configuration
from nvpool.core.clock import SYSTEM_CLOCK
from nvpool.core.errors import (
    BadConfiguration,
    Bug,
    Damaged,
    InUse,
    InvalidRequest,
    NotFound,
    NvpoolError,
    Refused,
    Unavailable,
)
from nvpool.core.programs import Program, command
from nvpool.host.log_files import open_log
from nvpool.host.mountinfo import mounts_below
from nvpool.host.pool_directory import Flock, PoolDirectory, holder_of, memory_file
from nvpool.host.process_identity import ProcessIdentity, runs
from nvpool.poolmap.model import PoolMap, decode_map
from nvpool.poolmap.shards.members import members, node_and_path, process_name

START_S = 60.0
_STARTS_MAX = 3
"""How often a supervisor is started before its exit is reported as an error."""
_MAKE_S = 300.0
_DRAIN_S = 40.0
"""Longer than the supervisor gives its children: supervisor.drain_s, and five seconds for the kill."""

_FAMILY_OF_EXIT_CODE: dict[int, type[NvpoolError]] = {
    1: Refused,
    2: BadConfiguration,
    3: Unavailable,
    4: Damaged,
    70: Bug,
}


def make(request: dict[str, Any]) -> dict[str, Any]:
    """Run the provisioning process with `request` and return its reply; its error is raised here.

    Unavailable: the process did not finish in time; the same command continues. Bug: it gave no reply.
    """
    try:
        done = subprocess.run(
            command(Program.POOL_MAKER),
            input=json.dumps(request).encode(),
            stdout=subprocess.PIPE,
            timeout=_MAKE_S,
            check=False,
            start_new_session=True,
        )
        answer: dict[str, Any] = json.loads(done.stdout)
    except subprocess.TimeoutExpired:
        raise Unavailable(
            f"the pool was not made within {_MAKE_S:.0f} s; the same command goes on with it"
        ) from None
    except ValueError:
        raise Bug(
            f"{Program.POOL_MAKER.module} ended with exit code {done.returncode} and no answer; its words are "
            "above"
        ) from None
    if "error" in answer:
        raise _FAMILY_OF_EXIT_CODE.get(answer.get("code", 1), Refused)(answer["error"])
    return answer


def start(directory: PoolDirectory, wait_s: float = START_S) -> dict[str, Any]:
    """Start the supervisor in the background, and return the status once every process of this node serves.

    A supervisor that runs already is not started again. Unavailable, with the last errors of the logs: the
    processes did not serve within `wait_s`. If the supervisor exits repeatedly, the family of the error is
    that of its exit code.
    """
    directory.check()
    supervisor = None
    started = 0
    deadline_s = SYSTEM_CLOCK.boottime_s() + wait_s
    seen: dict[str, Any] = {}
    with _ended_with(lambda: supervisor, directory), asyncio.Runner() as runner:  # one loop, as gRPC needs
        while SYSTEM_CLOCK.boottime_s() < deadline_s:
            # Checked each time: the last holder of the lock may have been a process that was being killed.
            if directory.supervisor() is None and (supervisor is None or supervisor.poll() is not None):
                if started == _STARTS_MAX:
                    family = (
                        _FAMILY_OF_EXIT_CODE.get(supervisor.returncode, Unavailable)
                        if supervisor
                        else Unavailable
                    )
                    raise family(f"the supervisor ended immediately:{_last_errors(directory, 'nvpoold.log')}")
                with _interrupted_later():
                    supervisor = spawn_supervisor(directory)
                started += 1
            try:
                seen = runner.run(status_of(str(directory.path), 1.0))
                if all(
                    process["state"] == "serving"
                    for process in seen["processes"]
                    if process["role"] in ("meta", "store") and process["pid"] is not None
                ):  # None: another node's
                    return seen
            except Unavailable:
                pass
            pause(0.1)
    waits = [
        f"{process.get('name')} is {process['state']}"
        for process in seen.get("processes", ())
        if process["state"] != "serving"
    ]
    raise Unavailable(
        f"the pool does not serve after {wait_s:.0f} s: {', '.join(waits) or 'no answer'}"
        f"{_last_errors(directory)}"
    )


@contextlib.contextmanager
def _ended_with(
    supervisor: Callable[[], subprocess.Popen[bytes] | None], directory: PoolDirectory
) -> Iterator[None]:
    """On Ctrl-C, kill a supervisor that was started but does not hold its lock yet.

    No other process could find that supervisor later.
    """
    try:
        yield
    except KeyboardInterrupt:
        ours = supervisor()
        if ours is not None and ours.poll() is None and directory.supervisor() is None:
            ours.kill()
            ours.wait()
        raise


@contextlib.contextmanager
def _interrupted_later() -> Iterator[None]:
    """Delay SIGINT, SIGTERM and SIGHUP until the block ends, when the process started there is known."""
    came: list[int] = []
    before: dict[int, Any] = {}
    with contextlib.suppress(ValueError):  # not the main thread: no signal arrives here
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            if callable(signal.getsignal(number)):
                before[number] = signal.signal(number, lambda number, _: came.append(number))
    try:
        yield
    finally:
        for restored, handler in before.items():
            signal.signal(restored, handler)
    if came:
        signal.raise_signal(came[0])


def spawn_supervisor(directory: PoolDirectory) -> subprocess.Popen[bytes]:
    """Start the supervisor of this node as a process that outlives this one."""
    configuration.load(directory.node_toml)  # its errors are reported here and not in a log
    directory.log.mkdir(exist_ok=True)
    with open_log(directory.log / "nvpoold.log") as log:
        return subprocess.Popen(
            command(Program.SUPERVISOR, str(directory.path), "--log", "file"),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
            cwd="/",
        )


def _last_errors(directory: PoolDirectory, logs: str = "*.log") -> str:
    found = []
    for path in sorted(directory.log.glob(logs)):
        with open(path, "rb") as file:
            file.seek(max(0, path.stat().st_size - 65536))
            lines = file.read().decode(errors="replace").splitlines()
        found += [f"\n  {path.name}: {line}" for line in lines if " ERROR " in line or "Error: " in line][-2:]
    return "".join(found) + f"\n  (logs: {directory.log})"


def stop(directory: PoolDirectory) -> Flock:
    """Stop every process of the pool on this node, in order, and return the lock of the directory.

    While the caller holds the lock, no process of the pool can start again. Also stops what a crash leaves:
    children without a supervisor, a supervisor that a child is just starting, and mounts that this mount
    name space does not see any more. Unavailable: a process does not end even after SIGKILL.
    """
    # Mounts first: they still write dirty data to the stores. If a mount does not end, its holder and its
    # daemon are killed together, because either would start the other again.
    mounting = [state.identity for kind in ("holder-", "mount-") for state in directory.states(kind).values()]
    for identity in mounting:
        _end(identity, _DRAIN_S, mounting)
    deadline_s = SYSTEM_CLOCK.boottime_s() + 2 * _DRAIN_S
    while SYSTEM_CLOCK.boottime_s() < deadline_s:
        holder = directory.supervisor()
        if holder is not None:
            _end(holder, _DRAIN_S)
            continue
        try:
            lock = Flock.take(directory.lock, f"the pool directory {directory.path}")
        except InUse:
            pause(0.05)
            continue
        for path in sorted(directory.run.glob("*.lock")):
            if (child := holder_of(path)) is not None:
                _end(child, _DRAIN_S)
        return lock
    raise Unavailable(f"the pool {directory.path} could not be stopped; `ps` shows its processes")


def _end(identity: ProcessIdentity, drain_s: float, together: Sequence[ProcessIdentity] = ()) -> None:
    """Terminate the process, and kill it after `drain_s`; before a kill, suspend those in `together`."""
    try:
        pidfd = os.pidfd_open(identity.pid)
    except ProcessLookupError:
        return
    try:
        for number, wait_s in ((signal.SIGTERM, drain_s), (signal.SIGKILL, 10.0)):
            if not runs(identity):
                return
            for one in together if number == signal.SIGKILL else ():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(one.pid, signal.SIGSTOP if runs(one) else 0)
            try:
                signal.pidfd_send_signal(pidfd, number)
            except ProcessLookupError:
                return
            if select.select([pidfd], [], [], wait_s)[0]:
                return
        raise Unavailable(f"process {identity.pid} cannot be ended; it waits for a drive, perhaps")
    finally:
        os.close(pidfd)


def read_map(directory: PoolDirectory) -> PoolMap | None:
    try:
        return decode_map(directory.poolmap.read_bytes())
    except (OSError, NvpoolError):
        return None


def check_removable(directory: PoolDirectory) -> None:
    """Raise InUse, without a change, if a file system other than nvpool's is mounted below the directory."""
    foreign = [mount for mount in mounts_below(directory.path) if not mount.ours]
    if foreign:
        raise InUse(
            f"{foreign[0].point} is a mount of type {foreign[0].type} in the pool directory; unmount it first. "
            f"Nothing was removed"
        )


def remove_tree(path: Path, last: tuple[str, ...] = ()) -> None:
    """Remove the directory `path` with its contents; the entries in `last` go after all others.

    InUse, and nothing is removed: a mount or another file system is below `path`.
    """
    if mounts := mounts_below(path):
        raise InUse(f"{mounts[0].point} is mounted below {path}; unmount it first. Nothing was removed")
    device = os.lstat(path).st_dev
    for root, names, _ in os.walk(path):
        for name in names:
            place = os.path.join(root, name)
            if os.lstat(place).st_dev != device:
                raise InUse(f"{place} is on another file system; nothing was removed")
    for entry in sorted(
        path.iterdir(), key=lambda entry: last.index(entry.name) if entry.name in last else -1
    ):
        if entry.is_dir() and not entry.is_symlink():
            shutil.rmtree(entry)
        else:
            entry.unlink(missing_ok=True)
    path.rmdir()


def remove(directory: PoolDirectory, lock: Flock) -> None:
    """Remove the directory of a stopped pool; `lock` is the lock that `stop` returned."""
    check_removable(directory)
    sockets = directory.socket_directory()
    if sockets != directory.run and sockets.is_dir():
        remove_tree(sockets)
    remove_tree(directory.path, last=("lock", "throw-away", "FORMAT"))
    lock.release()


def erase_stores(directory: PoolDirectory, pool_map: PoolMap) -> list[str]:
    """Remove what this node stores outside the pool directory, and return what was done, as sentences.

    That is chunk stores, and records of metadata shards beside them. InvalidRequest, NotFound: a place does
    not look like a store of this pool; what was removed before stays removed.
    """
    done = []
    node, inside = directory.node, directory.path / "targets"
    in_use = {target.drive for target in pool_map.targets if target.state != "gone"}
    for drive in pool_map.drives:
        place = Path(drive.path)
        if drive.node != node or not drive.path or place.parent == inside or not place.exists():
            continue
        if place.is_dir():
            if not place.name.startswith(f"nvpool-{pool_map.pool_id[:8]}-target-"):
                raise InvalidRequest(f"{place} does not look like a store of this pool; remove it by hand")
            remove_tree(place)
            done.append(f"removed {place}")
        elif place.is_block_device():
            try:
                make({"verb": "erase", "path": str(place), "pool_id": pool_map.pool_id})
            except Refused:
                if drive.id in in_use:
                    raise
                continue  # the drive has left the pool, and may have another owner by now
            done.append(f"erased the head of {place}")
        else:
            raise NotFound(f"{place} is neither a directory nor a block device; remove it by hand")
    for shard in pool_map.shards:
        for member in members(shard):
            where, path = node_and_path(shard, member)
            kept = memory_file(pool_map.pool_id, process_name(shard.id, member)) if where == node else None
            if kept is not None:
                with contextlib.suppress(OSError):  # the memory of a process that was killed
                    kept.unlink()
            if (
                where == node
                and path
                and not Path(path).is_relative_to(directory.path)
                and Path(path).is_dir()
            ):
                remove_tree(Path(path))
                done.append(f"removed {path}")
    return done


def forget(directory: PoolDirectory, pool_map: PoolMap | None) -> list[str]:
    """Remove the keys of a stopped pool from the operator's own etcd, if the pool uses one.

    Return what was done, or remains to be done, as sentences. May be repeated.
    """
    if pool_map is None:
        return [
            f"{directory.path} has no pool map: keys of the pool in an etcd of your own, if it had one, were not removed"
        ]
    done: list[str] = make({"verb": "forget", "directory": str(directory.path), "pool_id": pool_map.pool_id})[
        "done"
    ]
    return done
