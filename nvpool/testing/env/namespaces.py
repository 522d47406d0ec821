"""Machines for tests on one host: network namespaces at one switch, each with its own address and host
identity.

Kernel and sockets are real: packets cross a veth pair and a bridge. Paths reach what listens on loopback or
at a unix socket of another machine, but its machine-id shows another host. Used by tests; needs root.
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
"""Name prefix of the directory with the files of all machines of a test."""
UNUSED_MAC = "02:00:00:00:00:01"
"""An Ethernet address that no machine has."""


def missing() -> str | None:
    """Reason why no machines can be made here; None if they can."""
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
    """One network and mount namespace, kept by a process that sleeps."""

    def __init__(self, name: str, address: str, place: Path) -> None:
        self.name = name
        self.address = address
        self.place = place
        """Directory for the files of this machine."""
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
        self.run("mount", "-t", "tmpfs", "none", "/dev/shm")  # its own memory, freed with it

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
    """`count` machines at one switch, from 10.77.0.1 on, as a context manager.

    It leaves nothing behind but what was mounted or started inside and not ended.
    """

    def __init__(self, count: int, parent: Path | None = None) -> None:
        """Put their files in a directory below `parent`, which is removed with them."""
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
                    ):  # no machine sees the files of another, above all its unix sockets
                        machine.run("mount", "-t", "tmpfs", "none", str(other.place))
        except BaseException:
            self.__exit__()
            raise
        return self._machines

    def cut(self, number: int, *, restore: bool = False) -> None:
        """Cut the machine's link, or restore it. Machines count from 1."""
        self._switch.run("ip", "link", "set", f"to{number}", "up" if restore else "down")

    def lose(self, number: int, to: int, *, restore: bool = False) -> None:
        """Drop every IP packet that machine `number` sends to machine `to`, without an error for the sender.

        The other direction and all other machines are not affected. The packets go to an Ethernet address
        that no machine has, so iproute2 is enough. Machines count from 1.
        """
        sender, address = self._machines[number - 1], self._machines[to - 1].address
        if restore:
            sender.run("ip", "neigh", "del", address, "dev", "eth0")
        else:
            sender.run(
                "ip", "neigh", "replace", address, "lladdr", UNUSED_MAC, "dev", "eth0", "nud", "permanent"
            )

    def limit(self, number: int, mib_s: float) -> None:
        """Limit the machine's link to this rate in each direction; 0 removes the limit. Machines count from
        1."""
        if not mib_s:
            self._machines[number - 1].run("tc", "qdisc", "del", "dev", "eth0", "root")
            self._switch.run("tc", "qdisc", "del", "dev", f"to{number}", "root")
            return
        rate = f"{round(mib_s * 8 * 1.048576 * 1000)}kbit"
        bucket = ("root", "tbf", "rate", rate, "burst", "256kb", "latency", "100ms")
        self._machines[number - 1].run("tc", "qdisc", "replace", "dev", "eth0", *bucket)
        self._switch.run("tc", "qdisc", "replace", "dev", f"to{number}", *bucket)

    def packets(self, number: int, machine_bytes: int, switch_bytes: int) -> None:
        """Set the largest packets that the machine sends, and that its port of the switch takes.

        The switch drops larger ones without an error. Machines count from 1.
        """
        self._machines[number - 1].run("ip", "link", "set", "eth0", "mtu", str(machine_bytes))
        self._switch.run("ip", "link", "set", f"to{number}", "mtu", str(switch_bytes))

    def delay(self, number: int, to_s: float, from_s: float) -> None:
        """Delay what is sent to the machine and what it sends; both 0: no delay any more. Machines count from
        1.

        Connections survive. A link with delay carries some tens of MiB/s and uses one processor (see
        network_delay).
        """
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
