"""Cross-shard transactions as a client sees them: directories, names and inodes on different shards."""

from __future__ import annotations

import asyncio
import os
import stat

import pytest
from msgspec.structs import replace

from nvpool.client.inode_paths import PathFinder
from nvpool.client.state.options import ClientOptions
from nvpool.client.state.vfs_types import Caller
from nvpool.core.errors import (
    AlreadyExists,
    Busy,
    DirectoryNotEmpty,
    IsADirectory,
    NotFound,
    Unavailable,
    WouldLoop,
)
from nvpool.core.ids import ROOT_INODE, inode_number, partition_of
from nvpool.meta.options import MetaOptions
from nvpool.meta.state import records
from nvpool.meta.state.transaction import TruncationInProgress
from nvpool.meta.state.transaction_records import NO_TURN, Decision, TransactionId, partition_of_held
from nvpool.meta.transactions import coordinator, participant
from nvpool.meta.transactions.peer_shards import id_message
from nvpool.rpc.v1 import meta_pb2 as pb
from nvpool.rpc.v1 import wire_pb2 as wire
from nvpool.testing.fakes.in_process_pool import InProcessPool

ME = Caller(1000, 1000)
OPTIONS = ClientOptions(deadline_s=60.0, fresh_s=0.0, attr_s=0.0)
SHARDS = (1, 2, 3)


class CrossShardNames:
    """A pool of three shards, and a directory below the root on each of them: `at[shard]`."""

    def __init__(self, options: ClientOptions = OPTIONS, **pool_options) -> None:
        self.options = options
        self.pool = InProcessPool(shards=len(SHARDS), **pool_options)

    async def __aenter__(self) -> CrossShardNames:
        await self.pool.__aenter__()
        self.vfs = (await self.pool.client("first", self.options)).vfs
        self.at = {shard: await self.directory(shard) for shard in SHARDS}
        return self

    async def __aexit__(self, *failure) -> None:
        await self.pool.__aexit__(*failure)

    async def directory(self, shard: int, parent: int = ROOT_INODE, before: bytes = b"") -> int:
        """Create a directory whose inode is on that shard."""
        number = 0
        while True:
            name = b"%s%d-%d" % (before, shard, number)
            made = await self.vfs.mkdir(parent, name, 0o755, ME)
            if self.vfs.meta.shard_of(made.inode) == shard:
                return made.inode
            await self.vfs.rmdir(parent, name, ME)
            number += 1

    async def file(self, parent: int, name: bytes, content: bytes = b"") -> int:
        attr, handle = await self.vfs.create(parent, name, 0o644, os.O_RDWR, ME)
        await self.vfs.write(handle, 0, content)
        await self.vfs.release(handle)
        return attr.inode

    async def content(self, inode: int) -> bytes:
        handle = await self.vfs.open(inode, os.O_RDONLY, ME)
        try:
            return bytes(await self.vfs.read(handle, 0, 1 << 20))
        finally:
            await self.vfs.release(handle)

    async def names(self, directory: int) -> dict[bytes, int]:
        listed, more = await self.vfs.readdir(await self.vfs.opendir(directory), 0, 1000)
        assert not more
        return dict(zip(listed.names, listed.inodes, strict=True))

    async def quiet(self) -> None:
        """Wait until no record is locked and no notification is pending."""
        async with asyncio.timeout(60):
            while not self.is_quiet():  # noqa: ASYNC110 (no notification)
                await asyncio.sleep(0.01)

    def is_quiet(self) -> bool:
        found = [meta.parts.cross_shard.counters() for meta in self.pool.metas.values()]
        return not any(one["held"] or one["spans_to_tell"] for one in found)


def run(main, **options) -> None:
    async def whole() -> None:
        async with CrossShardNames(**options) as names:
            await main(names)
            await names.quiet()

    asyncio.run(whole())


def test_directories_on_any_shard_are_made_listed_and_removed():
    async def main(names: CrossShardNames) -> None:
        vfs = names.vfs
        made = {
            b"d%d" % number: (await vfs.mkdir(names.at[2], b"d%d" % number, 0o755, ME)).inode
            for number in range(20)
        }
        assert {vfs.meta.shard_of(inode) for inode in made.values()} == set(SHARDS)
        assert await names.names(names.at[2]) == made
        other = (await names.pool.client("second", OPTIONS)).vfs
        listed, _ = await other.readdir(await other.opendir(names.at[2]), 0, 100)
        assert all(entry.attr.links == 2 and stat.S_ISDIR(entry.attr.mode) for entry in listed)
        assert (await other.getattr(names.at[2])).links == 22
        for name, inode in made.items():
            assert (await other.lookup(names.at[2], name)).inode == inode
            await names.file(inode, b"file", name)
            with pytest.raises(DirectoryNotEmpty):
                await vfs.rmdir(names.at[2], name, ME)
            await vfs.unlink(inode, b"file", ME)
            await vfs.rmdir(names.at[2], name, ME)
        assert await names.names(names.at[2]) == {}
        assert (await vfs.getattr(names.at[2])).links == 2
        with pytest.raises(NotFound):
            await other.mkdir(made[b"d1"], b"late", 0o755, ME)

    run(main)


def test_file_is_used_by_a_name_on_another_shard():
    async def main(names: CrossShardNames) -> None:
        vfs, at = names.vfs, names.at
        inode = await names.file(at[1], b"a", b"bytes")
        replaced = await names.file(at[2], b"b", b"old")
        await vfs.rename(at[1], b"a", at[2], b"b", 0, ME)
        assert await names.names(at[1]) == {} and await names.names(at[2]) == {b"b": inode}
        assert await names.content((await vfs.lookup(at[2], b"b")).inode) == b"bytes"
        other = (await names.pool.client("second", OPTIONS)).vfs
        assert (await other.lookup(at[2], b"b")).inode == inode
        attr, handle = await other.create(
            at[2], b"b", 0o600, os.O_RDWR | os.O_TRUNC, ME
        )  # the file exists, on another shard
        assert attr.inode == inode and attr.size == 0
        await other.release(handle)
        with pytest.raises(AlreadyExists):
            await other.create(at[2], b"b", 0o600, os.O_RDWR | os.O_EXCL, ME)
        await vfs.link(inode, at[3], b"c", ME)
        assert (await vfs.getattr(inode)).links == 2
        await other.unlink(at[2], b"b", ME)
        assert (await vfs.getattr(inode)).links == 1
        await other.unlink(at[3], b"c", ME)
        await names.quiet()
        for gone in (inode, replaced):
            meta = names.pool.metas[vfs.meta.shard_of(gone)]
            assert gone in meta.parts.collector.orphans
        for name in await names.names(ROOT_INODE):
            with pytest.raises(IsADirectory):
                await vfs.unlink(ROOT_INODE, name, ME)

    run(main)


def test_directories_move_between_shards_never_below_themselves():
    async def main(names: CrossShardNames) -> None:
        vfs, at = names.vfs, names.at
        below = await names.directory(2, at[1], b"x")
        deep = await names.directory(3, below, b"y")
        top = await names.names(ROOT_INODE)
        name_of = {inode: name for name, inode in top.items()}
        for target in (at[1], below, deep):
            with pytest.raises(WouldLoop):
                await vfs.rename(ROOT_INODE, name_of[at[1]], target, b"loop", 0, ME)
        await vfs.rename(ROOT_INODE, name_of[at[1]], at[3], b"moved", 0, ME)
        assert (await vfs.lookup(at[3], b"moved")).inode == at[1]
        assert (await vfs.getattr(at[1])).parent == at[3] and (await vfs.getattr(at[3])).links == 3
        assert (await vfs.getattr(ROOT_INODE)).links == 4
        with pytest.raises(WouldLoop):
            await vfs.rename(ROOT_INODE, name_of[at[3]], deep, b"loop", 0, ME)
        empty = await names.directory(1, at[2], b"z")
        name = next(iter(await names.names(at[2])))
        await vfs.rename(at[3], b"moved", at[2], name, 0, ME)  # replaces an empty directory
        assert (await names.names(at[2]))[name] == at[1] and empty not in (await names.names(at[2])).values()

    run(main)


def test_two_names_are_exchanged_between_shards():
    async def main(names: CrossShardNames) -> None:
        vfs, at = names.vfs, names.at
        file, directory = await names.file(at[1], b"a"), await names.directory(3, at[2], b"b")
        name = next(iter(await names.names(at[2])))
        await vfs.rename(at[1], b"a", at[2], name, 2, ME)
        assert await names.names(at[1]) == {b"a": directory} and await names.names(at[2]) == {name: file}
        assert (await vfs.getattr(directory)).parent == at[1]

    run(main)


def test_concurrent_cross_shard_renames_lose_no_name():
    async def main(names: CrossShardNames) -> None:
        clients = [(await names.pool.client(f"client {number}", OPTIONS)).vfs for number in range(3)]
        inodes = {
            b"%d-%d" % (number, shard): await names.file(names.at[shard], b"%d-%d" % (number, shard))
            for number in range(3)
            for shard in SHARDS
        }

        async def carry(number: int) -> None:
            vfs = clients[number]
            for turn in range(6):
                for shard in SHARDS:
                    name = b"%d-%d" % (number, shard)
                    here, there = (shard - 1 + turn) % 3 + 1, (shard + turn) % 3 + 1
                    await vfs.rename(names.at[here], name, names.at[there], name, 0, ME)

        await asyncio.gather(*(carry(number) for number in range(3)))
        found: dict[bytes, int] = {}
        for shard in SHARDS:
            listed = await names.names(names.at[shard])
            assert found.keys().isdisjoint(listed)
            found |= listed
        assert found == inodes

    run(main)


def test_records_known_from_the_request_are_locked_together():
    async def main(names: CrossShardNames) -> None:
        vfs, at = names.vfs, names.at
        asked: list[int] = []
        for meta in names.pool.metas.values():

            def hold(request, shard=meta.parts.shard, hold=meta.parts.cross_shard.participant.hold):
                asked.append(shard)
                return hold(request)

            meta.parts.cross_shard.participant.hold = hold
        for _ in range(20):
            await vfs.mkdir(at[2], b"d", 0o755, ME)
            asked.clear()
            await vfs.rmdir(at[2], b"d", ME)
            assert len(asked) <= 1
        inode = await names.file(at[3], b"f")
        asked.clear()
        await vfs.rename(at[3], b"f", at[2], b"f", 0, ME)
        assert asked == [2]
        asked.clear()
        await vfs.rename(at[2], b"f", at[1], b"f", 0, ME)
        assert sorted(asked) == [1, 3]
        asked.clear()
        await vfs.link(inode, at[2], b"g", ME)
        assert asked == [2]

    run(main)


def test_paths_of_inodes_are_found_on_all_shards():
    async def main(names: CrossShardNames) -> None:
        below = await names.directory(3, await names.directory(2, names.at[1], b"x"), b"y")
        there = await names.file(below, b"file")
        moved = await names.file(below, b"moved")
        await names.vfs.rename(below, b"moved", names.at[2], b"away", 0, ME)
        client = names.pool.clients[0]
        found = await PathFinder(lambda: client.pool_map, client.dialer, names.pool.clock).find(
            [there, moved, below]
        )
        for inode, path in found.items():
            attr, place = None, ROOT_INODE
            for name in path.strip(b"/").split(b"/"):
                attr = await names.vfs.lookup(place, name)
                place = attr.inode
            assert place == inode
        assert found.keys() == {there, moved, below}

    run(main)


def test_refused_transaction_leaves_no_state():
    async def main(names: CrossShardNames) -> None:
        vfs = names.vfs
        full = await names.directory(2, names.at[1], b"full")
        await names.file(full, b"name")
        (name,) = (name for name, inode in (await names.names(names.at[1])).items() if inode == full)
        for _ in range(3):
            with pytest.raises(DirectoryNotEmpty):
                await vfs.rmdir(names.at[1], name, ME)
        assert not any(meta.parts.cross_shard.coordinator.active for meta in names.pool.metas.values())

    run(main)


def test_cross_shard_change_notifies_only_other_clients():
    async def main(names: CrossShardNames) -> None:
        vfs, at, pool = names.vfs, names.at, names.pool
        inode = await names.file(at[3], b"f")
        await pool.stop_shard(shard=3)
        await pool.start_shard(shard=3)
        await vfs.getattr(inode)
        session = vfs.meta.sessions.at(3)
        await vfs.meta._renew(session, pool.clock.boottime_s() + 60)
        assert pool.metas[3].parts.sessions.number_of(vfs.meta._identity) == session.session
        other = (await pool.client("second", OPTIONS)).vfs
        notified: dict[str, list[int]] = {"first": [], "second": []}

        def note(who: str, asked: list[int]) -> None:
            notified[who] += asked

        for who, one in (("first", vfs), ("second", other)):

            async def on_recall(inodes: list[int], who: str = who) -> None:
                note(who, inodes)

            one.on_recall = on_recall
            await one.getattr(inode)
        async with asyncio.timeout(60):
            while (
                other.leases.held(inode) is None or vfs.leases.held(inode) is None
            ):  # no lease is granted soon after a change
                await asyncio.sleep(0.1)
                await asyncio.gather(vfs.parts.inodes.fetch(inode), other.parts.inodes.fetch(inode))
        await vfs.rename(at[3], b"f", at[2], b"f", 0, ME)
        await vfs.rename(at[2], b"f", at[1], b"f", 0, ME)
        assert inode in notified["second"] and inode not in notified["first"]

    run(main)


def test_leases_end_while_a_silent_coordinator_is_queried(monkeypatch):
    async def main(names: CrossShardNames) -> None:
        await names.file(names.at[3], b"f")
        await names.quiet()
        pool, meta = names.pool, names.pool.metas[3]
        (session,) = meta.parts.sessions.by_number.values()
        asked: list = []
        outcome = pool.metas[2].routes[wire.META_OUTCOME]
        pool.metas[2].routes[wire.META_OUTCOME] = asked.append
        span = TransactionId(2, 7, 1)
        await meta.parts.cross_shard.participant.hold(
            pb.HoldRequest(id=id_message(span), order=1, keys=[records.inode_key(names.at[3])])
        )
        async with asyncio.timeout(60):
            while not asked:  # noqa: ASYNC110 (no notification)
                await asyncio.sleep(0.01)
            session.expires_s = 0.0
            while session.number in meta.parts.sessions.by_number:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        pool.metas[2].routes[wire.META_OUTCOME] = outcome
        for call in asked:
            outcome(call)

    monkeypatch.setattr(participant, "ASK_AFTER_S", 0.05)
    monkeypatch.setattr(participant, "ASK_S", 120.0)
    run(main, meta_options=MetaOptions(tick_s=0.05))


def test_silent_coordinator_does_not_block_other_queries(monkeypatch):
    async def main(names: CrossShardNames) -> None:
        await names.quiet()
        pool, participating = names.pool, names.pool.metas[3].parts.cross_shard.participant
        asked: list = []
        outcome = pool.metas[2].routes[wire.META_OUTCOME]
        pool.metas[2].routes[wire.META_OUTCOME] = asked.append
        spans = [TransactionId(2, 7, number) for number in range(participant.ASKED_MAX)] + [
            TransactionId(1, 7, 1)
        ]
        for number, span in enumerate(spans):
            key = records.inode_key(inode_number(partition_of(names.at[3]), 1000 + number))
            await participating.hold(pb.HoldRequest(id=id_message(span), order=1, keys=[key]))
        asking = asyncio.create_task(participating.run_once())
        async with asyncio.timeout(60):
            while spans[-1] in participating.holds.by_span:  # noqa: ASYNC110 (no notification)
                await asyncio.sleep(0.01)
        assert not asking.done()
        pool.metas[2].routes[wire.META_OUTCOME] = outcome
        for call in asked:
            outcome(call)
        await asking

    monkeypatch.setattr(participant, "ASK_AFTER_S", 0.0)
    monkeypatch.setattr(participant, "ASK_S", 120.0)
    run(main, meta_options=MetaOptions(tick_s=3600.0))


def test_removed_member_is_ignored(
    monkeypatch,
):
    """A shard leaves only when no transaction depends on it, so its missing reply counts as success. A shard that is newer than
    the map at hand has not left: its decisions must not be taken for undecided."""

    async def main(names: CrossShardNames) -> None:
        await names.quiet()
        pool_map, transaction_service = names.pool.pool_map, names.pool.metas[1].parts.cross_shard
        peers, participating = transaction_service.coordinator.peers, transaction_service.participant
        peers.use_map(replace(pool_map, shards=pool_map.shards[:2], shards_given=3))
        gone, new = TransactionId(3, 7, 1), TransactionId(9, 7, 1)
        for number, span in enumerate((gone, new)):
            key = records.inode_key(inode_number(partition_of(names.at[1]), 1000 + number))
            await participating.hold(pb.HoldRequest(id=id_message(span), order=1, keys=[key]))
        notified = TransactionId(1, 7, 1)
        transaction_service.coordinator.start_settling(
            notified, Decision(NO_TURN, {3: [(records.inode_key(names.at[3]), None)]})
        )
        async with asyncio.timeout(20):
            await transaction_service.coordinator.wait_settled()
        await participating.run_once()
        assert gone not in participating.holds.by_span and new in participating.holds.by_span
        peers.use_map(replace(pool_map, shards_given=9))
        await participating.run_once()
        assert new not in participating.holds.by_span

    monkeypatch.setattr(participant, "ASK_AFTER_S", 0.0)
    run(main, meta_options=MetaOptions(tick_s=3600.0))


def test_transaction_waits_for_a_truncation_for_a_bounded_time(monkeypatch):
    def decide(view, request, now_ns):
        raise TruncationInProgress(5)

    async def main(names: CrossShardNames) -> None:
        meta = names.pool.metas[1]
        deciding, cutting = meta.parts.cross_shard.coordinator, asyncio.get_running_loop().create_future()
        meta.parts.view.cutting[5] = cutting
        span = deciding.begin(0)
        with pytest.raises(Unavailable, match="still being truncated"):
            await asyncio.wait_for(deciding.decide(span, decide, None), 20)
        deciding.end(span)
        assert not cutting.done()
        del meta.parts.view.cutting[5]

    monkeypatch.setattr(coordinator, "SPAN_S", 0.05)
    run(main)


def test_closed_partition_accepts_locks_only_of_known_changes(monkeypatch):
    """A lock taken after the partition was quiet would remain, and its decision would be lost."""

    async def main(names: CrossShardNames) -> None:
        await names.quiet()
        meta = names.pool.metas[3]
        holds, hold = meta.parts.cross_shard.holds, meta.parts.cross_shard.participant.hold
        ours = [partition for partition in range(4096) if not meta.parts.view.is_elsewhere(partition)]
        going, staying = ours[:2], ours[2:4]

        def request(number: int, partition: int) -> pb.HoldRequest:
            return pb.HoldRequest(
                id=id_message(TransactionId(1, 7, number)),
                order=number,
                keys=[records.inode_key(inode_number(partition, number))],
            )

        await hold(request(1, staying[0]))
        await hold(request(2, going[0]))
        meta.parts.ranges.close(going)
        quiet = asyncio.create_task(holds.quiet(frozenset(going)))
        with pytest.raises(Busy):
            await hold(request(1, going[0]))
        await hold(request(2, going[1]))
        await hold(request(1, staying[1]))
        assert not quiet.done() and len(holds.by_span) == 2
        meta.parts.cross_shard.participant.end(TransactionId(1, 7, 2), [])
        await asyncio.wait_for(quiet, 60)
        with pytest.raises(Busy):
            await hold(request(1, going[1]))
        assert not any(partition_of_held(key) in going for one in holds.by_span.values() for key in one.keys)
        another = asyncio.create_task(hold(request(3, going[1])))
        await asyncio.sleep(0)
        meta.parts.ranges.open(going)
        await asyncio.wait_for(another, 60)
        await hold(request(1, going[0]))
        for number in (1, 3):
            meta.parts.cross_shard.participant.end(TransactionId(1, 7, number), [])

    monkeypatch.setattr(participant, "ASK_AFTER_S", 1e9)  # their coordinator does not know these transactions
    run(main)


def test_names_of_a_remote_inode_are_listed_with_attributes():
    """Two names in one reply for one inode, which is requested once from its own shard."""

    async def main() -> None:
        async with CrossShardNames() as names:
            vfs = names.vfs
            link = await vfs.symlink(names.at[1], b"link", b"target", ME)
            for name in (b"a", b"b", b"c"):
                await vfs.link(link.inode, names.at[2], name, ME)
            other = (await names.pool.client("other", names.options)).vfs
            listing = await other.opendir(names.at[2])
            entries, _ = await other.readdir(listing, 0, 10)
            assert {entry.name: (entry.attr.mode, entry.attr.links) for entry in entries} == dict.fromkeys(
                (b"a", b"b", b"c"), (link.mode, 4)
            )

    asyncio.run(main())
