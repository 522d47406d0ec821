"""Pool status as one node sees it: the content of `nvpool status`.

Asks every process of the pool concurrently, each with a deadline; a process that does not answer is reported
and never delays the others. poolmap/health_checks derives the problems from the answers. Used by
node/supervisor.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Mapping
from typing import Any

from msgspec import structs

from nvpool.client.inode_paths import LOOK_S, KnownPaths, printable
from nvpool.cluster.coordinator_api import MapCoordinator
from nvpool.core.clock import SYSTEM_CLOCK
from nvpool.core.errors import DeadlineExceeded, NvpoolError, with_pool
from nvpool.core.version import VERSION
from nvpool.host.pool_directory import PoolDirectory
from nvpool.node.admin.certificate_store import CertificateStore
from nvpool.node.admin.drives import MoveProgress, drives_status
from nvpool.node.admin.lost_files import LostFiles
from nvpool.node.admin.nodes import node_map_status
from nvpool.node.admin.scrub import scrub_status
from nvpool.node.admin.shards import shards_status
from nvpool.node.child_process import Child
from nvpool.node.coordination.etcd_members import EtcdMembers
from nvpool.node.coordination.leadership import Leading
from nvpool.node.health_history import HealthWatch
from nvpool.poolmap.certificate_expiry import problems as expiring_problems
from nvpool.poolmap.chains.transitions import remaining
from nvpool.poolmap.health_checks import Health, HealthProblem, exit_code
from nvpool.poolmap.model import Node, PoolMap, Shard, Target
from nvpool.poolmap.shards.members import endpoints_of, members, node_and_path, process_name
from nvpool.provision.tokens import address_of
from nvpool.rpc.connection_pool import Dialer
from nvpool.rpc.messages.read_write_codec import decoded
from nvpool.rpc.v1 import data_pb2, meta_pb2, pool_pb2, wire_pb2

_DEADLINE_S = 2.0
_PROBLEM_FIELDS = (
    "kind",
    "severity",
    "node",
    "name",
    "target",
    "drive",
    "shard",
    "member",
    "count",
    "reason",
    "remedy",
    "since_ms",
    "text",
)


class PoolStatus:
    def __init__(
        self,
        directory: PoolDirectory,
        node: int,
        coordinator: MapCoordinator,
        leading: Leading,
        dialer: Dialer,
        etcd: EtcdMembers | None,
        children: Mapping[str, Child],
        certificates: CertificateStore,
        *,
        is_stopping: Callable[[], bool],
        replace_after_s: float,
        plain_text: bool = False,
    ) -> None:
        """`children`: processes of this node by name, kept up to date by the caller.

        `plain_text`: from node.toml.
        """
        self._directory = directory
        self._node = node
        self._coordinator = coordinator
        self._leading = leading
        self._dialer = dialer
        self._etcd = etcd
        self._children = children
        self.certificates = certificates
        self._is_stopping = is_stopping
        self._replace_after_s = replace_after_s
        self._plain_text = plain_text
        self._since_ms = SYSTEM_CLOCK.wall_ns() // 1_000_000
        self._losses = LostFiles(directory)
        self._progress = MoveProgress()
        self.paths = KnownPaths(lambda: coordinator.pool_map, dialer, SYSTEM_CLOCK)
        self.watch = HealthWatch(lambda: coordinator.pool_map, self._targets)

    async def used_bytes(self) -> dict[int, int]:
        """Used bytes of each target that answers."""
        return {
            one["target"]: one["used_bytes"] for one in await self._targets() if one["used_bytes"] is not None
        }

    async def _targets(self) -> list[dict]:
        return await asyncio.gather(
            *(self._target_status(target) for target in remaining(self._coordinator.pool_map))
        )

    async def report(self, until_s: float, issued: bool = False) -> dict:
        """Content of `nvpool status --json`: pool, processes, drives, problems.

        With `issued` it includes the certificates that this node has signed. The paths of damaged files are
        looked up for a short time, at most until `until_s`.
        """
        pool_map = self._coordinator.pool_map
        shards = [self._shard_status(shard, member) for shard in pool_map.shards for member in members(shard)]
        targets = [self._target_status(target) for target in pool_map.targets if not target.is_over]
        nodes, answers = await asyncio.gather(
            asyncio.gather(*(self._node_status(node) for node in pool_map.nodes)),
            asyncio.gather(*shards, *targets),
        )
        metas, stores = answers[: len(shards)], answers[len(shards) :]
        bad_blocks = [bad for store in stores for bad in store["bad_blocks"]]
        look_s = min(LOOK_S, until_s - SYSTEM_CLOCK.boottime_s())
        if bad_blocks and look_s > 0:
            await self.paths.look((bad["inode"] for bad in bad_blocks), look_s)
        for bad in bad_blocks:
            path = self.paths.path(bad["inode"])
            bad["path"] = os.fsdecode(path) if path is not None else None
        processes = [
            {
                "role": "supervisor",
                "pid": os.getpid(),
                "state": "draining" if self._is_stopping() else "serving",
                "since_ms": self._since_ms,
                "restarts": 0,
                "endpoints": self._endpoints_of_node(pool_map),
            }
        ]
        processes += metas
        processes += stores
        for name, state in self._directory.states().items():
            if state.role in ("mount", "reader", "holder"):
                processes.append(
                    {
                        "role": state.role,
                        "name": name,
                        "pid": state.pid,
                        "state": state.state,
                        "since_ms": state.since_ms,
                        "mountpoint": state.mountpoint,
                        "engine": state.engine,
                    }
                )
        dead = self._directory.dead_mounts()
        processes += [
            {
                "role": "mount",
                "name": name,
                "pid": 0,
                "state": "dead",
                "since_ms": state.since_ms,
                "mountpoint": state.mountpoint,
            }
            for name, state in dead.items()
        ]
        serving = frozenset(store["target"] for store in stores if store["state"] in ("serving", "draining"))
        used = {store["target"]: store["used_bytes"] for store in stores if store["used_bytes"] is not None}
        chains = self._progress.status(pool_map, serving, used)
        drives = drives_status(pool_map, {store["target"]: store for store in stores})
        found = Health(
            pool_map,
            nodes,
            metas,
            stores,
            pool=str(self._directory.path),
            replace_after_s=self._replace_after_s,
            stalled_s=self.watch.stalled_s(),
            can_change=self._can_change(),
        ).problems()
        found = self._map_problems() + found
        found += [_bad_block(store, bad) for store in stores for bad in store["bad_blocks"]]
        if until_s > SYSTEM_CLOCK.boottime_s():
            found += [
                HealthProblem(
                    "data-lost",
                    text,
                    "nvpool fsck POOL names the files; put them back from a copy, or remove them",
                    "damaged",
                )
                if "; `nvpool fsck POOL`" in text
                else HealthProblem("data-lost", text, severity="damaged")
                for text in await self._losses.problems(pool_map)
            ]
        certificates, now_s = self.certificates.status(), SYSTEM_CLOCK.wall_ns() / 1e9
        expiring = expiring_problems(
            certificates,
            now_s,
            node=self._node,
            pool=str(self._directory.path),
            trouble=self.certificates.trouble,
        )
        found += [problem for problem in expiring if problem.severity != "notice"]
        is_degraded = bool(found)
        found += [problem for problem in expiring if problem.severity == "notice"]
        found += [
            HealthProblem(
                "mount-dead",
                f"the mount at {state.mountpoint} is dead, its process {state.pid} is gone",
                f"clean it up with: nvpool umount {state.mountpoint}",
                "notice",
                node=self._node,
                name=name,
            )
            for name, state in dead.items()
        ]
        if self._plain_text and any(
            "+unix:" not in endpoint for endpoint in self._endpoints_of_node(pool_map)
        ):
            found.append(
                HealthProblem(
                    "plain-text",
                    f"node {self._node} speaks plain text over TCP: all who reach its ports may "
                    f"read and change everything",
                    "where the network is not the pool's alone, set network.plain_text = false in node.toml of "
                    "all nodes and clients",
                    "notice",
                    node=self._node,
                )
            )
        found = [_completed(problem, str(self._directory.path)) for problem in self.watch.since(found)]
        problems = [
            problem.text for problem in found if problem.kind != "plain-text"
        ]  # a setting is no problem
        return {
            "nodes": nodes,
            "members": pool_map.members,
            "certificates": certificates,
            "revoked": [one.member for one in pool_map.revoked],
            "pool": {
                "id": pool_map.pool_id,
                "name": pool_map.name,
                "epoch": pool_map.epoch,
                "format": pool_map.format,
                "fingerprint": pool_map.fingerprint,
                "chunk_bytes": pool_map.settings.chunk_bytes,
                "replicas": pool_map.settings.replicas,
                "directory": str(self._directory.path),
                "software": f"nvpool {VERSION}",
                "now_ms": SYSTEM_CLOCK.wall_ns() // 1_000_000,
                "state": "degraded" if is_degraded else "serving",
            },
            "processes": [{"node": self._node} | process for process in processes],
            "drives": drives,
            "shards": shards_status(pool_map, metas),
            "chains": chains,
            "problems": problems,
            "health": {"exit_code": exit_code(found), "problems": list(map(_problem_status, found))},
        } | ({"issued": self.certificates.issued_status()} if issued else {})

    def _can_change(self) -> bool:
        """Whether the pool map can be changed, as far as this node knows."""
        return not any(
            "cannot be changed" in text for text in (self._etcd.problems() if self._etcd is not None else ())
        )

    def _map_problems(self) -> list[HealthProblem]:
        """Problems that the keeper of the pool's etcd reports, with reason and remedy separated."""
        found = []
        for at, text in enumerate(self._etcd.problems() if self._etcd is not None else ()):
            reason, _, remedy = text.partition(" (lost for good: ")
            if remedy:
                remedy = (
                    f"start the nodes that keep the map and do not answer; when most are lost for good: nvpool node "
                    f"recover-etcd {self._directory.path} --yes"
                )
            elif text.startswith("etcd on node"):
                remedy = "start that node; one that is lost for good is replaced by itself where another node can keep the map"
            found.append(
                HealthProblem(
                    "map",
                    reason,
                    remedy,
                    "unavailable" if "cannot be changed" in text else "degraded",
                    name=f"etcd {at}",
                )
            )
        return found

    def _endpoints_of_node(self, pool_map: PoolMap) -> tuple[str, ...]:
        return next((node.endpoints for node in pool_map.nodes if node.id == self._node), ())

    def _seen(self, name: str, role: str, endpoints: tuple[str, ...], node: int) -> dict:
        child = self._children.get(name)
        if child is None and node != self._node:
            return {
                "role": role,
                "name": name,
                "node": node,
                "pid": None,
                "state": "serving",
                "restarts": None,
                "since_ms": 0,
                "endpoints": endpoints,
                "counters": {},
            }  # changed later if it does not answer
        if child is None:
            return {
                "role": role,
                "name": name,
                "node": node,
                "pid": 0,
                "state": "stopped",
                "restarts": 0,
                "since_ms": 0,
                "endpoints": endpoints,
                "counters": {},
            }
        return {
            "role": role,
            "name": name,
            "node": node,
            "pid": child.pid,
            "state": child.state,
            "restarts": child.restarts,
            "since_ms": child.since_ms,
            "endpoints": endpoints,
            "adopted": child.adopted,
            "last_end": child.last_end,
            "counters": {},
        } | ({"reason": child.reason} if child.reason else {})

    async def _node_status(self, node: Node) -> dict:
        pool_map = self._coordinator.pool_map
        seen = {
            "node": node.id,
            "name": node.name,
            "address": address_of(node),
            "member": node.member,
            "state": "serving",
            "endpoints": node.endpoints,
        } | node_map_status(pool_map, node, self._leading.leader())
        if node.id != self._node:
            await self.ask(
                seen, wire_pb2.POOL_MAP, pool_pb2.MapRequest(newer_than=pool_map.epoch), pool_pb2.MapReply
            )
        return seen

    async def node_answers(self, node: Node) -> bool:
        seen = {"state": "serving", "endpoints": node.endpoints}
        return await self.ask(seen, wire_pb2.POOL_MAP, pool_pb2.MapRequest(), pool_pb2.MapReply) is not None

    async def _shard_status(self, shard: Shard, member: int) -> dict:
        seen = self._seen(
            process_name(shard.id, member),
            "meta",
            endpoints_of(shard, member),
            node_and_path(shard, member)[0],
        )
        state = next((standby.state for standby in shard.standbys if standby.member == member), "primary")
        seen |= {"shard": shard.id, "member": member, "in_map": state}
        reply = await self.ask(
            seen, wire_pb2.META_STATUS, meta_pb2.MetaStatusRequest(), meta_pb2.MetaStatusReply
        )
        if reply is not None:
            if reply.reason:
                seen["reason"] = reply.reason
            if reply.state not in ("standby", "filling", "empty"):  # it serves in its role
                seen |= {
                    "state": reply.state or seen["state"],
                    "inodes": reply.inodes,
                    "sessions": reply.sessions,
                    "orphans": reply.orphans,
                    "to_collect": reply.to_collect,
                }
            seen["counters"] = dict(reply.counters)
        return seen

    async def _target_status(self, target: Target) -> dict:
        seen = self._seen(f"target-{target.id}", "store", target.endpoints, target.node)
        drive = next(drive for drive in self._coordinator.pool_map.drives if drive.id == target.drive)
        seen |= {
            "target": target.id,
            "drive": target.drive,
            "path": drive.path,
            "capacity_bytes": target.capacity_bytes,
            "used_bytes": None,
            "bad_blocks": [],
        }
        reply = await self.ask(
            seen, wire_pb2.DATA_STATUS, data_pb2.DataStatusRequest(target=target.id), data_pb2.DataStatusReply
        )
        if reply is not None:
            seen |= {
                "state": reply.state or seen["state"],
                "used_bytes": reply.used_bytes,
                "kind": reply.kind,
                "read_path": reply.read_path,
                "direct": reply.direct,
                "writes": reply.writes,
                "host_full": reply.host_full,
                "lacks_room": reply.lacks_room,
                "resync_wait": reply.resync_wait,
                "strays_wait": reply.strays_wait,
                "counters": dict(reply.counters),
                "scrub": scrub_status(reply.scrubbing),
                "serving_pid": reply.pid,
                "refused": reply.refused,
                "bad_blocks": [
                    {"inode": bad.inode, "index": bad.index, "block": bad.block, "text": bad.text}
                    for bad in reply.bad
                ],
            }
            if reply.fenced_because:
                seen["reason"] = reply.fenced_because
        return seen

    async def ask(self, seen: dict, method: int, request, reply_type) -> Any:
        """Ask the process for its status. None, with the reason in `seen`, if it does not answer in time."""
        if seen["state"] != "serving":
            return None
        try:
            reply = await self._dialer.call(
                seen["endpoints"],
                method,
                request.SerializeToString(),
                deadline_s=SYSTEM_CLOCK.boottime_s() + _DEADLINE_S,
            )
            return decoded(reply_type, reply.message)
        except NvpoolError as error:
            seen["state"], seen["reason"], seen["hangs"] = (
                "silent",
                str(error),
                isinstance(error, DeadlineExceeded),
            )
            return None


def _completed(problem: HealthProblem, pool: str) -> HealthProblem:
    return structs.replace(
        problem, reason=with_pool(problem.reason, pool), remedy=with_pool(problem.remedy, pool)
    )


def _problem_status(problem: HealthProblem) -> dict:
    return {name: getattr(problem, name) for name in _PROBLEM_FIELDS}


def _bad_block(store: dict, bad: dict) -> HealthProblem:
    path = bad["path"]
    file = (
        f"file {printable(os.fsencode(path))}, " if path else "a file without a name, " if path == "" else ""
    )
    names = "; `nvpool fsck POOL` names the file" if path is None else ""
    return HealthProblem(
        "bad-block",
        f"bad block on target {store['target']} ({store['path']}): {file}inode {bad['inode']} chunk "
        f"{bad['index']} block {bad['block']} {bad['text']}{names}",
        severity="damaged",
        node=store["node"],
        name=f"{store['name']} {bad['inode']}.{bad['index']}.{bad['block']}",
        target=store["target"],
        drive=store["drive"],
    )
