"""The commands `nvpool trash`: list, restore and purge removed files of a volume."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import click

from nvpool.cli.commands.volume import carry_out
from nvpool.cli.output import ago, json_option, pool_argument, print_json, print_table
from nvpool.core.clock import SYSTEM_CLOCK
from nvpool.core.units import format_bytes

if TYPE_CHECKING:
    from nvpool.sdk.volumes import TrashEntry


@click.group(
    epilog="""\b
examples:
  nvpool volume set /srv/pool home --trash 7d
  nvpool trash ls /srv/pool home
  nvpool trash restore /srv/pool home 4611686018427387912
"""
)
def trash() -> None:
    """List, restore or purge removed files of a volume with trash (nvpool volume set --trash).

    Files in the trash count towards the quota of the volume.
    """


volume_argument = click.argument("volume")


@trash.command(
    "ls",
    epilog="""\b
--json prints a list of {"inode", "path", "kind", "bytes", "removed_ns", "expires_ns"}

\b
example: nvpool trash ls /srv/pool home
""",
)
@pool_argument
@volume_argument
@json_option
def list_(pool: str, volume: str, as_json: bool) -> None:
    """List the trash of a volume, oldest first."""
    # The annotation is needed: in the class AsyncVolumes the name "list" stands for its method.
    found: list[TrashEntry] = carry_out(pool, "trash ls", lambda volumes: volumes.trash(volume))
    if as_json:
        print_json([dataclasses.asdict(entry) for entry in found])
        return
    now_ms = SYSTEM_CLOCK.wall_ns() // 1_000_000
    print_table(
        ("inode", "removed", "goes in", "kind", "bytes", "path"),
        [
            (
                entry.inode,
                f"{ago(entry.removed_ns // 1_000_000, now_ms)} ago",
                ago(now_ms, entry.expires_ns // 1_000_000),
                entry.kind,
                format_bytes(entry.bytes),
                entry.path,
            )
            for entry in found
        ],
    )


@trash.command(
    epilog="""\b
example: nvpool trash restore /srv/pool home 4611686018427387912 --to /volumes/home/again.txt
"""
)
@pool_argument
@volume_argument
@click.argument("inode", type=click.IntRange(1))
@click.option(
    "--to",
    help="Destination, as a path in the pool; default: the old path, with its directory if that is missing.",
)
@json_option
def restore(pool: str, volume: str, inode: int, to: str | None, as_json: bool) -> None:
    """Restore a file or directory. INODE is as `nvpool trash ls` shows it. Nothing is overwritten."""
    carry_out(pool, "trash restore", lambda volumes: volumes.restore(volume, inode, to))
    if as_json:
        print_json({"inode": inode, "restored": True})
    else:
        click.echo(f"inode {inode} is back")


@trash.command(
    epilog="""\b
--json prints {"purged": number}

\b
examples:
  nvpool trash purge /srv/pool home 4611686018427387912
  nvpool trash purge /srv/pool home --all
"""
)
@pool_argument
@volume_argument
@click.argument("inode", type=click.IntRange(1), required=False)
@click.option("--all", "all_", is_flag=True, help="Purge all entries.")
@json_option
def purge(pool: str, volume: str, inode: int | None, all_: bool, as_json: bool) -> None:
    """Purge one entry of the trash, or all. Purged files cannot be restored."""
    if (inode is None) != all_:
        raise click.UsageError("say an INODE, or --all")
    count = carry_out(pool, "trash purge", lambda volumes: volumes.purge(volume, inode or 0))
    if as_json:
        print_json({"purged": count})
    else:
        click.echo(f"{count} removed for good")
