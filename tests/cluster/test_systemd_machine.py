"""The systemd units on a machine that systemd boots, installed by tools/install.sh, from pool creation to power off."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import sysconfig
import time
from pathlib import Path

import pytest

from nvpool.runtime.scheduling import NICE, SLICE_NS, attributes
from nvpool.testing.env.systemd_machine import BootedMachine, missing, unified

CHECKOUT = Path(__file__).resolve().parents[2]
CAUSED = re.compile("Failed with result '(signal|watchdog)'|Watchdog timeout")
"""Failures of the daemon that these tests cause, in systemd's words."""
MOUNT = "nvpool-mount@mnt-pool.service"
ASK = """
import socket
engine = socket.socket(socket.AF_UNIX)
engine.connect("/run/docker/plugins/nvpool.sock")
engine.sendall(b"POST /Plugin.Activate HTTP/1.1\\r\\nHost: x\\r\\nContent-Length: 0\\r\\nConnection: close\\r\\n\\r\\n")
while part := engine.recv(4096):
    print(part.decode())
"""
LOOK = """
from pathlib import Path
from nvpool.runtime.scheduling import attributes
for pid in Path("/sys/fs/cgroup/system.slice/nvpoold.service/cgroup.procs").read_text().split():
    own = attributes(int(pid))
    print(own.nice, own.slice_ns)
"""
REASON = missing()
PACKAGES = Path(sysconfig.get_paths()["purelib"])
if REASON is None and not PACKAGES.is_relative_to(CHECKOUT):
    REASON = (
        f"the environment of these tests, {PACKAGES}, is not in the checkout, from which the machine takes it"
    )

pytestmark = [pytest.mark.mount, pytest.mark.skipif(REASON is not None, reason=REASON or "")]


def groups() -> set[str]:
    above = unified()
    return {path.name for path in above.glob("nvpool-boot-*")} if above else set()


@pytest.fixture(scope="module")
def machine(tmp_path_factory):
    before = groups()
    place = tmp_path_factory.mktemp("booted") / "machine"
    python = os.path.realpath(getattr(sys, "_base_executable", sys.executable))
    try:
        with BootedMachine(place, CHECKOUT, python, PACKAGES) as machine:
            machine.run("chown", "nvpool:", "/srv/nvme0")
            machine.run(
                "runuser",
                "-u",
                "nvpool",
                "--",
                "nvpool",
                "pool",
                "create",
                "/var/lib/nvpool/pool",
                "--drive",
                "/srv/nvme0:2G",
            )
            machine.run(
                "sh", "-c", "echo 'POOL=/var/lib/nvpool/pool\nOPTIONS=' > /etc/nvpool/mounts/mnt-pool.conf"
            )
            machine.run(
                "sed", "-i", "s|^OPTIONS=.*|OPTIONS=--mountpoint=/mnt/pool|", "/etc/nvpool/bridge.conf"
            )
            machine.run(
                "systemctl", "enable", "--now", "nvpoold", MOUNT, "nvpool-bridge"
            )  # each unit waits for the one before
            yield machine
    finally:
        shutil.rmtree(place, ignore_errors=True)
    assert groups() <= before
    assert str(place) not in Path("/proc/self/mounts").read_text()


def until(true, within_s: float = 60.0) -> None:
    ends = time.monotonic() + within_s
    while not true():
        assert time.monotonic() < ends
        time.sleep(0.2)


def serves_again(machine: BootedMachine, old: str) -> bool:
    return (
        machine.show("nvpoold", "MainPID") not in (old, "0")
        and machine.show("nvpoold", "ActiveState") == "active"
    )


def test_all_services_run_and_the_pool_is_used(machine):
    for unit in ("nvpoold.service", MOUNT, "nvpool-bridge.service"):
        assert machine.show(unit, "ActiveState") == "active", unit
    assert machine.show("nvpoold", "StatusText") == "serving, 2 processes"  # by sd_notify
    assert machine.run("sh", "-c", "echo written > /mnt/pool/f && cat /mnt/pool/f").stdout == "written\n"
    assert "VolumeDriver" in machine.run("/opt/nvpool/bin/python", "-c", ASK).stdout


def test_unit_permits_the_daemons_to_run_before_other_programs(machine):
    if not attributes().slice_ns:
        pytest.skip("this kernel has no time slices per thread")
    found = machine.run("/opt/nvpool/bin/python", "-c", LOOK).stdout.splitlines()
    # This machine's root may not raise limits, so LimitNICE has no effect on it.
    assert found == [f"0 {SLICE_NS}"] * 3  # supervisor, shard, store
    for unit in ("nvpoold.service", MOUNT, "nvpool-bridge.service"):
        assert machine.show(unit, "LimitNICE") == str(20 - NICE), unit  # as getrlimit(2) counts


def test_reload_upgrades_the_mount_under_an_open_file(machine):
    writer = machine.popen(
        "sh",
        "-c",
        "exec 7> /mnt/pool/open; echo one >&7; echo opened; read word; echo two >&7; cat /mnt/pool/open",
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert writer.stdout.readline() == "opened\n"
    pids = machine.run(
        "sh", "-c", "cat /sys/fs/cgroup/system.slice/system-nvpool*/nvpool-mount@*/cgroup.procs"
    ).stdout.split()
    machine.run("systemctl", "reload", MOUNT)
    now = machine.run(
        "sh", "-c", "cat /sys/fs/cgroup/system.slice/system-nvpool*/nvpool-mount@*/cgroup.procs"
    ).stdout.split()
    assert set(now) - set(pids)  # other processes serve it
    assert writer.communicate("go\n", timeout=60) == ("one\ntwo\n", None)


def test_fstab_entry_is_automounted(machine):
    machine.run("sh", "-c", "mkdir /mnt/pool/part && echo of it > /mnt/pool/part/f")
    machine.run(
        "sh",
        "-c",
        "echo '/var/lib/nvpool/pool:/part /mnt/auto nvpool _netdev,x-systemd.automount 0 0' > /etc/fstab",
    )
    machine.run("systemctl", "daemon-reload")
    machine.run("systemctl", "start", "mnt-auto.automount")
    assert machine.show("mnt-auto.mount", "ActiveState") == "inactive"
    assert machine.run("timeout", "90", "cat", "/mnt/auto/f").stdout == "of it\n"
    assert machine.run("findmnt", "--noheadings", "--output", "FSTYPE", "/mnt/auto").stdout.split() == [
        "autofs",
        "fuse.nvpool",
    ]
    assert machine.show("mnt-auto.mount", "ActiveState") == "active"
    machine.run("systemctl", "stop", "mnt-auto.mount")  # as its idle-timeout does
    assert machine.run("findmnt", "--noheadings", "--output", "FSTYPE", "/mnt/auto").stdout.split() == [
        "autofs"
    ]
    assert machine.run("timeout", "90", "cat", "/mnt/auto/f").stdout == "of it\n"  # and again


def test_killed_daemon_is_restarted(machine):
    old = machine.show("nvpoold", "MainPID")
    machine.run("systemctl", "kill", "-s", "KILL", "nvpoold")
    until(lambda: serves_again(machine, old))
    assert (
        machine.run("sh", "-c", "echo after > /mnt/pool/killed && cat /mnt/pool/killed").stdout == "after\n"
    )


def test_stopped_daemon_is_ended_by_the_watchdog(machine):
    machine.run("mkdir", "-p", "/run/systemd/system/nvpoold.service.d")
    machine.run(
        "sh", "-c", "echo '[Service]\nWatchdogSec=5' > /run/systemd/system/nvpoold.service.d/soon.conf"
    )
    machine.run("systemctl", "daemon-reload")
    machine.run("systemctl", "restart", "nvpoold")
    old = machine.show("nvpoold", "MainPID")
    machine.run("kill", "-STOP", old)
    until(lambda: serves_again(machine, old))
    assert "Watchdog timeout" in machine.run("journalctl", "--unit", "nvpoold", "--no-pager").stdout
    assert machine.run("cat", "/mnt/pool/f").stdout == "written\n"


def test_busy_machine_powers_off_in_time(machine):
    found = machine.run("journalctl", "--priority", "err", "--no-pager", "--output", "cat").stdout
    assert [line for line in found.splitlines() if "nvpool" in line and not CAUSED.search(line)] == []
    began = time.monotonic()
    assert machine.power_off()
    assert time.monotonic() - began < 60, "systemd waited for a unit until its stop timeout"
