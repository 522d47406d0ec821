"""First writes and closes of small files over frames: the same bytes on the wire and the same books with the compiled steps and
without, whatever the answers are. What they do over any connection has tests/unit/test_client_begun.py."""

from __future__ import annotations

import asyncio
import itertools
import os
import random
import socket
import tempfile
from contextlib import asynccontextmanager

import pytest

from nvpool.client.state.options import ClientOptions
from nvpool.client.state.types import Caller
from nvpool.client.write import fast_writes
from nvpool.client.write.crash_journal import Keeping
from nvpool.core.checksum import piece_checksums
from nvpool.core.clock import SYSTEM_CLOCK
from nvpool.core.errors import LockLost, NoSpace
from nvpool.core.ids import ROOT_INODE
from nvpool.poolmap.layout import chain_of
from nvpool.rpc.messages.data_codec import WRITE_ENTRY, encode_write_reply, encode_write_request
from nvpool.rpc.transports import fast_replies
from nvpool.rpc.transports.frame import EMPTY, REQUEST, pack_head, read_head
from nvpool.rpc.v1 import meta_pb2
from nvpool.rpc.v1.wire_pb2 import DATA_WRITE, META_REPORT
from nvpool.shm.mount_state import KeptMemory, Word
from nvpool.testing.fakes.local_pool import LocalPool

ME = Caller(5, 6)
packing = fast_writes._fast_writes
compiled = pytest.mark.skipif(packing is None, reason="it is not compiled here")


# -- what is packed by hand ----------------------------------------------------------------------------------------------------


@compiled
def test_chains_of_first_chunks_are_those_of_the_layout():
    numbers = random.Random(3)
    for inode in [0, 1, 2, (1 << 63) - 1, *(numbers.getrandbits(63) for _ in range(2000))]:
        assert packing.chain(inode) == chain_of(inode, 0)


@compiled
def test_a_write_is_packed_as_protobuf_has_it():
    numbers = random.Random(4)
    for length in (4096, 4097, 8191, 8192, 12345, 32767, 32768):
        content = numbers.randbytes(length)
        for target, slot, cut in itertools.product((1, 127, 128, 70000), (0, 1, 63), (0, 5, 1 << 40)):
            grant, inode, epoch = numbers.randbytes(60), numbers.getrandbits(63), numbers.getrandbits(40) + 1
            session, sequence = numbers.getrandbits(64) | 1, numbers.getrandbits(50)
            header = WRITE_ENTRY.pack(inode, cut, sequence, 0, 0, length, 0, 0)
            assert packing.write_message(
                epoch, target, grant, inode, cut, sequence, content, session, slot
            ) == encode_write_request(
                epoch, target, grant, header, piece_checksums(content, 0), session, slot
            )


@compiled
def test_a_report_is_packed_as_protobuf_has_it():
    numbers = random.Random(5)
    choices = [0, 1, 127, 128, 16383, 16384, (1 << 32) + 1, (1 << 63) - 1]
    for _ in range(3000):
        slot, sequence, cut, end, blocks = (
            numbers.choice(range(64)),
            *(numbers.choice(choices) for _ in range(4)),
        )
        session, epoch, inode = numbers.getrandbits(64), numbers.getrandbits(48), numbers.getrandbits(63)
        wrote = numbers.random() < 0.5
        request = meta_pb2.ReportRequest(inode=inode, cut=cut, end=end, wrote=wrote, blocks_delta=blocks)
        change = request.change
        change.session, change.slot, change.sequence, change.map_epoch = session, slot, sequence, epoch
        change.uid = change.gid = 0
        assert (
            packing.report_message(session, slot, sequence, epoch, inode, cut, end, wrote, blocks)
            == request.SerializeToString()
        )


# -- over frames ---------------------------------------------------------------------------------------------------------------


@pytest.fixture(params=("compiled", "ordinary"), autouse=True)
def way(request, monkeypatch):
    if request.param == "ordinary":
        monkeypatch.setattr(fast_writes, "_fast_writes", None)
        monkeypatch.setattr(fast_replies, "_frame", None)
    elif fast_writes._fast_writes is None:
        pytest.skip("it is not compiled here")
    return request.param


class Wire:
    """What a connection sends from now on; `hold`: and does not."""

    def __init__(self, connection) -> None:
        self.connection = connection
        self.hold = False
        self.sent: list[bytes] = []
        self._transport = connection._transport
        connection._transport = self

    def write(self, frame) -> None:
        self.sent.append(bytes(frame))
        if not self.hold:
            self._transport.write(frame)

    def __getattr__(self, name):
        return getattr(self._transport, name)

    def answer(self, message: bytes, status: int = 0) -> None:
        """To the newest request."""
        self.connection._answered(max(self.connection._in_flight), status, message, EMPTY)


class Case:
    def __init__(self, pool: LocalPool, vfs, kept: KeptMemory) -> None:
        self.pool, self.vfs, self.kept = pool, vfs, kept

    async def begin(self, name: bytes = b"f"):
        """A new file, open, and the connection to the store that gets its first bytes."""
        _, handle = await self.vfs.create(ROOT_INODE, name, 0o640, os.O_RDWR | os.O_CREAT | os.O_EXCL, ME)
        target = self.pool.pool_map.tables[0].chains[chain_of(handle.inode, 0)].targets[0]
        endpoints = self.pool.pool_map.target_by_id[target].endpoints
        return handle, Wire(await self.vfs.chunks._dialer.connect(endpoints, SYSTEM_CLOCK.boottime_s() + 5))

    @property
    def meta(self):
        return self.vfs.meta._dialer.live(self.pool.pool_map.shards[0].endpoints)

    def flush(self, handle) -> asyncio.Future:
        told = asyncio.get_running_loop().create_future()

        def ended(_, error) -> None:
            if error is None:
                told.set_result(None)
            else:
                told.set_exception(error)

        told.begun = self.vfs.begin_flush(handle, ended)
        assert told.begun is not None
        if told.begun is True:
            ended(None, None)
        return told

    def books(self, handle) -> dict:
        """All that a write and a close are noted in."""
        vfs, file = self.vfs, handle.file
        writer, written = vfs.writer, file.written
        found = {
            "held": writer._held,
            "in flight": writer._in_flight,
            "number": writer._number,
            "sent": len(writer._begun),
            "unflushed": dict(writer._unflushed._recent.get(file.inode, {})),
            "word": self.kept.word(Word.UNFLUSHED),
            "writes": self.kept.writes.valid(),
            "files": self.kept.files.valid(),
            "kept": vfs.keeping._number,
            "taken": self.kept.arena._taken,
            "used": list(self.kept.arena._used[:4]),
            "slots": sorted(vfs.chunks._slots),
            "sequence": vfs.chunks.sequence,
            "counted": vfs.chunks.counters["writes"],
            "changes": vfs.meta.counters["changes"],
            "meta slots": sorted(vfs.meta._shards[1].slots),
            "size": file.attr.size,
            "change": file.attr.change,
            "grant used": file.grant_used,
            "located anew": file.changes,
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
            async with LocalPool(
                endpoints=lambda role, number: f"stream+unix://{directory}/{role}{number}"
            ) as pool:
                kept = KeptMemory(descriptor)
                client = await pool.client(
                    "plain", ClientOptions(retry_first_s=0.001, short_cut=False, **options), kept=kept
                )
                yield Case(pool, client.vfs, kept)
    finally:
        os.close(descriptor)


def scene(work, **options):
    async def whole():
        async with case(**options) as here:
            return await work(here)

    return asyncio.run(whole())


def _told(frame: bytes) -> tuple:
    kind, code, number, deadline_ms, message, payload_bytes = read_head(
        bytearray(frame), 0, len(frame), 1 << 20
    )
    return kind, code, number, deadline_ms, message, frame[len(frame) - payload_bytes :]


@pytest.mark.parametrize("length", (4096, 5000, 20000, 32768))
def test_a_write_and_its_report_are_the_same_frames_and_leave_the_same_books(length, way):
    async def work(here: Case) -> None:
        content = random.Random(length).randbytes(length)
        handle, wire = await here.begin()
        file, chunks = handle.file, here.vfs.chunks
        meta = Wire(here.meta)
        slot, sequence, number = chunks._slots[-1], chunks.sequence + 1, wire.connection._number + 1
        before = here.books(handle)
        assert here.vfs.write_now(handle, 0, content, 77)
        # what the kernel may be told now
        (frame,) = wire.sent
        kind, code, its_number, deadline_ms, message, payload = _told(frame)
        header = WRITE_ENTRY.pack(file.inode, file.cut, sequence, 0, 0, length, 0, 0)
        target = here.pool.pool_map.tables[0].chains[chain_of(file.inode, 0)].targets[0]
        wanted = encode_write_request(
            1, target, file.grant, header, piece_checksums(content, 0), file.grant_session, slot
        )
        assert (kind, code, its_number, message, payload) == (REQUEST, DATA_WRITE, number, wanted, content)
        assert 59_000 < deadline_ms <= 60_000
        assert frame == pack_head(REQUEST, DATA_WRITE, number, deadline_ms, wanted, length) + content
        books = here.books(handle)
        ((index, inode, offset, place, unique, size, taken, kept_number),) = books["writes"]
        assert (inode, offset, unique, size, taken) == (file.inode, 0, 77, length, length << 1 | 1)
        assert bytes(here.kept.payloads[place : place + length]) == content
        assert books["segments"] == [(0, length, content, before["number"] + 1, True, [(kept_number, index)])]
        assert books["files"] == [(books["entry"], 0, 0, file.cut, 0, 0, file.inode)]
        assert books["held"] == books["of the file"] == books["in flight"] == books["end"] == length
        assert books["begun"] and books["sent"] == 1 and books["wrote"]
        assert (type(next(iter(here.vfs.writer._begun))).__name__ == "SentWrite") == (way == "compiled")
        assert books["changes"] == before["changes"] and books["slots"] == sorted(
            set(before["slots"]) - {slot}
        )
        assert file.size == length and here.vfs.writer.overlay(file, 10, 20) == [(10, 20, content[10:20])]
        told = here.flush(handle)
        assert not meta.sent
        slot, sequence = here.vfs.meta._shards[1].slots[0]
        await told
        (frame,) = meta.sent
        kind, code, _, _, message, payload = _told(frame)
        request = meta_pb2.ReportRequest(
            inode=file.inode, cut=0, end=length, wrote=True, blocks_delta=(length + 511) // 512
        )
        change = request.change
        change.session, change.slot, change.sequence, change.map_epoch = (
            here.vfs.meta._shards[1].session,
            slot,
            sequence + 1,
            1,
        )
        assert (kind, code, message, payload) == (REQUEST, META_REPORT, request.SerializeToString(), b"")
        after = here.books(handle)
        assert after["size"] == length and not after["writes"] and after["files"] == books["files"]
        assert after["unflushed"] == {(1, chain_of(file.inode, 0)): (1, 1)} and after["word"] == 1
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
        assert after["located anew"] == before["located anew"] + 2  # the write, and its attributes
        assert bytes(await here.vfs.read(handle, 0, 1 << 16)) == content
        assert not wire.connection._in_flight
        await here.vfs.release(handle)

    scene(work)


def test_what_is_left_to_the_ordinary_way_is_written_as_ever():
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
            )  # more, while the first is on its way
            await here.flush(handle)
            assert bytes(await here.vfs.read(handle, 0, 1 << 20)) == bytes(offset) + content + content[:50]
            assert here.vfs.write_now(handle, 0, content[:4096])  # it is not empty any more
            await here.flush(handle)
            assert bytes(await here.vfs.read(handle, 0, 1 << 20))[: len(content[:4096])] == content[:4096]
            await here.vfs.release(handle)
        assert (
            not here.kept.writes.valid() and not here.kept.files.valid() and here.vfs.writer.held_bytes() == 0
        )

    scene(work)


def test_where_bounds_are_reached_a_write_is_not_taken_and_nothing_has_happened():
    async def work(here: Case) -> None:
        first, wire = await here.begin(b"first")
        second, _ = await here.begin(b"second")
        wire.hold = True
        assert here.vfs.write_now(first, 0, bytes(30_000))
        before = here.books(second)
        assert not here.vfs.write_now(second, 0, bytes(20_000))
        after = here.books(second)
        assert all(after[name] == before[name] for name in before if name != "files")
        assert second.file.written is None or not list(second.file.written.segments())
        wire.answer(encode_write_reply(1, bytes(16)))
        assert here.vfs.write_now(second, 0, bytes(20_000))
        await asyncio.gather(here.flush(first), here.flush(second))

    scene(work, write_buffer_bytes=40_000)


def test_what_is_on_its_way_to_the_stores_at_once_is_bounded():
    async def work(here: Case) -> None:
        handles = [await here.begin(b"%d" % number) for number in range(4)]
        for _, wire in handles:
            wire.hold = True
        for handle, _ in handles:
            assert here.vfs.write_now(handle, 0, bytes(30_000))
        assert here.vfs.writer._in_flight == 60_000 and here.vfs.writer.held_bytes() == 120_000
        for _, wire in handles:
            wire.hold = False
            while wire.connection._in_flight:
                wire.answer(encode_write_reply(1, bytes(16)))
        for handle, _ in handles:
            await here.flush(handle)
        assert here.vfs.writer._in_flight == 0 and not here.kept.writes.valid()

    scene(work, write_flight_bytes=70_000)


GOOD = encode_write_reply(1, bytes(16))


@pytest.mark.parametrize(
    "message", (GOOD[:-1], b"", GOOD[:10] + b"\0", b"\xff" * 29), ids=("short", "nothing", "cut", "nonsense")
)
def test_an_answer_that_is_none_is_asked_for_again_under_the_name_of_the_write(message):
    async def work(here: Case) -> None:
        handle, wire = await here.begin()
        slots = len(here.vfs.chunks._slots)
        wire.hold = True
        content = os.urandom(4096)
        assert here.vfs.write_now(handle, 0, content)
        told = here.flush(handle)
        wire.hold = False
        wire.answer(message)
        await told
        first, second = (_told(frame) for frame in wire.sent)
        assert first[4] == second[4] and first[5] == second[5] and first[2] != second[2]
        assert len(here.vfs.chunks._slots) == slots
        assert bytes(await here.vfs.read(handle, 0, 8192)) == content and not here.kept.writes.valid()

    scene(work)


def test_answers_with_more_than_we_know_are_good():
    async def work(here: Case) -> None:
        handle, wire = await here.begin()
        wire.hold = True
        assert here.vfs.write_now(handle, 0, bytes(4096))
        told = here.flush(handle)
        meta = Wire(here.meta)
        meta.hold = True
        wire.answer(GOOD + b"\xf8\x07\x01")
        assert not here.kept.writes.valid() and len(meta.sent) == 1
        attr = meta_pb2.Attr()
        attr.CopyFrom(handle.file.attr)
        attr.size, attr.change = 4096, attr.change + 1
        meta.answer(meta_pb2.AttrReply(attr=attr).SerializeToString() + b"\xf8\x07\x01")
        await told
        assert handle.file.attr.size == 4096 and not handle.file.written.unsettled
        meta.hold = False

    scene(work)


def test_what_a_store_refuses_is_told_by_the_close_once():
    async def work(here: Case) -> None:
        for number, status in enumerate((False, True)):
            handle, wire = await here.begin(b"%d" % number)
            wire.hold = True
            assert here.vfs.write_now(handle, 0, bytes(4096))
            told = here.flush(handle)
            wire.hold = False
            if status:  # of the message as a whole
                wire.answer(b"", NoSpace.wire_code)
            else:
                wire.answer(encode_write_reply(1, NoSpace.wire_code.to_bytes(2, "little") + bytes(14)))
            with pytest.raises(NoSpace):
                await told
            assert not here.kept.writes.valid() and here.vfs.writer.held_bytes() == 0
            await here.flush(handle)
            assert here.kept.files.valid()[-1][4] == 0

    scene(work)


def test_a_connection_that_is_lost_is_followed_by_another_and_the_write_has_its_name():
    async def work(here: Case) -> None:
        handle, wire = await here.begin()
        wire.hold = True
        content = os.urandom(4096)
        assert here.vfs.write_now(handle, 0, content)
        told = here.flush(handle)
        assert len(here.kept.writes.valid()) == 1
        wire.connection._end("lost")
        await told
        assert bytes(await here.vfs.read(handle, 0, 8192)) == content and not here.kept.writes.valid()
        # and of a report
        handle, wire = await here.begin(b"g")
        meta = Wire(here.meta)
        meta.hold = True
        changes = here.vfs.meta.counters["changes"]
        assert here.vfs.write_now(handle, 0, content)
        told = here.flush(handle)
        while not meta.sent:  # noqa: ASYNC110
            await asyncio.sleep(0)
        meta.connection._end("lost")
        await told
        assert handle.file.attr.size == 4096 and here.vfs.meta.counters["changes"] == changes + 1

    scene(work)


def test_what_is_read_while_it_is_on_its_way_is_what_was_written():
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
        told = here.flush(handle)
        wire._transport.write(wire.sent[0])
        wire.hold = False
        await told
        assert bytes(await here.vfs.read(handle, 0, 8192)) == wanted[:100] + b"later" + wanted[105:]

    scene(work)


@pytest.mark.parametrize("offset", (8192, 1 << 21))
def test_first_bytes_stored_last_report_the_whole_size(offset):
    async def work(here: Case) -> None:
        handle, wire = await here.begin()
        content, wire.hold = os.urandom(4096), True
        assert here.vfs.write_now(handle, 0, content)
        wire.hold = False
        assert here.vfs.write_now(handle, offset, content)  # another piece, which is stored before the first
        told = here.flush(handle)
        async with asyncio.timeout(10.0):
            while len(list(handle.file.written.segments())) > 1:  # noqa: ASYNC110
                await asyncio.sleep(0)
        assert not told.done() and handle.file.attr.size == 0
        wire._transport.write(wire.sent[0])
        await told
        assert handle.file.attr.size == offset + 4096 and not handle.file.written.ahead
        await here.vfs.release(handle)

    scene(work)


def test_locks_that_are_lost_meanwhile_are_told():
    async def work(here: Case) -> None:
        handle, wire = await here.begin()
        wire.hold = True
        assert here.vfs.write_now(handle, 0, bytes(4096))
        told = here.flush(handle)
        handle.file.lost = True
        wire.answer(GOOD)
        with pytest.raises(LockLost):
            await told
        assert not here.kept.writes.valid() and here.vfs.writer.held_bytes() == 0
        handle.file.lost = False

    scene(work)


def test_who_closes_the_client_is_told_and_nothing_waits():
    async def work(here: Case) -> None:
        handle, wire = await here.begin()
        wire.hold = True
        assert here.vfs.write_now(handle, 0, bytes(4096))
        told = here.flush(handle)
        slots = len(here.vfs.chunks._slots)
        assert not await here.vfs.writer.close(0.0)
        with pytest.raises(Exception, match="closed"):
            await told
        assert (
            not wire.connection._in_flight
            and not here.vfs.writer._begun
            and len(here.vfs.chunks._slots) == slots + 1
        )

    scene(work)


def test_a_write_that_nobody_answers_ends_by_its_deadline():
    async def work(here: Case) -> None:
        handle, wire = await here.begin()
        wire.hold = True
        assert here.vfs.write_now(handle, 0, bytes(4096))
        begun_s = SYSTEM_CLOCK.boottime_s()
        told = here.flush(handle)
        with pytest.raises(Exception, match="deadline|answer"):
            await told
        assert 0.2 < SYSTEM_CLOCK.boottime_s() - begun_s < 5
        assert not here.kept.writes.valid() and here.vfs.writer.held_bytes() == 0

    scene(work, deadline_s=0.3)


def test_what_a_socket_does_not_take_at_once_follows_in_its_order():
    async def work(here: Case) -> None:
        numbers, made = random.Random(8), []
        for number in range(12):
            _, handle = await here.vfs.create(ROOT_INODE, b"%d" % number, 0o640, os.O_RDWR | os.O_CREAT, ME)
            made.append((handle, numbers.randbytes(numbers.choice((4096, 32768)))))
        for target in here.pool.pool_map.targets:
            connection = await here.vfs.chunks._dialer.connect(
                target.endpoints, SYSTEM_CLOCK.boottime_s() + 5
            )
            connection._transport.get_extra_info("socket").setsockopt(
                socket.SOL_SOCKET, socket.SO_SNDBUF, 4096
            )
        for handle, content in made:
            assert here.vfs.write_now(handle, 0, content)
        for handle, content in made:
            await here.flush(handle)
            assert bytes(await here.vfs.read(handle, 0, 1 << 16)) == content
        assert not here.kept.writes.valid()

    scene(work)


def test_many_at_once_are_each_stored_and_told_of():
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
        assert not here.kept.writes.valid() and not here.kept.files.valid() and here.kept.arena._taken == 0
        assert (
            len(here.vfs.chunks._slots) == 64
            and here.vfs.writer.held_bytes() == here.vfs.writer._in_flight == 0
        )

    scene(work)


def test_what_the_process_before_left_is_what_was_written():
    """Killed while it is on its way: the next one finds all of it."""

    async def work(here: Case) -> None:
        handle, wire = await here.begin()
        wire.hold = True
        content = os.urandom(9000)
        assert here.vfs.write_now(handle, 0, content, 99)
        left = Keeping(here.kept).left()[handle.inode]
        assert [(piece.offset, bytes(piece.data)) for piece in left.pieces] == [
            (0, content)
        ] and left.stored_end == 0
        assert Keeping(here.kept).finished() == {99: 9000}
        wire.hold = False
        wire.connection._end("lost")
        await here.flush(handle)

    scene(work)
