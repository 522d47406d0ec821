"""Root squashing of a client: root counts as nobody, the other users as the IDs that they state."""

from __future__ import annotations

import asyncio
import stat

import pytest

from nvpool.core import grants
from nvpool.core.clock import ManualClock
from nvpool.core.errors import AccessDenied, NoAttribute, NotPermitted
from nvpool.core.ids import ROOT_INODE as ROOT
from nvpool.core.names import ANONYMOUS_ID, check_member, new_member, squashes_root, user_in, users_of
from nvpool.core.posix.acl import ACCESS, GROUP, GROUP_OBJ, MASK, OTHER, USER, USER_OBJ, AclEntry, encode_acl
from nvpool.kv.memory_engine import MemoryKv
from nvpool.meta.operations import permissions
from nvpool.meta.operations import setattr as valid
from nvpool.meta.server.service import MetaService
from nvpool.meta.state.records import Inode
from nvpool.rpc.access_control import Callers
from nvpool.rpc.messages.direntries import DirectoryPage
from nvpool.rpc.peer_roles import ANY_USER_BUT_ROOT, BELIEVED_GROUPS, Credentials, Peer, acts_as
from nvpool.rpc.v1 import meta_pb2 as pb
from nvpool.testing.fakes.meta_shard import ShardClient, StoreRecorder, small_map
from tests.unit.meta.server.test_local_users import OPTIONS, refused

ALICE, CAROL, STAFF = 1000, 1001, 50
PEER = Peer("gpu-1", "192.0.2.1:1", False, new_member("client", "gpu-1", squash_root=True))


class Place:
    """A shard with a session of a node's root (`node`), and one of a squashing client, for its root and two of its users."""

    async def start(self):
        self.kv, self.clock = MemoryKv(), ManualClock()
        await self.begin()
        return self

    async def begin(self):
        self.service = MetaService(
            self.kv,
            grant_secret=b"s" * 32,
            dialer=StoreRecorder(),
            clock=self.clock,
            options=OPTIONS,
            callers=Callers(),
        )
        self.service.update_map(small_map())
        await self.service.start()
        self.node = await ShardClient(self.service).begin()
        self.root = await ShardClient(self.service, 0, 0, PEER).begin()
        self.alice, self.carol = self.as_user(ALICE, STAFF), self.as_user(CAROL, CAROL)

    def as_user(self, uid, gid):
        """The same session: a mount has one session for all its users."""
        found = ShardClient(self.service, uid, gid, PEER)
        found.session, found.secret, found.sequences = (
            self.root.session,
            self.root.secret,
            self.root.sequences,
        )
        return found

    async def owned(self, name, mode, uid=0, gid=0, parent=ROOT):
        inode = (await self.node.create(parent, name, mode, exclusive=True)).entry.attr.inode
        if uid or gid:
            await self.node.setattr(inode, valid.UID | valid.GID, uid=uid, gid=gid)
            await self.node.setattr(inode, valid.MODE, mode=stat.S_IMODE(mode))
        return inode


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


def test_member_name_shows_root_squashing():
    member = new_member("client", "gpu-1.lan", squash_root=True)
    check_member(member)
    assert squashes_root(member) and user_in(member) is None and users_of(member) == "any user, root squashed"
    for other in (
        new_member("client", "x.squash-root"),
        new_member("client", "x", acts_as=(5, 6)),
        f"node{member[6:]}",
        f"{member}.x",
        "client/squash-root",
        "",
    ):
        assert not squashes_root(other), other
    assert users_of(new_member("client", "x", acts_as=(5, 6))) == "user 5, group 6"
    assert users_of(new_member("client", "x")) == "any user"


def test_squashing_peer_acts_as_an_unnamed_user():
    assert acts_as(PEER, None) == (ANY_USER_BUT_ROOT, BELIEVED_GROUPS, 0)
    assert Callers().of(PEER).user.uid == ANY_USER_BUT_ROOT and Callers().of(PEER).owner == PEER.member


def may(mode, owner, group, uid, wanted, access=()):
    return permissions.may(
        Inode(1, mode=stat.S_IFREG | mode, uid=owner, gid=group),
        access,
        Credentials(uid, BELIEVED_GROUPS, 0),
        wanted,
    )


def test_stated_groups_are_accepted_except_root():
    assert may(0o600, ALICE, 0, ALICE, 6) and not may(0o600, CAROL, 0, ALICE, 4)
    assert may(0o060, 0, STAFF, ALICE, 6) and not may(0o060, 0, 0, ALICE, 4)
    assert may(0o604, CAROL, STAFF, ALICE, 4), "a user outside the group has the rights of class other"
    assert not may(0o077, ALICE, STAFF, ALICE, 4), "the owner has only the owner's rights"


def test_unnamed_user_has_the_rights_of_any_user_but_root():
    assert may(0o600, ALICE, 0, ANY_USER_BUT_ROOT, 6) and not may(0o600, 0, 0, ANY_USER_BUT_ROOT, 4)
    assert may(0o060, 0, STAFF, ANY_USER_BUT_ROOT, 6) and not may(0o060, 0, 0, ANY_USER_BUT_ROOT, 4)
    assert may(0o004, 0, 0, ANY_USER_BUT_ROOT, 4) and not may(0o770, 0, 0, ANY_USER_BUT_ROOT, 1)


def test_access_lists_apply_to_accepted_groups():
    def entries(tag, id, mask=7):
        return (
            AclEntry(USER_OBJ, 6),
            AclEntry(tag, 6, id),
            AclEntry(GROUP_OBJ, 0),
            AclEntry(MASK, mask),
            AclEntry(OTHER, 0),
        )

    for uid, tag, id, wanted, allowed in (
        (ALICE, USER, ALICE, 6, True),
        (CAROL, USER, ALICE, 4, False),
        (ANY_USER_BUT_ROOT, USER, ALICE, 6, True),
        (ANY_USER_BUT_ROOT, USER, 0, 4, False),
        (ALICE, GROUP, STAFF, 6, True),
        (ALICE, GROUP, 0, 4, False),
    ):
        assert may(0o670, 0, 0, uid, wanted, entries(tag, id)) == allowed, (uid, tag, id)
    assert not may(0o640, 0, 0, ALICE, 2, entries(USER, ALICE, mask=4))


@scenario
async def test_root_opens_files_as_nobody(place):
    for name, mode, uid in ((b"roots", 0o600, 0), (b"alices", 0o600, ALICE)):
        inode = await place.owned(name, stat.S_IFREG | mode, uid)
        await refused(AccessDenied, place.root.open(inode, grants.READ))
        assert (
            not (await place.root.lookup(ROOT, name, 3)).grant
            and not (await place.root.getattr(inode, 3)).grant
        )
    alices = (await place.alice.lookup(ROOT, b"alices")).attr.inode
    await refused(AccessDenied, place.carol.open(alices))
    assert grants.read((await place.alice.open(alices, 3)).grant).rights == 3
    await refused(AccessDenied, place.root.open(alices, grants.READ))  # also by the session that has it open
    every = await place.owned(b"every", stat.S_IFREG | 0o644)
    assert grants.read((await place.root.lookup(ROOT, b"every", 3)).grant).rights == grants.READ
    assert (await place.root.open(every, grants.READ)).grant
    await refused(AccessDenied, place.root.open(every, grants.WRITE))


@scenario
async def test_token_in_a_look_up_reply_is_for_all_users(place):
    """The file is readable by all, in a directory that only its owner may search; the request does not name the user."""
    home = await place.owned(b"home", stat.S_IFDIR | 0o700, ALICE, STAFF)
    inode = await place.owned(b"f", stat.S_IFREG | 0o666, ALICE, STAFF, home)
    assert (
        not (await place.alice.lookup(home, b"f", 3)).grant
        and not (await place.alice.getattr(inode, 3)).grant
    )
    many = pb.LookupManyRequest(
        session=place.root.session, rights=1, directories=[pb.NamesIn(parent=home, names=[b"f"])]
    )
    assert not (await place.root.ask("LOOKUP_MANY", many)).found[0].entry.grant
    assert (await place.alice.open(inode, 3)).grant
    await refused(AccessDenied, place.root.open(inode, grants.READ))
    await refused(AccessDenied, place.carol.open(inode, grants.READ))


@scenario
async def test_root_only_entries_are_hidden(place):
    private = await place.owned(b"private", stat.S_IFDIR | 0o700)
    inode = await place.owned(b"f", stat.S_IFREG | 0o644, parent=private)
    for ask in (
        lambda: place.root.lookup(private, b"f"),
        lambda: place.root.getattr(inode),
        lambda: place.root.list(private),
        lambda: place.root.open(inode),
        lambda: place.alice.open(inode),
        lambda: place.root.locks(inode),
    ):
        await refused(AccessDenied, ask())
    many = pb.GetAttrManyRequest(session=place.root.session, inodes=inode.to_bytes(8, "little"))
    message, _ = await place.root.send("GETATTR_MANY", many).wait()
    assert not DirectoryPage(pb.GetAttrManyReply.FromString(message).packed).inodes
    await place.owned(b"x", stat.S_IFREG | 0o600)
    assert (await place.root.lookup(ROOT, b"x")).attr.uid == 0, (
        "attributes are visible to every user who may search the directory"
    )


@scenario
async def test_root_creates_files_owned_by_nobody(place):
    drop = await place.owned(b"drop", stat.S_IFDIR | 0o1777)
    made = (
        await place.root.create(drop, b"f", stat.S_IFREG | 0o600, exclusive=True, open=True, rights=3)
    ).entry
    assert (made.attr.uid, made.attr.gid) == (ANONYMOUS_ID, ANONYMOUS_ID) and grants.read(
        made.grant
    ).rights == 3
    assert (await place.alice.file(drop, b"g")).uid == ALICE
    await refused(AccessDenied, place.root.create(ROOT, b"f"))
    await refused(NotPermitted, place.root.unlink(drop, b"g"))  # the directory is sticky
    await refused(NotPermitted, place.root.rename(drop, b"g", drop, b"h"))
    await place.root.unlink(drop, b"f")
    for mode in (stat.S_IFCHR | 0o666, stat.S_IFBLK | 0o666):
        await refused(NotPermitted, place.root.create(drop, b"null", mode))
        await refused(NotPermitted, place.alice.create(drop, b"null", mode))


@scenario
async def test_root_may_change_only_files_of_nobody(place):
    drop = await place.owned(b"drop", stat.S_IFDIR | 0o777)
    mine = (await place.root.file(drop, b"mine")).inode
    others = await place.owned(b"others", stat.S_IFREG | 0o666, ALICE, STAFF)
    for inode in (others, await place.owned(b"roots", stat.S_IFREG | 0o666)):
        for change in (
            lambda inode=inode: place.root.setattr(inode, valid.MODE, mode=0o777),
            lambda inode=inode: place.root.setattr(inode, valid.UID, uid=ANONYMOUS_ID),
            lambda inode=inode: place.root.setattr(inode, valid.GID, gid=ANONYMOUS_ID),
            lambda inode=inode: place.root.setattr(inode, valid.MTIME, mtime_ns=1),
        ):
            await refused(NotPermitted, change())
    for owner in ({"uid": 0}, {"uid": ALICE}):
        await refused(NotPermitted, place.root.setattr(mine, valid.UID, **owner))
        await refused(NotPermitted, place.alice.setattr(others, valid.UID, uid=0))
    await refused(NotPermitted, place.alice.setattr(others, valid.GID, gid=0))
    await refused(NotPermitted, place.root.setattr(mine, valid.GID, gid=0))
    assert (await place.alice.setattr(others, valid.GID, gid=77)).attr.gid == 77, (
        "the client's kernel has checked the groups"
    )
    assert stat.S_IMODE((await place.root.setattr(mine, valid.MODE, mode=0o4755)).attr.mode) == 0o4755
    await refused(NotPermitted, place.carol.setattr(others, valid.MODE, mode=0o777))


@scenario
async def test_set_id_bits_are_cleared_when_another_user_writes(place):
    inode = await place.owned(b"f", stat.S_IFREG | 0o6777)
    assert stat.S_IMODE((await place.root.open(inode, 3)).attr.mode) == 0o777
    roots = await place.owned(b"g", stat.S_IFDIR | 0o2777)
    made = await place.root.create(roots, b"x", stat.S_IFREG | 0o2755, exclusive=True)
    assert not made.entry.attr.mode & stat.S_ISGID and made.entry.attr.gid == 0


@scenario
async def test_privileged_xattrs_belong_to_root_of_nodes(place):
    drop = await place.owned(b"drop", stat.S_IFDIR | 0o777)
    mine = (await place.root.file(drop, b"mine")).inode
    for name in (b"trusted.a", b"security.capability"):
        request = pb.SetXattrRequest(change=place.root.change(), inode=mine, name=name, value=b"x")
        await refused(NotPermitted, place.root.ask("SETXATTR", request))
    request = pb.SetXattrRequest(change=place.node.change(), inode=mine, name=b"trusted.a", value=b"x")
    await place.node.ask("SETXATTR", request)
    await refused(
        NoAttribute,
        place.root.ask(
            "GETXATTR", pb.GetXattrRequest(session=place.root.session, inode=mine, name=b"trusted.a")
        ),
    )
    alices = await place.owned(b"a", stat.S_IFREG | 0o644, ALICE, STAFF)
    acl = encode_acl(
        (
            AclEntry(USER_OBJ, 6),
            AclEntry(USER, 6, ANONYMOUS_ID),
            AclEntry(GROUP_OBJ, 4),
            AclEntry(MASK, 6),
            AclEntry(OTHER, 0),
        )
    )
    await refused(
        NotPermitted,
        place.root.ask(
            "SETXATTR", pb.SetXattrRequest(change=place.root.change(), inode=alices, name=ACCESS, value=acl)
        ),
    )
    await place.alice.ask(
        "SETXATTR", pb.SetXattrRequest(change=place.alice.change(), inode=alices, name=ACCESS, value=acl)
    )
    assert (await place.root.open(alices, 3)).grant, "an access list may name user nobody"


@scenario
async def test_open_file_may_be_written_by_any_user_of_the_mount(place):
    """A mount reports the writes of all its users, and does not name the user."""
    inode = await place.owned(b"f", stat.S_IFREG | 0o600, ALICE)
    await refused(AccessDenied, place.root.report(await place.owned(b"roots", stat.S_IFREG | 0o600), 10))
    await place.alice.open(inode, 3)
    await place.node.setattr(inode, valid.MODE, mode=0)
    assert (await place.root.report(inode, 10)).size == 10
    assert (
        await place.root.ask("RESERVE", pb.ReserveRequest(change=place.root.change(), inode=inode, length=5))
    ).offset == 10
    assert (await place.root.allocate(inode, 0, 100, grow=True)).attr.size == 100
    assert (await place.root.lock(inode, 2)).granted
    await refused(
        AccessDenied, place.root.setattr(inode, valid.SIZE, size=0)
    )  # the request says that the caller is root
    await place.service.close()
    await place.begin()
    await refused(AccessDenied, place.root.report(inode, 20))
    opened = pb.RenewSessionRequest(session=place.root.session, opened=inode.to_bytes(8, "little"))
    await place.root.ask("RENEW_SESSION", opened)
    assert (await place.root.report(inode, 200)).size == 200


@scenario
async def test_squashed_client_cannot_create_volumes(place):
    drop = await place.owned(b"drop", stat.S_IFDIR | 0o777)
    await refused(
        AccessDenied,
        place.root.create(drop, b"v", stat.S_IFDIR | 0o755, exclusive=True, volume=pb.VolumePolicy()),
    )


@scenario
async def test_refusal_names_the_user(place):
    inode = await place.owned(b"f", stat.S_IFREG | 0o600)
    with pytest.raises(AccessDenied, match=f"^user {ANONYMOUS_ID} may not read inode {inode}"):
        await place.root.open(inode)
    private = await place.owned(b"p", stat.S_IFDIR | 0o700)
    with pytest.raises(
        AccessDenied, match="^no user of this client but root, which is squashed, may not search"
    ):
        await place.root.lookup(private, b"f")


def test_frames_of_a_bound_client_are_checked_too(tmp_path):
    """A frame takes the same way as a call: modes and paths are checked."""
    from tests.unit.meta.server.test_request_dispatch import (
        LOOKUP,
        REQUEST,
        Ordinary,
        ReplyStats,
        pack_head,
        read_head,
    )

    async def main():
        place = await Place().start()
        try:
            private = (await place.node.mkdir(ROOT, b"closed")).inode
            await place.node.setattr(private, 1, mode=0o700)
            await place.node.file(private, b"f")
            session = place.root.session
            message = pb.LookupRequest(session=session, parent=private, name=b"f").SerializeToString()
            frame, side, out = pack_head(REQUEST, LOOKUP, 7, 1000, message, 0), Ordinary(place.service), []
            side.peer = PEER
            dispatch = place.service.dispatch
            assert dispatch.answer(bytearray(frame), len(frame), {}, ReplyStats(), out, side) == len(frame)
            status = read_head(bytearray(out[0]), 0, len(out[0]), 0)[1]
            assert status == AccessDenied.wire_code
        finally:
            await place.service.close()

    asyncio.run(main())
