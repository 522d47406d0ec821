"""A mount's metrics page counts the requests of the kernel over all its processes, also after one of them was killed."""

import mmap
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor

import pytest
from prometheus_client.parser import text_string_to_metric_families

from nvpool.core.programs import Program
from nvpool.fuse.engines import RESEND_MIN, kernel_version
from tests.fuse.conftest import FLOOR, wait_until
from tests.fuse.kill_loads import processes

pytestmark = [
    pytest.mark.mount,
    pytest.mark.skipif(FLOOR, reason="the floor has no daemons"),
    pytest.mark.skipif(kernel_version() < RESEND_MIN, reason="this kernel does not hand requests out again"),
]

MIB = 1 << 20
READS, THREADS = 400, 8


def samples(address):
    with urllib.request.urlopen(f"http://{address}/metrics", timeout=20) as answer:
        text = answer.read().decode()
    done = subprocess.run(
        [shutil.which("promtool"), "check", "metrics"], input=text, text=True, capture_output=True, timeout=60
    )
    assert done.returncode == 0 and not done.stdout + done.stderr, done
    return {
        (sample.name, *sample.labels.values()): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def answers(address):
    try:
        return samples(address)
    except OSError:
        return None


def read_past_the_pages(path, count):
    """Reads of 4 KiB: each is one request of the kernel."""
    file, buffer = os.open(path, os.O_RDONLY | os.O_DIRECT), mmap.mmap(-1, 4096)
    try:
        for number in range(count):
            assert os.preadv(file, [buffer], number * 7919 % 1000 * 4096) == 4096
    finally:
        os.close(file)


def test_each_read_is_counted_once(own):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{probe.getsockname()[1]}"
    held = own.mount(
        own.directory.parent / "m-metrics",
        "--holder",
        "--workers",
        "2",
        "--metrics",
        address,
        "--drain-s",
        "2",
    )
    try:
        wait_until(lambda: re.search(r"process \d+ reads for this mount", held.log.read_text()), "the reader")
        (held.place / "read").write_bytes(os.urandom(4 * MIB))
        wait_until(lambda: answers(address), "the page")
        before, began_s = samples(address), time.monotonic()
        assert before["nvpool_mount_workers",] == 2 and before["nvpool_fuse_written_bytes_total",] >= 4 * MIB
        with ThreadPoolExecutor(THREADS) as threads:
            for done in [
                threads.submit(read_past_the_pages, held.place / "read", READS) for _ in range(THREADS)
            ]:
                done.result()
        took_s = time.monotonic() - began_s
        after = samples(address)
        count = after["nvpool_fuse_seconds_count", "read"] - before.get(
            ("nvpool_fuse_seconds_count", "read"), 0
        )
        assert count == READS * THREADS
        assert (
            after["nvpool_fuse_seconds_bucket", "read", "67.108864"]
            == after["nvpool_fuse_seconds_count", "read"]
        )
        spent_s = after["nvpool_fuse_seconds_sum", "read"] - before.get(
            ("nvpool_fuse_seconds_sum", "read"), 0
        )
        # a reader has one read at a time; twice, since the reads of a burst share their start
        assert 1e-6 * count < spent_s < 2 * THREADS * took_s
        grown = after["nvpool_fuse_read_bytes_total",] - before["nvpool_fuse_read_bytes_total",]
        assert grown >= count * 4096
        assert (
            sum(
                after["nvpool_client_reads_total", way]
                for way in ("store", "short_cut", "kept", "read_ahead")
            )
            > 0
        )

        (killed,) = processes(held.place, Program.MOUNT)
        os.kill(killed, signal.SIGKILL)
        wait_until(
            lambda: (answers(address) or {}).get(("nvpool_mount_workers",)) == 2, "its successor's page"
        )
        read_past_the_pages(held.place / "read", 10)
        assert samples(address)["nvpool_fuse_seconds_count", "read"] >= 10
    finally:
        assert held.end() == 0, held.log.read_text()
    assert answers(address) is None, "no server is left at the address"


def test_invalid_metrics_address_is_refused(own, tmp_path):
    said = subprocess.run(
        ["nvpool", "mount", str(own.directory), str(tmp_path), "--metrics", "here"],
        capture_output=True,
        text=True,
        timeout=60,
        env=os.environ | {"PATH": f"{os.path.dirname(sys.executable)}:{os.environ['PATH']}"},
    )
    assert said.returncode == 1 and "HOST:PORT" in said.stderr, said
