"""Doctor checks of a pool: names, ports, clocks, versions, certificates, etcd, chains, mounts.

`nvpool doctor --pool` calls `pool_checks`, which fetches the status, map and certificates. The other
functions judge such data, so that tests can pass data of their own. The checks change nothing.
"""

from __future__ import annotations

import asyncio
import errno
import socket
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from nvpool.cli.doctor import drive as doctor_drive
from nvpool.cli.doctor.check_results import Check, all_of, bad, ok, warn
from nvpool.core.clock import SYSTEM_CLOCK
from nvpool.core.config import is_open, load
from nvpool.core.endpoint import parse_endpoint
from nvpool.core.errors import NvpoolError
from nvpool.host.pool_directory import PoolDirectory
from nvpool.poolmap.certificate_expiry import remedy_of, state_of
from nvpool.security.ca import CertificateFacts, described

SKEW_WARN_S, SKEW_BAD_S = 0.5, 300.0
CONNECT_S = 2.0
_OF_OTHER_CHECKS = frozenset(("copies-missing", "data-unavailable", "mount-dead"))
"""Kinds of problems that have their own check."""
ASK_S = 5.0


def chains(status: dict[str, Any]) -> Check:
    seen = status["chains"]
    if seen["without"]:
        return bad(
            "copies",
            f"{seen['without']} of {seen['total']} chains have no target that serves",
            "what they hold cannot be read: bring back their drives (nvpool drive ls POOL)",
        )
    if seen["fewer"]:
        return warn(
            "copies",
            f"{seen['fewer']} of {seen['total']} chains have too few copies, {seen['filling']} are being copied",
            "wait, or bring back what is away (nvpool status)",
        )
    return ok("copies", f"all {seen['total']} chains have them")


def problems(status: dict[str, Any]) -> Iterator[Check]:
    """Report the problems in the status of the pool; `chains` and `mounts` check copies and mounts."""
    if "health" in status:  # an earlier version has no health
        for problem in status["health"]["problems"]:
            if problem["kind"] not in _OF_OTHER_CHECKS:
                judged = warn if problem.get("severity") == "notice" else bad
                yield judged("pool", problem["reason"], problem["remedy"] or "see nvpool status")
        return
    for text in status["problems"]:
        if "chains have" not in text and not text.startswith("the mount at"):
            yield bad("pool", text, "see nvpool status")


def nodes(status: dict[str, Any]) -> Check:
    silent = [f"{one['name']} ({one['address']})" for one in status["nodes"] if one["state"] != "serving"]
    if silent:
        return bad(
            "nodes",
            f"{', '.join(silent)} of {len(status['nodes'])} do not answer",
            "see whether they run, and whether their ports can be reached",
        )
    return ok("nodes", f"{len(status['nodes'])} answer")


def etcd(status: dict[str, Any]) -> Check:
    """Check the etcd members that store the pool map of a pool of several nodes."""
    members = [one for one in status["nodes"] if one.get("etcd")]
    away = [one["name"] for one in members if one["state"] != "serving"]
    if len(status["nodes"]) < 2:
        return ok("map", "kept by the one node")
    if not any(one.get("leads") for one in status["nodes"]):
        return bad(
            "map",
            "no node leads the pool",
            "more than half of the members of etcd have to run; see nvpool node ls "
            "POOL, and the log etcd.log of each",
        )
    if away:
        return warn(
            "map",
            f"{', '.join(away)} of {len(members)} members of etcd are away",
            "one more may not be lost: bring them back",
        )
    if members and len(members) % 2 == 0:
        return warn(
            "map",
            f"{len(members)} members of etcd",
            "an even number bears no more losses than one less: let another node join",
        )
    return ok("map", f"{len(members) or 'an etcd of its own with its'} members keep it")


def mounts(status: dict[str, Any], can_be_held: bool) -> Iterator[Check]:
    held = {one["mountpoint"] for one in status["processes"] if one["role"] == "holder"}
    for one in status["processes"]:
        if one["role"] != "mount":
            continue
        name = f"mount {one['mountpoint']}"
        if one["state"] == "dead":
            yield bad(name, "its process is gone", f"nvpool umount {one['mountpoint']}, and mount it again")
        elif can_be_held and one["mountpoint"] not in held:
            yield warn(
                name, "it ends with its process", "mount it again without --no-holder, by engine kernel"
            )
        else:
            yield ok(name, "served" + (", and outlives its process" if one["mountpoint"] in held else ""))


def versions(found: dict[str, str]) -> Check:
    """Check that all nodes run one version. `found`: node -> software of its daemons."""
    if len(set(found.values())) > 1:
        return warn(
            "versions",
            ", ".join(f"{name}: {text}" for name, text in sorted(found.items())),
            "upgrade the nodes that are behind, one after the other",
        )
    return ok("versions", ", ".join(sorted(set(found.values()))) or "no node has reported")


def skews(found: dict[str, float]) -> Check:
    """Check the clocks. `found`: node -> seconds by which its clock is ahead of this machine's."""
    if not found:
        return ok("clocks", "no node has reported")
    seen = ", ".join(f"{name} {seconds:+.1f} s" for name, seconds in sorted(found.items()))
    worst = max(map(abs, found.values()))
    if worst > SKEW_BAD_S:
        return bad(
            "clocks",
            seen,
            "certificates are judged by the clock: set it right on all nodes (chrony, timesyncd)",
        )
    if worst > SKEW_WARN_S:
        return warn("clocks", seen, "times of files differ by so much: run chrony or timesyncd on all nodes")
    return ok("clocks", seen)


def certificates(found: dict[str, CertificateFacts], now_s: float) -> Iterator[Check]:
    """Check the life time of certificates. `found`: file name -> its certificate."""
    for name, one in sorted(found.items()):
        left_s, is_authority = one.ends_s - now_s, name.endswith("authority.crt")
        seen = (
            f"it is good for {left_s / 86_400:.1f} days"
            if left_s > 0
            else f"it ended {-left_s / 86_400:.1f} days ago"
        )
        state = state_of("authority" if is_authority else "member", one.begins_s, one.ends_s, now_s)
        if state == "well":
            yield ok(f"certificate {name}", seen)
        elif is_authority:
            yield (warn if state == "notice" else bad)(
                f"certificate {name}", seen, remedy_of("authority", "POOL")
            )
        elif state == "ended":
            yield bad(
                f"certificate {name}",
                seen,
                "see that the clock is right; else take the node out and let it join again",
            )
        else:
            yield (warn if state == "notice" else bad)(
                f"certificate {name}",
                seen,
                "it was to be renewed by itself: nvpool status and the logs say why it was not; "
                "try nvpool cert rotate POOL",
            )


def _host_is_here(host: str) -> bool:
    kind, _, _, _, place = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0]
    with socket.socket(kind, socket.SOCK_STREAM) as probe:
        try:
            probe.bind(place)
        except OSError as error:
            if error.errno == errno.EADDRNOTAVAIL:
                return False
            raise
    return True


def names(endpoints: Iterable[str], ours: Iterable[str]) -> Iterator[Check]:
    """Check that host names of the map resolve, and that addresses of this node belong to this machine."""
    hosts = sorted({parse_endpoint(one).host for one in endpoints} - {""})
    own = {parse_endpoint(one).host for one in ours} - {""}
    for host in hosts:
        try:
            here = _host_is_here(host)
        except socket.gaierror as error:
            yield bad(
                f"address {host}",
                f"it is not found: {error.strerror}",
                "let it stand in DNS or in /etc/hosts of every node and client",
            )
            continue
        if host in own and not here:
            yield bad(
                f"address {host}",
                "the map says that it is this node's, and this machine has not got it",
                "give the machine its address again; daemons cannot listen without",
            )
        else:
            yield ok(f"address {host}", "this machine's" if here else "it is found")


def connects(host: str, port: int, wait_s: float = CONNECT_S) -> str:
    """Return why a TCP connection fails; empty if it succeeds."""
    try:
        socket.create_connection((host, port), wait_s).close()
    except OSError as error:
        return error.strerror or str(error)
    return ""


def ports(
    served: dict[str, str], own: Iterable[str], connect: Callable[[str, int], str] = connects
) -> Iterator[Check]:
    """Check that the ports of the pool can be reached.

    `served`: endpoint -> state of its process, as in the status. `own`: endpoints of this node. All good
    ports share one Check.
    """
    well, own = 0, set(own)
    for text, state in sorted(served.items()):
        place = parse_endpoint(text)
        if not place.host:
            continue
        wrong = connect(place.host, place.port)
        name = f"port {place.host}:{place.port}"
        if not wrong and text in own and state in ("stopped", "restarting", "starting"):
            yield bad(
                name,
                f"our process there is {state}, and somebody listens",
                f"another program has the port: ss -ltnp 'sport = :{place.port}'",
            )
        elif wrong and state == "serving":
            yield bad(
                name,
                f"it cannot be reached from here: {wrong}",
                "open it in the firewalls between nodes and clients",
            )
        else:
            well += not wrong
    yield ok("ports", f"{well} can be reached")


def paths(status: dict[str, Any]) -> Iterator[Check]:
    """Check whether large packets arrive at the nodes that serve."""
    from nvpool.cli.doctor import network_mtu

    there = [
        endpoint
        for one in status["nodes"]
        if one["state"] == "serving"
        for endpoint in one.get("endpoints") or ()
    ]
    found = {parse_endpoint(one).host for one in there} - {""}
    away = {host for host in found if not _is_known_here(host)}
    return network_mtu.paths(one for one in there if parse_endpoint(one).host in away)


def _is_known_here(host: str) -> bool:
    """Return whether the host is this machine, or its name does not resolve, which `names` reports."""
    try:
        return _host_is_here(host)
    except OSError:
        return True


def meta_space(directory: PoolDirectory) -> Check:
    return doctor_drive.space(directory.path, f"metadata and logs ({directory.path})")


def certificate_files(secret: Path) -> dict[str, CertificateFacts]:
    """Return the certificates of the pool and, below etcd/, of its etcd: file name -> certificate."""
    return {
        str(path.relative_to(secret)): described(path.read_bytes())
        for path in sorted([*secret.glob("*.crt"), *secret.glob("etcd/*.crt")])
    }


def metrics(listen: str) -> Check:
    """Check who can read the metrics. `listen` is `metrics.listen` of node.toml."""
    if listen and is_open(listen):
        return warn(
            "metrics",
            f"all who reach {listen} may read them, without a password",
            "listen on a port of this machine alone (a number), or at unix:/PATH, and put a proxy with TLS before it",
        )
    return ok("metrics", f"served at {listen}, to this machine alone" if listen else "not served by HTTP")


async def _asked(pool: str, status: dict[str, Any]) -> tuple[dict[str, str], dict[str, float]]:
    """Return each node's software, and the seconds by which its clock is ahead."""
    from nvpool.cli.pool_connection import ask
    from nvpool.rpc.v1 import pool_pb2, wire_pb2

    software, ahead = {}, {}

    async def one(node: dict[str, Any]) -> None:
        from msgspec import json

        sent_ns = SYSTEM_CLOCK.wall_ns()
        try:
            reply = await ask(
                pool,
                wire_pb2.POOL_STATUS,
                pool_pb2.PoolStatusRequest(),
                pool_pb2.PoolStatusReply,
                wait_s=ASK_S,
                endpoints=tuple(node["endpoints"]),
            )
        except NvpoolError:
            return  # `nodes` reports it
        found = json.decode(reply.status)["pool"]
        came_ns = SYSTEM_CLOCK.wall_ns()
        named = f"node {node['node']} ({node['name']})"  # several nodes may have one name
        software[named] = found["software"]
        if "now_ms" in found:
            # The node read its clock between request and reply; only a difference beyond that is certain.
            earliest_s, latest_s = (
                found["now_ms"] / 1e3 - came_ns / 1e9,
                found["now_ms"] / 1e3 - sent_ns / 1e9,
            )
            ahead[named] = max(earliest_s, 0.0) if earliest_s > 0 else min(latest_s, 0.0)

    await asyncio.gather(*map(one, status["nodes"]))
    return software, ahead


def pool_checks(pool: str, can_be_held: bool) -> Iterator[Check]:
    """Run all checks of this module on the pool, and the drive checks on the drives of this node."""
    from nvpool.cli.pool_connection import directory_of, status_of

    try:
        directory = directory_of(pool)
        node = directory.node if directory is not None else 0
    except NvpoolError as error:
        yield bad("pool", str(error), "name a pool by its directory, or by HOST:PORT of a node")
        return
    if directory is not None:
        yield from all_of(
            "certificates",
            lambda: list(certificates(certificate_files(directory.secret), SYSTEM_CLOCK.wall_ns() / 1e9)),
        )
        if node:
            yield from all_of("metrics", lambda: metrics(load(directory.node_toml).metrics.listen))
            yield from all_of("space of metadata", lambda: meta_space(directory))
    try:
        status = asyncio.run(status_of(pool))
    except NvpoolError as error:
        yield bad("pool", str(error), "start it, or name one of its nodes that runs")
        return
    software, ahead = asyncio.run(_asked(pool, status))
    served = {
        endpoint: one["state"]
        for one in (*status["nodes"], *status["processes"])
        for endpoint in one.get("endpoints") or ()
    }
    ours = [
        endpoint
        for one in (*status["nodes"], *status["processes"])
        if node and one.get("node") == node
        for endpoint in one.get("endpoints") or ()
    ]
    for name, look in (
        ("nodes", lambda: nodes(status)),
        ("map", lambda: etcd(status)),
        ("copies", lambda: chains(status)),
        ("pool", lambda: list(problems(status))),
        ("mounts", lambda: list(mounts(status, can_be_held))),
        ("versions", lambda: versions(software)),
        ("clocks", lambda: skews(ahead)),
        ("addresses", lambda: list(names(served, ours))),
        ("ports", lambda: list(ports(served, ours))),
        ("paths", lambda: list(paths(status))),
    ):
        yield from all_of(name, look)
    if node:
        yield from doctor_drive.drives([Path(one["path"]) for one in status["drives"] if one["node"] == node])
