"""Floods of a pool by one local user, each in its own process, for bench/flood.py.

A flood connects to the unix sockets of the store and the shard as a user without the rights of a node. Most kinds open a
session and a file first, and then send requests that the daemons serve: so what is measured is the cost of work, not of a
refusal while a message is decoded. `LOADS` has all kinds.

    python bench/flood_loads.py KIND PLACE             started by flood.py; PLACE is JSON, the fields of `Place`

Prints "floods" when the flood has begun. On SIGTERM it prints one line of JSON, {"replies": {method: {result: count}},
"processors": share of one processor that it used}, and ends.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import logging
import os
import random
import resource
import signal
import stat
import sys
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from nvpool.core.endpoint import parse_endpoint
from nvpool.core.errors import BY_WIRE_CODE, NvpoolError, Unavailable
from nvpool.core.grants import READ
from nvpool.core.ids import ROOT_INODE
from nvpool.core.units import MIB
from nvpool.rpc.api import Greeting
from nvpool.rpc.error_codec import decode_error
from nvpool.rpc.handshake import encode_hello
from nvpool.rpc.messages.direntries import DirectoryPage
from nvpool.rpc.messages.read_write_codec import (
    BATCH_ENTRIES_MAX,
    READ_ENTRY,
    READ_RESULT,
    WRITE_ENTRY,
    decode_read_reply,
    encode_read_request,
    pack_inodes,
)
from nvpool.rpc.transports.frame import HEADER, HEADER_BYTES, HELLO, REPLY, REQUEST, pack_head
from nvpool.rpc.v1 import data_pb2
from nvpool.rpc.v1 import meta_pb2 as pb
from nvpool.rpc.v1 import wire_pb2 as wire

FLOOD_UID = 65534
BLOCK = 4096
DEADLINE_MS = 60_000
BEGINS_S = 60.0
"""A flood whose first requests are not answered within this time has failed."""
LIST_MAX = 1024
"""Most names of a page of a listing, and most inodes of META_GETATTR_MANY."""
NAMES_MAX = 1000
"""Most names of META_LOOKUP_MANY."""
INODES_MAX = 2048
"""Most inodes of a request that a client sends: META_RENEW_SESSION, META_RELEASE."""
TICKETS_MAX = 4096
SLOTS = 60
PARTS = "parts"
"""Beside the methods in the counts of replies: reads and names of the first requests, each with its own result."""
GREETING = pack_head(HELLO, 0, 0, 0, encode_hello(Greeting("flood")), 0)

Requests = list[tuple[int, bytes]]
"""Method and message of each request."""


class Place(NamedTuple):
    """The pool that is flooded, and what lies in it for the flood."""

    store: str
    shard: str
    """Endpoints of unix sockets."""
    target: int
    epoch: int
    file_bytes: int
    """Inode of /file, which every user may read; its chunks have 1 MiB."""
    closed: list[int]
    """Inodes of files in a directory that only root may search."""


class ReplyCounts:
    """Replies of the flood, by method and result."""

    def __init__(self) -> None:
        self._counts: Counter[tuple[int | str, int | str]] = Counter()

    def count(self, method: int | str, result: int | str) -> None:
        """`method`: its number, or another name. `result`: 0, the wire code of an error, or another name."""
        self._counts[method, result] += 1

    def replies(self) -> dict[str, dict[str, int]]:
        found: dict[str, dict[str, int]] = {}
        for (method, result), count in self._counts.items():
            name = wire.Method.Name(method) if isinstance(method, int) else method
            if isinstance(result, int):
                error = BY_WIRE_CODE.get(result)
                result = "served" if not result else f"error {result}" if error is None else error.__name__
            found.setdefault(name, {})[result] = count
        return found


class Wire(asyncio.Protocol):
    """One connection to a daemon. Counts replies and drops their bytes; `ask` alone keeps its reply."""

    def __init__(self, counts: ReplyCounts) -> None:
        loop = asyncio.get_running_loop()
        self.greeted: asyncio.Future[None] = loop.create_future()
        self.lost: asyncio.Future[None] = loop.create_future()
        self._counts = counts
        self._come = bytearray()
        self._skip = 0
        """Bytes of a reply that are still to come and are dropped."""
        self._number = 0
        self._asked: dict[int, tuple[int, asyncio.Future[bytes]]] = {}
        self._in_flight: dict[int, int] = {}
        """Method of each request of `keep` without a reply."""
        self._requests: Iterator[tuple[int, bytes]] = iter(())
        self._depth = 0
        self._may_write = asyncio.Event()
        self._may_write.set()

    # -- asyncio.Protocol

    def connection_made(self, transport: asyncio.Transport) -> None:
        self.transport = transport
        transport.write(GREETING)

    def connection_lost(self, error: Exception | None) -> None:
        why = ConnectionError("the connection has ended")
        if not self.greeted.done():
            self.greeted.set_exception(why)
        for _, future in self._asked.values():
            if not future.done():
                future.set_exception(why)
        self._may_write.set()
        if not self.lost.done():
            self.lost.set_result(None)

    def pause_writing(self) -> None:
        self._may_write.clear()

    def resume_writing(self) -> None:
        self._may_write.set()
        self._fill()

    def data_received(self, data: bytes) -> None:
        if self._skip:
            dropped = min(self._skip, len(data))
            self._skip -= dropped
            data = data[dropped:]
        come, at = self._come, 0
        come += data
        while len(come) - at >= HEADER_BYTES:
            (_, kind, _, code, _, number, _, message_bytes, payload_bytes, *_) = HEADER.unpack_from(come, at)
            begin, whole = at + HEADER_BYTES, HEADER_BYTES + message_bytes + payload_bytes
            is_kept = kind != REPLY or number in self._asked
            if is_kept and len(come) - at < whole:
                break
            if is_kept:
                self._keep_reply(kind, code, number, bytes(come[begin : begin + message_bytes]))
            else:
                self._counts.count(self._in_flight.pop(number, "unknown"), code)
            at += whole
        self._skip += max(0, at - len(come))
        del come[: min(at, len(come))]
        self._fill()

    def _keep_reply(self, kind: int, code: int, number: int, message: bytes) -> None:
        if kind == HELLO:
            if not self.greeted.done():
                if code:
                    self.greeted.set_exception(decode_error(code, message))
                else:
                    self.greeted.set_result(None)
            return
        method, future = self._asked.pop(number)
        self._counts.count(method, code)
        if future.done():
            return
        if code:
            future.set_exception(decode_error(code, message))
        else:
            future.set_result(message)

    # -- requests

    def _frame(self, method: int, message: bytes) -> bytes:
        self._number = self._number % 0xFFFF_FFF0 + 1
        return pack_head(REQUEST, method, self._number, DEADLINE_MS, message, 0)

    async def ask(self, method: int, message: bytes) -> bytes:
        """The message of the reply. NvpoolError: it is a refusal. ConnectionError: there is none."""
        if self.transport.is_closing():
            raise ConnectionError("the connection has ended")
        frame = self._frame(method, message)
        future: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        self._asked[self._number] = method, future
        self.transport.write(frame)
        return await future

    def keep(self, requests: Requests, depth: int) -> None:
        """Keep `depth` of these requests in flight, over and over, until the connection ends."""
        first = random.randrange(len(requests))
        self._requests, self._depth = itertools.cycle(requests[first:] + requests[:first]), depth
        self._fill()

    def _fill(self) -> None:
        free = self._depth - len(self._in_flight)
        if free < max(1, self._depth // 4) or not self._may_write.is_set() or self.transport.is_closing():
            return
        frames = []
        for _ in range(free):
            method, message = next(self._requests)
            frames.append(self._frame(method, message))
            self._in_flight[self._number] = method
        self.transport.write(b"".join(frames))

    async def never_read(self, requests: Requests) -> None:
        """Send these requests over and over, and read nothing, until the connection ends."""
        self.transport.pause_reading()
        for method, message in itertools.cycle(requests):
            await self._may_write.wait()
            if self.transport.is_closing():
                return
            self.transport.write(self._frame(method, message))
            if not self._number % 16:
                await asyncio.sleep(0)


async def connect(endpoint: str, counts: ReplyCounts) -> Wire:
    """A connection that is greeted. NvpoolError: it is refused. OSError."""
    _, made = await asyncio.get_running_loop().create_unix_connection(
        lambda: Wire(counts), parse_endpoint(endpoint).path
    )
    await made.greeted
    return made


class Flood:
    """The flood of one process: its replies and its sessions."""

    def __init__(self, place: Place) -> None:
        self.place = place
        self.counts = ReplyCounts()
        self.sessions: list[Session] = []
        """Kept with their connections: what they have open stays open."""
        self._began_s = self._used_s = 0.0

    def begins(self) -> None:
        self._began_s, self._used_s = time.monotonic(), time.process_time()
        print("floods", flush=True)

    def report(self) -> None:
        """Print the result and end the process."""
        used_s, passed_s = time.process_time() - self._used_s, time.monotonic() - self._began_s
        print(
            json.dumps(
                {"replies": self.counts.replies(), "processors": round(used_s / max(passed_s, 1e-3), 2)}
            ),
            flush=True,
        )
        os._exit(0)

    def endpoints(self, daemon: str) -> tuple[str, ...]:
        place = self.place
        return (place.store, place.shard) if daemon == "both" else (getattr(place, daemon),)

    async def open(self) -> Session:
        """A session, with /file open to read."""
        shard = await connect(self.place.shard, self.counts)
        raw = await shard.ask(
            wire.META_OPEN_SESSION, pb.OpenSessionRequest(client="flood").SerializeToString()
        )
        session = Session(self.place, shard, pb.OpenSessionReply.FromString(raw).session)
        session.file = (await session.lookup(ROOT_INODE, b"file")).attr.inode
        request = pb.OpenRequest(change=session.change(0), inode=session.file, rights=READ)
        raw = await shard.ask(wire.META_OPEN, request.SerializeToString())
        session.grant = pb.Entry.FromString(raw).grant
        self.sessions.append(session)
        return session


class Session:
    """A session of the flood at the shard, and what it knows of the tree."""

    def __init__(self, place: Place, shard: Wire, number: int) -> None:
        self.place = place
        self.shard = shard
        self.number = number
        self.file = 0
        self.grant = b""
        """Grant to read `file`."""
        self.many = 0
        """Directory with many names."""
        self.names: list[bytes] = []
        self.inodes: list[int] = []
        self._sequences = [0] * 64

    def change(self, slot: int) -> pb.Change:
        self._sequences[slot] += 1
        return pb.Change(
            session=self.number, slot=slot, sequence=self._sequences[slot], uid=FLOOD_UID, gid=FLOOD_UID
        )

    async def lookup(self, parent: int, name: bytes) -> pb.Entry:
        request = pb.LookupRequest(session=self.number, parent=parent, name=name)
        return pb.Entry.FromString(await self.shard.ask(wire.META_LOOKUP, request.SerializeToString()))

    async def list_many(self) -> None:
        """Learn the names and inodes of /many."""
        self.many = (await self.lookup(ROOT_INODE, b"many")).attr.inode
        cursor, more = 0, True
        while more:
            raw = await self.shard.ask(wire.META_LIST, self.page(cursor))
            reply = pb.ListDirReply.FromString(raw)
            page, more = DirectoryPage(reply.packed), reply.more
            self.names += page.names
            self.inodes += page.inodes
            if more:
                cursor = page.cursor(len(page) - 1)

    def page(self, cursor: int = 0, name: bytes = b"") -> bytes:
        return pb.ListDirRequest(
            session=self.number,
            inode=self.many,
            cursor=cursor,
            name=name,
            limit=LIST_MAX,
            attrs=True,
            packed=True,
        ).SerializeToString()

    def read(self, offset: int, length: int) -> tuple[int, int, int, int, int, int]:
        return self.file, offset // MIB, offset % MIB, length, 0, 0

    def read_request(self, *reads: tuple[int, int, int, int, int, int], grants: int = 1) -> bytes:
        return encode_read_request(
            self.place.epoch,
            self.place.target,
            [self.grant] * grants,
            b"".join([READ_ENTRY.pack(*entry) for entry in reads]),
        )


# -- requests of each kind


def small_reads(session: Session) -> Requests:
    blocks = session.place.file_bytes // BLOCK
    chosen = [random.randrange(blocks) * BLOCK for _ in range(512)]
    return [(wire.DATA_READ, session.read_request(session.read(offset, BLOCK))) for offset in chosen]


def large_reads(session: Session) -> Requests:
    offsets = range(0, session.place.file_bytes, MIB)
    return [(wire.DATA_READ, session.read_request(session.read(offset, MIB))) for offset in offsets]


def read_batches(session: Session) -> Requests:
    """The longest list of reads: once with one grant for all, once with as many grants."""
    blocks = session.place.file_bytes // BLOCK
    reads = [session.read(number % blocks * BLOCK, BLOCK) for number in range(BATCH_ENTRIES_MAX)]
    each = [(*read[:4], number, 0) for number, read in enumerate(reads)]
    return [
        (wire.DATA_READ, session.read_request(*reads)),
        (wire.DATA_READ, session.read_request(*each, grants=BATCH_ENTRIES_MAX)),
    ]


async def lookups(session: Session) -> Requests:
    await session.list_many()
    return [
        (
            wire.META_LOOKUP_MANY,
            pb.LookupManyRequest(
                session=session.number,
                directories=[pb.NamesIn(parent=session.many, names=session.names[first : first + NAMES_MAX])],
                rights=READ,
            ).SerializeToString(),
        )
        for first in range(0, len(session.names), NAMES_MAX)
    ]


def _attributes(session: Session, inodes: list[int]) -> tuple[int, bytes]:
    request = pb.GetAttrManyRequest(session=session.number, inodes=pack_inodes(inodes), rights=READ)
    return wire.META_GETATTR_MANY, request.SerializeToString()


async def attributes(session: Session) -> Requests:
    await session.list_many()
    firsts = range(0, len(session.inodes), LIST_MAX)
    return [_attributes(session, session.inodes[first : first + LIST_MAX]) for first in firsts]


def unreachable(session: Session) -> Requests:
    """Attributes of files to which no path leads that the user may search: none is shown, and each is looked for."""
    return [_attributes(session, session.place.closed[:LIST_MAX])]


async def listings(session: Session) -> Requests:
    await session.list_many()
    firsts = range(0, len(session.names), LIST_MAX)
    return [(wire.META_LIST, session.page(name=session.names[first])) for first in firsts]


async def lists(session: Session) -> Requests:
    """The longest lists of inodes and tickets that a client may send."""
    await session.list_many()
    inodes = pack_inodes(list(itertools.islice(itertools.cycle(session.inodes), INODES_MAX)))
    tickets = pack_inodes(range(1, TICKETS_MAX + 1))
    requests = {
        wire.META_RELEASE: pb.ReleaseRequest(session=session.number, inodes=inodes),
        wire.META_RENEW_SESSION: pb.RenewSessionRequest(session=session.number, released=inodes),
        wire.META_LOCK_WAIT: pb.LockWaitRequest(session=session.number, tickets=tickets),
    }
    return [(method, request.SerializeToString()) for method, request in requests.items()]


def large_of_shard(session: Session) -> Requests:
    """Lists that fill a message of 4 MiB: served or refused, they may hold up nobody."""
    many = pack_inodes([session.file]) * (4 * MIB // 8 - 16)
    requests = {
        wire.META_RENEW_SESSION: pb.RenewSessionRequest(session=session.number, released=many),
        wire.META_RELEASE: pb.ReleaseRequest(session=session.number, slots=list(range(64)) * 65_000),
        wire.META_LOCK_WAIT: pb.LockWaitRequest(session=session.number, tickets=many),
    }
    return [(method, request.SerializeToString()) for method, request in requests.items()]


def large_of_store(session: Session) -> Requests:
    place = session.place
    empty_write = WRITE_ENTRY.pack(session.file, 0, 1, 0, 0, 0, 0, 0)
    reads = data_pb2.ReadRequest(
        map_epoch=place.epoch,
        target=place.target,
        grants=[bytes(60)] * 65_000,
        reads=READ_ENTRY.pack(*session.read(0, BLOCK)),
    )
    writes = data_pb2.WriteRequest(
        map_epoch=place.epoch,
        target=place.target,
        grants=[session.grant],
        writes=empty_write * 104_000,
        session=session.number,
        slot=1,
    )
    return [(wire.DATA_READ, reads.SerializeToString()), (wire.DATA_WRITE, writes.SerializeToString())]


# -- ways to send them

Load = Callable[[Flood], Awaitable[None]]


async def again(work: Callable[[], Awaitable[object]], pause_s: float = 0.05) -> None:
    while True:
        try:
            await work()
        except (OSError, NvpoolError):
            await asyncio.sleep(pause_s)


def statuses(method: int, reply: bytes) -> list[int]:
    """Result of each part of a request that is served as a whole: 0, or the wire code of an error."""
    if method == wire.DATA_READ:
        return [status for status, *_ in READ_RESULT.iter_unpack(decode_read_reply(reply)[0])]
    if method == wire.META_LOOKUP_MANY:
        return [one.error for one in pb.LookupManyReply.FromString(reply).found]
    return []


async def _proved(
    flood: Flood, daemon: str, make: Callable[[Session], Requests | Awaitable[Requests]]
) -> Requests:
    """The requests, after each method was sent once. Its reply is counted, and what the reply says of each part."""
    session = await flood.open()
    made = make(session)
    requests = made if isinstance(made, list) else await made
    store_or_shard = await connect(flood.endpoints(daemon)[0], flood.counts)
    for method, message in requests[:3]:
        with contextlib.suppress(NvpoolError):  # it is counted
            for status in statuses(method, await store_or_shard.ask(method, message)):
                flood.counts.count(PARTS, status)
    store_or_shard.transport.close()
    return requests


def steady(
    daemon: str, make: Callable[[Session], Requests | Awaitable[Requests]], connections: int, depth: int
) -> Load:
    """Keep `depth` requests in flight on each connection."""

    async def load(flood: Flood) -> None:
        async with asyncio.timeout(BEGINS_S):
            requests = await _proved(flood, daemon, make)

        async def one() -> None:
            made = await connect(flood.endpoints(daemon)[0], flood.counts)
            made.keep(requests, depth)
            await made.lost

        flood.begins()
        await asyncio.gather(*[again(one) for _ in range(connections)])

    return load


async def both_large(flood: Flood) -> None:
    async with asyncio.timeout(BEGINS_S):
        of_daemons = {
            "store": await _proved(flood, "store", large_of_store),
            "shard": await _proved(flood, "shard", large_of_shard),
        }

    async def one(daemon: str) -> None:
        made = await connect(flood.endpoints(daemon)[0], flood.counts)
        made.keep(of_daemons[daemon], 2)
        await made.lost

    flood.begins()
    await asyncio.gather(
        *[again(lambda daemon=daemon: one(daemon)) for daemon in of_daemons for _ in range(2)]
    )


async def unread(flood: Flood) -> None:
    async with asyncio.timeout(BEGINS_S):
        of_daemons = {
            "store": await _proved(flood, "store", large_reads),
            "shard": await _proved(flood, "shard", listings),
        }

    async def one(daemon: str) -> None:
        made = await connect(flood.endpoints(daemon)[0], flood.counts)
        await made.never_read(of_daemons[daemon])
        flood.counts.count("connections", "ended by the daemon")

    flood.begins()
    await asyncio.gather(
        *[again(lambda daemon=daemon: one(daemon)) for daemon in of_daemons for _ in range(25)]
    )


async def creates(flood: Flood) -> None:
    """Create a file and unlink it, in each of the session's slots, in the user's own directory."""

    async def begun() -> tuple[Session, int]:
        session = await flood.open()
        return session, (await session.lookup(ROOT_INODE, b"own")).attr.inode

    async def decided(session: Session, method: int, message: bytes) -> None:
        """Send the change again until it is decided: until then its sequence is not used."""
        while True:
            try:
                await session.shard.ask(method, message)
                return
            except Unavailable:
                await asyncio.sleep(0)
            except NvpoolError:
                return

    async def in_slot(session: Session, own: int, slot: int) -> None:
        for number in itertools.count():
            name = b"%d-%d-%d" % (session.number, slot, number)
            mode = stat.S_IFREG | 0o644
            born = pb.CreateRequest(
                change=session.change(slot), parent=own, name=name, mode=mode, exclusive=True
            )
            await decided(session, wire.META_CREATE, born.SerializeToString())
            gone = pb.UnlinkRequest(change=session.change(slot), parent=own, name=name)
            await decided(session, wire.META_UNLINK, gone.SerializeToString())

    async with asyncio.timeout(BEGINS_S):
        first = [await begun()]

    async def one() -> None:
        session, own = first.pop() if first else await begun()
        await asyncio.gather(*[in_slot(session, own, slot) for slot in range(SLOTS)])

    flood.begins()
    await again(one)


async def refused(flood: Flood) -> None:
    async def one(endpoint: str, method: int) -> None:
        made = await connect(endpoint, flood.counts)
        made.keep([(method, b"")], 256)
        await made.lost

    flood.begins()
    ways = ((flood.place.store, wire.DATA_READ), (flood.place.shard, wire.META_LOOKUP))
    await asyncio.gather(*[again(lambda way=way: one(*way)) for way in ways for _ in range(4)])


async def connections(flood: Flood) -> None:
    held: list[Wire] = []

    async def one(endpoint: str) -> None:
        try:
            made = await connect(endpoint, flood.counts)
        except NvpoolError as error:
            flood.counts.count("connections", type(error).__name__)
            raise
        held.append(made)
        flood.counts.count("connections", "served")

    flood.begins()
    endpoints = flood.endpoints("both")
    await asyncio.gather(
        *[again(lambda endpoint=endpoint: one(endpoint), 0.01) for endpoint in endpoints for _ in range(4)]
    )


async def slow(flood: Flood) -> None:
    frame = pack_head(REQUEST, wire.META_LOOKUP, 1, DEADLINE_MS, bytes(4000), 0)

    async def one(endpoint: str) -> None:
        made = await connect(endpoint, flood.counts)
        for byte in frame:
            if made.transport.is_closing():
                return
            made.transport.write(bytes((byte,)))
            await asyncio.sleep(1)

    flood.begins()
    endpoints = flood.endpoints("both")
    await asyncio.gather(*[again(lambda endpoint=endpoint: one(endpoint)) for endpoint in endpoints * 100])


async def busy(flood: Flood) -> None:
    flood.begins()
    while True:
        sum(range(10_000))
        await asyncio.sleep(0)


class Kind(NamedTuple):
    what: str
    load: Load
    is_served: bool = True
    """Each method has to be served at least once; else the flood proves nothing."""
    processes: int = 1


KINDS: dict[str, Kind] = {
    "reads": Kind("4 KiB reads, 8 × 128 in flight", steady("store", small_reads, 8, 128)),
    "batches": Kind("256 reads of 4 KiB a request, 2 × 2 in flight", steady("store", read_batches, 2, 2)),
    "unread": Kind("1 MiB reads and listings on 50 connections that never read", unread),
    "lookups": Kind("1,000 names a META_LOOKUP_MANY, 4 × 8 in flight", steady("shard", lookups, 4, 8)),
    "attributes": Kind(
        "1,024 inodes a META_GETATTR_MANY, 4 × 8 in flight", steady("shard", attributes, 4, 8)
    ),
    "unreachable": Kind("the same of files in a closed directory", steady("shard", unreachable, 2, 2)),
    "listings": Kind("pages of a listing of 10,000 names, 4 × 8 in flight", steady("shard", listings, 4, 8)),
    "creates": Kind("create and unlink in its own directory, 60 in flight", creates),
    "lists": Kind("the longest lists of inodes and tickets, 2 × 4 in flight", steady("shard", lists, 2, 4)),
    "large": Kind("lists that fill a message of 4 MiB, 2 × 2 in flight at each daemon", both_large, False),
    "refused": Kind("requests that are refused while decoded, 8 × 256 in flight", refused, False),
    "connections": Kind("as many connections as it is given, and more all the time", connections, False),
    "slow": Kind("200 connections that send a byte a second", slow, False),
    "busy": Kind("floor: one process that only computes", busy, False),
    "busy-two": Kind("floor: two processes that only compute", busy, False, 2),
}


def become(uid: int) -> None:
    os.setgroups([])
    os.setresgid(uid, uid, uid)
    os.setresuid(uid, uid, uid)


async def run(kind: str, place: Place) -> None:
    flood = Flood(place)
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, flood.report)
    await KINDS[kind].load(flood)


def main() -> None:
    kind, place = sys.argv[1:]
    logging.getLogger("asyncio").setLevel(logging.CRITICAL)  # of futures whose connection has ended
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    become(FLOOD_UID)
    asyncio.run(run(kind, Place(**json.loads(place))))


if __name__ == "__main__":
    main()
