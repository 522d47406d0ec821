"""The failure soak on a pool of three nodes: a few rounds on each run, all of them with `make soak`."""

import importlib
import json
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from nvpool.poolmap.model import Chain, ChainTable, PoolMap, PoolSettings, Shard, StandbyMember
from nvpool.testing.env import etcd as real_etcd
from nvpool.testing.env import namespaces
from nvpool.testing.faults.node_faults import CONDITIONS, VICTIMS, is_settled, missing_copies

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "bench"))
contract, soak = (importlib.import_module(name) for name in ("subjects.contract", "failure_soak"))
sys.path.remove(str(ROOT / "bench"))

needs_nodes = [
    pytest.mark.mount,
    pytest.mark.skipif(bool(namespaces.missing()), reason=namespaces.missing() or ""),
    pytest.mark.skipif(bool(real_etcd.missing()), reason=real_etcd.missing() or ""),
    pytest.mark.skipif(not os.path.exists("/dev/fuse"), reason="a mount needs /dev/fuse"),
]
ROUNDS = int(os.environ.get("NVPOOL_FAILURES", "1000"))


@pytest.fixture
def place():
    """A short path: the kernel limits the path length of unix sockets below it."""
    with tempfile.TemporaryDirectory(prefix="s", dir="/tmp") as made:
        yield Path(made)


def program(place, *words):
    command = [
        sys.executable,
        ROOT / "bench" / "failure_soak.py",
        "--directory",
        place / "p",
        "--results",
        place / "found",
        *words,
    ]
    return subprocess.Popen(
        list(map(str, command)), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def finished(place, *words, timeout_s):
    """The rounds of a whole run, which leaves nothing behind."""
    process = program(place, *words)
    try:
        said, errors = process.communicate(timeout=timeout_s)
    finally:
        process.kill()
        process.wait()
    assert process.returncode == 0, f"{errors}\n{said}"
    assert list((place / "p").iterdir()) == [] and contract.marked(place / "p") == []
    assert "| **all** |" in (place / "found" / "failure-soak.md").read_text()
    return [json.loads(line) for line in (place / "found" / "failure-soak.jsonl").read_text().splitlines()]


def smoke(victim, condition, *words):
    return pytest.param(
        ["--victim", victim, "--condition", condition, *words], marks=needs_nodes, id=f"{victim}, {condition}"
    )


@pytest.mark.parametrize(
    "words", [smoke("primary and leader", "primary's node mute"), smoke("leader", "store stopped", "--drain")]
)
def test_failure_soak_round_meets_all_bounds(place, words):
    (row,) = finished(place, "--rounds", 1, "--patience", 8, *words, timeout_s=560)  # runs beside other tests
    assert row["missed"] == [] and "skipped" not in row and row["whole_s"] > 0, row


@pytest.mark.soak
@pytest.mark.mount
@pytest.mark.timeout(4 * 3600)
def test_failure_soak_rounds_meet_all_bounds(place):
    rows = finished(place, "--rounds", ROUNDS, "--keep-going", timeout_s=4 * 3600)
    assert len(rows) == ROUNDS and sum("skipped" in row for row in rows) < ROUNDS / 20


@pytest.mark.parametrize("pools", [pytest.param(2, marks=needs_nodes)])
def test_interrupted_failure_soak_leaves_nothing(place, pools):
    process = program(place, "--rounds", 50, "--pools", pools, "--keep-going")
    try:
        while not (line := process.stderr.readline()).startswith("round"):
            assert line, "the soak ended before its first round"
        process.send_signal(signal.SIGINT)
        process.send_signal(signal.SIGINT)  # an impatient second Ctrl-C
        assert "interrupted" in process.communicate(timeout=240)[1]
    finally:
        process.kill()
        process.wait()
    assert process.returncode == 1
    assert list((place / "p").iterdir()) == []
    assert contract.marked(place / "p") == [] and contract.mounted_below(place / "p") == []


@pytest.mark.parametrize(("pools", "longest"), [(1, 35), (2, 18)])
def test_failure_soak_uses_short_paths(monkeypatch, pools, longest):
    short, long = (Path("/" + (count - 1) * "d") for count in (longest, longest + 1))
    assert soak.place_of_pools(short, pools) == short
    with pytest.raises(SystemExit, match=r"--directory /d+ is too long.*107 bytes.*--directory /var/tmp"):
        soak.place_of_pools(long, pools)
    for build, chosen in ((short, short), (long, Path("/var/tmp"))):
        monkeypatch.setattr(soak, "PLACES", (build, soak.PLACES[-1]))
        assert soak.place_of_pools(None, pools) == chosen


@pytest.mark.smoke
def test_failure_soak_choices_depend_on_seed_and_round():
    def choices(seed):
        return [soak.chosen(seed, number)[1:] for number in range(300)]

    assert choices(1) == choices(1) != choices(2)
    victims, conditions, drains = zip(*choices(1), strict=True)
    assert (
        set(victims) == {*VICTIMS, "nobody"} and set(conditions) == set(CONDITIONS) and 15 < sum(drains) < 50
    )
    assert not any(victim == "nobody" and condition == "nothing else" for victim, condition, _ in choices(1))
    assert {soak.link_of(condition) for condition in CONDITIONS} == set(soak.LINKS)


def table_of(rows):
    run = {"date": "today", "machine": "m", "commit": "c", "seed": 1, "pools": 1, "took_s": 30, "each": rows}
    return soak.markdown([run])


def test_failure_soak_table_counts_missed_bounds():
    measured = (
        ("nothing else", 0.2, 1.0, []),
        ("nothing else", 0.4, 2.0, []),
        ("two nodes cut", 7.5, None, ["change: 7.5 s"]),
    )
    rows = [
        {
            "round": number,
            "victim": "primary",
            "condition": condition,
            "drain": False,
            "change_s": change,
            "whole_s": whole,
            "missed": missed,
        }
        for number, (condition, change, whole, missed) in enumerate(measured)
    ]
    skipped = {
        "round": 3,
        "victim": "store",
        "condition": "nothing else",
        "drain": False,
        "skipped": "no store",
        "missed": [],
    }
    text = table_of([*rows, skipped])
    assert "4 rounds on 1 pool" in text and "1 of 4 rounds missed a bound" in text
    assert "1 round could not be measured." in text and "| not measured |  | 1 | – | – |  |" in text
    assert "| primary | nothing else | 2 | 0.4 · 0.4 · 0.4 | 2.0 · 2.0 · 2.0 |  |" in text
    assert "| primary | link cut | 1 | 7.5 · 7.5 · 7.5 | – | 1 |" in text and "| store |" not in text
    assert "could not be measured" not in table_of(rows)


def test_failure_soak_table_counts_failures_without_times():
    """A round that could not be measured may be the failure: the table must not hide it."""
    skipped = {"round": 1, "victim": "store", "condition": "nothing else", "drain": True, "whole_s": 3.0}
    rows = [
        soak.broken(0, "a pool could not be made"),
        skipped | {"change_s": 0.1, "skipped": "no store", "missed": ["data: a wrong byte"]},
    ]
    text = table_of(rows)
    assert "2 of 2 rounds missed a bound" in text and "2 rounds could not be measured." in text
    assert "| not measured |  | 2 | – | – | 2 |" in text and "| **all** |  | 2 | – | – | 2 |" in text


def test_missing_copies_names_short_chains_and_standbys():
    def pool_map(chain, state="up"):
        standby = StandbyMember(member=2, node=2, endpoints=(), state=state)
        return PoolMap(
            format=2,
            pool_id="p",
            name="p",
            epoch=1,
            settings=PoolSettings(),
            tables=(ChainTable(2, (chain,)),),
            shards=(Shard(id=1, node=1, endpoints=(), standbys=(standby,)),),
        )

    whole = pool_map(Chain(1, (1, 2)))
    assert missing_copies(whole) == "" and is_settled(whole)
    assert missing_copies(pool_map(Chain(1, (1,), joining=(2,)))) == "1 chains"
    assert missing_copies(pool_map(Chain(1, (1, 2)), "syncing")) == "shard 1 has no standby"
    moving = pool_map(Chain(1, (1, 2), joining=(3,)))
    assert missing_copies(moving) == "" and not is_settled(moving)
