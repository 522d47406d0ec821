"""The benchmark `bench/two_mounts_remove.py`: both ways are measured at a small size, and nothing stays behind."""

import importlib
import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.fuse.conftest import FLOOR

ROOT = Path(__file__).resolve().parents[2]
BENCH = ROOT / "bench" / "two_mounts_remove.py"
sys.path.insert(0, str(ROOT / "bench"))
removal = importlib.import_module("two_mounts_remove")
sys.path.remove(str(ROOT / "bench"))


@pytest.mark.mount
@pytest.mark.skipif(FLOOR, reason="the floor has one mount")
def test_removal_from_two_mounts_is_measured(tmp_path):
    words = ["--rounds", "2", "--directories", "6", "--files", "4", tmp_path]
    done = subprocess.run([sys.executable, BENCH, *words], capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert (found["directories"], found["files"], found["goal"]) == (6, 4, 5.0) and found["quotient"] > 0
    assert [sorted(one) for one in found["rounds"]] == [["one mount", "two mounts"]] * 2
    assert not list(tmp_path.iterdir())


def test_removal_result_is_the_median_of_the_rounds():
    rounds = [
        {"one mount": one, "two mounts": two}
        for one, two in ((1.0, 2.0), (2.0, 12.0), (1.0, 3.0), (4.0, 12.0))
    ]
    found = removal.result_of(rounds)
    assert (found["one mount s"], found["two mounts s"], found["quotient"]) == (1.5, 7.5, 3.0)
    assert found["meets the goal"] and not removal.result_of(rounds[1:2])["meets the goal"]


def test_refused_removal_ends_the_benchmark(tmp_path, monkeypatch):
    tree = tmp_path / "tree"
    removal.make_tree(tree, 3, 2)
    assert removal.remove([tree]) >= 0 and not tree.exists()
    (tmp_path / "rm").write_text("#!/bin/sh\necho 'rm: cannot remove it' >&2\nexit 1\n")
    (tmp_path / "rm").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    with pytest.raises(SystemExit, match="ended with 1: rm: cannot remove it"):
        removal.remove([tree])


def test_benchmark_without_a_round_is_a_usage_error():
    done = subprocess.run(
        [sys.executable, BENCH, "--rounds", "0"], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 2 and "at least one round" in done.stderr
