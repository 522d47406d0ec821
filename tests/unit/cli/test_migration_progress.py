"""Pool paths of the command line, damaged dump files, percentiles, and progress of drains and migrations."""

import asyncio
import io

import click
import pytest

from nvpool.cli import main as cli_main
from nvpool.cli import pool_connection, progress
from nvpool.cli.commands.drive import moving_on
from nvpool.cli.commands.drive import wait_until_moved as wait_until_drained
from nvpool.cli.commands.shard import wait_until_moved
from nvpool.cli.pool_path import PlaceType, PoolPath
from nvpool.core.checksum import crc32c
from nvpool.core.errors import CorruptRecord, InvalidRequest, WrongFormat
from nvpool.sdk import dump as sdk_dump
from nvpool.sdk.bench.random_reads import Latencies, Places, read_local


@pytest.mark.parametrize(
    "text, place",
    [
        ("/srv/pool:/data", PoolPath("/srv/pool", b"/data")),
        ("10.0.0.1:17512:/data/a b", PoolPath("10.0.0.1:17512", b"/data/a b")),
        ("stream://10.0.0.1:7:/", PoolPath("stream://10.0.0.1:7", b"/")),
        ("stream+unix:///run/p.sock:/x", PoolPath("stream+unix:///run/p.sock", b"/x")),
        (".:/a:/b", PoolPath(".", b"/a:/b")),
    ],
)
def test_pool_path_is_split_where_its_path_begins(text, place):
    assert PlaceType().convert(text, None, None) == place and str(place) == text


@pytest.mark.parametrize("text", ["", "/srv/pool", "pool:data", ":/x", "stream://host:1"])
def test_invalid_pool_path_is_refused_with_an_example(text):
    with pytest.raises(click.BadParameter, match="POOL:/path"):
        PlaceType().convert(text, None, None)


def dump_file(*frames):
    content = b"".join(
        sdk_dump.FRAME.pack(shard, len(records), crc32c(records)) + records for shard, records in frames
    )
    end = sdk_dump.COUNT.pack(len(frames))
    return content + sdk_dump.FRAME.pack(sdk_dump.END_OF_FRAMES, len(end), crc32c(end)) + end


def test_dump_frames_are_read_back_and_damage_is_found():
    whole = dump_file((1, b"abc"), (1, b"d" * 1000), (2, b""))
    assert list(sdk_dump.frames(io.BytesIO(whole))) == [(1, b"abc"), (1, b"d" * 1000), (2, b"")]
    for cut in range(len(whole)):
        with pytest.raises(CorruptRecord):
            list(sdk_dump.frames(io.BytesIO(whole[:cut])))
    with pytest.raises(CorruptRecord):
        list(sdk_dump.frames(io.BytesIO(whole + b"x")))
    for at in (5, 13, 100, len(whole) - 1):
        with pytest.raises(CorruptRecord):
            list(sdk_dump.frames(io.BytesIO(whole[:at] + bytes([whole[at] ^ 4]) + whole[at + 1 :])))


def test_file_that_is_not_a_dump_is_refused():
    for content, error in (
        (b"", WrongFormat),
        (b"nvpool dump 2\n{}\n", WrongFormat),
        (sdk_dump.MAGIC + b"{", CorruptRecord),
        (sdk_dump.MAGIC + b"[]\n", CorruptRecord),
    ):
        file = io.BytesIO(content)
        file.name = "x"
        with pytest.raises(error):
            sdk_dump.read_header(file)


def test_percentiles_of_merged_latencies():
    one, other = Latencies(), Latencies()
    for step in range(1, 100):
        (one if step % 2 else other).add(step * 1e-6 + 1e-9)
    other.add(10.0)
    one.merge(other)
    assert (
        one.count == 100
        and one.percentile(0.5) == pytest.approx(50)
        and one.percentile(0.99) == pytest.approx(99)
    )
    assert one.percentile(1.0) == pytest.approx(0.2 * 1e6), "longer than the finest buckets"


def test_places_are_all_complete_pieces(tmp_path):
    places = Places([10_000, 100, 4096], 4096)
    assert {places.next() for _ in range(400)} == {(0, 0), (0, 4096), (2, 0)}
    (tmp_path / "small").write_bytes(b"x")
    with pytest.raises(InvalidRequest, match="4096 bytes"):
        read_local([str(tmp_path / "small")], seconds=0.1)
    (tmp_path / "large").write_bytes(bytes(40_960))
    found = read_local([str(tmp_path / "large")], seconds=0.05, threads=2)
    assert found.reads and found.bytes == found.reads * 4096 and found.p50_us <= found.p99_us


def test_waiting_for_migration_names_what_blocks_it():
    chains = {"paused": False, "filling": 0, "to_copy": 3, "bytes_left": 4096, "seconds_left": 75.0}
    drives = [
        {
            "drive": 1,
            "node": 1,
            "chains_to_come": 0,
            "chains_to_go": 0,
            "desired_state": "",
            "state": "silent",
        },
        {
            "drive": 2,
            "node": 1,
            "chains_to_come": 3,
            "chains_to_go": 0,
            "desired_state": "",
            "state": "serving",
        },
    ]
    nodes = [
        {
            "node": number,
            "state": "serving",
            "desired_state": "",
            "rack": "row-a" if number > 1 else "",
            "primaries": [],
            "standbys": [number],
        }
        for number in (1, 2, 3)
    ]
    seen = {"drives": drives, "chains": chains, "nodes": nodes}
    assert moving_on(seen, [2]) == "about 4.00 KiB left, 1 min 15 s to go"
    drives[0] |= {"chains_to_go": 3, "desired_state": "draining"}
    assert moving_on(seen).startswith("waits for drive 1 to serve again, about"), (
        "no other target may have what it is to copy"
    )
    drives[0]["desired_state"] = "lost"
    assert moving_on(seen).startswith("about"), "its data is rebuilt from the other copies"
    drives.append(
        {
            "drive": 3,
            "node": 2,
            "chains_to_come": 3,
            "chains_to_go": 0,
            "desired_state": "",
            "state": "silent",
        }
    )
    assert moving_on(seen) == "waits for drive 3 to serve again, about 4.00 KiB left, 1 min 15 s to go"
    nodes[1]["state"] = "silent"
    waits = "waits for node 2 (rack row-a) to serve again; if it stays away: nvpool node remove POOL 2 --lost"
    assert moving_on(seen).startswith(waits)
    drives.pop()
    assert moving_on(seen, [1, 3]) == moving_on(seen) == "about 4.00 KiB left, 1 min 15 s to go"
    assert moving_on(seen, [2]).startswith(waits), (
        "it has a member of the shard of which another member is to be moved"
    )
    nodes[1]["desired_state"] = "lost"
    assert moving_on(seen, [2]).startswith("about")
    drives[1]["lacks_room"] = True
    assert moving_on(seen).startswith("drive 2 has no space; add a drive: nvpool drive add POOL PATH, about")


def test_drain_names_the_waiting_target_and_the_reason():
    chains = {"paused": False, "filling": 0, "to_copy": 3, "bytes_left": 4096, "seconds_left": None}
    drives = [
        {
            "drive": 1,
            "target": 4,
            "node": 1,
            "chains_to_come": 0,
            "chains_to_go": 3,
            "desired_state": "draining",
            "state": "serving",
            "used_bytes": 8192,
            "moving_wait": "",
        },
        {
            "drive": 2,
            "target": 5,
            "node": 1,
            "chains_to_come": 3,
            "chains_to_go": 0,
            "desired_state": "",
            "state": "serving",
            "used_bytes": 0,
            "moving_wait": "target 4: Busy",
        },
    ]
    seen = {"drives": drives, "chains": chains, "nodes": []}
    assert moving_on(seen) == "drive 2 (target 5): target 4: Busy, about 4.00 KiB left"
    drives[1] |= {"chains_to_come": 0, "moving_wait": ""}
    drives[0] |= {
        "chains_to_go": 0,
        "desired_state": "drained",
        "moving_wait": "chunks are kept for 8 s more",
    }
    chains["to_copy"] = 0
    assert moving_on(seen) == "drive 1 (target 4) removes the last 8.00 KiB: chunks are kept for 8 s more"
    drives[0] |= {"used_bytes": 0}
    assert moving_on(seen) == ""


@pytest.mark.parametrize("quiet", [False, True])
def test_waiting_command_reports_a_stall(monkeypatch, capsys, quiet):
    drive = {
        "drive": 1,
        "target": 4,
        "node": 1,
        "chains_to_come": 0,
        "chains_to_go": 0,
        "desired_state": "drained",
        "state": "serving",
        "used_bytes": 4096,
        "moving_wait": "",
        "metadata": [],
    }

    async def statuses(pool, instead):
        for used in (4096, 4096, 0):
            yield {
                "drives": [drive | {"used_bytes": used}],
                "nodes": [],
                "chains": {
                    "paused": False,
                    "filling": 0,
                    "to_copy": 0,
                    "bytes_left": 0,
                    "seconds_left": None,
                },
            }
            await asyncio.sleep(0.05)

    monkeypatch.setattr(pool_connection, "statuses", statuses)
    monkeypatch.setattr("nvpool.cli.commands.drive.STALL_S", 0.01)
    monkeypatch.setattr(progress, "LINE_S", 0.02)
    asyncio.run(wait_until_drained("p", "draining drive 1", quiet, 1))
    said = capsys.readouterr().err
    assert "no progress for 0 s, drive 1 (target 4) removes the last 4.00 KiB" in said


@pytest.mark.parametrize("noun", ["drive", "node"])
def test_interrupted_wait_says_that_the_drain_continues(monkeypatch, capsys, noun):
    async def change(pool, verb, arguments):
        return {
            "drive": 2,
            "node": 2,
            "state": "draining",
            "desired_state": "draining",
            "chains_to_go": 7,
            "waits_for": [],
            "chains": 7,
            "primaries": [],
            "standbys": [],
            "etcd": False,
            "leads": False,
        }

    async def statuses(pool, instead):
        raise KeyboardInterrupt
        yield

    monkeypatch.setattr(pool_connection, "change", change)
    monkeypatch.setattr(pool_connection, "statuses", statuses)
    monkeypatch.setattr("nvpool.cli.commands.node.ended_drained", lambda pool, number: None)
    assert cli_main.main([noun, "drain", "/nowhere", "2", "--wait"]) == 130
    shown_text = capsys.readouterr().err
    assert f"draining {noun} 2 goes on; look with: nvpool {noun} ls /nowhere" in shown_text
    assert f"end it with: nvpool {noun} drain /nowhere 2 --cancel" in shown_text


@pytest.mark.parametrize(
    ("paused", "expected"),
    [
        (False, "7 partitions left"),
        (True, "7 partitions left, paused; go on with: nvpool pool rebalance POOL --resume"),
    ],
)
def test_waiting_for_partitions_says_that_migration_is_paused(monkeypatch, paused, expected):
    shown_text, gate = [], asyncio.Event()

    async def statuses(pool):
        for left in (7, 0):
            yield {
                "shards": [{"shard": 1, "state": "serving", "partitions_to_go": left}],
                "chains": {"paused": paused},
            }
            await gate.wait()

    async def shown(title, work, look, *, quiet):
        waits = asyncio.ensure_future(work)
        await asyncio.sleep(0)  # to the first status
        shown_text.append(look().text)
        gate.set()
        return await waits

    monkeypatch.setattr(pool_connection, "statuses", statuses)
    monkeypatch.setattr(progress, "shown", shown)
    asyncio.run(wait_until_moved("p", "filling", True, None))
    assert shown_text == [expected]
