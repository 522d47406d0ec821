"""The commands `nvpool shard`: list, add and remove metadata shards, and set their standbys."""

from __future__ import annotations

import asyncio
from typing import Any

import click

from nvpool.cli.commands.drive import PAUSED, note_on_interrupt, wait_option
from nvpool.cli.output import completed, json_option, pool_argument, print_json, print_table, say

shard_argument = click.argument("shard", metavar="SHARD", type=click.IntRange(1))


@click.group(
    epilog="""\b
A shard is a process that serves the names and attributes of a part of the directories; more shards use more cores.

\b
examples:
  nvpool shard ls /srv/pool
  nvpool shard add /srv/pool --wait
  nvpool shard remove /srv/pool 2 --wait
  nvpool shard standbys /srv/pool 1 2
"""
)
def shard() -> None:
    """List, add and remove the metadata shards of a running pool, and set their number of standbys."""


@shard.command(
    epilog="""\b
--json prints one object for each shard: shard, node, state (of its primary's process), desired_state (empty, leaving), wish
(deprecated: the old name of desired_state), partitions (of 4096, that it holds), partitions_to_come, partitions_to_go,
inodes, sessions, term, standbys_wanted, members ([{member, node, drive, path, state: primary, up or syncing, leaves: it is on
its way out}])

\b
example: nvpool shard ls /srv/pool
"""
)
@pool_argument
@json_option
def ls(pool: str, as_json: bool) -> None:
    """List the metadata shards of a pool: state, share of the name space, and partitions that move to and from them."""
    from nvpool.cli.pool_connection import status_of

    shards = asyncio.run(status_of(pool))["shards"]
    if as_json:
        print_json(shards)
        return
    print_table(
        ("shard", "state", "partitions", "moving", "inodes", "member", "is", "node", "drive", "path"),
        [
            (
                *(
                    (
                        one["shard"],
                        ", ".join(word for word in (one["state"], one["desired_state"]) if word),
                        one["partitions"],
                        moving_of(one),
                        f"{one['inodes']:,}" if one["inodes"] is not None else None,
                    )
                    if at == 0
                    else ("",) * 5
                ),
                member["member"],
                member["state"] + (", leaves" if member["leaves"] else ""),
                member["node"],
                member["drive"],
                member["path"],
            )
            for one in shards
            for at, member in enumerate(one["members"])
        ],
    )


def moving_of(one: dict[str, Any]) -> str:
    """Return the partitions that move to and from a shard, as text."""
    return ", ".join(
        text
        for count, text in (
            (one["partitions_to_come"], f"{one['partitions_to_come']} to come"),
            (one["partitions_to_go"], f"{one['partitions_to_go']} to go"),
        )
        if count
    )


async def wait_until_moved(
    pool: str, title: str, quiet: bool, gone: int | None, come: int | None = None
) -> list[dict[str, Any]]:
    """Wait until no partition moves, shard `gone` is removed and shard `come` serves; return the shards.

    The pool may be unavailable for a while; any other error ends the wait.
    """
    from nvpool.cli.pool_connection import statuses
    from nvpool.cli.progress import ProgressSample, shown

    shards: list[dict[str, Any]] | None = None
    paused = False
    most = 0

    def left() -> int:
        return sum(one["partitions_to_go"] for one in shards or ())

    async def watch() -> list[dict[str, Any]]:  # type: ignore[return]  # statuses() does not end by itself
        nonlocal shards, paused, most
        async for seen in statuses(pool):
            shards, paused = seen["shards"], seen["chains"]["paused"]
            most = max(most, left())
            states = {one["shard"]: one["state"] for one in shards}
            if (
                not left()
                and gone not in states
                and (come is None or states.get(come, "serving") == "serving")
            ):
                return shards

    def look() -> ProgressSample:
        if shards is None:
            return ProgressSample(0, None, in_bytes=False)
        words = "clients are leaving it" if gone else "its node is to begin it"
        if left():
            words = f"{left()} partitions left" + (f", {completed(PAUSED)}" if paused else "")
        return ProgressSample(most - left(), most, words, in_bytes=False)

    return await shown(title, watch(), look, quiet=quiet)


def _end(
    pool: str,
    result: dict[str, Any],
    wait: bool,
    as_json: bool,
    title: str,
    gone: int | None = None,
    come: int | None = None,
) -> None:
    if wait:
        with note_on_interrupt(title, f"nvpool shard ls {pool}"):
            result["shards"] = asyncio.run(wait_until_moved(pool, title, as_json, gone, come))
        if not as_json:
            say(f"{title}: done")
    if as_json:
        print_json(result)


@shard.command(
    epilog="""\b
examples:
  nvpool shard add /srv/pool --wait
  nvpool shard add /srv/pool --node 2 --wait
  nvpool shard add /srv/pool --number 3 --wait     may be repeated: shard 3 is added once
"""
)
@pool_argument
@click.option(
    "--number",
    type=click.IntRange(1),
    help="Number of the new shard; default: the next free one. If that shard exists, nothing is added.",
)
@click.option(
    "--node", type=click.IntRange(1), help="Node of the shard; default: the node with the fewest shards."
)
@click.option(
    "--standbys",
    type=click.IntRange(0, 4),
    help="Further copies of its records, each on another drive. Default: as many as the other shards have.",
)
@wait_option
@json_option
def add(
    pool: str, number: int | None, node: int | None, standbys: int | None, wait: bool, as_json: bool
) -> None:
    """Add a metadata shard.

    Its process starts immediately. Then its share of the partitions moves to it from the other shards, while the pool is in
    use. `shard ls` shows the progress; `pool rebalance` pauses or limits the moving.
    """
    from nvpool.cli.pool_connection import change

    result = asyncio.run(change(pool, "shard-add", {"shard": number, "standbys": standbys, "node": node}))
    if not as_json:
        click.echo(
            f"shard {result['shard']} is {'to be made on' if result['state'] == 'wanted' else 'in the pool, on'} node "
            f"{result['node']}"
        )
        if not wait and result["partitions_to_move"]:
            say(
                f"note: {result['partitions_to_move']} partitions move to it now; look with: nvpool shard ls {pool}"
            )
    _end(pool, result, wait, as_json, f"filling shard {result['shard']}", come=result["shard"])


@shard.command(
    epilog="""\b
examples:
  nvpool shard remove /srv/pool 2 --wait
  nvpool shard remove /srv/pool 2 --cancel
"""
)
@pool_argument
@shard_argument
@click.option("--cancel", is_flag=True, help="Keep the shard, and give it its share again.")
@wait_option
@json_option
def remove(pool: str, shard: int, cancel: bool, wait: bool, as_json: bool) -> None:
    """Move all partitions of a shard to the others, while the pool is in use; then stop it and remove its files.

    Works also for the shard with the root directory. Refused for the last shard. May be repeated.
    """
    from nvpool.cli.pool_connection import change

    result = asyncio.run(change(pool, "shard-remove", {"shard": shard, "cancel": cancel}))
    if not as_json:
        words = {
            "removed": "has left the pool",
            "leaving": f"leaves the pool: {result['partitions_to_move']} partitions to move",
        }
        click.echo(f"shard {shard} {words.get(result['state'], 'stays in the pool')}")
    _end(
        pool,
        result,
        wait,
        as_json,
        f"{'filling' if cancel else 'emptying'} shard {shard}",
        None if cancel else shard,
    )


@shard.command(
    epilog="""\b
examples:
  nvpool shard standbys /srv/pool 1 1     one standby: one member of two may be lost
  nvpool shard standbys /srv/pool 1 0     none
"""
)
@pool_argument
@click.argument("number", type=int, metavar="SHARD")
@click.argument("count", type=click.IntRange(0, 4), metavar="N")
@json_option
def standbys(pool: str, number: int, count: int, as_json: bool) -> None:
    """Set the number of standbys of a metadata shard to N. They are placed on other racks, nodes and drives if possible.

    A new standby copies the records while the shard serves. A surplus standby is removed once the remaining ones have all
    records. Standbys move automatically to better places: when a second node has a drive, or when a node or drive is drained
    or lost.
    """
    from nvpool.cli.pool_connection import change

    done = asyncio.run(change(pool, "shard-standbys", {"shard": number, "count": count}))
    if as_json:
        print_json(done)
    else:
        click.echo(f"shard {number} shall have {count} standby{'' if count == 1 else 's'}")
        say(f"note: look with: nvpool shard ls {pool}")
