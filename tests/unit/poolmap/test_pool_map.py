"""Layout, placement and the pool map: pure functions."""

import json
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nvpool.core.errors import CorruptRecord, FileTooLarge, InvalidRequest, WrongFormat
from nvpool.poolmap import file_layout
from nvpool.poolmap import model as poolmap_model
from nvpool.poolmap.chains import placement
from nvpool.poolmap.model import MAP_FORMAT, Drive, Node, PartitionRange, PoolMap, PoolSettings, Shard, Target

GOLDEN = Path(__file__).parents[2] / "golden"


def a_map(capacities=(100, 200)):
    node = Node(1, "n1", "host", ("stream://127.0.0.1:1",))
    drives = tuple(Drive(i, 1, f"/d{i}", c) for i, c in enumerate(capacities, 1))
    targets = tuple(Target(i, i, 1, c, (f"inproc://t{i}",)) for i, c in enumerate(capacities, 1))
    return PoolMap(
        MAP_FORMAT,
        "p",
        "pool",
        1,
        PoolSettings(),
        (node,),
        drives,
        targets,
        (placement.build_table(targets, 1),),
        (Shard(1, 1, ("inproc://m1",)),),
        (PartitionRange(0, 4096, 1),),
    )


def test_chunk_hash_is_stable():
    for inode, index, value in json.loads((GOLDEN / "chunk_hash.json").read_text()):
        assert file_layout.chunk_hash(int(inode), index) == int(value, 16)


def test_chunk_hash_spreads_files_and_chunks_evenly():
    for names in ([(i, 0) for i in range(1, 65537)], [(1, i) for i in range(65536)]):
        counts = Counter(file_layout.chain_of(*name) for name in names)
        assert len(counts) == 1024
        chi_square = sum((counts[c] - 64) ** 2 / 64 for c in range(1024))
        assert chi_square < 1023 + 5 * (2 * 1023) ** 0.5


@given(st.integers(16, 24), st.integers(0, 1 << 40), st.integers(0, 1 << 26))
def test_pieces_cover_the_range_once_in_order(bits, offset, length):
    lay, at = file_layout.Layout(1, bits), 0
    for piece in file_layout.pieces(lay, offset, length):
        assert piece.at == at
        assert piece.index * lay.chunk_bytes + piece.offset == offset + at
        assert piece.length > 0 and piece.offset + piece.length <= lay.chunk_bytes
        at += piece.length
    assert at == length


def test_invalid_ranges_and_chunk_sizes_are_refused():
    lay = file_layout.layout_of(1 << 20)
    for offset, length in ((-1, 1), (0, -1)):
        with pytest.raises(InvalidRequest):
            file_layout.check_range(lay, offset, length)
    with pytest.raises(FileTooLarge):
        file_layout.check_range(lay, file_layout.size_max(lay), 1)
    file_layout.check_range(lay, file_layout.size_max(lay) - 1, 1)
    for size in (0, 4096, 3 << 20, 32 << 20):
        with pytest.raises(InvalidRequest):
            file_layout.layout_of(size)


@settings(max_examples=20, deadline=None)
@given(st.lists(st.integers(1, 1000), min_size=1, max_size=9), st.integers(1, 3))
def test_chains_follow_capacity_without_repeated_targets(capacities, replicas):
    targets = [Target(i, i, 1, c << 30, ()) for i, c in enumerate(capacities, 1)]
    if len(targets) < replicas:
        with pytest.raises(InvalidRequest):
            placement.build_table(targets, replicas)
        return
    table = placement.build_table(targets, replicas)
    held = Counter(t for chain in table.chains for t in chain.targets)
    assert all(len(set(chain.targets)) == replicas for chain in table.chains)
    assert sum(held.values()) == 1024 * replicas
    if replicas == 1:
        for target in targets:
            assert abs(
                held[target.id] - 1024 * target.capacity_bytes / sum(t.capacity_bytes for t in targets)
            ) <= len(targets)


def test_nodes_are_the_failure_domain_if_there_are_enough():
    targets = [Target(i, i, i % 3, 1 << 30, ()) for i in range(1, 10)]
    node_of = {t.id: t.node for t in targets}
    for chain in placement.build_table(targets, 2).chains:
        assert len({node_of[t] for t in chain.targets}) == 2


def test_only_changed_chains_get_the_next_epoch():
    targets = [Target(i, i, 1, 1 << 30, ()) for i in range(1, 4)]
    before = placement.build_table(targets[:2], 1)
    after = placement.build_table(targets, 1, before)
    for old, new in zip(before.chains, after.chains, strict=True):
        assert new.epoch == old.epoch + (old.targets != new.targets)
    moved = sum(old.targets != new.targets for old, new in zip(before.chains, after.chains, strict=True))
    assert 0 < moved < 500


def test_map_is_equal_after_encoding_and_decoding():
    pool_map = a_map()
    again = poolmap_model.decode_map(poolmap_model.encode_map(pool_map))
    assert again == pool_map
    assert again.fingerprint == pool_map.fingerprint
    assert set(again.shard_of_partition) == {1}


def test_inconsistent_map_is_refused():
    pool_map = a_map()
    with pytest.raises(InvalidRequest, match="target"):
        poolmap_model.changed(pool_map, targets=pool_map.targets[:1])
    with pytest.raises(InvalidRequest, match="partition"):
        poolmap_model.changed(pool_map, partitions=(PartitionRange(0, 4095, 1),))
    raw = poolmap_model.encode_map(pool_map)
    for wrong, error in (
        (b"", CorruptRecord),
        (raw[:-2], CorruptRecord),
        (raw.replace(b'"format":2', b'"format":9'), WrongFormat),
        (raw.replace(b'"epoch":1', b'"epoch":"x"'), CorruptRecord),
    ):
        with pytest.raises(error):
            poolmap_model.decode_map(wrong)


def test_change_gets_the_next_epoch():
    assert poolmap_model.changed(a_map(), name="other").epoch == 2
