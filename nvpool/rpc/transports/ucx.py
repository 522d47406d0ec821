"""UCX library of the transport `rdma`: library search, settings, and one Context per choice of UCX
transports.

UCX comes with the wheel libucx (`nvpool[rdma]`), which has shared memory and TCP but no verbs, or with the
system (Debian: libucx0, or the network card's vendor). The system's UCX is preferred if it supports
InfiniBand and RoCE. Nothing is loaded before a Context is requested. The settings make UCX leave signals
alone, start no file system of its own, and bound its cache of registered memory. This is the only user of
_ucx.
"""

from __future__ import annotations

import glob
import logging
import os
import re
from collections import OrderedDict
from importlib.util import find_spec
from typing import Any

from nvpool.core.compiled_loader import PURE_VARIABLE, load_compiled
from nvpool.core.errors import BadConfiguration, NotSupported

# None in a process without compiled modules.
_ucx: Any = load_compiled("nvpool.rpc.transports._ucx")

log = logging.getLogger(__name__)

LOCAL = "posix,sysv,self"
"""UCX transports within a host: shared memory."""
NETWORK = "ib,self"
"""UCX transports that use InfiniBand and RoCE devices."""
_VERBS = ("ib", "rc", "ud", "dc")
TRANSPORTS = re.compile(r"[a-z0-9_]+(,[a-z0-9_]+){0,15}")
DEVICES = re.compile(r"[A-Za-z0-9_.-]+(:[0-9]+)?(,[A-Za-z0-9_.-]+(:[0-9]+)?){0,15}")

_ENVIRONMENT = {
    "UCX_HANDLE_ERRORS": "none",
    "UCX_ERROR_SIGNALS": "",
    "UCX_VFS_ENABLE": "n",
    "UCX_WARN_UNUSED_ENV_VARS": "n",
    "UCX_LOG_LEVEL": "fatal",
}
"""Environment that UCX reads when it is loaded. UCX returns errors as statuses, and nvpool logs them."""
RCACHE_BYTES_MAX = 256 << 20
RCACHE_REGIONS_MAX = 4096
"""Most store buffers that UCX keeps registered after it has sent from them."""
_SYSTEM = (
    "/usr/lib/x86_64-linux-gnu",
    "/usr/lib/aarch64-linux-gnu",
    "/usr/lib64",
    "/usr/lib",
    "/opt/ucx/lib",
    "/usr/local/lib",
)
_CONTEXTS_MAX = 4
_loaded_by = 0
"""Process that has loaded UCX. Its forked children can neither use UCX nor free what they inherited."""
_contexts: OrderedDict[tuple[str, str], Any] = OrderedDict()

Error: type[Exception] = _ucx.UcxError if _ucx is not None else NotSupported
if _ucx is not None:
    Endpoint, Flush, Key, Place, Slab, Worker = (
        _ucx.UcxEndpoint,
        _ucx.UcxFlush,
        _ucx.RemoteKey,
        _ucx.Region,
        _ucx.Slab,
        _ucx.UcxWorker,
    )


def library() -> tuple[str, bool] | None:
    """Return the directory of UCX's libraries and whether they support verbs. None if there are none.

    The order is: the system's libraries if they support verbs, the wheel's, the system's.
    """
    system = next((place for place in _SYSTEM if os.path.exists(f"{place}/libucp.so.0")), "")
    if system and glob.glob(f"{system}/ucx/libuct_ib*.so*"):
        return system, True
    wheel = find_spec("libucx")
    if wheel is not None and wheel.submodule_search_locations:
        place = os.path.join(next(iter(wheel.submodule_search_locations)), "lib")
        if os.path.exists(f"{place}/libucp.so.0"):
            return place, bool(glob.glob(f"{place}/ucx/libuct_ib*.so*"))
    return (system, False) if system else None


def missing() -> str:
    """Reason why this process cannot use UCX, with the remedy; "" if it can. Loads nothing."""
    if _ucx is None:
        return f"this process runs without compiled modules, so without UCX; unset {PURE_VARIABLE}"
    if _loaded_by not in (0, os.getpid()):
        return "this process was forked from one that uses UCX"
    if library() is None:
        return "UCX is not installed; pip install 'nvpool[rdma]', or the system's UCX where there are network cards for RDMA"
    return ""


def _load() -> None:
    global _loaded_by
    reason, found = missing(), library()
    if reason or found is None:
        raise NotSupported(reason)
    place, _ = found
    for name, value in _ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    try:
        _ucx.load(*(f"{place}/lib{name}.so.0" for name in ("ucs", "uct", "ucp")))
    except _ucx.UcxError as error:
        raise NotSupported(f"UCX in {place} cannot be used: {error}") from None
    _loaded_by = os.getpid()


def version() -> str:
    """Version of the library that is or would be used. NotSupported: there is none."""
    _load()
    found: str = _ucx.version()
    return found


def context(transports: str, devices: str = "all") -> Any:
    """UCX context with these transports over these devices; equal arguments give the same context.

    NotSupported: this host has none of them. BadConfiguration: an argument is not a valid name.
    """
    if not TRANSPORTS.fullmatch(transports) or not DEVICES.fullmatch(devices):
        raise BadConfiguration(
            f"{transports!r} over {devices!r} are no names of UCX's transports and devices"
        )
    _load()
    known = _contexts.get((transports, devices))
    if known is None:
        settings = {"TLS": transports, "NET_DEVICES": devices}
        if any(name.startswith(_VERBS) for name in transports.split(",")):
            # UCX ignores transports that it does not have, and would report that to the first peer only.
            found = library()
            if found is None or not found[1]:
                raise NotSupported("this UCX was built without verbs")
            if not os.path.isdir("/sys/class/infiniband") or not os.listdir("/sys/class/infiniband"):
                raise NotSupported("this host has no InfiniBand or RoCE device")
            settings |= {
                "RCACHE_MAX_SIZE": str(RCACHE_BYTES_MAX),
                "RCACHE_MAX_REGIONS": str(RCACHE_REGIONS_MAX),
            }
        try:
            known = _ucx.Context(settings)
        except _ucx.UcxError as error:
            raise NotSupported(f"UCX has no {transports} here ({error})") from None
        while len(_contexts) >= _CONTEXTS_MAX:  # contexts in use stay alive with their users
            _contexts.popitem(last=False)
        _contexts[transports, devices] = known
    return known
