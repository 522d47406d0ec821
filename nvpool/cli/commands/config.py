"""The commands `nvpool config`: show, print and check the configuration of a node."""

from __future__ import annotations

import os
from pathlib import Path

import click

from nvpool.cli.output import json_option, print_json, print_table
from nvpool.core import config as configuration
from nvpool.core.errors import BadConfiguration
from nvpool.host.pool_directory import PoolDirectory


@click.group(
    epilog="""\b
examples:
  nvpool config sample > node.toml
  nvpool config check node.toml
  nvpool config show /srv/pool
"""
)
def config() -> None:
    """Show, check and explain the configuration of a node (node.toml in the pool directory)."""


def _file(path: str) -> Path:
    """Return the configuration file that `path` names: a file, a pool directory or a mount point.

    BadConfiguration: `path` does not exist. NotFound: the directory is no pool directory.
    """
    from nvpool.cli.pool_connection import checked
    from nvpool.cli.pool_suggestions import pool_behind, remedy_for

    if not os.path.lexists(path):
        raise BadConfiguration(
            f"{path} does not exist", remedy=f"name a configuration file, or a pool; {remedy_for(path)}"
        )
    directory = PoolDirectory(pool_behind(path))
    if not directory.path.is_dir():
        return Path(path)
    return directory.node_toml if directory.node_toml.exists() else checked(directory.path).node_toml


@config.command(epilog="example: nvpool config show /srv/pool --json")
@click.argument("path", metavar="DIR|FILE", envvar="NVPOOL_POOL")
@json_option
def show(path: str, as_json: bool) -> None:
    """Show every setting of a node, including defaults."""
    values = configuration.as_dict(configuration.load(_file(path)))
    if as_json:
        print_json(values)
    else:
        print_table(
            ("setting", "value"),
            [(f"{section}.{key}", value) for section, keys in values.items() for key, value in keys.items()],
        )


@config.command(epilog="example: nvpool config sample > node.toml")
@json_option
def sample(as_json: bool) -> None:
    """Print a sample configuration: every setting with its meaning and default."""
    if as_json:
        print_json(configuration.as_dict(configuration.Config()))
    else:
        click.echo(configuration.sample(), nl=False)


@config.command(
    epilog="""\b
examples:
  nvpool config check /srv/pool
  nvpool config check node.toml && cp node.toml /srv/pool/
"""
)
@click.argument("path", metavar="DIR|FILE", envvar="NVPOOL_POOL")
@json_option
def check(path: str, as_json: bool) -> None:
    """Check a configuration. Prints all errors together, each with line and reason (exit code 2)."""
    file = _file(path)
    configuration.load(file)
    if as_json:
        print_json({"file": str(file), "ok": True})
    else:
        click.echo(f"{file} is right")
