"""The command `nvpool dump`: write a snapshot of all metadata to a file."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, TypeVar

import click

from nvpool.cli.output import json_option, pool_argument, print_json

if TYPE_CHECKING:
    from nvpool.client.pool_client import Client

Moved = TypeVar("Moved")


@click.command(
    epilog="""
The format is in docs/internals/formats/dump.md. A dump contains names, attributes and layouts, but no file contents.

example: nvpool dump /srv/pool /backup/pool-metadata.dump
"""
)
@pool_argument
@click.argument("path", metavar="FILE", type=click.Path(dir_okay=False))
@json_option
def dump(pool: str, path: str, as_json: bool) -> None:
    """Write a consistent snapshot of all metadata to FILE, while the pool serves."""
    from nvpool.sdk.dump import dump

    records = move_records(pool, path, "dump", dump, as_json)
    if as_json:
        print_json({"file": path, "records": records})
    else:
        click.echo(f"{records:,} records: {path}; contents of files are not in it")


def move_records(
    pool: str,
    path: str,
    verb: str,
    move: Callable[[Client, str, Callable[[int], None]], Awaitable[Moved]],
    as_json: bool,
) -> Moved:
    """Run `move` in a client session, show its progress, and return its result."""
    from nvpool.cli.pool_path import session
    from nvpool.cli.progress import ProgressSample, shown

    done = [0]

    async def run() -> Moved:
        async with session(pool, verb) as client:
            return await shown(
                verb,
                move(client, path, lambda count: done.__setitem__(0, count)),
                lambda: ProgressSample(done[0], None, "records", in_bytes=False),
                quiet=as_json,
            )

    return asyncio.run(run())
