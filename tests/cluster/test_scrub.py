"""`nvpool scrub` on real processes: corrupt blocks are found and repaired, and a pause and a round survive a store."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from nvpool.core.units import MIB
from nvpool.testing.env.pool import RealPool, end_process

NVPOOL = os.path.join(os.path.dirname(sys.executable), "nvpool")


def nvpool(*words: object, code: int = 0) -> subprocess.CompletedProcess:
    said = subprocess.run(
        [NVPOOL, *map(str, words)], capture_output=True, text=True, timeout=240, check=False
    )
    assert said.returncode == code, (words, said.stdout, said.stderr)
    return said


def rot(pool: RealPool, target: int, content: bytes) -> None:
    """Flip one bit of these bytes on the target's drive."""
    data = pool.directory.target(target) / "data"
    with open(data, "r+b") as file:
        at = file.read().index(content)
        file.seek(at + 100)
        file.write(bytes([content[100] ^ 1]))


def scrubs(pool: RealPool) -> dict[int, dict]:
    return {one["target"]: one["scrub"] for one in pool.status()["processes"] if one["role"] == "store"}


@pytest.mark.smoke
def test_corrupt_block_is_repaired_by_the_other_copy(tmp_path):
    with RealPool(tmp_path / "pool", sizes=(64 * MIB,) * 2, replicas=2) as pool:
        pool.make()
        pool.start()
        content = os.urandom(MIB)
        client = pool.connect(60.0)
        client.write_bytes("/file", content)
        with client.open("/file", "r+b", buffering=0) as file:
            file.fsync()
        rot(pool, 1, content[4096:8192])
        for found in (1, 0):
            result = json.loads(nvpool("scrub", "start", pool.path, "--wait", "--json").stdout)
            assert result["targets"] == [1, 2] and not result["silent"]
            seen = sorted((one["last_bad"], one["last_mended"]) for one in result["scrub"])
            assert seen == [(0, 0), (found, found)]
        assert pool.status()["problems"] == [] and client.read_bytes("/file") == content


def test_corrupt_blocks_are_repaired_over_store_restarts(tmp_path):
    with RealPool(
        tmp_path / "pool", sizes=(64 * MIB,) * 2, replicas=2, config="[store]\nscrub_bytes_s = 262144\n"
    ) as pool:
        pool.make()
        pool.start()
        content = os.urandom(4 * MIB)
        client = pool.connect(60.0)
        client.write_bytes("/file", content)
        with client.open("/file", "r+b", buffering=0) as file:
            file.fsync()
        rot(pool, 1, content[3 * MIB : 3 * MIB + 4096])
        rot(pool, 2, content[MIB : MIB + 4096])
        result = json.loads(nvpool("scrub", "start", pool.path, "--wait", "--json").stdout)
        assert result["targets"] == [1, 2] and not result["silent"]
        assert [(one["last_bad"], one["last_mended"]) for one in result["scrub"]] == [(1, 1), (1, 1)]
        assert all(
            one["last_blocks"] == 1024 and one["next_ms"] > one["last_ended_ms"] for one in result["scrub"]
        )
        assert pool.status()["problems"] == [] and client.read_bytes("/file") == content

        nvpool("scrub", "start", pool.path, "--target", 1)
        pool.until(lambda: scrubs(pool)[1]["blocks"] > 0, "the round is under way", 60)
        assert scrubs(pool)[2]["state"] == "idle"
        nvpool("scrub", "pause", pool.path, "--drive", 1)
        before = pool.pid("target-1")
        end_process(before)
        pool.until(lambda: pool.pid("target-1") != before, "another process serves", 60)
        pool.wait()
        assert scrubs(pool)[1]["state"] == "paused" and 0 < scrubs(pool)[1]["blocks"] < 1024
        assert "paused" in nvpool("scrub", "status", pool.path).stdout
        assert json.loads(nvpool("scrub", "status", pool.path, "--json").stdout)[0]["state"] == "paused"
        nvpool("scrub", "resume", pool.path)
        pool.until(lambda: scrubs(pool)[1]["state"] == "idle", "the round has ended", 60)
        assert scrubs(pool)[1]["last_bad"] == 0
