"""Checks of `nvpool doctor rdma`: devices, links, limits, kernel, UCX.

The checks read /sys, /proc and /dev below `root`, and change nothing. A machine without RDMA is ok.
"""

from __future__ import annotations

import os
import resource
from collections.abc import Iterator
from pathlib import Path

from nvpool.cli.doctor.check_results import BAD, OK, WARN, Check
from nvpool.core.errors import NvpoolError
from nvpool.core.units import format_bytes
from nvpool.rpc.transports import ucx
from nvpool.rpc.transports.rdma_buffers import PROCESS_BYTES_MAX

_MODULES = ("ib_core", "ib_uverbs")
"""Kernel modules that every RDMA program needs; the drivers of the cards provide the devices."""


def checks(root: Path = Path("/")) -> Iterator[Check]:
    devices = _names(root / "sys/class/infiniband")
    yield _devices(root, devices)
    for device in devices:
        for port in _names(root / "sys/class/infiniband" / device / "ports"):
            yield _link(root / "sys/class/infiniband" / device / "ports" / port, f"{device}:{port}")
    yield _kernel(root, bool(devices))
    yield _memlock(resource.getrlimit(resource.RLIMIT_MEMLOCK)[0], bool(devices))
    yield from _ucx(bool(devices))


def _names(place: Path) -> list[str]:
    try:
        return sorted(os.listdir(place))
    except OSError:
        return []


def _text(place: Path) -> str:
    try:
        return place.read_text(errors="replace").strip()
    except OSError:
        return ""


def _devices(root: Path, devices: list[str]) -> Check:
    if not devices:
        return Check(
            "devices", OK, "no InfiniBand or RoCE device in /sys/class/infiniband: other transports are used"
        )
    described = [
        f"{device} ({_text(root / 'sys/class/infiniband' / device / 'board_id') or 'unknown board'}, firmware "
        f"{_text(root / 'sys/class/infiniband' / device / 'fw_ver') or 'unknown'})"
        for device in devices
    ]
    return Check("devices", OK, ", ".join(described))


def _link(port: Path, name: str) -> Check:
    state, rate, layer = (_text(port / file) for file in ("state", "rate", "link_layer"))
    seen = f"{state.partition(': ')[2] or state or 'unknown'}, {rate or 'unknown rate'}, {layer or 'unknown layer'}"
    if not state.startswith("4"):
        return Check(
            f"link {name}",
            BAD,
            seen,
            "plug in the cable or bring the interface up (ip link set … up); InfiniBand "
            "needs a subnet manager too (opensm, or the switch's)",
        )
    if layer == "Ethernet" and not any(
        "v2" in _text(port / "gid_attrs/types" / index) for index in _names(port / "gid_attrs/types")
    ):
        return Check(
            f"link {name}",
            WARN,
            f"{seen}, no address for RoCE v2",
            "give the interface an IP address and switch on RoCE v2; version 1 is not routed",
        )
    return Check(f"link {name}", OK, seen)


def _kernel(root: Path, wanted: bool) -> Check:
    loaded = {line.split()[0] for line in _text(root / "proc/modules").splitlines() if line.strip()}
    loaded |= {name for name in _MODULES if (root / "sys/module" / name).is_dir()}
    cards = sorted(
        name for name in loaded if name.endswith(("_ib", "rdma", "_re")) and not name.startswith("ib_")
    )
    missing = [name for name in _MODULES if name not in loaded]
    nodes = [name for name in _names(root / "dev/infiniband") if name.startswith("uverbs")]
    seen = (
        f"modules {', '.join([name for name in _MODULES if name in loaded] + cards) or 'none'}; "
        f"/dev/infiniband: {', '.join(nodes) or 'nothing'}"
    )
    if not wanted:
        return Check("kernel", OK, seen)
    if missing or not nodes:
        return Check(
            "kernel", BAD, seen, f"modprobe {' '.join(missing or _MODULES)}; give a container /dev/infiniband"
        )
    closed = [name for name in nodes if not os.access(root / "dev/infiniband" / name, os.R_OK | os.W_OK)]
    if closed:
        return Check(
            "kernel",
            BAD,
            f"{seen}; not for this user: {', '.join(closed)}",
            "add the daemons' user to the group of /dev/infiniband/uverbs*",
        )
    return Check("kernel", OK, seen)


def _memlock(limit: int, wanted: bool) -> Check:
    seen = "unlimited" if limit == resource.RLIM_INFINITY else format_bytes(limit)
    if limit == resource.RLIM_INFINITY or limit >= PROCESS_BYTES_MAX:
        return Check("memlock", OK, f"{seen} may be locked by a process of this session")
    return Check(
        "memlock",
        BAD if wanted else OK,
        f"{seen} may be locked by a process of this session, for RDMA "
        f"{format_bytes(PROCESS_BYTES_MAX)} are used",
        "LimitMEMLOCK=infinity in the unit, or "
        "`* - memlock unlimited` in /etc/security/limits.d/nvpool.conf and log in again"
        if wanted
        else "",
    )


def _ucx(wanted: bool) -> Iterator[Check]:
    if reason := ucx.missing():
        said, _, remedy = reason.partition("; ")
        yield Check("UCX", BAD if wanted else OK, said, remedy)
        return
    library = ucx.library()
    assert library is not None  # else `missing` gave a reason
    place, verbs = library
    try:
        version = ucx.version()
    except NvpoolError as error:
        yield Check("UCX", BAD, str(error), "reinstall it: pip install --force-reinstall 'nvpool[rdma]'")
        return
    seen = f"{version} in {place}, {'with' if verbs else 'without'} verbs"
    if wanted and not verbs:
        yield Check(
            "UCX",
            BAD,
            seen,
            "install a UCX that knows these devices: apt install libucx0 ibverbs-providers, or the "
            "card's vendor's; it is preferred then",
        )
    else:
        yield Check("UCX", OK, seen)
    for name, transports, needed in (
        ("within the host", ucx.LOCAL, False),
        ("over the network", ucx.NETWORK, wanted),
    ):
        try:
            ucx.context(transports)
            yield Check(f"UCX {name}", OK, f"{transports} can be used")
        except NvpoolError as error:
            yield Check(
                f"UCX {name}",
                BAD if needed else OK,
                str(error),
                "see the lines above; `ucx_info -d` of the same UCX shows more" if needed else "",
            )
