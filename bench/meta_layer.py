"""Cost of the metadata service alone: CPU of a request beside its floors, and bytes of LMDB for a file.

    python -m bench.meta_layer [--files 20000] [--dir DIR]

Floors: `kv.apply` of what a create writes, and a handler that decodes the message and answers without deciding anything.
`Frames`: the same from the frame of a request to the frame of its answer (meta/server/request_dispatch).
`Behind the gate`: on a primary with a standby, which acknowledges what each 16 requests changed (meta/server/commit_gate). The
standby and the messages to it are not in it.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import stat
import tempfile
import time

from nvpool.core.clock import SYSTEM_CLOCK
from nvpool.core.ids import ROOT_INODE
from nvpool.kv.engine import LmdbKv, LmdbOptions
from nvpool.kv.replication_log import ReplicationHistory
from nvpool.meta.server.commit_gate import CommitGate
from nvpool.meta.server.service import MetaOptions, MetaService
from nvpool.meta.state import records
from nvpool.rpc.multiplexer import ServerConnection
from nvpool.rpc.stats import ReplyStats
from nvpool.rpc.transports.frame import HEADER_BYTES, REPLY, REQUEST, pack_head
from nvpool.rpc.v1 import meta_pb2 as pb
from nvpool.rpc.v1 import wire_pb2 as wire
from nvpool.testing.fakes.meta_shard import PEER, DirectCall, ShardClient


async def spend(calls: list[DirectCall], handle) -> float:
    """Seconds of CPU of this thread for the calls. The engine's own threads are left out; they have another core."""
    began = time.thread_time()
    for call in calls:
        handle(call)
    spent = time.thread_time() - began
    await asyncio.sleep(0)
    for call in calls:
        while call.answer is None:  # noqa: ASYNC110 (a task of the service answers)
            await asyncio.sleep(0.001)
        assert not isinstance(call.answer, BaseException), call.answer
    return spent


async def measure(name: str, calls: list[DirectCall], handle, rows: list) -> None:
    spent = sum([await spend(calls[at : at + 500], handle) for at in range(0, len(calls), 500)])
    rows.append((name, spent / len(calls) * 1e6))


def requests(method: int, made) -> list[DirectCall]:
    return [DirectCall(method, request.SerializeToString()) for request in made]


GROUP = 16
"""Requests whose changes the standby acknowledges together."""


class Side:
    """Connection through which all requests come."""

    peer = PEER
    draining = False
    now_s = staticmethod(SYSTEM_CLOCK.boottime_s)

    @staticmethod
    def keep(number: int, call) -> None:
        """Take a call that is answered later: none is."""
        raise AssertionError("a request is answered later")


async def measure_fast_path(
    service: MetaService, kv: LmdbKv, method: int, made: list
) -> tuple[float, list[bytes]]:
    """CPU of this thread for a request, in microseconds, and the messages of the replies."""
    spent, answers, reply_stats = 0.0, [], ReplyStats()
    for at in range(0, len(made), 500):
        frames = [
            bytearray(pack_head(REQUEST, method, number, 1000, request.SerializeToString(), 0))
            for number, request in enumerate(made[at : at + 500])
        ]
        out: list[bytes] = []
        while len(out) < len(frames):
            while kv.full:  # also in the middle of a batch: then it takes no changes
                await kv.room()
            began, before = time.thread_time(), len(out)
            for number, frame in enumerate(frames[before:], before + 1):
                service.dispatch.answer(frame, len(frame), {}, reply_stats, out, Side)
                if len(out) != number:
                    break
            spent += time.thread_time() - began
            if len(out) == before:
                break
        assert len(out) == len(frames), "a request was left to the slow path"
        answers += [frame[HEADER_BYTES:] for frame in out]
        await asyncio.sleep(0)
    return spent / len(made) * 1e6, answers


class KeepingSide(ServerConnection):
    """Connection whose replies are kept, in place of a socket."""

    def __init__(self) -> None:
        super().__init__(lambda call: None, PEER)
        self.sent: list[bytes] = []

    def _send_answer(self, number: int, status: int, message, payload, payload_bytes: int) -> None:
        self.sent.append(pack_head(REPLY, status, number, 0, message, payload_bytes))


async def measure_gated(
    service: MetaService, kv: LmdbKv, method: int, made: list
) -> tuple[float, list[bytes]]:
    """As `measure_fast_path`, behind a commit gate."""
    spent, side = 0.0, KeepingSide()
    kv.history = history = ReplicationHistory(kv.last)
    history.alone = False
    gate = CommitGate(history, SYSTEM_CLOCK, lambda: True)
    gate.lease_until_s = SYSTEM_CLOCK.boottime_s() + 3600
    frames = [
        bytearray(pack_head(REQUEST, method, number, 1000, request.SerializeToString(), 0))
        for number, request in enumerate(made)
    ]
    for at in range(0, len(frames), GROUP):
        while kv.full:
            await kv.room()
        out: list[bytes] = []
        began = time.thread_time()
        for frame in frames[at : at + GROUP]:
            service.dispatch.answer(
                frame,
                len(frame),
                side.in_work,
                side.reply_stats,
                out,
                side,
                lambda call: gate.handle(service.handle, call),
            )
        history.advance(history.last.sequence)
        side.sent += out
        spent += time.thread_time() - began
        assert len(side.sent) == min(at + GROUP, len(frames)), "a request was left to the slow path"
        if not at % 512:
            await asyncio.sleep(0)
    kv.history = None
    return spent / len(made) * 1e6, [frame[HEADER_BYTES:] for frame in side.sent]


async def compare_fast_path(
    service: MetaService,
    kv: LmdbKv,
    client: ShardClient,
    change,
    names: list[bytes],
    rows: list,
    *,
    gated: bool,
) -> None:
    way, measure_way = ("behind the gate", measure_gated) if gated else ("frames", measure_fast_path)
    home = (await client.mkdir(ROOT_INODE, way.encode())).inode
    for slot in range(32):
        service.parts.sessions.slot(
            service.parts.sessions.get(client.session), slot
        )  # known, as after the first request in each
    session, rounds = client.session, []

    async def ask(name: str, method: int, made) -> list[bytes]:
        micros, answers = await measure_way(service, kv, method, list(made))
        rounds.append((f"{way}: {name}", micros))
        return answers

    born = [
        pb.CreateReply.FromString(answer).entry.attr.inode
        for answer in await ask(
            "create",
            wire.META_CREATE,
            (
                pb.CreateRequest(
                    change=change(n),
                    parent=home,
                    name=name,
                    exclusive=True,
                    open=True,
                    rights=2,
                    mode=stat.S_IFREG | 0o644,
                )
                for n, name in enumerate(names)
            ),
        )
    ]
    await ask(
        "report",
        wire.META_REPORT,
        (
            pb.ReportRequest(change=change(n), inode=inode, end=4096, wrote=True, release=True)
            for n, inode in enumerate(born)
        ),
    )
    await ask(
        "lookup with a grant",
        wire.META_LOOKUP,
        (pb.LookupRequest(session=session, parent=home, name=name, rights=1) for name in names),
    )
    await ask(
        "getattr", wire.META_GETATTR, (pb.GetAttrRequest(session=session, inode=inode) for inode in born)
    )
    await ask(
        "unlink",
        wire.META_UNLINK,
        (pb.UnlinkRequest(change=change(n), parent=home, name=name) for n, name in enumerate(names)),
    )
    rows += rounds


async def run(files: int, directory: str) -> None:
    kv = await LmdbKv.open(os.path.join(directory, "kv"), LmdbOptions(map_bytes=1 << 30))
    service = MetaService(kv, grant_secret=b"s" * 32, options=MetaOptions(session_lease_s=3600, watch_s=3600))
    await service.start()
    client = await ShardClient(service, 1000, 1000).begin()
    home = (await client.mkdir(ROOT_INODE, b"data")).inode
    names = [b"%012d.jpg" % (number * 7919 % files) for number in range(files)]
    rows: list[tuple[str, float]] = []
    handle = service.handle

    def change(number: int, first_slot: int = 0) -> pb.Change:
        slot = first_slot + number % 32
        client.sequences[slot] += 1
        return pb.Change(
            session=client.session, slot=slot, sequence=client.sequences[slot], uid=1000, gid=1000
        )

    creates = requests(
        wire.META_CREATE,
        (
            pb.CreateRequest(
                change=change(n),
                parent=home,
                name=name,
                exclusive=True,
                open=True,
                mode=stat.S_IFREG | 0o644,
                rights=2,
            )
            for n, name in enumerate(names)
        ),
    )

    def echo(call: DirectCall) -> None:
        request = pb.CreateRequest.FromString(call.message)
        reply = pb.CreateReply(created=True)
        reply.entry.attr.inode = request.parent
        call.reply(reply.SerializeToString())

    echoes = [DirectCall(wire.META_CREATE, call.message) for call in creates]
    await measure("floor: decode and answer a create", echoes, echo, rows)
    value, answer = bytes(30), bytes(190)

    def apply(number: int) -> None:
        kv.apply(
            [
                (b"\x70" + number.to_bytes(8, "big") + bytes(24), value[:5]),
                (b"\x71" + number.to_bytes(8, "big"), value),
                (b"\x72", value),
                (b"\x73", value[:9]),
                (b"\x74" + bytes((number % 64,)), answer),
            ]
        )

    spent = 0.0
    for number in range(files):
        began = time.thread_time()
        apply(number)
        spent += time.thread_time() - began
        if kv.full:
            await kv.room()
        if not number % 500:
            await asyncio.sleep(0)
    rows.append(("floor: kv.apply of five keys", spent / files * 1e6))
    kv.apply([(b"\x72", None), (b"\x73", None), *((b"\x74" + bytes((n,)), None) for n in range(64))])
    for number in range(files):
        if kv.full:
            await kv.room()
        kv.apply(
            [
                (b"\x70" + number.to_bytes(8, "big") + bytes(24), None),
                (b"\x71" + number.to_bytes(8, "big"), None),
            ]
        )
    await kv.checkpoint()
    before = kv.statistics()

    creating = reporting = 0.0
    inodes = []
    for at in range(0, files, 500):
        part = creates[at : at + 500]
        creating += await spend(part, handle)
        born = [pb.CreateReply.FromString(call.answer[0]).entry.attr.inode for call in part]
        reports = requests(
            wire.META_REPORT,
            (
                pb.ReportRequest(change=change(n, 32), inode=inode, end=4096, wrote=True, release=True)
                for n, inode in enumerate(born)
            ),
        )
        reporting += await spend(reports, handle)
        inodes += born
    rows += [
        ("create, opened with a grant", creating / files * 1e6),
        ("report of a write", reporting / files * 1e6),
    ]
    lookups = [pb.LookupRequest(session=client.session, parent=home, name=name) for name in names]
    await measure("lookup, newest in the layer", requests(wire.META_LOOKUP, lookups), handle, rows)
    await kv.checkpoint()
    after = kv.statistics()
    await measure("lookup from LMDB", requests(wire.META_LOOKUP, lookups), handle, rows)
    for lookup in lookups:
        lookup.rights = 1
    await measure("lookup from LMDB with a grant", requests(wire.META_LOOKUP, lookups), handle, rows)
    watching = await client.ask("OPEN_SESSION", pb.OpenSessionRequest(client="watching", watch=True))
    for lookup in lookups:
        lookup.session = watching.session
    await measure("the same with a lease", requests(wire.META_LOOKUP, lookups), handle, rows)
    together = requests(
        wire.META_LOOKUP_MANY,
        (
            pb.LookupManyRequest(
                session=watching.session,
                rights=1,
                directories=[pb.NamesIn(parent=home, names=names[at : at + 100])],
            )
            for at in range(0, files, 100)
        ),
    )
    rows.append(("a name of a hundred looked up together", await spend(together, handle) / files * 1e6))
    await client.ask("CLOSE_SESSION", pb.CloseSessionRequest(session=watching.session))
    await measure(
        "getattr from LMDB",
        requests(
            wire.META_GETATTR, (pb.GetAttrRequest(session=client.session, inode=inode) for inode in inodes)
        ),
        handle,
        rows,
    )
    cursor, listed, spent = 0, 0, 0.0
    while True:
        call = requests(
            wire.META_LIST,
            [pb.ListDirRequest(session=client.session, inode=home, cursor=cursor, limit=500, attrs=True)],
        )[0]
        began = time.thread_time()
        handle(call)
        spent += time.thread_time() - began
        reply = pb.ListDirReply.FromString(call.answer[0])
        listed += len(reply.entries)
        if not reply.more:
            break
        cursor = reply.entries[-1].cursor
    assert listed == files
    rows.append(("listing with attributes, an entry", spent / files * 1e6))
    await measure(
        "rename in a directory",
        requests(
            wire.META_RENAME,
            (
                pb.RenameRequest(
                    change=change(n), parent=home, name=name, new_parent=home, new_name=b"n" + name
                )
                for n, name in enumerate(names[: files // 4])
            ),
        ),
        handle,
        rows,
    )
    await measure(
        "unlink",
        requests(
            wire.META_UNLINK,
            (
                pb.UnlinkRequest(change=change(n), parent=home, name=name)
                for n, name in enumerate(names[files // 4 :])
            ),
        ),
        handle,
        rows,
    )
    for gated in (False, True):
        await compare_fast_path(service, kv, client, change, names, rows, gated=gated)
    for name, micros in rows:
        print(f"{name:40} {micros:8.1f} us")
    for key in ("used_bytes", "entries"):
        print(f"{'LMDB, ' + key + ' for a file':40} {(after[key] - before[key]) / files:8.1f}")
    print(f"{'record of an inode':40} {len(kv.get(records.inode_key(inodes[0]))):8d} bytes")
    await service.close()
    await kv.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--files", type=int, default=20_000)
    parser.add_argument("--dir", default=None)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=arguments.dir, prefix="nvpool-bench-meta-") as directory:
        asyncio.run(run(arguments.files, directory))


if __name__ == "__main__":
    main()
