"""Directory entries: encoding, batches in the client's caches, and what the kernel is given."""

import asyncio

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from nvpool.client.state.client_events import ClientEvents
from nvpool.client.state.leases import Leases, ShardWatch
from nvpool.client.state.metadata_cache import MetadataCache
from nvpool.client.state.options import ClientOptions
from nvpool.client.state.vfs_types import Caller
from nvpool.core.clock import ManualClock
from nvpool.core.errors import CorruptFrame
from nvpool.core.ids import ROOT_INODE as ROOT
from nvpool.fuse.ops.kernel_cache import names as cached_names
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


# -- encoding ------------------------------------------------------------------------------------------------------------


@settings(suppress_health_check=[HealthCheck.too_slow])  # on a busy machine
@given(ENTRIES)
def test_entries_are_decoded_as_encoded(entries):
    listed = DirectoryPage(packed(entries))
    assert [(one.name, one.cursor, one.inode, one.kind, one.attr.SerializeToString()) for one in listed] == [
        (one.name, one.cursor, one.attr.inode, one.attr.mode >> 12, one.attr.SerializeToString())
        for one in entries
    ]
    assert [attr_of(record).SerializeToString() for record in listed.records] == [
        entry.attr.SerializeToString() for entry in entries
    ]
    assert (
        [change_of(record) for record in listed.records]
        == listed.changes
        == [entry.attr.change for entry in entries]
    )
    assert listed.promised == sum(entry.promised for entry in entries)
    assert [listed.is_promised(at) for at in range(len(listed))] == [entry.promised for entry in entries]


def test_attributes_of_an_entry_can_be_replaced():
    listed = DirectoryPage(
        pack_entry(7, Attr(inode=1, size=2), True, b"a") + pack_entry(8, Attr(inode=3), False, b"b")
    )
    listed.put(0, Attr(inode=1, size=99, change=4))
    assert listed[0].attr.size == attr_of(listed.records[0]).size == 99
    assert (listed[0].name, listed[0].cursor, listed.is_promised(0), listed[1].inode) == (b"a", 7, True, 3)


def test_truncated_entries_are_refused():
    whole = pack_entry(7, Attr(inode=1), True, b"name") * 2
    for length in range(1, len(whole)):
        if length != len(whole) // 2:
            with pytest.raises(CorruptFrame):
                DirectoryPage(whole[:length])


# -- caches of the client ----------------------------------------------------------------------------------------------


class Caches:
    def __init__(self, cached_entries=1000):
        self.clock, self.watch = ManualClock(), ShardWatch()
        self.watch.until_s = float("inf")
        self.leases = Leases(self.clock, cached_entries, lambda inode: self.watch)
        self.cache = MetadataCache(ClientOptions(cached_entries=cached_entries), self.leases, ClientEvents())

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


def test_leases_taken_together_end_separately():
    caches = Caches()
    sent_s = caches.now()
    leases = caches.leases.take_all([1, 2, 3], 60_000, sent_s)
    assert all(leases) and all(caches.leases.held(inode) for inode in (1, 2, 3))
    caches.leases.keep_grant(2, b"grant")
    assert [caches.leases.held(inode).grant for inode in (1, 2, 3)] == [b"", b"grant", b""]
    caches.now()
    caches.leases.end(caches.watch, [1])
    assert not caches.leases.held(1) and caches.leases.held(2) and caches.leases.held(3)
    assert caches.leases.outdated([1, 2, 3], sent_s) == {1}
    assert caches.leases.take_all([1, 2, 3], 60_000, sent_s)[0] is None, (
        "a request sent before the end begins no lease"
    )
    caches.now()
    again = caches.leases.take_all([1, 2, 3], 60_000, caches.now())
    assert again[0].number != leases[0].number and again[1].number == leases[1].number


def test_renewed_lease_still_covers_its_names():
    caches = Caches()
    sent_s = caches.now()
    leases = caches.leases.take_all([1, 2], 60_000, sent_s)
    caches.now()
    caches.cache.put_entries(ROOT, [b"1", b"2"], [1, 2], sent_s, leases)
    caches.now()
    assert caches.leases.take(1, 60_000, caches.now(), b"grant").number == leases[0].number
    assert caches.cache.entry(ROOT, b"1", 0.0) == 1
    caches.leases.end(caches.watch, [1])
    assert caches.cache.entry(ROOT, b"1", 0.0) is None and caches.cache.entry(ROOT, b"2", 0.0) == 2
    caches.now()
    assert caches.leases.take(1, 60_000, caches.now()) and caches.cache.entry(ROOT, b"1", 0.0) is None


def test_no_lease_without_a_promise():
    caches = Caches()
    assert caches.leases.take_all([1, 2], 0, caches.now()) == [None, None] and caches.leases.held(1) is None
    assert caches.leases.take_all([], 60_000, caches.now()) == []


def test_listed_attributes_are_cached_unless_newer_or_open():
    caches = Caches()
    assert caches.cache.put_attrs(listed_of(1, 2, change=5))
    assert caches.cache.attr(1, 10.0).size == 5 and caches.cache.attr(2, 10.0).change == 5
    assert caches.cache.put_attrs(listed_of(1, 2, 3, change=6)) and caches.cache.attr(1, 10.0).change == 6
    assert not caches.cache.put_attrs(listed_of(1, 2, 9, change=5)), "a reply that was overtaken"
    assert caches.cache.attr(1, 10.0).change == 6 and caches.cache.attr(9, 10.0) is None
    caches.cache.put_attr(Attr(inode=1, change=5))
    assert caches.cache.attr(1, 10.0).change == 6, "also against a record that was never read"
    caches.cache.hold(Attr(inode=3, change=6))
    assert not caches.cache.put_attrs(listed_of(3, change=7))
    caches.now()
    assert caches.cache.attr(1, 0.5) is None


def test_caches_of_listings_are_bounded():
    caches = Caches(cached_entries=100)
    for first in range(1, 1000, 50):
        inodes = list(range(first, first + 50))
        listed, sent_s = listed_of(*inodes), caches.now()
        assert caches.cache.put_attrs(listed)
        caches.cache.put_entries(
            ROOT, listed.names, inodes, sent_s, caches.leases.take_all(inodes, 1 << 30, sent_s)
        )
    assert caches.cache.attr(1, 1e9) is None and caches.cache.attr(999, 1e9)
    assert caches.cache.entry(ROOT, b"1", 1e9) is None and caches.cache.entry(ROOT, b"999", 1e9) == 999
    assert caches.leases.held(1) is None and caches.leases.held(999)
    assert (
        len(caches.cache.attrs) <= 100
        and len(caches.cache.entries) <= 100
        and len(caches.leases.by_inode) <= 100
    )


# -- what the kernel is given ------------------------------------------------------------------------------------------


class OutdatedVfs(MemoryVfs):
    """A file system of which other clients change some inodes while entries wait for the kernel."""

    def __init__(self):
        super().__init__()
        self.changed = set()

    def outdated(self, inodes, since_s):
        return self.changed & set(inodes)


def test_changed_entry_is_given_to_the_kernel_as_a_name_only():
    async def run():
        vfs = OutdatedVfs()
        ops = FuseOps(vfs, clock=ManualClock())
        kernel_entries = []

        def add_all(listed, first, unknown):
            kernel_entries.extend((entry.name, entry.inode in unknown) for entry in list(listed)[first:])
            return len(listed)

        attrs = [await vfs.mknod(ROOT, b"f%d" % number, 0o100644, 0, ME) for number in range(3)]
        vfs.changed = {attrs[1].inode}
        handle = await ops.opendir(ROOT)
        await ops.readdir(handle, 2, lambda *_: True, add_all)
        await ops.releasedir(handle)
        assert kernel_entries == [(b"f0", False), (b"f1", True), (b"f2", False)]

    asyncio.run(run())


def test_listed_names_are_invalidated_until_they_expire():
    async def run():
        vfs, clock = MemoryVfs(), ManualClock()
        ops = FuseOps(vfs, clock=clock)
        taken_back = []

        async def invalidate(names, inodes):
            taken_back.extend(names)

        ops.notices.connect(invalidate=invalidate)
        attrs = [await vfs.mknod(ROOT, b"f%d" % number, 0o100644, 0, ME) for number in range(3)]
        await vfs.link(attrs[0].inode, ROOT, b"again", ME)
        handle = await ops.opendir(ROOT)
        await ops.readdir(handle, 2, lambda *_: True)
        await ops.recalls.recalled([attrs[0].inode, 12345])
        assert sorted(taken_back) == [(ROOT, b"again"), (ROOT, b"f0")]
        await ops.recalls.recalled([attrs[1].inode])
        await ops.lookup(ROOT, b"again")
        await ops.lookup(ROOT, b"again")
        taken_back.clear()
        await ops.recalls.recalled([attrs[0].inode])
        assert taken_back == [(ROOT, b"again")], (
            "once, though the kernel looked it up twice; the other name has expired"
        )
        clock.advance(10.0)
        await ops.lookup(ROOT, b"f2")
        taken_back.clear()
        await ops.recalls.recalled([attr.inode for attr in attrs])
        assert taken_back == [(ROOT, b"f2")], "the kernel asks for the other names itself"
        await ops.releasedir(handle)

    asyncio.run(run())


def test_names_given_to_the_kernel_are_remembered_boundedly(monkeypatch):
    async def run():
        monkeypatch.setattr(cached_names, "NAMED_MAX", 100)
        monkeypatch.setattr(cached_names, "NAMED_TOGETHER", 10)
        vfs, clock = MemoryVfs(), ManualClock()
        ops = FuseOps(vfs, clock=clock)
        taken_back = []

        async def invalidate(names, inodes):
            taken_back.extend(names)

        ops.notices.connect(invalidate=invalidate)
        attrs = [await ops.mknod(ROOT, b"f%d" % number, 0o100644, 0, ME) for number in range(300)]
        await ops.recalls.recalled([attr.inode for attr in attrs])
        assert taken_back == [(ROOT, b"f%d" % number) for number in range(300 - len(taken_back), 300)]
        assert 90 <= len(taken_back) <= 110
        handle = await ops.opendir(ROOT)
        await ops.readdir(handle, 2, lambda *_: True)
        await ops.lookup(ROOT, b"f7")
        taken_back.clear()
        await ops.recalls.recalled([attrs[7].inode, attrs[8].inode])
        assert (ROOT, b"f7") in taken_back
        await ops.releasedir(handle)
        assert sum(len(named.names) for named in ops.cached_names.groups) <= 110

    asyncio.run(run())
