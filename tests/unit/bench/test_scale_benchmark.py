"""The benchmark of very large shards: consistent results, unchanged kept databases, no other files left."""

import hashlib
import importlib
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.t3

ROOT = Path(__file__).resolve().parents[3]
sys.path.insert(0, str(ROOT / "bench"))
contract, report = (importlib.import_module(name) for name in ("subjects.contract", "millions.report"))
sys.path.remove(str(ROOT / "bench"))

SMALL, LARGE = 3000, 20_000
CASES = [(SMALL, "one"), (SMALL, "many"), (LARGE, "one"), (LARGE, "many")]


def start(place, *words):
    place.mkdir(exist_ok=True)
    command = [sys.executable, ROOT / "bench" / "scale.py", "--directory", place, "--seconds", "0.3", *words]
    return subprocess.Popen(
        list(map(str, command)), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=place
    )


def finished(bench):
    stdout, stderr = bench.communicate(timeout=240)
    assert bench.returncode == 0, stderr
    return stdout


def assert_nothing_is_left(place):
    assert list(place.iterdir()) == []
    assert contract.marked(place) == []


def digests(keep):
    return {path: hashlib.sha256(path.read_bytes()).hexdigest() for path in keep.rglob("data.mdb")}


def test_databases_are_kept_and_measured_again_unchanged(tmp_path):
    keep, place, results = tmp_path / "keep", tmp_path / "place", tmp_path / "results"
    finished(start(place, "--sizes", f"{SMALL},{LARGE}", "--check", SMALL, "--keep", keep, "--make-only"))
    made = digests(keep)
    assert len(made) == len(CASES)
    stdout = finished(
        start(place, "--sizes", f"{SMALL},{LARGE}", "--keep", keep, "--reuse", "--results", results)
    )
    assert digests(keep) == made
    assert_nothing_is_left(place)

    found = json.loads((results / "scale.json").read_text())
    assert (results / "scale.md").read_text() == stdout.removesuffix("\n")
    assert [(case["files"], case["shape"]) for case in found["cases"]] == CASES
    for case in found["cases"]:
        assert_fits(case)
        assert report.title(case) in stdout
    assert found["empty"]["memory"]["started"]["anonymous_bytes"] > 0


def assert_fits(case):
    files, made, figures = case["files"], case["made"], case["figures"]
    directories = -(-files // 1000) if case["shape"] == "many" else 0
    # root, `data` and its entry, identity, counts, bounds; an inode and an entry for each file and directory
    assert made["entries"] == 2 * (files + directories) + 6
    assert made["dense_bytes"] < made["used_bytes"] <= made["file_bytes"]
    assert made["used_bytes"] < 170 * files
    if files <= SMALL:
        served = made["by_service"]
        assert served["same"], served["differences"]
        assert 0.8 < served["used_bytes"] / made["used_bytes"] < 1.25
    for name in (
        "cold_look_ups",
        "look_ups",
        "look_ups_together",
        "creates",
        "engine_look_ups",
        "engine_creates",
        "list",
        "list_with_attributes",
    ):
        assert figures[name]["per_s"] > 0, name
    added = figures["files_after"] - files
    assert added >= figures["creates"]["count"] > 0
    assert figures["after"]["entries"] > made["entries"] + 2 * added
    if case["shape"] == "one":
        assert figures["list"]["whole"] and figures["list"]["count"] == figures["files_after"]
    for name in ("start_s", "start_cold_s", "start_after_kill_s", "stop_s"):
        assert figures[name] > 0
    assert list(figures["memory"]) == ["started", "after look-ups", "after creates", "after listing"]
    for memory in figures["memory"].values():
        assert memory["anonymous_bytes"] > 0 and memory["mapped_bytes"] > 0


@pytest.mark.smoke
def test_interrupted_run_leaves_no_files_and_checks_free_space(tmp_path):
    place, keep = tmp_path / "place", tmp_path / "keep"
    bench = start(place, "--sizes", "1e7", "--shape", "one", "--keep", keep)
    while "making" not in (line := bench.stderr.readline()):
        assert line, "the benchmark ended before it made a database"
    bench.send_signal(signal.SIGINT)
    assert "interrupted" in bench.communicate(timeout=60)[1]
    assert bench.returncode == 130
    assert_nothing_is_left(place)
    assert list(keep.iterdir()) == []

    bench = start(place, "--sizes", "4e9", "--shape", "one", "--keep", keep)
    space = os.statvfs(place)
    if space.f_bavail * space.f_frsize > 800 << 30:
        bench.kill()
        pytest.skip("this drive has room for four billion files")
    stderr = bench.communicate(timeout=60)[1]
    assert bench.returncode == 1
    assert "GiB free" in stderr and "--sizes" in stderr
    assert_nothing_is_left(place)
    assert list(keep.iterdir()) == []
