"""The comparison benchmark: it runs every load against any directory, and stops and removes only what it started."""

import importlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
import xml.dom.minidom
from pathlib import Path

import pytest

pytestmark = pytest.mark.t3

ROOT = Path(__file__).resolve().parents[2]
TINY = ("--rounds", "1", "--seconds", "0.2", "--file-mib", "8", "--files", "40", "--no-awake-peers")
sys.path.insert(0, str(ROOT / "bench"))
compare, contract, report = (
    importlib.import_module(name) for name in ("compare", "subjects.contract", "report")
)
sys.path.remove(str(ROOT / "bench"))

needs_root = pytest.mark.skipif(
    os.geteuid() != 0
    or not os.access("/dev/fuse", os.W_OK)
    or not os.access("/proc/sys/vm/drop_caches", os.W_OK),
    reason="needs root, /dev/fuse and the right to drop the page cache",
)


@pytest.fixture
def place(tmp_path):
    """On a file system with O_DIRECT; pytest's own directory may be on one without it."""
    made = tmp_path / "bench"
    made.mkdir()
    return made


def start(place, *words):
    command = [sys.executable, ROOT / "bench" / "compare.py", *TINY, "--directory", place, *words]
    return subprocess.Popen(
        list(map(str, command)), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=place
    )


def assert_nothing_is_left(place):
    assert list(place.iterdir()) == []
    assert contract.marked(place) == [] and contract.mounted_below(place) == []


@needs_root
@pytest.mark.mount
def test_every_load_runs_and_leaves_nothing(place, tmp_path):
    names = ("plain", "c-passthrough", "c-socket", "nvpool-tcp", "nvpool-grpc")
    bench = start(place, "--subjects", f"^({'|'.join(names)})$", "--results", tmp_path / "results")
    said, progress = bench.communicate(timeout=550)
    assert bench.returncode == 0, progress
    assert "this takes about" in progress and " left" in progress
    assert_nothing_is_left(place)
    found = json.loads((tmp_path / "results" / "peers.json").read_text())
    assert [load["key"] for load in found["loads"]] == [load.key for load in compare.LOADS]
    who = {subject.name: subject for subject in compare.every_subject()}
    for load, known in zip(found["loads"], compare.LOADS, strict=True):
        assert set(load["cells"]) == {name for name in names if known.suits(who[name])}, load
        for name, cell in load["cells"].items():
            assert "failed" not in cell and cell["best"] > 0, (load["key"], name, cell)
        assert load["name"] in said
    assert all(
        floor["columns"]["tcp"]["reached"] is not None and floor["title"] in said for floor in found["floors"]
    )
    assert (tmp_path / "results" / "peers.md").read_text().startswith(said.rstrip("\n"))
    xml.dom.minidom.parseString((tmp_path / "results" / "peers.svg").read_text())


@needs_root
@pytest.mark.mount
def test_interrupted_and_killed_bench_leave_nothing(place):
    bench = start(place, "--subjects", "^(plain|c-passthrough|nvpool)$", "--seconds", "2")
    while "round 1" not in (line := bench.stderr.readline()):
        assert line, "the bench ended before the first load"
    bench.send_signal(signal.SIGINT)
    time.sleep(0.2)
    bench.send_signal(signal.SIGINT)  # an impatient second Ctrl-C
    assert "interrupted" in bench.communicate(timeout=550)[1]
    assert_nothing_is_left(place)

    # This load never unmounts, so the bench is killed with its mount whole, and no `umount` of it continues after its death.
    bench = start(
        place, "--subjects", "^c-passthrough$", "--only", "^reread$", "--rounds", "99", "--seconds", "2"
    )
    while "round 1" not in (line := bench.stderr.readline()):
        assert line, "it ended before the first load"
    bench.kill()
    bench.communicate(timeout=550)
    assert contract.mounted_below(place) and contract.marked(place)
    bench = start(place, "--subjects", "^plain$", "--only", "^stat$")
    assert "left by a bench that was killed" in bench.communicate(timeout=550)[1]
    assert_nothing_is_left(place)


@needs_root
@pytest.mark.mount
def test_load_without_its_mount_is_a_failure(place):
    from subjects.local import CPassthrough

    (place / contract.OWNER).write_text(str(os.getpid()))
    comparison = compare.Comparison(place, [CPassthrough()], compare.Sizes(60.0, 1 << 20, 1 << 20, 10), False)
    found = {"rate": 1.0, "bytes_rate": 1.0, "p50_us": 1.0, "p99_us": 1.0}
    leaves = compare.Load("leaves", "leaves", "files/s", lambda at, turn: contract.unmount(at.mount) or found)
    stays = compare.Load("stays", "stays", "files/s", lambda at, turn: at.create(turn, 1, 4096, 10))
    try:
        comparison.start()
        comparison.round(0, [leaves, stays])
        assert comparison.failures == {("c-passthrough", "leaves"): "its mount went away under the load"}
        assert list(comparison.figures) == [("c-passthrough", "stays")], (
            "the subject is mounted again for the next load"
        )
        assert len(list((place / "c-passthrough" / "files" / "created-4096-0").iterdir())) == 10
    finally:
        comparison.stop()
        contract.sweep(place)


def test_mount_table_entries_are_unescaped():
    from subjects.glusterfs import unescaped

    assert unescaped(r"/a\040b\134c/d") == "/a b\\c/d"


@pytest.mark.smoke
def test_sweep_removes_only_the_benchs_directory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine" / "of-glusterfs").mkdir(parents=True)
    for path in (
        Path(),
        Path(".."),
        Path("mine"),
        tmp_path,
        tmp_path / "mine",
        tmp_path / "mine" / "of-glusterfs",
        Path("/"),
    ):
        with pytest.raises(ValueError):
            contract.sweep(path)
    for subject in compare.every_subject() + compare.every_subject(copies=2):
        subject.stop()  # never started: nothing to stop
    assert (tmp_path / "mine" / "of-glusterfs").is_dir()
    (tmp_path / "mine" / contract.OWNER).write_text("1")
    contract.sweep(tmp_path / "mine" / "of-glusterfs")
    assert os.listdir(tmp_path / "mine") == [contract.OWNER]


def test_missing_peers_and_libraries_are_named(
    monkeypatch,
):
    from subjects import glusterfs, juicefs, moosefs, pool, seaweedfs

    monkeypatch.setattr(juicefs, "PROGRAM", Path("/nonexistent/juicefs"))
    monkeypatch.setattr(seaweedfs, "PROGRAM", Path("/nonexistent/weed"))
    monkeypatch.setitem(pool.NEEDS, "grpc", "grpc_of_tomorrow")
    assert (
        "needs the Python package grpc_of_tomorrow"
        in pool.Pool(pool.Variant("later", transport="grpc")).missing()
    )
    monkeypatch.setenv("PATH", "/nonexistent")
    for peer in (glusterfs.GlusterFS(), moosefs.MooseFS(2), juicefs.JuiceFS(), seaweedfs.SeaweedFS(2)):
        assert peer.missing().endswith("is not installed (make bench-peers)")
    monkeypatch.setattr(juicefs, "PROGRAM", Path("/bin/sh"))
    assert juicefs.JuiceFS().missing() == "redis-server is not installed (make bench-peers)"


def test_peer_without_two_copies_is_named_as_missing():
    from subjects import pool

    once, twice = compare.every_subject(), compare.every_subject(copies=2)
    assert {subject.name for subject in once} - {subject.name for subject in twice} == {
        variant.name for variant in pool.VARIANTS if not variant.column
    }
    (juicefs,) = (subject for subject in twice if subject.name == "juicefs")
    assert juicefs.missing().startswith("keeps no copies itself")
    for subject in twice:
        assert subject.copies == (2 if subject.kind in ("nvpool", "peer") else 1), subject.name
    both = [subject for subject in twice if isinstance(subject, pool.Pool)]
    assert all(subject.targets == 2 and "replicas 2, standbys 1" in subject.notes for subject in both)
    sizes = compare.Sizes(1.0, 1 << 20, 1 << 20, 10)
    assert compare.room_needed(sizes, 3, 2) == 2 * compare.room_needed(sizes, 3, 1)


def test_better_state_counts_and_ratios_use_the_best_peer():
    subject = {"kind": "peer", "version": "1", "notes": "", "cold": "so", "missing": None}
    load = {
        "key": "stat",
        "name": "stat",
        "unit": "files/s",
        "cold": True,
        "durable": False,
        "best_peer": "b",
        "by": "mount",
        "goals": {"same host": 2, "tcp": 1.5},
        "cells": {
            "a": {"best": 50.0},
            "b": {"best": 100.0},
            "mine": {"best": 150.0},
            "plain": {"best": 1000.0},
        },
    }
    results = {
        "loads": [load],
        "columns": {"same host": "mine", "tcp": "mine"},
        "date": "today",
        "subjects": {"a": subject, "b": subject, "mine": subject | {"kind": "nvpool"}},
    }
    row = report.goals_table(results).splitlines()[-1]
    assert row == "| stat (files/s) | 1,000 | 100 b | 150 | 1.50 of 2 ✗ | 0.15 | 150 | 1.50 of 1.5 ✓ | 0.15 |"
    assert report.judged(2.5, 3.0, at_most=True) == "2.50 of 3 ✓" and report.judged(None, 1.0) == "–"
    one = {"key": "sdk-one", "cells": {"mine": {"best": 20.0}}}
    under = {"key": "socket", "cells": {report.SOCKET: {"best": 80.0}}}
    floors = {floor.key: report.against(floor, [one, under], {"tcp": "mine"}) for floor in report.FLOORS}
    assert floors["sdk-one"]["columns"] == {
        "same host": {"value": None, "goal": None, "reached": None},
        "tcp": {"value": 4.0, "goal": 3.0, "reached": False},
    }
    assert floors["sdk-many"]["columns"]["tcp"] == {"value": None, "goal": 150.0, "reached": None}
    found = {"rate": 1.0, "bytes_rate": 1.0, "p50_us": 1.0, "p99_us": 1.0}
    rounds = [found | {"rate": rate} for rate in (3.0, 1.0, 2.0)]
    assert report.rounds_summary(compare.LOADS[0], rounds)["median"] == 2.0
    xml.dom.minidom.parseString(report.chart(results))


def test_peer_installer_prints_a_command_for_root(tmp_path):
    (tmp_path / "checkout" / "bench").mkdir(parents=True)
    shutil.copy(ROOT / "bench" / "install_peers.sh", tmp_path / "checkout" / "bench")
    for name, text in {
        "id": "echo 1000",
        "dpkg-query": 'case "$*" in *moosefs-client*) exit 1 ;; esac; echo "ok installed"',
        "apt-get": f"touch {tmp_path}/asked",
    }.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{text}\n")
        (tmp_path / name).chmod(0o755)
    environment = os.environ | {"PATH": f"{tmp_path}:{os.environ['PATH']}", "PYTHON": "false"}
    done = subprocess.run(
        ["sh", "bench/install_peers.sh"],
        cwd=tmp_path / "checkout",
        env=environment,
        capture_output=True,
        text=True,
        timeout=550,
    )
    assert done.returncode == 1
    assert (
        done.stdout
        == "sudo apt-get update && sudo apt-get install --yes --no-install-recommends moosefs-client\n"
    )
    assert not (tmp_path / "asked").exists()
