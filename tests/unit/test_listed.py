"""Entries of listings on their way: packed, believed by the client in batches as one by one, told to the kernel."""

import asyncio

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from nvpool.client.state.attr_cache import Cache
from nvpool.client.state.leases import Leases, ShardWatch
from nvpool.client.state.options import ClientOptions
from nvpool.client.state.types import Caller
from nvpool.core.clock import ManualClock
from nvpool.core.errors import CorruptFrame
from nvpool.core.ids import ROOT_INODE as ROOT
from nvpool.fuse.ops import kernel_cache
from nvpool.fuse.ops.operations import FuseOps
from nvpool.rpc.messages.direntries import DirectoryPage, attr_of, change_of, pack_entry, packed
from nvpool.rpc.v1.meta_pb2 import Attr, DirEntry
from nvpool.testing.fakes.vfs import MemoryVfs

ME = Caller(0, 0)
WORDS, SIGNED = st.integers(0, (1 << 64) - 1), st.integers(-(1 << 63), (1 << 63) - 1)
HALVES = st.integers(0, (1 << 32) - 1)
ATTRS = st.builds(
    Attr,
    inode=WORDS,
    mode=HALVES,
    links=HALVES,
    uid=HALVES,
    gid=HALVES,
    size=WORDS,
    blocks=WORDS,
    atime_ns=SIGNED,
    mtime_ns=SIGNED,
    ctime_ns=SIGNED,
    rdev=HALVES,
    table=st.integers(0, 255),
    chunk_bits=st.integers(0, 255),
    cut=WORDS,
    flags=st.integers(0, 255),
    change=WORDS,
    parent=WORDS,
    punches=WORDS,
)
ENTRIES = st.lists(
    st.builds(
        DirEntry, name=st.binary(min_size=1, max_size=255), cursor=WORDS, attr=ATTRS, promised=st.booleans()
    ),
    max_size=8,
)


# -- packed --------------------------------------------------------------------------------------------------------------


@settings(suppress_health_check=[HealthCheck.too_slow])  # on a busy machine
@given(ENTRIES)
def test_entries_come_out_as_they_went_in(entries):
    listed = DirectoryPage(packed(entries))
    assert [(one.name, one.cursor, one.inode, one.kind, one.attr) for one in listed] == [
        (one.name, one.cursor, one.attr.inode, one.attr.mode >> 12, one.attr) for one in entries
    ]
    assert [attr_of(record) for record in listed.records] == [entry.attr for entry in entries]
    assert (
        [change_of(record) for record in listed.records]
        == listed.changes
        == [entry.attr.change for entry in entries]
    )
    assert listed.promised == sum(entry.promised for entry in entries)
    assert [listed.is_promised(at) for at in range(len(listed))] == [entry.promised for entry in entries]


def test_other_attributes_can_be_put_in_an_entry():
    listed = DirectoryPage(
        pack_entry(7, Attr(inode=1, size=2), True, b"a") + pack_entry(8, Attr(inode=3), False, b"b")
    )
    listed.put(0, Attr(inode=1, size=99, change=4))
    assert listed[0].attr.size == attr_of(listed.records[0]).size == 99
    assert (listed[0].name, listed[0].cursor, listed.is_promised(0), listed[1].inode) == (b"a", 7, True, 3)


def test_entries_that_are_cut_off_are_none():
    whole = pack_entry(7, Attr(inode=1), True, b"name") * 2
    for length in range(1, len(whole)):
        if length != len(whole) // 2:
            with pytest.raises(CorruptFrame):
                DirectoryPage(whole[:length])


# -- what the client believes ------------------------------------------------------------------------------------------


class Books:
    def __init__(self, cached_entries=1000):
        self.clock, self.watch = ManualClock(), ShardWatch()
        self.watch.until_s = float("inf")
        self.leases = Leases(self.clock, cached_entries, lambda inode: self.watch)
        self.cache = Cache(ClientOptions(cached_entries=cached_entries), self.clock, self.leases)

    def now(self):
        self.clock.advance(1.0)
        return self.clock.boottime_s()


def listed_of(*inodes, change=5):
    return DirectoryPage(
        b"".join(
            pack_entry(inode, Attr(inode=inode, change=change, size=change), True, b"%d" % inode)
            for inode in inodes
        )
    )


def test_leases_that_came_together_end_one_by_one():
    books = Books()
    sent_s = books.now()
    leases = books.leases.take_all([1, 2, 3], 60_000, sent_s)
    assert all(leases) and all(books.leases.held(inode) for inode in (1, 2, 3))
    books.leases.keep_grant(2, b"grant")
    assert [books.leases.held(inode).grant for inode in (1, 2, 3)] == [b"", b"grant", b""]
    books.now()
    books.leases.end(books.watch, [1])
    assert not books.leases.held(1) and books.leases.held(2) and books.leases.held(3)
    assert books.leases.outdated([1, 2, 3], sent_s) == {1}
    assert books.leases.take_all([1, 2, 3], 60_000, sent_s)[0] is None, (
        "what was asked before its end begins no lease"
    )
    books.now()
    again = books.leases.take_all([1, 2, 3], 60_000, books.now())
    assert again[0].number != leases[0].number and again[1].number == leases[1].number


def test_a_lease_that_is_gone_on_with_is_still_that_of_the_names_learned_with_it():
    books = Books()
    sent_s = books.now()
    leases = books.leases.take_all([1, 2], 60_000, sent_s)
    books.now()
    books.cache.put_entries(ROOT, [b"1", b"2"], [1, 2], sent_s, leases)
    books.now()
    assert books.leases.take(1, 60_000, books.now(), b"grant").number == leases[0].number
    assert books.cache.entry(ROOT, b"1", 0.0) == 1
    books.leases.end(books.watch, [1])
    assert books.cache.entry(ROOT, b"1", 0.0) is None and books.cache.entry(ROOT, b"2", 0.0) == 2
    books.now()
    assert books.leases.take(1, 60_000, books.now()) and books.cache.entry(ROOT, b"1", 0.0) is None


def test_without_a_promise_there_is_no_lease():
    books = Books()
    assert books.leases.take_all([1, 2], 0, books.now()) == [None, None] and books.leases.held(1) is None
    assert books.leases.take_all([], 60_000, books.now()) == []


def test_listed_attributes_are_believed_unless_one_is_newer_or_open_here():
    books = Books()
    assert books.cache.put_attrs(listed_of(1, 2, change=5))
    assert books.cache.attr(1, 10.0).size == 5 and books.cache.attr(2, 10.0).change == 5
    assert books.cache.put_attrs(listed_of(1, 2, 3, change=6)) and books.cache.attr(1, 10.0).change == 6
    assert not books.cache.put_attrs(listed_of(1, 2, 9, change=5)), "an answer that was overtaken"
    assert books.cache.attr(1, 10.0).change == 6 and books.cache.attr(9, 10.0) is None
    books.cache.put_attr(Attr(inode=1, change=5))
    assert books.cache.attr(1, 10.0).change == 6, "also against a record that was never looked at"
    books.cache.hold(Attr(inode=3, change=6))
    assert not books.cache.put_attrs(listed_of(3, change=7))
    books.now()
    assert books.cache.attr(1, 0.5) is None


def test_what_is_known_of_listings_is_bounded():
    books = Books(cached_entries=100)
    for first in range(1, 1000, 50):
        inodes = list(range(first, first + 50))
        listed, sent_s = listed_of(*inodes), books.now()
        assert books.cache.put_attrs(listed)
        books.cache.put_entries(
            ROOT, listed.names, inodes, sent_s, books.leases.take_all(inodes, 1 << 30, sent_s)
        )
    assert books.cache.attr(1, 1e9) is None and books.cache.attr(999, 1e9)
    assert books.cache.entry(ROOT, b"1", 1e9) is None and books.cache.entry(ROOT, b"999", 1e9) == 999
    assert books.leases.held(1) is None and books.leases.held(999)
    assert (
        len(books.cache._attrs) <= 100
        and len(books.cache._entries) <= 100
        and len(books.leases._leases) <= 100
    )


# -- what the kernel is told -------------------------------------------------------------------------------------------


class OutdatedVfs(MemoryVfs):
    """Where others change some inodes while entries wait to be told."""

    def __init__(self):
        super().__init__()
        self.changed = set()

    def outdated(self, inodes, since_s):
        return self.changed & set(inodes)


def test_of_what_others_have_changed_since_it_was_listed_the_kernel_is_told_the_name_only():
    async def run():
        vfs = OutdatedVfs()
        ops = FuseOps(vfs, clock=ManualClock())
        told = []

        def add_all(listed, first, unknown):
            told.extend((entry.name, entry.inode in unknown) for entry in list(listed)[first:])
            return len(listed)

        attrs = [await vfs.mknod(ROOT, b"f%d" % number, 0o100644, 0, ME) for number in range(3)]
        vfs.changed = {attrs[1].inode}
        handle = await ops.opendir(ROOT)
        await ops.readdir(handle, 2, lambda *_: True, add_all)
        await ops.releasedir(handle)
        assert told == [(b"f0", False), (b"f1", True), (b"f2", False)]

    asyncio.run(run())


def test_names_that_were_listed_are_taken_back_until_the_kernel_has_forgotten_them_by_itself():
    async def run():
        vfs, clock = MemoryVfs(), ManualClock()
        ops = FuseOps(vfs, clock=clock)
        taken_back = []

        async def invalidate(names, inodes):
            taken_back.extend(names)

        ops.invalidate = invalidate
        attrs = [await vfs.mknod(ROOT, b"f%d" % number, 0o100644, 0, ME) for number in range(3)]
        await vfs.link(attrs[0].inode, ROOT, b"again", ME)
        handle = await ops.opendir(ROOT)
        await ops.readdir(handle, 2, lambda *_: True)
        await ops._recalled([attrs[0].inode, 12345])
        assert sorted(taken_back) == [(ROOT, b"again"), (ROOT, b"f0")]
        await ops._recalled([attrs[1].inode])
        await ops.lookup(ROOT, b"again")
        await ops.lookup(ROOT, b"again")
        taken_back.clear()
        await ops._recalled([attrs[0].inode])
        assert taken_back == [(ROOT, b"again")], (
            "once, however often it was told; the other one is not kept any more"
        )
        clock.advance(10.0)
        await ops.lookup(ROOT, b"f2")
        taken_back.clear()
        await ops._recalled([attr.inode for attr in attrs])
        assert taken_back == [(ROOT, b"f2")], "of the others the kernel asks by itself"
        await ops.releasedir(handle)

    asyncio.run(run())


def test_names_that_the_kernel_was_told_of_are_remembered_up_to_a_bound(monkeypatch):
    async def run():
        monkeypatch.setattr(kernel_cache, "NAMED_MAX", 100)
        monkeypatch.setattr(kernel_cache, "NAMED_TOGETHER", 10)
        vfs, clock = MemoryVfs(), ManualClock()
        ops = FuseOps(vfs, clock=clock)
        taken_back = []

        async def invalidate(names, inodes):
            taken_back.extend(names)

        ops.invalidate = invalidate
        attrs = [await ops.mknod(ROOT, b"f%d" % number, 0o100644, 0, ME) for number in range(300)]
        await ops._recalled([attr.inode for attr in attrs])
        assert taken_back == [(ROOT, b"f%d" % number) for number in range(300 - len(taken_back), 300)]
        assert 90 <= len(taken_back) <= 110
        handle = await ops.opendir(ROOT)
        await ops.readdir(handle, 2, lambda *_: True)
        await ops.lookup(ROOT, b"f7")
        taken_back.clear()
        await ops._recalled([attrs[7].inode, attrs[8].inode])
        assert (ROOT, b"f7") in taken_back
        await ops.releasedir(handle)
        assert sum(len(named.told) for named in ops._named) <= 110

    asyncio.run(run())
