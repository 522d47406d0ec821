"""RPC service of a chunk store: decodes requests, checks rights, calls the store, encodes replies.

The service makes no decisions of its own except access control. A request that memory can answer is answered
in the call that delivers the request. A read that waits for the drive is answered in the completion callback
of the drive. A task is created only for other waits (a sync, free space).

The service verifies each access token (grant) once and caches it; for a batch it checks only the expiry
times. The service refuses a request with an older pool map if a chain that the request touches has changed
since. A request with a newer map makes the service fetch that map (`refresh_map`).

The listener of a transport calls `handle` for each request. `daemons/store` creates the service.
"""

from __future__ import annotations

import asyncio
import hmac
import logging
import math
import os
import struct
from collections.abc import Callable, Iterable, Sequence
from functools import partial

from google.protobuf.message import DecodeError

from nvpool.core import grants
from nvpool.core.clock import SYSTEM_CLOCK, Clock
from nvpool.core.errors import (
    AccessDenied,
    Busy,
    CorruptRecord,
    DeadlineExceeded,
    Draining,
    InvalidRequest,
    NotSupported,
    NvpoolError,
    StaleEpoch,
    StaleGrant,
    WrongTarget,
)
from nvpool.core.ids import RequestId
from nvpool.poolmap.file_layout import chain_of
from nvpool.poolmap.model import PoolMap
from nvpool.rpc.access_control import Callers
from nvpool.rpc.api import Call
from nvpool.rpc.fd_passing import Handover
from nvpool.rpc.messages.read_write_codec import (
    LOCATE_BYTES_MAX,
    LOCATE_ENTRIES_MAX,
    LOCATE_ENTRY,
    LOCATE_RESULT,
    PAST_ENTRIES_MAX,
    PAST_READS,
    SAME_VERSION,
    decode_read_request,
    encode_read_reply,
)
from nvpool.rpc.peer_roles import Role
from nvpool.rpc.v1 import data_pb2 as pb
from nvpool.rpc.v1.wire_pb2 import Method
from nvpool.security.volume_keys import PoolKeys, VolumeKey
from nvpool.store.chunks.api import ALL_INODES, NO_INODE, ChunkStore, ReadBatch
from nvpool.store.chunks.location_leases import encode_said
from nvpool.store.chunks.read_batch import READ
from nvpool.store.maintenance.background import RESYNC_BYTES_PER_S, BackgroundWork
from nvpool.store.maintenance.scrub_schedule import INTERVAL_S, SCRUB_BYTES_PER_S
from nvpool.store.replication.lost_blocks import Owners
from nvpool.store.replication.peer_connections import PeerDialer
from nvpool.store.replication.role import Replica
from nvpool.store.replication.transfer_server import TransferServer
from nvpool.store.server.admin_handlers import StoreAdminHandlers
from nvpool.store.server.io_stats import IoStats
from nvpool.store.server.map_state import MapState
from nvpool.store.server.reads import close_reads, open_reads
from nvpool.store.server.request_limits import check_entries, check_grants, check_read_bytes
from nvpool.store.server.serving_lease import ServingLease
from nvpool.store.server.status import StatusHandlers
from nvpool.store.server.verified_grants import VerifiedGrants
from nvpool.store.server.waiting_calls import WaitingCalls
from nvpool.store.server.writes import Writes

log = logging.getLogger(__name__)

EXTENT = struct.Struct("<III")
TEND_S = 1.0


class StoreService:
    """Service of one target."""

    def __init__(
        self,
        store: ChunkStore,
        *,
        target: int,
        grant_secret: bytes,
        clock: Clock = SYSTEM_CLOCK,
        refresh_map: Callable[[], None] | None = None,
        handover_path: str = "",
        handover_group: int | None = None,
        dialer: PeerDialer | None = None,
        resync_bytes_per_s: float = RESYNC_BYTES_PER_S,
        scrub_interval_s: float = INTERVAL_S,
        scrub_bytes_per_s: float = SCRUB_BYTES_PER_S,
        on_fail: Callable[[str], None] = lambda reason: None,
        serving_lease: ServingLease | None = None,
        callers: Callers | None = None,
        pool_keys: PoolKeys | None = None,
    ):
        """Create the service of one target.

        The service calls `refresh_map` when a request has a newer map; `refresh_map` calls `update_map`, now
        or later. Processes of this user and of `handover_group` receive file descriptors for short-circuit
        reads at `handover_path`. Without a `dialer` the store takes no part in chains with other targets. The
        service calls `on_fail` with a reason when background work died of a bug.
        """
        self.store = store
        self.target = target
        self.callers = callers or Callers()
        """Callers of the service and their rights."""
        self._pool_keys = pool_keys or PoolKeys()
        self.clock = clock
        self.refresh_map = refresh_map
        self.map_state = MapState()
        self.verified_grants = VerifiedGrants(grant_secret, clock, self._rights_taken)
        self.grant, self.known_grants = self.verified_grants.grant, self.verified_grants.known
        self.use = IoStats(clock, self.known_grants)
        self.waiting_calls = WaitingCalls(self.callers, self._reads_waiting)
        self.tending: asyncio.Task | None = None
        self.ended_equal = False
        """Set by `close`: this member ends in step with its chains.

        True if no write remains of which the member does not know whether the other members have it.
        """
        self._draining = False
        self._handover_path, self._handover_group = handover_path, handover_group
        self.handover: Handover | None = None
        self.serving_lease = serving_lease or ServingLease(
            target, clock, store.location_leases, until_s=math.inf
        )
        self.upkeep = (
            None
            if dialer is None
            else BackgroundWork(
                store,
                target,
                dialer,
                grant_secret,
                clock,
                on_fail=on_fail,
                bytes_per_s=resync_bytes_per_s,
                scrub_interval_s=scrub_interval_s,
                scrub_bytes_per_s=scrub_bytes_per_s,
                busy=lambda: self.waiting,
                is_caught_up=lambda: self.serving_lease.is_caught_up,
            )
        )
        self.replica = Replica(
            store,
            target,
            clock,
            grant_secret,
            dialer=dialer,
            repairs=None if self.upkeep is None else self.upkeep.replica_repairs,
            ask_map=refresh_map or (lambda: None),
            holds_lease=self.serving_lease.holds,
        )
        self.transfer_server = giving = TransferServer(
            store,
            self.replica,
            target,
            parse=self._parse,
            authority=self.verified_grants.check_service,
            later=self.waiting_calls.later,
            busy=lambda: self.waiting,
        )
        orders = StoreAdminHandlers(
            store,
            self.upkeep,
            parse=self._parse,
            authority=self.verified_grants.check_service,
            later=self.waiting_calls.later,
            epoch=lambda: self.map_state.epoch,
        )
        self.fast_path = open_reads(
            target, self.known_grants, store, self.replica.pending, self.serving_lease, self.use, clock
        )
        """Reads from frame to frame, which a listener tries first; None if `handle` gets every request."""
        self.writes = Writes(
            target,
            store,
            self.replica,
            self.map_state,
            verified_grants=self.verified_grants,
            callers=self.callers,
            waiting=self.waiting_calls,
            serving_lease=self.serving_lease,
            use=self.use,
            clock=clock,
            check_epoch=self._check_epoch,
            is_node=self._is_node,
            volume_key=self.volume_key,
        )
        if self.fast_path is not None:
            self.fast_path.writes = self.writes
        status = StatusHandlers(
            target,
            store,
            self.callers,
            self.map_state,
            use=self.use,
            serving_lease=self.serving_lease,
            upkeep=self.upkeep,
            clock=clock,
            parse=self._parse,
            check_right=self._check_right,
            is_draining=lambda: self._draining,
            waiting_count=lambda: self.waiting_count,
        )
        self.measure = status.measure
        self.methods: dict[int, Callable[[Call], None]] = {
            Method.DATA_READ: self._read,
            Method.DATA_WRITE: self.writes.write,
            Method.DATA_FLUSH: self._flush,
            Method.DATA_CUT: self._cut,
            Method.DATA_REMOVE: self._remove,
            Method.DATA_DESCRIBE: status.describe,
            Method.DATA_LOCATE: self._locate,
            Method.DATA_EXTENTS: self._extents,
            Method.DATA_COPY: self._copy,
            Method.DATA_LIST: status.list_inodes,
            Method.DATA_SCRUB: orders.scrub,
            Method.DATA_STATUS: status.report,
            Method.DATA_PEER_WRITE: self.writes.peer_write,
            Method.DATA_SCRUB_ORDER: orders.scrub_order,
            Method.DATA_VERSIONS: giving.versions,
            Method.DATA_FETCH: giving.fetch,
            Method.DATA_PULL: orders.pull,
            Method.DATA_USE: status.report_use,
        }

    # -- life --------------------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Start the background work. Call once."""
        self.tending = asyncio.get_running_loop().create_task(self._tend())
        if (
            self._handover_path
            and self.store.location_leases is not None
            and self.store.location_leases.life_s
        ):
            handover = Handover(self._handover_path, self._handover_message, group=self._handover_group)
            try:
                handover.start()
                self.handover = handover
            except NvpoolError as error:
                log.warning(
                    "target %d: no short-circuit reads for clients of this host: %s", self.target, error
                )

    def _handover_message(self) -> tuple[bytes, list[int]]:
        """Return descriptors of the data and of the lease table; called by `rpc/fd_passing`."""
        location_leases = self.store.location_leases
        data = self.store.device.open_for_reader()
        try:
            return encode_said(self.target, location_leases.token, self.clock.boottime_s()), [
                data,
                location_leases.table(),
            ]
        except BaseException:
            os.close(data)
            raise

    async def _tend(self) -> None:
        while True:
            await asyncio.sleep(TEND_S)
            self.verified_grants.tend()
            try:
                await self.store.tend()
            except NvpoolError as error:
                log.warning("target %d: tending failed: %s", self.target, error)

    async def close(self, drain_s: float = 0.0) -> None:
        """Refuse new requests, wait for pending ones, then flush and close the store.

        The wait is at most `drain_s`.
        """
        self._draining = True
        if self.fast_path is not None:
            await close_reads(self.fast_path, drain_s)
        if self.handover is not None:
            self.handover.close()
        await self.waiting_calls.drained(drain_s)
        self.waiting_calls.fail_begun()
        if self.upkeep is not None:
            await self.upkeep.close()
        await self.waiting_calls.cancel_tasks()
        await self.stop_tending()
        self.ended_equal = not self.replica.pending
        await self.replica.close()
        await self.store.close()

    async def stop_tending(self) -> None:
        """Stop the periodic work that `start` began; part of `close`."""
        if self.tending is not None:
            self.tending.cancel()
            await asyncio.gather(self.tending, return_exceptions=True)

    def update_map(self, pool_map: PoolMap) -> None:
        """Use this map if it is newer than the current one."""
        if pool_map.epoch <= self.map_state.epoch:
            return
        self.map_state.use(pool_map)
        self.verified_grants.use(pool_map.rights_taken)
        self.replica.update_map(pool_map)
        self.transfer_server.update_map(pool_map)
        if self.upkeep is not None:
            self.upkeep.update_map(pool_map)
        self.serving_lease.update_map(pool_map)
        if self.fast_path is not None:
            self.fast_path.epoch = 0 if self.replica.losing else pool_map.epoch

    # -- every request -----------------------------------------------------------------------------------------------

    def handle(self, call: Call) -> None:
        """Answer the call, now or from a task. Errors are raised or passed to `call.fail`."""
        if self._draining:
            raise Draining
        self.callers.check(call)
        method = self.methods.get(call.method)
        if method is None:
            raise InvalidRequest(f"a chunk store does not know the method {call.method}")
        if not self.serving_lease.vouched and call.method != Method.DATA_STATUS:
            raise Busy("the pool map does not say yet what this target may have lost", retry_after_s=0.05)
        if call.deadline_s < self.clock.boottime_s():
            raise DeadlineExceeded(may_be_applied=False)
        method(call)

    def _parse(self, kind, call: Call):
        message = call.message
        try:
            request = kind.FromString(message if isinstance(message, bytes) else bytes(message))
        except DecodeError:
            raise InvalidRequest(f"not a {kind.__name__}") from None
        self._check_target(request.target)
        return request

    def _check_target(self, target: int) -> None:
        if target != self.target:
            raise WrongTarget(f"this is target {self.target}, not {target}")

    def _check_epoch(self, epoch: int, chunks: Callable[[], Iterable[tuple[int, int]]]) -> None:
        """Check that these chunks' chains have not changed since the caller's map; else StaleEpoch.

        A newer map makes the service fetch that map. Until the map arrives, the service raises Busy if its
        own map assigns a chunk to another target: a chunk that is missing here would look like a hole.
        """
        if (
            epoch > self.map_state.epoch
            and self.refresh_map is not None
            and self.map_state.pool_map is not None
        ):
            self.refresh_map()
            if not all(self.replica.is_full_member(chain_of(inode, index)) for inode, index in chunks()):
                raise Busy("this target does not know the newest pool map yet", retry_after_s=0.02)
        if epoch >= self.map_state.epoch or not self.map_state.pool_map:
            return
        if epoch < self.map_state.stale_below:
            raise StaleEpoch
        if self.map_state.changed_at:
            for inode, index in chunks():
                if self.map_state.changed_at.get(chain_of(inode, index), 0) > epoch:
                    raise StaleEpoch

    @property
    def waiting_count(self) -> int:
        return self.waiting_calls.count

    def _reads_waiting(self) -> int:
        """Number of single reads that wait for the drive."""
        return self.fast_path.waiting if self.fast_path is not None else 0

    @property
    def waiting(self) -> bool:
        """Whether requests wait here, apart from those of other targets that catch up."""
        return self.waiting_count > self.transfer_server.active

    # -- grants ------------------------------------------------------------------------------------------------------

    def _rights_taken(self, any_left: bool) -> None:
        """Handle a change of revoked rights.

        While there are revoked rights, all location leases are invalid.
        """
        if any_left and self.store.location_leases is not None:
            self.store.location_leases.changing_all()

    def volume_key(self, wrapped: bytes) -> VolumeKey | None:
        """Return the volume key for a request's wrapped key, None if it is empty.

        KeyMissing: this store cannot unwrap the key.
        """
        return VolumeKey(wrapped, self._pool_keys.cipher(wrapped)) if wrapped else None

    def _grants(self, call: Call, raws: Sequence[bytes]) -> list[grants.Grant | None]:
        """Return the verified grants of a batch, None for each that is not valid for this caller.

        InvalidRequest: they are more than a batch has entries.
        """
        check_grants(raws)
        now_ms = self.clock.wall_ns() // 1_000_000
        found = [self.grant(raw, now_ms) for raw in raws]
        for number, grant in enumerate(found):
            if grant is not None and grant.rights & grants.SERVICE and not self._is_node(call):
                found[number] = None
        return found

    def _is_node(self, call: Call) -> bool:
        """Whether the caller may use a grant with the right SERVICE.

        Only nodes have the key that signs one. A client that shows one has it from a node that was lost.
        """
        return self.callers.of(call.peer).role == Role.NODE

    # -- reads -------------------------------------------------------------------------------------------------------

    def _read(self, call: Call) -> None:
        epoch, target, rights, reads, verify = decode_read_request(call.message)
        self._check_target(target)
        check_entries("reads", reads, READ)
        if self.callers.of(call.peer).account:
            check_read_bytes(reads)
        if epoch != self.map_state.epoch:
            self._check_epoch(epoch, lambda: (fields[:2] for fields in READ.iter_unpack(reads)))
        check_grants(rights)
        now_ms = self.clock.wall_ns() // 1_000_000
        owners, tables = [], []
        for raw in rights:
            grant = self.grant(raw, now_ms)
            if grant is None or not grant.rights & (grants.READ | grants.SERVICE):
                owners.append(NO_INODE)
            elif not grant.rights & grants.SERVICE:
                owners.append(grant.inode)
            else:
                owners.append(ALL_INODES if self._is_node(call) else NO_INODE)
            tables.append(0 if owners[-1] in (NO_INODE, ALL_INODES) else grant.table)
        if self.replica.pending and self.replica.is_pending(fields[:2] for fields in READ.iter_unpack(reads)):
            self.waiting_calls.later(call, self._read_decided(call, epoch, reads, (owners, tables), verify))
        else:
            self._begin_read(call, epoch, reads, (owners, tables), verify)

    async def _read_decided(self, call: Call, epoch: int, reads: bytes, whose: Owners, verify: bool) -> None:
        """Read after the pending writes of these chunks are decided.

        Other clients may have read the new bytes already; then this read must not return the old ones.
        """
        await self.replica.decided([fields[:2] for fields in READ.iter_unpack(reads)], call.deadline_s)
        if not call.cancelled:
            self._begin_read(call, epoch, reads, whose, verify)

    def _begin_read(self, call: Call, epoch: int, reads: bytes, whose: Owners, verify: bool) -> None:
        reads, lost = self.replica.losing.without_lost(reads, *whose)
        batch = self.store.read_now(reads, whose[0], verify, call.room)
        self.replica.losing.refuse(batch, lost)
        if batch.missed:
            self.waiting_calls.begin(call)
            try:
                self.store.begin_finish(batch, partial(self._read_came, call, epoch, reads, batch))
            except BaseException:
                self.waiting_calls.withdraw(call)
                raise
        else:
            self._answer_read(call, epoch, reads, batch)

    def _read_came(
        self, call: Call, epoch: int, reads: bytes, batch: ReadBatch, error: BaseException | None
    ) -> None:
        if not self.waiting_calls.end(call):
            return
        try:
            if error is not None:
                raise error
            self._answer_read(call, epoch, reads, batch)
        except Exception as error:  # the border, as in `_answered`
            call.fail(error)

    def _answer_read(self, call: Call, epoch: int, reads: bytes, batch: ReadBatch) -> None:
        # While the read waited for a write or the drive, chains may have continued without this target.
        if epoch != self.map_state.epoch:
            self._check_epoch(epoch, lambda: (fields[:2] for fields in READ.iter_unpack(reads)))
        if self.serving_lease.shared:
            self.serving_lease.check()
        if self.use.on:
            self.use.read(call, batch)
        call.reply(encode_read_reply(self.map_state.epoch, batch.results, batch.checksums), batch.payload)

    def _locate(self, call: Call) -> None:
        request = self._parse(pb.LocateRequest, call)
        location_leases = self.store.location_leases
        if location_leases is None or not location_leases.life_s:
            raise NotSupported("this store issues no location leases")
        if not hmac.compare_digest(request.token, location_leases.token):
            raise AccessDenied("locations are for whom this process has given its descriptors")
        entries = request.entries
        if len(entries) % LOCATE_ENTRY.size or len(entries) > LOCATE_ENTRIES_MAX * LOCATE_ENTRY.size:
            raise InvalidRequest(f"{len(entries)} bytes are not up to {LOCATE_ENTRIES_MAX} whole entries")
        if request.map_epoch != self.map_state.epoch:
            self._check_epoch(
                request.map_epoch, lambda: (fields[:2] for fields in LOCATE_ENTRY.iter_unpack(entries))
            )
        if len(request.past) > PAST_ENTRIES_MAX * PAST_READS.size:
            raise InvalidRequest(
                f"{len(request.past)} bytes of counted reads came in one request; report at most "
                f"{PAST_ENTRIES_MAX} inodes, and the others later"
            )
        now_ms = self.clock.wall_ns() // 1_000_000
        known = self._grants(call, request.grants)
        if request.past:
            self.use.past(request.grants, request.past)
        results, runs, checksums, total = [], [], [], 0
        for inode, index, blocks, number, version in LOCATE_ENTRY.iter_unpack(entries):
            grant = known[number] if number < len(known) else None
            if grant is None or grant.inode != inode or not grant.rights & grants.READ:
                results.append(LOCATE_RESULT.pack(StaleGrant.wire_code, 0, 0, 0, 0, 0, 0, 0))
                continue
            # A lease is not longer than the right to read: a location must not outlive its grant.
            left_s = (grant.ends_ms - now_ms) / 1000 + grants.CLOCK_SKEW_S
            try:
                found = None
                if total < LOCATE_BYTES_MAX and self.replica.may_locate(grant.table, inode, index, blocks):
                    found = self.store.locate(inode, index, blocks, left_s)
            except CorruptRecord as error:
                results.append(LOCATE_RESULT.pack(error.wire_code, 0, 0, 0, 0, 0, 0, 0))
                continue
            if found is None:
                results.append(LOCATE_RESULT.pack(0, 0, 0, 0, 0, 0, 0, 0))
                continue
            life_s, slot, stamp, where = found
            life_ms = int(life_s * 1000)
            if where.version == version:
                results.append(LOCATE_RESULT.pack(0, SAME_VERSION, 0, 0, life_ms, slot, stamp, version))
                continue
            results.append(
                LOCATE_RESULT.pack(0, 0, len(where.runs), where.blocks, life_ms, slot, stamp, where.version)
            )
            runs.append(where.runs.tobytes())
            checksums.append(where.checksums)
            total += len(runs[-1]) + len(where.checksums)
        if self.serving_lease.shared:
            self.serving_lease.check()
        call.reply(
            pb.LocateReply(
                map_epoch=self.map_state.epoch,
                results=b"".join(results),
                runs=b"".join(runs),
                checksums=b"".join(checksums),
            ).SerializeToString()
        )

    # -- other requests ----------------------------------------------------------------------------------------------

    def _flush(self, call: Call) -> None:
        self._parse(pb.FlushRequest, call)
        self.waiting_calls.later(call, self._do_flush(call))

    async def _do_flush(self, call: Call) -> None:
        await self.store.flush()
        call.reply(pb.FlushReply(map_epoch=self.map_state.epoch).SerializeToString())

    def _cut(self, call: Call) -> None:
        request = self._parse(pb.CutRequest, call)
        self.verified_grants.check_service(request.authority)
        self.waiting_calls.later(call, self._do_cut(call, request))

    async def _do_cut(self, call: Call, request: pb.CutRequest) -> None:
        what = request.inode, request.size, request.cut, request.chunk_bits, request.end
        key = self.volume_key(request.wrapped_key)
        if self.upkeep is not None:
            self.upkeep.resync.guard.cut(*what)
        with self.transfer_server.cutting(request.inode):
            freed = await self.replica.cut(*what, None if key is None else key.cipher)
        call.reply(pb.CutReply(map_epoch=self.map_state.epoch, bytes=freed).SerializeToString())

    def _remove(self, call: Call) -> None:
        request = self._parse(pb.RemoveRequest, call)
        self.verified_grants.check_service(request.authority)
        if len(request.inodes) % 8:
            raise InvalidRequest("not a list of inode numbers")
        self.waiting_calls.later(call, self._do_remove(call, request))

    async def _do_remove(self, call: Call, request: pb.RemoveRequest) -> None:
        inodes = [inode for (inode,) in struct.iter_unpack("<Q", request.inodes)]
        if self.upkeep is not None:
            self.upkeep.resync.guard.removed(inodes)
        chunks, byte_count = await self.replica.remove(inodes)
        call.reply(
            pb.RemoveReply(
                map_epoch=self.map_state.epoch, chunks=chunks, bytes=byte_count
            ).SerializeToString()
        )

    def _extents(self, call: Call) -> None:
        request = self._parse(pb.ExtentsRequest, call)
        if (
            request.map_epoch < self.map_state.epoch
            and max(self.map_state.changed_at.values(), default=self.map_state.stale_below)
            > request.map_epoch
        ):
            raise StaleEpoch  # the answer would miss a chunk that arrived or left
        self._check_right(call, request.grant, request.inode, grants.READ | grants.WRITE)
        until = min(request.until, 1 << 32)
        found, goes_on = self.store.extents(request.inode, request.first, until)
        extents = b"".join([EXTENT.pack(*extent) for extent in found])
        self.serving_lease.check()  # holes of an old state may be data now
        call.reply(
            pb.ExtentsReply(
                map_epoch=self.map_state.epoch, extents=extents, more=goes_on < until, next=goes_on
            ).SerializeToString()
        )

    def _check_right(self, call: Call, raw: bytes, inode: int, rights: int) -> grants.Grant:
        """Return the grant after a check.

        StaleGrant: the grant is not valid, does not cover this inode, or has none of these rights.
        """
        (grant,) = self._grants(call, (raw,))
        if (
            grant is None
            or not grant.rights & (rights | grants.SERVICE)
            or (not grant.rights & grants.SERVICE and grant.inode != inode)
        ):
            raise StaleGrant
        return grant

    def _copy(self, call: Call) -> None:
        request = self._parse(pb.CopyRequest, call)
        if request.map_epoch != self.map_state.epoch:
            self._check_epoch(
                request.map_epoch,
                lambda: ((request.from_inode, request.from_index), (request.inode, request.index)),
            )
        source = self._check_right(call, request.read_grant, request.from_inode, grants.READ)
        right = self._check_right(call, request.write_grant, request.inode, grants.WRITE)
        if not right.rights & grants.SERVICE and (
            request.cut > right.cut or right.session != request.session != 0
        ):
            raise StaleGrant
        # Data encrypted for one position does not decrypt at another.
        if (source.rights | right.rights) & grants.ENCRYPTED:
            raise NotSupported("chunks of encrypted volumes are copied by reading and writing them")
        table = 0 if right.rights & grants.SERVICE else right.table
        self.waiting_calls.later(call, self._do_copy(call, request, table))

    async def _do_copy(self, call: Call, request: pb.CopyRequest, table: int) -> None:
        def given_up() -> bool:
            return call.cancelled or call.deadline_s < self.clock.boottime_s()

        name = RequestId(request.session, request.slot, request.sequence) if request.session else None
        source = request.from_inode, request.from_index, request.from_offset
        version, copied = await self.replica.copy(
            source,
            request.inode,
            request.index,
            request.offset,
            request.length,
            cut=request.cut,
            request=name,
            given_up=given_up,
            table=table,
        )
        # during the copy the source may have continued without us
        if request.map_epoch != self.map_state.epoch:
            self._check_epoch(request.map_epoch, lambda: (source[:2], (request.inode, request.index)))
        self.serving_lease.check()
        call.reply(
            pb.CopyReply(map_epoch=self.map_state.epoch, version=version, bytes=copied).SerializeToString()
        )
