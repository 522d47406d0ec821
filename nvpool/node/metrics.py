"""Metrics of a node: the supervisor's page, and those of all processes of the node with the label `process`.

All processes are asked concurrently. Guarantees that the page is complete within the given time: a process
that has not answered by then has nvpool_up 0 and nothing else. Used by node/supervisor.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from nvpool.core.clock import SYSTEM_CLOCK
from nvpool.core.errors import NvpoolError
from nvpool.metrics import registry as metrics
from nvpool.metrics.exposition import Page
from nvpool.node.admin.drives import coming, going, held
from nvpool.node.child_process import Child
from nvpool.poolmap.chains.rebalance import missing_copies, standing
from nvpool.poolmap.model import PoolMap
from nvpool.poolmap.shards.members import endpoints_of, members, process_name, up_standbys
from nvpool.poolmap.shards.placement import wanted
from nvpool.rpc.connection_pool import Dialer
from nvpool.rpc.messages.read_write_codec import decoded
from nvpool.rpc.v1.pool_pb2 import MetricsReply, MetricsRequest
from nvpool.rpc.v1.wire_pb2 import PROCESS_METRICS
from nvpool.security.ca import CertificateFacts

ANSWER_S, ANSWER_S_MAX = 2.0, 30.0
"""Time limits for the processes of a node: far below Prometheus's default scrape timeout of ten seconds."""


class PolledProcess(NamedTuple):
    """A process of this node. It is not asked if it has no endpoints or is known not to serve."""

    name: str
    endpoints: tuple[str, ...]
    serves: bool


async def node_page(
    own: Page, processes: Iterable[PolledProcess], dialer: Dialer, wait_s: float = ANSWER_S
) -> Page:
    """Merge `own` (the supervisor's page) with the pages of these processes, each with its name.

    Returns within little more than `wait_s`.
    """
    began_s = SYSTEM_CLOCK.boottime_s()
    deadline_s = began_s + max(0.05, min(wait_s, ANSWER_S_MAX))
    own.set(metrics.UP, 1)
    processes = list(processes)
    pages = await asyncio.gather(*(_page_of(one, dialer, deadline_s) for one in processes))
    own.set(metrics.SCRAPE_SECONDS, SYSTEM_CLOCK.boottime_s() - began_s)
    whole = Page()
    whole.add(own, process="supervisor")
    for one, page in zip(processes, pages, strict=True):
        whole.add(page, process=one.name)
    return whole


async def _page_of(one: PolledProcess, dialer: Dialer, deadline_s: float) -> Page:
    page = Page()
    if one.serves and one.endpoints:
        try:
            async with asyncio.timeout_at(
                asyncio.get_running_loop().time() + deadline_s - SYSTEM_CLOCK.boottime_s()
            ):
                reply = await dialer.call(
                    one.endpoints,
                    PROCESS_METRICS,
                    MetricsRequest().SerializeToString(),
                    deadline_s=deadline_s,
                )
            page = Page.unpack(decoded(MetricsReply, reply.message).page)
        except (NvpoolError, TimeoutError):
            page.set(metrics.UP, 0)
            return page
    page.set(metrics.UP, one.serves)
    return page


def measure_pool(
    page: Page,
    pool_map: PoolMap,
    node: int,
    leads: bool,
    children: Iterable[Child],
    stalled_s: Mapping[int, float] | None = None,
) -> None:
    """Add the supervisor's own metrics: the pool according to the map, and restarts of its processes.

    `stalled_s`: drive -> seconds without progress of its drain.
    """
    page.set(metrics.POOL_EPOCH, pool_map.epoch)
    page.set(metrics.POOL_LEADS, leads)
    page.set(metrics.POOL_NODES, len(pool_map.nodes))
    targets = [target for target in pool_map.targets if target.state != "gone"]
    seen = standing(pool_map, frozenset(target.id for target in targets if target.state == "up"))
    for state, count in (("full", seen.full), ("fewer", seen.short), ("without", seen.without)):
        page.set(metrics.POOL_CHAINS, count, state=state)
    page.set(metrics.POOL_COPIES_LEFT, seen.to_copy)
    page.set(metrics.POOL_FILLING, seen.filled)
    page.set(metrics.POOL_MOVING_PAUSED, pool_map.moving.paused)
    for state in ("up", "down"):
        page.set(metrics.POOL_TARGETS, sum(target.state == state for target in targets), state=state)
    for state in ("up", "syncing"):
        page.set(
            metrics.POOL_STANDBYS,
            sum(standby.state == state for shard in pool_map.shards for standby in shard.standbys),
            state=state,
        )
    for shard in pool_map.shards:
        page.set(metrics.SHARD_STANDBYS, wanted(shard), shard=shard.id, state="wanted")
        page.set(metrics.SHARD_STANDBYS, len(up_standbys(shard)), shard=shard.id, state="up")
    missing = missing_copies(pool_map)
    for target in targets:
        page.set(metrics.TARGET_CHAINS_MISSING, missing[target.id], target=target.id)
        if target.desired_state in ("drain", "remove"):
            page.set(metrics.DRAIN_STALLED, (stalled_s or {}).get(target.drive, 0.0), target=target.id)
    for state, counts in (
        ("holds", held(pool_map)),
        ("to_come", coming(pool_map)),
        ("to_go", going(pool_map)),
    ):
        for target in targets:
            if target.node == node:
                page.set(metrics.TARGET_CHAINS, counts[target.id], target=target.id, state=state)
    for child in children:
        page.set(metrics.CHILD_RESTARTS, child.restarts, child=child.name)


def measure_certificates(page: Page, found: Mapping[str, CertificateFacts], now_s: float) -> None:
    for kind, one in found.items():
        page.set(metrics.CERTIFICATE_LEFT, one.ends_s - now_s, kind=kind)


def asked(pool_map: PoolMap, children: Iterable[Child]) -> list[PolledProcess]:
    """Processes of this node to be asked. Of external programs, as etcd, only whether they run is known."""
    found = []
    for child in children:
        endpoints: tuple[str, ...] = ()
        if child.role == "store" and child.number in pool_map.target_by_id:
            endpoints = pool_map.target_by_id[child.number].endpoints
        elif child.role == "meta" and child.number in pool_map.shard_by_id:
            shard = pool_map.shard_by_id[child.number]
            endpoints = next(
                (
                    endpoints_of(shard, member)
                    for member in members(shard)
                    if process_name(shard.id, member) == child.name
                ),
                (),
            )
        found.append(PolledProcess(child.name, endpoints, child.state == "serving"))
    return found
