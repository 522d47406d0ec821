"""The command `nvpool export`: copy a tree from a pool to a local directory."""

from __future__ import annotations

from typing import Any

import click

from nvpool.cli.commands.import_tree import exclude_option, parallel_option, transfer, verify_option
from nvpool.cli.output import json_option
from nvpool.cli.pool_path import PlaceType, PoolPath


@click.command(
    "export",
    epilog="""
Files that exist already with the size and modification time of their source are skipped, so after an interruption the same
command continues.

exit codes: 0 all files are copied; 1 some files failed (they are named); 3 the pool did not answer: repeat later

\b
examples:
  nvpool export /srv/pool:/imagenet /data/imagenet
  nvpool export 10.0.0.1:17512:/models/m.safetensors . --json
""",
)
@click.argument("place", metavar="POOL:/path", type=PlaceType())
@click.argument("destination", metavar="DST", type=click.Path())
@parallel_option
@verify_option
@exclude_option
@json_option
def export_tree(place: PoolPath, destination: str, as_json: bool, **options: Any) -> int:
    """Copy a tree or file of a pool to the local path DST.

    The contents of the directory /path become the contents of DST, which is created if it is missing. Preserves the same
    attributes as `nvpool import`.
    """
    from nvpool.sdk.transfer.export_tree import export_tree

    return transfer(
        "export",
        place,
        as_json,
        options,
        lambda vfs, **more: export_tree(vfs, place.path, destination, **more),
    )
