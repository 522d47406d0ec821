"""Replicas and chunk size of directories, through the command, on real processes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys

import pytest

from nvpool.core.units import KIB, MIB
from nvpool.poolmap.file_layout import chain_of
from nvpool.testing.env.pool import RealPool, end_process

NVPOOL = os.path.join(os.path.dirname(sys.executable), "nvpool")


def nvpool(*words: object) -> subprocess.CompletedProcess:
    return subprocess.run(
        [NVPOOL, *map(str, words)], capture_output=True, text=True, timeout=240, check=False
    )


@pytest.fixture(scope="module")
def pool(tmp_path_factory):
    with RealPool(tmp_path_factory.mktemp("directories") / "pool", sizes=(64 * MIB,) * 3) as pool:
        pool.make()
        pool.start()
        yield pool


def test_directory_gets_new_replicas_and_passes_them_on(pool):
    assert [table.id for table in pool.pool_map.tables] == [1]
    client = pool.connect(60.0)
    client.mkdir("/safe")
    client.write_bytes("/safe/before", b"b" * 300_000)
    said = nvpool("dir", "set", f"{pool.path}:/safe", "--replicas", "2", "--chunk-size", "256K", "--json")
    assert said.returncode == 0, said.stderr
    assert json.loads(said.stdout) == {
        "path": "/safe",
        "inode": client.stat("/safe").st_ino,
        "replicas": 2,
        "chunk_bytes": 256 * KIB,
        "striped": False,
        "wide": False,  # old name, for one release
    }
    assert [table.id for table in pool.pool_map.tables] == [1, 2]
    client.mkdir("/safe/below")
    content = os.urandom(2_000_000)
    client.write_bytes("/safe/below/file", content)
    assert client.layout("/safe/below/file") == client.layout("/safe") == (2, 256 * KIB)
    assert client.layout("/safe/before").replicas == client.layout("/").replicas == 1
    assert client.read_bytes("/safe/before") == b"b" * 300_000
    inode, table = client.stat("/safe/below/file").st_ino, pool.pool_map.table_by_id[2]
    assert all(len(table.chains[chain_of(inode, index)].targets) == 2 for index in range(8))
    info = json.loads(nvpool("file", "info", f"{pool.path}:/safe/below/file", "--json").stdout)
    assert all(len(chunk["copies"]) == 2 for chunk in info["chunks"])
    chains = pool.status()["chains"]
    assert chains["replicas"] == [1, 2] and chains["total"] == chains["full"] == 2048

    for target in (1, 2, 3):  # any one of them may be lost
        before = pool.pid(f"target-{target}")
        end_process(before, signal.SIGSTOP)
        assert client.read_bytes("/safe/below/file") == content
        end_process(before, signal.SIGCONT)
    pool.wait()
    pool.until(lambda: pool.status()["chains"]["full"] == 2048, "all chains have their copies again", 60)
    assert pool.fsck() == []


@pytest.mark.smoke
def test_invalid_layout_is_refused_with_the_remedy(pool):
    client = pool.connect(60.0)
    client.mkdir("/refused")
    client.write_bytes("/plain", b"x")
    said = nvpool("dir", "set", f"{pool.path}:/plain", "--chunk-size", "1M")
    assert said.returncode == 1 and "not a directory" in said.stderr
    said = nvpool("dir", "set", f"{pool.path}:/refused", "--chunk-size", "100K")
    assert said.returncode == 1 and "power of two" in said.stderr
    with pytest.raises(OSError, match="nvpool dir set"):
        client.set_layout("/refused", replicas=3)
    client.set_layout("/refused", chunk_bytes=MIB, replicas=1)
    assert (
        nvpool("dir", "show", f"{pool.path}:/refused")
        .stdout.strip()
        .endswith("new files have 1 replica, in chunks of 1.00 MiB")
    )


def test_losing_the_only_copy_is_refused_and_explained(pool):
    client = pool.connect(60.0)
    client.mkdir("/two")
    assert nvpool("dir", "set", f"{pool.path}:/two", "--replicas", "2").returncode == 0
    said = nvpool("drive", "remove", pool.path, "1", "--lost")
    assert (
        said.returncode == 1 and "the only copy of" in said.stderr and "chains of 1 replica;" in said.stderr
    )
    assert "--give-up" in said.stderr
    pool.wait()


def test_drain_moves_chains_of_every_replica_count(pool):
    client = pool.connect(60.0)
    client.mkdir("/drained")
    assert nvpool("dir", "set", f"{pool.path}:/drained", "--replicas", "2").returncode == 0
    client.write_bytes("/drained/file", b"d" * 3_000_000)
    client.write_bytes("/one", b"1" * 3_000_000)
    said = nvpool("drive", "drain", pool.path, "3", "--wait", "--json")
    assert said.returncode == 0, said.stderr
    assert not any(
        3 in (*chain.targets, *chain.joining) for table in pool.pool_map.tables for chain in table.chains
    )
    assert (
        client.read_bytes("/drained/file") == b"d" * 3_000_000
        and client.read_bytes("/one") == b"1" * 3_000_000
    )
    said = nvpool("drive", "drain", pool.path, "2")
    assert said.returncode == 1 and "the pool keeps 2 copies of each chunk" in said.stderr


def test_files_without_a_copy_are_named(tmp_path):
    with RealPool(tmp_path / "pool", sizes=(64 * MIB,) * 3, replicas=2) as pool:
        pool.make()
        pool.start()
        client = pool.connect(60.0)
        client.mkdir("/safe")
        client.mkdir("/scratch")
        assert nvpool("dir", "set", f"{pool.path}:/scratch", "--replicas", "1").returncode == 0
        for name in ("/safe/file", "/scratch/large"):
            client.write_bytes(name, os.urandom(8 * MIB))
        client.write_bytes("/scratch/small", b"s" * 100)
        inode, table = client.stat("/scratch/small").st_ino, pool.pool_map.table_by_id[1]
        target = table.chains[chain_of(inode, 0)].targets[0]
        pool.until(lambda: pool.status()["chains"]["full"] == 2048, "all chains have their copies", 60)
        said = nvpool("drive", "remove", pool.path, target, "--lost", "--wait")
        assert said.returncode == 1 and "--give-up" in said.stderr
        said = nvpool("drive", "remove", pool.path, target, "--lost", "--give-up")
        assert said.returncode == 0 and "chains are reset to empty" in said.stderr, said.stderr
        problems = pool.until(
            lambda: [one for one in pool.status()["problems"] if "/scratch/small" in one],
            "status names the file",
            60,
        )
        assert f"inode {inode}" in problems[0]
        assert not any("/safe" in one for one in pool.status()["problems"])
        pool.until(
            lambda: all(len(chain.targets) == 2 for chain in pool.pool_map.table_by_id[2].chains),
            "made again",
            60,
        )
        pool.until(
            lambda: (
                not any(target in chain.targets for table in pool.pool_map.tables for chain in table.chains)
            ),
            "the chains are reset",
            60,
        )
        with pytest.raises(OSError, match="given up"):
            client.read_bytes("/scratch/small")
        for number in range(40):  # at least one is on such a chain
            client.write_bytes(f"/scratch/new-{number}", b"n" * 5000)
        chains = pool.pool_map.table_by_id[1].chains
        assert any(
            chains[chain_of(client.stat(f"/scratch/new-{number}").st_ino, 0)].loss for number in range(40)
        )
        said = nvpool("fsck", pool.path, "--json")
        lost = [one for one in json.loads(said.stdout)["problems"] if one["kind"] == "lost"]
        assert said.returncode == 4 and any("/scratch/small" in one["text"] for one in lost)
        assert {one["kind"] for one in json.loads(said.stdout)["problems"]} == {"lost"}
        assert len(client.read_bytes("/safe/file")) == 8 * MIB
        client.write_bytes("/scratch/small", b"t" * 50)
        assert client.read_bytes("/scratch/small") == b"t" * 50
        client.write_bytes("/scratch/large", b"l" * 8 * MIB)
        assert pool.fsck() == [], "all lost data is written again"
        pool.until(lambda: not pool.status()["problems"], "no problem is left", 90)
        assert pool.pool_map.target_by_id[target].state == "gone"
