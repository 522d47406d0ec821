"""Loads of a shard: look-ups, creates, listings, with many requests in flight on one connection.

One process sends all requests, so a figure is the rate of one client. The shard's processor time for each request is
reported beside it.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable, Iterator

from nvpool.core.clock import SYSTEM_CLOCK
from nvpool.core.ids import ROOT_INODE
from nvpool.kv.engine import LmdbKv
from nvpool.meta.state import records
from nvpool.rpc.api import Connection
from nvpool.rpc.v1 import meta_pb2 as pb
from nvpool.rpc.v1 import wire_pb2 as wire

from .tree import DIRECTORY_MODE, FILE_MODE, HOME, OWNER, Tree, directory_name, file_name, size_of

IN_FLIGHT = 32
TOGETHER, TOGETHER_IN_FLIGHT = 100, 4
"""Names in a LOOKUP_MANY, and such requests in parallel."""
LIST_LIMIT = 1000
WRITE = 2
ANSWER_S = 60.0

Parents = Callable[[int], int]
"""Directory of a file, by the number of the file."""


class Client:
    """One session on a connection."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self.session = 0
        self._sequences = [0] * 64

    async def begin(self) -> Client:
        request = pb.OpenSessionRequest(client="bench")
        self.session = (await self.ask(wire.META_OPEN_SESSION, request, pb.OpenSessionReply)).session
        return self

    async def ask(self, method: int, request, answer):
        message, deadline_s = request.SerializeToString(), SYSTEM_CLOCK.boottime_s() + ANSWER_S
        reply = await self._connection.call(method, message, deadline_s=deadline_s)
        return answer.FromString(bytes(reply.message))

    def change(self, slot: int) -> pb.Change:
        self._sequences[slot] += 1
        return pb.Change(
            session=self.session, slot=slot, sequence=self._sequences[slot], uid=OWNER, gid=OWNER
        )

    async def pump(
        self, method: int, messages: Iterator[bytes], in_flight: int, check: Callable[[bytes], None]
    ) -> int:
        """Keep so many requests in flight until there are no more; how many were answered. `check` sees each answer;
        what is refused, as a name that does not exist, ends it with the error."""
        answered, left = 0, in_flight
        ended = asyncio.get_running_loop().create_future()
        submit, now_s = self._connection.submit, SYSTEM_CLOCK.boottime_s

        def go_on(reply, error) -> None:
            nonlocal answered, left
            try:
                if error is not None:
                    raise error
                if reply is not None:
                    check(reply.message)
                    answered += 1
                message = next(messages, None)
                if message is not None and not ended.done():
                    submit(method, message, deadline_s=now_s() + ANSWER_S, on_done=go_on)
                    return
            except Exception as failed:
                if not ended.done():
                    ended.set_exception(failed)
            left -= 1
            if not left and not ended.done():
                ended.set_result(None)

        for _ in range(in_flight):
            go_on(None, None)
        await ended
        return answered

    async def status(self) -> pb.MetaStatusReply:
        return await self.ask(wire.META_STATUS, pb.MetaStatusRequest(), pb.MetaStatusReply)

    # -- looking up ------------------------------------------------------------------------------------------------------

    async def look_up(self, parents: Parents, numbers: Iterator[int]) -> int:
        """Each file by itself, IN_FLIGHT in parallel; how many."""

        def messages() -> Iterator[bytes]:
            for number in numbers:
                yield pb.LookupRequest(
                    session=self.session, parent=parents(number), name=file_name(number)
                ).SerializeToString()

        return await self.pump(wire.META_LOOKUP, messages(), IN_FLIGHT, lambda message: None)

    async def look_up_together(self, parents: Parents, numbers: Iterator[int]) -> int:
        """TOGETHER files in a request; how many files."""

        def messages() -> Iterator[bytes]:
            while part := [number for _, number in zip(range(TOGETHER), numbers, strict=False)]:
                request = pb.LookupManyRequest(session=self.session)
                by_parent: dict[int, list[bytes]] = {}
                for number in part:
                    by_parent.setdefault(parents(number), []).append(file_name(number))
                for parent, names in by_parent.items():
                    request.directories.add(parent=parent, names=names)
                yield request.SerializeToString()

        def check(message) -> None:
            nonlocal found
            answers = pb.LookupManyReply.FromString(bytes(message)).found
            if any(answer.error for answer in answers):
                raise AssertionError("a file that exists was not found")
            found += len(answers)

        found = 0
        await self.pump(wire.META_LOOKUP_MANY, messages(), TOGETHER_IN_FLIGHT, check)
        return found

    # -- making ----------------------------------------------------------------------------------------------------------

    async def make_directory(self, parent: int, name: bytes, slot: int = 63) -> int:
        request = pb.CreateRequest(
            change=self.change(slot), parent=parent, name=name, mode=DIRECTORY_MODE, exclusive=True
        )
        return (await self.ask(wire.META_CREATE, request, pb.CreateReply)).entry.attr.inode

    async def make_files(
        self, parents: Parents, numbers: Iterator[int], on_made: Callable[[int], None] = lambda number: None
    ) -> int:
        """Each is created with a write grant, and its size reported when that is answered, as a mount does at close; IN_FLIGHT
        files in parallel. How many were; `on_made` is called with each when it is acknowledged."""
        made = 0

        async def lane(slot: int) -> None:
            nonlocal made
            call, deadline_s = self._connection.call, SYSTEM_CLOCK.boottime_s
            for number in numbers:
                create = pb.CreateRequest(
                    change=self.change(slot),
                    parent=parents(number),
                    name=file_name(number),
                    mode=FILE_MODE,
                    exclusive=True,
                    open=True,
                    rights=WRITE,
                )
                reply = await call(
                    wire.META_CREATE, create.SerializeToString(), deadline_s=deadline_s() + ANSWER_S
                )
                inode = pb.CreateReply.FromString(bytes(reply.message)).entry.attr.inode
                report = pb.ReportRequest(
                    change=self.change(slot), inode=inode, end=size_of(number), wrote=True, release=True
                )
                await call(wire.META_REPORT, report.SerializeToString(), deadline_s=deadline_s() + ANSWER_S)
                made += 1
                on_made(number)

        async with asyncio.TaskGroup() as group:
            for slot in range(IN_FLIGHT):
                group.create_task(lane(slot))
        return made

    async def make_tree(self, files: int, per_directory: int, progress: Callable[[float], None]) -> None:
        """The whole of a Tree, from an empty shard."""
        home = await self.make_directory(ROOT_INODE, HOME)
        step = per_directory or 1000
        for first in range(0, files, step):
            parent = await self.make_directory(home, directory_name(first // step)) if per_directory else home
            await self.make_files(
                lambda _, parent=parent: parent, iter(range(first, min(first + step, files)))
            )
            progress(min(first + step, files) / files)

    # -- listing ---------------------------------------------------------------------------------------------------------

    async def list(
        self, directory: int, entries: int, most: int, attributes: bool, progress: Callable[[float], None]
    ) -> int:
        """Entry by entry until its end or until there were `most`; how many came. Each step is asked for when the one before
        it has come, as a reader of a directory does. About so many `entries` are expected."""
        cursor = came = 0
        while came < most:
            request = pb.ListDirRequest(
                session=self.session, inode=directory, cursor=cursor, limit=LIST_LIMIT, attrs=attributes
            )
            reply = await self.ask(wire.META_LIST, request, pb.ListDirReply)
            came += len(reply.entries)
            if not reply.more:
                break
            cursor = reply.entries[-1].cursor
            progress(min(1.0, came / min(entries, most)))
        return came


def at_random(files: int, seed: int) -> Iterator[int]:
    chance = random.Random(seed)
    while True:
        yield chance.randrange(files)


def until(
    numbers: Iterator[int], seconds: float, progress: Callable[[float], None] = lambda share: None
) -> Iterator[int]:
    """Those that are taken before so much time has passed since the first."""
    began_s = time.monotonic()
    for at, number in enumerate(numbers):
        if not at % 64:
            passed_s = time.monotonic() - began_s
            if passed_s > seconds:
                return
            progress(passed_s / seconds)
        yield number


# -- the engine alone ----------------------------------------------------------------------------------------------------


def engine_look_ups(kv: LmdbKv, tree: Tree, seconds: float) -> float:
    """Files a second: entry and inode of each are read; their keys are made beforehand."""
    done, spent_s, numbers = 0, 0.0, at_random(tree.files, 4)
    while spent_s < seconds:
        keys = []
        for number in (next(numbers) for _ in range(1000)):
            parent = tree.parent_of(number)
            keys.append((*tree.dentry_keys([number], parent), *tree.inode_keys([number], parent)))
        began_s = time.perf_counter()
        for dentry, inode in keys:
            if kv.get(dentry) is None or kv.get(inode) is None:
                raise AssertionError("a record that exists was not found")
        spent_s += time.perf_counter() - began_s
        done += len(keys)
    return done / spent_s


async def engine_creates(kv: LmdbKv, tree: Tree, first: int, seconds: float) -> float:
    """Files a second, from this number on: what creating one and then reporting its size write, in two changes, with the
    checkpoints."""
    slot, home = records.slot_key(1, 0), records.inode_key(tree.home)
    counts_record, home_record, answer = kv.get(records.COUNTS_KEY), kv.get(home), bytes(190)
    done, spent_s = 0, 0.0
    while spent_s < seconds:
        made = []
        for number in range(first + done, first + done + 1000):
            parent = tree.parent_of(number)
            made.append((*tree.dentries([number], parent), *tree.inodes([number], parent)))
        began_s = time.perf_counter()
        for (dentry, entry), (inode, record) in made:
            while kv.full:
                await kv.room()
            kv.apply(
                [
                    (records.COUNTS_KEY, counts_record),
                    (dentry, entry),
                    (home, home_record),
                    (inode, record),
                    (slot, answer),
                ]
            )
            kv.apply([(inode, record), (slot, answer)])
        await asyncio.sleep(0)
        spent_s += time.perf_counter() - began_s
        done += len(made)
    began_s = time.perf_counter()
    await kv.checkpoint()
    return done / (spent_s + time.perf_counter() - began_s)
