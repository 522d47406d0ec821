"""The benchmark `bench/flood.py`: it measures with and without a flood of requests, and removes its files."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.t3

BENCH = Path(__file__).resolve().parents[3] / "bench" / "flood.py"


def test_flood_is_measured_and_stopped(tmp_path):
    done = subprocess.run(
        [
            sys.executable,
            BENCH,
            "--directory",
            tmp_path,
            "--kinds",
            "requests",
            "--rounds",
            "1",
            "--seconds",
            "0.5",
        ],
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)["requests"]
    for what in ("read", "look"):
        assert found[what]["p99 quotient"] > 0
        assert all(one[what]["count"] > 5 for side in found["rounds"].values() for one in side)
    assert not list(tmp_path.iterdir())


@pytest.mark.smoke
@pytest.mark.parametrize("words", [("--kinds", "rain")])
def test_unknown_flood_kind_is_refused(words):
    done = subprocess.run([sys.executable, BENCH, *words], capture_output=True, text=True, timeout=60)
    assert done.returncode == 2 and "requests, connections, slow, unread, busy" in done.stderr
