"""The command `nvpool serve`: replace this process by the supervisor `nvpoold` of a pool directory."""

from __future__ import annotations

import os
import sys

import click


@click.command(epilog="""\b
examples:
  nvpool serve /srv/pool
  nvpool serve /srv/pool --log stderr        as a systemd service would
""")
@click.argument("directory", metavar="DIR", type=click.Path(file_okay=False))
@click.option("--log", type=click.Choice(["file", "stderr"]), help="Where to write the log; default: as node.toml says.")
def serve(directory: str, log: str | None) -> None:
    """Serve the part of a pool that is on this node, in the foreground.

    Starts one process per metadata shard and per drive and starts again what dies. Ends on Ctrl-C or SIGTERM, after the
    requests in work are finished; a second Ctrl-C ends at once. Two on one directory are refused.
    """
    from nvpool.cli.pool_connection import checked
    from nvpool.core.programs import Program, command
    checked(directory)
    arguments = command(Program.SUPERVISOR, directory, *(["--log", log] if log else []))
    sys.stdout.flush()
    os.execv(sys.executable, arguments)
