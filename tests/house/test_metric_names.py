"""Metrics: named by the conventions of Prometheus, exported and documented; alerts and documents name no others."""

import re
import shutil
import subprocess
from functools import cache
from pathlib import Path

import pytest

from nvpool.metrics import registry as metrics
from nvpool.metrics.exposition import Page
from nvpool.metrics.registry import METRICS

ROOT = Path(__file__).resolve().parents[2]
DECLARED = {name: value for name, value in vars(metrics).items() if isinstance(value, metrics.Metric)}
UNITS_THAT_ARE_NONE = re.compile(
    r"_(milliseconds|microseconds|ms|us|ns|kb|kib|mb|mib|gib|kilobytes|megabytes|minutes|percent)(_|$)"
)
LABELS = {
    "child",
    "direction",
    "error",
    "kind",
    "limit",
    "member",
    "op",
    "service",
    "shard",
    "state",
    "target",
    "transport",
    "version",
    "way",
}
"""Labels with few values, however many objects and clients a pool has."""
PROMTOOL = shutil.which("promtool")


@pytest.mark.parametrize("metric", METRICS.values(), ids=lambda metric: metric.name)
def test_metric_names_follow_the_conventions(metric):
    assert re.fullmatch(r"nvpool_[a-z][a-z0-9]*(_[a-z0-9]+)*", metric.name)
    assert metric.name.endswith("_total") == (metric.kind == "counter")
    assert not UNITS_THAT_ARE_NONE.search(metric.name), "base units: seconds, bytes"
    if metric.kind == "histogram":
        assert metric.name.endswith("_seconds"), "the buckets are of durations"
    assert not re.search(r"_(count|sum|bucket|gauge|counter|histogram)$", metric.name)
    assert set(metric.labels) <= LABELS and "process" not in metric.labels
    assert metric.help.endswith(".") and "|" not in metric.help and len(metric.help) > 10


def test_metric_names_are_declared_once():
    assert {metric.name for metric in DECLARED.values()} == set(METRICS) and len(DECLARED) == len(METRICS)


@cache
def exported():
    """Names of the registry that other modules use."""
    users = [
        path
        for path in (ROOT / "nvpool").rglob("*.py")
        if path.name != "registry.py" or path.parent.name != "metrics"
    ]
    return {name for path in users for name in re.findall(r"\bmetrics\.(\w+)", path.read_text())}


@pytest.mark.parametrize("name", DECLARED)
def test_declared_metrics_are_exported(name):
    assert name in exported(), f"nothing exports {name}"


def test_alerts_and_documents_name_declared_metrics():
    for path in (ROOT / "docs" / "operate" / "monitor.md", *(ROOT / "deploy" / "prometheus").iterdir()):
        for name in re.findall(r"\bnvpool_[a-z_0-9]+", path.read_text()):
            assert re.sub(r"_(bucket|sum|count)$", "", name) in METRICS or name in METRICS, (
                f"{path.name} names {name}"
            )


def promtool(*words, text=None):
    assert PROMTOOL, "promtool comes with Debian's package prometheus: make setup"
    return subprocess.run(
        [PROMTOOL, *map(str, words)], input=text, capture_output=True, text=True, timeout=120
    )


def test_promtool_accepts_configuration_and_alerts():
    for words in (("rules", "nvpool-alerts.yml"), ("config", "prometheus.yml")):
        done = promtool("check", words[0], ROOT / "deploy" / "prometheus" / words[1])
        assert done.returncode == 0 and "SUCCESS" in done.stdout, done.stdout + done.stderr


def test_promtool_accepts_a_page_of_all_metrics():
    page, times = Page(), metrics.Times()
    times.add(0.001)
    for metric in METRICS.values():
        labels = dict.fromkeys(metric.labels, "x")
        page.times(metric, times, **labels) if metric.kind == "histogram" else page.set(metric, 1, **labels)
    done = promtool("check", "metrics", text=page.text())
    assert done.returncode == 0 and not done.stderr and not done.stdout, done.stdout + done.stderr
    wrong = promtool("check", "metrics", text="# TYPE nvpool_x counter\nnvpool_x 1\n")
    assert wrong.returncode != 0, "promtool must report an invalid page"


def test_one_module_implements_http():
    users = [
        str(path.relative_to(ROOT / "nvpool"))
        for path in (ROOT / "nvpool").rglob("*.py")
        if "HTTP/1.1" in path.read_text()
    ]
    assert users == ["metrics/http.py"], (
        "HTTP belongs in the module that serves metrics, or in the adapter of aiohttp"
    )
