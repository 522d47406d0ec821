"""Benchmarks of several nodes: their verdicts, and clean-up after an interruption."""

import importlib
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from nvpool.testing.env import etcd as real_etcd
from nvpool.testing.env import namespaces

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "bench"))
contract, failures, nodes = (
    importlib.import_module(name) for name in ("subjects.contract", "failures", "nodes")
)
sys.path.remove(str(ROOT / "bench"))

needs_machines = [
    pytest.mark.skipif(bool(namespaces.missing()), reason=namespaces.missing() or ""),
    pytest.mark.skipif(bool(real_etcd.missing()), reason=real_etcd.missing() or ""),
]
HEAD = {"date": "today", "machine": "one", "commit": "c", "rounds": 3, "seconds": 6.0, "busy_before": 0.01}


@pytest.mark.parametrize(
    "program, begun",
    [
        pytest.param("nodes.py", "floor 1", marks=needs_machines),
        pytest.param("failures.py", "nothing", marks=needs_machines),
    ],
)
def test_interrupted_bench_leaves_nothing_running(tmp_path, program, begun):
    place = tmp_path / "bench"
    command = [sys.executable, ROOT / "bench" / program, "--quick", "--directory", place]
    bench = subprocess.Popen(
        list(map(str, command)), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        while begun not in (line := bench.stderr.readline()):
            assert line, "the bench ended before its first result"
        bench.send_signal(signal.SIGINT)
        bench.send_signal(signal.SIGINT)  # an impatient second Ctrl-C
        assert "interrupted" in bench.communicate(timeout=240)[1]
    finally:
        bench.kill()
        bench.wait()
    assert list(place.iterdir()) == []
    assert contract.marked(place) == [] and contract.mounted_below(place) == []


@pytest.mark.smoke
def test_shares_and_ratios_are_compared_with_goals():
    rows = [
        {
            "nodes": count,
            "mib_s": 50.0 * count * share,
            "floor_mib_s": 50.0 * count,
            "of_linear": share,
            "busy": 0.3,
        }
        for count, share in ((1, 1.0), (2, 0.97), (4, 0.94))
    ]
    even = {"case": "one added", "chunks": 100, "moved": 27, "least": 25.0, "used": [0.30, 0.32, 0.34]}
    uneven = even | {"moved": 28, "used": [0.30, 0.36]}
    text = nodes.markdown(
        HEAD | {"scaling": {"rate_mib_s": 50.0, "rows": rows}, "balance": {"rows": [even, uneven]}}
    )
    assert "0.97 of 0.95 ✓" in text and "0.94 of 0.95 ✗" in text
    assert (
        "1.08 of 1.1 ✓" in text
        and "1.12 of 1.1 ✗" in text
        and "4.00 of 5 ✓" in text
        and "6.00 of 5 ✗" in text
    )


def test_growth_is_compared_with_the_drives_share():
    rows = [
        {"what": "read", "before": 20.0, "after": 29.4, "share": 0.5, "busy": 0.5},
        {"what": "write", "before": 20.0, "after": 28.0, "share": 0.5, "busy": 0.97},
    ]
    text = nodes.markdown(HEAD | {"growth": {"rate_mib_s": 10.0, "rows": rows}})
    assert "47% of 50% | 0.94 of 0.9 ✓ | 50% |" in text
    assert "40% of 50% | 0.80 of 0.9 ✗ | 97% (they were the limit) |" in text


def test_pauses_count_from_detection_or_from_failure():
    def seen(pause, detected):
        return {
            "detected_s": detected,
            "whole_s": 5.0,
            "pauses_s": {"read": pause, "write": 4.5, "create": 0.2},
        }

    target = failures.summary("target stopped", [seen(3.5, 2.9), seen(4.2, 3.0)])
    assert (
        target["worst_s"]["read"] == 4.2
        and target["after_s"]["read"] == pytest.approx(1.2)
        and target["detected_s"] == 3.0
    )
    primary = failures.summary("metadata primary killed", [seen(4.9, 1.0)])
    floor = failures.summary("nothing", [seen(0.1, None) | {"whole_s": None}])
    text = failures.markdown(
        HEAD | {"cases": [floor, target, primary], "wrong": "", "operations": {"read": 1234}}
    )
    assert (
        "1.20 of 1 ✗ · 1.60" in text
        and "in all 4.90 of 5 ✓" in text
        and "| nothing | 1 | 0.10 (0.10) |" in text
    )
