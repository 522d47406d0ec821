"""Destruction of a pool on one node: removals outside the pool directory."""

from msgspec.structs import replace

from nvpool.cli import pool_lifecycle
from nvpool.cli.pool_lifecycle import erase_stores
from nvpool.host.pool_directory import PoolDirectory
from nvpool.poolmap.model import Drive, StandbyMember
from nvpool.testing.contracts.coordinator import first_map


def test_only_stores_and_shards_of_this_node_are_removed(tmp_path):
    pool_map = first_map()
    short = pool_map.pool_id[:8]
    names = [
        f"nvpool-{short}-target-1",
        f"nvpool-{short}-target-2",
        f"nvpool-{short}-meta-1.1",
        f"nvpool-{short}-meta-1.2",
    ]
    for name in (*names, "mine"):
        (tmp_path / "drive" / name).mkdir(parents=True)
        (tmp_path / "drive" / name / "file").write_text("x")
    place = [str(tmp_path / "drive" / name) for name in names]
    (shard,) = pool_map.shards
    pool_map = replace(
        pool_map,
        drives=(Drive(1, 1, place[0], 1 << 30), Drive(2, 2, place[1], 1 << 30)),
        shards=(
            replace(
                shard,
                standbys=(StandbyMember(1, 1, (), path=place[2]), StandbyMember(2, 2, (), path=place[3])),
            ),
        ),
    )
    done = erase_stores(PoolDirectory(tmp_path / "pool"), pool_map)
    assert done == [f"removed {place[0]}", f"removed {place[2]}"]
    assert {path.name for path in (tmp_path / "drive").iterdir()} == {names[1], names[3], "mine"}


def test_commit_marks_of_this_node_are_removed(tmp_path, monkeypatch):
    monkeypatch.setattr(pool_lifecycle, "memory_file", lambda pool_id, process: tmp_path / process)
    pool_map = first_map()
    (shard,) = pool_map.shards
    pool_map = replace(
        pool_map,
        shards=(
            replace(
                shard, standbys=(StandbyMember(1, 1, ()), StandbyMember(2, 2, ()), StandbyMember(3, 1, ()))
            ),
        ),
    )
    for name in ("meta-1", "meta-1.1", "meta-1.2"):
        (tmp_path / name).write_text("a mark")
    erase_stores(PoolDirectory(tmp_path / "pool"), pool_map)
    assert [path.name for path in tmp_path.iterdir()] == ["meta-1.2"], "the commit mark of another node stays"
