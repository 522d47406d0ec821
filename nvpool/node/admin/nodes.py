"""Admin commands for nodes: join tokens, racks, drain, remove, and removal of lost nodes.

Used by node/supervisor for the verbs of POOL_CHANGE. A command is one change of the map, and is refused
before anything is changed. The work that follows continues after any restart, since its whole state is in the
map. `run_once` does this node's part: it stops the processes of this node when the node is drained and shall
stop. On the leader it removes lost nodes that nothing in the map refers to any more.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from functools import partial

from nvpool.core.errors import InUse, InvalidRequest, NvpoolError
from nvpool.node.admin.drives import waits_for
from nvpool.node.admin.join_server import JoinServer
from nvpool.node.coordination.etcd_members import EtcdMembers
from nvpool.node.coordination.leadership import Leading
from nvpool.poolmap.model import Node, PoolMap
from nvpool.poolmap.nodes import lifecycle as node_lifecycle
from nvpool.poolmap.nodes.membership import member_removed
from nvpool.poolmap.shards.members import members, node_and_path
from nvpool.provision.tokens import TOKEN_S, now_ms

LOOK_S = 1.0

log = logging.getLogger("nvpool.node.admin.nodes")


async def look_after(*parts: Callable[[], Awaitable[None]]) -> None:
    """Run each part periodically, until cancelled.

    An error that keeps a part from its work is logged once.
    """
    said = [""] * len(parts)
    while True:
        for at, part in enumerate(parts):
            try:
                await part()
                said[at] = ""
            except (NvpoolError, OSError) as error:
                if str(error) != said[at]:
                    log.warning("a state that the pool map asks for is not reached yet: %s", error)
                said[at] = str(error)
        await asyncio.sleep(LOOK_S)


class Nodes:
    def __init__(
        self,
        node: int,
        leading: Leading,
        reception: JoinServer | None,
        etcd: EtcdMembers | None,
        *,
        used: Callable[[], Awaitable[dict[int, int]]],
        answers: Callable[[Node], Awaitable[bool]],
        stop: Callable[[str], None],
    ) -> None:
        """Create the commands.

        `used`: returns the bytes that targets hold, for those that answer. `answers`: whether a node's
        supervisor answers. `stop`: stops all processes of this node, for the reason given.
        """
        self._node = node
        self._leading = leading
        self._reception = reception
        self._etcd = etcd
        self._used = used
        self._answers = answers
        self._stop = stop
        self.verbs: dict[str, Callable[[dict], Awaitable[dict]]] = {
            "token": self._token,
            "member-remove": self._member_remove,
            "node-remove": self._remove,
            "node-drain": self._drain,
            "node-rack": self._rack,
        }

    async def run_once(self) -> None:
        pool_map = self._leading.pool_map
        own = pool_map.node_by_id.get(self._node)
        if (
            own is not None
            and own.desired_state == "stop"
            and self._leading.manager is None
            and node_lifecycle.left_on(pool_map, self._node).nothing
        ):
            self._stop("this node is drained, and was to stop then")
        if self._leading.manager is not None and node_lifecycle.settled(pool_map, now_ms()) is not pool_map:
            await self._leading.change_as_leader(lambda newest: node_lifecycle.settled(newest, now_ms()))

    async def _token(self, arguments: dict) -> dict:
        if self._reception is None:
            raise InvalidRequest("this node cannot admit members: its supervisor has no map backend")
        try:
            kind, lives_s = str(arguments.get("kind", "node")), float(arguments.get("lives_s", TOKEN_S))
        except (TypeError, ValueError):
            raise InvalidRequest("token wants a kind and lives_s") from None
        acts_as = arguments.get("acts_as")
        if acts_as is not None and not (
            isinstance(acts_as, list) and len(acts_as) == 2 and all(type(number) is int for number in acts_as)
        ):
            raise InvalidRequest("acts_as is a list of two numbers, of user and group")
        squash_root = arguments.get("squash_root", False)
        if not isinstance(squash_root, bool):
            raise InvalidRequest("squash_root is true or false")
        return await self._reception.make_token(
            kind, lives_s, tuple(acts_as) if acts_as is not None else None, squash_root
        )

    async def _member_remove(self, arguments: dict) -> dict:
        member = str(arguments.get("member", ""))
        new = await self._leading.change(lambda newest: member_removed(newest, member))
        return {"member": member, "epoch": new.epoch}

    async def _remove(self, arguments: dict) -> dict:
        number, give_up = _number(arguments, "node-remove"), bool(arguments.get("give_up", False))
        if node_lifecycle.has_left(self._leading.pool_map, number):
            return self._node_status(self._leading.pool_map, number)
        if not arguments.get("lost", False):
            node_lifecycle.check_empty(self._leading.pool_map, number)
            if self._etcd is not None:
                await self._etcd.leave(number)  # first: without its certificate etcd may lose the quorum
            return self._node_status(
                await self._leading.change(lambda newest: node_lifecycle.removed(newest, number, now_ms())),
                number,
            )
        node = node_lifecycle.node_of(self._leading.pool_map, number)
        if number == self._node:
            raise InvalidRequest(f"this is node {number}; whether it is lost is said on another node")
        if await self._answers(node):
            raise InUse(
                f"node {number} answers; first: nvpool node drain POOL {number} --wait   or end its processes"
            )
        used = await self._used()
        wanted = partial(
            node_lifecycle.lost, number=number, used_bytes=used, now_ms=now_ms(), give_up=give_up
        )
        return self._node_status(await self._leading.change(wanted), number)

    async def _drain(self, arguments: dict) -> dict:
        number, stop = _number(arguments, "node-drain"), bool(arguments.get("stop", False))
        if arguments.get("cancel", False):
            return self._node_status(
                await self._leading.change(lambda newest: node_lifecycle.shares_again(newest, number)), number
            )
        used = await self._used()
        return self._node_status(
            await self._leading.change(
                lambda newest: node_lifecycle.drained(newest, number, used, stop=stop)
            ),
            number,
        )

    async def _rack(self, arguments: dict) -> dict:
        number, rack = _number(arguments, "node-rack"), str(arguments.get("rack", ""))
        return self._node_status(
            await self._leading.change(lambda newest: node_lifecycle.in_rack(newest, number, rack)), number
        )

    def _node_status(self, pool_map: PoolMap, number: int) -> dict:
        node = pool_map.node_by_id.get(number)
        if node is None:
            return {"node": number, "desired_state": "removed", "epoch": pool_map.epoch}
        status = {"node": number, "epoch": pool_map.epoch, "waits_for": waits_for(pool_map)}
        return status | node_map_status(pool_map, node, self._leading.leader())


def node_map_status(pool_map: PoolMap, node: Node, leader: int | None) -> dict:
    """Status of a node that the map alone gives."""
    left = node_lifecycle.left_on(pool_map, node.id)
    leads = leader == node.id
    admin_state = {"share": "", "drain": "draining", "stop": "draining", "lost": "lost"}[node.desired_state]
    if admin_state == "draining" and left.nothing and not leads:
        admin_state = "drained"
    places = [
        (shard.id, member == shard.member)
        for shard in pool_map.shards
        for member in members(shard)
        if node_and_path(shard, member)[0] == node.id
    ]
    return {
        "desired_state": admin_state,
        "rack": node.rack,
        "leads": leads,
        "etcd": left.etcd,
        "chains": left.chains,
        "drives": len(node_lifecycle.targets_of(pool_map, node.id)),
        "primaries": [shard for shard, primary in places if primary],
        "standbys": [shard for shard, primary in places if not primary],
    }


def _number(arguments: dict, verb: str) -> int:
    try:
        return int(arguments["node"])
    except (KeyError, TypeError, ValueError):
        raise InvalidRequest(f"{verb} wants a node") from None
