"""Reports of a client about a primary that does not answer, on manual time."""

import asyncio
from math import inf
from types import SimpleNamespace

import pytest

from nvpool.client.rpc.primary_connections import SILENT_LOG_S, SILENT_S, PrimaryConnections
from nvpool.core.clock import ManualClock
from nvpool.core.errors import Unreachable
from nvpool.poolmap.model import MAP_FORMAT, PoolMap, PoolSettings, Shard


class Bench:
    def __init__(self):
        self.clock = ManualClock()
        self.unanswered_s, self.followed = inf, 0
        self.connection = SimpleNamespace(unanswered_since_s=lambda besides: self.unanswered_s)
        pool_map = PoolMap(
            MAP_FORMAT, "p", "p", 1, PoolSettings(), shards=(Shard(1, 2, ("stream://10.0.0.2:7",)),)
        )
        (self.shard,) = pool_map.shards
        view = SimpleNamespace(map=pool_map, changed=[], follow=self.follow)
        self.primaries = PrimaryConnections(view, self, self.clock)

    def follow(self):
        self.followed += 1

    def live(self, endpoints):
        return self.connection

    def connections(self, endpoints):
        return [self.connection] if self.connection is not None else []

    async def connect(self, endpoints, deadline_s):
        raise Unreachable("no reply")

    def looked(self, after_s):
        self.clock.advance(after_s)
        self.primaries.look()
        return round(self.primaries.silent_s()[1], 3)


def test_silent_primary_is_logged_once(caplog):
    bench = Bench()
    assert bench.looked(100.0) == 0
    bench.unanswered_s = bench.clock.boottime_s()
    assert bench.looked(SILENT_S) == 0 and bench.looked(1.0) == SILENT_S + 1.0 and not caplog.messages
    for _ in range(5):
        bench.looked(SILENT_LOG_S)
    (message,) = caplog.messages
    assert "shard 1, meta-1 on node 2 (stream://10.0.0.2:7)" in message and "nvpool status" in message
    bench.unanswered_s = inf
    assert bench.looked(1.0) == 0 and "answers this client again" in caplog.messages[-1]


def test_unreachable_primary_is_silent():
    bench = Bench()
    bench.connection = None

    async def ask():
        with pytest.raises(Unreachable):
            await bench.primaries.connection(bench.shard, 1.0)
        bench.primaries.close()

    asyncio.run(ask())
    assert bench.looked(SILENT_S + 1.0) == SILENT_S + 1.0
    bench.clock.advance(1.0)
    assert bench.looked(0.0) == SILENT_S + 2.0
