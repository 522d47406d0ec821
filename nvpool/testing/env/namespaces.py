"""Machines for tests on one: network namespaces that a switch joins, each with an address and a host identity of its own.

Real kernel, real sockets: what one sends to the other crosses a veth pair and a bridge; what listens on loopback or a unix
socket of one is still found by path, but its machine-id says that it is another host's. Called by tests; needs root.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from nvpool.core.clock import SYSTEM_CLOCK

PREFIX = "nvpool-machines-"
"""Of the directory of all machines of a test."""
NOBODY = "02:00:00:00:00:01"
"""An Ethernet address of no machine."""


def missing() -> str | None:
    """Why there can be none here."""
    if os.geteuid():
        return "network namespaces need root"
    for program in ("ip", "nsenter", "unshare"):
        if shutil.which(program) is None:
            return f"{program} is not installed (Debian: iproute2, util-linux)"
    done = subprocess.run(
        ["unshare", "-n", "-m", "ip", "link", "add", "x", "type", "bridge"],
        capture_output=True,
        text=True,
        timeout=240,
    )
    return (
        f"no network namespace with a bridge can be made: {done.stderr.strip()}" if done.returncode else None
    )


class Machine:
    """One namespace of the network and of mounts, kept by a process that sleeps."""

    def __init__(self, name: str, address: str, place: Path) -> None:
        self.name = name
        self.address = address
        self.place = place
        """For its files: each machine has its own."""
        place.mkdir()
        self._holder = subprocess.Popen(
            ["unshare", "-n", "-m", "--propagation", "private", "sleep", "infinity"], stdin=subprocess.DEVNULL
        )
        self.pid = self._holder.pid
        identity = place / "machine-id"
        identity.write_text(SYSTEM_CLOCK.secret(16).hex() + "\n")
        deadline_s = SYSTEM_CLOCK.boottime_s() + 60
        while os.readlink(f"/proc/{self.pid}/ns/net") == os.readlink("/proc/self/ns/net"):
            assert SYSTEM_CLOCK.boottime_s() < deadline_s, "unshare takes for ever"
        self.run("ip", "link", "set", "lo", "up")
        self.run("mount", "--bind", str(identity), "/etc/machine-id")
        self.run("mount", "-t", "tmpfs", "none", "/dev/shm")  # memory of its own, which ends with it

    def command(self, *words: str) -> list[str]:
        return ["nsenter", "-t", str(self.pid), "-n", "-m", "--", *words]

    def run(
        self, *words: str, check: bool = True, timeout_s: float = 120.0, **more
    ) -> subprocess.CompletedProcess:
        done = subprocess.run(
            self.command(*words),
            capture_output=True,
            text=True,
            timeout=timeout_s,
            stdin=subprocess.DEVNULL,
            **more,
        )
        assert not check or done.returncode == 0, (
            f"on {self.name}: {' '.join(words)}: {done.stdout}{done.stderr}"
        )
        return done

    def popen(self, *words: str, **more) -> subprocess.Popen:
        return subprocess.Popen(self.command(*words), stdin=subprocess.DEVNULL, **more)

    def end(self) -> None:
        self._holder.kill()
        self._holder.wait()


class Machines:
    """`count` machines, 10.77.0.1 and on, joined by a switch. A context manager; leaves nothing behind but what was mounted or
    started inside and not ended."""

    def __init__(self, count: int, parent: Path | None = None) -> None:
        """Their files lie in a directory below `parent`, which goes with them."""
        self._count = count
        self._place = Path(tempfile.mkdtemp(prefix=PREFIX, dir=parent))
        self._machines: list[Machine] = []
        self._switch: Machine | None = None
        self._delays: dict[int, subprocess.Popen] = {}

    def __enter__(self) -> list[Machine]:
        try:
            self._switch = Machine("switch", "", self._place / "switch")
            self._switch.run("ip", "link", "add", "switch", "type", "bridge")
            self._switch.run("ip", "link", "set", "switch", "up")
            for number in range(1, self._count + 1):
                machine = Machine(f"m{number}", f"10.77.0.{number}", self._place / f"m{number}")
                self._machines.append(machine)
                self._switch.run(
                    "ip",
                    "link",
                    "add",
                    f"to{number}",
                    "type",
                    "veth",
                    "peer",
                    "name",
                    "eth0",
                    "netns",
                    str(machine.pid),
                )
                self._switch.run("ip", "link", "set", f"to{number}", "master", "switch", "up")
                machine.run("ip", "addr", "add", f"{machine.address}/24", "dev", "eth0")
                machine.run("ip", "link", "set", "eth0", "up")
            for machine in self._machines:
                for other in self._machines:
                    if (
                        other is not machine
                    ):  # no machine sees the files of another, its unix sockets above all
                        machine.run("mount", "-t", "tmpfs", "none", str(other.place))
        except BaseException:
            self.__exit__()
            raise
        return self._machines

    def cut(self, number: int, *, restore: bool = False) -> None:
        """Take the machine's cable out, or put it in again; from 1."""
        self._switch.run("ip", "link", "set", f"to{number}", "up" if restore else "down")

    def lose(self, number: int, to: int, *, restore: bool = False) -> None:
        """Lose every IP packet that machine `number` sends to machine `to`, from 1; the sender is not told. The other direction
        and all other machines are as before. Packets go to an Ethernet address that no machine has, so iproute2 is enough."""
        sender, address = self._machines[number - 1], self._machines[to - 1].address
        if restore:
            sender.run("ip", "neigh", "del", address, "dev", "eth0")
        else:
            sender.run("ip", "neigh", "replace", address, "lladdr", NOBODY, "dev", "eth0", "nud", "permanent")

    def limit(self, number: int, mib_s: float) -> None:
        """Let the machine's cable carry so much in each direction and no more; 0: all that it can again. From 1."""
        if not mib_s:
            self._machines[number - 1].run("tc", "qdisc", "del", "dev", "eth0", "root")
            self._switch.run("tc", "qdisc", "del", "dev", f"to{number}", "root")
            return
        rate = f"{round(mib_s * 8 * 1.048576 * 1000)}kbit"
        bucket = ("root", "tbf", "rate", rate, "burst", "256kb", "latency", "100ms")
        self._machines[number - 1].run("tc", "qdisc", "replace", "dev", "eth0", *bucket)
        self._switch.run("tc", "qdisc", "replace", "dev", f"to{number}", *bucket)

    def packets(self, number: int, machine_bytes: int, switch_bytes: int) -> None:
        """Let the machine send packets of so many bytes, and its port of the switch take packets of so many: larger ones are
        lost without a word, as a switch does it; from 1."""
        self._machines[number - 1].run("ip", "link", "set", "eth0", "mtu", str(machine_bytes))
        self._switch.run("ip", "link", "set", f"to{number}", "mtu", str(switch_bytes))

    def delay(self, number: int, to_s: float, from_s: float) -> None:
        """Delay what is sent to the machine and what it sends; 0 for both: no delay. From 1. Connections
        stay. The cable carries some tens of MiB/s then, at the cost of a processor (see delays)."""
        switch = self._switch
        before = self._delays.pop(number, None)
        if before is not None:
            switch.run("ip", "link", "set", f"to{number}", "master", "switch")
            switch.run("ip", "link", "del", f"far{number}")
            before.kill()
            before.wait()
            before.stdout.close()
        if not to_s and not from_s:
            return
        relay = self._delays[number] = switch.popen(
            sys.executable,
            "-P",
            "-m",
            "nvpool.testing.env.network_delay",
            f"in{number}",
            f"out{number}",
            str(to_s),
            str(from_s),
            stdout=subprocess.PIPE,
            text=True,
        )
        assert relay.stdout.readline().strip() == "ready", "no tap can be made: is there /dev/net/tun?"
        switch.run("ip", "link", "add", f"far{number}", "type", "bridge")
        for device, bridge in (
            (f"in{number}", "switch"),
            (f"out{number}", f"far{number}"),
            (f"to{number}", f"far{number}"),
        ):
            switch.run("ip", "link", "set", device, "master", bridge, "up")
        switch.run("ip", "link", "set", f"far{number}", "up")

    def __exit__(self, *_) -> None:
        for relay in self._delays.values():
            relay.kill()
            relay.wait()
            relay.stdout.close()
        for machine in [*self._machines, *([self._switch] if self._switch else [])]:
            machine.end()
        shutil.rmtree(self._place, ignore_errors=True)
