"""The commands `nvpool node`: list, admit, drain and remove nodes, set racks, recover etcd."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import Any

import click
from msgspec.structs import replace

from nvpool.cli.commands.drive import say_what_waits, wait_option
from nvpool.cli.commands.pool import drive_of, etcd_given, etcd_options
from nvpool.cli.output import Number, json_option, pool_argument, print_json, print_table, say
from nvpool.cli.token_input import WAYS, join_command, token_options
from nvpool.core import config as configuration
from nvpool.core.errors import InvalidRequest, NotFound
from nvpool.core.units import format_bytes
from nvpool.host.pool_directory import PoolDirectory

_DIRECTORY = "/srv/nvpool"


@click.group(
    epilog="""\b
examples:
  nvpool node token /srv/nvpool
  nvpool node join 10.0.0.1:17512 --drive /mnt/nvme0
  nvpool node ls /srv/nvpool
"""
)
def node() -> None:
    """List, admit, drain and remove the nodes of a pool."""


def make_token(
    pool: str,
    kind: str,
    hours: float,
    as_json: bool,
    acts_as: tuple[int, int] | None = None,
    squash_root: bool = False,
) -> None:
    from nvpool.cli.pool_connection import change, directory_of

    asked = {"kind": kind, "lives_s": hours * 3600} | (
        {"acts_as": list(acts_as)} if acts_as is not None else {}
    )
    asked |= {"squash_root": True} if squash_root else {}
    made = asyncio.run(change(pool, "token", asked))
    directory = directory_of(pool)
    warning = (
        ""
        if _leaves_host(made["address"])
        else (
            f"{made['address'].removeprefix('stream://')} is an address of this machine alone: no other machine can join. "
            f"Make the pool with an address that others reach: nvpool pool create DIR --drive PATH --host ADDRESS"
        )
    )
    made |= {"warning": warning} if warning else {}
    made["command"] = join_command(
        made, configuration.load(directory.node_toml) if directory else configuration.Config(), kind
    )
    if as_json:
        print_json(made)
    else:
        click.echo(made["command"])
        say(f"good once, for {hours:g} h")
    if warning:
        say(f"warning: {warning}")


def _leaves_host(address: str) -> bool:
    from nvpool.core.endpoint import parse_endpoint
    from nvpool.security.tls import leaves_host

    return leaves_host(parse_endpoint(address if "://" in address else f"stream://{address}"))


def entered(
    kind: str,
    address: str,
    directory: str,
    token: str,
    config: configuration.Config,
    name: str,
    etcd: dict[str, str] | None = None,
) -> dict[str, Any]:
    """Create the pool directory of a new member, and return the reply of provision/join."""
    from nvpool.cli.pool_lifecycle import make

    return make(
        {
            "verb": "join",
            "kind": kind,
            "address": address,
            "directory": os.path.abspath(directory),
            "token": token,
            "name": name,
            "config": configuration.sample(config),
            "etcd": etcd,
        }
    )


@node.command(epilog="example: nvpool node token /srv/nvpool")
@pool_argument
@click.option(
    "--hours", type=Number(0.001, 168), default=1.0, show_default=True, help="How long the token is valid."
)
@json_option
def token(pool: str, hours: float, as_json: bool) -> None:
    """Print the command with which another machine joins the pool as a node. Its token works once."""
    make_token(pool, "node", hours, as_json)


@node.command(
    epilog=WAYS
    + """
\b
examples:
  NVPOOL_TOKEN=nvp1.XXXX nvpool node join 10.0.0.1:17512 --drive /mnt/nvme0 --drive /mnt/nvme1
  nvpool node join 10.0.0.1:17512 --token-file token --dir /var/lib/pool --no-start
"""
)
@click.argument("address", metavar="HOST:PORT")
@token_options("node")
@click.option(
    "--drive", "drives", multiple=True, metavar="PATH[:SIZE]", help="A drive for the pool; may be repeated."
)
@click.option(
    "--dir",
    "directory",
    type=click.Path(file_okay=False),
    default=_DIRECTORY,
    show_default=True,
    help="Pool directory of this node.",
)
@click.option(
    "--host", help="Address at which other nodes reach this machine; default: its own on the route to HOST."
)
@click.option("--name", default="", help="Name of this node in lists; default: the host name.")
@click.option(
    "--config",
    "config_file",
    type=click.Path(exists=True, dir_okay=False),
    help="Configuration of this node.",
)
@click.option(
    "--plain-text",
    is_flag=True,
    help="Without certificates and TLS, as on the first node; only for private "
    "networks. The token and the pool's keys are sent in plain text too.",
)
@click.option("--no-start", is_flag=True, help="Only create the directory; add the drives later.")
@etcd_options
@json_option
def join(
    address: str,
    token_text: str,
    drives: tuple[str, ...],
    directory: str,
    host: str | None,
    name: str,
    config_file: str | None,
    plain_text: bool,
    no_start: bool,
    as_json: bool,
    **etcd: str | None,
) -> None:
    """Make this machine a node of the pool that answers at HOST:PORT.

    Creates the pool directory with a private key that never leaves it, and exchanges the token for a certificate. Then starts
    the daemons of this node in the background and adds the drives. After an interruption, run the same command again.
    """
    from nvpool.cli import pool_lifecycle
    from nvpool.cli.pool_connection import change

    config = configuration.load(config_file) if config_file else configuration.Config()
    network = replace(
        config.network,
        host=host or config.network.host or _own_host(address),
        plain_text=plain_text or config.network.plain_text,
    )
    where = PoolDirectory(directory)
    wanted_drives = [drive_of(drive) for drive in drives]
    for wanted in wanted_drives:  # report errors before the token is used
        if not os.path.exists(wanted["path"]):
            raise NotFound(f"drive {wanted['path']} does not exist; is it mounted? Make the directory first")
        if not os.path.isdir(wanted["path"]) and not Path(wanted["path"]).is_block_device():
            raise InvalidRequest(f"drive {wanted['path']} is neither a directory nor a block device")
    done: dict[str, Any] = {"directory": str(where.path), "drives": []}
    if not where.exists() or (where.path / "being-joined").exists():
        done |= entered(
            "node", address, directory, token_text, replace(config, network=network), name, etcd_given(etcd)
        )
        if not as_json:
            click.echo(
                f"joined the pool {done['name']} ({done['pool_id'][:8]}) as node {done['node']}, in {where.path}"
            )
    else:
        _check_pool(where, token_text)
        check_member(where, address)
    if not no_start:
        there = {
            os.path.realpath(place): one
            for one in pool_lifecycle.start(where)["drives"]
            if one["node"] == where.node
            for place in (one["path"], os.path.dirname(one["path"]))
        }
        for wanted in wanted_drives:
            if (one := there.get(os.path.realpath(wanted["path"]))) is not None:
                done["drives"].append(
                    {name: one[name] for name in ("drive", "target", "path", "capacity_bytes")}
                )
                if not as_json:
                    click.echo(f"drive {one['drive']} is in the pool already: {one['path']}")
                continue
            added = asyncio.run(change(directory, "drive-add", wanted | {"force": False}))
            done["drives"].append(added)
            if not as_json:
                click.echo(
                    f"drive {added['drive']} added: target {added['target']}, "
                    f"{format_bytes(added['capacity_bytes'])} at {added['path']}"
                )
    if as_json:
        print_json(done)


def _check_pool(directory: PoolDirectory, token_text: str) -> None:
    """Raise AlreadyExists if `directory` belongs to another pool than the token."""
    from nvpool.core.errors import AlreadyExists
    from nvpool.security.ca import fingerprint_of
    from nvpool.security.join_tokens import read_token

    if (
        fingerprint_of((directory.secret / "authority.crt").read_bytes())
        != read_token(token_text, "node").fingerprint
    ):
        raise AlreadyExists(
            f"{directory.path} belongs to another pool, which `nvpool status {directory.path}` shows; name "
            f"another directory with --dir"
        )


def check_member(directory: PoolDirectory, address: str) -> None:
    """Raise InvalidRequest, with the remedy, if the node of `directory` was removed from the pool.

    If the node at `address` does not answer, the function returns without a check. Then the node starts as
    it is, and stops serving once it learns of its removal.
    """
    from nvpool.cli.pool_connection import REACH_S, ask
    from nvpool.core.errors import StaleIdentity, Unavailable
    from nvpool.poolmap.model import decode_map
    from nvpool.rpc.v1 import pool_pb2, wire_pb2

    if not directory.node:
        raise InvalidRequest(
            f"{directory.path} is a client's directory of this pool, no node's; name another one with --dir"
        )
    where = address if "://" in address else f"stream://{address}"
    try:
        reply = asyncio.run(
            ask(
                str(directory.path),
                wire_pb2.POOL_MAP,
                pool_pb2.MapRequest(),
                pool_pb2.MapReply,
                wait_s=REACH_S,
                endpoints=(where,),
            )
        )
        found = decode_map(reply.map).node_by_id.get(directory.node)
        is_in = found is not None and directory.member in (
            "",
            found.member,
        )  # else another node has its number
    except StaleIdentity:
        is_in = False
    except Unavailable:
        return
    if not is_in:
        raise InvalidRequest(
            f"{directory.path} is of node {directory.node}, which was removed from this pool, and is not "
            f"taken in again: what it has is of the past. Remove that with: nvpool pool destroy "
            f"{directory.path}   Then the same command makes a new node there; the token was not used"
        )


def _own_host(address: str) -> str:
    from nvpool.cli.pool_connection import own_host

    return own_host(address)


@node.command(
    epilog="""\b
--json prints one object for each node: node, name, address, member, state, desired_state (empty, draining, drained,
lost), wish (deprecated: the old name of desired_state), rack, drives, leads, etcd, primaries and standbys (of which shards),
chains (that it has or shall have), endpoints

\b
example: nvpool node ls /srv/nvpool
"""
)
@pool_argument
@json_option
def ls(pool: str, as_json: bool) -> None:
    """List the nodes of a pool: state, rack, drives, and what each does in it."""
    from nvpool.cli.pool_connection import status_of

    nodes = asyncio.run(status_of(pool))["nodes"]
    if as_json:
        print_json(nodes)
        return
    print_nodes(nodes)


def print_nodes(nodes: list[dict[str, Any]]) -> None:
    print_table(
        ("node", "name", "state", "rack", "drives", "roles", "address"),
        [
            (
                one["node"],
                one["name"],
                one["state"] + (f", {one['desired_state']}" if one["desired_state"] else ""),
                one["rack"],
                one["drives"],
                roles_of(one),
                one["address"] or "this machine",
            )
            for one in nodes
        ],
    )


def roles_of(one: dict[str, Any]) -> str:
    words = ["leads"] if one["leads"] else []
    words += ["etcd"] if one["etcd"] else []
    for name in ("primaries", "standbys"):
        if one[name]:
            what = ("primary" if name == "primaries" else "standby") if len(one[name]) == 1 else name
            words.append(f"{what} of {', '.join(map(str, one[name]))}")
    return "; ".join(words)


node_argument = click.argument("number", type=int, metavar="NODE")


@node.command(
    epilog="""\b
examples:
  nvpool node drain /srv/nvpool 2 --wait && nvpool node remove /srv/nvpool 2
  nvpool node drain /srv/nvpool 2 --stop      stop its processes when it is empty
  nvpool node drain /srv/nvpool 2 --cancel
"""
)
@pool_argument
@node_argument
@click.option("--cancel", is_flag=True, help="End the drain: the node and its drives get their share again.")
@click.option("--stop", is_flag=True, help="Stop the processes of the node once it is empty.")
@wait_option
@json_option
def drain(pool: str, number: int, cancel: bool, stop: bool, wait: bool, as_json: bool) -> None:
    """Move chunks, metadata and etcd membership of a node to other nodes, while the pool is in use. Then it can be removed.

    Refused if the other nodes have too little space. If a node that must take something is down, the drain starts and waits
    for that node; --wait shows this. May be repeated. An interrupted drain continues.
    """
    from nvpool.cli.pool_connection import change

    ended = None if cancel else ended_drained(pool, number)
    wanted = {"node": number, "cancel": cancel, "stop": stop}
    done = ended["nodes"][0] if ended else asyncio.run(change(pool, "node-drain", wanted))
    if not as_json:
        if cancel:
            click.echo(f"node {number} holds its share of the pool again")
        elif ended:
            click.echo(
                f"node {number} is empty, and its processes have ended; remove it on another one with: nvpool node "
                f"remove POOL {number}"
            )
        elif done["desired_state"] == "drained":
            click.echo(f"node {number} is empty; remove it with: nvpool node remove {pool} {number}")
        else:
            click.echo(f"node {number} is being drained: {_left(done)} to go")
            say_what_waits(done)
    _end(
        pool,
        done,
        wait,
        as_json,
        f"{'filling' if cancel else 'draining'} node {number}",
        "" if cancel else f"nvpool node drain {pool} {number} --cancel",
    )


NOTHING = "nothing"


def _left(one: dict[str, Any]) -> str:
    words = [f"{one['chains']} chains"] if one["chains"] else []
    words += (
        [f"metadata of shard {', '.join(map(str, shards))}"]
        if (shards := [*one["primaries"], *one["standbys"]])
        else []
    )
    words += ["its part in keeping the map"] if one["etcd"] or one["leads"] else []
    return ", ".join(words) or NOTHING


def _end(pool: str, done: dict[str, Any], wait: bool, as_json: bool, title: str, cancel: str = "") -> None:
    if wait:
        from nvpool.cli.commands.drive import note_on_interrupt

        with note_on_interrupt(title, f"nvpool node ls {pool}", cancel):
            done |= asyncio.run(_wait_until_done(pool, done["node"], title, as_json))
        if not as_json:
            say(
                f"{title}: done"
                + (", and its processes have ended" if done.get("state") == "stopped" else "")
            )
    if as_json:
        print_json(done)


async def _wait_until_done(pool: str, number: int, title: str, quiet: bool) -> dict[str, Any]:
    """Wait until nothing of the node moves, or the node is removed; return its entry in the status."""
    from nvpool.cli.commands.drive import is_removing_chunks, moving_on, wait_for_none

    def found(seen: dict[str, Any]) -> dict[str, Any]:
        return next(
            (node for node in seen["nodes"] if node["node"] == number),
            {"node": number, "desired_state": "removed"},
        )

    def left(seen: dict[str, Any]) -> int:
        one = found(seen)
        if one["desired_state"] == "removed":
            return 0
        here = [drive for drive in seen["drives"] if drive["node"] == number]
        moving: int = sum(drive["chains_to_come"] + drive["chains_to_go"] for drive in here)
        if one["desired_state"] in ("", "drained"):
            return moving + is_removing_chunks(here)
        also: int = (
            len([*one["primaries"], *one["standbys"]])
            + one["etcd"]
            + one["leads"]
            + (one["desired_state"] == "lost")
        )
        return moving + also

    def detail(seen: dict[str, Any]) -> str:
        one = found(seen)
        if one["desired_state"] in ("", "removed"):
            return moving_on(seen)
        words = [_left(one), moving_on(seen, [*one["primaries"], *one["standbys"]])]
        return ", ".join(word for word in words if word not in ("", NOTHING))

    return found(await wait_for_none(pool, title, quiet, left, detail, lambda: ended_drained(pool, number)))


def ended_drained(pool: str, number: int) -> dict[str, Any] | None:
    """Return a status of the drained node, if its processes have stopped as requested.

    That is known only here, in the directory of that node: `pool` must be this directory. None: the node is
    not drained and stopped, or this machine does not know.
    """
    from nvpool.cli.pool_connection import directory_of
    from nvpool.poolmap.model import decode_map
    from nvpool.poolmap.nodes.lifecycle import left_on

    directory = directory_of(pool)
    if directory is None or directory.node != number or directory.supervisor() is not None:
        return None
    pool_map = decode_map(directory.poolmap.read_bytes())
    one = pool_map.node_by_id.get(number)
    if one is None or one.desired_state != "stop" or not left_on(pool_map, number).nothing:
        return None
    return {
        "nodes": [
            {
                "node": number,
                "name": one.name,
                "state": "stopped",
                "desired_state": "drained",
                "rack": one.rack,
                "chains": 0,
                "primaries": [],
                "standbys": [],
                "etcd": False,
                "leads": False,
            }
        ],
        "drives": [],
        "chains": {"paused": False, "filling": 0, "to_copy": 0, "bytes_left": 0, "seconds_left": None},
    }


@node.command(
    epilog="""\b
examples:
  nvpool node remove /srv/nvpool 3
  nvpool node remove /srv/nvpool 3 --lost --wait    gone for good: its data is copied from other replicas
"""
)
@pool_argument
@node_argument
@click.option("--lost", is_flag=True, help="The node is broken or gone for good.")
@click.option(
    "--give-up",
    is_flag=True,
    help="With --lost: give up chunks whose only copy is on it. Reading these parts of "
    "files fails until they are written again.",
)
@wait_option
@json_option
def remove(pool: str, number: int, lost: bool, give_up: bool, wait: bool, as_json: bool) -> None:
    """Remove a node from the pool and revoke its certificate.

    Refused while data of the pool is on the node: drain it first. With --lost, refused while the node answers, or if it has
    the only copy of data. A lost node is listed until its data has been copied again. May be repeated.
    """
    from nvpool.cli.pool_connection import change

    if give_up and not lost:
        raise click.UsageError("--give-up goes with --lost")
    done = asyncio.run(change(pool, "node-remove", {"node": number, "lost": lost, "give_up": give_up}))
    if not as_json:
        if lost and done["desired_state"] != "removed":
            click.echo(f"node {number} is given up; what it held is made again from other copies")
        else:
            click.echo(f"node {number} is not in the pool any more")
    _end(pool, done, wait, as_json, f"replacing what node {number} held")


@node.command(
    epilog="""\b
examples:
  nvpool node rack /srv/nvpool 2 row-3
  nvpool node rack /srv/nvpool 2 ""       no rack: the node fails alone
"""
)
@pool_argument
@node_argument
@click.argument("rack")
@wait_option
@json_option
def rack(pool: str, number: int, rack: str, wait: bool, as_json: bool) -> None:
    """Set the rack of a node. Nodes of one rack may fail together, so copies are spread over racks first and move if needed."""
    from nvpool.cli.pool_connection import change

    done = asyncio.run(change(pool, "node-rack", {"node": number, "rack": rack}))
    if not as_json:
        click.echo(
            f"node {number} stands in rack {rack}" if rack else f"node {number} stands in a rack of its own"
        )
    if wait:
        from nvpool.cli.commands.drive import note_on_interrupt, wait_until_moved

        with note_on_interrupt(
            "moving chains", f"nvpool pool rebalance {pool} --status", f"nvpool pool rebalance {pool} --pause"
        ):
            asyncio.run(wait_until_moved(pool, "moving chains", as_json))
    if as_json:
        print_json(done)


@node.command("recover-etcd", epilog="example: nvpool node recover-etcd /srv/nvpool --yes")
@pool_argument
@click.option("--yes", is_flag=True, help="Confirm that the other members are lost for good.")
@click.option(
    "--lost",
    type=click.IntRange(1),
    multiple=True,
    metavar="NODE",
    help="If this node has no member: each node that had one, which must be switched off for ever.",
)
@json_option
def recover_etcd(pool: str, yes: bool, lost: tuple[int, ...], as_json: bool) -> None:
    """Continue with the etcd member of this node alone, after most members were lost for good.

    In a pool of two nodes only the first stores the pool map in etcd. If it is lost for good, this command makes the second
    node take over: it has a copy of the map and the keys of the pool's certificate authorities. A first node that is only
    disconnected would continue to decide on the map by itself: switch it off before.

    The newest map that this node knows becomes the pool map; a change that only the lost members have seen is lost. Other
    nodes then become members as when the pool was created. Never start two lost nodes again with their old pool directories
    while no other node is up: they could start a second history of the pool. Refused while most members answer: then members
    that are away are replaced automatically.
    """
    from nvpool.cli.pool_connection import change

    if not yes:
        raise InvalidRequest(
            "this gives up all members of etcd but the one on this node, and every change of the pool map "
            "that this node has not seen; where the others are lost for good, say so with --yes"
        )
    done = asyncio.run(change(pool, "etcd-recover", {"yes": True, "lost": lost}))
    if as_json:
        print_json(done)
    else:
        click.echo(
            f"node {done['node']} keeps the pool map alone, epoch {done['epoch']}; other nodes follow by themselves"
        )
