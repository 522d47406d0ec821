"""`nvpool version`."""

from __future__ import annotations

import platform

import click

from nvpool.base.version import VERSION
from nvpool.cli.render import json_option, print_json


@click.command(epilog="example: nvpool version --json")
@json_option
def version(as_json: bool) -> None:
    """Print the version."""
    if as_json:
        print_json({"nvpool": VERSION, "pool_format": 1, "python": platform.python_version(),
                    "kernel": platform.release()})
    else:
        click.echo(f"nvpool {VERSION}")
