"""`nvpool load POOL FILE`."""

from __future__ import annotations

import click

from nvpool.cli.dump import move_records
from nvpool.cli.render import json_option, pool_argument


@click.command(epilog="""
The pool has to be empty, with the settings of the one that was dumped; the file is checked as a whole first. Contents are not
in a dump: files are there with their names, sizes and attributes, and read as far as the stores still have their chunks.

example: nvpool load /srv/newpool /backup/pool-metadata.dump
""")
@pool_argument
@click.argument("path", metavar="FILE", type=click.Path(exists=True, dir_okay=False))
@json_option
def load(pool: str, path: str, as_json: bool) -> None:
    """Load dumped metadata into an empty pool."""
    from nvpool.sdk.dumpfile import load
    move_records(pool, path, "load", load, as_json)
