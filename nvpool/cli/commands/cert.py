"""The commands `nvpool cert`: list, renew and revoke the certificates of a pool."""

from __future__ import annotations

import asyncio
import datetime
from typing import Any

import click

from nvpool.cli.output import json_option, pool_argument, print_json, print_table, say
from nvpool.core.errors import NotFound, NvpoolError
from nvpool.core.names import users_of

DAY_S = 86_400.0
_ROLES = {
    "authority": "authority",
    "etcd-authority": "authority of etcd",
    "etcd-member": "node, for etcd",
    "external-etcd-authority": "authority of your etcd",
    "external-etcd-member": "node, for your etcd",
}


@click.group(
    epilog="""\b
A certificate of a node, client or bridge is valid for 90 days and is renewed automatically in the last 30, with the same key.
The certificate authorities of the pool and of its etcd are valid for 20 years.

\b
examples:
  nvpool cert ls /srv/nvpool
  nvpool cert rotate /srv/nvpool
  nvpool cert revoke /srv/nvpool client/ws1.0a1b2c3d
"""
)
def cert() -> None:
    """List, renew and revoke the certificates of a pool."""


@cert.command(
    epilog="""\b
--json prints one object for each certificate: member (null: an authority), role (authority, authority of etcd, node, node, for
etcd, client, bridge), serial (null: not known), from, to (RFC 3339), days_left, acts_as (of a client: as which users), revoked,
node (that has it; null: a client's or bridge's)

\b
examples:
  nvpool cert ls /srv/nvpool
  nvpool cert ls /srv/nvpool --json | jq '.[] | select(.days_left < 14)'
"""
)
@pool_argument
@json_option
def ls(pool: str, as_json: bool) -> None:
    """List the certificates of a pool: of its authorities, nodes, clients and bridges.

    Each node knows the last certificate that it signed for a client or bridge. Certificates signed by a node that does not
    answer, or by an earlier version, are listed without dates.
    """
    from nvpool.core.clock import SYSTEM_CLOCK

    found = certificates(asyncio.run(_statuses(pool)), SYSTEM_CLOCK.wall_ns() / 1e9)
    if as_json:
        print_json(found)
        return
    print_table(
        ("member", "role", "acts as", "serial", "from", "to", "days left", "revoked"),
        [
            (
                one["member"],
                one["role"],
                one["acts_as"],
                one["serial"],
                _day(one["from"]),
                _day(one["to"]),
                one["days_left"],
                one["revoked"] or None,
            )
            for one in found
        ],
    )
    if any(one["serial"] is None for one in found):
        say("those without dates were signed by nodes that do not answer, or by an earlier version")


def _day(time: str | None) -> str | None:
    return time[:10] if time else None


async def _statuses(pool: str) -> list[dict[str, Any]]:
    """Return the status of each node that replies, with its certificates; the named node comes first."""
    import json

    from nvpool.cli.pool_connection import REACH_S, ask
    from nvpool.rpc.v1 import pool_pb2, wire_pb2

    async def status(**how: Any) -> dict[str, Any]:
        reply = await ask(
            pool,
            wire_pb2.POOL_STATUS,
            pool_pb2.PoolStatusRequest(issued=True),
            pool_pb2.PoolStatusReply,
            wait_s=REACH_S,
            **how,
        )
        seen: dict[str, Any] = json.loads(reply.status)
        return seen

    async def other(node: dict[str, Any]) -> dict[str, Any] | None:
        try:
            return await status(endpoints=tuple(node["endpoints"]))
        except NvpoolError as error:
            say(f"node {node['node']} ({node['name']}) does not answer: {error}")
            return None

    first = await status()
    mine = {one["serial"] for one in first["certificates"] if one["kind"] == "member"}
    others = await asyncio.gather(*(other(node) for node in first["nodes"] if len(first["nodes"]) > 1))
    return [
        first,
        *(
            one
            for one in others
            if one is not None
            and not mine & {own["serial"] for own in one.get("certificates", ()) if own["kind"] == "member"}
        ),
    ]


def certificates(statuses: list[dict[str, Any]], now_s: float) -> list[dict[str, Any]]:
    """Return each certificate in `statuses` once: authorities, nodes, then the others by name."""
    first = statuses[0]
    members, node_of = (
        set(first["members"]),
        {node["member"]: node["node"] for node in first["nodes"] if node["member"]},
    )
    found: dict[tuple[str | None, str], dict[str, Any]] = {}

    def note(member: str, role: str, one: dict[str, Any] | None) -> None:
        known = found.get((member or role, role))
        if known is not None and (one is None or (known["_ends_s"] or 0.0) >= one["ends_s"]):
            return
        found[member or role, role] = {
            "member": member or None,
            "role": role,
            "serial": one and one["serial"],
            "from": one and _time(one["begins_s"]),
            "to": one and _time(one["ends_s"]),
            "days_left": one and round((one["ends_s"] - now_s) / DAY_S, 1),
            "acts_as": users_of(member) if member.startswith("client/") else None,
            "revoked": bool(member) and member not in members,
            "node": node_of.get(member),
            "_ends_s": one and one["ends_s"],
        }

    for status in statuses:
        for one in status.get("certificates", ()):
            note(one["member"], _ROLES.get(one["kind"], one["member"].partition("/")[0]), one)
    for status in statuses:
        for one in status.get("issued", ()):
            note(one["member"], one["member"].partition("/")[0], one)
    for member in (*members, *first.get("revoked", ())):
        note(member, member.partition("/")[0], None)
    order = ["authority", "authority of etcd", "node", "node, for etcd"]
    ordered = sorted(
        found.values(),
        key=lambda one: (
            order.index(one["role"]) if one["role"] in order else len(order),
            one["member"] or "",
        ),
    )
    return [{name: value for name, value in one.items() if name[0] != "_"} for one in ordered]


def _time(seconds: float) -> str:
    return (
        datetime.datetime.fromtimestamp(seconds, datetime.UTC)
        .isoformat(timespec="seconds")
        .replace("+00:00", "Z")
    )


@cert.command(
    epilog="""\b
examples:
  nvpool cert rotate /srv/nvpool
  nvpool cert rotate /srv/nvpool --new-key
"""
)
@pool_argument
@click.option("--new-key", is_flag=True, help="Create a new key; the old one is removed.")
@json_option
def rotate(pool: str, new_key: bool, as_json: bool) -> None:
    """Renew the certificate of this node now, and the one that it presents to etcd.

    No daemon restarts: the daemons use the new certificate within half a minute. The old certificate stays valid until it
    expires, even with --new-key. If someone has stolen the key, revoke the member and let the machine join again. The
    certificate authorities are not renewed.
    """
    from nvpool.cli.pool_connection import change

    done = asyncio.run(change(pool, "certificate-rotate", {"new_key": new_key}))
    if as_json:
        print_json(done)
        return
    own = next(one for one in done["certificates"] if one["kind"] == "member")
    click.echo(
        f"{own['member']} has a new certificate{' and key' if new_key else ''}, serial {own['serial']}, good until "
        f"{_day(_time(own['ends_s']))}"
    )


@cert.command(
    epilog="""\b
examples:
  nvpool cert revoke /srv/nvpool client/ws1.0a1b2c3d
  nvpool cert revoke /srv/nvpool node/gpu-3.11223344       the node must be empty
"""
)
@pool_argument
@click.argument("member", metavar="MEMBER")
@json_option
def revoke(pool: str, member: str, as_json: bool) -> None:
    """Revoke all certificates of MEMBER for ever: its connections end, and the pool refuses new ones.

    For a client this is nvpool client remove. For a node it is nvpool node remove, which requires an empty node. To come
    back, the machine must join again and gets another name.

    A revoked node keeps its copies of the pool's keys, which cannot be replaced. Erase secret/ in its pool directory. If
    others may have copied the keys, copy the files into a new pool.
    """
    from nvpool.cli.pool_connection import change, status_of

    if member.startswith("node/"):
        node = next((one for one in asyncio.run(status_of(pool))["nodes"] if one["member"] == member), None)
        if node is None:
            raise NotFound(
                f"no node of the pool has the certificate of {member}; `nvpool cert ls {pool}` lists them"
            )
        done = asyncio.run(
            change(pool, "node-remove", {"node": node["node"], "lost": False, "give_up": False})
        )
    else:
        done = asyncio.run(change(pool, "member-remove", {"member": member}))
    if as_json:
        print_json({"member": member} | done)
    else:
        click.echo(f"{member} is not in the pool any more")
        if member.startswith("node/"):
            say(
                "the node keeps its copies of the pool's grant key and, if it kept the pool map, of the CA's key; "
                "they cannot be replaced and let it forge grants for files: erase secret/ in its pool directory, or, if "
                "others may have copied it, copy the files into a new pool"
            )
