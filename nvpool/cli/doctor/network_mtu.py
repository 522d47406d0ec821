"""Doctor check of the path MTU to other nodes: whether packets of the size that TCP sends arrive.

If a switch, a tunnel or the other end drops large packets silently, connections open and small requests
succeed, but large transfers hang. The check finds two things for each host:

1. The packet size that TCP agrees on: the segment size of a connection, which the smaller MTU of both ends
   decides.
2. Whether a packet of that size arrives. The check sends a datagram that routers may not fragment
   (IP_MTU_DISCOVER, ip(7)) to a port without a datagram service; the host replies with "port unreachable".

A host that does not even reply to a small datagram (a firewall) gives no information; the result says so.
The check changes nothing. `nvpool doctor` calls `paths`.
"""

from __future__ import annotations

import contextlib
import select
import socket
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

from nvpool.cli.doctor.check_results import Check, bad, ok, warn
from nvpool.core.clock import SYSTEM_CLOCK
from nvpool.core.endpoint import parse_endpoint

CONNECT_S = 2.0
ANSWER_S = 0.7
"""Time limit for a round trip of a datagram between nodes."""
TRIES = 3
"""A datagram may be lost; after six such replies a Linux host sends one a second (icmp_ratelimit)."""
SMALL = 100
PACKET_MAX = 16_000
"""More than an Ethernet frame. Above this size (IPoIB) the window limits TCP's segments, not the MTU."""

_IP_MTU_DISCOVER, _IP_MTU, _IPV6_MTU_DISCOVER, _IPV6_MTU, _PROBE = 10, 14, 23, 24, 3
"""From linux/in.h and linux/in6.h. PROBE: do not fragment; ignore the known path MTU, use the interface's."""
_OPTIONS_AT, _TIMESTAMPS = 5, 1
"""linux/tcp.h, tcp_info.tcpi_options."""
_IP_HEADER = {socket.AF_INET: 20, socket.AF_INET6: 40}
_TCP_HEADER, _TCP_STAMPS, _UDP_HEADER = 20, 12, 8


class Path(NamedTuple):
    """Findings about the network path to one host; sizes are in bytes.

    `interface` is the largest packet that this machine sends to the host, `agreed` the largest that TCP sends
    there. `answers`: whether the host replies to a small datagram. `arrives`: whether the host replies to a
    datagram in a packet of `agreed` bytes.
    """

    host: str
    interface: int
    agreed: int
    answers: bool
    arrives: bool


def judge(path: Path) -> Check:
    name, packets = f"path to {path.host}", f"packets of {path.agreed} bytes"
    if path.answers and not path.arrives:
        return bad(
            name,
            f"{packets} do not arrive, and small ones do",
            f"large transfers stand still: let the interfaces at both ends and all switches in between take "
            f"{path.agreed} bytes, or set a smaller MTU at both ends (ip link set DEV mtu 1500)",
        )
    if path.agreed < path.interface:
        return warn(
            name,
            f"this machine would send packets of {path.interface} bytes, and TCP agrees on {path.agreed} at most",
            "let both ends have one MTU (ip link set DEV mtu 9000), and the switches take it",
        )
    return ok(
        name,
        f"{packets} arrive"
        if path.arrives
        else f"it is not known whether {packets} arrive: no datagram is answered",
    )


class _HostProbe:
    """Probe of one host: the sizes that TCP reports, and the socket that sends datagrams to the host."""

    def __init__(self, host: str, port: int) -> None:
        self.host = host
        with socket.create_connection((host, port), CONNECT_S) as connection:
            self._family, self._place = connection.family, connection.getpeername()
            segment = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_MAXSEG)
            stamped = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 8)[_OPTIONS_AT] & _TIMESTAMPS
        self._level, self._discover, mtu = (
            (socket.IPPROTO_IPV6, _IPV6_MTU_DISCOVER, _IPV6_MTU)
            if self._family == socket.AF_INET6
            else (socket.IPPROTO_IP, _IP_MTU_DISCOVER, _IP_MTU)
        )
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
        """Open a new socket with another port, so that late replies to earlier datagrams are ignored."""
        self.close()
        self.socket = self._opened()

    def send(self, packet_bytes: int) -> None:
        with contextlib.suppress(OSError):  # an earlier datagram's error, or too large
            self.socket.send(bytes(packet_bytes - self._around))

    def heard(self) -> bool:
        """Return whether the host replied: "port unreachable", or data of a service at that port."""
        try:
            self.socket.recv(1)
        except ConnectionRefusedError:
            return True
        except OSError:
            return False
        return True

    def close(self) -> None:
        self.socket.close()


def _answered(asked: Iterable[_HostProbe], size: Callable[[_HostProbe], int]) -> set[_HostProbe]:
    """Return the probes whose hosts reply to one of TRIES datagrams in packets of `size`."""
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
    """Yield the findings for hosts, each given with a port that serves TCP.

    Hosts that cannot be reached are left out, because another check reports them. Takes some seconds in all,
    independent of the number of hosts that reply.
    """
    asked: list[_HostProbe] = []
    try:
        for host, port in places:
            with contextlib.suppress(OSError):
                asked.append(_HostProbe(host, port))
        answer = _answered(asked, lambda _: SMALL)
        arrive = _answered(answer, lambda one: one.agreed)
        answer = arrive | _answered(answer - arrive, lambda _: SMALL)  # else a host that fell silent
        for one in asked:
            yield Path(one.host, one.interface, one.agreed, one in answer, one in arrive)
    finally:
        for one in asked:
            one.close()


def paths(endpoints: Iterable[str]) -> Iterator[Check]:
    """Yield one Check for each host of these endpoints."""
    places: dict[str, int] = {}
    for place in map(parse_endpoint, endpoints):
        if place.host:
            places.setdefault(place.host, place.port)
    yield from map(judge, looked_at(sorted(places.items())))
