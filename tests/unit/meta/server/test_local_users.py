"""Requests of a local user without a node's rights to the metadata service: what is allowed, and what is not."""

import asyncio
import random
import stat
from collections import Counter

import pytest

from nvpool.core import grants
from nvpool.core.clock import ManualClock
from nvpool.core.errors import (
    AccessDenied,
    Bug,
    NotFound,
    NotPermitted,
    NvpoolError,
    RangeTooSmall,
    StaleGrant,
    StaleSession,
)
from nvpool.core.ids import ROOT_INODE as ROOT
from nvpool.core.posix.acl import ACCESS, GROUP_OBJ, MASK, OTHER, USER, USER_OBJ, AclEntry, encode_acl
from nvpool.kv.memory_engine import MemoryKv
from nvpool.meta.operations import setattr as valid
from nvpool.meta.operations.listing import STEP_OF_CLIENT
from nvpool.meta.requests import local_user_permissions, path_walks
from nvpool.meta.requests.dispatch_table import CHANGES, QUERIES
from nvpool.meta.server.service import MetaOptions, MetaService
from nvpool.meta.state import records
from nvpool.rpc.access_control import RIGHTS, Callers, LeastRight
from nvpool.rpc.messages.direntries import DirectoryPage
from nvpool.rpc.peer_roles import Credentials, Peer
from nvpool.rpc.v1 import meta_pb2 as pb
from nvpool.rpc.v1 import wire_pb2 as wire
from nvpool.testing.fakes.meta_shard import DirectCall, ShardClient, StoreRecorder, small_map

OPTIONS = MetaOptions(session_lease_s=10, grant_s=20, linger_s=2, tick_s=3600)
US, ANOTHER, OPERATORS = 65_001, 65_002, 64_999


def peer(uid, *groups):
    return Peer("unknown", "unix", True, credentials=Credentials(uid, frozenset({uid, *groups}), 1))


REQUESTS = {
    method: getattr(pb, kind.__name__)
    for method, (kind, *_) in (CHANGES | QUERIES).items()
    if method in local_user_permissions.GUARDS
} | {
    wire.META_RENEW_SESSION: pb.RenewSessionRequest,
    wire.META_RELEASE: pb.ReleaseRequest,
    wire.META_LIST: pb.ListDirRequest,
    wire.META_LOOKUP_MANY: pb.LookupManyRequest,
    wire.META_GETATTR_MANY: pb.GetAttrManyRequest,
    wire.META_STATFS: pb.StatFsRequest,
    wire.META_VOLUME: pb.VolumeRequest,
    wire.META_VOLUME_ROOM: pb.VolumeRoomRequest,
}
del REQUESTS[wire.META_RESERVE]  # it waits for the reservation before


class Place:
    """A shard in memory with sessions of root (`root`), of the test's user (`us`) and of another user (`another`)."""

    async def start(self):
        self.kv, self.clock = MemoryKv(), ManualClock()
        return await self.begin()

    async def begin(self):
        self.service = MetaService(
            self.kv,
            grant_secret=b"s" * 32,
            dialer=StoreRecorder(),
            clock=self.clock,
            options=OPTIONS,
            callers=Callers(OPERATORS),
        )
        self.service.update_map(small_map())
        await self.service.start()
        self.root = await ShardClient(self.service).begin()
        self.us = await ShardClient(self.service, US, US, peer(US, 50)).begin()
        self.another = await ShardClient(self.service, ANOTHER, ANOTHER, peer(ANOTHER)).begin()
        return self

    async def restart(self):
        await self.service.close()
        await self.begin()


def scenario(function):
    def test():
        async def body():
            place = await Place().start()
            try:
                await function(place)
            finally:
                await place.service.close()

        asyncio.run(body())

    test.__name__, test.__doc__ = function.__name__, function.__doc__
    return test


async def refused(error, work):
    with pytest.raises(error):
        await work


async def shown(client, parent, name, rights=grants.READ):
    """The rights in the grant that a look-up returns."""
    entry = await client.lookup(parent, name, rights)
    return grants.read(entry.grant).rights if entry.grant else 0


async def private(place):
    """A directory of root that no other user may search, and in it a file that all may read and write."""
    home = (await place.root.create(ROOT, b"home", stat.S_IFDIR | 0o700, exclusive=True)).entry.attr
    below = (await place.root.create(home.inode, b"below", stat.S_IFDIR | 0o777, exclusive=True)).entry.attr
    return home, below, await place.root.file(home.inode, b"f", mode=stat.S_IFREG | 0o666)


@scenario
async def test_grants_follow_the_mode(place):
    await place.root.file(ROOT, b"secret", mode=stat.S_IFREG | 0o600)
    await place.root.file(ROOT, b"open", mode=stat.S_IFREG | 0o644)
    assert await shown(place.us, ROOT, b"secret") == 0 and await shown(place.us, ROOT, b"open") == grants.READ
    assert await shown(place.us, ROOT, b"open", grants.READ | grants.WRITE) == grants.READ
    for name, rights in (
        (b"secret", grants.READ),
        (b"open", grants.WRITE),
        (b"open", grants.READ | grants.WRITE),
    ):
        await refused(AccessDenied, place.us.open((await place.us.lookup(ROOT, name)).attr.inode, rights))
    opened = await place.us.open((await place.us.lookup(ROOT, b"open")).attr.inode, grants.READ)
    assert grants.read(opened.grant).rights == grants.READ
    assert not (await place.us.getattr(opened.attr.inode, grants.WRITE)).grant
    assert (await place.root.open((await place.us.lookup(ROOT, b"secret")).attr.inode, 3)).grant, (
        "root has a node's rights"
    )


@scenario
async def test_write_only_file_cannot_be_read(place):
    inode = (await place.root.file(ROOT, b"box", mode=stat.S_IFREG | 0o622)).inode
    asked = pb.OpenRequest(change=place.us.change(), inode=inode, rights=3, wanted=grants.WRITE)
    assert grants.read((await place.us.ask("OPEN", asked)).grant).rights == grants.WRITE
    asked = pb.OpenRequest(change=place.us.change(), inode=inode, rights=3, wanted=3)
    await refused(AccessDenied, place.us.ask("OPEN", asked))


@scenario
async def test_guessed_inodes_are_refused(place):
    """The mode of the inodes allows everything; the path does not."""
    home, below, file = await private(place)
    us = place.us
    await us.getattr(home.inode)  # its name is in a directory that every user may search
    for ask in (
        lambda: us.open(file.inode),
        lambda: us.getattr(file.inode),
        lambda: us.getattr(below.inode),
        lambda: us.lookup(home.inode, b"f"),
        lambda: us.lookup(below.inode, b"x"),
        lambda: us.list(home.inode),
        lambda: us.list(below.inode),
        lambda: us.file(below.inode, b"x"),
        lambda: us.report(file.inode, 10),
        lambda: us.setattr(file.inode, valid.SIZE, size=0),
        lambda: us.allocate(file.inode, 0, 10, grow=True),
        lambda: us.link(file.inode, ROOT, b"x"),
        lambda: us.lock(file.inode, 1),
        lambda: us.locks(file.inode),
        lambda: us.unlink(home.inode, b"f"),
        lambda: us.rmdir(home.inode, b"below"),
        lambda: us.rename(home.inode, b"f", ROOT, b"f"),
        lambda: us.rename(ROOT, b"home", below.inode, b"f"),
        lambda: us.ask("RESERVE", pb.ReserveRequest(change=us.change(), inode=file.inode, length=1)),
        lambda: us.ask(
            "SETXATTR", pb.SetXattrRequest(change=us.change(), inode=file.inode, name=b"user.a", value=b"x")
        ),
        lambda: us.ask(
            "REMOVEXATTR", pb.RemoveXattrRequest(change=us.change(), inode=file.inode, name=b"user.a")
        ),
        lambda: us.ask("GETXATTR", pb.GetXattrRequest(session=us.session, inode=file.inode, name=b"user.a")),
        lambda: us.ask("LISTXATTR", pb.ListXattrRequest(session=us.session, inode=file.inode)),
        lambda: us.ask("READLINK", pb.ReadLinkRequest(session=us.session, inode=file.inode)),
    ):
        await refused(AccessDenied, ask())
    many = pb.GetAttrManyRequest(session=us.session, inodes=file.inode.to_bytes(8, "little"))
    message, _ = await us.send("GETATTR_MANY", many).wait()
    assert not DirectoryPage(pb.GetAttrManyReply.FromString(message).packed).inodes
    names = pb.LookupManyRequest(
        session=us.session, directories=[pb.NamesIn(parent=home.inode, names=[b"f", b"none"])]
    )
    assert {one.error for one in (await us.ask("LOOKUP_MANY", names)).found} == {AccessDenied.wire_code}


@scenario
async def test_closed_path_revokes_access_to_known_inodes(place):
    home = (await place.root.create(ROOT, b"home", stat.S_IFDIR | 0o755, exclusive=True)).entry.attr
    await place.root.file(home.inode, b"f")
    await place.root.file(home.inode, b"g")
    met, other = [(await place.us.lookup(home.inode, name)).attr.inode for name in (b"f", b"g")]
    opened = await place.us.open(met)
    await place.root.setattr(home.inode, valid.MODE, mode=0o700)
    await refused(AccessDenied, place.us.open(met))
    await refused(AccessDenied, place.us.getattr(other))
    assert (await place.us.getattr(met, grants.READ)).grant, "an open file stays open, like a file descriptor"
    assert opened.grant


@scenario
async def test_name_in_another_directory_is_found_after_a_restart(place):
    home, _, file = await private(place)
    await place.root.link(file.inode, ROOT, b"link")
    near = await place.root.file(ROOT, b"near")
    assert (await place.us.open((await place.us.lookup(ROOT, b"link")).attr.inode)).grant
    await place.restart()
    await refused(NotFound, place.us.open(file.inode))
    await place.us.lookup(ROOT, b"link")
    assert (await place.us.open(file.inode)).grant
    await place.root.unlink(ROOT, b"link")
    await place.us.lookup(ROOT, b"near")
    assert (await place.us.open(near.inode)).grant
    await refused(AccessDenied, place.us.open(file.inode))


@scenario
async def test_new_file_belongs_to_its_creator(place):
    place.us.uid, place.us.gid = 0, 0  # what its requests claim
    tmp = (await place.root.create(ROOT, b"tmp", stat.S_IFDIR | 0o1777, exclusive=True)).entry.attr
    await place.root.setattr(tmp.inode, valid.MODE, mode=0o1777)
    made = await place.us.file(tmp.inode, b"mine", mode=stat.S_IFREG | 0o6755)
    assert (made.uid, made.gid) == (US, min(US, 50))
    place.us.gid = US
    directory = (await place.us.create(tmp.inode, b"d", stat.S_IFDIR | 0o6755, exclusive=True)).entry.attr
    assert (directory.uid, directory.gid, directory.mode) == (US, US, stat.S_IFDIR | 0o755)
    for name, kind in ((b"chr", stat.S_IFCHR), (b"blk", stat.S_IFBLK)):
        await refused(NotPermitted, place.us.create(tmp.inode, name, kind | 0o666, exclusive=True, rdev=1))
    await refused(
        AccessDenied,
        place.us.create(tmp.inode, b"v", stat.S_IFDIR | 0o755, exclusive=True, volume=pb.VolumePolicy()),
    )
    await refused(AccessDenied, place.us.file(ROOT, b"x"))
    await refused(NotPermitted, place.another.unlink(tmp.inode, b"mine"))
    await refused(NotPermitted, place.another.rename(tmp.inode, b"mine", tmp.inode, b"theirs"))
    await place.us.unlink(tmp.inode, b"mine")


@scenario
async def test_only_the_owner_changes_mode_owner_and_times(place):
    tmp = (await place.root.create(ROOT, b"tmp", stat.S_IFDIR | 0o777, exclusive=True)).entry.attr
    await place.root.setattr(tmp.inode, valid.MODE, mode=0o777)
    mine = (await place.us.file(tmp.inode, b"mine", mode=stat.S_IFREG | 0o664)).inode
    await place.another.lookup(tmp.inode, b"mine")
    for bits, fields in (
        (valid.MODE, {"mode": 0o777}),
        (valid.UID, {"uid": ANOTHER}),
        (valid.GID, {"gid": ANOTHER}),
        (valid.MTIME, {"mtime_ns": 1}),
        (valid.ATIME_NOW, {}),
    ):
        await refused(NotPermitted, place.another.setattr(mine, bits, **fields))
    await refused(AccessDenied, place.another.setattr(mine, valid.ATIME_NOW | valid.MTIME_NOW))
    await refused(AccessDenied, place.another.setattr(mine, valid.SIZE, size=0))
    await refused(NotPermitted, place.us.setattr(mine, valid.UID, uid=0))
    await refused(NotPermitted, place.us.setattr(mine, valid.GID, gid=0))
    assert (await place.us.setattr(mine, valid.GID, gid=50)).attr.gid == 50
    assert (await place.us.setattr(mine, valid.MODE, mode=0o2775)).attr.mode & 0o7777 == 0o2775
    await place.root.setattr(mine, valid.GID, gid=7)
    assert (await place.us.setattr(mine, valid.MODE, mode=0o6775)).attr.mode & 0o7777 == 0o4775, (
        "the user is not in that group"
    )


@scenario
async def test_own_read_only_file_is_written_while_it_is_open(place):
    """`git` and `cp` create files like this: the descriptor may write what the mode does not allow."""
    tmp = (await place.root.create(ROOT, b"tmp", stat.S_IFDIR | 0o777, exclusive=True)).entry.attr
    await place.root.setattr(tmp.inode, valid.MODE, mode=0o777)
    made = await place.us.create(
        tmp.inode, b"object", stat.S_IFREG | 0o444, open=True, rights=3, exclusive=True
    )
    inode = made.entry.attr.inode
    assert grants.read(made.entry.grant).rights == 3
    await place.us.report(inode, 100)
    assert grants.read((await place.us.getattr(inode, 3)).grant).rights == 3, (
        "an expired right is granted again"
    )
    await refused(AccessDenied, place.us.open(inode, grants.WRITE))
    await refused(
        AccessDenied, place.another.report((await place.another.lookup(tmp.inode, b"object")).attr.inode, 100)
    )


@scenario
async def test_set_uid_bit_ends_when_another_user_writes(place):
    inode = (await place.root.file(ROOT, b"tool", mode=stat.S_IFREG | 0o777)).inode
    await place.root.setattr(inode, valid.MODE, mode=0o6777)
    opened = await place.us.open((await place.us.lookup(ROOT, b"tool")).attr.inode, grants.WRITE)
    assert opened.attr.mode & 0o7777 == (await place.root.getattr(inode)).attr.mode & 0o7777 == 0o777
    await place.root.setattr(inode, valid.MODE, mode=0o4777)
    assert not (await place.us.getattr(inode, grants.WRITE)).grant
    await place.root.ask(
        "SETXATTR",
        pb.SetXattrRequest(
            change=place.root.change(), inode=inode, name=local_user_permissions.CAPABILITIES, value=b"x"
        ),
    )
    await place.us.open(inode, grants.WRITE)
    asked = pb.ListXattrRequest(session=place.root.session, inode=inode)
    assert not (await place.root.ask("LISTXATTR", asked)).names


@scenario
async def test_listing_has_attributes_only_with_search_permission(place):
    home = (await place.root.create(ROOT, b"names", stat.S_IFDIR | 0o744, exclusive=True)).entry.attr
    file = await place.root.file(home.inode, b"f")
    asked = pb.ListDirRequest(
        session=place.us.session, inode=home.inode, attrs=True, packed=True, rights=grants.READ
    )
    seen = await place.us.ask("LIST", asked)
    listed = DirectoryPage(seen.packed)
    assert (
        listed.names == [b"f"] and listed.changes == [0] and listed.attr(0).size == listed.attr(0).links == 0
    )
    assert not seen.grants and not listed.promised
    await refused(AccessDenied, place.us.open(file.inode))
    await place.root.setattr(home.inode, valid.MODE, mode=0o755)
    seen = await place.us.ask("LIST", asked)
    assert DirectoryPage(seen.packed).changes != [0] and not seen.grants
    assert (await place.us.open(file.inode)).grant
    await place.root.setattr(home.inode, valid.MODE, mode=0o711)
    await refused(AccessDenied, place.us.ask("LIST", asked))
    assert (await place.us.lookup(home.inode, b"f")).attr.inode == file.inode


@scenario
async def test_client_bound_to_a_user_acts_only_as_that_user(place):
    bound = await ShardClient(
        place.service, 0, 0, Peer("c", "10.0.0.1:1", False, f"client/a.0a1b2c3d.u{US}-50")
    ).begin()
    free = await ShardClient(place.service, 0, 0, Peer("c", "10.0.0.1:1", False, "client/a.0a1b2c3d")).begin()
    secret = await place.root.file(ROOT, b"secret", mode=stat.S_IFREG | 0o600)
    await refused(AccessDenied, bound.open(secret.inode))
    await refused(AccessDenied, bound.file(ROOT, b"x"))
    assert (await free.open(secret.inode)).grant
    tmp = (await place.root.create(ROOT, b"tmp", stat.S_IFDIR | 0o777, exclusive=True)).entry.attr
    await place.root.setattr(tmp.inode, valid.MODE, mode=0o777)
    made = await bound.file(tmp.inode, b"f")
    assert (made.uid, made.gid) == (US, 50)


@scenario
async def test_access_acl_is_applied(place):
    inode = (await place.root.file(ROOT, b"f", mode=stat.S_IFREG | 0o600)).inode
    value = encode_acl(
        (
            AclEntry(USER_OBJ, 6),
            AclEntry(USER, 6, US),
            AclEntry(GROUP_OBJ, 0),
            AclEntry(MASK, 6),
            AclEntry(OTHER, 0),
        )
    )
    await place.root.ask(
        "SETXATTR", pb.SetXattrRequest(change=place.root.change(), inode=inode, name=ACCESS, value=value)
    )
    assert await shown(place.us, ROOT, b"f", 3) == 3 and await shown(place.another, ROOT, b"f", 3) == 0
    await refused(
        NotPermitted,
        place.us.ask(
            "SETXATTR", pb.SetXattrRequest(change=place.us.change(), inode=inode, name=ACCESS, value=value)
        ),
    )


@scenario
async def test_sessions_of_others_are_refused(place):
    file = await place.root.file(ROOT, b"f")
    for session in (place.root.session, place.another.session):
        place.us.session = session
        for work in (
            place.us.getattr(file.inode),
            place.us.lookup(ROOT, b"f"),
            place.us.report(file.inode, 1),
            place.us.ask("CLOSE_SESSION", pb.CloseSessionRequest(session=session)),
            place.us.ask("RENEW_SESSION", pb.RenewSessionRequest(session=session)),
        ):
            await refused(StaleSession, work)
    assert (await place.root.getattr(file.inode)).attr.inode == file.inode


@scenario
async def test_methods_of_nodes_are_refused_to_users(place):
    for name, number in wire.Method.items():
        if name.startswith("META_") and RIGHTS[number].least not in (LeastRight.USER, LeastRight.VOLUME):
            call = DirectCall(number, b"", peer=peer(US))
            place.service.handle(call)
            await refused(AccessDenied, call.wait())
    call = DirectCall(wire.META_STATUS, b"", peer=peer(US, OPERATORS))
    place.service.handle(call)
    await call.wait()


def test_each_user_method_has_a_guard():
    asked = {
        method
        for method in (CHANGES | QUERIES)
        if RIGHTS[method].least in (LeastRight.USER, LeastRight.VOLUME)
    }
    assert set(local_user_permissions.GUARDS) == asked


@scenario
async def test_users_are_refused_in_pools_of_several_shards(place):
    place.service.parts.view.owners = (1, 2)
    await refused(AccessDenied, place.us.getattr(ROOT))


@scenario
async def test_volume_with_an_access_list_is_closed_to_users(place):
    made = (
        await place.root.create(ROOT, b"v", stat.S_IFDIR | 0o777, exclusive=True, volume=pb.VolumePolicy())
    ).entry.attr
    await place.root.setattr(made.inode, valid.MODE, mode=0o777)
    inside = await place.us.file(made.inode, b"f", mode=stat.S_IFREG | 0o666)
    action = pb.VolumeRequest(
        session=place.root.session,
        inode=made.inode,
        action=pb.VolumeRequest.GRANT,
        grant=pb.VolumeGrant(client="client/a.1", write=True),
    )
    await place.root.ask("VOLUME", action)
    await refused(AccessDenied, place.us.open(inside.inode))
    await refused(AccessDenied, place.us.file(made.inode, b"g"))
    for action in (
        pb.VolumeRequest.SET,
        pb.VolumeRequest.SEAL,
        pb.VolumeRequest.GRANT,
        pb.VolumeRequest.REMOVE,
    ):
        asked = pb.VolumeRequest(session=place.us.session, inode=made.inode, action=action)
        await refused(AccessDenied, place.us.ask("VOLUME", asked))


@scenario
async def test_long_attribute_name_is_refused_by_its_length(place):
    inode, name = (await place.root.file(ROOT, b"f")).inode, b"trusted." + b"\xff" * 100_000
    asked = pb.SetXattrRequest(change=place.us.change(), inode=inode, name=name, value=b"x")
    await refused(RangeTooSmall, place.us.ask("SETXATTR", asked))
    asked = pb.GetXattrRequest(session=place.us.session, inode=inode, name=name)
    await refused(RangeTooSmall, place.us.ask("GETXATTR", asked))


def packed(*inodes):
    return b"".join(inode.to_bytes(8, "little") for inode in inodes)


async def deep_files(place, depth=30, count=20):
    """Inodes of files in a directory far below the root."""
    directory = ROOT
    for _ in range(depth):
        directory = (await place.root.mkdir(directory, b"d")).inode
    return [(await place.root.file(directory, b"%d" % number)).inode for number in range(count)]


def count_calls(view, name):
    """Calls of a method of the view from now on."""
    calls, before = [], getattr(view, name)

    def counted(*arguments):
        calls.append(arguments)
        return before(*arguments)

    setattr(view, name, counted)
    return calls


def directories_read(gets, files=()):
    """Directories among the inodes that these calls of `view.get` have read."""
    numbers = [records.inode_of_key(key) for (key,) in gets if records.kind_of(key) == records.INODE]
    return [number for number in numbers if number not in files]


@scenario
async def test_directories_above_many_inodes_are_checked_once(place):
    files, view = await deep_files(place), place.service.parts.view
    asked = pb.GetAttrManyRequest(session=place.us.session, inodes=packed(*files * 5))
    gets, searched = count_calls(view, "get"), count_calls(view, "scan")
    message, _ = await place.us.send("GETATTR_MANY", asked).wait()
    assert DirectoryPage(pb.GetAttrManyReply.FromString(message).packed).inodes == files
    assert len(directories_read(gets, files)) < 2 * len(files) + 40 and len(searched) == 1


@scenario
async def test_names_of_one_directory_check_its_path_once(place):
    await deep_files(place, depth=30, count=0)
    directory = ROOT
    for _ in range(30):
        directory = (await place.us.lookup(directory, b"d")).attr.inode
    names = [b"%d" % number for number in range(20)]
    asked = pb.LookupManyRequest(
        session=place.us.session, directories=[pb.NamesIn(parent=directory, names=names)]
    )
    gets = count_calls(place.service.parts.view, "get")
    assert [one.error for one in (await place.us.ask("LOOKUP_MANY", asked)).found] == [
        NotFound.wire_code
    ] * 20
    assert len(directories_read(gets)) < 2 * len(names) + 40


@scenario
async def test_many_inodes_are_checked_in_steps(place):
    home, _, hidden = await private(place)
    files = await deep_files(place, depth=3, count=5)
    asked = pb.GetAttrManyRequest(
        session=place.us.session, inodes=packed(hidden.inode, *files, 1 << 60, home.inode)
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(path_walks, "STEP_WORK", 1)
        call = place.us.send("GETATTR_MANY", asked)
        assert call.answer is None, "other requests get their turn"
        message, _ = await call.wait()
    assert DirectoryPage(pb.GetAttrManyReply.FromString(message).packed).inodes == [*files, home.inode]


@scenario
async def test_long_requests_of_a_client_give_the_same_in_steps(place):
    count = 3 * STEP_OF_CLIENT + 5
    files = await deep_files(place, depth=1, count=count)
    directory = (await place.us.lookup(ROOT, b"d")).attr.inode
    names = [pb.NamesIn(parent=directory, names=[b"%d" % number for number in range(count + 2)])]
    page = {"inode": directory, "limit": count - 3, "packed": True, "attrs": True}

    async def replies(method, request, reply, **fields):
        ours, theirs = (
            client.send(method, request(session=client.session, **fields))
            for client in (place.us, place.root)
        )
        assert ours.answer is None, "other requests get their turn"
        return [reply.FromString((await call.wait())[0]) for call in (ours, theirs)]

    def shown(found):
        listed = DirectoryPage(found.packed)
        return listed.inodes, listed.names

    ours, theirs = await replies("LIST", pb.ListDirRequest, pb.ListDirReply, **page)
    assert shown(ours) == shown(theirs) and len(shown(ours)[0]) == count - 3 and ours.more and theirs.more
    ours, theirs = await replies(
        "GETATTR_MANY", pb.GetAttrManyRequest, pb.GetAttrManyReply, inodes=packed(*files)
    )
    assert shown(ours) == shown(theirs) and shown(ours)[0] == files
    ours, theirs = await replies("LOOKUP_MANY", pb.LookupManyRequest, pb.LookupManyReply, directories=names)
    for one, other in zip(ours.found, theirs.found, strict=True):
        assert (one.error, one.entry.attr.inode) == (other.error, other.entry.attr.inode)


@scenario
async def test_change_of_a_mode_takes_effect_within_a_long_request(place):
    files = await deep_files(place, depth=1, count=20)
    directory = (await place.us.lookup(ROOT, b"d")).attr.inode
    asked = pb.GetAttrManyRequest(session=place.us.session, inodes=packed(*files))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(path_walks, "STEP_WORK", 1)
        patch.setattr(path_walks, "CHECK_KEPT_NS", 0)
        call = place.us.send("GETATTR_MANY", asked)
        assert call.answer is None
        await place.root.setattr(directory, valid.MODE, mode=stat.S_IFDIR | 0o700)
        message, _ = await call.wait()
    assert 0 < len(DirectoryPage(pb.GetAttrManyReply.FromString(message).packed).inodes) < len(files)


@scenario
async def test_search_of_many_inodes_is_bounded(place):
    files = await deep_files(place, depth=1, count=10)
    asked = pb.GetAttrManyRequest(session=place.us.session, inodes=packed(*files))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(path_walks, "SEARCHED_PER_REQUEST_MAX", 4)
        message, _ = await place.us.send("GETATTR_MANY", asked).wait()
    assert len(DirectoryPage(pb.GetAttrManyReply.FromString(message).packed).inodes) == 4
    assert (await place.us.getattr(files[-1])).attr.inode == files[-1], "a request about one searches for it"


def opens_of(place, client):
    return set(place.service.parts.sessions.get(client.session).opens)


@scenario
async def test_user_states_only_reachable_files_as_open(place):
    _, below, hidden = await private(place)
    near = await place.root.file(ROOT, b"near", mode=stat.S_IFREG | 0o600)
    stated = packed(hidden.inode, near.inode, below.inode, 1 << 60)
    session = {"session": place.us.session, "opened": stated}
    await place.us.ask("RENEW_SESSION", pb.RenewSessionRequest(**session))
    assert opens_of(place, place.us) == {near.inode}
    resumed = pb.OpenSessionRequest(secret=place.us.secret, names_open=True, **session)
    await place.us.ask("OPEN_SESSION", resumed)
    assert opens_of(place, place.us) == {near.inode}
    await place.root.ask(
        "RENEW_SESSION", pb.RenewSessionRequest(session=place.root.session, opened=packed(hidden.inode))
    )
    assert opens_of(place, place.root) == {hidden.inode}, "a node is believed"


@scenario
async def test_owner_gets_no_right_by_stating_a_hidden_file(place):
    _, _, hidden = await private(place)
    await place.root.setattr(hidden.inode, valid.UID, uid=US)
    await place.us.ask(
        "RENEW_SESSION", pb.RenewSessionRequest(session=place.us.session, opened=packed(hidden.inode))
    )
    assert not opens_of(place, place.us)
    await refused(AccessDenied, place.us.report(hidden.inode, 10))


@scenario
async def test_deleted_open_file_may_be_stated_after_a_restart(place):
    inode = (await place.root.file(ROOT, b"f", mode=stat.S_IFREG | 0o644)).inode
    await place.us.open(inode)
    await place.root.unlink(ROOT, b"f")
    old, late = place.us, place.another
    await place.restart()
    old.service = late.service = place.service
    opened = packed(inode)
    await place.us.ask("RENEW_SESSION", pb.RenewSessionRequest(session=place.us.session, opened=opened))
    assert not opens_of(place, place.us), "this session began after the restart"
    await old.ask("RENEW_SESSION", pb.RenewSessionRequest(session=old.session, opened=opened))
    assert opens_of(place, old) == {inode}
    place.clock.advance(OPTIONS.session_lease_s + 1)
    await late.ask("RENEW_SESSION", pb.RenewSessionRequest(session=late.session, opened=opened))
    assert not opens_of(place, late), "all sessions had the time to say what they have open"


@scenario
async def test_quota_is_reserved_only_by_users_who_write(place):
    policy = pb.VolumePolicy(bytes_max=100_000)
    made = (
        await place.root.create(ROOT, b"v", stat.S_IFDIR | 0o777, exclusive=True, volume=policy)
    ).entry.attr
    await place.root.setattr(made.inode, valid.MODE, mode=0o777)

    async def reserved(client):
        asked = pb.VolumeRoomRequest(session=client.session, inode=made.inode, bytes=90_000, needed=90_000)
        return (await client.ask("VOLUME_ROOM", asked)).bytes

    assert await reserved(place.another) == 0
    opened = (await place.us.create(made.inode, b"f", open=True, rights=3, exclusive=True)).entry
    assert opened.grant and await reserved(place.us) == 90_000
    old = place.us
    await place.restart()
    old.service = place.service
    place.clock.advance(OPTIONS.session_lease_s + 1)
    assert await reserved(old) == 0
    stated = packed(opened.attr.inode)
    await old.ask("RENEW_SESSION", pb.RenewSessionRequest(session=old.session, opened=stated))
    assert await reserved(old) == 90_000


@scenario
async def test_key_is_only_for_users_who_may_enter_the_volume(place):
    made = (
        await place.root.create(ROOT, b"v", stat.S_IFDIR | 0o700, exclusive=True, volume=pb.VolumePolicy())
    ).entry.attr
    show, key = (
        pb.VolumeRequest(session=place.us.session, inode=made.inode, action=action)
        for action in (pb.VolumeRequest.SHOW, pb.VolumeRequest.KEY)
    )
    assert (await place.us.ask("VOLUME", show)).volume.name == "v"
    await refused(AccessDenied, place.us.ask("VOLUME", key))
    await place.root.setattr(made.inode, valid.MODE, mode=0o711)
    assert not (await place.us.ask("VOLUME", key)).key


def test_remembered_entries_are_bounded(monkeypatch):
    monkeypatch.setattr(local_user_permissions, "KNOWN_MAX", 3)
    table = {}
    for key in (1, 2, 1, 3, 4):
        local_user_permissions.keep_bounded(table, key, key)
    assert list(table) == [1, 3, 4]


INODES = ("inode", "parent", "new_parent")
NAMES = ("name", "new_name")


def any_request(kind, chance, known, session, sequence):
    """A request of that type with random fields, inodes and names that exist."""
    request = kind()
    for field in kind.DESCRIPTOR.fields:
        if chance.random() < 0.3 and field.name not in (
            *INODES,
            *NAMES,
            "session",
            "change",
            "mode",
            "valid",
        ):
            continue
        if field.name == "change":
            request.change.CopyFrom(
                pb.Change(
                    session=session,
                    slot=0,
                    sequence=sequence,
                    uid=chance.choice((0, US, 7)),
                    gid=chance.choice((0, US, 50)),
                )
            )
        elif field.name == "session":
            request.session = session
        elif field.name == "directories":
            request.directories.add(parent=chance.choice(known), names=[b"f", b"below", b"x"])
        elif field.name in INODES:
            setattr(request, field.name, chance.choice(known))
        elif field.name == "inodes":
            request.inodes = b"".join(inode.to_bytes(8, "little") for inode in known)
        elif field.name in NAMES and field.type == field.TYPE_BYTES:
            attribute = kind in (pb.SetXattrRequest, pb.GetXattrRequest, pb.RemoveXattrRequest)
            names = (
                (b"user.a", b"trusted.a", ACCESS)
                if attribute
                else (b"f", b"home", b"below", b"x%d" % chance.randrange(9))
            )
            setattr(request, field.name, chance.choice(names))
        elif field.name == "mode":
            request.mode = chance.choice(
                (0o100000, 0o040000, 0o120000, 0o010000, 0o020000, 0)
            ) | chance.randrange(0o10000)
        elif field.name == "valid":
            request.valid = chance.choice((1 << chance.randrange(12), chance.randrange(1 << 12)))
        elif field.type == field.TYPE_BOOL:
            setattr(request, field.name, chance.random() < 0.5)
        elif field.type == field.TYPE_BYTES and not field.is_repeated:
            setattr(request, field.name, chance.choice((b"", b"x", VALUE)))
        elif field.cpp_type in (field.CPPTYPE_UINT32, field.CPPTYPE_UINT64) and not field.is_repeated:
            setattr(request, field.name, chance.choice((0, 1, 2, 3, US, 4096)))
    return request


VALUE = encode_acl(
    (
        AclEntry(USER_OBJ, 7),
        AclEntry(USER, 7, US),
        AclEntry(GROUP_OBJ, 7),
        AclEntry(MASK, 7),
        AclEntry(OTHER, 7),
    )
)


@pytest.mark.parametrize("seed", range(4))
def test_no_request_changes_files_of_root(seed):
    """A closed directory with files that all may write, a file of root, and beside them a directory that all may write."""

    async def body():
        place = await Place().start()
        home, below, file = await private(place)
        secret = await place.root.file(ROOT, b"f", mode=stat.S_IFREG | 0o600)
        tmp = (await place.root.create(ROOT, b"tmp", stat.S_IFDIR | 0o1777, exclusive=True)).entry.attr
        await place.root.setattr(tmp.inode, valid.MODE, mode=0o1777)
        theirs = (await place.us.file(tmp.inode, b"x", mode=stat.S_IFREG | 0o644)).inode
        known, chance = (
            [ROOT, home.inode, below.inode, file.inode, secret.inode, tmp.inode, theirs],
            random.Random(seed),
        )

        async def state():
            found = [
                (await place.root.getattr(one.inode)).attr.SerializeToString()
                for one in (home, below, file, secret)
            ]
            return (
                found,
                await place.root.names(home.inode),
                await place.root.names(below.inode),
                await place.root.names(ROOT),
            )

        before, sequence, refusals = await state(), place.us.sequences[0], Counter()
        closed = {file.inode, secret.inode}
        try:
            for _ in range(1500):
                method = chance.choice(sorted(REQUESTS))
                sequence += 1
                request = any_request(REQUESTS[method], chance, known, place.us.session, sequence)
                call = DirectCall(method, request.SerializeToString(), peer=peer(US, 50))
                place.service.handle(call)
                try:
                    message, _ = await call.wait()
                except NvpoolError as error:
                    assert not isinstance(error, Bug)
                    refusals[type(error).__name__] += 1
                    continue
                for right in (piece for piece in grants_in(message) if piece.inode in closed):
                    raise AssertionError(f"{wire.Method.Name(method)} gave the right {right} for {request}")
            assert await state() == before
            assert refusals["AccessDenied"] > 100 and refusals["NotPermitted"] > 10
        finally:
            await place.service.close()

    asyncio.run(body())


def grants_in(message):
    """Yield the signed grants anywhere in a message."""
    for at in range(len(message) - grants.GRANT_BYTES + 1):
        try:
            yield grants.verify(message[at : at + grants.GRANT_BYTES], b"s" * 32, 0)
        except StaleGrant:
            continue
