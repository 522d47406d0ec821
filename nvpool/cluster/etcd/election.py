"""Leadership of the pool in etcd: a key with the leader's name and a key with its heartbeat.

The leader writes the heartbeat five times in each lease. The leadership does not use a lease of etcd's: those
start again with each new etcd leader and are checked twice a second. A candidate that waits for their end
would wait for etcd's election, the whole lease and that check, one after the other. Here each candidate
measures the time itself while etcd elects (cluster/etcd/election_timing).

Guarantees: the lease ends here before another candidate may acquire it, since it counts from the sending of
the last successful heartbeat and allows for a slow clock. A heartbeat that took longer than half of the lease
does not count.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from aetcd import rpc

from nvpool.cluster.etcd.client import EtcdCalls
from nvpool.cluster.etcd.election_timing import ElectionTiming, LeaderHeartbeat
from nvpool.cluster.etcd.leases import CLOCKS_DIFFER, RenewedLease
from nvpool.core.clock import Clock
from nvpool.core.errors import CorruptRecord, Unavailable

LEADER, SIGN = b"leader", b"leads"
"""Keys below the pool's root: the leader's name, and its heartbeat.

The heartbeat is "LEASE TOKEN LED": the lease and the time since the leadership began, both in seconds. The
first heartbeat has no LED."""
_SIGNS = 5
"""Heartbeats per lease: four may be lost or late."""


def read_sign(leader: rpc.KeyValue | None, sign: rpc.KeyValue | None) -> LeaderHeartbeat:
    """Decode these keys; None: the key does not exist. CorruptRecord."""
    if leader is None:
        return LeaderHeartbeat()
    name = leader.value.decode()
    if leader.lease or sign is None:
        return LeaderHeartbeat(name, leader.mod_revision)
    lease_s, token, led_s = (*sign.value.decode().split(" "), "", "")[:3]
    try:
        return LeaderHeartbeat(
            name, leader.mod_revision, sign.mod_revision, float(lease_s), token, float(led_s or 0)
        )
    except ValueError:
        raise CorruptRecord(
            f"the heartbeat of node {name}, which leads the pool, cannot be read: {sign.value!r}"
        ) from None


def follows(root: bytes, revision: int, key: bytes = LEADER) -> rpc.Compare:
    """Condition that the key has this modification revision; 0: that it does not exist."""
    return rpc.Compare(
        key=root + key,
        target=rpc.Compare.CompareTarget.MOD,
        result=rpc.Compare.CompareResult.EQUAL,
        mod_revision=revision,
    )


def _put(key: bytes, value: bytes) -> rpc.RequestOp:
    return rpc.RequestOp(request_put=rpc.PutRequest(key=key, value=value))


class EtcdLeadershipLease(RenewedLease):
    """The pool's only leadership lease."""

    def __init__(
        self,
        calls: EtcdCalls,
        clock: Clock,
        root: bytes,
        sign: bytes,
        revision: int,
        lease_s: float,
        sent_s: float,
        former: str | None,
        former_led_s: float,
        ran_out: Callable[[], None],
    ) -> None:
        self._calls = calls
        self._clock = clock
        self._root = root
        self._sign = sign
        self.lease_s = lease_s
        self._begun_s = self._sent_s = sent_s
        self._ran_out = ran_out
        self.revision = revision
        """Revision at which the leadership began: the condition of all changes under it."""
        self.former = former
        self.former_led_s = former_led_s
        self._begin(self._renew())

    @classmethod
    async def take(
        cls, calls: EtcdCalls, clock: Clock, root: bytes, name: str, lease_s: float, election: ElectionTiming
    ) -> EtcdLeadershipLease | None:
        """Acquire the leadership, or return None.

        None: another node has it, or has written a heartbeat that `election` has not seen. Unavailable.
        """
        seen, former, token, sent_s = (
            election.seen,
            election.former(),
            clock.secret(8).hex(),
            clock.boottime_s(),
        )
        former_led_s = election.led_s(sent_s)
        election.begins(token)
        sign = f"{lease_s} {token}".encode()
        looks = [rpc.RequestOp(request_range=rpc.RangeRequest(key=root + key)) for key in (LEADER, SIGN)]
        done = None
        try:
            done = await calls.transact(
                rpc.TxnRequest(
                    compare=[follows(root, seen.leader_revision), follows(root, seen.renewed, SIGN)],
                    success=[_put(root + LEADER, name.encode()), _put(root + SIGN, sign)],
                    failure=looks,
                ),
                lease_s / 2,
            )
        finally:
            if done is None:
                election.has_ended(token, former)
        revision = done.header.revision
        if not done.succeeded:
            # perhaps our own first attempt succeeded, and its answer was lost
            leader, found = (next(iter(answer.response_range.kvs), None) for answer in done.responses)
            if found is None or found.value != sign or leader is None:
                return None
            revision = leader.mod_revision
        return cls(
            calls,
            clock,
            root,
            sign,
            revision,
            lease_s,
            sent_s,
            former,
            former_led_s,
            lambda: election.has_ended(token, name),
        )

    @property
    def _until_s(self) -> float:
        return self._sent_s + self.lease_s * (1 - CLOCKS_DIFFER)

    @property
    def left_s(self) -> float:
        return 0.0 if self.lost.done() else max(0.0, self._until_s - self._clock.boottime_s())

    @property
    def holds(self) -> bool:
        return self.left_s > 0

    @property
    def in_doubt(self) -> bool:
        return self.left_s < self.lease_s / 2

    async def _renew(self) -> None:
        """Send heartbeats. None waits for an earlier one, so that the next makes up for a slow one."""
        next_s = self._sent_s
        try:
            async with asyncio.TaskGroup() as signs:
                while not self.lost.done():
                    next_s = max(next_s + self.lease_s / _SIGNS, self._clock.boottime_s())
                    await asyncio.sleep(max(0.0, min(next_s, self._until_s) - self._clock.boottime_s()))
                    if not self.holds:
                        self._end()
                        self._ran_out()
                        return
                    signs.create_task(self._give_sign(self._clock.boottime_s()))
        finally:
            self._end()

    async def _give_sign(self, sent_s: float) -> None:
        led_s = (sent_s - self._begun_s) * (1 - CLOCKS_DIFFER)
        sign = b"%s %.1f" % (self._sign, led_s)
        try:
            done = await self._calls.transact(
                rpc.TxnRequest(
                    compare=[follows(self._root, self.revision)], success=[_put(self._root + SIGN, sign)]
                ),
                self.lease_s / 2,
            )
        except Unavailable:
            return
        if not done.succeeded:
            self._end()
        elif self._clock.boottime_s() - sent_s < self.lease_s / 2:
            self._sent_s = max(self._sent_s, sent_s)

    async def _give_back(self, wait_s: float) -> None:
        drops = [
            rpc.RequestOp(request_delete_range=rpc.DeleteRangeRequest(key=self._root + key))
            for key in (LEADER, SIGN)
        ]
        await self._calls.transact(
            rpc.TxnRequest(compare=[follows(self._root, self.revision)], success=drops), wait_s
        )
