"""Revocation of volume rights: stores refuse older access tokens, and locks of removed clients are released."""

from __future__ import annotations

import asyncio

import pytest
from msgspec.structs import replace

from nvpool.client.state.options import ClientOptions
from nvpool.client.state.vfs_types import Caller
from nvpool.core.clock import ManualClock
from nvpool.core.errors import AccessDenied, InvalidRequest, StaleSession, Unavailable
from nvpool.core.grants import READ, WRITE
from nvpool.core.ids import ROOT_INODE
from nvpool.core.posix.byte_range_locks import EXCLUSIVE
from nvpool.meta.options import MetaOptions
from nvpool.meta.server.service import MetaService
from nvpool.meta.state.volume_records import LISTED, SEALED, VolumeRecord
from nvpool.meta.volumes import right_revocation
from nvpool.meta.volumes.right_revocation import ALL, Revocations, lost_rights
from nvpool.rpc.v1 import meta_pb2 as pb
from nvpool.rpc.v1 import wire_pb2 as wire
from nvpool.sdk.async_filesystem import AsyncFileSystem
from nvpool.testing.fakes.in_process_pool import InProcessPool
from nvpool.testing.fakes.meta_shard import PEER, DirectCall, ShardClient

ONE, OTHER = "client/one.0a1b2c3d", "client/other.0a1b2c3d"


class Bench:
    """A pool with a volume `v` that has a file."""

    def __init__(self, pool: InProcessPool, fs: AsyncFileSystem, inode: int) -> None:
        self.pool, self.fs, self.inode = pool, fs, inode
        self.meta = pool.meta
        self._sessions: dict[str, int] = {}

    async def _ask(self, member: str, method: int, request) -> bytes:
        call = DirectCall(method, request.SerializeToString())
        call.peer = PEER._replace(member=member)
        self.meta.handle(call)
        return (await call.wait())[0]

    async def grant(self, member: str, rights: int = READ) -> bytes:
        if member not in self._sessions:
            opened = await self._ask(member, wire.META_OPEN_SESSION, pb.OpenSessionRequest(client=member))
            self._sessions[member] = pb.OpenSessionReply.FromString(opened).session
        request = pb.GetAttrRequest(session=self._sessions[member], inode=self.inode, rights=rights)
        return pb.Entry.FromString(await self._ask(member, wire.META_GETATTR, request)).grant

    def taken_by_stores(self, *grants: bytes) -> list[bool]:
        now_ms = self.pool.clock.wall_ns() // 1_000_000
        store = self.pool.stores[1]
        return [store.grant(raw, now_ms) is not None for raw in grants]


def with_volume(test):
    def run():
        async def main() -> None:
            async with InProcessPool(shards=1) as pool:
                fs = AsyncFileSystem(await pool.client(options=ClientOptions(deadline_s=10.0)), Caller(0, 0))
                await fs.volumes.create("v")
                await fs.write_bytes("/volumes/v/f", b"1")
                await test(Bench(pool, fs, (await fs.stat("/volumes/v/f")).st_ino))

        asyncio.run(main())

    run.__name__ = test.__name__
    return run


@with_volume
async def test_stores_refuse_tokens_of_a_revoked_client(bench):
    volumes = bench.fs.volumes
    await volumes.grant("v", ONE, "rw")
    await volumes.grant("v", OTHER, "ro")
    given = [
        await bench.grant(ONE),
        await bench.grant(ONE, READ | WRITE),
        await bench.grant(OTHER),
        await bench.grant(""),
    ]
    assert bench.taken_by_stores(*given) == [True] * 4
    assert (await volumes.revoke("v", ONE)).revoked_in_s == 0
    assert bench.taken_by_stores(*given) == [False, False, True, True]
    with pytest.raises(AccessDenied, match=f"the right of {ONE} to volume v was taken back"):
        await bench.grant(ONE)
    await volumes.grant("v", ONE, "ro")
    assert bench.taken_by_stores(await bench.grant(ONE)) == [True]


@with_volume
async def test_stores_refuse_to_write_with_a_reduced_right(bench):
    await bench.fs.volumes.grant("v", ONE, "rw")
    given = [await bench.grant(ONE), await bench.grant(ONE, READ | WRITE)]
    await bench.fs.volumes.grant("v", ONE, "ro")
    assert bench.taken_by_stores(*given) == [True, False]
    with pytest.raises(AccessDenied, match="its right to write was taken back"):
        await bench.grant(ONE, WRITE)


@with_volume
async def test_first_grant_revokes_older_tokens_of_all_clients(bench):
    given = [
        await bench.grant(ONE),
        await bench.grant(""),
        (await bench.fs.volumes.list()) and await bench.grant(OTHER),
    ]
    await bench.fs.volumes.grant("v", ONE, "ro")
    assert bench.taken_by_stores(*given) == [False] * 3
    assert bench.taken_by_stores(await bench.grant(ONE), await bench.grant("")) == [True, True]


@with_volume
async def test_sealing_and_removal_revoke_older_tokens(bench):
    await bench.fs.volumes.set("v", bytes_max=1 << 30)
    given = [await bench.grant(ONE), await bench.grant(ONE, READ | WRITE)]
    await bench.fs.volumes.seal("v")
    assert bench.taken_by_stores(*given) == [True, False]
    await bench.fs.volumes.remove("v")
    assert bench.taken_by_stores(given[0]) == [False]


@with_volume
async def test_silent_target_is_reported(bench):
    await bench.fs.volumes.grant("v", ONE, "ro")
    bench.pool.unaware = {2}
    wait_s, right_revocation.WAIT_S = right_revocation.WAIT_S, 0.2
    try:
        assert (await bench.fs.volumes.revoke("v", ONE)).revoked_in_s == 130
    finally:
        right_revocation.WAIT_S = wait_s
    assert (await bench.fs.volumes.set("v", trash_s=5)).revoked_in_s == 0


def test_client_continues_to_read_with_a_reduced_right(monkeypatch):
    handle = MetaService.handle

    def handle_as_client(self, call):
        if call.peer.name == ONE:
            call.peer = call.peer._replace(member=ONE)
        handle(self, call)

    monkeypatch.setattr(MetaService, "handle", handle_as_client)

    async def main() -> None:
        async with InProcessPool(shards=1) as pool:
            own = AsyncFileSystem(await pool.client(), Caller(0, 0))
            await own.volumes.create("v")
            await own.volumes.grant("v", ONE, "rw")
            await own.write_bytes("/volumes/v/f", b"before")
            fs = AsyncFileSystem(await pool.client(ONE), Caller(0, 0))
            file = await fs.open("/volumes/v/f", "r+b")
            await file.write(0, b"B")
            await file.fsync()
            await own.volumes.grant("v", ONE, "ro")
            assert (await file.stat()).st_size == 6
            assert await file.read(0, 6) == b"Before"
            with pytest.raises(PermissionError, match="may only read"):
                await file.write(0, b"C")
                await file.fsync()
            await own.volumes.revoke("v", ONE)
            with pytest.raises(PermissionError, match="was taken back"):
                await file.read(0, 6)
            with pytest.raises(PermissionError):  # writes under the revoked right are lost
                await file.close()
            assert await own.read_bytes("/volumes/v/f") == b"Before"

    asyncio.run(main())


def a_record(flags: int = 0, **grants: bool) -> VolumeRecord:
    return VolumeRecord("v", 0, 0, 0, 0, flags, 0, tuple(grants.items()))


@pytest.mark.parametrize(
    ("before", "after", "lost"),
    [
        (a_record(), a_record(LISTED, a=True), {"": ALL}),
        (
            a_record(LISTED, a=True, b=True, c=False),
            a_record(LISTED, a=False, c=False),
            {"a": WRITE, "b": ALL},
        ),
        (a_record(LISTED, a=False), a_record(LISTED, a=True, b=False), {}),
        (a_record(LISTED, a=True), a_record(0, a=True), {}),
        (a_record(), a_record(SEALED), {"": WRITE}),
        (a_record(LISTED | SEALED, a=True), a_record(LISTED | SEALED), {"a": ALL}),
    ],
)
def test_lost_rights_are_computed_from_the_old_record(before, after, lost):
    assert lost_rights(before, after) == lost


def test_revocation_is_pending_until_the_map_has_it(monkeypatch):
    monkeypatch.setattr(right_revocation, "WAIT_S", 0.0)
    asked, answers = [], [Unavailable("no leader"), [], InvalidRequest("not known")]

    async def take_right(request):
        asked.append((request.volume, request.member, request.rights))
        answer = answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    async def main() -> None:
        revocations = Revocations(ManualClock(), MetaOptions(), take_right, lambda: 1)
        revocations.owe(7, {ONE: READ})
        revocations.owe(7, {ONE: WRITE})
        revocations.owe(8, {"": ALL})
        with pytest.raises(Unavailable, match="for up to 130 s; repeat it"):
            await revocations.settle(7)
        assert revocations.owes(7) and await revocations.settle(7) == 0 and not revocations.owes(7)
        assert asked == [(7, ONE, ALL)] * 2
        assert await revocations.settle(8) == 130 and revocations.owes(8), (
            "the supervisor is of an older version"
        )

    asyncio.run(main())


def test_removed_client_loses_session_and_locks():
    async def main() -> None:
        async with InProcessPool(shards=1) as pool:
            await pool.change_map(lambda now: replace(now, members=("node/here.1", ONE, OTHER)))
            meta = pool.meta
            one, other = ShardClient(meta), ShardClient(meta)
            one.peer, other.peer = PEER._replace(member=ONE), PEER._replace(member=OTHER)
            await one.begin()
            await other.begin()
            inode = (await one.file(ROOT_INODE, b"f", open=True, rights=3)).inode
            assert (await one.lock(inode, EXCLUSIVE)).granted
            await pool.change_map(lambda now: replace(now, members=("node/here.1", OTHER)))
            pool.unaware = {1}
            await meta.end_leases()
            with pytest.raises(StaleSession):
                await one.getattr(inode)
            await meta.end_leases()
            assert not (await other.lock(inode, EXCLUSIVE)).granted, "a store may still accept its writes"
            pool.unaware = set()
            await meta.end_leases()
            assert (await other.lock(inode, EXCLUSIVE)).granted
            await other.getattr(inode)

    asyncio.run(main())
