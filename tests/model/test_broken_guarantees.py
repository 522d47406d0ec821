"""The simulation finds faults: the product is broken on purpose, one guarantee at a time, and some seed reports it."""

from __future__ import annotations

import dataclasses
import random
from types import SimpleNamespace

import msgspec
import pytest

from nvpool.client.data import unstable_writes
from nvpool.client.vfs import striped_dirs as lookup_striped_dirs
from nvpool.cluster import embedded_coordinator
from nvpool.core.checksum import crc32c
from nvpool.core.errors import StaleEpoch
from nvpool.kv.engine import LmdbKv
from nvpool.kv.replication import primary as kv_primary
from nvpool.kv.replication.member_engine import MemberKv
from nvpool.meta.migration import destination as migration_destination
from nvpool.meta.migration import ownership as partition_ownership
from nvpool.meta.migration import source as migration_source
from nvpool.meta.server import commit_gate, shard_member
from nvpool.meta.state import record_locks, records, striped_dirs
from nvpool.meta.transactions import participant
from nvpool.node.coordination import leadership
from nvpool.poolmap.chains import protocol as chain_protocol
from nvpool.poolmap.chains import transitions
from nvpool.rpc.v1 import meta_pb2
from nvpool.store.chunks import block_store, block_writes, chunk_transfer, truncate
from nvpool.store.chunks.block_store import BlockChunkStore
from nvpool.store.chunks.read_batch import BlockBatchReader
from nvpool.store.chunks.recovery import ReplayCheck
from nvpool.store.maintenance import orphan_chunks
from nvpool.store.replication import chain_writes, resync
from nvpool.store.server import service
from nvpool.store.server.serving_lease import ServingLease
from nvpool.testing.sim import pool as sim_pool
from nvpool.testing.sim import shard_members, stores
from nvpool.testing.sim.scenario import simulate
from nvpool.testing.sim.workloads import file_data, listing
from nvpool.testing.sim.workloads import namespace as name_workload

pytestmark = pytest.mark.t3

NAMES = (name_workload.NamespaceWorkload, listing.Listings)


def found(seeds, seconds=30.0, **named) -> list[str]:
    """The problems of the first of these seeds that meets any."""
    for seed in seeds:
        problems, _ = simulate(seed, seconds=seconds, **named)
        if problems:
            return problems
    return []


POWER_OF_ONE = {"replicas": 1, "kinds": {"power": 1}, "only": (file_data.Blocks,)}


@pytest.mark.smoke
def test_flush_that_skips_the_sync_of_data_is_found(monkeypatch):
    async def sync_data(self):
        pass  # claims success

    monkeypatch.setattr(BlockChunkStore, "sync_data", sync_data)
    assert found(range(1, 41), **POWER_OF_ONE)


def test_flush_that_skips_the_sync_of_the_journal_is_found(monkeypatch):
    async def flush(self):
        self.refuse_when_fenced()
        await self.sync_data()

    monkeypatch.setattr(BlockChunkStore, "flush", flush)
    assert found(range(1, 41), **POWER_OF_ONE)


def test_checkpoint_before_the_data_is_synced_is_found(monkeypatch):
    async def open_kv(path, options, *, before_checkpoint, before=LmdbKv.open, **named):
        return await before(path, options, **named)

    def options(before=stores.engine_options, **named):
        return dataclasses.replace(before(**named), checkpoint_interval_s=0.05)

    monkeypatch.setattr(block_store, "LmdbKv", SimpleNamespace(open=open_kv))
    monkeypatch.setattr(stores, "engine_options", options)
    # With one client no flush of another one covers what a checkpoint has left out.
    assert found(
        range(1, 41), standbys=0, shards=1, moving=False, etcd=False, volumes=False, clients=1, **POWER_OF_ONE
    )


@pytest.mark.smoke
def test_recovery_that_trusts_the_journal_is_found(monkeypatch):
    monkeypatch.setattr(ReplayCheck, "__call__", lambda self, changes, stored: changes)
    assert found(range(1, 41), **POWER_OF_ONE)


def test_shard_that_loses_acknowledged_changes_is_found(monkeypatch):
    async def bury(member, before=shard_members.bury):
        await before(member)
        member._options.engine.floor._drive.lose_power(random.Random(1))

    monkeypatch.setattr(sim_pool, "bury", bury)
    assert found(range(1, 41), standbys=0, kinds={"kill": 1}, of="meta")


def test_primary_that_ignores_its_lease_is_found(monkeypatch):
    monkeypatch.setattr(commit_gate.CommitGate, "open", lambda self: not self.closed)
    assert found(range(1, 41), standbys=1, kinds={"stop_asked": 1}, of="meta")


def test_fast_path_without_commit_gate_is_found(monkeypatch):
    """The fast path passes requests to the service directly, so a change is answered before the standby has it."""

    def answer(self, buffer, end, in_work, reply_stats, out, side=None, watched=None):
        service = self._member.service
        if service is None or service.dispatch is None:
            return 0
        return service.dispatch.answer(buffer, end, in_work, reply_stats, out, side, None, watched)

    monkeypatch.setattr(shard_member.MemberFastPath, "answer", answer)
    assert found(
        range(1, 41),
        standbys=1,
        shards=1,
        moving=False,
        kinds={"fade": 1},
        of="meta",
        only=(name_workload.NamespaceWorkload,),
        clients=6,
    )


def test_target_that_ignores_its_lease_is_found(monkeypatch):
    class Ignored(ServingLease):
        def holds(self):
            return True

    monkeypatch.setattr(sim_pool, "ServingLease", Ignored)
    assert found(
        range(1, 41),
        replicas=2,
        standbys=0,
        shards=1,
        etcd=False,
        kinds={"isolate": 1},
        of="target",
        only=(file_data.Blocks,),
        clients=6,
    )


@pytest.mark.smoke
def test_standby_counted_before_its_reply_is_found(monkeypatch):
    def ship(self, peer, group, before=kv_primary.Shipping._ship):
        before(self, peer, group)
        peer.acked = max(peer.acked, peer.sent)
        self._settle()

    monkeypatch.setattr(kv_primary.Shipping, "_ship", ship)
    assert found(range(1, 41), standbys=1, kinds={"fade": 1}, of="meta")


def test_request_slot_that_is_not_stored_is_found(monkeypatch):
    """Records of slots have the sequence number 0, so a shard that starts again repeats requests."""
    is_slot = records.slot_key(0, 0)[:2]

    def apply(self, effects, before=MemberKv.apply, **named):
        stored = [
            (key, value[:1] + bytes(8) + value[9:] if value and key.startswith(is_slot) else value)
            for key, value in dict(effects).items()
        ]
        return before(self, stored, **named)

    monkeypatch.setattr(MemberKv, "apply", apply)
    assert found(range(1, 41), standbys=0, kinds={"die": 1}, of="meta")


def test_store_that_ignores_epochs_is_found(monkeypatch):
    monkeypatch.setattr(service.StoreService, "_check_epoch", lambda self, epoch, chunks: None)
    monkeypatch.setattr(
        chain_writes,
        "judge",
        lambda place, held, offer, before=chain_writes.judge: before(
            place, held, offer._replace(epoch=place.epoch) if place is not None else offer
        ),
    )
    assert found(
        range(1, 41),
        replicas=2,
        standbys=0,
        shards=1,
        kinds={"stop_asked": 1, "isolate": 1, "cut": 1},
        of="target",
        only=(file_data.Blocks,),
        clients=6,
        seconds=60.0,
    )


def test_resync_that_skips_a_chunk_is_found(monkeypatch):
    def differing(there, here, has_cut, before=resync._differing):
        copies, removals = before(there, here, has_cut)
        return copies[1:], removals

    monkeypatch.setattr(resync, "_differing", differing)
    assert found(range(1, 41), replicas=2, of="target")


def test_map_that_overwrites_another_change_is_found(monkeypatch):
    async def replaced(self, new, leader=None, before=embedded_coordinator.EmbeddedCoordinator.replace):
        while True:
            try:
                return await before(self, msgspec.structs.replace(new, epoch=self.pool_map.epoch + 1), leader)
            except StaleEpoch:
                pass  # retries the same map with the next epoch

    monkeypatch.setattr(embedded_coordinator.EmbeddedCoordinator, "replace", replaced)
    assert found(range(1, 41), standbys=2, replicas=2, etcd=False, kinds={"kill_node": 1})


def test_fsync_that_ignores_lost_writes_is_found(monkeypatch):
    monkeypatch.setattr(unstable_writes.StoreCommit, "_lost", lambda self, chains, epoch: set())
    assert found(range(1, 41), replicas=1, kinds={"power": 1}, only=(file_data.Blocks,))


def test_restart_counted_as_data_loss_is_found(monkeypatch):
    def restarted(pool_map, target, before=sim_pool.restarted):
        return transitions.with_chains(
            before(pool_map, target),
            lambda _, chain: (
                msgspec.structs.replace(chain, intact=chain.epoch) if chain.targets == (target,) else chain
            ),
        )

    monkeypatch.setattr(sim_pool, "restarted", restarted)
    assert found(range(1, 41), replicas=2, kinds={"kill": 1, "die": 4}, of="target", only=(file_data.Blocks,))


def test_engine_that_replies_before_sync_is_found(monkeypatch):
    monkeypatch.setattr(shard_members._Journal, "sync_file", lambda self, descriptor: None)
    assert found(range(1, 41), standbys=0, kinds={"power": 1}, only=(name_workload.NamespaceWorkload,))


def test_store_that_recomputes_checksums_is_found(monkeypatch):
    def recompute(batch):
        whole = b"".join(batch.payload)
        batch.checksums = b"".join(
            crc32c(whole[at : at + 4096]).to_bytes(4, "little") for at in range(0, len(whole), 4096)
        )

    class Recomputing(BlockBatchReader):
        def begin(self, *arguments):
            batch = super().begin(*arguments)
            if not batch.missed:
                recompute(batch)
            return batch

        def complete(self, batch, work):
            super().complete(batch, work)
            recompute(batch)

    monkeypatch.setattr(block_store, "BlockBatchReader", Recomputing)
    assert found(range(1, 41), replicas=2, kinds={"rot": 1}, only=(file_data.Blocks,))


def test_participant_that_skips_its_effects_is_found(monkeypatch):
    monkeypatch.setattr(
        participant.Participant,
        "end",
        lambda self, span, effects, before=participant.Participant.end: before(self, span, []),
    )
    assert found(range(1, 41), shards=2, kinds={"kill": 1}, only=(name_workload.NamespaceWorkload,))


def test_shard_that_shows_locked_records_is_found(monkeypatch):
    monkeypatch.setattr(record_locks.Holds, "of", lambda self, key: None)
    assert found(range(1, 41), shards=2, kinds={"cut": 1}, only=(name_workload.NamespaceWorkload,))


def test_migration_that_misses_later_changes_is_found(monkeypatch):
    monkeypatch.setattr(migration_source.MigrationSource, "_note", lambda self, changed: None)
    assert found(range(1, 41), shards=1, moving=True, kinds={"cut": 1}, only=NAMES)


def test_source_that_serves_migrated_partitions_is_found(monkeypatch):
    monkeypatch.setattr(partition_ownership.PartitionOwnership, "close", lambda self, partitions: None)
    assert found(range(1, 41), shards=2, moving=True, kinds={"cut": 1}, only=NAMES)


def test_destination_that_reuses_inode_numbers_is_found(monkeypatch):
    async def begin_numbers_at(self, bound):
        pass

    monkeypatch.setattr(migration_destination.MigrationDestination, "_begin_numbers_at", begin_numbers_at)
    assert found(range(1, 41), shards=1, moving=True, kinds={"kill": 1}, of="meta", only=NAMES)


def test_listing_that_stops_after_one_shard_is_found(monkeypatch):
    async def ask_step(self, request, before=lookup_striped_dirs.StripedDirectories.ask_step):
        return await before(self, request) if request.cursor == 0 else meta_pb2.ListDirReply()

    monkeypatch.setattr(lookup_striped_dirs.StripedDirectories, "ask_step", ask_step)
    assert found(range(1, 41), shards=3, moving=False, kinds={"cut": 1}, only=NAMES)


def test_striped_directory_that_counts_nothing_is_found(monkeypatch):
    monkeypatch.setattr(striped_dirs, "take_in", lambda directory, counts: None)
    assert found(range(1, 41), shards=3, moving=False, kinds={"cut": 1}, only=NAMES)


def test_supervisor_that_disowns_its_daemons_is_found(monkeypatch):
    """The supervisor takes every process with a node's certificate for another node's supervisor."""
    monkeypatch.setattr(
        leadership.Leading, "_hops", lambda self, call, forwarded: 1 if call.peer.member else forwarded.hops
    )
    assert found(range(1, 21), seconds=15.0, etcd=True)


def test_version_floor_that_mixes_epochs_is_found(monkeypatch):
    """The collector also takes such a chunk for a chunk of a newer map, as builds up to 0.1.0 did."""
    for module in (truncate, chunk_transfer):
        monkeypatch.setattr(module, "raised", max)
    monkeypatch.setattr(chain_protocol, "is_above", int.__gt__)
    for module in (block_writes, chain_writes):
        monkeypatch.setattr(
            module,
            "next_version",
            lambda held, epoch, above=0: chain_protocol.make_version(
                max(epoch, max(held.version, held.floor) >> 32),
                (max(held.version, held.floor, above) & 0xFFFFFFFF) + 1,
            ),
        )
    monkeypatch.setattr(
        orphan_chunks.OrphanChunks,
        "_goes",
        lambda self, name, version: self._is_due(name) and version >> 32 <= self._epochs[name],
    )
    assert found(
        range(1, 41),
        replicas=2,
        standbys=0,
        shards=1,
        moving=False,
        etcd=False,
        kinds={"kill": 1, "cut": 1},
        of="target",
        only=(file_data.Blocks, file_data.Sizes),
        draining=True,
        clients=4,
    )
