"""What `nvpool doctor` looks at on the way to the other nodes: whether packets as large as this machine sends them arrive.

Where a switch, a tunnel or the other end takes smaller ones and nobody says so, connections are made and small requests are
answered, and what is large stands still. Two things are found out for each host. What TCP agrees on with it (the segment size
of a connection, which the smaller of both ends' MTUs decides). And whether a packet of that size arrives: a datagram that may
not be divided (IP_MTU_DISCOVER, ip(7)) is sent to a port where nobody listens for datagrams, which the host answers with "port
unreachable". A host that does not even answer a small one (a firewall) tells nothing, and so it is said. Changes nothing.
"""

from __future__ import annotations

import contextlib
import select
import socket
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

from nvpool.cli.doctor.check import Check, bad, ok, warn
from nvpool.core.clock import SYSTEM_CLOCK
from nvpool.core.endpoint import parse_endpoint

CONNECT_S = 2.0
ANSWER_S = 0.7
"""For datagrams there and back between nodes."""
TRIES = 3
"""A datagram may be lost; and a Linux host gives one such answer a second once it has given six (icmp_ratelimit)."""
SMALL = 100
PACKET_MAX = 16_000
"""More than frames of Ethernet have. Above that (IPoIB) a connection's window bounds its segments, not the MTU."""

_IP_MTU_DISCOVER, _IP_MTU, _IPV6_MTU_DISCOVER, _IPV6_MTU, _PROBE = 10, 14, 23, 24, 3
"""linux/in.h, linux/in6.h. PROBE: not divided, and as large as the interface allows, whatever was heard of the path."""
_OPTIONS_AT, _TIMESTAMPS = 5, 1
"""linux/tcp.h, tcp_info.tcpi_options."""
_IP_HEADER = {socket.AF_INET: 20, socket.AF_INET6: 40}
_TCP_HEADER, _TCP_STAMPS, _UDP_HEADER = 20, 12, 8


class Path(NamedTuple):
    """`interface`: the largest packet that this machine would send there, in bytes; `agreed`: that TCP sends there. `answers`:
    whether the host answers a datagram at all; `arrives`: one that makes a packet of `agreed`."""

    host: str
    interface: int
    agreed: int
    answers: bool
    arrives: bool


def judge(path: Path) -> Check:
    name, told = f"path to {path.host}", f"packets of {path.agreed} bytes"
    if path.answers and not path.arrives:
        return bad(name, f"{told} do not arrive, and small ones do",
                   f"large transfers stand still: let the interfaces at both ends and all switches in between take "
                   f"{path.agreed} bytes, or set a smaller MTU at both ends (ip link set DEV mtu 1500)")
    if path.agreed < path.interface:
        return warn(name, f"this machine would send packets of {path.interface} bytes, and TCP agrees on {path.agreed} at most",
                    "let both ends have one MTU (ip link set DEV mtu 9000), and the switches take it")
    return ok(name, f"{told} arrive" if path.arrives else f"it is not known whether {told} arrive: no datagram is answered")


class _Asked:
    """One host: what TCP says of it, and the socket from which datagrams go there."""

    def __init__(self, host: str, port: int) -> None:
        self.host = host
        with socket.create_connection((host, port), CONNECT_S) as connection:
            self._family, self._place = connection.family, connection.getpeername()
            segment = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_MAXSEG)
            stamped = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 8)[_OPTIONS_AT] & _TIMESTAMPS
        self._level, self._discover, mtu = (
            (socket.IPPROTO_IPV6, _IPV6_MTU_DISCOVER, _IPV6_MTU) if self._family == socket.AF_INET6 else
            (socket.IPPROTO_IP, _IP_MTU_DISCOVER, _IP_MTU))
        self.socket = self._opened()
        self.interface = min(self.socket.getsockopt(self._level, mtu), PACKET_MAX)
        header = _IP_HEADER[self._family]
        self.agreed = min(self.interface, segment + header + _TCP_HEADER + (_TCP_STAMPS if stamped else 0))
        self._around = header + _UDP_HEADER

    def _opened(self) -> socket.socket:
        made = socket.socket(self._family, socket.SOCK_DGRAM)
        made.setblocking(False)
        made.setsockopt(self._level, self._discover, _PROBE)
        made.connect(self._place)
        return made

    def begin(self) -> None:
        """From another port: what is still to come of earlier datagrams is not heard."""
        self.close()
        self.socket = self._opened()

    def send(self, packet_bytes: int) -> None:
        with contextlib.suppress(OSError):  # what came back of an earlier one, or it is too large by now: it does not arrive
            self.socket.send(bytes(packet_bytes - self._around))

    def heard(self) -> bool:
        """Whether the host has said that nobody listens there, or somebody has answered."""
        try:
            self.socket.recv(1)
        except ConnectionRefusedError:
            return True
        except OSError:
            return False
        return True

    def close(self) -> None:
        self.socket.close()


def _answered(asked: Iterable[_Asked], size: Callable[[_Asked], int]) -> set[_Asked]:
    """Those whose hosts have answered one of TRIES datagrams that make packets of `size`."""
    left, heard = set(asked), set()
    for one in left:
        one.begin()
    for _ in range(TRIES):
        for one in left:
            one.send(size(one))
        until_s = SYSTEM_CLOCK.boottime_s() + ANSWER_S
        while left and (wait_s := until_s - SYSTEM_CLOCK.boottime_s()) > 0:
            ready, _, _ = select.select([one.socket for one in left], [], [], wait_s)
            come = {one for one in left if one.socket in ready and one.heard()}
            heard |= come
            left -= come
    return heard


def looked_at(places: Iterable[tuple[str, int]]) -> Iterator[Path]:
    """The ways to these hosts, each with a port where TCP is served; not to those that can not be reached, which others tell.
    Takes some seconds, for however many that answer."""
    asked: list[_Asked] = []
    try:
        for host, port in places:
            with contextlib.suppress(OSError):
                asked.append(_Asked(host, port))
        answer = _answered(asked, lambda _: SMALL)
        arrive = _answered(answer, lambda one: one.agreed)
        answer = arrive | _answered(answer - arrive, lambda _: SMALL)  # one that has fallen silent since tells nothing
        for one in asked:
            yield Path(one.host, one.interface, one.agreed, one in answer, one in arrive)
    finally:
        for one in asked:
            one.close()


def paths(endpoints: Iterable[str]) -> Iterator[Check]:
    """One Check for each host of these endpoints."""
    places: dict[str, int] = {}
    for place in map(parse_endpoint, endpoints):
        if place.host:
            places.setdefault(place.host, place.port)
    yield from map(judge, looked_at(sorted(places.items())))
