"""Metrics of a process, sent in reply to PROCESS_METRICS.

A process answers that request at the endpoints where it serves anyway.

Used by runtime/daemon_lifecycle, node/supervisor and the processes of a mount.
"""

from __future__ import annotations

import os
import resource
from collections.abc import Callable
from functools import cache

from google.protobuf.message import DecodeError

from nvpool.core.clock import SYSTEM_CLOCK
from nvpool.core.errors import InvalidRequest
from nvpool.core.version import VERSION
from nvpool.metrics import registry as metrics
from nvpool.metrics.exposition import Page
from nvpool.rpc.api import Call
from nvpool.rpc.stats import RPC_STATS
from nvpool.rpc.v1.pool_pb2 import MetricsReply, MetricsRequest

Measure = Callable[[Page], None]


def own_page(measure: Measure = lambda page: None) -> Page:
    """Metrics page of this process; `measure` adds the metrics of its role."""
    page = Page()
    page.set(metrics.BUILD_INFO, 1, version=VERSION)
    spent = resource.getrusage(resource.RUSAGE_SELF)
    page.set(metrics.PROCESS_CPU, spent.ru_utime + spent.ru_stime)
    page.set(metrics.PROCESS_START, _began_s())
    page.set(metrics.PROCESS_DESCRIPTORS_MAX, resource.getrlimit(resource.RLIMIT_NOFILE)[0])
    try:
        with open("/proc/self/statm") as file:
            page.set(metrics.PROCESS_MEMORY, int(file.read().split()[1]) * resource.getpagesize())
        page.set(metrics.PROCESS_DESCRIPTORS, len(os.listdir("/proc/self/fd")) - 1)
    except (OSError, ValueError, IndexError):
        pass  # no free descriptor to read /proc with
    RPC_STATS.measure(page)
    measure(page)
    return page


@cache
def _began_s() -> float:
    """Start time of the process; proc(5): field 22 is the start in ticks since boot."""
    try:
        with open("/proc/self/stat", "rb") as file:
            ticks = int(file.read().rpartition(b")")[2].split()[19])
    except (OSError, ValueError, IndexError):
        return 0.0
    return round(
        SYSTEM_CLOCK.wall_ns() / 1e9 - SYSTEM_CLOCK.boottime_s() + ticks / os.sysconf("SC_CLK_TCK"), 2
    )


def answer(call: Call, measure: Measure) -> None:
    """Answer PROCESS_METRICS for this process alone."""
    call.reply(MetricsReply(page=own_page(measure).pack()).SerializeToString())


def read_request(call: Call) -> MetricsRequest:
    try:
        return MetricsRequest.FromString(bytes(call.message))
    except DecodeError:
        raise InvalidRequest("not a MetricsRequest") from None
