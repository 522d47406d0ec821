"""The command `nvpool version`: print the version."""

from __future__ import annotations

import platform

import click

from nvpool.cli.output import json_option, print_json
from nvpool.core.version import VERSION


@click.command(epilog="example: nvpool version --json")
@json_option
def version(as_json: bool) -> None:
    """Print the version."""
    if as_json:
        print_json(
            {
                "nvpool": VERSION,
                "pool_format": 1,
                "python": platform.python_version(),
                "kernel": platform.release(),
            }
        )
    else:
        click.echo(f"nvpool {VERSION}")
