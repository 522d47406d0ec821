"""First writes and closes of small files over frames.

Bytes on the wire, the mount state and all accounting, whatever the replies are. tests/unit/client/rpc/test_change_fast_path.py
tests writes and closes over any connection."""

from __future__ import annotations

import asyncio
import os
import random
import socket
import tempfile
from contextlib import asynccontextmanager

import pytest

from nvpool.client.state.options import ClientOptions
from nvpool.client.state.vfs_types import Caller
from nvpool.client.write.crash_journal import CrashJournal
from nvpool.core.checksum import piece_checksums
from nvpool.core.clock import SYSTEM_CLOCK
from nvpool.core.errors import LockLost, NoSpace
from nvpool.core.ids import ROOT_INODE
from nvpool.poolmap.file_layout import chain_of
from nvpool.rpc.messages.read_write_codec import WRITE_ENTRY, encode_write_reply, encode_write_request
from nvpool.rpc.transports import frame_fast_path
from nvpool.rpc.transports.frame import EMPTY, REQUEST, pack_head, read_head
from nvpool.rpc.v1 import meta_pb2
from nvpool.rpc.v1.wire_pb2 import DATA_WRITE, META_REPORT
from nvpool.shm.mount_state import KeptMemory, Word
from nvpool.testing.fakes.in_process_pool import InProcessPool

ME = Caller(5, 6)


@pytest.fixture(params=(pytest.param("compiled", marks=pytest.mark.compiled), "ordinary"), autouse=True)
def frames(request, monkeypatch):
    """Replies that are taken out of frames by the compiled module, and by the Python module."""
    if request.param == "ordinary":
        monkeypatch.setattr(frame_fast_path, "compiled", None)


class Wire:
    """Records what a connection sends from now on; with `hold` it does not send."""

    def __init__(self, connection) -> None:
        self.connection = connection
        self.hold = False
        self.sent: list[bytes] = []
        self.transport = connection.frames.transport
        connection.frames.transport = self

    def write(self, frame) -> None:
        self.sent.append(bytes(frame))
        if not self.hold:
            self.transport.write(frame)

    def __getattr__(self, name):
        return getattr(self.transport, name)

    def answer(self, message: bytes, status: int = 0) -> None:
        """Answer the newest request."""
        self.connection.answered(max(self.connection.in_flight), status, message, EMPTY)


class Case:
    def __init__(self, pool: InProcessPool, vfs, kept: KeptMemory) -> None:
        self.pool, self.vfs, self.kept = pool, vfs, kept

    async def begin(self, name: bytes = b"f"):
        """A new open file, and the connection to the store that gets its first bytes."""
        _, handle = await self.vfs.create(ROOT_INODE, name, 0o640, os.O_RDWR | os.O_CREAT | os.O_EXCL, ME)
        target = self.pool.pool_map.tables[0].chains[chain_of(handle.inode, 0)].targets[0]
        endpoints = self.pool.pool_map.target_by_id[target].endpoints
        return handle, Wire(await self.vfs.chunks.dialer.connect(endpoints, SYSTEM_CLOCK.boottime_s() + 5))

    @property
    def meta(self):
        return self.vfs.meta.dialer.live(self.pool.pool_map.shards[0].endpoints)

    def flush(self, handle) -> asyncio.Future:
        flushed = asyncio.get_running_loop().create_future()

        def ended(_, error) -> None:
            if error is None:
                flushed.set_result(None)
            else:
                flushed.set_exception(error)

        flushed.begun = self.vfs.begin_flush(handle, ended)
        assert flushed.begun is not None
        if flushed.begun is True:
            ended(None, None)
        return flushed

    def accounting(self, handle) -> dict:
        """All state that a write and a close change."""
        vfs, file = self.vfs, handle.file
        writer, written = vfs.writer, file.written
        found = {
            "held": writer.held,
            "in flight": writer.in_flight,
            "number": writer.last_number,
            "sent": len(writer.begun),
            "unstable": dict(writer.unstable.recent.get(file.inode, {})),
            "word": self.kept.word(Word.UNSTABLE),
            "writes": self.kept.writes.valid(),
            "files": self.kept.files.valid(),
            "kept": vfs.keeping.last_number,
            "taken": self.kept.arena.taken,
            "used": list(self.kept.arena.used[:4]),
            "slots": sorted(vfs.chunks.slots),
            "sequence": vfs.chunks.sequence,
            "counted": vfs.chunks.counters["writes"],
            "changes": vfs.meta.counters["changes"],
            "meta slots": sorted(vfs.meta.shards[1].slots),
            "size": file.attr.size,
            "change": file.attr.change,
            "grant used": file.grant_used,
            "file changes": file.changes,
        }
        if written is not None:
            found |= {
                name: getattr(written, name)
                for name in (
                    "unit_bits",
                    "end",
                    "stored_end",
                    "wrote",
                    "stored_bytes",
                    "begun",
                    "entry",
                    "paused",
                    "error",
                )
            }
            found["of the file"] = written.held
            found["reporting"] = written.reporting.taken
            found["segments"] = [
                (s.start, s.end, b"".join(s.parts), s.number, s.due, s.records) for s in written.segments()
            ]
        return found


@asynccontextmanager
async def case(**options):
    descriptor = KeptMemory.make(1 << 24)
    try:
        with tempfile.TemporaryDirectory() as directory:
            async with InProcessPool(
                endpoints=lambda role, number: f"stream+unix://{directory}/{role}{number}"
            ) as pool:
                kept = KeptMemory(descriptor)
                client = await pool.client(
                    "plain",
                    ClientOptions(retry_first_s=0.001, short_circuit=False, late_closes=False, **options),
                    kept=kept,
                )
                yield Case(pool, client.vfs, kept)
    finally:
        os.close(descriptor)


def scene(work, **options):
    async def whole():
        async with case(**options) as here:
            return await work(here)

    return asyncio.run(whole())


def _decoded(frame: bytes) -> tuple:
    kind, code, number, deadline_ms, message, payload_bytes = read_head(
        bytearray(frame), 0, len(frame), 1 << 20
    )
    return kind, code, number, deadline_ms, message, frame[len(frame) - payload_bytes :]


@pytest.mark.parametrize("length", (4096, 5000, 20000, 32768))
def test_write_and_report_frames_and_accounting(length):
    async def work(here: Case) -> None:
        content = random.Random(length).randbytes(length)
        handle, wire = await here.begin()
        file, chunks = handle.file, here.vfs.chunks
        meta = Wire(here.meta)
        slot, sequence, number = chunks.slots[-1], chunks.sequence + 1, wire.connection.number + 1
        before = here.accounting(handle)
        assert here.vfs.write_now(handle, 0, content, 77)
        # the kernel may be answered now
        (frame,) = wire.sent
        kind, code, its_number, deadline_ms, message, payload = _decoded(frame)
        header = WRITE_ENTRY.pack(file.inode, file.cut, sequence, 0, 0, length, 0, 0)
        target = here.pool.pool_map.tables[0].chains[chain_of(file.inode, 0)].targets[0]
        wanted = encode_write_request(
            1, target, file.grant, header, piece_checksums(content, 0), file.grant_session, slot
        )
        assert (kind, code, its_number, message, payload) == (REQUEST, DATA_WRITE, number, wanted, content)
        assert 59_000 < deadline_ms <= 60_000
        assert frame == pack_head(REQUEST, DATA_WRITE, number, deadline_ms, wanted, length) + content
        accounting = here.accounting(handle)
        ((index, inode, offset, place, unique, size, taken, kept_number),) = accounting["writes"]
        assert (inode, offset, unique, size, taken) == (file.inode, 0, 77, length, length << 1 | 1)
        assert bytes(here.kept.payloads[place : place + length]) == content
        assert accounting["segments"] == [
            (0, length, content, before["number"] + 1, True, [(kept_number, index)])
        ]
        assert accounting["files"] == [(accounting["entry"], 0, 0, file.cut, 0, 0, file.inode)]
        assert (
            accounting["held"]
            == accounting["of the file"]
            == accounting["in flight"]
            == accounting["end"]
            == length
        )
        assert accounting["begun"] and accounting["sent"] == 1 and accounting["wrote"]
        assert accounting["changes"] == before["changes"] and accounting["slots"] == sorted(
            set(before["slots"]) - {slot}
        )
        assert file.size == length and here.vfs.writer.overlay(file, 10, 20) == [(10, 20, content[10:20])]
        flushed = here.flush(handle)
        assert not meta.sent
        slot, sequence = here.vfs.meta.shards[1].slots[0]
        await flushed
        (frame,) = meta.sent
        kind, code, _, _, message, payload = _decoded(frame)
        request = meta_pb2.ReportRequest(
            inode=file.inode, cut=0, end=length, wrote=True, blocks_delta=(length + 511) // 512
        )
        change = request.change
        change.session, change.slot, change.sequence, change.map_epoch = (
            here.vfs.meta.shards[1].session,
            slot,
            sequence + 1,
            1,
        )
        assert (kind, code, message, payload) == (REQUEST, META_REPORT, request.SerializeToString(), b"")
        after = here.accounting(handle)
        assert after["size"] == length and not after["writes"] and after["files"] == accounting["files"]
        assert after["unstable"] == {(1, chain_of(file.inode, 0)): (1, 1)} and after["word"] == 1
        for name in (
            "held",
            "in flight",
            "sent",
            "end",
            "stored_end",
            "stored_bytes",
            "wrote",
            "segments",
            "taken",
        ):
            assert after[name] in (0, []), name
        assert not after["reporting"]
        assert after["slots"] == before["slots"] and len(after["meta slots"]) == len(before["meta slots"])
        assert after["changes"] == before["changes"] + 1 and after["counted"] == before["counted"] + 1
        assert after["file changes"] == before["file changes"] + 2  # the write, and its attributes
        assert bytes(await here.vfs.read(handle, 0, 1 << 16)) == content
        assert not wire.connection.in_flight
        await here.vfs.release(handle)

    scene(work)


def test_slow_path_writes_the_same_bytes():
    async def work(here: Case) -> None:
        numbers = random.Random(1)
        for number, (offset, length) in enumerate(
            ((0, 100), (0, 4095), (4096, 4096), (0, 32769), (0, 300_000), (1, 4096))
        ):
            handle, _ = await here.begin(b"%d" % number)
            content = numbers.randbytes(length)
            assert here.vfs.write_now(handle, offset, content)
            assert here.vfs.write_now(
                handle, offset + length, content[:50]
            )  # more, while the first write is in flight
            await here.flush(handle)
            assert bytes(await here.vfs.read(handle, 0, 1 << 20)) == bytes(offset) + content + content[:50]
            assert here.vfs.write_now(handle, 0, content[:4096])  # the file is not empty any more
            await here.flush(handle)
            assert bytes(await here.vfs.read(handle, 0, 1 << 20))[: len(content[:4096])] == content[:4096]
            await here.vfs.release(handle)
        assert (
            not here.kept.writes.valid() and not here.kept.files.valid() and here.vfs.writer.held_bytes() == 0
        )

    scene(work)


def test_write_beyond_the_buffer_bound_changes_nothing():
    async def work(here: Case) -> None:
        first, wire = await here.begin(b"first")
        second, _ = await here.begin(b"second")
        wire.hold = True
        assert here.vfs.write_now(first, 0, bytes(30_000))
        before = here.accounting(second)
        assert not here.vfs.write_now(second, 0, bytes(20_000))
        after = here.accounting(second)
        assert all(after[name] == before[name] for name in before if name != "files")
        assert second.file.written is None or not list(second.file.written.segments())
        wire.answer(encode_write_reply(1, bytes(16)))
        assert here.vfs.write_now(second, 0, bytes(20_000))
        await asyncio.gather(here.flush(first), here.flush(second))

    scene(work, write_buffer_bytes=40_000)


def test_bytes_in_flight_to_stores_are_bounded():
    async def work(here: Case) -> None:
        handles = [await here.begin(b"%d" % number) for number in range(4)]
        for _, wire in handles:
            wire.hold = True
        for handle, _ in handles:
            assert here.vfs.write_now(handle, 0, bytes(30_000))
        assert here.vfs.writer.in_flight == 60_000 and here.vfs.writer.held_bytes() == 120_000
        for _, wire in handles:
            wire.hold = False
            while wire.connection.in_flight:
                wire.answer(encode_write_reply(1, bytes(16)))
        for handle, _ in handles:
            await here.flush(handle)
        assert here.vfs.writer.in_flight == 0 and not here.kept.writes.valid()

    scene(work, write_flight_bytes=70_000)


GOOD = encode_write_reply(1, bytes(16))


@pytest.mark.parametrize(
    "message", (GOOD[:-1], b"", GOOD[:10] + b"\0", b"\xff" * 29), ids=("short", "nothing", "cut", "nonsense")
)
def test_invalid_reply_makes_the_write_a_replay(message):
    async def work(here: Case) -> None:
        handle, wire = await here.begin()
        slots = len(here.vfs.chunks.slots)
        wire.hold = True
        content = os.urandom(4096)
        assert here.vfs.write_now(handle, 0, content)
        flushed = here.flush(handle)
        wire.hold = False
        wire.answer(message)
        await flushed
        first, second = (_decoded(frame) for frame in wire.sent)
        assert first[4] == second[4] and first[5] == second[5] and first[2] != second[2]
        assert len(here.vfs.chunks.slots) == slots
        assert bytes(await here.vfs.read(handle, 0, 8192)) == content and not here.kept.writes.valid()

    scene(work)


def test_reply_with_unknown_fields_is_accepted():
    async def work(here: Case) -> None:
        handle, wire = await here.begin()
        wire.hold = True
        assert here.vfs.write_now(handle, 0, bytes(4096))
        flushed = here.flush(handle)
        meta = Wire(here.meta)
        meta.hold = True
        wire.answer(GOOD + b"\xf8\x07\x01")
        assert not here.kept.writes.valid() and len(meta.sent) == 1
        attr = meta_pb2.Attr.FromString(handle.file.attr.SerializeToString())
        attr.size, attr.change = 4096, attr.change + 1
        meta.answer(meta_pb2.AttrReply(attr=attr).SerializeToString() + b"\xf8\x07\x01")
        await flushed
        assert handle.file.attr.size == 4096 and not handle.file.written.unsettled
        meta.hold = False

    scene(work)


def test_refused_write_is_reported_by_one_close():
    async def work(here: Case) -> None:
        for number, status in enumerate((False, True)):
            handle, wire = await here.begin(b"%d" % number)
            wire.hold = True
            assert here.vfs.write_now(handle, 0, bytes(4096))
            flushed = here.flush(handle)
            wire.hold = False
            if status:  # of the complete message
                wire.answer(b"", NoSpace.wire_code)
            else:
                wire.answer(encode_write_reply(1, NoSpace.wire_code.to_bytes(2, "little") + bytes(14)))
            with pytest.raises(NoSpace):
                await flushed
            assert not here.kept.writes.valid() and here.vfs.writer.held_bytes() == 0
            await here.flush(handle)
            assert here.kept.files.valid()[-1][4] == 0

    scene(work)


def test_lost_connection_is_replaced_and_the_write_replayed():
    async def work(here: Case) -> None:
        handle, wire = await here.begin()
        wire.hold = True
        content = os.urandom(4096)
        assert here.vfs.write_now(handle, 0, content)
        flushed = here.flush(handle)
        assert len(here.kept.writes.valid()) == 1
        wire.connection.abandon("lost")
        await flushed
        assert bytes(await here.vfs.read(handle, 0, 8192)) == content and not here.kept.writes.valid()
        # and for a report
        handle, wire = await here.begin(b"g")
        meta = Wire(here.meta)
        meta.hold = True
        changes = here.vfs.meta.counters["changes"]
        assert here.vfs.write_now(handle, 0, content)
        flushed = here.flush(handle)
        while not meta.sent:  # noqa: ASYNC110
            await asyncio.sleep(0)
        meta.connection.abandon("lost")
        await flushed
        assert handle.file.attr.size == 4096 and here.vfs.meta.counters["changes"] == changes + 1

    scene(work)


def test_read_of_a_write_in_flight_returns_its_bytes():
    async def work(here: Case) -> None:
        handle, wire = await here.begin()
        wire.hold = True
        content = bytearray(os.urandom(4096))
        wanted = bytes(content)
        assert here.vfs.write_now(handle, 0, memoryview(content))
        content[:] = bytes(4096)  # the buffer is the caller's again
        (segment,) = handle.file.written.segments()
        assert b"".join(segment.parts) == wanted and here.vfs.writer.overlay(handle.file, 0, 4096) == [
            (0, 4096, wanted)
        ]
        assert here.vfs.write_now(handle, 100, b"later")  # waits for the first
        assert here.vfs.writer.overlay(handle.file, 0, 4096)[-1] == (100, 105, b"later")
        flushed = here.flush(handle)
        wire.transport.write(wire.sent[0])
        wire.hold = False
        await flushed
        assert bytes(await here.vfs.read(handle, 0, 8192)) == wanted[:100] + b"later" + wanted[105:]

    scene(work)


@pytest.mark.parametrize("offset", (8192, 1 << 21))
def test_first_bytes_stored_last_report_the_complete_size(offset):
    async def work(here: Case) -> None:
        handle, wire = await here.begin()
        content, wire.hold = os.urandom(4096), True
        assert here.vfs.write_now(handle, 0, content)
        wire.hold = False
        assert here.vfs.write_now(handle, offset, content)  # another piece, which is stored before the first
        flushed = here.flush(handle)
        async with asyncio.timeout(10.0):
            while len(list(handle.file.written.segments())) > 1:  # noqa: ASYNC110
                await asyncio.sleep(0)
        assert not flushed.done() and handle.file.attr.size == 0
        wire.transport.write(wire.sent[0])
        await flushed
        assert handle.file.attr.size == offset + 4096 and not handle.file.written.ahead
        await here.vfs.release(handle)

    scene(work)


def test_locks_lost_during_a_write_are_reported():
    async def work(here: Case) -> None:
        handle, wire = await here.begin()
        wire.hold = True
        assert here.vfs.write_now(handle, 0, bytes(4096))
        flushed = here.flush(handle)
        handle.file.lost = True
        wire.answer(GOOD)
        with pytest.raises(LockLost):
            await flushed
        assert not here.kept.writes.valid() and here.vfs.writer.held_bytes() == 0
        handle.file.lost = False

    scene(work)


def test_client_close_fails_the_pending_flush():
    async def work(here: Case) -> None:
        handle, wire = await here.begin()
        wire.hold = True
        assert here.vfs.write_now(handle, 0, bytes(4096))
        flushed = here.flush(handle)
        slots = len(here.vfs.chunks.slots)
        assert not await here.vfs.writer.close(0.0)
        with pytest.raises(Exception, match="closed"):
            await flushed
        assert (
            not wire.connection.in_flight
            and not here.vfs.writer.begun
            and len(here.vfs.chunks.slots) == slots + 1
        )

    scene(work)


def test_unanswered_write_ends_at_its_deadline():
    async def work(here: Case) -> None:
        handle, wire = await here.begin()
        wire.hold = True
        assert here.vfs.write_now(handle, 0, bytes(4096))
        begun_s = SYSTEM_CLOCK.boottime_s()
        flushed = here.flush(handle)
        with pytest.raises(Exception, match="deadline|answer"):
            await flushed
        assert 0.2 < SYSTEM_CLOCK.boottime_s() - begun_s < 5
        assert not here.kept.writes.valid() and here.vfs.writer.held_bytes() == 0

    scene(work, deadline_s=0.3)


def test_bytes_that_the_socket_queues_are_sent_in_order():
    async def work(here: Case) -> None:
        numbers, made = random.Random(8), []
        for number in range(12):
            _, handle = await here.vfs.create(ROOT_INODE, b"%d" % number, 0o640, os.O_RDWR | os.O_CREAT, ME)
            made.append((handle, numbers.randbytes(numbers.choice((4096, 32768)))))
        for target in here.pool.pool_map.targets:
            connection = await here.vfs.chunks.dialer.connect(target.endpoints, SYSTEM_CLOCK.boottime_s() + 5)
            connection.frames.transport.get_extra_info("socket").setsockopt(
                socket.SOL_SOCKET, socket.SO_SNDBUF, 4096
            )
        for handle, content in made:
            assert here.vfs.write_now(handle, 0, content)
        for handle, content in made:
            await here.flush(handle)
            assert bytes(await here.vfs.read(handle, 0, 1 << 16)) == content
        assert not here.kept.writes.valid()

    scene(work)


def test_many_concurrent_writes_are_stored():
    async def work(here: Case) -> None:
        numbers = random.Random(9)
        handles = [(await here.begin(b"%d" % number))[0] for number in range(60)]
        contents = [numbers.randbytes(numbers.choice((4096, 6000, 32768))) for _ in handles]
        flushes = []
        for handle, content in zip(handles, contents, strict=True):
            assert here.vfs.write_now(handle, 0, content)
            flushes.append(here.flush(handle))
        await asyncio.gather(*flushes)
        for handle, content in zip(handles, contents, strict=True):
            assert bytes(await here.vfs.read(handle, 0, 1 << 16)) == content and handle.file.attr.size == len(
                content
            )
            await here.vfs.release(handle)
        assert not here.kept.writes.valid() and not here.kept.files.valid() and here.kept.arena.taken == 0
        assert (
            len(here.vfs.chunks.slots) == 64
            and here.vfs.writer.held_bytes() == here.vfs.writer.in_flight == 0
        )

    scene(work)


def test_crash_journal_has_the_written_bytes():
    """The process is killed during the write: the next process finds all bytes."""

    async def work(here: Case) -> None:
        handle, wire = await here.begin()
        wire.hold = True
        content = os.urandom(9000)
        assert here.vfs.write_now(handle, 0, content, 99)
        left = CrashJournal(here.kept).left()[handle.inode]
        assert [(piece.offset, bytes(piece.data)) for piece in left.pieces] == [
            (0, content)
        ] and left.stored_end == 0
        assert CrashJournal(here.kept).finished() == {99: 9000}
        wire.hold = False
        wire.connection.abandon("lost")
        await here.flush(handle)

    scene(work)


@pytest.mark.parametrize("length", (4096, 32768, 100_000, 262_144))
def test_first_bytes_are_sent_beside_other_bytes_in_flight(length):
    async def work(here: Case) -> None:
        other, wire = await here.begin(b"other")
        handle, _ = await here.begin()
        wire.hold = True
        assert here.vfs.write_now(other, 0, bytes(30_000))
        content = os.urandom(length)
        assert here.vfs.write_now(handle, 0, content)
        writer, written = here.vfs.writer, handle.file.written
        assert len(writer.begun) == 2 and writer.in_flight == 30_000 + length and not written.dirty
        (segment,) = written.segments()
        assert type(segment.parts[0]) is memoryview, "the bytes of the journal are not copied once more"
        wire.hold = False
        for sent in wire.sent:
            wire.transport.write(sent)
        await asyncio.gather(here.flush(other), here.flush(handle))
        assert bytes(await here.vfs.read(handle, 0, 1 << 20)) == content

    scene(work)


def test_bytes_that_wait_for_a_connection_are_no_view_of_the_journal():
    """The write may be given up and its memory used for another one before the connection sends the bytes."""

    async def work(here: Case) -> None:
        handle, wire = await here.begin()
        wire.connection.writable = False
        content = os.urandom(9000)
        assert here.vfs.write_now(handle, 0, content)
        assert not wire.sent and len(wire.connection.waiting) == 1
        ((_, _, _, place, _, length, _, _),) = here.kept.writes.valid()
        here.kept.payloads[place : place + length] = bytes(length)
        wire.connection.writable = True
        wire.connection.pump()
        (frame,) = wire.sent
        assert _decoded(frame)[5] == content
        here.kept.payloads[place : place + length] = content
        await here.flush(handle)

    scene(work)


def test_repeated_write_has_a_copy_of_the_journal():
    async def work(here: Case) -> None:
        handle, wire = await here.begin()
        wire.hold = True
        content = os.urandom(9000)
        assert here.vfs.write_now(handle, 0, content)
        repeated, write = [], here.vfs.chunks.write

        async def noted(file, index, offset, length, parts, *rest, **named):
            repeated.extend(parts)
            return await write(file, index, offset, length, parts, *rest, **named)

        here.vfs.chunks.write = noted
        wire.connection.abandon("lost")
        await here.flush(handle)
        assert [type(part) for part in repeated] == [bytearray] and bytes(repeated[0]) == content
        assert bytes(await here.vfs.read(handle, 0, 1 << 16)) == content

    scene(work)


def test_write_with_a_wrong_number_of_bytes_in_its_reply_is_repeated():
    async def work(here: Case) -> None:
        handle, wire = await here.begin()
        wire.hold = True
        content = os.urandom(4096)
        assert here.vfs.write_now(handle, 0, content)
        flushed = here.flush(handle)
        wire.hold = False
        wire.answer(encode_write_reply(1, bytes(32)))
        await flushed
        assert len(wire.sent) == 2 and bytes(await here.vfs.read(handle, 0, 8192)) == content

    scene(work)
