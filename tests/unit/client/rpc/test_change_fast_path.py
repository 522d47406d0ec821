"""Fast path of metadata changes and writes, without a task: same results as the slow path, and callbacks in order."""

from __future__ import annotations

import asyncio
import os
from contextlib import asynccontextmanager

import pytest
from msgspec.structs import replace

from nvpool.client.state.dirty_file import UnfairLock
from nvpool.client.state.options import ClientOptions
from nvpool.client.state.pool_map_cache import FOLLOW_S
from nvpool.client.state.vfs_types import Caller, DirHandle
from nvpool.core import errors
from nvpool.core.clock import SYSTEM_CLOCK
from nvpool.core.errors import (
    AlreadyExists,
    Disconnected,
    NoSpace,
    NotFound,
    NvpoolError,
    StaleCut,
    StaleEpoch,
    StaleSession,
)
from nvpool.core.ids import ROOT_INODE
from nvpool.poolmap.model import StandbyMember
from nvpool.rpc.v1 import meta_pb2, wire_pb2
from nvpool.shm.mount_state import KeptMemory, Word
from nvpool.testing.fakes.in_process_pool import InProcessPool

ME = Caller(5, 6)
MAKE = os.O_WRONLY | os.O_CREAT | os.O_EXCL
UNIQUE = 1000


class Completion:
    """Callbacks of a change, as a mount's engine has them: records the events and their order."""

    def __init__(self) -> None:
        self.events: list = []
        self.end: asyncio.Future = asyncio.get_running_loop().create_future()
        self.begun = None
        self.on_event = lambda: None

    def _complete(self, event, result, error=None) -> None:
        self.events.append(event)
        self.on_event()
        assert not self.end.done(), "completed twice"
        if error is None:
            self.end.set_result(result)
        else:
            self.end.set_exception(error)

    def made(self, attr) -> None:
        self.attr = attr
        self.events.append("made")
        self.on_event()

    def opened(self, handle) -> None:
        self._complete("opened", (self.attr, handle))

    def found(self, attr, handle) -> None:
        self._complete("found", (attr, handle))

    def go_on(self, opening) -> None:
        raise AssertionError("there is one shard")

    def failed(self, error) -> None:
        self._complete("failed", None, error)

    def ended(self, _, error) -> None:
        self._complete("ended", None, error)


class Case:
    def __init__(self, pool: InProcessPool, vfs, kept) -> None:
        self.pool, self.vfs, self.kept = pool, vfs, kept

    @property
    def state(self):
        return self.vfs.meta.shards[1]

    def create(self, name: bytes, flags: int = MAKE, unique: int = UNIQUE) -> Completion:
        completion = Completion()
        completion.begun = self.vfs.begin_create(ROOT_INODE, name, 0o640, flags, ME, unique, completion)
        return completion

    def unlink(self, name: bytes, unique: int = UNIQUE) -> Completion:
        completion = Completion()
        completion.begun = self.vfs.begin_unlink(ROOT_INODE, name, ME, unique, completion.ended)
        return completion

    def flush(self, handle) -> Completion:
        completion = Completion()
        completion.begun = self.vfs.begin_flush(handle, completion.ended)
        if completion.begun is True:
            completion.ended(None, None)
        return completion

    def answered(self) -> None:
        """The engine has written the reply to the kernel."""
        self.vfs.meta.once.answered(UNIQUE)

    def noted(self) -> list:
        return [record[3] for record in self.kept.slots(self.state.record)]

    async def stores_answer(self, *said: NvpoolError | None, sent: bool = False) -> None:
        for target in self.pool.pool_map.targets:
            await self.vfs.chunks.dialer.connect(target.endpoints, SYSTEM_CLOCK.boottime_s() + 5)
            self.answers_instead(*said, sent=sent, endpoints=target.endpoints)

    def answers_instead(self, *said: NvpoolError | None, sent: bool, endpoints=None) -> None:
        """Answer the next requests over the connection with `said` instead, None: not at all; `sent`: after execution."""
        connection = self.vfs.meta.dialer.live(endpoints or self.pool.pool_map.shards[0].endpoints)
        submit, left = connection.submit, list(said)

        def answer(method, message, payload=(), *, on_done, **named):
            if not left:
                return submit(method, message, payload, on_done=on_done, **named)
            error = left.pop(0)
            if sent:
                return submit(
                    method, message, payload, on_done=lambda reply, failed: on_done(None, error), **named
                )
            if error is not None:
                asyncio.get_running_loop().call_soon(on_done, None, error)
            return 0

        connection.submit = answer


@asynccontextmanager
async def case(pool: InProcessPool | None = None, **options):
    descriptor = KeptMemory.make(1 << 24)
    try:
        async with pool or InProcessPool() as pool:
            kept = KeptMemory(descriptor)
            client = await pool.client(
                "begun", ClientOptions(retry_first_s=0.001, late_closes=False, **options), kept=kept
            )
            with pytest.raises(NotFound):
                await client.vfs.lookup(ROOT_INODE, b"there is a session now")
            yield Case(pool, client.vfs, kept)
    finally:
        os.close(descriptor)


def scene(work, **options):
    async def whole() -> None:
        async with case(**options) as here:
            await work(here)

    asyncio.run(whole())


# -- changes of names --------------------------------------------------------------------------------------------------------


def test_fast_create_equals_slow_create_and_notifies_first():
    async def work(here: Case) -> None:
        slots = len(here.state.slots)
        completion = here.create(b"begun")
        assert here.noted() == [UNIQUE], "before it is sent"

        def look() -> None:
            if completion.events == ["made"]:
                assert completion.attr.inode not in here.vfs.cache.open and here.noted() == [UNIQUE]
                assert len(here.state.slots) == slots - 1, "the kernel is not answered yet"

        completion.on_event = look
        attr, handle = await completion.end
        assert (
            completion.events == ["made", "opened"] and here.noted() == [] and len(here.state.slots) == slots
        )
        asked, asked_handle = await here.vfs.create(ROOT_INODE, b"asked", 0o640, MAKE, ME)
        for field in ("mode", "links", "uid", "gid", "size", "table", "chunk_bits", "change"):
            assert getattr(attr, field) == getattr(asked, field)
        for slot in ("grant_rights", "handles", "opened", "volume", "unreported", "written", "cut"):
            assert getattr(handle.file, slot) == getattr(asked_handle.file, slot)
        for name, made in ((b"begun", handle), (b"asked", asked_handle)):
            assert here.vfs.cache.entry(ROOT_INODE, name, 1.0) == made.inode
            assert here.vfs.leases.held(made.inode) is not None and here.state.open[made.inode] == 1
            assert made.writable and not made.readable
            assert here.vfs.release_now(made) and not here.vfs.release_now(made)
            assert not here.vfs.is_open(made.inode)
        other = (await here.pool.client("other")).vfs
        seen = await other.lookup(ROOT_INODE, b"begun")
        assert (seen.inode, seen.mode, seen.uid, seen.gid) == (attr.inode, 0o100640, 5, 6)

    scene(work)


def test_file_that_cannot_stay_open_is_closed():
    async def work(here: Case) -> None:
        completion = here.create(b"f")

        def refuse() -> None:
            if completion.events == ["made"]:
                raise errors.TooManyOpen()

        completion.on_event = refuse
        with pytest.raises(errors.TooManyOpen):
            await completion.end
        assert (
            completion.events == ["made", "failed"]
            and here.noted() == []
            and not here.vfs.is_open(completion.attr.inode)
        )
        assert completion.attr.inode not in here.state.open and await _listed(here) == [b"f"]

    scene(work)


def test_fast_unlink_equals_slow_unlink():
    async def work(here: Case) -> None:
        _, handle = await here.create(b"f").end
        await here.vfs.release(handle)
        completion = here.unlink(b"f")
        assert here.noted() == [UNIQUE]
        assert await completion.end is None and completion.events == ["ended"] and here.noted() == []
        with pytest.raises(NotFound):
            await here.vfs.lookup(ROOT_INODE, b"f")
        assert here.vfs.getattr_now(ROOT_INODE) is not None, "the reply contained the directory's attributes"

    scene(work)


def test_refused_change_frees_its_slot():
    async def work(here: Case) -> None:
        await here.create(b"f").end
        slots = len(here.state.slots)
        with pytest.raises(AlreadyExists):
            await here.create(b"f").end
        with pytest.raises(NotFound):
            await here.unlink(b"g").end
        assert here.noted() == [] and len(here.state.slots) == slots

    scene(work)


def test_existing_file_is_opened_with_unstored_size():
    async def work(here: Case) -> None:
        _, handle = await here.create(b"f").end
        await here.vfs.write(handle, 0, b"abc")
        completion = here.create(b"f", os.O_WRONLY | os.O_CREAT)
        attr, again = await completion.end
        assert (
            completion.events == ["found"]
            and again.file is handle.file
            and attr.size == 3
            and handle.file.handles == 2
        )
        assert here.create(b"f", os.O_WRONLY | os.O_CREAT | os.O_TRUNC).begun is None, (
            "writes to it must be stopped first"
        )
        new = here.create(b"new", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        assert (new.begun is None) == (here.vfs.cache.entry(ROOT_INODE, b"new", 0.05) != 0)

    scene(work)


@pytest.mark.parametrize("sent", (True, False), ids=("carried-out", "not-sent"))
@pytest.mark.parametrize(
    "lost", (Disconnected("lost"), errors.Busy(), StaleEpoch()), ids=lambda error: type(error).__name__
)
def test_change_with_a_lost_reply_is_retried_exactly_once(sent, lost):
    async def work(here: Case) -> None:
        here.answers_instead(lost, sent=sent)
        attr, handle = await here.create(b"f").end
        assert here.noted() == [UNIQUE], "the kernel may repeat the request"
        here.answered()
        assert await _listed(here) == [b"f"] and handle.inode == attr.inode and here.noted() == []
        assert here.state.open[attr.inode] == 1
        here.answers_instead(lost, sent=sent)
        await here.unlink(b"f").end  # exactly once: a second unlink would not find it
        here.answered()
        assert await _listed(here) == [] and here.noted() == []

    scene(work)


async def _listed(here: Case) -> list[bytes]:
    return (await (await here.pool.client("another")).vfs.readdir(DirHandle(ROOT_INODE), 0, 100))[0].names


async def _add_standby(here: Case) -> None:
    pool = here.pool
    await pool.change_map(
        lambda old: replace(
            old,
            epoch=old.epoch + 1,
            shards=(replace(old.shards[0], standbys=(StandbyMember(1, 1, (), "up"),)), *old.shards[1:]),
        )
    )
    view = here.vfs.meta.view
    await view.refresh()
    assert view.map.shards[0].standbys


@pytest.mark.parametrize("has_standby", (False, True), ids=("older-map", "standby"))
@pytest.mark.parametrize("asked", ("begun", "asked", "submitted"))
def test_requests_of_a_silent_primary_go_to_its_successor(asked, has_standby):
    """The client's map may be older than the standby: it shows a shard without one."""

    async def whole() -> None:
        async with case(InProcessPool(serves_map=True)) as here:
            pool = here.pool
            if has_standby:
                await _add_standby(here)
            for served in pool.listeners["meta", 1].connections:
                served.handler = lambda call: None
            if asked == "begun":
                completion = here.create(b"f")
                assert completion.begun
                answer = completion.end
            elif asked == "asked":
                answer = asyncio.ensure_future(here.vfs.lookup(ROOT_INODE, b"f"))
                await asyncio.sleep(0)
            else:
                answer = asyncio.get_running_loop().create_future()
                assert here.vfs.meta.submit(
                    1,
                    wire_pb2.META_GETATTR,
                    meta_pb2.GetAttrRequest(inode=ROOT_INODE),
                    lambda reply, error: answer.set_result((reply, error)),
                )
            await pool.listen("meta", 9, pool.metas[1].handle)  # the same records under another address
            await pool.change_map(
                lambda old: replace(
                    old,
                    epoch=old.epoch + 1,
                    shards=(replace(old.shards[0], endpoints=pool.new_shard(9).endpoints), *old.shards[1:]),
                )
            )
            async with asyncio.timeout(30):  # half of the deadline
                if asked == "asked":
                    with pytest.raises(NotFound):
                        await answer
                elif asked == "begun":
                    assert (await answer)[0].inode and here.noted() == [UNIQUE]
                else:
                    assert isinstance((await answer)[1], Disconnected)  # the submitter retries then

    asyncio.run(whole())


def test_shard_with_standbys_has_the_fast_path():
    async def whole() -> None:
        async with case(InProcessPool(serves_map=True)) as here:
            await _add_standby(here)
            meta, pool = here.vfs.meta, here.pool
            completion = here.create(b"f")
            assert completion.begun and meta.is_ready(1)
            _, handle = await completion.end
            await here.stores_answer()
            assert here.vfs.write_now(handle, 0, bytes(4096))
            tasks = asyncio.all_tasks()
            closing = here.flush(handle)
            assert closing.begun not in (None, True)
            await closing.end
            assert asyncio.all_tasks() <= tasks, "the report needs no task"
            completion = here.unlink(b"f")
            assert completion.begun
            await completion.end
            renewals, met = meta.counters["renewals"], here.state.met
            await pool.listen(
                "meta", 9, pool.metas[1].handle
            )  # the standby takes over, with the same records
            await pool.change_map(
                lambda old: replace(
                    old,
                    epoch=old.epoch + 1,
                    shards=(replace(old.shards[0], endpoints=pool.new_shard(9).endpoints),),
                )
            )
            await meta.view.refresh()
            assert here.create(b"g").begun is None and not meta.is_ready(1), (
                "the new primary is not known yet"
            )
            await here.vfs.create(ROOT_INODE, b"g", 0o640, MAKE, ME)
            assert meta.counters["renewals"] == renewals + 1 and here.state.met not in (None, met)
            completion = here.create(b"h")
            assert completion.begun
            await completion.end
            assert await _listed(here) == [b"g", b"h"]

    asyncio.run(whole())


def test_idle_client_finds_the_new_primary_later():
    """Otherwise the session ends there, and with it the locks."""

    async def whole() -> None:
        async with case(InProcessPool(serves_map=True)) as here:
            pool, view = here.pool, here.vfs.meta.view
            service = pool.metas[1]
            await pool.hang_up("meta", 1, 0.0)
            await asyncio.sleep(FOLLOW_S + 1.0)
            await pool.listen("meta", 9, service.handle)
            new = await pool.change_map(
                lambda old: replace(
                    old,
                    epoch=old.epoch + 1,
                    shards=(replace(old.shards[0], endpoints=pool.new_shard(9).endpoints),),
                )
            )
            async with asyncio.timeout(20):
                while view.map.epoch < new.epoch:  # noqa: ASYNC110
                    await asyncio.sleep(0.01)
            await pool.listen("meta", 1, service.handle)  # for the end of the pool

    asyncio.run(whole())


def test_ended_session_is_replaced_when_nothing_was_sent():
    async def work(here: Case) -> None:
        session = here.state.session
        here.answers_instead(StaleSession(), sent=False)
        await here.create(b"f").end
        here.answered()
        assert here.state.session != session and here.noted() == []

    scene(work)


def test_change_is_not_repeated_in_another_session():
    async def work(here: Case) -> None:
        here.answers_instead(Disconnected("lost"), sent=True)
        completion = here.create(b"f")
        send = here.vfs.meta.send

        async def ended(state, method, request, deadline_s):
            here.vfs.meta.send = send
            raise StaleSession()

        here.vfs.meta.send = ended
        with pytest.raises(Disconnected):
            await completion.end
        here.answered()
        await here.unlink(b"f").end  # the change was made

    scene(work)


@pytest.mark.parametrize(
    "error", (errors.WrongShard(), Disconnected("lost")), ids=lambda error: type(error).__name__
)
@pytest.mark.parametrize("unique", (UNIQUE, 0), ids=("of-the-kernel", "of-nobody"))
def test_slot_of_a_continued_change_is_released_once(error, unique):
    """For example when the name turns out to belong to an inode of another shard."""

    async def work(here: Case) -> None:
        slots = sorted(slot for slot, _ in here.state.slots)
        here.answers_instead(error, sent=False)
        completion = here.create(b"f", unique=unique)
        completion.on_event = lambda: completion.events == ["made"] and completion.begun.leave()
        await completion.end
        here.answered()
        assert sorted(slot for slot, _ in here.state.slots) == slots and here.noted() == []
        names = [b"%d" % number for number in range(len(slots) + 9)]
        for name in names:  # a slot with a used number would return that reply
            attr, handle = await here.create(name).end
            await here.vfs.release(handle)
        assert sorted(await _listed(here)) == sorted([b"f", *names])

    scene(work)


def test_cancelled_change_completes_once():
    async def work(here: Case) -> None:
        slots = len(here.state.slots)
        completion = here.create(b"f")
        assert completion.begun.cancel() and not completion.begun.cancel()
        with pytest.raises(asyncio.CancelledError):
            await completion.end
        assert completion.events == ["failed"] and here.noted() == [] and len(here.state.slots) == slots
        for number in range(2 * slots):
            await here.vfs.release((await here.create(b"%d" % number).end)[1])
        assert completion.events == ["failed"]

    scene(work)


def test_cancelled_retry_keeps_its_slot_until_the_reply():
    async def work(here: Case) -> None:
        slots = len(here.state.slots)
        here.answers_instead(Disconnected("lost"), sent=False)
        for steps in range(3):  # before its first step, and after
            completion = here.create(b"f")
            while completion.begun.task is None:  # noqa: ASYNC110
                await asyncio.sleep(0)
            for _ in range(steps):
                await asyncio.sleep(0)
            assert completion.begun.cancel()
            with pytest.raises(asyncio.CancelledError):
                await completion.end
            assert len(here.state.slots) == slots - 1 and here.noted() == [UNIQUE], (
                "until the kernel is answered"
            )
            here.answered()
            assert len(here.state.slots) == slots and here.noted() == []
            here.answers_instead(Disconnected("lost"), sent=False)

    scene(work)


def test_fast_path_declines_when_it_would_wait():
    async def work(here: Case) -> None:
        vfs, meta, state = here.vfs, here.vfs.meta, here.state
        before = dict(meta.counters)

        def nothing(name: bytes = b"f", flags: int = MAKE) -> None:
            assert here.create(name, flags).begun is None and here.unlink(name).begun is None
            assert meta.counters == before and here.noted() == []

        for name in (b"", b".", b"..", b"a/b", b"a\0", b"x" * 256):
            nothing(name)
        assert here.create(b"f", os.O_CREAT | 3).begun is None
        session, state.session = state.session, 0
        nothing()
        state.session = session
        slots = list(state.slots)
        state.slots.clear()
        nothing()
        state.slots.extend(slots)
        met, state.met = state.met, None
        nothing()
        state.met = met
        meta.once.held[UNIQUE] = None
        nothing()
        del meta.once.held[UNIQUE]
        dialer, endpoints = meta.dialer, here.pool.pool_map.shards[0].endpoints
        live = dialer.by_endpoints.pop(endpoints)
        nothing()
        dialer.by_endpoints[endpoints] = live
        meta.closed = True
        nothing()
        meta.closed = False
        await here.create(b"f").end
        assert vfs.cache.entry(ROOT_INODE, b"f", 1.0)

    scene(work)


# -- bytes -------------------------------------------------------------------------------------------------------------------


def test_small_file_is_written_and_closed_without_a_task():
    async def work(here: Case) -> None:
        _, handle = await here.create(b"f").end
        content = os.urandom(4096)
        await here.stores_answer()
        tasks = asyncio.all_tasks()
        assert here.vfs.write_now(handle, 0, content)
        completion = here.flush(handle)
        assert asyncio.all_tasks() == tasks and completion.begun not in (None, True)
        await completion.end
        assert (
            handle.file.written.clean and not handle.file.written.unsettled and handle.file.attr.size == 4096
        )
        assert not here.kept.writes.valid() and here.vfs.writer.held_bytes() == 0
        assert here.flush(handle).begun is True, "there is nothing more to report"
        other = (await here.pool.client("other")).vfs
        found = await other.lookup(ROOT_INODE, b"f")
        reader = await other.open(found.inode, os.O_RDONLY, ME)
        assert found.size == 4096 and bytes(await other.read(reader, 0, 8192)) == content

    scene(work)


def test_unstable_mark_is_set_before_bytes_are_dropped():
    async def work(here: Case) -> None:
        _, handle = await here.create(b"f").end
        await here.stores_answer()
        unstable, seen = here.vfs.writer.unstable, []
        note = unstable.on_change
        unstable.on_change = lambda there_is: (
            note(there_is),
            seen.append((there_is, len(here.kept.writes.valid()))),
        )
        assert here.vfs.write_now(handle, 0, bytes(4096))
        await here.flush(handle).end
        assert seen == [(True, 1)] and here.kept.word(Word.UNSTABLE) and not here.kept.writes.valid()

    scene(work)


@pytest.mark.parametrize(
    "error",
    (Disconnected("lost"), StaleEpoch(), errors.Busy(), errors.CorruptFrame("spoiled")),
    ids=lambda error: type(error).__name__,
)
@pytest.mark.parametrize("sent", (True, False), ids=("stored", "not-sent"))
def test_write_with_a_lost_reply_is_retried(error, sent):
    async def work(here: Case) -> None:
        _, handle = await here.create(b"f").end
        content = os.urandom(5000)
        await here.stores_answer(error, sent=sent)
        slots = len(here.vfs.chunks.slots)
        assert here.vfs.write_now(handle, 0, content)
        await here.flush(handle).end
        assert len(here.vfs.chunks.slots) == slots
        reader = await here.vfs.open(handle.inode, os.O_RDONLY, ME)
        assert bytes(await here.vfs.read(reader, 0, 8192)) == content

    scene(work)


def test_failed_write_is_reported_by_one_close():
    async def work(here: Case) -> None:
        _, handle = await here.create(b"f").end
        await here.stores_answer(NoSpace(), sent=False)
        assert here.vfs.write_now(handle, 0, bytes(4096))
        with pytest.raises(NoSpace):
            await here.flush(handle).end
        completion = here.flush(handle)
        assert completion.begun is True or await completion.end is None
        assert not here.kept.writes.valid() and here.vfs.writer.held_bytes() == 0

    scene(work)


@pytest.mark.parametrize(
    "error", (Disconnected("lost"), errors.Busy(), StaleSession()), ids=lambda error: type(error).__name__
)
def test_report_that_meets_an_error_is_retried(error):
    async def work(here: Case) -> None:
        _, handle = await here.create(b"f").end
        assert here.vfs.write_now(handle, 0, bytes(4096))
        here.answers_instead(error, sent=False)
        await here.flush(handle).end
        other = (await here.pool.client("other")).vfs
        assert (await other.lookup(ROOT_INODE, b"f")).size == 4096

    scene(work)


def test_report_is_repeated_after_a_remote_truncation():
    async def work(here: Case) -> None:
        _, handle = await here.create(b"f").end
        assert here.vfs.write_now(handle, 0, bytes(4096))
        here.answers_instead(StaleCut(), sent=False)
        other = (await here.pool.client("other")).vfs
        await other.setattr(handle.inode, size=0, caller=Caller(0, 0))
        await here.flush(handle).end
        assert handle.file.written is None or not handle.file.written.unsettled

    scene(work)


def test_refused_report_is_repeated_by_the_next_close():
    async def work(here: Case) -> None:
        _, handle = await here.create(b"f").end
        assert here.vfs.write_now(handle, 0, bytes(4096))
        here.answers_instead(errors.AccessDenied("no"), sent=False)
        with pytest.raises(errors.AccessDenied):
            await here.flush(handle).end
        written = handle.file.written
        assert (
            written.unsettled
            and written.stored_end == 4096
            and written.stored_bytes == 4096
            and not written.reporting.taken
        )
        await here.flush(handle).end
        assert handle.file.attr.size == 4096

    scene(work)


def test_cancelled_close_leaves_its_report_to_the_next():
    async def work(here: Case) -> None:
        _, handle = await here.create(b"f").end
        for _ in range(3):
            assert here.vfs.write_now(handle, 0, bytes(4096))
            completion = here.flush(handle)
            assert completion.begun.cancel() and not completion.begun.cancel()
            with pytest.raises(asyncio.CancelledError):
                await completion.end
            second = here.flush(handle)
            while second.begun.submitted_report is None:  # noqa: ASYNC110
                await asyncio.sleep(0)
            assert second.begun.cancel()
            with pytest.raises(asyncio.CancelledError):
                await second.end
            assert handle.file.written.unsettled and not handle.file.written.reporting.taken
        await here.flush(handle).end
        assert handle.file.attr.size == 4096 and completion.events == ["ended"]

    scene(work)


def test_close_ends_on_truncation_or_client_close():
    async def work(here: Case) -> None:
        _, handle = await here.create(b"f").end
        assert here.vfs.write_now(handle, 0, bytes(4096))
        completion = here.flush(handle)
        await asyncio.gather(completion.end, here.vfs.setattr(handle.inode, size=0, caller=ME))
        await here.vfs.flush(handle)
        assert (await here.vfs.getattr(handle.inode)).size == 0
        await here.stores_answer(None)
        assert here.vfs.write_now(handle, 0, bytes(4096))
        completion = here.flush(handle)
        await here.vfs.writer.close(0.0)
        with pytest.raises(NvpoolError):
            await completion.end

    scene(work)


def test_file_with_locks_or_an_error_takes_the_slow_path():
    async def work(here: Case) -> None:
        _, handle = await here.create(b"f", os.O_RDWR | os.O_CREAT).end
        await here.vfs.setlk(handle, 7, 0, 10, 2)
        assert here.vfs.write_now(handle, 0, bytes(4096))
        assert here.flush(handle).begun is None and not here.vfs.release_now(handle)
        await here.vfs.flush(handle, 7)
        assert here.vfs.write_now(handle, 0, bytes(4096))
        handle.file.written.error = NoSpace()
        assert here.flush(handle).begun is None
        with pytest.raises(NoSpace):
            await here.vfs.flush(handle)

    scene(work)


def test_turn_is_exclusive_also_with_cancelled_waiters():
    async def whole() -> None:
        turn, order = UnfairLock(), []

        async def work(number: int) -> None:
            async with turn:
                order.append(number)
                await asyncio.sleep(0)
                assert turn.taken and not turn.take()

        assert turn.take() and not turn.take()
        tasks = [asyncio.create_task(work(number)) for number in range(5)]
        await asyncio.sleep(0)
        tasks[1].cancel()
        turn.release()
        tasks[0].cancel()  # woken, and cancelled
        await asyncio.gather(*tasks, return_exceptions=True)
        assert sorted(order) == [2, 3, 4] and turn.take()

    asyncio.run(whole())
