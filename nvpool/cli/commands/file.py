"""The command `nvpool file info`: show the inode, layout, locks and chunks of a file."""

from __future__ import annotations

import asyncio
from typing import Any

import click

from nvpool.cli.output import json_option, print_json, print_table, say
from nvpool.cli.pool_path import PlaceType, PoolPath

ROWS_MAX = 64
"""Rows that the table shows; --json has all."""


@click.group(epilog="example: nvpool file info /srv/pool:/models/m.safetensors")
def file() -> None:
    """Show where the data of a file is stored."""


@file.command(
    epilog="""
--json prints one object: inode, kind, mode, uid, gid, size, links, partition, shard, map_epoch; of a file also chunk_bytes,
chain_table, cut, allocated_bytes, locks: kind (fcntl, flock), mode (shared, exclusive), first and last byte (null: whatever
the size becomes), client (empty: it has vanished), pid there, waits; and chunks: index, offset, chain, chain_targets, copies
(target, version, allocated_bytes, extents, cut, end, misplaced).

\b
examples:
  nvpool file info /srv/pool:/models/m.safetensors
  nvpool file info 10.0.0.1:17512:/models/m.safetensors --json | jq '.chunks[].copies[].target'
"""
)
@click.argument("place", metavar="POOL:/path", type=PlaceType())
@json_option
def info(place: PoolPath, as_json: bool) -> None:
    """Show inode, layout, locks and chunks of a file, and the targets that store the chunks."""
    found = asyncio.run(_describe(place))
    if as_json:
        print_json(found)
        return
    _show(place, found)


async def _describe(place: PoolPath) -> dict[str, Any]:
    from nvpool.cli.pool_path import find, session
    from nvpool.sdk.chunk_locations import describe

    async with session(place.pool, "file info") as client:
        return await describe(client, await find(client.vfs, place.path))


def _size(found: dict[str, Any]) -> str:
    return f"{found['size']:,} entries" if found["kind"] == "directory" else f"size {found['size']:,} bytes"


def _show(place: PoolPath, found: dict[str, Any]) -> None:
    from nvpool.core.units import format_bytes

    click.echo(
        f"{place}: {found['kind']}, {found['mode']}, owner {found['uid']}:{found['gid']}, links {found['links']}"
    )
    click.echo(
        f"inode {found['inode']} (partition {found['partition']}, shard {found['shard']}), {_size(found)}"
    )
    if "chunks" not in found:
        return
    holes = found["chunks_max"] - len(found["chunks"])
    click.echo(
        f"{format_bytes(found['chunk_bytes'])} chunks, chain table {found['chain_table']}, cut {found['cut']}: "
        f"{len(found['chunks']):,} chunks{f' and {holes:,} holes' if holes > 0 else ''}, "
        f"{format_bytes(found['allocated_bytes'])} allocated"
    )
    for lock in found["locks"]:
        last = "the end" if lock["last"] is None else lock["last"]
        span = "" if lock["kind"] == "flock" else f", bytes {lock['first']} to {last}"
        click.echo(
            f"{'waited for' if lock['waits'] else 'locked'}: {lock['mode']} ({lock['kind']}{span}), "
            f"process {lock['pid']} of {lock['client'] or 'a client that has vanished'}"
        )
    click.echo()
    rows = [
        (
            chunk["index"],
            chunk["offset"],
            chunk["chain"],
            copy["target"],
            copy["version"],
            format_bytes(copy["allocated_bytes"]),
            copy["extents"],
            "misplaced" if copy["misplaced"] else "",
        )
        for chunk in found["chunks"]
        for copy in chunk["copies"]
    ]
    print_table(
        ("chunk", "offset", "chain", "target", "version", "allocated", "extents", ""), rows[:ROWS_MAX]
    )
    if len(rows) > ROWS_MAX:
        say(f"and {len(rows) - ROWS_MAX:,} more; --json lists them")
