"""The commands `nvpool encryption`: create and replace the pool key of encrypted volumes."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

import click

from nvpool.cli.commands.volume import carry_out
from nvpool.cli.output import json_option, pool_argument, print_json, print_table
from nvpool.core.clock import SYSTEM_CLOCK
from nvpool.core.errors import AlreadyExists, from_os_error
from nvpool.security.volume_keys import POOL_KEY_BYTES, identity_of

if TYPE_CHECKING:
    from nvpool.sdk.volumes import AsyncVolumes, Volume


@click.group(
    epilog="""\b
Each encrypted volume has its own key, which is stored encrypted with the pool key. The pool key is stored nowhere in the
pool: each node reads it from the file that node.toml names. Without the pool key no encrypted volume can be read again, so
keep a copy elsewhere.

\b
First use, on each node of the pool:
  nvpool encryption key /etc/nvpool/pool.key          (on one node; copy the file to the others, over a safe channel)
  in node.toml:  [encryption]
                 key_file = "/etc/nvpool/pool.key"
  restart the daemons of the node, then: nvpool volume create POOL NAME --encrypt

\b
Change the pool key, without rewriting data:
  nvpool encryption key /etc/nvpool/pool.key --add    (on each node the same new first line)
  nvpool encryption rewrap POOL
  then take the old line out of the file on each node
"""
)
def encryption() -> None:
    """Create and replace the pool key, which protects encrypted volumes."""


@encryption.command(
    epilog="""\b
--json prints {"file", "pool_key": identity of the new key, "keys": how many the file has now}

\b
examples:
  nvpool encryption key /etc/nvpool/pool.key
  nvpool encryption key /etc/nvpool/pool.key --add
"""
)
@click.argument("file", type=click.Path(dir_okay=False, path_type=Path))
@click.option(
    "--add",
    is_flag=True,
    help="Put a new key before those in FILE, which are kept for the volumes that they protect.",
)
@json_option
def key(file: Path, add: bool, as_json: bool) -> None:
    """Create a pool key in FILE, which only root may read. An existing FILE is left as it is, except with --add."""
    new = SYSTEM_CLOCK.secret(POOL_KEY_BYTES)
    try:
        before = file.read_text() if add else ""
        if not add and file.exists():
            raise AlreadyExists(
                f"{file} is there already, and was left as it is",
                remedy="--add puts a new key in front of those in it",
            )
        made = file.with_name(f".{file.name}.new")
        made.unlink(missing_ok=True)
        with open(os.open(made, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600), "w") as out:
            out.write(f"{new.hex()}\n{before}")
            out.flush()
            os.fsync(out.fileno())
        os.rename(made, file)
    except OSError as error:
        raise from_os_error(error, f"write {file}") from None
    keys = 1 + sum(1 for line in before.splitlines() if line.partition("#")[0].strip())
    if as_json:
        print_json({"file": str(file), "pool_key": identity_of(new).hex(), "keys": keys})
        return
    click.echo(
        f"pool key {identity_of(new).hex()} made in {file}; keep a copy of the file away from the pool: without it "
        f"encrypted volumes cannot be read"
    )


@encryption.command(
    epilog="""\b
--json prints a list of {"name", "pool_key"}

\b
example: nvpool encryption show /srv/pool
"""
)
@pool_argument
@json_option
def show(pool: str, as_json: bool) -> None:
    """List the encrypted volumes, each with the identity of the pool key that protects it."""
    found = [
        one for one in carry_out(pool, "encryption show", lambda volumes: volumes.list()) if one.encrypted
    ]
    if as_json:
        print_json([{"name": one.name, "pool_key": one.pool_key} for one in found])
    elif found:
        print_table(("volume", "pool key"), [(one.name, one.pool_key) for one in found])
    else:
        click.echo("no volume is encrypted")


@encryption.command(
    epilog="""\b
--json prints a list of {"name", "pool_key"}, as it is now

\b
examples:
  nvpool encryption rewrap /srv/pool
  nvpool encryption rewrap /srv/pool secret
"""
)
@pool_argument
@click.argument("names", nargs=-1)
@json_option
def rewrap(pool: str, names: tuple[str, ...], as_json: bool) -> None:
    """Encrypt the keys of volumes with the first pool key of their shard's node: of all volumes, or of NAMES.

    Data is not rewritten. Volumes that this pool key protects already stay as they are.
    """

    async def run(volumes: AsyncVolumes) -> list[Volume]:
        wanted = names or [one.name for one in await volumes.list() if one.encrypted]
        return [await volumes.rewrap(name) for name in wanted]

    done = carry_out(pool, "encryption rewrap", run)
    if as_json:
        print_json([{"name": one.name, "pool_key": one.pool_key} for one in done])
    elif done:
        print_table(("volume", "pool key"), [(one.name, one.pool_key or "not encrypted") for one in done])
    else:
        click.echo("no volume is encrypted")
