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


@click.group(epilog="""\b
examples:
  nvpool volume set /srv/pool home --trash 7d
  nvpool trash ls /srv/pool home
  nvpool trash restore /srv/pool home 4611686018427387912
""")
def trash() -> None:
    """See what was removed in a volume whose trash keeps it (nvpool volume set --trash), put it back, or remove it for good.

    What is in the trash counts in the volume's quota.
    """


volume_argument = click.argument("volume")


@trash.command("ls", epilog="""\b
--json prints a list of {"inode", "path", "kind", "bytes", "removed_ns", "expires_ns"}

\b
example: nvpool trash ls /srv/pool home
""")
@pool_argument
@volume_argument
@json_option
def list_(pool: str, volume: str, as_json: bool) -> None:
    """List what is in the trash of a volume, the oldest first."""
    # The annotation is needed: in the class AsyncVolumes the name "list" stands for its method.
    found: list[TrashEntry] = carry_out(pool, "trash ls", lambda volumes: volumes.trash(volume))
    if as_json:
        print_json([dataclasses.asdict(entry) for entry in found])
        return
    now_ms = SYSTEM_CLOCK.wall_ns() // 1_000_000
    print_table(("inode", "removed", "goes in", "kind", "bytes", "path"),
                [(entry.inode, f"{ago(entry.removed_ns // 1_000_000, now_ms)} ago", ago(now_ms, entry.expires_ns // 1_000_000),
                  entry.kind, format_bytes(entry.bytes), entry.path) for entry in found])


@trash.command(epilog="""\b
example: nvpool trash restore /srv/pool home 4611686018427387912 --to /volumes/home/again.txt
""")
@pool_argument
@volume_argument
@click.argument("inode", type=click.IntRange(1))
@click.option("--to", help="Where to, as a path in the pool; otherwise where it was, with its directory if need be.")
@json_option
def restore(pool: str, volume: str, inode: int, to: str | None, as_json: bool) -> None:
    """Put something back. INODE is what `nvpool trash ls` shows. A name that is taken by now stays as it is."""
    carry_out(pool, "trash restore", lambda volumes: volumes.restore(volume, inode, to))
    if as_json:
        print_json({"inode": inode, "restored": True})
    else:
        click.echo(f"inode {inode} is back")


@trash.command(epilog="""\b
--json prints {"purged": number}

\b
examples:
  nvpool trash purge /srv/pool home 4611686018427387912
  nvpool trash purge /srv/pool home --all
""")
@pool_argument
@volume_argument
@click.argument("inode", type=click.IntRange(1), required=False)
@click.option("--all", "all_", is_flag=True, help="All that is in it.")
@json_option
def purge(pool: str, volume: str, inode: int | None, all_: bool, as_json: bool) -> None:
    """Remove what is in the trash for good, one entry or all."""
    if (inode is None) != all_:
        raise click.UsageError("say an INODE, or --all")
    count = carry_out(pool, "trash purge", lambda volumes: volumes.purge(volume, inode or 0))
    if as_json:
        print_json({"purged": count})
    else:
        click.echo(f"{count} removed for good")
