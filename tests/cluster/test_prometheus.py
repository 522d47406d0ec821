"""Real processes and Debian's Prometheus: a node's metrics page is in time while processes are stopped or killed."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import urllib.error
import urllib.parse
import urllib.request
from contextlib import contextmanager
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from nvpool.core.clock import SYSTEM_CLOCK
from nvpool.core.units import KIB, MIB
from nvpool.testing.env.etcd import free_ports
from nvpool.testing.env.pool import RealPool, end_process

NVPOOL = os.path.join(os.path.dirname(sys.executable), "nvpool")
ALERTS = Path(__file__).resolve().parents[2] / "deploy" / "prometheus" / "nvpool-alerts.yml"


def fetch(url: str, timeout_s: float = 20.0) -> str | None:
    """None while no server answers."""
    try:
        with urllib.request.urlopen(url, timeout=timeout_s) as answer:
            return answer.read().decode()
    except (OSError, urllib.error.URLError):
        return None


def page(port: int) -> dict[str, list]:
    """Samples by name."""
    found: dict[str, list] = {}
    for family in text_string_to_metric_families(fetch(f"http://127.0.0.1:{port}/metrics") or ""):
        for sample in family.samples:
            found.setdefault(sample.name, []).append(sample)
    return found


def up(port: int) -> dict[str, float]:
    return {sample.labels["process"]: sample.value for sample in page(port).get("nvpool_up", [])}


def value(samples: dict[str, list], name: str, **labels: str) -> float:
    return sum(sample.value for sample in samples.get(name, []) if labels.items() <= sample.labels.items())


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    """A pool with two copies and a metrics page, and its port."""
    port = free_ports(1)[0]
    config = f'[metrics]\nlisten = "127.0.0.1:{port}"\n[store]\nshort_cut = false\n'
    with RealPool(
        tmp_path_factory.mktemp("measured") / "pool", sizes=(96 * MIB,) * 2, replicas=2, config=config
    ) as pool:
        pool.make()
        pool.start()
        yield pool, port


@pytest.mark.smoke
def test_page_counts_reads_and_writes(measured):
    pool, port = measured
    client = pool.connect(60.0)
    before = page(port)
    content = os.urandom(2 * MIB)
    client.write_bytes("/file", content)
    with client.open("/file", "r+b", buffering=0) as file:
        file.fsync()
        for number in range(100):
            file.seek(number * 4 * KIB)
            assert file.read(4 * KIB) == content[number * 4 * KIB : (number + 1) * 4 * KIB]
    after = page(port)

    def grown(name: str, **labels: str) -> float:
        return value(after, name, **labels) - value(before, name, **labels)

    assert grown("nvpool_store_read_bytes_total") >= 100 * 4 * KIB
    assert grown("nvpool_request_bytes_total", op="data_write", direction="in") >= len(content)
    assert grown("nvpool_request_bytes_total", op="data_peer_write", direction="in") >= len(content)
    assert grown("nvpool_request_seconds_count", op="data_read") > 0
    assert grown("nvpool_meta_changes_total") >= 1 and grown("nvpool_store_flushes_total") >= 1
    assert value(after, "nvpool_meta_sessions") >= 1 and value(after, "nvpool_meta_inodes") >= 2
    assert (
        value(after, "nvpool_pool_chains", state="full") == 1024
        and value(after, "nvpool_pool_chains", state="fewer") == 0
    )
    assert value(after, "nvpool_target_chains", target="1", state="holds") == 1024
    assert value(after, "nvpool_store_used_bytes") >= 2 * len(content)
    assert up(port).keys() == {"supervisor", "target-1", "target-2"} | {
        one for one in up(port) if one.startswith("meta-")
    }


def test_page_is_in_time_while_a_process_is_stopped(measured):
    pool, port = measured
    pid = pool.pid("target-2")
    os.kill(pid, signal.SIGSTOP)
    try:
        began_s = SYSTEM_CLOCK.boottime_s()
        seen = up(port)
        took_s = SYSTEM_CLOCK.boottime_s() - began_s
        assert seen["target-2"] == 0 and seen["target-1"] == seen["supervisor"] == 1
        assert took_s < 8.0, f"{took_s:.1f} s; Prometheus waits for ten"
        said = subprocess.run(
            [NVPOOL, "metrics", str(pool.path), "--wait", "0.5"], capture_output=True, text=True, timeout=60
        )
        assert 'nvpool_up{process="target-2"} 0' in said.stdout, said
    finally:
        os.kill(pid, signal.SIGCONT)
    pool.until(lambda: up(port).get("target-2") == 1, "it is up again")
    restarts = value(page(port), "nvpool_child_restarts_total", child="target-1")
    end_process(pool.pid("target-1"))
    pool.until(
        lambda: value(page(port), "nvpool_child_restarts_total", child="target-1") == restarts + 1,
        "the page shows the restart",
    )
    pool.until(lambda: up(port).get("target-1") == 1, "the next process answers")
    pool.until(lambda: value(page(port), "nvpool_pool_chains", state="full") == 1024, "all is whole again")


def test_page_returns_after_a_kill_of_the_supervisor(measured):
    pool, port = measured
    end_process(pool.pid("supervisor"))
    pool.until(
        lambda: up(port).get("supervisor") == 1 and set(up(port).values()) == {1.0},
        "the new supervisor reports all processes",
    )


@contextmanager
def prometheus(place: Path, node: int):
    """Debian's Prometheus with the deployed alerts, which scrapes this node every half second; yields its address."""
    program = shutil.which("prometheus")
    assert program, "Debian's package prometheus is missing: make setup"
    place.mkdir()
    (place / "prometheus.yml").write_text(
        f"global: {{scrape_interval: 500ms, evaluation_interval: 1s}}\nrule_files: [{ALERTS}]\n"
        f"scrape_configs:\n  - job_name: nvpool\n    scrape_timeout: 500ms\n"
        f'    static_configs: [{{targets: ["127.0.0.1:{node}"]}}]\n'
    )
    port = free_ports(1)[0]
    with open(place / "log", "wb") as log:
        running = subprocess.Popen(
            [
                program,
                f"--config.file={place}/prometheus.yml",
                f"--storage.tsdb.path={place}/records",
                f"--web.listen-address=127.0.0.1:{port}",
            ],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            cwd=place,
        )
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        running.terminate()
        try:
            running.wait(30)
        except subprocess.TimeoutExpired:
            running.kill()
            running.wait()


def run_query(address: str, query: str) -> dict[str, float]:
    """Values by the `process` label, or "" where there is none."""
    text = fetch(f"{address}/api/v1/query?" + urllib.parse.urlencode({"query": query}))
    found = json.loads(text)["data"]["result"] if text else []
    return {one["metric"].get("process", ""): float(one["value"][1]) for one in found}


def test_prometheus_scrapes_the_page_and_evaluates_alerts(measured, tmp_path):
    pool, port = measured
    client = pool.connect(60.0)
    client.write_bytes("/read", os.urandom(MIB))
    with prometheus(tmp_path / "prometheus", port) as address:
        pool.until(
            lambda: run_query(address, 'up{job="nvpool"}') == {"": 1.0},
            "Prometheus has scraped the page once",
            60,
        )
        before = run_query(address, "sum(nvpool_store_read_bytes_total)")[""]

        def read() -> bool:
            with client.open("/read", "rb", buffering=0) as file:
                for number in range(200):
                    file.seek(number * 4 * KIB)
                    assert len(file.read(4 * KIB)) == 4 * KIB
            return True

        read()
        pool.until(
            lambda: run_query(address, "sum(nvpool_store_read_bytes_total)")[""] >= before + 200 * 4 * KIB,
            "it knows of what was read",
            60,
        )
        median = (
            'histogram_quantile(0.5, sum by (le) (rate(nvpool_request_seconds_bucket{op="data_read"}[1m])))'
        )
        pool.until(
            lambda: read() and 0 < run_query(address, median).get("", 0) < 1.0,
            "it reckons with the histogram",
            60,
        )
        assert run_query(address, "nvpool_up") == dict.fromkeys(up(port), 1.0)

        os.kill(pool.pid("target-1"), signal.SIGSTOP)
        try:
            pool.until(
                lambda: run_query(address, "nvpool_up").get("target-1") == 0,
                "Prometheus sees the silent process",
                60,
            )
            assert run_query(address, 'up{job="nvpool"}') == {"": 1.0}, "the page itself came in time"
            pool.until(
                lambda: any(
                    alert["labels"]["alertname"] == "NvpoolProcessDown"
                    and alert["labels"]["process"] == "target-1"
                    for alert in json.loads(fetch(f"{address}/api/v1/alerts"))["data"]["alerts"]
                ),
                "an alert is pending",
                60,
            )
        finally:
            os.kill(pool.pid("target-1"), signal.SIGCONT)
        pool.until(
            lambda: run_query(address, "nvpool_up").get("target-1") == 1, "the process answers again", 60
        )
