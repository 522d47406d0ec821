"""The benchmark `bench/flood.py`: it measures with and without floods that are served, and removes its files."""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

pytestmark = pytest.mark.t3

BENCH = Path(__file__).resolve().parents[3] / "bench" / "flood.py"


@pytest.mark.skipif(bool(os.geteuid()), reason="only root becomes another user")
def test_floods_are_served_and_stopped(tmp_path):
    kinds = "reads,unread,lookups,unreachable,creates,lists,busy"
    with tempfile.TemporaryDirectory(prefix="nvpool-flood-") as place:
        os.chmod(place, 0o755)  # the users of the benchmark pass through it
        words = ["--directory", place, "--kinds", kinds, "--rounds", "1", "--seconds", "0.5"]
        done = subprocess.run(
            [sys.executable, BENCH, *words, "--results", tmp_path / "flood.json"],
            capture_output=True,
            text=True,
            timeout=480,
        )
        assert done.returncode == 0, done.stderr
        assert not os.listdir(place)
    found = json.loads((tmp_path / "flood.json").read_text())
    assert {"date", "machine", "commit"} < set(found) and set(found["kinds"]) == {
        "without",
        *kinds.split(","),
    }
    for kind, row in found["kinds"].items():
        assert not row["errors"] and row["rate"] > 0
        assert all(row[what]["p99_quotient"]["without"] > 0 for what in ("read", "look"))
        assert all(one["read"]["count"] > 0 for one in found["each"][kind])
    served = {
        method
        for row in found["kinds"].values()
        for method, results in row["replies"].items()
        if results.get("served")
    }
    assert {"DATA_READ", "META_LOOKUP_MANY", "META_GETATTR_MANY", "META_CREATE", "META_UNLINK"} <= served


@pytest.mark.smoke
@pytest.mark.parametrize("words", [("--kinds", "rain")])
def test_unknown_flood_kind_is_refused(words):
    done = subprocess.run([sys.executable, BENCH, *words], capture_output=True, text=True, timeout=60)
    assert done.returncode == 2 and "reads, batches, unread, lookups" in done.stderr
