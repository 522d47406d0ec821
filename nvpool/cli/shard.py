"""`nvpool shard ls|standbys`."""

from __future__ import annotations

import asyncio

import click

from nvpool.cli.render import json_option, pool_argument, print_json, print_table, say


@click.group(epilog="""\b
examples:
  nvpool shard ls /srv/nvpool
  nvpool shard standbys /srv/nvpool 1 2
""")
def shard() -> None:
    """List the metadata shards of a pool, and say how many standbys each shall have."""


@shard.command(epilog="""\b
--json prints one object for each shard: shard, term, partitions, standbys_wanted, members (member, node, drive, path, state:
primary, up, syncing; leaves: it is on its way out)

\b
example: nvpool shard ls /srv/nvpool
""")
@pool_argument
@json_option
def ls(pool: str, as_json: bool) -> None:
    """List the shards: where their primaries and standbys are."""
    from nvpool.cli.reach import status_of
    shards = asyncio.run(status_of(pool))["shards"]
    if as_json:
        print_json(shards)
        return
    print_table(("shard", "partitions", "member", "state", "node", "drive", "path"), [
        (one["shard"] if at == 0 else "", one["partitions"] if at == 0 else "", member["member"],
         member["state"] + (", leaves" if member["leaves"] else ""), member["node"], member["drive"], member["path"])
        for one in shards for at, member in enumerate(one["members"])])


@shard.command(epilog="""\b
examples:
  nvpool shard standbys /srv/nvpool 1 1     one standby: one member of two may be lost
  nvpool shard standbys /srv/nvpool 1 0     none
""")
@pool_argument
@click.argument("number", type=int, metavar="SHARD")
@click.argument("count", type=click.IntRange(0, 4), metavar="N")
@json_option
def standbys(pool: str, number: int, count: int, as_json: bool) -> None:
    """Have N standbys of a metadata shard: on other nodes first, on other racks first, each on a drive of its own.

    A new one is filled while the shard serves; one that is not wanted any more goes when all that stay have everything.
    Standbys move by themselves to where they are better placed: when a second node has a drive, when a node or a drive is
    drained or lost.
    """
    from nvpool.cli.reach import change
    done = asyncio.run(change(pool, "shard-standbys", {"shard": number, "count": count}))
    if as_json:
        print_json(done)
    else:
        click.echo(f"shard {number} shall have {count} standby{'' if count == 1 else 's'}")
        say(f"note: look with: nvpool shard ls {pool}")
