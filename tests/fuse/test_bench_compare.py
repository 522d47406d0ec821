"""The comparison of bench/: it runs every load against any directory, and ends and removes what it started, nothing else."""

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
    """On a file system that knows O_DIRECT; pytest's own directory may be one that does not."""
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
def test_every_load_runs_against_drive_floors_and_nvpool_and_nothing_is_left(place, tmp_path):
    names = ("plain", "c-passthrough", "c-socket", "nvpool-tcp", "nvpool-grpc")
    bench = start(place, "--subjects", f"^({'|'.join(names)})$", "--results", tmp_path / "results")
    said, told = bench.communicate(timeout=550)
    assert bench.returncode == 0, told
    assert "this takes about" in told and " left" in told
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
def test_what_an_interrupted_bench_and_a_killed_one_had_started_is_gone(place):
    bench = start(place, "--subjects", "^(plain|c-passthrough|nvpool)$", "--seconds", "2")
    while "round 1" not in (line := bench.stderr.readline()):
        assert line, "it ended before the first load"
    bench.send_signal(signal.SIGINT)
    time.sleep(0.2)
    bench.send_signal(signal.SIGINT)  # of someone who thinks it does not end
    assert "interrupted" in bench.communicate(timeout=550)[1]
    assert_nothing_is_left(place)

    # Nothing of this load unmounts, so it is killed with its mount whole, and no `umount` of it goes on after its death.
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
def test_a_load_on_a_mount_that_went_away_is_a_failure_and_no_figure_of_the_directory_below_it(place):
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
            "it is mounted again for the next load"
        )
        assert len(list((place / "c-passthrough" / "files" / "created-4096-0").iterdir())) == 10
    finally:
        comparison.stop()
        contract.sweep(place)


def test_a_mount_point_is_read_as_it_is_from_the_table_of_mounts():
    from subjects.glusterfs import unescaped

    assert unescaped(r"/a\040b\134c/d") == "/a b\\c/d"


@pytest.mark.smoke
def test_nothing_but_the_directory_of_a_bench_is_ever_removed(tmp_path, monkeypatch):
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
    for subject in compare.every_subject():
        subject.stop()  # never started: there is nothing to stop
    assert (tmp_path / "mine" / "of-glusterfs").is_dir()
    (tmp_path / "mine" / contract.OWNER).write_text("1")
    contract.sweep(tmp_path / "mine" / "of-glusterfs")
    assert os.listdir(tmp_path / "mine") == [contract.OWNER]


def test_a_peer_that_is_not_installed_and_a_variant_whose_library_is_not_are_named_with_the_reason(
    monkeypatch,
):
    from subjects import glusterfs, juicefs, moosefs, pool

    monkeypatch.setattr(juicefs, "PROGRAM", Path("/nonexistent/juicefs"))
    monkeypatch.setitem(pool.NEEDS, "grpc", "grpc_of_tomorrow")
    assert (
        "needs the Python package grpc_of_tomorrow"
        in pool.Pool(pool.Variant("later", transport="grpc")).missing()
    )
    monkeypatch.setenv("PATH", "/nonexistent")
    for peer in (glusterfs.GlusterFS(), moosefs.MooseFS(), juicefs.JuiceFS()):
        assert peer.missing().endswith("is not installed (make bench-peers)")


def test_the_better_of_asleep_and_awake_counts_and_ratios_are_judged_against_the_best_peer():
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
    row = report._goals(results).splitlines()[-1]
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
    assert report._way(compare.LOADS[0], rounds)["median"] == 2.0
    xml.dom.minidom.parseString(report.chart(results))


def test_the_peers_are_installed_by_somebody_with_root_who_is_told_one_command(tmp_path):
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
