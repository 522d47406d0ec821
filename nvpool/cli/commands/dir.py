"""The commands `nvpool dir`: show and set the layout of new files in a directory."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import click

from nvpool.cli.output import ByteSize, json_option, print_json, say
from nvpool.cli.pool_path import PlaceType, PoolPath
from nvpool.core.units import format_bytes

if TYPE_CHECKING:
    from nvpool.client.pool_client import Client
    from nvpool.rpc.messages.meta_messages import Attr

WHOLE_S = 60.0
"""Time limit for the chains of a new replica count to be complete; there is nothing to copy."""


@click.group(
    name="dir",
    epilog="""\b
examples:
  nvpool dir show /srv/pool:/scratch
  nvpool dir set /srv/pool:/scratch --replicas 1
  nvpool dir set /srv/pool:/models --replicas 3 --chunk-size 4M
  nvpool dir set /srv/pool:/samples --striped
""",
)
def directory() -> None:
    """Show and set the number of replicas and the chunk size of new files in a directory, and how its names are spread."""


place_argument = click.argument("place", metavar="POOL:/path", type=PlaceType())


@directory.command(
    epilog="""\b
--json prints one object: path, inode, replicas, chunk_bytes, striped, wide (deprecated: the old name of striped)

\b
example: nvpool dir show /srv/pool:/models
"""
)
@place_argument
@json_option
def show(place: PoolPath, as_json: bool) -> None:
    """Show the replicas and chunk size of new files and directories in a directory."""
    _show(place, asyncio.run(_shown(place)), as_json)


async def _shown(place: PoolPath) -> dict[str, Any]:
    from nvpool.cli.pool_path import session

    async with session(place.pool, "dir show") as client:
        return _described(place, await _directory_at(client, place))


async def _directory_at(client: Client, place: PoolPath) -> Attr:
    import stat

    from nvpool.cli.pool_path import find
    from nvpool.core.errors import NotADirectory

    attr = await find(client.vfs, place.path)
    if not stat.S_ISDIR(attr.mode):
        raise NotADirectory(f"{place} is not a directory; nvpool file info {place} shows what a file has")
    return attr


def _described(place: PoolPath, attr: Attr) -> dict[str, Any]:
    import os

    from nvpool.client.state.metadata_cache import WIDE_FLAG

    return {
        "path": os.fsdecode(place.path),
        "inode": attr.inode,
        "replicas": attr.table,
        "chunk_bytes": 1 << attr.chunk_bits,
        "striped": bool(attr.flags & WIDE_FLAG),
    }


def _show(place: PoolPath, found: dict[str, Any], as_json: bool) -> None:
    if as_json:
        print_json(found)
    else:
        click.echo(
            f"{place}: new files have {found['replicas']} replica{'' if found['replicas'] == 1 else 's'}, in chunks of "
            f"{format_bytes(found['chunk_bytes'])}{'; it is striped' if found['striped'] else ''}"
        )


@directory.command(
    "set",
    epilog="""\b
--json prints what `nvpool dir show --json` does

\b
examples:
  nvpool dir set /srv/pool:/scratch --replicas 1
  nvpool dir set /srv/pool:/samples --chunk-size 256K
""",
)
@place_argument
@click.option(
    "--replicas",
    type=click.IntRange(1, 3),
    help="Copies of each chunk, on as many nodes (drives, in a pool of one node).",
)
@click.option("--chunk-size", type=ByteSize(), default=0, help="A power of two from 64K to 16M.")
@click.option(
    "--striped",
    is_flag=True,
    help="Spread the names in it over all metadata shards, for very many names. The "
    "directory must be empty, and stays striped; its subdirectories are not.",
)
@click.option("--wide", is_flag=True, hidden=True, help="Old name of --striped, accepted for one release.")
@json_option
def set_(
    place: PoolPath, replicas: int | None, chunk_size: int, striped: bool, wide: bool, as_json: bool
) -> None:
    """Set the replicas and chunk size of new files in a directory; new subdirectories inherit them.

    Existing files keep their layout: copy a file to give it the new one. If the pool has no chains with this number of
    replicas yet, run the command on a node of the pool, because it changes the pool.
    """
    if wide:
        say("--wide is now named --striped; the next release refuses the old name")
        striped = True
    if not replicas and not chunk_size and not striped:
        raise click.UsageError("give --replicas, --chunk-size or --striped")
    _show(place, asyncio.run(set_layout(place, replicas or 0, chunk_size, striped)), as_json)


async def set_layout(place: PoolPath, replicas: int, chunk_bytes: int, striped: bool) -> dict[str, Any]:
    """Set the layout of new files below a directory; return the layout."""
    from nvpool.cli.pool_path import session
    from nvpool.client.state.vfs_types import Caller
    from nvpool.poolmap.file_layout import layout_of

    if chunk_bytes:
        layout_of(chunk_bytes)
    async with session(place.pool, "dir set") as client:
        attr = await _directory_at(client, place)
        if replicas:
            await have_chains(client, place.pool, replicas)
        if striped:
            attr = await client.vfs.spread(attr.inode, Caller(0, 0))
        if replicas or chunk_bytes:
            attr = await client.vfs.hand_down(
                attr.inode, Caller(0, 0), replicas=replicas, chunk_bytes=chunk_bytes
            )
        return _described(place, attr)


async def have_chains(client: Client, pool: str, replicas: int) -> None:
    """Ensure that the pool has chains of `replicas` replicas; if it has none, request that change."""
    from nvpool.cli.pool_connection import change

    if replicas not in client.pool_map.table_by_id:
        await change(pool, "replicas", {"replicas": replicas})
    await _chains_of(client, replicas)


async def _chains_of(client: Client, replicas: int) -> None:
    """Wait until this client knows the chains and all have their targets; after WHOLE_S only print a note."""
    try:
        async with asyncio.timeout(WHOLE_S):
            while replicas not in (known := client.pool_map.table_by_id) or any(
                len(chain.targets) < replicas for chain in known[replicas].chains
            ):
                if not await client.vfs.view.refresh():
                    await asyncio.sleep(0.1)
    except TimeoutError:
        say(f"note: not all chains of {replicas} replicas have all their copies yet; see: nvpool status")
