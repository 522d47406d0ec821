"""The metrics of a process, which it tells by PROCESS_METRICS at the endpoints that it serves at anyway.

Called by runtime/service, node/supervisor and the processes of a mount.
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
from nvpool.rpc.stats import TALLY
from nvpool.rpc.v1.pool_pb2 import MetricsReply, MetricsRequest

Measure = Callable[[Page], None]


def own_page(measure: Measure = lambda page: None) -> Page:
    """Of this process; `measure` puts what it does on it."""
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
        pass  # no descriptor left to look with
    TALLY.measure(page)
    measure(page)
    return page


@cache
def _began_s() -> float:
    """proc(5): ticks since the boot are the 22nd field."""
    try:
        with open("/proc/self/stat", "rb") as file:
            ticks = int(file.read().rpartition(b")")[2].split()[19])
    except (OSError, ValueError, IndexError):
        return 0.0
    return round(SYSTEM_CLOCK.wall_ns() / 1e9 - SYSTEM_CLOCK.boottime_s() + ticks / os.sysconf("SC_CLK_TCK"), 2)


def answer(call: Call, measure: Measure) -> None:
    """PROCESS_METRICS, of this process alone."""
    call.reply(MetricsReply(page=own_page(measure).pack()).SerializeToString())


def read_request(call: Call) -> MetricsRequest:
    try:
        return MetricsRequest.FromString(bytes(call.message))
    except DecodeError:
        raise InvalidRequest("not a MetricsRequest") from None
