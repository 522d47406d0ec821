"""The command `nvpool serve`: replace this process by the supervisor `nvpoold` of a pool directory."""

from __future__ import annotations

import os
import sys

import click


@click.command(
    epilog="""\b
examples:
  nvpool serve /srv/pool
  nvpool serve /srv/pool --log stderr        as a systemd service does
"""
)
@click.argument("directory", metavar="DIR", type=click.Path(file_okay=False))
@click.option(
    "--log", type=click.Choice(["file", "stderr"]), help="Destination of the log; default: as node.toml says."
)
def serve(directory: str, log: str | None) -> None:
    """Run the daemons of this node in the foreground: they serve its part of the pool.

    Starts one process per metadata shard and per drive, and restarts a process that dies. On Ctrl-C or SIGTERM, finishes the
    requests in progress and stops; a second Ctrl-C stops immediately. A second supervisor of one directory is refused.
    """
    from nvpool.cli.pool_connection import checked
    from nvpool.core.programs import Program, command

    checked(directory)
    arguments = command(Program.SUPERVISOR, directory, *(["--log", log] if log else []))
    sys.stdout.flush()
    os.execv(sys.executable, arguments)
