"""`nvpool node ls|token|join|remove|recover-etcd`."""

from __future__ import annotations

import asyncio
import os
from typing import Any

import click
from msgspec.structs import replace

from nvpool.base import config as configuration
from nvpool.base.directory import PoolDirectory
from nvpool.base.units import format_bytes
from nvpool.cli.pool import drive_of, etcd_given, etcd_options
from nvpool.cli.render import json_option, pool_argument, print_json, print_table, say

_DIRECTORY = "/srv/nvpool"


@click.group(epilog="""\b
examples:
  nvpool node token /srv/nvpool
  nvpool node join 10.0.0.1:17512 --token nvp1.XXXX --drive /mnt/nvme0
  nvpool node ls /srv/nvpool
""")
def node() -> None:
    """List the nodes of a pool, let them in, remove them."""


def join_command(join: dict[str, Any], config: configuration.Config, kind: str = "node") -> str:
    where = "--drive PATH" if kind == "node" else "DIR"
    plain = " --plain-text" if config.network.plain_text else ""
    return f"nvpool {kind} join {join['address'].removeprefix('stream://')} {where} --token {join['token']}{plain}"


def make_token(pool: str, kind: str, hours: float, as_json: bool) -> None:
    from nvpool.cli.reach import change, directory_of
    made = asyncio.run(change(pool, "token", {"kind": kind, "lives_s": hours * 3600}))
    directory = directory_of(pool)
    made["command"] = join_command(made, configuration.load(directory.node_toml) if directory else configuration.Config(), kind)
    if as_json:
        print_json(made)
    else:
        click.echo(made["command"])
        say(f"good once, for {hours:g} h")


def entered(kind: str, address: str, directory: str, token: str, config: configuration.Config, name: str,
            etcd: dict[str, str] | None = None) -> dict[str, Any]:
    """Make the directory of a member; what run/entering answers."""
    from nvpool.cli.pool_life import make
    return make({"verb": "join", "kind": kind, "address": address, "directory": os.path.abspath(directory), "token": token,
                 "name": name, "config": configuration.sample(config), "etcd": etcd})


@node.command(epilog="example: nvpool node token /srv/nvpool")
@pool_argument
@click.option("--hours", type=click.FloatRange(0.001, 168), default=1.0, show_default=True, help="How long it is good.")
@json_option
def token(pool: str, hours: float, as_json: bool) -> None:
    """Print a command with which another machine joins the pool. The token in it works once."""
    make_token(pool, "node", hours, as_json)


@node.command(epilog="""\b
examples:
  nvpool node join 10.0.0.1:17512 --token nvp1.XXXX --drive /mnt/nvme0 --drive /mnt/nvme1
  nvpool node join 10.0.0.1:17512 --token nvp1.XXXX --dir /var/lib/pool --no-start
""")
@click.argument("address", metavar="HOST:PORT")
@click.option("--token", "token_text", required=True, help="As `nvpool pool create` or `nvpool node token` printed it.")
@click.option("--drive", "drives", multiple=True, metavar="PATH[:SIZE]", help="A drive for the pool. Repeat it.")
@click.option("--dir", "directory", type=click.Path(file_okay=False), default=_DIRECTORY, show_default=True,
              help="Pool directory of this node.")
@click.option("--host", help="Address under which the others reach this machine; default: the one it reaches HOST from.")
@click.option("--name", default="", help="Name of this node, for people; default: the host's.")
@click.option("--config", "config_file", type=click.Path(exists=True, dir_okay=False), help="Configuration of this node.")
@click.option("--plain-text", is_flag=True, help="Without certificates and TLS: as on the first node, for networks that are "
                                                 "nobody else's. The token and the pool's keys are sent in plain text too.")
@click.option("--no-start", is_flag=True, help="Only make the directory; drives are added later.")
@etcd_options
@json_option
def join(address: str, token_text: str, drives: tuple[str, ...], directory: str, host: str | None, name: str,
         config_file: str | None, plain_text: bool, no_start: bool, as_json: bool, **etcd: str | None) -> None:
    """Make this machine a node of the pool that answers at HOST:PORT.

    Makes the pool directory, whose key never leaves it, and gets it a certificate in exchange for the token; starts the daemons
    of this node in the background, and adds the drives. Interrupted, the same command goes on.
    """
    from nvpool.cli import pool_life
    from nvpool.cli.reach import change
    config = configuration.load(config_file) if config_file else configuration.Config()
    network = replace(config.network, host=host or (config.network.host if config_file else _own_host(address)),
                      plain_text=plain_text or config.network.plain_text)
    where = PoolDirectory(directory)
    done: dict[str, Any] = {"directory": str(where.path), "drives": []}
    if not where.exists() or (where.path / "being-joined").exists():
        done |= entered("node", address, directory, token_text, replace(config, network=network), name, etcd_given(etcd))
        if not as_json:
            click.echo(f"joined the pool {done['name']} ({done['pool_id'][:8]}) as node {done['node']}, in {where.path}")
    if not no_start:
        pool_life.start(where)
        for drive in drives:
            wanted = drive_of(drive)
            added = asyncio.run(change(directory, "drive-add", wanted | {"force": False}))
            done["drives"].append(added)
            if not as_json:
                click.echo(f"drive {added['drive']} added: target {added['target']}, "
                           f"{format_bytes(added['capacity_bytes'])} at {added['path']}")
    if as_json:
        print_json(done)


def _own_host(address: str) -> str:
    from nvpool.cli.reach import own_host
    return own_host(address)


@node.command(epilog="example: nvpool node ls /srv/nvpool")
@pool_argument
@json_option
def ls(pool: str, as_json: bool) -> None:
    """List the nodes of a pool."""
    from nvpool.cli.reach import status_of
    nodes = asyncio.run(status_of(pool))["nodes"]
    if as_json:
        print_json(nodes)
        return
    print_table(("node", "name", "state", "drives", "shards", "address"), [
        (one["node"], one["name"], one["state"], one["drives"], one["shards"], one["address"]) for one in nodes])


@node.command(epilog="example: nvpool node remove /srv/nvpool 3")
@pool_argument
@click.argument("number", type=int, metavar="NODE")
@json_option
def remove(pool: str, number: int, as_json: bool) -> None:
    """Take an empty node out of the pool: its certificate is worth nothing from then on.

    Refused while drives, metadata or the pool map are on it.
    """
    from nvpool.cli.reach import change
    done = asyncio.run(change(pool, "node-remove", {"node": number}))
    if as_json:
        print_json(done)
    else:
        click.echo(f"node {number} is not in the pool any more")


@node.command("recover-etcd", epilog="example: nvpool node recover-etcd /srv/nvpool --yes")
@pool_argument
@click.option("--yes", is_flag=True, help="The other members are lost for good.")
@json_option
def recover_etcd(pool: str, yes: bool, as_json: bool) -> None:
    """Go on with the member of etcd on this node alone, after most of them were lost for good.

    The pool map becomes the newest that this node knows: a change that only the lost members had seen is lost. Other nodes then
    become members as when the pool was made. Never start two lost nodes again, with their pool directories as they were, while
    no other node is up: they could begin a second history of the pool. Refused while most members answer: those that are away
    are replaced by themselves.
    """
    from nvpool.base.errors import InvalidRequest
    from nvpool.cli.reach import change
    if not yes:
        raise InvalidRequest("this gives up all members of etcd but the one on this node, and every change of the pool map "
                             "that this node has not seen; where the others are lost for good, say so with --yes")
    done = asyncio.run(change(pool, "etcd-recover", {"yes": True}))
    if as_json:
        print_json(done)
    else:
        click.echo(f"node {done['node']} keeps the pool map alone, epoch {done['epoch']}; other nodes follow by themselves")
