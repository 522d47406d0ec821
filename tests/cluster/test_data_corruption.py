"""Flipped bytes in stored data: the reader gets EIO and never the wrong byte; everything else is served.

Log and status name the file, chunk and target.
"""

import errno
import json
import os
import random
import shutil
import subprocess
from pathlib import Path

import pytest

from nvpool.core.programs import Program, command
from nvpool.testing.env.pool import RealPool
from nvpool.testing.loads.crash_history import content

CONFIG = """
[journal]
sync_interval_s = 0.02
checkpoint_interval_s = 0.1
[supervisor]
restart_delay_max_s = 0.5
[client]
attr_timeout_s = 0
"""
BYTES = 40_000
PAGE = 4096


@pytest.fixture
def damaged(tmp_path):
    """A stopped pool with 30 files; damage shows once it is started."""
    with RealPool(tmp_path / "pool", config=CONFIG) as pool:
        pool.make()
        pool.start()
        client = pool.connect()
        for number in range(30):
            with client.open(f"/f{number}", "wb", buffering=0) as file:
                file.write(content(number, BYTES))
                file.fsync()
        inodes = {f"f{number}": client.stat(f"/f{number}").st_ino for number in range(30)}
        client.close()
        pool.stop()
        yield pool, inodes


def flip(path: Path, at: int, bit: int = 0x10) -> None:
    with open(path, "r+b") as file:
        file.seek(at)
        byte = file.read(1)[0]
        file.seek(at)
        file.write(bytes([byte ^ bit]))


def read_all(pool):
    """Names of the files that cannot be read; every other file has its written content."""
    client, lost = pool.connect(5.0), []
    for number in range(30):
        try:
            found = client.read_bytes(f"/f{number}")
        except OSError as error:
            assert error.errno == errno.EIO, error
            lost.append(f"f{number}")
        else:
            assert found == content(number, BYTES), f"f{number}: wrong bytes were given out"
    client.close()
    return lost


def place_of(pool, number):
    """(target, offset in its data file) of the second block of a file."""
    wanted = content(number, BYTES)[PAGE : 2 * PAGE]
    for target in (1, 2):
        stored = (pool.directory.target(target) / "data").read_bytes()
        if (at := stored.find(wanted)) >= 0:
            return target, at
    raise AssertionError("the file is on no target")


def status_command(pool):
    """The output of `nvpool status`, and the bad blocks of `nvpool status --json`."""
    status = command(Program.CLI, "status", str(pool.path))
    shown, seen = [
        subprocess.run(status + more, capture_output=True, text=True, timeout=240, check=False)
        for more in ([], ["--json"])
    ]
    assert shown.returncode == seen.returncode == 4, "damage, and nothing else"
    return shown.stderr, [
        bad for process in json.loads(seen.stdout)["processes"] for bad in process.get("bad_blocks", ())
    ]


def test_flipped_data_byte_is_an_error_that_names_its_file(damaged, caplog):
    pool, inodes = damaged
    target, at = place_of(pool, 7)
    flip(pool.directory.target(target) / "data", at + 99)
    pool.start()
    assert read_all(pool) == ["f7"]
    (problem,) = pool.status()["problems"]
    assert f"target {target} " in problem and f"file /f7, inode {inodes['f7']} chunk 0 block 1" in problem
    shown, (bad,) = status_command(pool)
    assert problem in shown and (bad["path"], bad["inode"], bad["index"], bad["block"]) == (
        "/f7",
        inodes["f7"],
        0,
        1,
    )
    with pytest.raises(OSError):
        pool.connect().read_bytes("/f7")
    pool.until(
        lambda: f"inode {inodes['f7']}, of which bytes are damaged, is /f7" in caplog.messages,
        "the log names the file",
    )
    assert any(
        f"target {target} has no good bytes of inode {inodes['f7']}" in line and "chunk 0" in line
        for line in caplog.messages
    )
    said = pool.said(f"target-{target}")
    assert f"block 1 of chunk 0 of inode {inodes['f7']}" in said and f"target {target} " in said
    assert [
        line.partition("; ")[0]
        for line in pool.fsck()
        if "(file /f7)" in line and f"inode {inodes['f7']}" in line
    ]
    client = pool.connect()
    with client.open("/f7", "r+b", buffering=0) as file:
        file.write(content(7, BYTES))  # whole blocks: a rewrite removes the bad block
    assert read_all(pool) == [] and pool.fsck() == [] and pool.status()["problems"] == []


def test_byte_that_rots_under_service_is_never_served(damaged):
    pool, _ = damaged
    pool.start()
    assert read_all(pool) == []
    target, at = place_of(pool, 3)
    flip(pool.directory.target(target) / "data", at + 4095)
    assert read_all(pool) == ["f3"]
    client = pool.connect()
    client.remove("/f3")
    pool.until(lambda: pool.fsck() == [], "the removed file is collected")


def leaf_places(path: Path, wanted: bytes):
    """Offsets of `wanted` in the leaf pages (flag 2 at byte 10 of a page's head) of an LMDB file."""
    raw, found, at = path.read_bytes(), [], -1
    while (at := raw.find(wanted, at + 1)) >= 0:
        if raw[at // PAGE * PAGE + 10] & 2:
            found.append(at)
    return found


@pytest.mark.smoke
def test_flipped_index_byte_is_an_error_and_no_hole(damaged):
    pool, inodes = damaged
    target, _ = place_of(pool, 11)
    index = pool.directory.target(target) / "index" / "data.mdb"
    inode_bytes = inodes["f11"].to_bytes(8, "big")
    places = leaf_places(index, inode_bytes)
    assert places
    for at in places:
        flip(index, at + 24)  # in the value behind the key
    pool.start()
    assert read_all(pool) == ["f11"]
    assert str(inodes["f11"]) in pool.said(f"target-{target}")
    assert any(
        f"target {target} " in line and f"file /f11, inode {inodes['f11']} chunk 0 " in line
        for line in pool.status()["problems"]
    )
    assert any(f"target {target}" in line and str(inodes["f11"]) in line for line in pool.fsck())
    client = pool.connect()
    client.remove("/f11")
    assert client.list("/") == sorted(f"f{number}" for number in range(30) if number != 11)
    client.write_bytes("/f11", b"again")


def test_flipped_metadata_byte_affects_one_file(damaged):
    pool, inodes = damaged
    shard = pool.directory.shard(1) / "data.mdb"
    name = b"f13"
    places = leaf_places(shard, name)
    assert places
    for at in places:
        flip(shard, at + len(name) + 2)  # in the value that follows the name of the key
    pool.start()
    lost = read_all(pool)
    assert lost == ["f13"]
    found = pool.fsck()
    assert found and all(line.startswith("unreadable") for line in found)
    pool.until(lambda: pool.fsck(repair=True) == [] and pool.fsck() == [], "what cannot be read is removed")
    client = pool.connect()
    (name,) = client.list("/lost+found")
    assert name == f"#{inodes['f13']}" and client.read_bytes(f"/lost+found/{name}") == content(13, BYTES)
    client.rename(f"/lost+found/{name}", "/f13")
    assert read_all(pool) == []


def outcome(pool, seed):
    """Flip one byte anywhere in one of the record files; the outcome."""
    chance = random.Random(seed)
    place = chance.choice(
        [pool.directory.shard(1), pool.directory.target(1) / "index", pool.directory.target(2) / "index"]
    )
    path = place / chance.choice(["data.mdb", "journal-0", "journal-1"])
    used = 1 + len(path.read_bytes().rstrip(b"\0"))
    flip(path, chance.randrange(used), 1 << chance.randrange(8))
    pool.launch()
    try:
        pool.until(pool.serving, "all serve", 6.0)
    except AssertionError:
        return "refused"
    return "lost" if read_all(pool) else "whole"


@pytest.mark.parametrize(
    "seeds", [range(4), pytest.param(range(4, 200), marks=pytest.mark.soak)], ids=["few", "many"]
)
def test_flipped_bit_in_records_serves_no_wrong_byte(damaged, seeds, tmp_path):
    pool, _ = damaged
    shutil.copytree(pool.path, tmp_path / "sound", symlinks=True)
    outcomes = []
    for seed in seeds:
        outcomes.append(outcome(pool, seed))
        pool.end()
        shutil.rmtree(pool.path)
        shutil.copytree(tmp_path / "sound", pool.path, symlinks=True)
    print({kind: outcomes.count(kind) for kind in set(outcomes)})
    assert len(seeds) < 50 or outcomes.count("whole") > len(seeds) // 3


def test_daemon_that_refuses_damaged_records_says_so(damaged):
    pool, _ = damaged
    path = pool.directory.target(1) / "index" / "data.mdb"
    with open(path, "r+b") as file:
        file.write(os.urandom(2 * PAGE))
    pool.launch()
    reason = pool.until(lambda: "data.mdb" in pool.said("target-1"), "the log names the reason")
    assert reason
    pool.until(
        lambda: any("target-1" in problem for problem in pool.status()["problems"]),
        "status reports the problem",
    )
