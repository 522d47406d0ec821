"""Encrypted volumes on real processes: no drive has the plain text of mounts and programs, and data survives kills."""

from __future__ import annotations

import json
import os
import random
import subprocess
import threading
from contextlib import contextmanager
from pathlib import Path

import pytest

from nvpool.core.units import MIB
from nvpool.testing.env.nvpool_command import nvpool
from nvpool.testing.env.pool import RealPool, end_process

pytestmark = [
    pytest.mark.mount,
    pytest.mark.skipif(
        not os.path.exists("/dev/fuse") or os.geteuid() != 0, reason="a mount needs /dev/fuse and root"
    ),
]
MARK = b"nobody may find this on a drive "


@contextmanager
def encrypted_pool(top: Path, replicas: int):
    key = top / "pool.key"
    made = json.loads(nvpool("encryption", "key", key, "--json").stdout)
    assert made["keys"] == 1 and os.stat(key).st_mode & 0o777 == 0o600
    config = f'[encryption]\nkey_file = "{key}"\n'
    with RealPool(top / "pool", sizes=(128 * MIB,) * 2, replicas=replicas, config=config) as pool:
        pool.make()
        pool.start()
        said = nvpool("volume", "create", pool.path, "secret", "--encrypt", "--replicas", replicas)
        assert f"with pool key {made['pool_key']}" in said.stdout
        yield pool, key


@contextmanager
def mount(pool: RealPool, place: Path, *options: str):
    place.mkdir()
    nvpool("mount", pool.path, place, *options)
    try:
        yield place / "volumes" / "secret"
    finally:
        subprocess.run(["umount", "-l", str(place)], capture_output=True, check=False)


def cold(path: Path) -> bytes:
    """The file's bytes, read past the page cache of this kernel."""
    with open(path, "rb") as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        return file.read()


@pytest.mark.parametrize("replicas", [1, 2])
def test_mounts_read_and_write_an_encrypted_volume(replicas, tmp_path):
    with (
        encrypted_pool(tmp_path, replicas) as (pool, _),
        mount(pool, tmp_path / "m") as here,
        mount(pool, tmp_path / "far", "--no-short-circuit") as there,
    ):
        chance, content = random.Random(replicas), bytearray(MARK * 200_000)
        (here / "large").write_bytes(content)
        for n in range(50):
            (here / f"small{n}").write_bytes(MARK * (n + 1))
        with open(here / "large", "r+b", buffering=0) as file:
            for _ in range(100):
                place = chance.randrange(len(content) - 5000)
                piece = chance.randbytes(chance.randrange(1, 5000))
                os.pwrite(file.fileno(), piece, place)
                content[place : place + len(piece)] = piece
            file.truncate(5_000_001)
            file.truncate(6_000_000)
            content[5_000_001:] = bytes(999_999)
            os.fsync(file.fileno())
        for path in (here, there):
            assert cold(path / "large") == content
            for n in range(50):
                assert cold(path / f"small{n}") == MARK * (n + 1)
            with open(
                path / "large", "rb", buffering=0
            ) as file:  # random reads, small and large, three times as many bytes
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
                for _ in range(300):
                    place, length = chance.randrange(len(content)), chance.choice([1, 4096, 100_000])
                    assert os.pread(file.fileno(), length, place) == content[place : place + length]
        for target in (1, 2):
            end_process(pool.pid(f"target-{target}"))
        end_process(pool.pid("meta-1"))
        (there / "after").write_bytes(MARK * 1000)
        assert cold(here / "after") == MARK * 1000 and cold(here / "large") == content
        subprocess.run(["cp", str(here / "large"), str(there / "copy")], check=True)
        assert cold(here / "copy") == content
        pool.wait()
        assert nvpool("fsck", pool.path).returncode == 0
        stored = b"".join((pool.directory.target(target) / "data").read_bytes() for target in (1, 2))
        assert MARK not in stored


def test_threads_read_an_encrypted_volume(tmp_path):
    with encrypted_pool(tmp_path, 1) as (pool, _):
        content = os.urandom(8 * MIB)
        pool.connect(60.0).write_bytes("/volumes/secret/file", content)
        client = pool.connect(60.0)
        wrong = []

        def read(seed: int) -> None:
            chance = random.Random(seed)
            with client.open("/volumes/secret/file", "rb", buffering=0) as file:
                for _ in range(400):
                    place, length = chance.randrange(8 * MIB - 8192), chance.choice([1, 4096, 8192])
                    if bytes(file.pread(length, place)) != content[place : place + length]:
                        wrong.append(place)

        threads = [threading.Thread(target=read, args=(seed,)) for seed in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not wrong


def test_pool_key_is_replaced_without_rewriting_data(tmp_path):
    with encrypted_pool(tmp_path, 1) as (pool, key):
        pool.connect(60.0).write_bytes("/volumes/secret/file", MARK)
        before = json.loads(nvpool("encryption", "show", pool.path, "--json").stdout)
        refused = nvpool("encryption", "key", key, check=False)
        assert refused.returncode == 1 and "--add" in refused.stderr
        new = json.loads(nvpool("encryption", "key", key, "--add", "--json").stdout)
        assert new["keys"] == 2 and before == [{"name": "secret", "pool_key": before[0]["pool_key"]}]
        for name in ("meta-1", "target-1", "target-2"):
            pid = pool.pid(name)
            end_process(pid)
            pool.until(lambda name=name, pid=pid: pool.pid(name) != pid, "another process serves", 60)
        pool.wait()
        after = json.loads(nvpool("encryption", "rewrap", pool.path, "--json").stdout)
        assert after == [{"name": "secret", "pool_key": new["pool_key"]}]
        key.write_text(key.read_text().splitlines()[0] + "\n")
        end_process(pool.pid("meta-1"))
        assert pool.connect(60.0).read_bytes("/volumes/secret/file") == MARK


@pytest.mark.smoke
def test_doctor_reports_a_missing_pool_key(tmp_path):
    with RealPool(tmp_path / "pool") as pool:
        pool.make()
        pool.start()
        refused = nvpool("volume", "create", pool.path, "secret", "--encrypt", check=False)
        assert (
            refused.returncode == 1
            and "encryption.key_file" in refused.stderr
            and "nvpool encryption key" in refused.stderr
        )
