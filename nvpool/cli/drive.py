"""`nvpool drive ls|add`."""

from __future__ import annotations

import asyncio
import os

import click

from nvpool.base.units import format_bytes, parse_bytes
from nvpool.cli.render import json_option, pool_argument, print_json, print_table, say


class Size(click.ParamType):
    """Bytes as people write them."""

    name = "size"

    def convert(self, value, parameter, context):
        if isinstance(value, int):
            return value
        try:
            return parse_bytes(value)
        except ValueError as error:
            self.fail(str(error), parameter, context)


@click.group(epilog="""\b
examples:
  nvpool drive ls /srv/pool
  nvpool drive add /srv/pool /mnt/nvme2
""")
def drive() -> None:
    """List drives and add them to a running pool."""


@drive.command(epilog="example: nvpool drive ls /srv/pool")
@pool_argument
@json_option
def ls(pool: str, as_json: bool) -> None:
    """List the drives of a pool."""
    from nvpool.cli.reach import status_of
    drives = asyncio.run(status_of(pool))["drives"]
    if as_json:
        print_json(drives)
        return
    print_table(("drive", "target", "state", "in use", "used", "capacity", "path"), [
        (one["drive"], one["target"], one["state"], one["in_use"],
         format_bytes(one["used_bytes"]) if one["used_bytes"] is not None else None, format_bytes(one["capacity_bytes"]),
         one["path"]) for one in drives])


@drive.command(epilog="""\b
examples:
  nvpool drive add /srv/pool /mnt/nvme2
  nvpool drive add /srv/pool /dev/nvme3n1
""")
@pool_argument
@click.argument("path", type=click.Path(exists=True))
@click.option("--size", type=Size(), default=0, help="How much of it may be used, like 500G; default: all of a block device, "
                                                     "nine tenths of what is free in a directory.")
@click.option("--force", is_flag=True, help="Take a block device although something is on it, which is lost.")
@json_option
def add(pool: str, path: str, size: int, force: bool, as_json: bool) -> None:
    """Add the drive at PATH, a directory or a block device, to a running pool.

    Its target is made and its process started at once. The chains of chunks stay where they are: in this version, which has no
    rebalancing yet, the new drive stays empty and adds no capacity. It is used as soon as rebalancing moves chains onto it.
    """
    from nvpool.cli.reach import change
    result = asyncio.run(change(pool, "drive-add", {"path": os.path.abspath(path), "capacity_bytes": size, "force": force}))
    if as_json:
        print_json(result)
    else:
        click.echo(f"drive {result['drive']} added: target {result['target']}, {format_bytes(result['capacity_bytes'])} at "
                   f"{result['path']}")
        say(f"note: {result['note']}")
