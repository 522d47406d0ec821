"""The commands `nvpool pool`: create and destroy a pool, and control its rebalancing."""

from __future__ import annotations

import os
import sys
from typing import Any

import click
from msgspec.structs import replace

from nvpool.cli.commands.drive import note_on_interrupt, time_left, wait_option, wait_until_moved
from nvpool.cli.output import (
    ByteSize,
    CommandFunction,
    Number,
    completed,
    json_option,
    pool_argument,
    print_json,
    say,
)
from nvpool.core import config as configuration
from nvpool.core.errors import InUse, InvalidRequest, Refused
from nvpool.core.units import CHUNK_BYTES_DEFAULT, MIB, format_bytes

_LIMIT_MIB_MAX = MIB
"""1 TiB/s, more than any drive can write."""


@click.group(
    epilog="""\b
examples:
  nvpool pool create /srv/pool --drive /mnt/nvme0 --drive /dev/nvme1n1
  nvpool pool create /srv/pool --drive /mnt/nvme0 --drive /mnt/nvme1 --drive /mnt/nvme2 --replicas 2
  nvpool pool rebalance /srv/pool --limit 200
  nvpool pool destroy /srv/pool
"""
)
def pool() -> None:
    """Create, rebalance and destroy pools."""


def etcd_options(command: CommandFunction) -> CommandFunction:
    """Add the options --etcd… of commands that create a pool directory."""
    for name, metavar, text in (
        ("key", "FILE", "Key of that certificate."),
        ("cert", "FILE", "Client certificate (PEM) for this etcd."),
        ("ca", "FILE", "CA certificate (PEM) that signed the certificates of this etcd."),
        (
            "",
            "URL[,URL...]",
            "Store the pool map in your own etcd (3.4 or later, at "
            "https://HOST:PORT or http://), not in one that nvpool starts.",
        ),
    ):
        command = click.option(
            f"--etcd-{name}" if name else "--etcd",
            f"etcd_{name or 'urls'}",
            metavar=metavar,
            default=None,
            help=text,
        )(command)
    return command


def etcd_given(options: dict[str, str | None]) -> dict[str, str] | None:
    """Return the values of `etcd_options` as provision/external_etcd takes them; None without --etcd."""
    given = {name.removeprefix("etcd_"): value for name, value in options.items() if value}
    if given and "urls" not in given:
        raise InvalidRequest("--etcd-ca, --etcd-cert and --etcd-key go with --etcd")
    return {
        name: value if name == "urls" else os.path.abspath(value) for name, value in given.items()
    } or None


def drive_of(text: str) -> dict[str, Any]:
    """Parse PATH or PATH:SIZE. A text that is an existing path is a path, even with a colon."""
    path, colon, size = text.rpartition(":")
    if not colon or os.path.exists(text):
        return {"path": os.path.abspath(text), "capacity_bytes": 0}
    return {"path": os.path.abspath(path), "capacity_bytes": ByteSize().convert(size, None, None)}


@pool.command(
    epilog="""\b
examples:
  nvpool pool create /srv/pool --drive /mnt/nvme0 --drive /mnt/nvme1:500G
  nvpool pool create /srv/pool --drive /dev/nvme0n1 --name training
then: nvpool serve /srv/pool, and nvpool mount /srv/pool /mnt/pool
"""
)
@click.argument("directory", metavar="DIR", type=click.Path(file_okay=False))
@click.option(
    "--drive",
    "drives",
    multiple=True,
    required=True,
    metavar="PATH[:SIZE]",
    help="A directory on a drive, or an empty block device, and how much of it to use; may be repeated.",
)
@click.option("--name", default=None, help="Name of the pool; default: that of DIR.")
@click.option(
    "--chunk-size",
    type=ByteSize(),
    default=CHUNK_BYTES_DEFAULT,
    help="Chunk size of new files; fixed. [default: 1MiB]",
)
@click.option(
    "--replicas",
    type=click.IntRange(1, 3),
    default=1,
    show_default=True,
    help="Copies of each chunk, each on another drive (with several nodes: on another node); fixed. With 2, one "
    "drive may fail without loss of data; with 3, two.",
)
@click.option(
    "--standbys",
    type=click.IntRange(0, 4),
    default=0,
    show_default=True,
    help="Further copies of the metadata, each on another drive; one takes over when the primary fails.",
)
@click.option(
    "--shards",
    type=click.IntRange(1, 64),
    default=1,
    show_default=True,
    help="Number of metadata processes; each serves a part of the directories and can use one core.",
)
@click.option(
    "--config",
    "config_file",
    type=click.Path(exists=True, dir_okay=False),
    help="Configuration of this node; default: that of `nvpool config sample`.",
)
@click.option(
    "--host",
    help="Address at which the pool listens over TCP, with TLS, for other machines; default: network.host "
    "of the configuration. Without either, only this machine can use the pool, by unix sockets.",
)
@click.option(
    "--plain-text",
    is_flag=True,
    help="No TLS at that address: every host of the network gets all rights on the pool.",
)
@click.option("--force", is_flag=True, help="Use block devices that are not empty; their data is lost.")
@etcd_options
@json_option
def create(
    directory: str,
    drives: tuple[str, ...],
    name: str | None,
    chunk_size: int,
    replicas: int,
    standbys: int,
    shards: int,
    config_file: str | None,
    host: str | None,
    plain_text: bool,
    force: bool,
    as_json: bool,
    **etcd: str | None,
) -> None:
    """Create a pool of one node, with its directory at DIR.

    DIR contains the configuration, the metadata and the logs, so it should be on a fast drive. Each --drive becomes a target.
    After an interruption, run the same command again. Refused if DIR contains a pool or anything else.
    """
    from nvpool.cli.pool_lifecycle import make

    config = configuration.load(config_file) if config_file else configuration.Config()
    config = replace(
        config,
        network=replace(
            config.network,
            host=host or config.network.host,
            plain_text=plain_text or config.network.plain_text,
        ),
    )
    made = make(
        {
            "verb": "pool",
            "directory": os.path.abspath(directory),
            "name": name or name_of(directory),
            "drives": [drive_of(drive) for drive in drives],
            "chunk_bytes": chunk_size,
            "replicas": replicas,
            "standbys": standbys,
            "shards": shards,
            "config": configuration.sample(config),
            "force": force,
            "etcd": etcd_given(etcd),
        }
    )
    if as_json:
        print_json(made)
        return
    click.echo(f"pool {made['pool_id'][:8]} made in {made['directory']}")
    for drive in made["drives"]:
        click.echo(f"drive {drive['path']}: {format_bytes(drive['capacity_bytes'])}")
    say(f"start it with: nvpool serve {directory}")
    if made["join"]:
        from nvpool.cli.token_input import join_command

        say(
            f"once it serves, another machine joins it, within an hour, with: {join_command(made['join'], config)}"
        )


def name_of(directory: str) -> str:
    """Return a name for the pool: the last part of its path, without characters that names may not have."""
    last = "".join(
        c for c in os.path.basename(os.path.abspath(directory)) if c.isascii() and (c.isalnum() or c in "-_")
    )
    return last.strip("-_")[:63] or "pool"


@pool.command(epilog="example: nvpool pool destroy /srv/pool")
@click.argument("directory", metavar="DIR", type=click.Path(file_okay=False))
@click.option("--yes", is_flag=True, help="Do not ask for confirmation.")
@json_option
def destroy(directory: str, yes: bool, as_json: bool) -> None:
    """Stop a pool and destroy all data that it stores on this node.

    On the last node of the pool, this also removes the pool's keys from your own etcd, if it uses one. Refused while the pool
    is mounted here, or while another file system is mounted below DIR.
    """
    from nvpool.cli import pool_lifecycle
    from nvpool.cli.mount.control import mountpoints_of
    from nvpool.cli.pool_connection import checked

    where = checked(directory)
    pool_lifecycle.check_removable(where)
    if mounted := mountpoints_of(where):
        raise InUse(f"the pool is mounted at {', '.join(mounted)}; first: nvpool umount {mounted[0]}")
    pool_map = pool_lifecycle.read_map(where)
    if not yes:
        what = f"the pool {pool_map.name}" if pool_map else "the pool"
        _confirm(f"Destroy {what} in {where.path} and everything stored in it?")
    lock = pool_lifecycle.stop(where)
    done = pool_lifecycle.erase_stores(where, pool_map) if pool_map else []
    done += pool_lifecycle.forget(where, pool_map)
    pool_lifecycle.remove(where, lock)
    if as_json:
        print_json({"directory": str(where.path), "done": done})
    else:
        for line in [*done, f"removed {where.path}"]:
            click.echo(line)


def _confirm(question: str) -> None:
    """Ask for a confirmation. Refused if the answer is no; InvalidRequest if stdin has ended, as in a script."""
    click.echo(f"{question} [y/N]: ", nl=False, err=True)
    answer = sys.stdin.readline()
    if not answer:
        click.echo(err=True)
        raise InvalidRequest(
            "nothing was destroyed: no answer on stdin",
            remedy="use --yes to skip the question",
        )
    if answer.strip().lower() not in ("y", "yes"):
        raise Refused("nothing was destroyed")


@pool.command(
    epilog="""\b
examples:
  nvpool pool rebalance /srv/pool                        shows the progress, and changes nothing
  nvpool pool rebalance /srv/pool --start --wait
  nvpool pool rebalance /srv/pool --pause
  nvpool pool rebalance /srv/pool --resume --limit 200 --wait
"""
)
@pool_argument
@click.option("--status", "only_status", is_flag=True, help="Only show the progress, as without an option.")
@click.option(
    "--start", is_flag=True, help="Check the balance now, and move chunks if needed. May be repeated."
)
@click.option(
    "--pause/--resume",
    "pause",
    default=None,
    help="Stop or resume moving chains. Missing copies are made in any case.",
)
@click.option(
    "--limit",
    "limit_mib",
    type=Number(0, _LIMIT_MIB_MAX),
    metavar="MIB/S",
    help="Limit for each drive that is filled; 0: resync_bytes_s under [store] in its node's node.toml.",
)
@wait_option
@json_option
def rebalance(
    pool: str,
    only_status: bool,
    start: bool,
    pause: bool | None,
    limit_mib: float | None,
    wait: bool,
    as_json: bool,
) -> None:
    """Show, start, pause or limit rebalancing, which moves chunks until all drives are equally full.

    Rebalancing starts automatically when drives are added or removed. Without --start, --pause, --resume or --limit the
    command changes nothing.
    """
    import asyncio

    from nvpool.cli.pool_connection import change, status_of

    if only_status and (start or pause is not None or limit_mib is not None):
        raise click.UsageError(
            "--status changes nothing; leave it out, or --start, --pause, --resume and --limit"
        )
    if pause is not None or limit_mib is not None:
        wanted = {"pause": pause, "limit_bytes_s": None if limit_mib is None else int(limit_mib * MIB)}
        asyncio.run(change(pool, "rebalance", wanted))
    if start:
        asyncio.run(change(pool, "rebalance", {}))
    if wait:
        with note_on_interrupt(
            "moving chains", f"nvpool pool rebalance {pool} --status", f"nvpool pool rebalance {pool} --pause"
        ):
            asyncio.run(wait_until_moved(pool, "moving chains", as_json))
    chains = asyncio.run(status_of(pool))["chains"]
    if as_json:
        print_json(chains)
        return
    click.echo(chains_line(chains))
    if line := _moving_line(chains, is_resumed=pause is False):
        click.echo(line)


def _moving_line(chains: dict[str, Any], is_resumed: bool) -> str:
    """Return a line about moving, if moving is paused, limited or just resumed; else an empty one."""
    limit = f"limited to {format_bytes(chains['limit_bytes_s'])}/s a drive" if chains["limit_bytes_s"] else ""
    if is_resumed and not chains["paused"]:
        words = ["moving goes on", limit, "" if chains["to_copy"] else "nothing is to be moved now"]
        return ", ".join(word for word in words if word)
    words = [word for word in ("paused" if chains["paused"] else "", limit) if word]
    return f"moving is {' and '.join(words)}" if words else ""


def chains_line(chains: dict[str, Any]) -> str:
    """Return the state of the chains of a pool in one line."""
    words = [f"{chains['full']:,} of {chains['total']:,} full"]
    words += [
        f"{chains[name]:,} {text}"
        for name, text in (
            ("fewer", "with fewer copies"),
            ("without", "without any copy"),
            ("filling", "being filled"),
        )
        if chains[name]
    ]
    if chains["to_copy"]:
        words.append(f"{chains['to_copy']:,} copies to make")
        words.append(time_left(chains))
    return completed("chains: " + ", ".join(word for word in words if word))
