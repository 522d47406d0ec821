"""Limits of a metadata shard for each peer: sessions, open files and locks over all sessions."""

import asyncio
from contextlib import asynccontextmanager

import pytest

from nvpool.core.clock import ManualClock
from nvpool.core.errors import TooManyLocks, TooManyOpen
from nvpool.core.posix.byte_range_locks import EXCLUSIVE
from nvpool.kv.memory_engine import MemoryKv
from nvpool.meta.operations.setattr import MODE
from nvpool.meta.options import MetaOptions
from nvpool.meta.server.service import MetaService
from nvpool.rpc.peer_roles import Credentials, Peer
from nvpool.rpc.stats import RPC_STATS
from nvpool.rpc.v1 import meta_pb2 as pb
from nvpool.testing.fakes.meta_shard import ShardClient, StoreRecorder, small_map

OPTIONS = MetaOptions(tick_s=3600, sessions=20, sessions_per_peer=4, locks_per_peer=6, open_files_per_peer=5)
ROOT_INODE = 1


def user(uid):
    return Peer("x", "unix", True, "", Credentials(uid, frozenset((uid,)), 7))


ALICE, BOB, ROOT, NODE = user(1000), user(1001), user(0), Peer("x", "10.0.0.1:9", False, "node/alpha")


@asynccontextmanager
async def a_service(kv=None, options=OPTIONS):
    service = MetaService(
        kv or MemoryKv(),
        grant_secret=b"s" * 32,
        clock=ManualClock(3),
        dialer=StoreRecorder(),
        options=options,
    )
    await service.start()
    service.update_map(small_map())
    try:
        yield service
    finally:
        await service.close()


def on_a_loop(test):
    def run():
        asyncio.run(asyncio.wait_for(test(), 60))

    run.__name__, run.__doc__ = test.__name__, test.__doc__
    return run


async def open_root_to_all(service):
    (client,) = await begin(service, NODE)
    await client.setattr(ROOT_INODE, MODE, mode=0o777)
    await client.ask("CLOSE_SESSION", pb.CloseSessionRequest(session=client.session))


async def begin(service, *peers):
    return [await ShardClient(service, peer=peer).begin() for peer in peers]


@on_a_loop
async def test_sessions_of_a_peer_are_limited():
    async with a_service() as service:
        first, *_ = await begin(service, *[ALICE] * 4)
        before = RPC_STATS.limits_met.get("sessions_per_peer", 0)
        with pytest.raises(
            TooManyOpen, match=r"4 sessions of uid 1000 .* limits\.sessions_per_peer in node\.toml"
        ):
            await begin(service, ALICE)
        assert RPC_STATS.limits_met["sessions_per_peer"] == before + 1
        await begin(service, BOB, ROOT, NODE)
        await first.ask("CLOSE_SESSION", pb.CloseSessionRequest(session=first.session))
        await begin(service, ALICE)


@on_a_loop
async def test_name_of_a_client_is_cut():
    async with a_service() as service:
        request = pb.OpenSessionRequest(client="a\n" + "x" * 100_000)
        reply = await ShardClient(service, peer=ALICE).ask("OPEN_SESSION", request)
        assert service.parts.sessions.get(reply.session).client == "a?" + "x" * 253


@on_a_loop
async def test_a_tenth_of_the_sessions_is_reserved_for_trusted_peers():
    async with a_service() as service:
        await begin(service, *[user(1000 + n // 4) for n in range(18)])
        with pytest.raises(TooManyOpen, match=r"limits\.sessions in node\.toml"):
            await begin(service, user(2000))
        await begin(service, ROOT, NODE)
        with pytest.raises(TooManyOpen):
            await begin(service, ROOT)


@on_a_loop
async def test_renewed_sessions_count_after_a_restart():
    kv = MemoryKv()
    async with a_service(kv) as service:
        before = await begin(service, *[ALICE] * 4)
    async with a_service(kv) as service:
        for client in before:
            client.service = service
            await client.ask("RENEW_SESSION", pb.RenewSessionRequest(session=client.session))
        with pytest.raises(TooManyOpen):
            await begin(service, ALICE)


@on_a_loop
async def test_open_files_of_all_sessions_of_a_peer_are_limited():
    async with a_service() as service:
        await open_root_to_all(service)
        one, other, bob = await begin(service, ALICE, ALICE, BOB)
        opened = [
            (await one.create(ROOT_INODE, b"%d" % n, open=True, rights=1)).entry.attr.inode for n in range(6)
        ]
        await service.end_leases()
        with pytest.raises(TooManyOpen, match=r"uid 1000 has .* limits\.open_files_per_peer in node\.toml"):
            await other.create(ROOT_INODE, b"more", open=True, rights=1)
        await bob.create(ROOT_INODE, b"of bob", open=True, rights=1)
        for inode in opened[:3]:
            await one.ask(
                "RELEASE", pb.ReleaseRequest(session=one.session, inodes=inode.to_bytes(8, "little"))
            )
        await service.end_leases()
        await other.create(ROOT_INODE, b"again", open=True, rights=1)


@on_a_loop
async def test_locks_of_all_sessions_of_a_peer_are_limited():
    async with a_service() as service:
        await open_root_to_all(service)
        one, other, bob = await begin(service, ALICE, ALICE, BOB)
        inode = (await one.file(ROOT_INODE, b"file", mode=0o100666)).inode
        for n in range(6):
            await one.lock(inode, EXCLUSIVE, n * 10, n * 10)
        await service.end_leases()
        with pytest.raises(TooManyLocks, match=r"limits\.locks_per_peer in node\.toml"):
            await other.lock(inode, EXCLUSIVE, 100, 100)
        await bob.lock(inode, EXCLUSIVE, 200, 200)
        await one.lock(inode, 0, 0, 30)
        await service.end_leases()
        await other.lock(inode, EXCLUSIVE, 100, 100)
