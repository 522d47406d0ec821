"""Small files: number of messages, counted at the shard and the stores, without missing a change of another client."""

from __future__ import annotations

import asyncio
import os
import random
from collections import Counter
from types import SimpleNamespace

import pytest

from nvpool.client.pool_client import Client
from nvpool.client.state.options import ClientOptions
from nvpool.client.state.vfs_types import Caller
from nvpool.core.clock import SystemClock
from nvpool.core.errors import Disconnected, NotFound
from nvpool.core.ids import ROOT_INODE
from nvpool.core.units import KIB
from nvpool.meta.server.service import MetaOptions
from nvpool.rpc.v1.wire_pb2 import Method
from nvpool.sdk.async_filesystem import AsyncFileSystem
from nvpool.testing.fakes.in_process_pool import InProcessPool
from nvpool.testing.fakes.store import PlainStore

ME = Caller(1000, 1000)
EXACT = ClientOptions(deadline_s=10.0, fresh_s=0.0, attr_s=0.0, release_s=0.01)
"""No entry is valid for an age: requests are saved only under a lease."""
LONG = MetaOptions(watch_s=30.0)
"""No lease ends meanwhile, even on a busy machine where the loop stands still for seconds."""
BESIDE = {"META_WATCH", "META_OPEN_SESSION", "META_RENEW_SESSION", "META_RELEASE"}
"""Background messages that are not sent for each file."""


class StandingClock(SystemClock):
    """A clock that can be advanced, as for a process that was stopped."""

    ahead_s = 0.0

    def boottime_s(self) -> float:
        return SystemClock.boottime_s() + self.ahead_s


class CountingPool(InProcessPool):
    """`sent`: messages that arrived at the shard and at the stores. `lose(call)`: drops the reply."""

    def __init__(self, *arguments, **named) -> None:
        super().__init__(*arguments, **named)
        self.sent: Counter = Counter()

    async def listen(self, role: str, number: int, handler) -> None:
        def count(call) -> None:
            self.sent[Method.Name(call.method)] += 1
            handler(call)

        await super().listen(role, number, count)


class Case:
    def __init__(
        self, options: ClientOptions = EXACT, meta: MetaOptions | None = None, **pool_options
    ) -> None:
        self.options = options
        self.chunks: dict[int, dict] = {}
        self.pool = CountingPool(
            make_store=self.make, meta_options=meta or MetaOptions(watch_s=1.0), **pool_options
        )

    async def make(self, pool: InProcessPool, target: int) -> PlainStore:
        return PlainStore(target, pool.grant_secret, chunks=self.chunks.setdefault(target, {}))

    async def __aenter__(self) -> Case:
        await self.pool.__aenter__()
        self.one, self.other = (await self.client()).vfs, (await self.client()).vfs
        return self

    async def __aexit__(self, *failure) -> None:
        await self.pool.__aexit__(*failure)

    async def client(self, clock=None) -> Client:
        client = await Client.open(self.pool.pool_map, "test", self.options, clock=clock or self.pool.clock)
        self.pool.clients.append(client)
        await client.vfs.getattr(ROOT_INODE)  # opens a session
        return client

    async def counted(self, work) -> tuple[object, dict[str, int]]:
        """The result of `work`, and the messages that it sent."""
        self.pool.sent.clear()
        result = await work
        return result, {name: count for name, count in self.pool.sent.items() if name not in BESIDE}


def run(work) -> None:
    asyncio.run(asyncio.wait_for(work, 120))


async def until(is_so) -> None:
    """Wait until `is_so()` is true; a busy machine needs a while."""
    async with asyncio.timeout(60):
        while not is_so():  # noqa: ASYNC110
            await asyncio.sleep(0.01)


async def put(vfs, name: bytes, content: bytes, parent: int = ROOT_INODE) -> int:
    handle = (await vfs.create(parent, name, 0o644, os.O_WRONLY | os.O_TRUNC, ME))[1]
    await vfs.write(handle, 0, content)
    await vfs.flush(handle)
    await vfs.release(handle)
    return handle.inode


async def get(vfs, name: bytes, parent: int = ROOT_INODE, step: int = 1 << 20) -> bytes:
    attr = await vfs.lookup(parent, name)
    handle = await vfs.open(attr.inode, os.O_RDONLY, ME)
    content = b""
    while part := await vfs.read(handle, len(content), step):
        content += bytes(part)
    await vfs.release(handle)
    return content


# -- number of messages -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("step", [1 << 20, 4096, 1])
def test_first_read_of_a_small_file_costs_two_messages(step):
    async def main() -> None:
        async with Case(meta=LONG) as case:
            content = os.urandom(4096 if step == 1 else 64 * KIB)
            await put(case.other, b"file", content)
            for expected in ({"META_LOOKUP": 1, "DATA_READ": 1}, {}, {}):
                found, sent = await case.counted(get(case.one, b"file", step=step))
                assert found == content and sent == expected
            handle = case.one.open_now((await case.one.lookup(ROOT_INODE, b"file")).inode, os.O_RDONLY)
            assert case.one.read_now(handle, 100, 50) == content[100:150]
            await case.one.release(handle)

    run(main())


def test_new_small_file_costs_three_messages():
    async def main() -> None:
        async with Case(meta=LONG) as case:
            _, sent = await case.counted(put(case.one, b"file", bytes(4096)))
            assert sent == {"META_CREATE": 1, "DATA_WRITE": 1, "META_REPORT": 1}
            _, sent = await case.counted(get(case.one, b"file"))
            assert sent == {"DATA_READ": 1}

    run(main())


def test_read_many_by_path_sends_one_message_per_server():
    async def main() -> None:
        options = ClientOptions(release_s=0.01, attr_s=60.0)  # a path is not walked again meanwhile
        async with Case(options, LONG, capacities=(64 << 20, 64 << 20, 64 << 20)) as case:
            there = (await case.other.mkdir(ROOT_INODE, b"a", 0o755, ME)).inode
            below = (await case.other.mkdir(there, b"b", 0o755, ME)).inode
            contents = {}
            for number in range(500):
                content = os.urandom((number * 37) % 9000)
                await put(case.other, b"%d" % number, content, below if number % 2 else there)
                contents[f"/a/b/{number}" if number % 2 else f"a/{number}"] = content
            pool = AsyncFileSystem(await case.client(), ME)
            await pool.stat("/a/b")
            for expected in (1, 0):
                found, sent = await case.counted(pool.read_many(list(contents)))
                assert [bytes(one) for one in found] == list(contents.values())
                assert sent.pop("META_LOOKUP_MANY", 0) == expected and sent.pop("DATA_READ") <= 3 and not sent
            await pool.client.vfs.symlink(ROOT_INODE, b"link", b"a/2", ME)
            assert [bytes(one) for one in await pool.read_many(["link", "a/4"])] == [
                contents["a/2"],
                contents["a/4"],
            ]
            for missing, error in (
                ("a/nothing", FileNotFoundError),
                ("a/b", IsADirectoryError),
                ("a/2/x", NotADirectoryError),
                ("gone/x", FileNotFoundError),
            ):
                with pytest.raises(error) as raised:
                    await pool.read_many(["a/2", missing])
                assert raised.value.filename == missing
            assert not case.one.cache.open and not pool.client.vfs.cache.open

    run(main())


async def many(case: Case, count: int) -> tuple[int, list[bytes]]:
    parent = (await case.other.mkdir(ROOT_INODE, b"many", 0o755, ME)).inode
    for number in range(count):
        await case.other.mknod(parent, b"%d" % number, 0o644, 0, ME)
    names, cursor, more = [], 0, True
    directory = await case.other.opendir(parent)
    while more:
        entries, more = await case.other.readdir(directory, cursor, 1000)
        names += [entry.name for entry in entries]
        cursor = entries[-1].cursor
    assert len(names) == count
    return parent, names


def test_stat_of_many_names_in_list_order_is_a_few_messages():
    async def main() -> None:
        async with Case(meta=LONG) as case:
            parent, names = await many(case, 10_000)

            async def stat_all() -> None:
                for name in names:
                    assert (await case.one.lookup(parent, name)).mode & 0o777 == 0o644

            _, sent = await case.counted(stat_all())
            assert sum(sent.values()) <= 30
            _, sent = await case.counted(stat_all())
            assert not sent
            with pytest.raises(NotFound):
                await case.one.lookup(parent, b"no such name")

    run(main())


def test_next_names_are_prefetched_before_the_last_look_up():
    async def main() -> None:
        async with Case(meta=LONG) as case:
            parent, names = await many(case, 3000)

            async def stat_all() -> int:
                asked = 0
                for name in names:
                    if case.one.lookup_now(parent, name) is None:
                        asked += 1
                        await case.one.lookup(parent, name)
                    for _ in range(5):
                        await asyncio.sleep(0)
                return asked

            asked, sent = await case.counted(stat_all())
            assert asked <= 10 and sent["META_LIST"] <= 10 and sent["META_LOOKUP"] <= 4
            assert not case.one.parts.tasks.running

    run(main())


def test_repeated_look_ups_do_not_prefetch():
    async def main() -> None:
        async with Case(meta=LONG) as case:
            parent, names = await many(case, 1000)
            for name in names[:10]:
                await case.one.lookup(parent, name)

            async def stat_some() -> None:
                for _ in range(100):
                    for name in names[:10]:
                        assert case.one.lookup_now(parent, name)
                    await asyncio.sleep(0)

            assert not (await case.counted(stat_some()))[1]

    run(main())


def test_failed_prefetch_falls_back_to_single_look_ups():
    async def main() -> None:
        async with Case(meta=MetaOptions()) as case:
            parent, names = await many(case, 300)
            ask = case.one.meta.ask

            async def ask_or_fail(inode, method, request, reply):
                if method == Method.Value("META_LIST") and request.cursor:
                    await asyncio.sleep(0)
                    raise Disconnected("raised by the test")
                return await ask(inode, method, request, reply)

            case.one.meta.ask = ask_or_fail
            for name in names:
                assert (await case.one.lookup(parent, name)).mode & 0o777 == 0o644
            assert not case.one.parts.tasks.running

    run(main())


def test_random_look_ups_do_not_keep_prefetching():
    async def main() -> None:
        async with Case(meta=LONG) as case:
            parent, names = await many(case, 4000)

            async def stat_some() -> None:
                for name in sorted(names)[::8]:
                    await case.one.lookup(parent, name)

            _, sent = await case.counted(stat_some())
            assert sent["META_LIST"] <= 6

    run(main())


def test_listed_names_are_not_looked_up():
    async def main() -> None:
        async with Case(meta=LONG) as case:
            await many(case, 3000)
            case.options = ClientOptions()
            pool = AsyncFileSystem(await case.client(), ME)
            entries = [entry async for entry in pool.scan("many")]

            async def stat_all() -> None:
                for entry in entries:
                    assert (await pool.stat("many/" + entry.name)).st_ino == entry.stat.st_ino

            began_s = case.pool.clock.boottime_s()
            _, sent = await case.counted(stat_all())
            took_s = case.pool.clock.boottime_s() - began_s
            assert sum(sent.values()) <= 3 + took_s  # of the directory, once a second

    run(main())


# -- visibility of changes --------------------------------------------------------------------------------------------------


def test_next_open_and_look_up_see_changes_of_others():
    async def main() -> None:
        async with Case(meta=LONG) as case:
            one, other = case.one, case.other
            inode = await put(other, b"file", b"first")
            assert await get(one, b"file") == b"first"
            await put(other, b"file", b"second, and longer")
            assert await get(one, b"file") == b"second, and longer"
            await asyncio.sleep(0)
            await other.setattr(inode, size=3, caller=ME)
            assert await get(one, b"file") == b"sec"
            await other.setattr(inode, mode=0o600, caller=ME)
            assert (await one.lookup(ROOT_INODE, b"file")).mode & 0o777 == 0o600
            await put(other, b"new", b"another")
            await get(one, b"new")
            await other.rename(ROOT_INODE, b"new", ROOT_INODE, b"file", 0, ME)
            assert await get(one, b"file") == b"another"
            with pytest.raises(NotFound):
                await one.lookup(ROOT_INODE, b"new")
            await other.link((await other.lookup(ROOT_INODE, b"file")).inode, ROOT_INODE, b"second name", ME)
            assert (await one.lookup(ROOT_INODE, b"file")).links == 2
            await other.unlink(ROOT_INODE, b"file", ME)
            with pytest.raises(NotFound):
                await one.lookup(ROOT_INODE, b"file")
            assert (await one.lookup(ROOT_INODE, b"second name")).links == 1
            await other.setxattr((await one.lookup(ROOT_INODE, b"second name")).inode, b"user.x", b"1", 0, ME)
            assert await one.getxattr((await one.lookup(ROOT_INODE, b"second name")).inode, b"user.x") == b"1"
            assert case.pool.meta.parts.watches.waited_out == 0

    run(main())


def test_contended_file_gets_no_repeated_leases():
    async def main() -> None:
        async with Case() as case:
            await put(case.other, b"file", b"0")
            for number in range(20):
                assert await get(case.one, b"file") == b"%d" % number
                await put(case.other, b"file", b"%d" % (number + 1))
            assert case.pool.meta.parts.watches.recalled <= 2

    run(main())


def state_of(vfs):
    return next(iter(vfs.meta.shards.values()))


def test_silent_client_delays_a_change_only_once():
    async def main() -> None:
        async with Case() as case:
            one, other = case.one, case.other
            names = [b"%d" % number for number in range(10)]
            for name in names:
                await put(other, name, b"first")
                assert await get(one, name) == b"first"
            state_of(one).watching.cancel()  # as if the client were stopped: no message is sent or received
            for name in names:
                await put(other, name, b"second")
            # the second wait lasts some milliseconds: the reply that named the first file gave a later end of the watch
            assert case.pool.meta.parts.watches.waited_out <= 2
            assert one.open_now((await other.lookup(ROOT_INODE, names[0])).inode, os.O_RDONLY) is None
            for name in names:
                assert await get(one, name) == b"second"
            await asyncio.sleep(0.2)
            found, sent = await case.counted(get(one, names[3]))
            assert found == b"second"

    run(main())


def test_lost_lease_recalls_are_repeated_before_a_change():
    async def main() -> None:
        async with Case(meta=LONG) as case:
            one, other = case.one, case.other
            await put(other, b"file", b"first")
            assert await get(one, b"file") == b"first"
            watches = case.pool.meta.parts.watches
            answer, lost = watches.answer, []

            def lose(watch, call) -> None:
                if watch.pending and watch.call is call and len(lost) < 3:
                    lost.append(call)
                    watch.call = SimpleNamespace(reply=lambda *_: call.fail(Disconnected("on the way")))
                answer(watch, watch.call)

            watches.answer = lose
            await put(other, b"file", b"second")
            assert len(lost) == 3 and watches.waited_out == 0
            assert await get(one, b"file") == b"second"

    run(main())


def test_too_many_recalls_end_all_leases(monkeypatch):
    async def main() -> None:
        monkeypatch.setattr("nvpool.meta.sessions.lease_table.PENDING_MAX", 3)
        async with Case() as case:
            one, other = case.one, case.other
            inodes = [await put(other, b"%d" % number, b"first") for number in range(12)]
            for number in range(12):
                await get(one, b"%d" % number)
            await asyncio.gather(*[other.setattr(inode, mode=0o600, caller=ME) for inode in inodes])
            for number in range(12):
                assert (await one.lookup(ROOT_INODE, b"%d" % number)).mode & 0o777 == 0o600
            assert case.pool.meta.parts.watches.waited_out == 0
            await get(one, b"1")
            await put(other, b"1", b"second")
            assert await get(one, b"1") == b"second"

    run(main())


@pytest.mark.parametrize("stopped", [False, True])
def test_restarted_shard_waits_for_former_lease_holders(stopped):
    async def main() -> None:
        async with Case(meta=MetaOptions(watch_s=2.0)) as case:
            one, other = case.one, case.other
            await put(other, b"file", b"first")
            await put(other, b"mine", b"x")
            assert await get(one, b"file") == b"first"
            if stopped:
                state_of(one).watching.cancel()
            await case.pool.stop_shard()
            await case.pool.start_shard()
            writing = asyncio.create_task(put(other, b"file", b"second"))
            await asyncio.sleep(0)
            while not writing.done():
                if one.leases.held((await other.lookup(ROOT_INODE, b"mine")).inode):
                    raise AssertionError("a lease of the former process")
                await asyncio.sleep(0.02)
            assert await get(one, b"file") == b"second"

    run(main())


# -- open files that are not reported yet ------------------------------------------------------------------------------------


def test_unreported_open_stays_readable_after_unlink():
    async def main() -> None:
        async with Case(meta=MetaOptions(watch_s=1.0, linger_s=0.0, tick_s=3600)) as case:
            one, other, content = case.one, case.other, os.urandom(200 * KIB)
            inode = await put(other, b"file", content)
            await until(lambda: not case.pool.meta.parts.sessions.holders)
            await one.lookup(ROOT_INODE, b"file")
            handle, sent = await case.counted(one.open(inode, os.O_RDONLY, ME))
            assert not sent and handle.file.unreported
            await other.unlink(ROOT_INODE, b"file", ME)
            await case.pool.meta.run_once()
            assert bytes(await one.read(handle, 0, 1 << 20)) == content
            await one.release(handle)
            await until(lambda: not case.pool.meta.parts.sessions.holders)
            await case.pool.meta.run_once()
            assert not any(key[0] == inode for chunks in case.chunks.values() for key in chunks)

    run(main())


def test_lease_open_is_reported_unless_closed_before():
    async def main() -> None:
        async with Case(EXACT._replace(report_opens_s=0.2), LONG) as case:
            inodes = [await put(case.other, name, b"x") for name in (b"kept", b"closed")]
            await until(lambda: not case.pool.meta.parts.sessions.holders)
            for name in (b"kept", b"closed"):
                await case.one.lookup(ROOT_INODE, name)
            handles = [await case.one.open(inode, os.O_RDONLY, ME) for inode in inodes]
            again = await case.one.open(inodes[0], os.O_RDONLY, ME)
            await case.one.release(handles[1])
            session = case.pool.meta.parts.sessions.by_number[state_of(case.one).session]
            await until(lambda: session.opens and not again.file.unreported)
            assert session.opens == {inodes[0]: 1} and not again.file.unreported
            case.pool.sent.clear()
            await case.one.release(handles[0])
            await case.one.release(again)
            await until(lambda: not session.opens)
            await asyncio.sleep(0.1)  # no other message follows
            assert not session.opens and case.pool.sent["META_RELEASE"] == 1

    run(main())


@pytest.mark.parametrize("size", [100, 200 * KIB])
def test_read_of_a_collected_file_fails_after_a_long_stop(size):
    async def main() -> None:
        async with Case(
            EXACT._replace(report_opens_s=1000.0), meta=MetaOptions(watch_s=1.0, linger_s=0.0, tick_s=3600)
        ) as case:
            one, other, content = case.one, case.other, b"\1" * size
            inode = await put(other, b"file", content)
            await until(lambda: not case.pool.meta.parts.sessions.holders)
            await one.lookup(ROOT_INODE, b"file")
            handle = one.open_now(inode, os.O_RDONLY)
            state_of(one).reporting.cancel()
            state_of(one).watching.cancel()
            await other.unlink(ROOT_INODE, b"file", ME)  # waits until the lease has ended
            await case.pool.meta.run_once()
            for _ in range(2):
                with pytest.raises(NotFound):
                    await one.read(handle, 0, 50)
            with pytest.raises(NotFound):
                await one.read_many([(handle, 0, 50)], memoryview(bytearray(50)))
            assert one.read_now(handle, 0, 50) is None
            await one.release(handle)

    run(main())


def test_file_changed_during_a_lease_open_stays_readable():
    async def main() -> None:
        async with Case(EXACT._replace(report_opens_s=1000.0)) as case:
            inode = await put(case.other, b"file", b"a" * 100)
            await case.one.lookup(ROOT_INODE, b"file")
            handle = await case.one.open(inode, os.O_RDONLY, ME)
            await put(case.other, b"file", b"b" * 200)
            assert bytes(await case.one.read(handle, 0, 50)) in (b"a" * 50, b"b" * 50)
            assert not handle.file.unreported
            await case.one.release(handle)

    run(main())


def test_stopped_time_of_the_process_ends_its_leases():
    async def main() -> None:
        async with Case() as case:
            clock = StandingClock()
            still = (await case.client(clock)).vfs
            inode = await put(case.other, b"file", b"x")
            assert await get(still, b"file") == b"x" and still.leases.held(inode)
            clock.ahead_s = 5.0
            assert still.leases.held(inode) is None and still.open_now(inode, os.O_RDONLY) is None

    run(main())


def test_reply_older_than_the_lease_end_starts_no_lease():
    async def main() -> None:
        async with Case() as case:
            inode = await put(case.other, b"file", b"x")
            leases, watch = case.one.leases, state_of(case.one).watch
            sent_s = case.pool.clock.boottime_s()
            leases.end(watch, [inode])
            assert leases.take(inode, 60_000, sent_s) is None and leases.take(
                inode, 60_000, case.pool.clock.boottime_s()
            )
            leases.end_all(watch)
            assert leases.held(inode) is None and leases.take(inode, 60_000, sent_s) is None

    run(main())


# -- histories -------------------------------------------------------------------------------------------------------------


async def history(seed: int, steps: int, faults: bool) -> None:
    """Clients rewrite, replace and read a few files. Each open sees at least the contents closed before it began."""
    dice = random.Random(seed)
    meta = MetaOptions(watch_s=0.5, linger_s=1.5, tick_s=0.05)
    async with Case(EXACT._replace(deadline_s=30.0, report_opens_s=0.05), meta=meta) as case:
        clients = [case.one, case.other, (await case.client()).vfs]
        names = [b"%d" % number for number in range(3)]
        closed = dict.fromkeys(names, 0)
        for name in names:
            await put(clients[0], name, b"%08d" % 0)
        turns = {name: asyncio.Lock() for name in names}
        done = False

        async def write(vfs) -> None:
            for _ in range(steps):
                name = dice.choice(names)
                async with turns[name]:
                    version = closed[name] + 1
                    if dice.random() < 0.5:
                        handle = await vfs.open((await vfs.look(ROOT_INODE, name)).inode, os.O_WRONLY, ME)
                        await vfs.write(handle, 0, b"%08d" % version)
                        await vfs.flush(handle)
                        await vfs.release(handle)
                    else:
                        await put(vfs, name + b".new", b"%08d" % version)
                        await vfs.rename(ROOT_INODE, name + b".new", ROOT_INODE, name, 0, ME)
                    closed[name] = version
                await asyncio.sleep(dice.random() * 0.01)

        async def read(vfs) -> None:
            while not done:
                name = dice.choice(names)
                least = closed[name]
                try:
                    inode = (await vfs.look(ROOT_INODE, name)).inode
                    handle = await vfs.open(inode, os.O_RDONLY, ME)
                except NotFound:
                    continue  # replaced between look-up and open: the kernel walks again
                if not handle.attr.links:
                    await vfs.release(handle)
                    continue
                assert int(bytes(await vfs.read(handle, 0, 100))) >= least
                await vfs.release(handle)
                await asyncio.sleep(dice.random() * 0.003)

        async def disturb() -> None:
            while not done:
                await asyncio.sleep(dice.random() * 0.3)
                state = state_of(dice.choice(clients))
                if dice.random() < 0.7 and state.watching is not None:
                    state.watching.cancel()
                elif dice.random() < 0.5:
                    await case.pool.stop_shard()
                    await case.pool.start_shard()

        others = [
            asyncio.create_task(work)
            for work in [read(vfs) for vfs in clients] + ([disturb()] if faults else [])
        ]
        try:
            await asyncio.gather(*[write(vfs) for vfs in clients])
        finally:
            done = True
            await asyncio.gather(*others)


@pytest.mark.few(2)
@pytest.mark.parametrize(("seed", "faults"), [(1, False), (2, True), (3, True)])
def test_open_by_lease_sees_contents_closed_before(seed, faults):
    asyncio.run(asyncio.wait_for(history(seed, 40, faults), 120))


@pytest.mark.soak
@pytest.mark.parametrize("seed", range(10, 40))
def test_open_by_lease_sees_closed_contents_in_a_long_run(seed):
    asyncio.run(asyncio.wait_for(history(seed, 300, True), 280))
