"""The questions of bench/: each is answered at a small size with all its parts, and leaves nothing behind."""

import importlib
import json
import os
import subprocess
import sys
import xml.dom.minidom
from pathlib import Path

import pytest

pytestmark = pytest.mark.t3

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "bench"))
concurrency, contract, drawing, layers = (
    importlib.import_module(name) for name in ("concurrency", "subjects.contract", "drawing", "layers")
)
sys.path.remove(str(ROOT / "bench"))

needs_root = pytest.mark.skipif(
    os.geteuid() != 0
    or not os.access("/dev/fuse", os.W_OK)
    or not os.access("/proc/sys/vm/drop_caches", os.W_OK),
    reason="needs root, /dev/fuse and the right to drop the page cache",
)


@needs_root
@pytest.mark.mount
def test_questions_are_answered_and_leave_nothing(tmp_path):
    place = tmp_path / "bench"
    command = [
        sys.executable,
        ROOT / "bench" / "questions.py",
        "--rounds",
        1,
        "--seconds",
        0.1,
        "--region-mib",
        2,
        "--in-flight",
        "1,3",
        "--targets",
        2,
        "--clients",
        2,
        "--directory",
        place,
        "--results",
        tmp_path / "results",
    ]
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True, timeout=550, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert list(place.iterdir()) == []
    assert contract.marked(place) == [] and contract.mounted_below(place) == []
    found = json.loads((tmp_path / "results" / "questions.json").read_text())
    for name, way in found["concurrency"].items():
        assert [point["in_flight"] for point in way["points"]] == [1, 3] and way["knee"] in (1, 3), name
        assert all(point["rate"] > 0 for point in way["points"])
    for row in found["layers"]["rows"]:
        assert tuple(row["layers"]) == layers.LAYERS
        assert sum(row["layers"].values()) == pytest.approx(row["whole"])
    assert {(row["way"], row["block"]) for row in found["throughput"]["rows"]} == {
        (way, block) for way in ("stream", "short cut") for block in ("4 KiB", "128 KiB")
    }
    assert all(
        row["rate"] > 0 and row["targets"] == row["processes"] == 2 for row in found["throughput"]["rows"]
    )
    text = (tmp_path / "results" / "questions.md").read_text()
    assert text.startswith(done.stdout.rstrip("\n")) and "**knee**" in text
    xml.dom.minidom.parseString((tmp_path / "results" / "questions.svg").read_text())


def test_knee_is_where_more_readers_stop_paying_off():
    # 100 reads/s a reader up to eight readers, then no more
    points = [concurrency.Point(count, 100.0 * min(count, 8), 0.0, 0.0) for count in (1, 2, 4, 8, 16, 32)]
    assert concurrency.knee(points) == 8
    flat = [concurrency.Point(count, 100.0, 0.0, 0.0) for count in (1, 2, 4)]
    assert concurrency.knee(flat) == 1
    creeping = [
        concurrency.Point(count, rate, 0.0, 0.0)
        for count, rate in ((1, 50.0), (2, 89.0), (4, 95.0), (8, 100.0))
    ]
    assert concurrency.knee(creeping) == 4


def test_layers_of_a_read_add_up():
    p50_us = {
        "bare": 7.0,
        "floor": 9.0,
        "wire": 30.0,
        "drive warm": 1.0,
        "raw warm": 40.0,
        "drive cold": 80.0,
        "raw cold": 130.0,
    }
    for state, sdk in (("warm", 50.0), ("cold", 142.0)):
        p50_us |= {f"sdk stream {state}": sdk, f"sdk short cut {state}": sdk / 2 + 25}
        p50_us |= {f"mount stream {state}": sdk + 12, f"mount short cut {state}": 20.0}
    rows = {(row["who"], row["road"], row["state"]): row for row in layers.split(p50_us)}
    assert rows["mount", "stream", "cold"]["layers"] == {
        "kernel": 7.0,
        "engine": 2.0,
        "client": 15.0,
        "wire": 30.0,
        "store": 20.0,
        "drive": 80.0,
    }
    assert rows["sdk", "stream", "cold"]["layers"] == {
        "kernel": 0.0,
        "engine": 0.0,
        "client": 12.0,
        "wire": 30.0,
        "store": 20.0,
        "drive": 80.0,
    }
    assert rows["mount", "short cut", "warm"]["layers"] == {
        "kernel": 7.0,
        "engine": 2.0,
        "client": 10.0,
        "wire": 0.0,
        "store": 0.0,
        "drive": 1.0,
    }
    text = layers.table(list(rows.values()))
    assert "| mount, stream, cold | 7.0 | 2.0 | 15.0 | 30.0 | 20.0 | 80.0 | 154.0 |" in text
    assert "| SDK, short cut, warm | 0.0 | 0.0 | 49.0 | 0.0 | 0.0 | 1.0 | 50.0 |" in text


@pytest.mark.smoke
def test_charts_are_drawn_from_any_numbers():
    sheet = drawing.Sheet("a & b")
    sheet.lines("nothing", [drawing.Line("none", [])])
    sheet.lines("lines", [drawing.Line("one", [(1, 0.0), (2, 5.0)], marked=2)], log_y=True)
    sheet.stacked("stacked", [("bar", [1.0, -2.0, 0.0])], ["a", "b", "c"], "µs")
    sheet.bars("bars", [("group", [0.0, 3.0])], ["a", "b"], "/s")
    xml.dom.minidom.parseString(sheet.svg())
