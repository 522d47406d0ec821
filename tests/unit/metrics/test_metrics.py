"""Metrics: buckets, labels, sums, exchange between processes, and the HTTP endpoint."""

import asyncio
import math
import socket

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families

from nvpool.core import config
from nvpool.core.config import parse_address
from nvpool.core.errors import CorruptFrame, InvalidRequest, NoSpace
from nvpool.metrics import http as metrics_http
from nvpool.metrics import registry as metrics
from nvpool.metrics.exposition import Page
from nvpool.metrics.registry import BOUNDS_S, SLOTS, Times
from nvpool.node.metrics import PolledProcess, node_page
from nvpool.rpc.api import Greeting
from nvpool.rpc.connection_pool import Dialer
from nvpool.rpc.stats import RpcStats, op_of
from nvpool.rpc.transport_registry import listen
from nvpool.rpc.v1.pool_pb2 import MetricsReply
from nvpool.rpc.v1.wire_pb2 import DATA_READ, DATA_WRITE
from nvpool.testing.env.etcd import free_ports


def families(page):
    return {family.name: family for family in text_string_to_metric_families(page.text())}


@given(st.lists(st.floats(0, 1000), max_size=50))
def test_each_duration_is_below_its_bound_and_in_no_lower_bucket(durations):
    times = Times()
    for seconds in durations:
        times.add(seconds)
    page = Page()
    page.times(metrics.CALL_SECONDS, times, op="data_read")
    samples = families(page)["nvpool_call_seconds"].samples
    buckets = {
        float(sample.labels["le"]): sample.value for sample in samples if sample.name.endswith("_bucket")
    }
    for bound, count in buckets.items():
        assert count == sum(seconds < bound for seconds in durations)
    assert list(buckets) == [*BOUNDS_S, math.inf]
    assert (
        {sample.name: sample.value for sample in samples}["nvpool_call_seconds_count"]
        == len(durations)
        == times.count
    )
    assert {sample.name: sample.value for sample in samples}["nvpool_call_seconds_sum"] == pytest.approx(
        sum(durations)
    )


def test_prometheus_parser_reads_a_page_back():
    page = Page()
    page.set(metrics.POOL_EPOCH, 12)
    page.set(metrics.BUILD_INFO, 1, version='a "quoted" \\ version\nof two lines')
    page.set(metrics.STORE_READ_BYTES, 2.0**53 - 1)
    page.set(metrics.STORE_LEASE, 1.5)
    page.set(metrics.SCRUB_ENDED, math.inf)
    read = families(page)
    assert read["nvpool_build_info"].samples[0].labels == {"version": 'a "quoted" \\ version\nof two lines'}
    assert (
        read["nvpool_pool_map_epoch"].type == "gauge" and read["nvpool_pool_map_epoch"].samples[0].value == 12
    )
    assert read["nvpool_store_read_bytes"].type == "counter"
    assert read["nvpool_store_read_bytes"].samples[0].value == 2.0**53 - 1
    assert read["nvpool_store_lease_left_seconds"].samples[0].value == 1.5
    assert read["nvpool_scrub_last_round_end_time_seconds"].samples[0].value == math.inf
    assert read["nvpool_pool_map_epoch"].documentation == metrics.POOL_EPOCH.help


def test_undeclared_labels_are_refused():
    with pytest.raises(KeyError):
        Page().set(metrics.POOL_CHAINS, 1)
    with pytest.raises(KeyError):
        Page().set(metrics.POOL_EPOCH, 1, path="/secret")


def test_pages_of_one_mount_are_summed():
    one, other = Page(), Page()
    for page, seconds in ((one, 0.001), (other, 0.1)):
        times = Times()
        times.add(seconds, 5)
        page.times(metrics.FUSE_SECONDS, times, op="read")
        page.set(metrics.FUSE_READ_BYTES, 4096)
        page.set(metrics.PROCESS_START, 1000)
    whole = Page()
    whole.add(one, process="target-1")
    whole.add(other, process="target-2")
    assert len(families(whole)["nvpool_fuse_read_bytes"].samples) == 2
    one.add(other, without=(metrics.PROCESS_START,))
    assert one.value(metrics.FUSE_READ_BYTES) == 8192 and one.value(metrics.FUSE_SECONDS, op="read") == 10
    assert one.value(metrics.PROCESS_START) == 1000


def test_packed_page_omits_metrics_unknown_to_the_receiver():
    page, times = Page(), Times()
    times.add(0.5)
    page.times(metrics.CALL_SECONDS, times, op="data_read")
    page.set(metrics.POOL_TARGETS, 3, state="up")
    assert Page.unpack(page.pack()).text() == page.text() != ""
    newer = msgspec.msgpack.encode(
        [
            [
                ("nvpool_of_tomorrow", [], 1.0),
                ("nvpool_pool_nodes", [], 2.0),
                ("nvpool_pool_map_epoch", [], (1.0, [0] * SLOTS)),
                ("nvpool_call_seconds", [("op", "x")], (1.0, [0] * 3)),
            ]
        ]
    )
    assert families(Page.unpack(newer)).keys() == {"nvpool_pool_nodes"}


@given(st.binary(max_size=60))
def test_invalid_page_is_refused_or_empty(raw):
    try:
        assert Page.unpack(raw).text() == ""
    except CorruptFrame:
        pass


def test_rpc_statistics_count_by_method_and_are_bounded():
    counters = RpcStats()
    answers = counters.over("stream")
    for method in (DATA_READ, DATA_READ, *range(100_000, 100_500)):
        answers.begun += 1
        answers.answered(method, 0.0001, NoSpace.wire_code if method == DATA_READ else 0, 10, 20)
    answers.begun += 1
    page = Page()
    counters.measure(page)
    assert len(answers.by_method) == 2
    assert page.value(metrics.REQUEST_SECONDS, op="data_read", transport="stream") == 2
    assert page.value(metrics.REQUEST_ERRORS, op="data_read", error="NoSpace") == 2
    assert page.value(metrics.REQUEST_BYTES, op="data_read", transport="stream", direction="out") == 40
    assert page.value(metrics.REQUESTS_IN_WORK, transport="stream") == 1
    assert op_of(DATA_WRITE) == "data_write" and op_of(77_777) == "unknown"


# -- over a transport --------------------------------------------------------------------------------------------------------


async def dialed(path, handler):
    greeting = Greeting("test")
    listener = await listen(f"stream+unix://{path}", greeting, handler)
    return listener, Dialer(greeting)


async def silent_and_speaking(tmp_path):
    def speak(call):
        page = Page()
        page.set(metrics.POOL_EPOCH, 5)
        call.reply(MetricsReply(page=page.pack()).SerializeToString())

    def nonsense(call):
        call.reply(MetricsReply(page=b"\xc1").SerializeToString())

    kept = []
    loop = asyncio.get_running_loop()
    listeners = [
        (await dialed(tmp_path / name, handler))[0]
        for name, handler in (("speaks", speak), ("silent", kept.append), ("nonsense", nonsense))
    ]
    dialer = Dialer(Greeting("test"))
    began = loop.time()
    page = await node_page(
        Page(),
        [
            *(
                PolledProcess(name, (f"stream+unix://{tmp_path / name}",), True)
                for name in ("speaks", "silent", "nonsense", "gone")
            ),
            PolledProcess("restarting", (f"stream+unix://{tmp_path / 'speaks'}",), False),
            PolledProcess("etcd-1", (), True),
        ],
        dialer,
        0.3,
    )
    took_s = loop.time() - began
    await dialer.close()
    for listener in listeners:
        await listener.close()
    return page, took_s, kept


def test_node_page_is_in_time_despite_silent_processes(tmp_path):
    page, took_s, kept = asyncio.run(silent_and_speaking(tmp_path))
    up = {sample.labels["process"]: sample.value for sample in families(page)["nvpool_up"].samples}
    assert up == {
        "supervisor": 1,
        "speaks": 1,
        "silent": 0,
        "nonsense": 0,
        "gone": 0,
        "restarting": 0,
        "etcd-1": 1,
    }
    assert [sample.labels for sample in families(page)["nvpool_pool_map_epoch"].samples] == [
        {"process": "speaks"}
    ]
    assert kept, "the silent process was queried"
    assert 0.25 < took_s < 1.5


# -- over HTTP ---------------------------------------------------------------------------------------------------------------


async def asked_by_http(requests, make_page, patience=None):
    """Replies to these byte strings, sent at the same time, each over its own connection."""
    port = free_ports(1)[0]
    serving = asyncio.ensure_future(metrics_http.serve_metrics(f"127.0.0.1:{port}", make_page))

    async def ask(raw):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(raw)
        try:
            return await asyncio.wait_for(reader.read(), patience or 10)
        finally:
            writer.close()

    for _ in range(100):
        try:
            _, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.close()
            break
        except OSError:
            await asyncio.sleep(0.01)
    try:
        return await asyncio.gather(*(ask(raw) for raw in requests), return_exceptions=True)
    finally:
        serving.cancel()
        await asyncio.gather(serving, return_exceptions=True)


def test_metrics_address_is_loopback_unless_a_host_is_named():
    for text, found, is_open in (
        ("9477", ("127.0.0.1", 9477), False),
        (":9477", ("127.0.0.1", 9477), False),
        ("127.0.0.1:9477", ("127.0.0.1", 9477), False),
        ("[::1]:9477", ("::1", 9477), False),
        ("localhost:9477", ("localhost", 9477), False),
        ("10.0.0.1:9477", ("10.0.0.1", 9477), True),
        ("0.0.0.0:9477", ("0.0.0.0", 9477), True),
        ("[::]:9477", ("::", 9477), True),
        ("gpu-1:9477", ("gpu-1", 9477), True),
        ("unix:/run/m.sock", ("/run/m.sock", 0), False),
    ):
        assert parse_address(text) == found and config.is_open(text) == is_open, text
    for text in ("", "x", "x:", ":0", "70000", "unix:", "unix:m.sock", "unix:/" + "m" * 107, "unix:/a\0b"):
        with pytest.raises(InvalidRequest, match="to listen on"):
            parse_address(text)


async def asked_at_socket(path):
    """The reply at a Unix socket and the socket's mode, while a second process wants the same path."""
    serving = asyncio.ensure_future(metrics_http.serve_metrics(f"unix:{path}", a_page))
    for _ in range(1000):
        try:
            reader, writer = await asyncio.open_unix_connection(str(path))
            break
        except OSError:
            await asyncio.sleep(0.01)
    second = asyncio.ensure_future(metrics_http.serve_metrics(f"unix:{path}", a_page))
    await asyncio.sleep(0.1)
    mode = path.stat().st_mode & 0o777
    writer.write(b"GET /metrics HTTP/1.1\r\n\r\n")
    answer = await reader.read()
    writer.close()
    for task in (serving, second):
        task.cancel()
    await asyncio.gather(serving, second, return_exceptions=True)
    return answer, mode


def test_metrics_at_a_unix_socket_are_for_owner_and_group(tmp_path):
    path = tmp_path / "m.sock"
    answer, mode = asyncio.run(asked_at_socket(path))
    assert b"200 OK" in answer and b"nvpool_scrape_seconds" in answer and mode == 0o660
    with socket.socket(socket.AF_UNIX) as left:  # by a process that was killed
        path.unlink(missing_ok=True)
        left.bind(str(path))
    assert b"200 OK" in asyncio.run(asked_at_socket(path))[0]


def test_metrics_open_to_other_machines_warn(caplog):
    async def begin():
        serving = asyncio.ensure_future(metrics_http.serve_metrics("0.0.0.0:1", a_page))
        await asyncio.sleep(0.05)
        serving.cancel()
        await asyncio.gather(serving, return_exceptions=True)

    asyncio.run(begin())
    assert "everybody who reaches 0.0.0.0:1 can read the metrics, without a password" in caplog.text


async def a_page(wait_s):
    page = Page()
    page.set(metrics.SCRAPE_SECONDS, wait_s)
    return page


def test_http_serves_only_the_metrics_path():
    said = asyncio.run(
        asked_by_http(
            [
                b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n",
                b"GET /metrics?x=1 HTTP/1.0\r\n\r\n",
                b"HEAD /metrics HTTP/1.1\r\n\r\n",
                b"GET / HTTP/1.1\r\n\r\n",
                b"GET /../etc/passwd HTTP/1.1\r\n\r\n",
                b"POST /metrics HTTP/1.1\r\n\r\nbody",
                b"GET /metrics HTTP/1.1\r\nX-Prometheus-Scrape-Timeout-Seconds: 0.5\r\n\r\n",
                b"GET /metrics HTTP/1.1\r\nX-Prometheus-Scrape-Timeout-Seconds: soon\r\n\r\n",
                b"\xff\x00 nonsense\r\n\r\n",
                b"x" * 100_000,
            ],
            a_page,
        )
    )
    page, with_query, head, root, outside, post, hurried, wrong, nonsense, long = said
    assert page.startswith(b"HTTP/1.1 200 OK\r\nContent-Type: text/plain; version=0.0.4")
    assert b"nvpool_scrape_seconds 2\n" in page
    length = int(page.partition(b"Content-Length: ")[2].partition(b"\r\n")[0])
    assert len(page.partition(b"\r\n\r\n")[2]) == length
    assert with_query == page and wrong == page
    assert head == page.partition(b"\r\n\r\n")[0] + b"\r\n\r\n"
    assert b"nvpool_scrape_seconds 0.25\n" in hurried
    assert (
        root.startswith(b"HTTP/1.1 404")
        and outside.startswith(b"HTTP/1.1 404")
        and post.startswith(b"HTTP/1.1 405")
    )
    assert nonsense.startswith(b"HTTP/1.1 405") and (isinstance(long, ConnectionError) or long == b"")


def test_http_closes_incomplete_and_excess_connections(monkeypatch):
    monkeypatch.setattr(metrics_http, "REQUEST_S", 0.3)
    monkeypatch.setattr(metrics_http, "CONNECTIONS_MAX", 3)
    said = asyncio.run(asked_by_http([b"GET /metr"] * 8, a_page, patience=5))
    assert all(isinstance(one, ConnectionError) or one == b"" for one in said), said


def test_page_that_fails_is_answered_with_500(caplog):
    async def broken(wait_s):
        raise InvalidRequest("no")

    said = asyncio.run(asked_by_http([b"GET /metrics HTTP/1.1\r\n\r\n"], broken))
    assert said[0].startswith(b"HTTP/1.1 500") and "metrics could not be collected" in caplog.text
