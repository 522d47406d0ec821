"""Service of a chunk store: authorization, refusals, and replies that match the stored state."""

import asyncio
import math
import random
import struct
from contextlib import nullcontext
from functools import partial

import pytest
from msgspec.structs import replace

from nvpool.core import errors, grants
from nvpool.core.checksum import first_bad_block, piece_checksums
from nvpool.core.clock import ManualClock
from nvpool.core.ids import version
from nvpool.core.units import CHUNK_BYTES_MAX
from nvpool.poolmap.chains.placement import build_table
from nvpool.poolmap.file_layout import chain_of
from nvpool.poolmap.grant_revocation import taken
from nvpool.poolmap.model import MAP_FORMAT, Drive, Node, PoolMap, PoolSettings, Target, changed
from nvpool.rpc.messages.read_write_codec import BATCH_ENTRIES_MAX
from nvpool.rpc.peer_roles import Peer
from nvpool.rpc.v1 import data_pb2 as pb
from nvpool.rpc.v1.wire_pb2 import Method
from nvpool.store.chunks.api import MustWait, create_chunk_store
from nvpool.store.chunks.block_store import open_chunk_store
from nvpool.store.chunks.memory_store import MemoryChunkStore
from nvpool.store.chunks.read_batch import READ, RESULT
from nvpool.store.replication.role import Replica
from nvpool.store.server.service import EXTENT, StoreService
from nvpool.store.server.serving_lease import ServingLease
from nvpool.store.server.writes import BREATH_BYTES, WRITE
from nvpool.testing.contracts.chunk_store import is_sound
from nvpool.testing.fakes.meta_shard import PEER

SECRET = b"k" * 32
DATA = bytes(range(256)) * 64
CLIENT = Peer("one", "10.0.0.2:1", False, "client/one.0a1b2c3d")


class FakeCall:
    peer = PEER
    deadline_s = math.inf
    cancelled = False

    def __init__(self, method, message, payload=b""):
        self.method, self.message, self.payload = method, message, memoryview(payload)
        self.message_out = self.payload_out = self.error = None
        self.answered = asyncio.Event()

    def room(self, byte_count):
        return None

    def reply(self, message=b"", payload=()):
        assert self.message_out is None and self.error is None, "replied twice"
        self.message_out, self.payload_out = message, b"".join(payload)
        self.answered.set()

    def fail(self, error):
        assert self.message_out is None and self.error is None, "replied twice"
        self.error = error
        self.answered.set()


class Bench:
    def __init__(self, store=None):
        self.clock = ManualClock()
        self.store = store or MemoryChunkStore(1 << 22)
        self.serve()

    def serve(self, serving_lease: ServingLease | None = None) -> None:
        self.service = StoreService(
            self.store, target=1, grant_secret=SECRET, clock=self.clock, serving_lease=serving_lease
        )

    def grant(self, rights=grants.READ | grants.WRITE, inode=1, cut=0, life_s=60.0, secret=SECRET):
        ends = self.clock.wall_ns() // 1_000_000 + int(life_s * 1000)
        return grants.sign(grants.Grant(rights, 0, 9, inode, cut, ends), secret)

    async def call(self, method, message, payload=b"", reply=None, **fields):
        one = FakeCall(
            method, message if isinstance(message, bytes) else message.SerializeToString(), payload
        )
        for name, value in fields.items():
            setattr(one, name, value)
        self.service.handle(one)
        await asyncio.wait_for(one.answered.wait(), 120)
        if one.error is not None:
            raise one.error
        return (reply.FromString(one.message_out), one.payload_out) if reply else one

    async def write(self, pieces, grant=None, session=9, slot=0, epoch=0, **fields):
        """pieces: (inode, cut, sequence, index, offset, bytes). Returns (status, version) of each."""
        request = pb.WriteRequest(
            target=1,
            grants=[self.grant() if grant is None else grant],
            session=session,
            slot=slot,
            map_epoch=epoch,
        )
        payload = b""
        for inode, cut, sequence, index, offset, data in pieces:
            request.writes += WRITE.pack(inode, cut, sequence, index, offset, len(data), 0, 0)
            request.checksums += piece_checksums(data, offset)
            payload += data
        answer, _ = await self.call(Method.DATA_WRITE, request, payload, pb.WriteReply, **fields)
        return [(status, version) for status, _, _, version in RESULT.iter_unpack(answer.results)]

    async def read(self, reads, grant=None, epoch=0, verify=False):
        request = pb.ReadRequest(
            target=1, grants=[self.grant() if grant is None else grant], map_epoch=epoch, verify=verify
        )
        request.reads = b"".join(READ.pack(*read, 0, 0) for read in reads)
        answer, payload = await self.call(Method.DATA_READ, request, b"", pb.ReadReply)
        assert not payload or first_bad_block(payload, answer.checksums) < 0
        return [one[0] for one in RESULT.iter_unpack(answer.results)], payload

    def authority(self):
        return self.grant(grants.SERVICE, 0)


def served(test):
    def run():
        asyncio.run(test(Bench()))

    run.__name__ = test.__name__
    return run


@served
async def test_batch_of_writes_is_read_back(bench):
    assert await bench.write(
        [(1, 0, 1, 0, 0, DATA), (1, 0, 2, 5, 4090, b"across"), (1, 0, 3, 0, 4096, DATA[:10])]
    ) == [(0, version(1, 1)), (0, version(1, 1)), (0, version(1, 2))]
    status, payload = await bench.read([(1, 0, 0, 16384), (1, 5, 0, 8192)])
    assert status == [0, 0]
    assert payload[:4096] == DATA[:4096] and payload[4096:4106] == DATA[:10]
    assert payload[16384 + 4090 : 16384 + 4096] == b"across"


@served
async def test_reads_and_writes_need_a_valid_access_token(bench):
    stale = errors.StaleGrant.wire_code
    for grant in (
        b"",
        b"x" * 60,
        bench.grant(secret=b"z" * 32),
        bench.grant(inode=2),
        bench.grant(rights=grants.READ),
        bench.grant(life_s=-10),
    ):
        assert await bench.write([(1, 0, 1, 0, 0, DATA)], grant) == [(stale, 0)]
    for grant in (b"", bench.grant(rights=grants.WRITE), bench.grant(inode=2), bench.grant(life_s=-10)):
        assert await bench.read([(1, 0, 0, 4096)], grant) == ([stale], b"")
    assert await bench.write([(1, 0, 1, 0, 0, DATA)], session=10) == [(stale, 0)], (
        "with another client's session"
    )
    good = bench.grant(life_s=10)
    assert (await bench.write([(1, 0, 1, 0, 0, DATA)], good))[0][0] == 0
    bench.clock.advance(16)
    assert await bench.write([(1, 0, 2, 0, 0, DATA)], good) == [(stale, 0)], (
        "also a token that was valid before"
    )
    assert await bench.write([(1, 3, 3, 0, 0, DATA)], bench.grant(cut=2)) == [(stale, 0)], (
        "a truncate number newer than the token's"
    )
    assert (await bench.read([(1, 0, 0, 4096)], bench.authority()))[0] == [0]


@served
async def test_grant_of_a_service_is_accepted_from_nodes_only(bench):
    """A client can have it only from a node that was lost, with the key that signs grants."""
    stale = errors.StaleGrant.wire_code
    authority = bench.grant(grants.SERVICE | grants.READ | grants.WRITE, 0)
    piece = (1, 0, 1, 0, 0, DATA)
    assert await bench.write([piece], authority, peer=CLIENT) == [(stale, 0)]
    assert await bench.write([piece]) == [(0, version(1, 1))]
    read = pb.ReadRequest(target=1, grants=[authority, bench.grant()])
    read.reads = b"".join(READ.pack(1, 0, 0, 4096, number, 0) for number in (0, 1))
    for peer, first in ((CLIENT, stale), (PEER, 0)):
        answer, _ = await bench.call(Method.DATA_READ, read, b"", pb.ReadReply, peer=peer)
        assert [status for status, *_ in RESULT.iter_unpack(answer.results)] == [first, 0]
    extents = pb.ExtentsRequest(target=1, inode=1, until=9, grant=authority)
    copy = pb.CopyRequest(
        target=1,
        read_grant=authority,
        write_grant=authority,
        from_inode=1,
        inode=1,
        index=1,
        length=4096,
        session=9,
        sequence=5,
    )
    await bench.call(Method.DATA_EXTENTS, extents)
    for method, request in ((Method.DATA_EXTENTS, extents), (Method.DATA_COPY, copy)):
        with pytest.raises(errors.StaleGrant):
            await bench.call(method, request, peer=CLIENT)


@served
async def test_batch_of_too_many_entries_is_refused(bench):
    most = BATCH_ENTRIES_MAX
    read, write = READ.pack(1, 0, 0, 4096, 0, 0), WRITE.pack(1, 0, 1, 0, 0, 0, 0, 0)
    await bench.call(Method.DATA_READ, pb.ReadRequest(target=1, grants=[bench.grant()], reads=read * most))
    for method, request in (
        (Method.DATA_READ, pb.ReadRequest(target=1, reads=read * (most + 1))),
        (Method.DATA_READ, pb.ReadRequest(target=1, grants=[b""] * (most + 1), reads=read)),
        (Method.DATA_WRITE, pb.WriteRequest(target=1, writes=write * (most + 1))),
        (Method.DATA_WRITE, pb.WriteRequest(target=1, grants=[b""] * (most + 1), writes=write)),
    ):
        with pytest.raises(errors.InvalidRequest, match=f"at most {most}, and more requests"):
            await bench.call(method, request)


@served
async def test_long_read_of_a_client_is_refused(bench):
    reads = [(1, 0, 0, 1 << 20, 0, 0)] * 4
    for more, peers in (((), (CLIENT, PEER)), (((1, 0, 0, 4096, 0, 0),), (PEER,))):
        request = pb.ReadRequest(
            target=1, grants=[bench.grant()], reads=b"".join(READ.pack(*one) for one in (*reads, *more))
        )
        for peer in peers:
            await bench.call(Method.DATA_READ, request, peer=peer)
    with pytest.raises(errors.InvalidRequest, match="4198400 bytes.*may read 4194304 in pieces at most"):
        await bench.call(Method.DATA_READ, request, peer=CLIENT)
    whole = pb.ReadRequest(target=1, grants=[bench.grant()], reads=READ.pack(1, 0, 0, CHUNK_BYTES_MAX, 0, 0))
    await bench.call(Method.DATA_READ, whole, peer=CLIENT)


@served
async def test_batch_of_tiny_writes_yields_to_other_requests(bench):
    count, turns = 4 * BREATH_BYTES // 4096, []

    async def other():
        while True:
            turns.append(1)
            await asyncio.sleep(0)

    task = asyncio.ensure_future(other())
    await bench.write([(1, 0, number, 0, 0, b"x") for number in range(1, count + 1)])
    task.cancel()
    assert len(turns) >= 3


@served
async def test_replayed_batch_is_answered_without_a_write(bench):
    first = await bench.write([(1, 0, 1, 0, 0, b"one"), (1, 0, 2, 0, 0, b"two"), (1, 0, 3, 1, 0, b"three")])
    await bench.write([(1, 0, 1, 0, 0, b"new")], slot=1)
    again = await bench.write([(1, 0, 1, 0, 0, b"one"), (1, 0, 2, 0, 0, b"two"), (1, 0, 3, 1, 0, b"three")])
    assert [status for status, _ in again] == [0, 0, 0] and again[2] == first[2]
    _, payload = await bench.read([(1, 0, 0, 4096)])
    assert payload[:3] == b"new"


@served
async def test_refused_write_refuses_later_ones_to_its_chunk(bench):
    await bench.store.cut(1, 0, 5, 20)
    stale = errors.StaleCut.wire_code
    found = await bench.write(
        [(1, 4, 1, 0, 0, b"a"), (1, 5, 2, 0, 0, b"b"), (1, 5, 3, 1, 0, b"c")], bench.grant(cut=5)
    )
    assert [status for status, _ in found] == [stale, stale, 0]


@served
async def test_malformed_requests_are_refused_without_changes(bench):
    write = pb.WriteRequest(
        target=1, grants=[bench.grant()], writes=WRITE.pack(1, 0, 1, 0, 0, 5, 0, 0), checksums=bytes(4)
    )
    for method, message, payload in (
        (Method.DATA_READ, b"\xff\xff\xff", b""),
        (Method.DATA_READ, pb.ReadRequest(target=1, reads=b"x" * 25), b""),
        (Method.DATA_WRITE, pb.WriteRequest(target=1, writes=b"x" * 41), b""),
        (Method.DATA_WRITE, write, b"four"),
        (Method.DATA_WRITE, write, b"sixsix"),
        (Method.META_LOOKUP, b"", b""),
        (999, b"", b""),
        (Method.DATA_REMOVE, pb.RemoveRequest(target=1, authority=bench.authority(), inodes=b"123"), b""),
        (Method.DATA_CUT, pb.CutRequest(target=1, authority=bench.authority(), inode=1, chunk_bits=3), b""),
        (Method.DATA_SCRUB, pb.ScrubRequest(target=1, cursor=b"nonsense"), b""),
    ):
        with pytest.raises(errors.InvalidRequest):
            await bench.call(method, message, payload)
    with pytest.raises(errors.WrongTarget):
        await bench.call(Method.DATA_READ, pb.ReadRequest(target=2))
    assert bench.store.inodes(0, 1) == ([], False)
    header = WRITE.pack(1, 0, 1, 0, 2**32 - 1, 1, 0, 0)
    huge = pb.WriteRequest(target=1, grants=[bench.grant()], checksums=bytes(4), writes=header)
    answer, _ = await bench.call(Method.DATA_WRITE, huge, b"x", pb.WriteReply)
    assert RESULT.unpack(answer.results)[0] == errors.InvalidRequest.wire_code


@served
async def test_only_a_metadata_service_truncates_and_removes(bench):
    await bench.write([(1, 0, 1, 0, 0, DATA)])
    cut = {"target": 1, "inode": 1, "size": 5, "cut": 1, "chunk_bits": 20}
    with pytest.raises(errors.AccessDenied):
        await bench.call(Method.DATA_CUT, pb.CutRequest(authority=bench.grant(), **cut))
    with pytest.raises(errors.StaleGrant):
        await bench.call(Method.DATA_REMOVE, pb.RemoveRequest(target=1, inodes=bytes(8)))
    await bench.call(Method.DATA_CUT, pb.CutRequest(authority=bench.authority(), **cut))
    assert (await bench.read([(1, 0, 0, 16384)]))[1] == DATA[:5].ljust(4096, b"\0")
    request = pb.RemoveRequest(target=1, authority=bench.authority(), inodes=struct.pack("<QQ", 1, 2))
    answer, _ = await bench.call(Method.DATA_REMOVE, request, b"", pb.RemoveReply)
    assert (answer.chunks, answer.bytes) == (1, 4096)


@served
async def test_state_of_the_store_is_reported(bench):
    await bench.write([(1, 0, 1, 3, 0, DATA)])
    await bench.call(Method.DATA_FLUSH, pb.FlushRequest(target=1))
    answer, _ = await bench.call(
        Method.DATA_DESCRIBE, pb.DescribeRequest(target=1, inode=1), b"", pb.DescribeReply
    )
    assert [(one.index, one.blocks, one.end) for one in answer.chunks] == [(3, 4, 16384)] and not answer.more
    answer, _ = await bench.call(Method.DATA_LIST, pb.ListRequest(target=1), b"", pb.ListReply)
    assert answer.inodes == struct.pack("<Q", 1)
    answer, _ = await bench.call(Method.DATA_SCRUB, pb.ScrubRequest(target=1, blocks=100), b"", pb.ScrubReply)
    assert answer.done and answer.blocks == 4
    bench.store.flip(1, 3, 2)
    assert (await bench.read([(1, 3, 8192, 4096)], verify=True))[0] == [errors.ChecksumMismatch.wire_code]
    answer, _ = await bench.call(Method.DATA_STATUS, pb.DataStatusRequest(target=1), b"", pb.DataStatusReply)
    assert (answer.target, answer.state, answer.used_bytes, answer.pid > 0) == (1, "serving", 16384, True)
    assert [(one.inode, one.index, one.block) for one in answer.bad] == [(1, 3, 2)]
    room, _ = await bench.call(
        Method.DATA_STATUS, pb.DataStatusRequest(target=1), b"", pb.DataStatusReply, peer=CLIENT
    )
    assert room == pb.DataStatusReply(
        target=1, state="serving", kind=answer.kind, capacity_bytes=answer.capacity_bytes, used_bytes=16384
    )


def a_map(epoch=5):
    node = Node(1, "n", "h", ())
    targets = tuple(Target(number, number, 1, 1 << 30, ()) for number in (1, 2))
    drives = tuple(Drive(number, 1, "", 1 << 30) for number in (1, 2))
    return PoolMap(
        MAP_FORMAT, "p", "pool", epoch, PoolSettings(), (node,), drives, targets, (build_table(targets, 1),)
    )


def chunk_of(pool_map, target):
    return next(index for index in range(100) if pool_map.chain(1, chain_of(1, index)).targets == (target,))


@served
async def test_older_map_is_refused_if_its_chain_changed(bench):
    pool_map = a_map()
    bench.service.update_map(pool_map)
    ours, other = chunk_of(pool_map, 1), chunk_of(pool_map, 2)
    assert await bench.write([(1, 0, 1, ours, 0, DATA)], epoch=5) == [(0, version(1, 1))]
    assert await bench.write([(1, 0, 2, other, 0, DATA)], epoch=5) == [(errors.WrongTarget.wire_code, 0)]
    with pytest.raises(errors.StaleEpoch):
        await bench.read([(1, ours, 0, 4096)], epoch=4)
    table = pool_map.tables[0]
    chains = list(table.chains)
    chains[chain_of(1, ours)] = type(chains[0])(8, (1,))
    newer = changed(pool_map, tables=(type(table)(1, tuple(chains)),))
    bench.service.update_map(newer)
    with pytest.raises(errors.StaleEpoch):
        await bench.read([(1, ours, 0, 4096)], epoch=5)
    with pytest.raises(errors.StaleEpoch):
        await bench.write([(1, 0, 3, ours, 0, DATA)], epoch=5)
    assert await bench.read([(1, 1000, 0, 4096)], epoch=5) == ([0], b"")
    assert await bench.write([(1, 0, 3, ours, 0, DATA)], epoch=6) == [(0, version(8, 1))]


@served
async def test_extents_need_any_right_and_a_current_map(bench):
    await bench.write([(1, 0, 1, 3, 4096, DATA)])

    async def ask(grant, epoch=0, **fields):
        request = pb.ExtentsRequest(target=1, inode=1, until=1 << 40, grant=grant, map_epoch=epoch, **fields)
        answer, _ = await bench.call(Method.DATA_EXTENTS, request, b"", pb.ExtentsReply)
        return list(EXTENT.iter_unpack(answer.extents)), answer.more, answer.next

    for grant in (bench.grant(grants.READ), bench.grant(grants.WRITE), bench.authority()):
        assert await ask(grant) == ([(3, 1, 4)], False, 1 << 32)
    assert await ask(bench.grant(), first=4) == ([], False, 1 << 32)
    for grant in (b"", bench.grant(inode=2), bench.grant(life_s=-10)):
        with pytest.raises(errors.StaleGrant):
            await ask(grant)
    pool_map = a_map()
    bench.service.update_map(pool_map)
    assert (await ask(bench.grant(), 5))[0] == [(3, 1, 4)]
    with pytest.raises(errors.StaleEpoch):
        await ask(bench.grant(), 4)


@served
async def test_copy_needs_both_rights_and_both_chunks_here(bench):
    await bench.write([(1, 0, 1, 0, 0, DATA)])
    whole = {"target": 1, "from_inode": 1, "inode": 2, "length": 16384, "session": 9, "sequence": 5}

    async def ask(may_read, may_write, **fields):
        request = pb.CopyRequest(read_grant=may_read, write_grant=may_write, **{**whole, **fields})
        return (await bench.call(Method.DATA_COPY, request, b"", pb.CopyReply))[0]

    def reader(**fields):
        return bench.grant(grants.READ, **fields)

    def writer(**fields):
        return bench.grant(grants.WRITE, **{"inode": 2, **fields})

    for source in (b"", bench.grant(grants.WRITE), reader(inode=2), reader(life_s=-10)):
        with pytest.raises(errors.StaleGrant):
            await ask(source, writer())
    for target, fields in (
        (b"", {}),
        (bench.grant(grants.READ, inode=2), {}),
        (writer(inode=1), {}),
        (writer(life_s=-10), {}),
        (writer(), {"cut": 1}),
        (writer(), {"session": 10}),
    ):
        with pytest.raises(errors.StaleGrant):
            await ask(reader(), target, **fields)
    answer = await ask(reader(), writer())
    assert (answer.version, answer.bytes) == (version(1, 1), 16384)
    assert (await ask(reader(), writer())) == answer, "copied once"
    assert (await bench.read([(2, 0, 0, 16384)], bench.grant(inode=2)))[1] == DATA
    for fields, error in (
        ({"offset": 1}, errors.InvalidRequest),
        ({"length": 0}, errors.InvalidRequest),
        ({"from_offset": 1 << 31}, errors.InvalidRequest),
        ({"target": 2}, errors.WrongTarget),
    ):
        with pytest.raises(error):
            await ask(reader(), writer(), **fields)
    pool_map = a_map()
    bench.service.update_map(pool_map)
    other = chunk_of(pool_map, 2)
    with pytest.raises(errors.WrongTarget):
        await ask(
            reader(),
            bench.grant(grants.WRITE),
            from_index=other,
            inode=1,
            index=chunk_of(pool_map, 1),
            map_epoch=5,
        )
    with pytest.raises(errors.WrongTarget):
        await ask(reader(), bench.grant(grants.WRITE), inode=1, index=other, map_epoch=5)
    with pytest.raises(errors.StaleEpoch):
        await ask(reader(), bench.grant(grants.WRITE), inode=1, map_epoch=4)


def test_invalid_ranges_are_refused(tmp_path):
    async def run():
        create_chunk_store(tmp_path / "t", 1, "pool", 64 << 20)
        bench = Bench(await open_chunk_store(tmp_path / "t", 1))
        await bench.write([(1, 0, 1, 0, 0, DATA)])
        dice = random.Random(4)

        def number(bits):
            return dice.choice((0, 1, 4096, 8192, dice.getrandbits(bits), (1 << bits) - 1, 1 << bits - 1))

        for turn in range(600):
            right = bench.authority()
            request = dice.choice(
                (
                    pb.ExtentsRequest(
                        target=1,
                        grant=right,
                        inode=dice.choice((1, number(64))),
                        first=number(32),
                        until=number(64),
                    ),
                    pb.CopyRequest(
                        target=1,
                        read_grant=right,
                        write_grant=right,
                        from_inode=dice.choice((1, number(64))),
                        from_index=number(32),
                        from_offset=number(32),
                        inode=number(64),
                        index=number(32),
                        offset=number(32),
                        length=number(32),
                        cut=number(64),
                        session=dice.choice((0, 9)),
                        slot=number(32),
                        sequence=turn,
                    ),
                    pb.CutRequest(
                        target=1,
                        authority=right,
                        inode=number(64),
                        size=number(52),
                        cut=number(64),
                        chunk_bits=dice.randrange(16, 25),
                        end=number(52),
                    ),
                )
            )
            method = {
                pb.ExtentsRequest: Method.DATA_EXTENTS,
                pb.CopyRequest: Method.DATA_COPY,
                pb.CutRequest: Method.DATA_CUT,
            }
            try:
                await bench.call(method[type(request)], request)
            except errors.NvpoolError as error:
                assert not isinstance(error, errors.Bug), (request, error)
        await is_sound(bench.store)
        await bench.service.close()

    asyncio.run(run())


@served
async def test_newer_map_epoch_triggers_one_refresh(bench):
    pool_map = a_map()
    bench.service.update_map(pool_map)
    asked = []
    bench.service.refresh_map = lambda: (asked.append(1), bench.service.update_map(changed(pool_map)))
    await bench.read([(1, 0, 0, 4096)], epoch=6)
    await bench.read([(1, 0, 0, 4096)], epoch=6)
    assert asked == [1]


@served
async def test_store_serves_only_status_before_its_verifier_is_known(bench):
    bench.serve(ServingLease(1, bench.clock, until_s=math.inf, verifier=7))
    pool_map = a_map()
    for verifier, answers in ((0, False), (6, False), (7, True)):
        pool_map = changed(
            pool_map, targets=tuple(replace(target, verifier=verifier) for target in pool_map.targets)
        )
        bench.service.update_map(pool_map)
        await bench.call(Method.DATA_STATUS, pb.DataStatusRequest(target=1), b"", pb.DataStatusReply)
        epoch = pool_map.epoch
        for ask in (
            partial(
                bench.call, Method.DATA_FLUSH, pb.FlushRequest(target=1, map_epoch=epoch), b"", pb.FlushReply
            ),
            partial(bench.write, [(1, 0, epoch, 0, 0, DATA)], epoch=epoch),
            partial(
                bench.call,
                Method.DATA_VERSIONS,
                pb.VersionsRequest(target=1, map_epoch=epoch, authority=bench.authority()),
            ),
        ):
            try:
                await ask()
            except errors.Busy:
                assert not answers
            else:
                assert answers


@served
async def test_store_without_a_serving_lease_refuses_requests(bench):
    lease = ServingLease(1, bench.clock)
    bench.serve(lease)
    pool_map = a_map()
    both = changed(pool_map, tables=(*pool_map.tables, build_table(pool_map.targets, 2)))
    bench.service.update_map(both)
    ours = chunk_of(both, 1)
    of_it = {"target": 1, "map_epoch": both.epoch}
    whole = {
        "from_inode": 1,
        "from_index": ours,
        "inode": 1,
        "index": ours,
        "length": 4096,
        "offset": 4096,
        "sequence": 5,
    }
    asks = [
        (Method.DATA_EXTENTS, pb.ExtentsRequest(inode=1, until=9, grant=bench.grant(), **of_it)),
        (Method.DATA_DESCRIBE, pb.DescribeRequest(inode=1, **of_it)),
        (
            Method.DATA_COPY,
            pb.CopyRequest(read_grant=bench.grant(), write_grant=bench.grant(), session=9, **whole, **of_it),
        ),
    ]
    for served in (True, False):
        if served:
            lease.renewed(bench.clock.boottime_s(), 3.0, 0)
        else:
            bench.clock.advance(3.0)
        for method, request in asks:
            with nullcontext() if served else pytest.raises(errors.StaleTenure):
                await bench.call(method, request)


@served
async def test_request_past_its_deadline_is_not_started(bench):
    with pytest.raises(errors.DeadlineExceeded) as caught:
        await bench.write([(1, 0, 1, 0, 0, DATA)], deadline_s=bench.clock.boottime_s() - 1)
    assert not caught.value.may_be_applied
    assert bench.store.inodes(0, 1) == ([], False)


@served
async def test_large_batch_yields_to_other_requests(bench):
    bench.store.block_count = bench.store.block_limit = 1 << 20
    found = await bench.write([(1, 0, number, number, 0, bytes(1 << 20)) for number in range(1, 20)])
    assert [status for status, _ in found] == [0] * 19


class Waiting(MemoryChunkStore):
    """Makes every second write wait."""

    def __init__(self, clock=None):
        super().__init__()
        self.turn = 0
        self.clock = clock

    def write_now(self, *arguments, **named):
        self.turn += 1
        if self.turn % 2:
            raise MustWait(self.until)
        return super().write_now(*arguments, **named)

    async def until(self):
        if self.clock is not None:
            self.clock.advance(1)
        await asyncio.sleep(0)


def test_waiting_writes_are_all_done_and_answered_once():
    async def run():
        bench = Bench(Waiting())
        found = await bench.write([(1, 0, number, number, 0, DATA) for number in range(1, 20)])
        assert [status for status, _ in found] == [0] * 19

    asyncio.run(run())


def test_cancelled_waiting_write_is_not_applied_later():
    async def run():
        bench = Bench()
        write_now, room = bench.store.write_now, asyncio.Event()

        def waiting(*arguments, **named):
            if not room.is_set():
                raise MustWait(room.wait)
            return write_now(*arguments, **named)

        bench.store.write_now = waiting
        request = pb.WriteRequest(
            target=1,
            grants=[bench.grant()],
            session=9,
            slot=0,
            writes=WRITE.pack(1, 0, 1, 0, 0, 100, 0, 0),
            checksums=piece_checksums(b"a" * 100, 0),
        )
        given_up = FakeCall(Method.DATA_WRITE, request.SerializeToString(), b"a" * 100)
        bench.service.handle(given_up)
        await asyncio.sleep(0)
        given_up.cancelled = True
        room.set()  # the later write gets space before the earlier one wakes
        assert [status for status, _ in await bench.write([(1, 0, 2, 0, 0, b"b" * 100)], slot=1)] == [0]
        await asyncio.sleep(0.01)
        _, payload = await bench.read([(1, 0, 0, 4096)])
        assert payload[:100] == b"b" * 100

    asyncio.run(run())


def test_writes_past_their_deadline_report_which_were_done():
    async def run():
        bench = Bench()
        bench.store = Waiting(bench.clock)
        bench.serve()
        found = await bench.write(
            [(1, 0, number, number, 0, DATA) for number in range(1, 9)],
            deadline_s=bench.clock.boottime_s() + 3.5,
        )
        late = errors.DeadlineExceeded.wire_code
        assert [status for status, _ in found] == [0, 0, 0, late, late, late, late, late]

    asyncio.run(run())


@served
async def test_draining_service_refuses_new_requests(bench):
    await bench.service.start()
    await bench.service.close(1.0)
    with pytest.raises(errors.Draining):
        await bench.read([(1, 0, 0, 4096)])
    assert not bench.service.waiting_count


class WaitingStore(MemoryChunkStore):
    """A store whose copies wait: `meanwhile` runs then."""

    async def copy(self, *arguments, **named):
        self.meanwhile()
        return await super().copy(*arguments, **named)


def test_copy_is_refused_when_its_chunk_became_shared():
    targets = (Target(1, 1, 1, 1 << 30, ()), Target(2, 2, 1, 1 << 30, ()))
    pool_map = PoolMap(
        MAP_FORMAT,
        "p",
        "pool",
        1,
        PoolSettings(),
        (Node(1, "n1", "", ()),),
        tuple(Drive(t.id, 1, f"/d{t.id}", 1 << 30) for t in targets),
        targets,
        (build_table(targets[:1], 1),),
    )
    store = WaitingStore()
    replica = Replica(store, 1, ManualClock(), b"s" * 32)
    replica.update_map(pool_map)
    store.write_now(5, 0, 0, memoryview(bytes(4096)), piece_checksums(bytes(4096), 0), table=1)

    def copy(index, shares):
        chains = tuple(
            replace(chain, epoch=chain.epoch + shares, joining=(2,) if shares else ())
            for chain in pool_map.tables[0].chains
        )
        store.meanwhile = lambda: replica.update_map(
            replace(pool_map, tables=(replace(pool_map.tables[0], chains=chains),))
        )
        return asyncio.run(
            replica.copy((5, 0, 0), 6, index, 0, 4096, cut=0, request=None, given_up=bool, table=1)
        )

    assert copy(0, 0)[1] == 4096
    with pytest.raises(errors.NotSupported):
        copy(1, 1)
    assert not store.held(6, 1).version, "a joining target has compared the chunk already"


def of_a_volume(bench, rights, epoch, inode=1, volume=77, member="client/one.0a1b2c3d"):
    ends = bench.clock.wall_ns() // 1_000_000 + 60_000
    return grants.sign(
        grants.Grant(
            rights, 0, 9, inode, 0, ends, 1, epoch, grants.volume_tag(volume), grants.member_tag(member)
        ),
        SECRET,
    )


@served
async def test_token_of_a_revoked_right_is_refused(bench):
    stale = errors.StaleGrant.wire_code
    bench.service.update_map(small_map(5))
    both = of_a_volume(bench, grants.READ | grants.WRITE, 5)
    assert [one[0] for one in await bench.write([(1, 0, 1, 0, 0, DATA)], both, epoch=9)] == [0]
    assert await bench.read([(1, 0, 0, 4096)], both, 9) == ([0], DATA[:4096])
    now_ms = bench.clock.wall_ns() // 1_000_000
    bench.service.update_map(
        taken(small_map(5), 77, "client/one.0a1b2c3d", grants.READ | grants.WRITE, now_ms, 60_000)
    )
    assert (await bench.read([(1, 0, 0, 4096)], both, 9))[0] == [stale]
    assert [one[0] for one in await bench.write([(1, 0, 2, 0, 0, DATA)], both, epoch=9)] == [stale]
    for grant in (
        of_a_volume(bench, 3, 6),
        of_a_volume(bench, 3, 5, member=""),
        of_a_volume(bench, 3, 5, volume=78),
    ):
        assert await bench.read([(1, 0, 0, 4096)], grant, 9) == ([0], DATA[:4096])
    with pytest.raises(errors.StaleGrant):
        await bench.call(
            Method.DATA_EXTENTS, pb.ExtentsRequest(target=1, grant=both, inode=1, until=1, map_epoch=9)
        )


@served
async def test_expired_revocations_are_dropped(bench):
    now_ms = bench.clock.wall_ns() // 1_000_000
    long = grants.sign(
        grants.Grant(grants.READ, 0, 9, 1, 0, now_ms + 600_000, 1, 5, grants.volume_tag(77), 0), SECRET
    )
    bench.service.update_map(taken(small_map(5), 77, "", grants.READ, now_ms, 60_000))
    assert (await bench.read([(1, 0, 0, 4096)], long, 9))[0] == [errors.StaleGrant.wire_code]
    bench.clock.advance(61.0)
    bench.service.verified_grants.tend()
    assert (await bench.read([(1, 0, 0, 4096)], long, 9))[0] == [0]


def small_map(epoch):
    return PoolMap(MAP_FORMAT, "p", "p", epoch, PoolSettings())
