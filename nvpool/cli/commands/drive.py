"""The commands `nvpool drive`: list, add, drain, replace and remove drives of a running pool.

The commands `node`, `pool`, `scrub` and `shard` share the waiting and progress functions of this module.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Callable, Collection, Iterator
from typing import Any

import click

from nvpool.cli.output import ByteSize, completed, json_option, pool_argument, print_json, print_table, say
from nvpool.core.clock import SYSTEM_CLOCK
from nvpool.core.units import format_bytes

wait_option = click.option(
    "--wait",
    is_flag=True,
    help="Wait until it is done, and show the progress. Ctrl-C stops only the "
    "waiting; run the command again to resume waiting.",
)
drive_argument = click.argument("drive", metavar="DRIVE")

STALL_S = 30.0
"""A waiting command reports a stall after this time: longer than drained chunks are kept for clients."""
PAUSED = "paused; go on with: nvpool pool rebalance POOL --resume"


@click.group(
    epilog="""\b
DRIVE is a number or path that `nvpool drive ls` shows. A path names a drive of the node whose pool directory is POOL.

\b
examples:
  nvpool drive ls /srv/pool
  nvpool drive add /srv/pool /mnt/nvme2 --wait
  nvpool drive drain /srv/pool 1 --wait && nvpool drive remove /srv/pool 1
"""
)
def drive() -> None:
    """List, add, drain, replace and remove the drives of a running pool."""


@drive.command(
    epilog="""\b
--json prints one object for each drive: drive, target, node, path, capacity_bytes, used_bytes, state (of its process),
desired_state (empty, draining, drained, removing, lost, away), wish (deprecated: the old name of desired_state), chains (that
it holds), share (of all chains), chains_to_come, chains_to_go, lacks_room (for those to come), moving_wait (why this drive
waits with moving chains or removing moved data), metadata (shards with a member on the drive)

\b
example: nvpool drive ls /srv/pool
"""
)
@pool_argument
@json_option
def ls(pool: str, as_json: bool) -> None:
    """List the drives of a pool: state, share of the chains, and chains that move to and from them."""
    from nvpool.cli.pool_connection import status_of

    drives = asyncio.run(status_of(pool))["drives"]
    if as_json:
        print_json(drives)
        return
    print_drives(drives)


def print_drives(drives: list[dict[str, Any]]) -> None:
    print_table(
        ("drive", "node", "target", "state", "share", "moving", "used", "capacity", "path"),
        [
            (
                one["drive"],
                one["node"],
                one["target"],
                state_of(one),
                f"{100 * one['share']:.1f} %",
                moving_of(one),
                format_bytes(one["used_bytes"]) if one["used_bytes"] is not None else None,
                format_bytes(one["capacity_bytes"]),
                one["path"],
            )
            for one in drives
        ],
    )


def state_of(one: dict[str, Any]) -> str:
    if one["desired_state"] in ("", "lost", "away"):
        state: str = one["desired_state"] or one["state"]
        return state
    return f"{one['state']}, {one['desired_state']}"


def moving_of(one: dict[str, Any]) -> str:
    """Return the chains and metadata that move to and from a drive, as text."""
    return ", ".join(
        text
        for count, text in (
            (one["chains_to_come"], f"{one['chains_to_come']} to come"),
            (one["chains_to_go"], f"{one['chains_to_go']} to go"),
            (members_to_go(one), f"metadata (shard {', '.join(map(str, one['metadata']))}) to go"),
        )
        if count
    )


def members_to_go(one: dict[str, Any]) -> int:
    """Count the shard members on the drive that have to leave it."""
    return len(one["metadata"]) if one["desired_state"] in ("draining", "removing") else 0


async def wait_until_moved(pool: str, title: str, quiet: bool, drive: int | None = None) -> dict[str, Any]:
    """Wait until no chain of the drive, or of the pool, has to move, and return the status.

    A drained drive must also be empty. Progress and errors are as of `wait_for_none`.
    """

    def left(seen: dict[str, Any]) -> int:
        here = [one for one in seen["drives"] if drive in (None, one["drive"])]
        moving: int = sum(one["chains_to_come"] + one["chains_to_go"] + members_to_go(one) for one in here)
        return moving + (drive is not None and is_removing_chunks(here))

    return await wait_for_none(pool, title, quiet, left, moving_on)


async def wait_for_none(
    pool: str,
    title: str,
    quiet: bool,
    left: Callable[[dict[str, Any]], int],
    detail: Callable[[dict[str, Any]], str],
    instead: Callable[[], dict[str, Any] | None] = lambda: None,
) -> dict[str, Any]:
    """Wait until `left` returns 0 for the status, and return that status.

    Meanwhile the progress and the text of `detail` are shown. The pool may be unavailable for a while
    (`instead` is as for `statuses`); any other error ends the wait.
    """
    from nvpool.cli.pool_connection import statuses
    from nvpool.cli.progress import ProgressSample, shown

    seen: dict[str, Any] = {}
    most = 0
    stall = Stall(SYSTEM_CLOCK.boottime_s())

    async def watch() -> dict[str, Any]:  # type: ignore[return]  # statuses() ends only after one with nothing left
        nonlocal seen, most
        async for seen in statuses(pool, instead):
            most = max(most, left(seen))
            if not left(seen):
                return seen
            now_s = SYSTEM_CLOCK.boottime_s()
            stall.note(
                (left(seen), seen["chains"]["bytes_left"], *(one["used_bytes"] for one in seen["drives"])),
                now_s,
            )
            if quiet and stall.is_due(now_s):
                say(
                    f"{title}: {left(seen)} left, "
                    + ", ".join(word for word in (stall.text(now_s), detail(seen)) if word)
                )

    def look() -> ProgressSample:
        if not seen:
            return ProgressSample(0, None, in_bytes=False)
        words = (stall.text(SYSTEM_CLOCK.boottime_s()), detail(seen))
        return ProgressSample(
            most - left(seen), most, ", ".join(word for word in words if word), in_bytes=False
        )

    return await shown(title, watch(), look, quiet=quiet)


class Stall:
    """Detector of stalls: measures how long the state that a command waits for has not changed."""

    def __init__(self, now_s: float) -> None:
        self._state: tuple[int | None, ...] = ()
        self._since_s = self._said_s = now_s

    def note(self, state: tuple[int | None, ...], now_s: float) -> None:
        if state != self._state:
            self._state, self._since_s, self._said_s = state, now_s, now_s

    def text(self, now_s: float) -> str:
        stalled_s = now_s - self._since_s
        return f"no progress for {stalled_s:.0f} s" if stalled_s >= STALL_S else ""

    def is_due(self, now_s: float) -> bool:
        """Return whether a command without a progress display must report a stall now."""
        if now_s - self._said_s < STALL_S:
            return False
        self._said_s = now_s
        return True


def say_what_waits(done: dict[str, Any]) -> None:
    """Print the drives that a drain has to wait for, because they do not serve."""
    if done["waits_for"]:
        say(
            f"note: drive {', '.join(map(str, done['waits_for']))} does not serve; what is to move there waits until it is "
            f"back, or given up"
        )


def is_removing_chunks(drives: list[dict[str, Any]]) -> bool:
    """Return whether one of the drives has no chains any more, but still removes their chunks."""
    return any(
        one["desired_state"] == "drained" and one["state"] == "serving" and one.get("used_bytes")
        for one in drives
    )


def moving_on(seen: dict[str, Any], shards: Collection[int] = ()) -> str:
    """Return the time left, or what delays the move, as text. `shards`: those with members that move."""
    full = [str(one["drive"]) for one in seen["drives"] if one.get("lacks_room")]  # an older node omits it
    room = f"drive {', '.join(full)} has no space; add a drive: nvpool drive add POOL PATH" if full else ""
    words = (_kept_by(seen, shards), room, *_of_drives(seen), time_left(seen["chains"]))
    return completed(", ".join(word for word in words if word))


def _of_drives(seen: dict[str, Any]) -> list[str]:
    """Return for each drive with moving chains how much remains, and why it waits."""
    words = []
    for one in seen["drives"]:
        name, wait = f"drive {one['drive']} (target {one.get('target')})", one.get("moving_wait")
        if is_removing_chunks([one]):
            words.append(
                f"{name} removes the last {format_bytes(one['used_bytes'])}" + (f": {wait}" if wait else "")
            )
        elif wait and (one["chains_to_come"] or one["chains_to_go"]) and not one.get("lacks_room"):
            words.append(f"{name}: {wait}")
    return words


def _kept_by(seen: dict[str, Any], shards: Collection[int]) -> str:
    """Return the drives and nodes that the move waits for because they do not serve, with the remedy.

    While such a node is away, no other node replaces it: most nodes are back soon, and copies on the wrong
    rack would have to move once more. So the text names what the operator can do instead.
    """
    away = {
        one["node"]: one for one in seen["nodes"] if one["state"] != "serving" and one["desired_state"] == ""
    }
    silent = [
        one
        for one in seen["drives"]
        if one["state"] != "serving"
        and
        # a move does not wait for lost drives or drives that are away
        (one["chains_to_come"] or (one["chains_to_go"] and one["desired_state"] not in ("lost", "away")))
    ]
    nodes = sorted(
        {one["node"] for one in silent} & away.keys()
        | {number for number, one in away.items() if {*one["primaries"], *one["standbys"]} & {*shards}}
    )
    drives = [str(one["drive"]) for one in silent if one["node"] not in away]
    if not drives and not nodes:
        return ""
    words = [f"drive {', '.join(drives)}"] if drives else []
    words += [
        f"node {number}" + (f" (rack {away[number]['rack']})" if away[number]["rack"] else "")
        for number in nodes
    ]
    remedy = f"; if it stays away: nvpool node remove POOL {nodes[0]} --lost" if nodes else ""
    return f"waits for {' and '.join(words)} to serve again{remedy}"


def time_left(chains: dict[str, Any]) -> str:
    """Return the data and time left, or that moving is paused, as text."""
    if chains["paused"] and not chains["filling"]:
        return PAUSED
    words = [f"about {format_bytes(chains['bytes_left'])} left"] if chains["to_copy"] else []
    if chains["seconds_left"] is not None:
        seconds = int(chains["seconds_left"])
        words.append(f"{seconds // 60} min {seconds % 60} s to go" if seconds >= 60 else f"{seconds} s to go")
    return ", ".join(words)


@drive.command(
    epilog="""\b
examples:
  nvpool drive add /srv/pool /mnt/nvme2
  nvpool drive add /srv/pool /dev/nvme3n1 --wait
"""
)
@pool_argument
@click.argument("path", type=click.Path(exists=True))
@click.option(
    "--size",
    type=ByteSize(),
    default=0,
    help="How much of it to use, like 500G; default: all of a block device, or "
    "nine tenths of the free space of a directory.",
)
@click.option("--force", is_flag=True, help="Use a block device that is not empty; its data is lost.")
@wait_option
@json_option
def add(pool: str, path: str, size: int, force: bool, wait: bool, as_json: bool) -> None:
    """Add a drive to a running pool. PATH is a directory or a block device.

    The new target serves immediately. Then its share of the chunks, by capacity, moves to it from the other drives, while the
    pool is in use. `drive ls` shows the progress; `pool rebalance` pauses or limits the moving. May be repeated.
    """
    from nvpool.cli.pool_connection import change

    result = asyncio.run(
        change(pool, "drive-add", {"path": os.path.abspath(path), "capacity_bytes": size, "force": force})
    )
    if not as_json:
        what = "is in the pool already" if result.get("was_there") else "added"
        click.echo(
            f"drive {result['drive']} {what}: target {result['target']}, {format_bytes(result['capacity_bytes'])} at "
            f"{result['path']}"
        )
        if not wait:
            say(f"note: {result['chains_to_come']} chains move to it now; look with: nvpool drive ls {pool}")
    _end(pool, result, wait, as_json, f"filling drive {result['drive']}")


@contextlib.contextmanager
def note_on_interrupt(what: str, look: str, cancel: str = "") -> Iterator[None]:
    """On Ctrl-C, print that `what` continues in the pool, and how to look at it and cancel it.

    `look` and `cancel` are commands; an empty `cancel` means that there is none.
    """
    try:
        yield
    except KeyboardInterrupt:
        say(f"{what} goes on; look with: {look}" + (f"; end it with: {cancel}" if cancel else ""))
        raise


def _end(
    pool: str,
    result: dict[str, Any],
    wait: bool,
    as_json: bool,
    title: str,
    drive: int | None = None,
    cancel: str = "",
) -> None:
    if wait:
        with note_on_interrupt(title, f"nvpool drive ls {pool}", cancel):
            seen = asyncio.run(wait_until_moved(pool, title, as_json, drive))
        result["drives"] = seen["drives"]
        result["chains"] = seen["chains"]
        if not as_json:
            say(f"{title}: done")
    if as_json:
        print_json(result)


def drive_name(drive: str) -> str:
    """Return the number or absolute path of a drive. The pool itself refuses a word that is no path here."""
    return (
        drive
        if drive.isdigit() or ("/" not in drive and not os.path.exists(drive))
        else os.path.abspath(drive)
    )


@drive.command(
    epilog="""\b
--wait ends when no chain and no metadata has to leave the drive any more, and the chunks that it still had are removed. Chunks
are kept for a while after their chain has moved, for clients that read by an older pool map.

\b
examples:
  nvpool drive drain /srv/pool 2 --wait
  nvpool drive drain /srv/pool 2 --cancel
"""
)
@pool_argument
@drive_argument
@click.option("--cancel", is_flag=True, help="End the drain: the drive gets its share of the chunks again.")
@wait_option
@json_option
def drain(pool: str, drive: str, cancel: bool, wait: bool, as_json: bool) -> None:
    """Move all data off a drive. The pool stays in use; the empty drive can then be removed.

    Refused if the other drives are too few for the pool's replicas, or have too little space. May be repeated.
    """
    from nvpool.cli.pool_connection import change

    result = asyncio.run(change(pool, "drive-drain", {"drive": drive_name(drive), "cancel": cancel}))
    if not as_json:
        if cancel:
            click.echo(f"drive {result['drive']} holds its share of the pool again")
        elif result["state"] == "drained":
            click.echo(
                f"drive {result['drive']} is empty; remove it with: nvpool drive remove {pool} {result['drive']}"
            )
        else:
            click.echo(f"drive {result['drive']} is being drained: {result['chains_to_go']} chains to go")
            say_what_waits(result)
    _end(
        pool,
        result,
        wait,
        as_json,
        f"{'filling' if cancel else 'draining'} drive {result['drive']}",
        result["drive"],
        "" if cancel else f"nvpool drive drain {pool} {result['drive']} --cancel",
    )


@drive.command(
    epilog="""\b
examples:
  nvpool drive remove /srv/pool 2
  nvpool drive remove /srv/pool 3 --lost --wait    broken: its chunks are copied from other replicas
"""
)
@pool_argument
@drive_argument
@click.option(
    "--lost", is_flag=True, help="The drive is broken or gone for good: copy its chunks from other replicas."
)
@click.option(
    "--give-up",
    is_flag=True,
    help="With --lost: give up chunks that are on no other drive. Reading these parts of "
    "files fails until they are written again.",
)
@wait_option
@json_option
def remove(pool: str, drive: str, lost: bool, give_up: bool, wait: bool, as_json: bool) -> None:
    """Take a drive out of the pool for ever.

    Refused while data is on it; with --lost, refused if chunks are on no other drive. The files on the drive stay there.
    """
    from nvpool.cli.pool_connection import change

    result = asyncio.run(
        change(pool, "drive-remove", {"drive": drive_name(drive), "lost": lost, "give_up": give_up})
    )
    if not as_json:
        click.echo(f"drive {result['drive']} is {result['state']}")
        if give_up and result["chains"]:
            say(
                f"note: {result['chains']} chains are reset to empty when the last access token for this drive has expired "
                f"(grant_s, two minutes at most by default); until then writes to these chains wait"
            )
        say(
            f"note: the pool's data stays at {result['path']} of node {result['node']}; remove it when it is no longer needed"
        )
    _end(pool, result, wait, as_json, f"replacing what drive {result['drive']} held")


@drive.command(
    epilog="""\b
examples:
  nvpool drive replace /srv/pool 2 /mnt/nvme7 --wait
  nvpool drive replace /srv/pool 2 /dev/nvme7n1 --lost
"""
)
@pool_argument
@drive_argument
@click.argument("path", type=click.Path(exists=True))
@click.option(
    "--size",
    type=ByteSize(),
    default=0,
    help="How much of the new drive to use; see nvpool drive add --help.",
)
@click.option("--force", is_flag=True, help="Use a block device that is not empty; its data is lost.")
@click.option("--lost", is_flag=True, help="The old drive is broken: copy its chunks from other replicas.")
@wait_option
@json_option
def replace(
    pool: str, drive: str, path: str, size: int, force: bool, lost: bool, wait: bool, as_json: bool
) -> None:
    """Replace a drive by the one at PATH. The old drive leaves the pool when it is empty. May be repeated."""
    from nvpool.cli.pool_connection import change

    result = asyncio.run(
        change(
            pool,
            "drive-replace",
            {
                "drive": drive_name(drive),
                "path": os.path.abspath(path),
                "capacity_bytes": size,
                "force": force,
                "lost": lost,
            },
        )
    )
    if not as_json:
        click.echo(
            f"drive {result['drive']} at {result['path']} takes the place of drive {result['replaces']}"
        )
    _end(pool, result, wait, as_json, f"moving drive {result['replaces']}")
