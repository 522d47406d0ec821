"""Coordinator of a pool of several machines: the pool map, published names and the leader, stored in etcd.

One stream watches all three. It is reopened, after a full read of them, when it breaks or is silent, or when
etcd has compacted the events that were missed. The state known here can be old while etcd is unreachable, and
is never ahead of etcd. Each change is one transaction, conditional on the map's revision in etcd and on the
leader's key. After a lost answer the coordinator reads whether the change was made.

Keys, all under nvpool/POOL_ID/ :

    map                 JSON of poolmap/model, the newest
    maps/EPOCH          the last KEPT_MAPS of them, for operators to inspect; EPOCH has 20 digits
    leader, leads       the leader's name, and its heartbeat (cluster/etcd/election)
    present/NAME        published value, under a lease
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

from aetcd import rpc

from nvpool.cluster.coordinator_api import CoordinatorLease
from nvpool.cluster.etcd.client import END_OF_STREAM, STREAM_ERRORS, EtcdCalls, EtcdCertificates
from nvpool.cluster.etcd.election import LEADER, SIGN, EtcdLeadershipLease, follows, read_sign
from nvpool.cluster.etcd.election_timing import ElectionTiming
from nvpool.cluster.etcd.leases import EtcdLease, give_up
from nvpool.cluster.map_watchers import MapWatchers
from nvpool.core.clock import SYSTEM_CLOCK, Clock
from nvpool.core.errors import (
    CorruptRecord,
    InvalidRequest,
    NvpoolError,
    StaleEpoch,
    StaleLease,
    Unavailable,
    from_os_error,
)
from nvpool.poolmap.model import PoolMap, check_map, decode_map, encode_map, problems_of
from nvpool.poolmap.nodes.etcd_membership import Add, Found, Promote, Remove

log = logging.getLogger(__name__)

KEPT_MAPS = 64
CHANGE_S = 10.0
"""Time that a change of the map, or a lease, waits for etcd: longer than an election there."""
BEAT_S = 0.25
SILENT_S = 1.0
"""Interval of liveness requests (BEAT_S) and silence before a reopening (SILENT_S) of the stream.

The new stream uses another member. SILENT_S is shorter than the leader's lease, whose heartbeats come with
the stream."""
SILENCE_S = 5.0
"""Silence after which etcd is reported as silent: longer than an election takes."""
AGAIN_S = 0.2


_AnyLease = TypeVar("_AnyLease", EtcdLease, EtcdLeadershipLease)


class EtcdCoordinator:
    """Coordinator on etcd, made by `found` or `open`."""

    def __init__(
        self,
        calls: EtcdCalls,
        clock: Clock,
        pool_id: str,
        pool_map: PoolMap,
        publish: Callable[[bytes], None],
        only: str = "",
    ) -> None:
        self.calls = calls
        self._clock = clock
        self.root = root_key(pool_id)
        self._publish = publish
        self._watchers = MapWatchers(pool_map)
        self._map_revision = 0
        self.leases_held: set[EtcdLease | EtcdLeadershipLease] = set()
        self._election = ElectionTiming(only)
        self._about_leader: dict[bytes, rpc.KeyValue] = {}
        self._turn = asyncio.Lock()
        self.following: asyncio.Task | None = None
        self._heard_s = clock.boottime_s()

    @classmethod
    async def found(
        cls,
        members: Sequence[str],
        first: PoolMap,
        publish: Callable[[bytes], None] = lambda raw: None,
        *,
        certificates: EtcdCertificates | None = None,
        clock: Clock = SYSTEM_CLOCK,
        only: str = "",
    ) -> EtcdCoordinator:
        """Create the coordinator of a pool that etcd does not know, with the map `first`. `only` as in
        `over`.

        InvalidRequest: etcd already has a map of the pool; use `open`. Unavailable: the map may have been
        stored.
        """
        if problems := check_map(first):
            raise InvalidRequest("; ".join(problems))
        calls = EtcdCalls(members, clock, certificates)
        key = root_key(first.pool_id) + b"map"
        try:
            done = await calls.transact(
                rpc.TxnRequest(compare=[_is_absent(key)], success=_writes(root_key(first.pool_id), first)),
                CHANGE_S,
            )
            if not done.succeeded:
                raise InvalidRequest("etcd holds a map of this pool already")
        except BaseException:
            await calls.close()
            raise
        await calls.close()
        return await cls.open(
            members, first.pool_id, publish, certificates=certificates, clock=clock, only=only
        )

    @staticmethod
    async def answers(
        members: Sequence[str],
        certificates: EtcdCertificates | None = None,
        *,
        wait_s: float = 2.0,
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        """Check etcd: on return a member has answered with a quorum.

        Unavailable: no member did in that time.
        """
        calls = EtcdCalls(members, clock, certificates)
        try:
            await calls.range(rpc.RangeRequest(key=b"nvpool/", count_only=True), wait_s)
        finally:
            await calls.close()

    @classmethod
    async def open(
        cls,
        members: Sequence[str],
        pool_id: str,
        publish: Callable[[bytes], None] = lambda raw: None,
        *,
        certificates: EtcdCertificates | None = None,
        clock: Clock = SYSTEM_CLOCK,
        only: str = "",
    ) -> EtcdCoordinator:
        """Open the coordinator of a pool that etcd knows; `only` as in `over`.

        CorruptRecord: there is no map of the pool, or an invalid one. Unavailable.
        """
        return await cls.over(EtcdCalls(members, clock, certificates), pool_id, publish, clock, only)

    @classmethod
    async def over(
        cls,
        calls: EtcdCalls,
        pool_id: str,
        publish: Callable[[bytes], None] = lambda raw: None,
        clock: Clock = SYSTEM_CLOCK,
        only: str = "",
    ) -> EtcdCoordinator:
        """Open a coordinator as `open` does, through `calls`, which it owns from here on.

        `only`: a leader name that only this process, and its predecessors that have ended, use. The
        coordinator then does not wait for the leases of those predecessors.
        """
        try:
            found = await calls.ranges(_ranges(root_key(pool_id)), CHANGE_S)
            raw = next(
                (
                    kv.value
                    for answer in found.responses
                    for kv in answer.response_range.kvs
                    if kv.key == root_key(pool_id) + b"map"
                ),
                None,
            )
            if raw is None:
                raise CorruptRecord(f"etcd holds no map of pool {pool_id}")
            coordinator = cls(calls, clock, pool_id, decode_map(raw), publish, only)
            publish(raw)
            coordinator._take(found)
        except BaseException:
            await calls.close()
            raise
        coordinator.following = asyncio.get_running_loop().create_task(coordinator.follow())
        return coordinator

    @staticmethod
    async def overwrite(
        members: Sequence[str],
        pool_id: str,
        after: Callable[[PoolMap], PoolMap],
        *,
        certificates: EtcdCertificates | None = None,
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        """Replace the map in etcd by `after(map)`, whatever its epoch: for recovery.

        CorruptRecord: etcd has no map of the pool. Unavailable: the map may have been replaced.
        """
        calls, root = EtcdCalls(members, clock, certificates), root_key(pool_id)
        try:
            found = await calls.range(rpc.RangeRequest(key=root + b"map"), CHANGE_S)
            if not found.kvs:
                raise CorruptRecord(f"etcd holds no map of pool {pool_id}")
            await calls.transact(
                rpc.TxnRequest(success=_writes(root, after(decode_map(found.kvs[0].value)))), CHANGE_S
            )
        finally:
            await calls.close()

    @staticmethod
    async def forget(
        members: Sequence[str],
        pool_id: str,
        node: int,
        *,
        certificates: EtcdCertificates | None = None,
        wait_s: float = CHANGE_S,
        clock: Clock = SYSTEM_CLOCK,
    ) -> tuple[int, ...]:
        """Record that the pool is destroyed on this node. Return the nodes that still have it.

        When the last node of the map has called this, the result is empty and etcd has no key of the pool.
        May be repeated. Unavailable: perhaps nothing was done.
        """
        calls, root = EtcdCalls(members, clock, certificates), root_key(pool_id)
        try:
            found = await calls.range(rpc.RangeRequest(key=root + b"map"), wait_s)
            if found.kvs:
                await calls.transact(
                    rpc.TxnRequest(success=[_put(root + b"destroyed/%d" % node, b"")]), wait_s
                )
                below = root + b"destroyed/"
                marked = await calls.range(rpc.RangeRequest(key=below, range_end=_behind(below)), wait_s)
                gone = {int(pair.key.rpartition(b"/")[2]) for pair in marked.kvs}
                if left := tuple(
                    one.id for one in decode_map(found.kvs[0].value).nodes if one.id not in gone
                ):
                    return left
            await calls.transact(
                rpc.TxnRequest(
                    success=[
                        rpc.RequestOp(
                            request_delete_range=rpc.DeleteRangeRequest(key=root, range_end=_behind(root))
                        )
                    ]
                ),
                wait_s,
            )
            return ()
        finally:
            await calls.close()

    # -- known state -----------------------------------------------------------------------------------------

    @property
    def pool_map(self) -> PoolMap:
        return self._watchers.pool_map

    async def watch(self, newer_than: int, wait_s: float) -> PoolMap | None:
        return await self._watchers.watch(newer_than, wait_s)

    def present(self) -> Mapping[str, bytes]:
        return self._watchers.present

    async def watch_present(self, known: Mapping[str, bytes], wait_s: float) -> Mapping[str, bytes]:
        return await self._watchers.watch_present(known, wait_s)

    def leader(self) -> str | None:
        return self._election.leader(self._clock.boottime_s())

    @property
    def is_silent(self) -> bool:
        """Whether etcd is silent, so that nothing can be changed."""
        return self._clock.boottime_s() - self._heard_s > SILENCE_S

    def use(self, members: Sequence[str], certificates: EtcdCertificates | None) -> None:
        """Use these members and certificates from now on."""
        self.calls.use(members, certificates)

    async def follow(self) -> None:
        """Keep the state up to date, from the first member unless that has just failed."""
        at = 0
        while True:
            pause_s, began_s = AGAIN_S, self._clock.boottime_s()
            try:
                await self.follow_stream(await self.look() + 1, at)
            except STREAM_ERRORS as error:
                log.debug("the watch of etcd restarts: %s", error)
            except NvpoolError as error:
                log.error("data from etcd cannot be used: %s", error)
                pause_s = SILENCE_S
            at = at + 1 if self._clock.boottime_s() - began_s < SILENCE_S else 0
            await asyncio.sleep(pause_s)

    async def look(self) -> int:
        """Read everything; return the revision that was read."""
        found = await self.calls.ranges(_ranges(self.root), CHANGE_S)
        self._take(found)
        return found.header.revision

    def _take(self, found: rpc.TxnResponse) -> None:
        """Apply the result of a full read."""
        self._heard_s = self._clock.boottime_s()
        present, about_leader = {}, {}
        for kv in (kv for answer in found.responses for kv in answer.response_range.kvs):
            name = kv.key[len(self.root) :]
            if name == b"map":
                self._take_map(kv)
            elif name in (LEADER, SIGN):
                about_leader[name] = kv
            elif name.startswith(b"present/"):
                present[name[8:].decode()] = kv.value
        self._take_rest(present, about_leader)

    async def follow_stream(self, revision: int, at: int = 0) -> None:
        """Apply changes from `revision` on, from the member `at`, until the stream ends or is silent."""
        members, stream, beating = self.calls.members, self.calls.watch(at), None
        try:
            async with asyncio.timeout(SILENT_S):
                for first, behind in _ranges(self.root):
                    await stream.write(
                        rpc.WatchRequest(
                            create_request=rpc.WatchCreateRequest(
                                key=first, range_end=behind, start_revision=revision
                            )
                        )
                    )
            beating = asyncio.get_running_loop().create_task(_beat(stream))
            while True:
                async with asyncio.timeout(SILENT_S):
                    said = await stream.read()
                if said is END_OF_STREAM or said.canceled or self.calls.members != members:
                    raise Unavailable("the stream has ended, or another member is to be asked")
                self._heard_s = self._clock.boottime_s()
                self._take_events(said.events)
        except TimeoutError:
            raise Unavailable("the stream is silent") from None
        except asyncio.CancelledError:
            if asyncio.current_task().cancelling():
                raise
            raise Unavailable("the channel of the stream was closed") from None
        finally:
            if beating is not None:
                beating.cancel()
            stream.cancel()

    def _take_events(self, events: Sequence[rpc.Event]) -> None:
        present, about_leader = dict(self._watchers.present), dict(self._about_leader)
        for event in events:
            kv, gone = event.kv, event.type == rpc.Event.EventType.DELETE
            name = kv.key[len(self.root) :]
            if name == b"map" and not gone:
                self._take_map(kv)
            elif name in (LEADER, SIGN):
                about_leader.pop(name, None)
                if not gone:
                    about_leader[name] = kv
            elif name.startswith(b"present/"):
                present.pop(name[8:].decode(), None)
                if not gone:
                    present[name[8:].decode()] = kv.value
        self._take_rest(present, about_leader)

    def _take_rest(self, present: dict[str, bytes], about_leader: dict[bytes, rpc.KeyValue]) -> None:
        self._about_leader = about_leader
        sign = read_sign(about_leader.get(LEADER), about_leader.get(SIGN))
        another = self._election.see(sign, self._clock.boottime_s())
        if present != self._watchers.present or another:
            self._watchers.present = present
            self._watchers.notify()

    def _take_map(self, kv: rpc.KeyValue) -> None:
        """Apply the newest map and its revision."""
        if kv.mod_revision == self._map_revision:
            return
        new = decode_map(kv.value)
        if kv.mod_revision < self._map_revision and new.epoch <= self.pool_map.epoch:
            return  # a valid map otherwise: etcd was recovered and counts revisions from one again
        if problems := problems_of(self.pool_map, new):
            raise CorruptRecord(
                f"the map with epoch {new.epoch} in etcd cannot be used: {'; '.join(problems)}"
            )
        self._map_revision = kv.mod_revision
        if new.epoch > self.pool_map.epoch:
            self._watchers.pool_map = new
            try:
                self._publish(kv.value)
            except OSError as error:
                raise from_os_error(error, "write the copy of the pool map") from error
            finally:
                self._watchers.notify()

    # -- changes -------------------------------------------------------------------------------------------------------

    async def newest(self) -> PoolMap:
        await self.look()
        return self.pool_map

    async def replace(self, new: PoolMap, leader: CoordinatorLease | None = None) -> None:
        async with self._turn:
            if new.epoch != self.pool_map.epoch + 1:
                await self.look()  # our map may be old
            if new.epoch != self.pool_map.epoch + 1:
                raise StaleEpoch(
                    f"the pool map has epoch {self.pool_map.epoch}, so the next is {self.pool_map.epoch + 1}, "
                    f"not {new.epoch}"
                )
            if problems := problems_of(self.pool_map, new):
                raise InvalidRequest("; ".join(problems))
            if leader is not None and not leader.holds:
                raise StaleLease("who asks for this map does not lead any more")
            compare = [
                rpc.Compare(
                    key=self.root + b"map",
                    target=rpc.Compare.CompareTarget.MOD,
                    result=rpc.Compare.CompareResult.EQUAL,
                    mod_revision=self._map_revision,
                )
            ]
            if leader is not None:
                compare.append(follows(self.root, leader.revision))
            writes = _writes(self.root, new)
            try:
                await self.calls.transact(rpc.TxnRequest(compare=compare, success=writes), CHANGE_S)
                # Also after a failure: the first of two attempts may have been applied.
                await self.look()
            except Unavailable:
                # If they are equal, the watch has delivered the new map, which may have ended an etcd member.
                if self.pool_map != new:
                    raise
            if self.pool_map == new or (self.pool_map.epoch > new.epoch and await self._was_made(new)):
                return
            if self.pool_map.epoch >= new.epoch:
                raise StaleEpoch(f"somebody else made the map with epoch {new.epoch}")
            raise StaleLease("who asks for this map does not lead any more")

    async def _was_made(self, new: PoolMap) -> bool:
        """Whether the map of that epoch was this one, although later ones exist.

        Otherwise a caller that learns of a failure would make the same change twice.
        """
        found = await self.calls.range(rpc.RangeRequest(key=self.root + b"maps/%020d" % new.epoch), CHANGE_S)
        return any(kv.value == encode_map(new) for kv in found.kvs)

    # -- leases --------------------------------------------------------------------------------------------------------

    async def announce(self, name: str, value: bytes, lease_s: float) -> CoordinatorLease:
        lease = self._kept(await EtcdLease.take(self.calls, self._clock, lease_s, CHANGE_S))
        key = self.root + b"present/" + name.encode()
        try:
            await self.calls.transact(rpc.TxnRequest(success=[_put(key, value, lease.number)]), CHANGE_S)
        except BaseException:
            await lease.release()
            raise
        return lease

    async def lead(self, name: str, lease_s: float, wait_s: float) -> CoordinatorLease | None:
        until_s = self._clock.boottime_s() + wait_s
        while not self._watchers.closed:
            free_s = self._election.free_in_s(self._clock.boottime_s())
            if free_s <= 0:
                try:
                    lease = await EtcdLeadershipLease.take(
                        self.calls, self._clock, self.root, name, lease_s, self._election
                    )
                except Unavailable:
                    if self._clock.boottime_s() > until_s:
                        raise
                    lease = None
                if lease is not None:
                    return self._kept(lease)
                await asyncio.sleep(AGAIN_S)  # the stream may not yet show what etcd has just processed
            left_s = until_s - self._clock.boottime_s()
            if left_s <= 0:
                return None
            if free_s > 0:
                await self._watchers.wait(
                    lambda: not self._election.seen.leader_revision, min(free_s, left_s)
                )
        return None

    def _kept(self, lease: _AnyLease) -> _AnyLease:
        """Register the lease, to be released by `close`."""
        self.leases_held.add(lease)
        lease.lost.add_done_callback(lambda lost: self.leases_held.discard(lease))
        return lease

    # -- etcd's members ------------------------------------------------------------------------------------------------------

    async def members(self) -> tuple[Found, ...]:
        """Present members of etcd. Unavailable."""
        found = await self.calls.list_members(CHANGE_S)
        return tuple(
            Found(
                f"{one.ID:x}",
                tuple(url.partition("://")[2] for url in one.peerURLs),
                one.isLearner,
                bool(one.name),
            )
            for one in found
        )

    async def change_members(self, step: Add | Promote | Remove, scheme: str) -> None:
        """Change etcd's members; done on return. Unavailable, with the reason: not now, or etcd refuses."""
        if isinstance(step, Add):
            await self.calls.add_member(f"{scheme}://{step.peer}", CHANGE_S)
        elif isinstance(step, Promote):
            await self.calls.promote_member(int(step.id, 16), CHANGE_S)
        else:
            await self.calls.remove_member(int(step.id, 16), CHANGE_S)

    async def close(self) -> None:
        if self._watchers.closed:
            return
        self._watchers.close()
        if self.following is not None:
            self.following.cancel()
            await asyncio.gather(self.following, return_exceptions=True)
        await give_up(list(self.leases_held))
        await self.calls.close()


async def _beat(stream) -> None:
    """Send liveness requests on the stream periodically."""
    try:
        while True:
            await asyncio.sleep(BEAT_S)
            await stream.write(rpc.WatchRequest(progress_request=rpc.WatchProgressRequest()))
    except STREAM_ERRORS:
        pass  # the reader of the stream notices


def _ranges(root: bytes) -> tuple[tuple[bytes, bytes], ...]:
    """Key ranges of the watched state. Old maps are left out: they are too large to read at each change."""
    present = root + b"present/"
    return (root + b"leader", root + b"map\0"), (present, _behind(present))


def root_key(pool_id: str) -> bytes:
    """Prefix of all keys of the pool."""
    return b"nvpool/" + pool_id.encode() + b"/"


def _behind(prefix: bytes) -> bytes:
    """First key after all keys with this prefix, which ends in '/'."""
    return prefix[:-1] + b"0"


def _put(key: bytes, value: bytes, lease: int = 0) -> rpc.RequestOp:
    return rpc.RequestOp(request_put=rpc.PutRequest(key=key, value=value, lease=lease))


def _is_absent(key: bytes) -> rpc.Compare:
    return rpc.Compare(
        key=key,
        target=rpc.Compare.CompareTarget.CREATE,
        result=rpc.Compare.CompareResult.EQUAL,
        create_revision=0,
    )


def _writes(root: bytes, new: PoolMap) -> list[rpc.RequestOp]:
    """Writes that make `new` the newest map."""
    raw = encode_map(new)
    writes = [_put(root + b"map", raw), _put(root + b"maps/%020d" % new.epoch, raw)]
    if new.epoch > KEPT_MAPS:
        old = root + b"maps/%020d" % (new.epoch - KEPT_MAPS)
        writes.append(rpc.RequestOp(request_delete_range=rpc.DeleteRangeRequest(key=old)))
    return writes
