"""Doctor checks of a machine: kernel, FUSE, limits, clock, memory, processors, network.

`nvpool doctor` calls `machine`. Each function checks one thing and returns its Check. A function that reads
files reads them below `root`, so that tests can pass a tree of their own.
"""

from __future__ import annotations

import ctypes
import errno
import os
import re
import resource
import shutil
import socket
from collections.abc import Iterator
from pathlib import Path

from nvpool.cli.doctor.check_results import OK, Check, all_of, bad, ok, warn
from nvpool.core.compiled_loader import IS_PURE, PURE_VARIABLE
from nvpool.core.units import GIB, format_bytes

KERNEL_MIN, RESEND_MIN = (5, 4), (6, 9)
"""First kernels with the direct engine, and with all features of mounts with a holder; see fuse/engines."""
FILES_MIN, FILES_GOOD = 4096, 65536
MEMLOCK_GOOD = 64 << 20
PROCESSES_MIN = 4096
MEMORY_MIN = 2 * GIB
LINK_MBIT_GOOD = 10_000
RETRANSMITTED_MAX = 0.001
SEGMENTS_MIN = 100_000
_SLOW_CLOCKS = ("hpet", "acpi_pm", "jiffies", "refined-jiffies", "pit")
_STA_UNSYNC = 0x40
_IO_URING_SETUP = 425


def kernel(release: str) -> Check:
    found = re.match(r"(\d+)\.(\d+)", release)
    version = (int(found[1]), int(found[2])) if found else (0, 0)
    if version < KERNEL_MIN:
        return warn(
            "kernel",
            f"Linux {release}",
            "mounts go through libfuse (--engine pyfuse3) and are slower; 5.4 is the "
            "first for the direct engine, by which mounts outlive their process",
        )
    if version < RESEND_MIN:
        return warn(
            "kernel",
            f"Linux {release}",
            "a mount outlives its process, but is slower and has one process; from Linux "
            "6.9 on it has all its ways",
        )
    return ok("kernel", f"Linux {release}: mounts outlive their process; passthrough is there and not used")


def fuse_device(root: Path) -> Check:
    place = root / "dev/fuse"
    if not place.exists():
        return bad(
            "fuse",
            f"there is no {place}",
            "modprobe fuse; a container needs --device /dev/fuse --cap-add SYS_ADMIN",
        )
    try:
        os.close(os.open(place, os.O_RDWR))
    except OSError as error:
        return bad(
            "fuse",
            f"{place} cannot be opened: {error.strerror}",
            "let root mount the pool, or: chmod 666 /dev/fuse",
        )
    return ok("fuse", f"{place} can be opened")


def request_pages(root: Path) -> Check:
    try:
        pages = int((root / "proc/sys/fs/fuse/max_pages_limit").read_text())
    except FileNotFoundError:
        return ok("fuse requests", "up to 1 MiB, as this kernel has it")
    if pages < 256:
        return warn("fuse requests", f"at most {pages} pages", "sysctl fs.fuse.max_pages_limit=256")
    return ok("fuse requests", f"up to {pages} pages")


def fusermount(path: str | None = None) -> Check:
    if shutil.which("fusermount3", path=path) is None:
        return warn(
            "fusermount3", "it is not installed", "apt-get install fuse3, where others than root shall mount"
        )
    return ok("fusermount3", "it is installed")


def allow_other(root: Path) -> Check:
    try:
        lines = (root / "etc/fuse.conf").read_text().splitlines()
    except FileNotFoundError:
        lines = []
    if "user_allow_other" in (line.strip() for line in lines):
        return ok("user_allow_other", "who is not root may share a mount with others")
    return ok(
        "user_allow_other",
        "a mount of somebody who is not root is for himself (user_allow_other in /etc/fuse.conf)",
    )


def open_files(limits: tuple[int, int] | None = None) -> Check:
    soft, hard = limits or resource.getrlimit(resource.RLIMIT_NOFILE)
    top = hard if hard >= 0 else 1 << 30
    remedy = "ulimit -n 1048576 for who starts the daemons (LimitNOFILE= in a unit, nofile in /etc/security/limits.conf)"
    if top < FILES_MIN:
        return bad("open files", f"at most {top}", remedy)
    return (ok if top >= FILES_GOOD else lambda name, seen: warn(name, seen, remedy))(
        "open files", f"{soft}, at most {top}"
    )


def locked_memory(limits: tuple[int, int] | None = None) -> Check:
    _, hard = limits or resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if 0 <= hard < MEMLOCK_GOOD:
        return warn(
            "locked memory",
            format_bytes(hard),
            "ulimit -l unlimited (LimitMEMLOCK=infinity): io_uring before Linux "
            "5.12 and RDMA take buffers from it",
        )
    return ok("locked memory", "no limit" if hard < 0 else format_bytes(hard))


def processes(limits: tuple[int, int] | None = None) -> Check:
    _, hard = limits or resource.getrlimit(resource.RLIMIT_NPROC)
    if 0 <= hard < PROCESSES_MIN:
        return warn("processes", f"at most {hard} of a user", "ulimit -u 65536 (TasksMax=infinity in a unit)")
    return ok("processes", "no limit" if hard < 0 else f"at most {hard} of a user")


def compiled_modules(is_pure: bool = IS_PURE) -> Check:
    if is_pure:
        return warn(
            "compiled modules",
            f"{PURE_VARIABLE} is set: nvpool is several times slower without them",
            f"unset {PURE_VARIABLE}",
        )
    return ok("compiled modules", "they are in use")


def io_uring(root: Path, answer: int | None = None) -> Check:
    """Check whether the kernel allows io_uring.

    `answer` is the errno of io_uring_setup(2) with arguments that create no ring; EPERM and ENOSYS mean that
    io_uring is not available.
    """
    remedy = "cold reads go through threads, with a third more of processor time; sysctl kernel.io_uring_disabled=0"
    try:
        disabled = (root / "proc/sys/kernel/io_uring_disabled").read_text().strip()
    except FileNotFoundError:
        disabled = "0"
    if disabled != "0":
        return warn("io_uring", f"kernel.io_uring_disabled is {disabled}", remedy)
    if answer is None:
        libc = ctypes.CDLL(None, use_errno=True)
        libc.syscall(_IO_URING_SETUP, 0, None)
        answer = ctypes.get_errno()
    if answer in (errno.EPERM, errno.ENOSYS):
        return warn(
            "io_uring",
            f"the kernel says {os.strerror(answer)}",
            "cold reads go through threads; let the container's seccomp profile allow io_uring",
        )
    return ok("io_uring", "it is allowed")


def clock_source(root: Path) -> Check:
    source = (root / "sys/devices/system/clocksource/clocksource0/current_clocksource").read_text().strip()
    if source in _SLOW_CLOCKS:
        return warn(
            "clock source",
            source,
            "to ask for the time costs a microsecond and more; boot with clocksource=tsc where "
            "the processor's counter is steady",
        )
    return ok("clock source", source)


def clock_synchronized(status: int | None = None) -> Check:
    """Check whether the clock is synchronized. `status` is that of adjtimex(2); default: ask the kernel."""
    if status is None:
        words = (ctypes.c_long * 32)()  # struct timex: modes, offset, freq, maxerror, esterror, status
        if ctypes.CDLL(None, use_errno=True).adjtimex(words) < 0:
            return warn(
                "clock", f"adjtimex: {os.strerror(ctypes.get_errno())}", "see that chrony or timesyncd runs"
            )
        status = words[5] & 0xFFFFFFFF
    if status & _STA_UNSYNC:
        return warn(
            "clock",
            "nothing keeps it right",
            "timedatectl set-ntp true, or run chrony: times of files and the ends "
            "of certificates depend on it",
        )
    return ok("clock", "it is kept right")


def swap(root: Path) -> Check:
    lines = (root / "proc/swaps").read_text().splitlines()[1:]
    if lines:
        return warn(
            "swap",
            ", ".join(line.split()[0] for line in lines),
            "a daemon that was swapped out answers late: swapoff -a, or vm.swappiness=1",
        )
    return ok("swap", "none")


def overcommit(root: Path) -> Check:
    if (root / "proc/sys/vm/overcommit_memory").read_text().strip() == "2":
        return warn(
            "overcommit",
            "vm.overcommit_memory is 2",
            "the databases of metadata map more than they use: sysctl vm.overcommit_memory=0",
        )
    return ok("overcommit", "as usual")


def memory(root: Path) -> Check:
    """Check the memory of the machine, or the limit of this process's control group if that is lower."""
    found = re.search(r"^MemTotal:\s+(\d+) kB", (root / "proc/meminfo").read_text(), re.M)
    total, limit = int(found[1]) << 10 if found else 0, 0
    group = re.search(r"^0::(/.*)$", (root / "proc/self/cgroup").read_text(), re.M)
    place = root / "sys/fs/cgroup" / group[1].lstrip("/") if group else None
    while place is not None and place != root / "sys/fs":
        try:
            text = (place / "memory.max").read_text().strip()
        except OSError:
            text = "max"
        if text != "max":
            limit = min(limit or int(text), int(text))
        place = place.parent
    least = min(total, limit) if limit else total
    seen = format_bytes(total) + (
        f", of which the control group allows {format_bytes(limit)}" if limit else ""
    )
    if least < MEMORY_MIN:
        return warn(
            "memory", seen, "daemons and their caches want 2 GiB and more: raise memory.max, or add memory"
        )
    return ok("memory", seen)


def governor(root: Path) -> Check:
    found = {
        path.read_text().strip()
        for path in (root / "sys/devices/system/cpu").glob("cpu*/cpufreq/scaling_governor")
    }
    if not found:
        return ok("processors", "their speed is not for this system to choose")
    drivers = {
        path.read_text().strip()
        for path in (root / "sys/devices/system/cpu").glob("cpu*/cpufreq/scaling_driver")
    }
    if "powersave" in found and not drivers & {"intel_pstate", "amd-pstate-epp"}:
        return warn(
            "processors", f"governor {', '.join(sorted(found))}", "cpupower frequency-set -g performance"
        )
    return ok("processors", f"governor {', '.join(sorted(found))}")


def _interfaces(root: Path) -> dict[str, Path]:
    """Return the interfaces that are up, without the loopback interface."""
    found = {}
    for place in sorted((root / "sys/class/net").iterdir()):
        if (
            place.name != "lo"
            and (place / "operstate").exists()
            and (place / "operstate").read_text().strip() == "up"
        ):
            found[place.name] = place
    return found


def packet_sizes(root: Path) -> Check:
    found = {
        name: int((place / "mtu").read_text())
        for name, place in _interfaces(root).items()
        if (place / "device").exists()
    }
    seen = ", ".join(f"{name} {size}" for name, size in found.items()) or "no network device that is up"
    if len(set(found.values())) > 1:
        return warn(
            "packet size",
            seen,
            "let all ports of the storage network have one MTU (ip link set DEV mtu 9000), here "
            "and at the switch",
        )
    return ok("packet size", seen)


def link_speeds(root: Path) -> Check:
    found = {}
    for name, place in _interfaces(root).items():
        try:
            speed = int((place / "speed").read_text())
        except (OSError, ValueError):
            continue  # a virtual interface
        if speed > 0 and (place / "device").exists():
            found[name] = speed
    seen = ", ".join(f"{name} {speed} Mbit/s" for name, speed in found.items()) or "not known here"
    if found and max(found.values()) < LINK_MBIT_GOOD:
        return warn("links", seen, "one NVMe drive reads faster than that: use ports of 10 Gbit/s and more")
    return ok("links", seen)


def retransmits(root: Path) -> Check:
    lines = [
        line.split() for line in (root / "proc/net/snmp").read_text().splitlines() if line.startswith("Tcp:")
    ]
    words = dict(zip(lines[0][1:], map(int, lines[1][1:]), strict=True))
    sent, again = words["OutSegs"], words["RetransSegs"]
    seen = f"{again} of {sent} segments were sent again"
    if sent >= SEGMENTS_MIN and again / sent > RETRANSMITTED_MAX:
        return warn(
            "retransmits",
            seen,
            "packets are lost: look at cables, flow control and drops (ethtool -S, nstat)",
        )
    return ok("retransmits", seen)


def rdma_devices(root: Path) -> Check:
    """Check for RDMA devices and for obstacles to their use; `nvpool doctor rdma` has the details."""
    from nvpool.cli.doctor.rdma import checks

    found = list(checks(root))
    seen = next(one.seen for one in found if one.name == "devices")
    complaints = [one for one in found if one.state != OK]
    if complaints:
        detail = ", ".join(f"{one.name} {one.state}" for one in complaints)
        return warn(
            "rdma",
            f"{seen}; {detail}",
            "nvpool doctor rdma says what to change; other transports are used meanwhile",
        )
    return ok("rdma", seen)


def own_name(name: str | None = None) -> Check:
    name = name or socket.gethostname()
    try:
        found = sorted({str(entry[4][0]) for entry in socket.getaddrinfo(name, None)})
    except OSError as error:
        return warn(
            "host name",
            f"{name}: {error.strerror or error}",
            f"let {name} stand in DNS or in /etc/hosts, or name addresses in the pool (--host)",
        )
    return ok("host name", f"{name} is {', '.join(found)}")


def machine(root: Path = Path("/")) -> Iterator[Check]:
    """Run all checks of this module."""
    for name, look in (
        ("kernel", lambda: kernel(os.uname().release)),
        ("fuse", lambda: fuse_device(root)),
        ("fuse requests", lambda: request_pages(root)),
        ("fusermount3", fusermount),
        ("user_allow_other", lambda: allow_other(root)),
        ("open files", open_files),
        ("locked memory", locked_memory),
        ("processes", processes),
        ("io_uring", lambda: io_uring(root)),
        ("compiled modules", compiled_modules),
        ("clock", clock_synchronized),
        ("clock source", lambda: clock_source(root)),
        ("memory", lambda: memory(root)),
        ("swap", lambda: swap(root)),
        ("overcommit", lambda: overcommit(root)),
        ("processors", lambda: governor(root)),
        ("packet size", lambda: packet_sizes(root)),
        ("links", lambda: link_speeds(root)),
        ("retransmits", lambda: retransmits(root)),
        ("rdma", lambda: rdma_devices(root)),
        ("host name", own_name),
    ):
        yield from all_of(name, look)
