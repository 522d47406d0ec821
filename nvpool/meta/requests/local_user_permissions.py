"""Permission checks for local users without the rights of a node.

The process of such a user connects through a unix socket of its host, and the kernel says who it is
(rpc/peer_roles). It acts with its own uid and groups, whatever a request claims. Before each decision the
shard makes the checks that the kernel would make for the same system call on a mount
(`meta/operations/permissions`); check and decision are one step. Methods that such a user may not call are
refused before, in rpc/access_control.

An inode number alone gives no access: the inode must be reachable by a path that the user may search. A
directory knows its parent directory. For a file the shard remembers in which directory the user has met it,
or else searches the names of the file's partition. A session may keep using a right for which it received a
grant, as with a file descriptor, even if mode or path change later. A file that a session merely states to
have open gives no such right unless the user can reach it then.

A request about many inodes or names runs in steps. Each directory is checked once in CHECK_KEPT_NS (`Walks`),
and the request as a whole may scan a bounded number of names.

A client whose certificate squashes root (`identities.squashes_root`) is treated alike. If a request says for
which user it is made, that user is believed, except that root counts as nobody. Otherwise the request is made
for ANY_USER_BUT_ROOT: any user of that client but root. Such a request gets a grant only for what everybody may read
or write.

All metadata must be in one shard, because a path over several shards cannot be checked in one step. Used by
`meta/server/service`, on its thread.
"""

from __future__ import annotations

import contextlib
import stat
from collections.abc import Callable, Generator, Iterator, Sequence
from itertools import islice
from typing import Any

from nvpool.core import grants
from nvpool.core.errors import (
    AccessDenied,
    CorruptRecord,
    DirectoryGone,
    NotFound,
    NvpoolError,
    Refused,
    Stale,
)
from nvpool.core.ids import ROOT_INODE, partition_of
from nvpool.core.names import ANONYMOUS_ID
from nvpool.core.posix.acl import ACCESS, NAMES, Acl, decode_acl
from nvpool.core.posix.byte_range_locks import EXCLUSIVE, RECORD, UNLOCKED
from nvpool.meta.operations import permissions
from nvpool.meta.operations import setattr as attributes_of
from nvpool.meta.operations.listing import attributes, check_inode_count
from nvpool.meta.operations.lookup import lookup
from nvpool.meta.operations.permissions import READ, SEARCH, WRITE, mode_after_write, name_of
from nvpool.meta.operations.queries import check_name_count
from nvpool.meta.operations.rename import EXCHANGE
from nvpool.meta.operations.xattr import KILL_SET_GID, check_name, drop_attribute
from nvpool.meta.requests.path_walks import SEARCHED_MAX, SearchPaused, Walks
from nvpool.meta.sessions.table import Session, Sessions
from nvpool.meta.state import records
from nvpool.meta.state.records import Inode
from nvpool.meta.state.transaction import Decision, Draft, View
from nvpool.rpc.messages import read_write_codec
from nvpool.rpc.messages.direntries import DirectoryPage
from nvpool.rpc.messages.meta_messages import (
    CreateRequest,
    GetAttrRequest,
    LookupRequest,
    ReportRequest,
    UnlinkRequest,
)
from nvpool.rpc.peer_roles import ANY_USER_BUT_ROOT, BELIEVED_GROUPS, Credentials
from nvpool.rpc.v1 import meta_pb2 as pb
from nvpool.rpc.v1 import wire_pb2 as wire

_ANONYMOUS = Credentials(ANONYMOUS_ID, frozenset((ANONYMOUS_ID,)), 0)
KNOWN_MAX = 131_072
"""Limit of each cache, over all users: directories of met files, and granted rights. The least recently used
entry is dropped."""
NAMES_PER_STEP = 8
"""Names looked up in one step of a request: a quarter of a millisecond."""
OPENS_LOOKED_AT = 1024
"""Open files of a session, the latest first, among which one is looked for that it may write in a volume."""
DEPTH_MAX = 4096
CAPABILITIES = b"security.capability"
"""Extended attribute with the capabilities of an executable file (capabilities(7)); removed when set-uid
is."""


def check_shards(view: View) -> None:
    """AccessDenied: this shard does not have all metadata, so paths of users cannot be checked."""
    if view.owners:
        raise AccessDenied(
            "the metadata of this pool is in several shards, so users without the rights of a node reach it "
            "through a mount alone, and clients that may not act as all users not at all"
        )


class LocalUsers:
    """Cached facts about all local users. They are in memory only and are found again after a restart."""

    def __init__(self, sessions: Sessions) -> None:
        self._sessions = sessions
        self._places: dict[tuple[int, int], tuple[int, bytes]] = {}
        self._rights: dict[tuple[int, int], int] = {}
        self._writers: dict[tuple[int, int], bool] = {}
        """Sessions and volumes in which they have received a grant to write."""

    def check_volume(
        self, view: View, credentials: Credentials, request: pb.VolumeRequest | pb.VolumeRoomRequest
    ) -> None:
        """AccessDenied: the user cannot reach the volume, or the request would change it.

        The key of an encrypted volume is only for users who may enter the volume.
        """
        if isinstance(request, pb.VolumeRequest) and request.action not in (
            pb.VolumeRequest.SHOW,
            pb.VolumeRequest.KEY,
        ):
            raise AccessDenied(f"{name_of(credentials)} has not the rights of a node, and changes no volume")
        user = User(self, view, credentials)
        inode = user.reach(request.inode)
        if isinstance(request, pb.VolumeRequest) and request.action == pb.VolumeRequest.KEY:
            user.check(inode, SEARCH)

    def may_write_in(self, view: View, credentials: Credentials, session: int, volume: int) -> bool:
        """Whether the session has received the right to write a file of the volume.

        After a restart of the shard no such right is known. Then an open file counts that the user may write.
        """
        if (session, volume) in self._writers:
            return True
        found, user = self._sessions.by_number.get(session), User(self, view, credentials)
        for number in islice(reversed(found.opens), OPENS_LOOKED_AT) if found is not None else ():
            if partition_of(number) != partition_of(volume):
                continue
            try:
                inode = view.inode(number)
            except (Refused, CorruptRecord):
                continue
            if inode.volume == volume and (
                user.held(session, inode) & grants.WRITE or user.may(inode, WRITE)
            ):
                self.wrote(session, volume)
                return True
        return False

    def decision(
        self, method: int, credentials: Credentials, decide: Decision, walks: Walks | None = None
    ) -> Decision:
        """Wrap `decide` for this user: checks come first, and the request gets the user's uid and groups."""
        guard, note = GUARDS[method]
        says = credentials.uid == ANY_USER_BUT_ROOT and method in _SAY_FOR_WHOM

        def decide_for_user(view: View, request: Any, now_ns: int) -> Draft:
            user = User(self, view, believed(request.change) if says else credentials, credentials.uid, walks)
            guard(user, request)
            draft = decide(view, request, now_ns)
            note(user, request, draft)
            return draft

        return decide_for_user

    def listed(self, view: View, credentials: Credentials, request: pb.ListDirRequest) -> bool:
        """Check that the user may list the directory. Return whether more than names and kinds may be shown.

        AccessDenied: the user may not list it.
        """
        user = User(self, view, credentials)
        directory = user.reach(request.inode)
        user.check(directory, READ)
        request.rights = 0
        return user.may(directory, SEARCH)

    def listed_in_steps(
        self,
        view: View,
        credentials: Credentials,
        request: pb.ListDirRequest,
        steps: Iterator[pb.ListDirReply | None],
    ) -> Iterator[pb.ListDirReply | None]:
        """Steps of a listing, with the check of `listed` again after other requests had their turn."""
        for reply in steps:
            yield reply
            if reply is None:
                self.listed(view, credentials, request)

    def note_listing(self, credentials: Credentials, directory: int, reply: pb.ListDirReply) -> None:
        """Remember that the user has met the files of this listing in the directory."""
        listed = DirectoryPage(reply.packed)
        for inode, name in (
            *zip(listed.inodes, listed.names, strict=True),
            *((one.inode, one.name) for one in reply.entries),
        ):
            self.met(credentials.uid, inode, directory, name)

    def getattr_many(
        self, view: View, request: pb.GetAttrManyRequest, now_ns: Callable[[], int], credentials: Credentials
    ) -> Iterator[pb.GetAttrManyReply | None]:
        """As `operations.listing.attributes`, of those inodes that the user can reach by a path.

        Yields one reply at the end, and None wherever other requests should get their turn. The checks and
        the attributes of an inode are of the same step.
        """
        check_inode_count(request.inodes)
        numbers = list(dict.fromkeys(read_write_codec.unpack_inodes(request.inodes)))
        walks, reply, packed = Walks(now_ns, frozenset(numbers)), pb.GetAttrManyReply(), []
        user, found = User(self, view, credentials, walks=walks), []
        at = 0
        while at < len(numbers):
            walks.work += 1
            try:
                user.reach(numbers[at])
                found.append(numbers[at])
                at += 1
            except SearchPaused:
                pass
            except (Refused, CorruptRecord):
                at += 1
            if not walks.is_due and at < len(numbers):
                continue
            some = pb.GetAttrManyRequest(session=request.session, inodes=read_write_codec.pack_inodes(found))
            part = attributes(view, some, now_ns())
            packed.append(part.packed)
            reply.lease_ms = reply.lease_ms or part.lease_ms
            if at < len(numbers):
                yield None
                walks.begin_step()
                found = []
        reply.packed = b"".join(packed)
        yield reply

    def openable(
        self,
        view: View,
        credentials: Credentials,
        session: Session,
        inodes: Sequence[int],
        in_grace: bool,
        now_ns: Callable[[], int],
    ) -> Generator[None, None, list[int]]:
        """Those of the inodes that the session may state as open: see `User.may_state`.

        Yields wherever other requests should get their turn. `in_grace`: the shard has restarted and does not
        know yet what the session had open.
        """
        walks = Walks(now_ns, frozenset(inodes))
        user, found = User(self, view, credentials, walks=walks), []
        known: dict[int, bool] = {}
        for number in inodes:
            while number not in known:
                if walks.is_due:
                    yield None
                    walks.begin_step()
                walks.work += 1
                with contextlib.suppress(SearchPaused):
                    known[number] = number in session.opens or user.may_state(
                        session.number, number, in_grace
                    )
            if known[number]:
                found.append(number)
        return found

    def lookup_many(
        self,
        view: View,
        request: pb.LookupManyRequest,
        now_ns: Callable[[], int],
        *,
        credentials: Credentials,
    ) -> Iterator[pb.LookupManyReply | None]:
        """As `operations.lookup.lookup_many`, but with the user's checks for each name."""
        check_name_count(request)
        reply, walks = pb.LookupManyReply(), Walks(now_ns)
        decide = self.decision(wire.META_LOOKUP, credentials, lookup, walks)
        count = 0
        for directory in request.directories:
            for name in directory.names:
                one = LookupRequest(
                    session=request.session,
                    parent=directory.parent,
                    name=name,
                    rights=request.rights & grants.READ,
                )
                try:
                    entry = decide(view, one, now_ns()).reply
                    entry.copy_to(reply.found.add().entry)
                except (Refused, Stale, CorruptRecord) as error:
                    reply.found.add(error=error.wire_code)
                count += 1
                if not count % NAMES_PER_STEP or walks.is_due:
                    yield None
                    walks.begin_step()
        yield reply

    # -- for User ----------------------------------------------------------------------------------------------------------

    def place(self, uid: int, inode: int) -> tuple[int, bytes] | None:
        """Directory and name under which the user has met the file; None if unknown."""
        return self._places.get((uid, inode))

    def met(self, uid: int, inode: int, directory: int, name: bytes) -> None:
        keep_bounded(self._places, (uid, inode), (directory, name))

    def rights(self, session: int, inode: int) -> int:
        return self._rights.get((session, inode), 0)

    def given(self, session: int, inode: int, rights: int) -> None:
        keep_bounded(self._rights, (session, inode), self.rights(session, inode) | rights)

    def wrote(self, session: int, volume: int) -> None:
        keep_bounded(self._writers, (session, volume), True)

    def has_open(self, session: int, inode: int) -> bool:
        found = self._sessions.by_number.get(session)
        return found is not None and inode in found.opens


def keep_bounded(table: dict, key: Any, value: Any) -> None:
    """Put an entry at the end of the table, which drops its oldest one when it is full."""
    table.pop(key, None)
    if len(table) >= KNOWN_MAX:
        del table[next(iter(table))]
    table[key] = value


class User:
    """One user during one decision, or during one request about many inodes (`walks`)."""

    __slots__ = ("known", "view", "credentials", "uid", "met_by", "walks")

    def __init__(
        self,
        known: LocalUsers,
        view: View,
        credentials: Credentials,
        met_by: int | None = None,
        walks: Walks | None = None,
    ) -> None:
        """`met_by`: uid under which met files are remembered, which proves no right; default: the user's
        own."""
        self.walks = walks
        self.known = known
        self.view = view
        self.credentials = credentials
        self.uid = credentials.uid
        self.met_by = self.uid if met_by is None else met_by

    def access(self, inode: Inode) -> Acl:
        raw = self.view.xattr(inode.number, ACCESS) if inode.flags & records.HAS_ACL else None
        return decode_acl(raw) if raw is not None else ()

    def may(self, inode: Inode, wanted: int) -> bool:
        return permissions.may(inode, self.access(inode), self.credentials, wanted)

    def check(self, inode: Inode, wanted: int) -> None:
        permissions.check(inode, self.access(inode), self.credentials, wanted)

    # -- paths

    def entered(self, number: int) -> Inode:
        """The directory, after a check that the user may search it and every directory above it.

        AccessDenied: the user may not search one of them. DirectoryGone: the directory was removed.
        """
        directory = at = self.view.directory(number)
        if self.walks is not None:
            self._walk(directory, self.walks)
            return directory
        for _ in range(DEPTH_MAX):
            if at.flags & records.TRASHED:
                break
            self.check(at, SEARCH)
            if at.number == ROOT_INODE:
                return directory
            at = self.view.directory(at.parent)
        raise DirectoryGone(f"directory {number} was removed")

    def _walk(self, directory: Inode, walks: Walks) -> None:
        """As `entered`, but each directory is checked only once in a while. Raises the error of that check."""
        checked, uid, at = walks.checked, self.uid, directory
        path: list[tuple[int, int]] = []
        error: NvpoolError | None = DirectoryGone(f"directory {directory.number} was removed")
        try:
            for _ in range(DEPTH_MAX):
                place = uid, at.number
                if place in checked:
                    error = checked[place]
                    break
                path.append(place)
                walks.work += 1
                if at.flags & records.TRASHED:
                    break
                self.check(at, SEARCH)
                if at.number == ROOT_INODE:
                    error = None
                    break
                at = self.view.directory(at.parent)
        except (Refused, CorruptRecord) as found:
            error = found
        checked.update(dict.fromkeys(path, error))
        if error is not None:
            raise error.with_traceback(None)

    def reach(self, number: int) -> Inode:
        """The inode, after a check that a path leads to it which the user may search.

        AccessDenied, NotFound.
        """
        inode = self.view.inode(number)
        if number == ROOT_INODE:
            return inode
        if inode.is_directory:
            self.entered(inode.parent)
            return inode
        if (place := self.known.place(self.met_by, number)) is not None:
            try:
                if self.view.named(self.entered(place[0]), place[1])[1] == number:
                    return inode
            except (AccessDenied, NotFound):
                pass  # the file may have another name, or may have been moved
        self._look_for(number, inode.links)
        return inode

    def _look_for(self, number: int, links: int) -> None:
        """Search the file's partition for a name that the user can reach, and remember it.

        AccessDenied: the user can reach none of the file's names. NotFound: the file may have names
        elsewhere; a caller that knows one looks that name up.
        """
        if self.walks is not None:
            self._look_among_many(number, self.walks)
            return
        partition, found = partition_of(number), 0
        first, end = records.prefix(partition, records.DENTRY), records.prefix(partition, records.DENTRY + 1)
        denied: AccessDenied | None = None
        for key, raw in self.view.scan(first, end, SEARCHED_MAX):
            try:
                if records.decode_dentry(partition, raw)[0] != number:
                    continue
                directory, found = records.directory_of_key(key), found + 1
                self.entered(directory)
            except AccessDenied as error:
                denied = error
                continue
            except (NotFound, CorruptRecord):
                continue
            self.known.met(self.met_by, number, directory, key[records.NAME_AT :])
            return
        if denied is not None and found >= links:
            raise denied
        raise self._unknown(number)

    def _look_among_many(self, number: int, walks: Walks) -> None:
        """As `_look_for`, for a request about many inodes. NotFound: no name was found that the user can
        reach."""
        if number in walks.wanted:
            walks.search(self.view, partition_of(number))
        for directory, name in walks.names.get(number, ()):
            try:
                if self.view.named(self.entered(directory), name)[1] == number:
                    self.known.met(self.met_by, number, directory, name)
                    return
            except (AccessDenied, NotFound, CorruptRecord):
                continue
        raise self._unknown(number)

    def _unknown(self, number: int) -> NotFound:
        return NotFound(f"{name_of(self.credentials)} is not known to have a path to inode {number}")

    def may_state(self, session: int, number: int, in_grace: bool) -> bool:
        """Whether the session may state that it has the inode open.

        It may if it has received a right to the file, or the user can reach it. A file that was deleted has
        no path: its owner may state it, and `in_grace` every user whom its mode lets read or write.
        """
        if self.known.rights(session, number):
            return True
        try:
            inode = self.view.inode(number)
            if inode.links and not inode.flags & records.TRASHED:
                self.reach(number)
                return True
        except (Refused, CorruptRecord):
            return False
        return self._owns(inode) or (in_grace and (self.may(inode, READ) or self.may(inode, WRITE)))

    def _owns(self, inode: Inode) -> bool:
        """Whether the inode is the user's own; that of any user but root counts for ANY_USER_BUT_ROOT."""
        return self.uid == inode.uid or (self.uid == ANY_USER_BUT_ROOT and bool(inode.uid))

    # -- rights

    def by_mode(self, inode: Inode, rights: int) -> int:
        """Those of `rights` that the mode gives to the user when the file is opened.

        ANY_USER_BUT_ROOT gets only rights that everybody has.
        """
        credentials = self.credentials
        if self.uid == ANY_USER_BUT_ROOT:
            credentials = _ANONYMOUS
            if not rights or not self._everybody_reaches(inode):
                return 0
        access = self.access(inode)
        allowed = grants.READ if permissions.may(inode, access, credentials, READ) else 0
        allowed |= grants.WRITE if permissions.may(inode, access, credentials, WRITE) else 0
        return rights & allowed

    def _everybody_reaches(self, inode: Inode) -> bool:
        try:
            User(self.known, self.view, _ANONYMOUS, self.met_by, self.walks).reach(inode.number)
        except Refused:
            return False
        return True

    def held(self, session: int, inode: Inode) -> int:
        """Rights that the session holds as if by a file descriptor.

        After a restart no granted rights are known. Then the owner of a file that the session reports as open
        (`may_state`) has all rights, because an owner could give them to itself. Squashed root does not share
        rights that other users of the same session have obtained.
        """
        if self._owns(inode) and self.known.has_open(session, inode.number):
            return grants.READ | grants.WRITE
        return 0 if self.is_squashed else self.known.rights(session, inode.number)

    @property
    def is_squashed(self) -> bool:
        return self.met_by == ANY_USER_BUT_ROOT and self.uid == ANONYMOUS_ID

    def handled(self, session: int, number: int, rights: int) -> Inode:
        """The inode, after a check that the session has `rights` on it.

        Rights that the session does not hold yet must follow from the inode's mode. AccessDenied.
        """
        inode = self.view.inode(number)
        missing = rights & ~self.held(session, inode)
        if missing or (not rights and not self.held(session, inode)):
            inode = self.reach(number)
            self.check(
                inode, (READ if missing & grants.READ else 0) | (WRITE if missing & grants.WRITE else 0)
            )
        return inode

    def granted(self, session: int, inode: Inode, rights: int) -> int:
        """Those of `rights` for which a grant may be added to the answer."""
        held = self.held(session, inode)
        found = rights & held | self.by_mode(inode, rights & ~held)
        if (
            found & grants.WRITE
            and self.uid != inode.uid
            and mode_after_write(inode, self.credentials) != inode.mode
        ):
            found &= ~grants.WRITE  # another user's write must clear set-uid first, which happens at open
        return found

    def note_entry(
        self, entry: pb.InodeEntry, session: int, rights: int, directory: int = 0, name: bytes = b""
    ) -> None:
        if name and entry.attr.inode:
            self.known.met(self.met_by, entry.attr.inode, directory, name)
        if entry.grant:
            self.known.given(session, entry.attr.inode, rights)
            if rights & grants.WRITE and entry.attr.volume:
                self.known.wrote(session, entry.attr.volume)


def believed(change: pb.Change) -> Credentials:
    """Credentials of a request from a client whose root is squashed: the user it claims, with root as
    nobody."""
    if not change.uid:
        return Credentials(ANONYMOUS_ID, frozenset((change.gid or ANONYMOUS_ID,)), 0)
    return Credentials(change.uid, BELIEVED_GROUPS, 0)


def _gid(credentials: Credentials, claimed: int) -> int:
    """Group of a new inode: the one that the process claims, if it is among its own groups."""
    if claimed in credentials.gids:
        return claimed
    return ANONYMOUS_ID if credentials.gids is BELIEVED_GROUPS else min(credentials.gids)


def _without_privileges(user: User, draft: Draft, attr: pb.Attr) -> None:
    """Clear set-uid, set-gid and capabilities of the file of an answer, because the user writes to it."""
    number = attr.inode
    inode = draft.inodes.get(number)
    if (
        inode is not None
        and inode.is_file
        and (mode := mode_after_write(inode, user.credentials)) != inode.mode
    ):
        inode.mode = mode
        draft.stamp(inode)
    if (
        inode is not None
        and inode.flags & records.HAS_XATTRS
        and draft.view.xattr(number, CAPABILITIES) is not None
    ):
        drop_attribute(draft, inode, CAPABILITIES)
        draft.stamp(inode)
    if inode is not None:
        attr.mode, attr.change, attr.ctime_ns = inode.mode, inode.change, inode.ctime_ns


# -- queries -------------------------------------------------------------------------------------------------


def _guard_lookup(user: User, request: LookupRequest) -> None:
    directory = user.entered(request.parent)
    if request.rights:
        inode = user.view.inode(user.view.named(directory, request.name)[1])
        if not inode.is_directory:
            user.known.met(user.met_by, inode.number, request.parent, request.name)
        request.rights = user.granted(request.session, inode, user.by_mode(inode, request.rights))


def _note_lookup(user: User, request: LookupRequest, draft: Draft) -> None:
    user.note_entry(draft.reply, request.session, request.rights, request.parent, request.name)


def _guard_getattr(user: User, request: GetAttrRequest) -> None:
    inode = user.handled(request.session, request.inode, 0)
    request.rights = user.granted(request.session, inode, request.rights)


def _note_getattr(user: User, request: GetAttrRequest, draft: Draft) -> None:
    user.note_entry(draft.reply, request.session, request.rights)


def _guard_inode(user: User, request: Any) -> None:
    user.handled(request.session, request.inode, 0)


def _guard_getxattr(user: User, request: pb.GetXattrRequest) -> None:
    inode = user.handled(request.session, request.inode, 0)
    check_name(request.name)
    permissions.check_xattr(inode, user.access(inode), user.credentials, request.name, READ)


# -- changes ---------------------------------------------------------------------------------------------------------------


def _guard_create(user: User, request: CreateRequest) -> None:
    view, credentials, change = user.view, user.credentials, request.change
    parent = user.entered(request.parent)
    change.uid, change.gid = credentials.uid, _gid(credentials, change.gid)
    if not request.unnamed:
        partition, _, key = view.place(parent, request.name)
        raw = view.get(key)
        if raw is not None:
            # otherwise the decision refuses the existing name
            if not request.exclusive and stat.S_ISREG(request.mode):
                _check_opened(
                    user,
                    view.inode(records.decode_dentry(partition, raw)[0]),
                    request,
                    request.rights & grants.WRITE or request.rights,
                )
            return
    user.check(parent, WRITE)
    if request.HasField("volume"):
        raise AccessDenied(f"{name_of(credentials)} has not the rights of a node, and makes no volume")
    request.mode = permissions.mode_at_birth(parent, request.mode, credentials)


def _check_opened(user: User, inode: Inode, request: CreateRequest | pb.OpenRequest, wanted: int) -> None:
    """Check that the mode allows the requested access to an existing file.

    Rights that are requested beyond `wanted` are reduced to those that the mode allows.
    """
    wanted |= grants.WRITE if request.truncate else 0
    if inode.is_directory or inode.is_symlink:
        wanted &= grants.READ  # the decision refuses the rest for another reason
    user.check(inode, (READ if wanted & grants.READ else 0) | (WRITE if wanted & grants.WRITE else 0))
    request.rights = user.by_mode(inode, request.rights)


def _note_create(user: User, request: CreateRequest, draft: Draft) -> None:
    entry = draft.reply.entry
    user.note_entry(entry, request.change.session, request.rights, request.parent, request.name)
    if not draft.reply.created and (request.rights & grants.WRITE or request.truncate):
        _note_written(user, draft, entry.attr)


def _note_written(user: User, draft: Draft, attr: pb.Attr) -> None:
    """Clear privileges of another user's file that this user opened for writing.

    Otherwise the file would run this user's bytes with its owner's rights.
    """
    if attr.uid != user.uid:
        _without_privileges(user, draft, attr)


def _guard_open(user: User, request: pb.OpenRequest) -> None:
    _check_opened(user, user.reach(request.inode), request, request.wanted or request.rights)


def _note_open(user: User, request: pb.OpenRequest, draft: Draft) -> None:
    user.note_entry(draft.reply, request.change.session, request.rights)
    if request.rights & grants.WRITE or request.truncate:
        _note_written(user, draft, draft.reply.attr)


def _guard_write(user: User, request: pb.ReserveRequest) -> None:
    user.handled(request.change.session, request.inode, grants.WRITE)


def _guard_allocate(user: User, request: pb.AllocateRequest) -> None:
    inode = user.handled(request.change.session, request.inode, grants.WRITE)
    request.rights = user.granted(request.change.session, inode, request.rights)


def _guard_report(user: User, request: ReportRequest) -> None:
    writes = request.wrote or request.end or request.withdrawn
    user.handled(request.change.session, request.inode, grants.WRITE if writes else 0)


def _note_report(user: User, request: ReportRequest, draft: Draft) -> None:
    if request.wrote or request.end:
        _without_privileges(user, draft, draft.reply.attr)


def _note_changed(user: User, request: Any, draft: Draft) -> None:
    user.note_entry(draft.reply, request.change.session, request.rights)
    if isinstance(request, pb.AllocateRequest) or request.valid & attributes_of.SIZE:
        _without_privileges(user, draft, draft.reply.attr)


def _guard_setattr(user: User, request: pb.SetAttrRequest) -> None:
    valid, session, credentials = request.valid, request.change.session, user.credentials
    inode = user.handled(session, request.inode, 0)
    request.change.uid, request.change.gid = credentials.uid, _gid(credentials, request.change.gid)
    gid = inode.gid
    if valid & (attributes_of.UID | attributes_of.GID):
        gid = request.gid if valid & attributes_of.GID else None
        permissions.check_new_owner(
            inode, request.uid if valid & attributes_of.UID else None, gid, credentials
        )
        gid = inode.gid if gid is None else gid
    if valid & attributes_of.MODE:
        permissions.check_owner(inode, credentials)
        request.mode = permissions.mode_to_set(gid, request.mode, credentials)
    if (
        valid & (attributes_of.CHUNK | attributes_of.REPLICAS | attributes_of.WIDE)
        or not valid & ~attributes_of.CTIME
    ):
        permissions.check_owner(inode, credentials)
    if valid & attributes_of.SIZE and not inode.is_directory and not user.held(session, inode) & grants.WRITE:
        user.check(inode, WRITE)
    now = attributes_of.ATIME_NOW | attributes_of.MTIME_NOW
    if valid & (attributes_of.ATIME | attributes_of.MTIME) or (valid & now and valid & now != now):
        if not valid & attributes_of.SIZE:  # truncate(2) sets mtime to now without being the owner
            permissions.check_owner(inode, credentials)
    elif valid & now and inode.uid != credentials.uid and not user.held(session, inode) & grants.WRITE:
        user.check(inode, WRITE)
    request.rights = user.granted(session, inode, request.rights)


def _guard_removal(user: User, request: UnlinkRequest) -> None:
    parent = user.entered(request.parent)
    _check_name_goes(user, parent, user.view.inode(user.view.named(parent, request.name)[1]))


def _check_name_goes(user: User, parent: Inode, victim: Inode) -> None:
    user.check(parent, WRITE)
    permissions.check_sticky(parent, victim, user.credentials)


def _guard_rename(user: User, request: pb.RenameRequest) -> None:
    view = user.view
    old_parent, new_parent = user.entered(request.parent), user.entered(request.new_parent)
    moved = view.inode(view.named(old_parent, request.name)[1])
    partition, _, key = view.place(new_parent, request.new_name)
    raw = view.get(key)
    _check_name_goes(user, old_parent, moved)
    user.check(new_parent, WRITE)
    both = [moved]
    if raw is not None:
        other = view.inode(records.decode_dentry(partition, raw)[0])
        _check_name_goes(user, new_parent, other)
        if request.flags == EXCHANGE:
            both.append(other)
    if old_parent.number != new_parent.number:
        for inode in both:
            if inode.is_directory:  # its entry ".." changes
                user.check(inode, WRITE)


def _note_rename(user: User, request: pb.RenameRequest, draft: Draft) -> None:
    user.known.met(user.met_by, draft.reply.inode, request.new_parent, request.new_name)
    if request.flags == EXCHANGE:
        user.known.met(user.met_by, draft.reply.replaced, request.parent, request.name)


def _guard_link(user: User, request: pb.LinkRequest) -> None:
    view = user.view
    parent = user.entered(request.parent)
    inode = user.handled(request.change.session, request.inode, 0)
    if view.get(view.place(parent, request.name)[2]) is None:
        permissions.check_link(inode, user.access(inode), user.credentials)
        user.check(parent, WRITE)


def _note_link(user: User, request: pb.LinkRequest, draft: Draft) -> None:
    user.known.met(user.met_by, request.inode, request.parent, request.name)


def _guard_change_of_xattr(user: User, request: pb.SetXattrRequest | pb.RemoveXattrRequest) -> None:
    inode = user.handled(request.change.session, request.inode, 0)
    check_name(request.name)
    permissions.check_xattr(inode, user.access(inode), user.credentials, request.name, WRITE)
    if (
        request.name in NAMES
        and isinstance(request, pb.SetXattrRequest)
        and inode.gid not in user.credentials.gids
    ):
        request.flags |= KILL_SET_GID


def _guard_lock(user: User, request: pb.LockRequest) -> None:
    """Check a lock request: an exclusive fcntl(2) lock needs a descriptor for writing, a flock(2) lock
    any."""
    session = request.change.session
    if request.mode == UNLOCKED:
        return
    inode = user.handled(
        session, request.inode, grants.WRITE if request.kind == RECORD and request.mode == EXCLUSIVE else 0
    )
    if not user.held(session, inode) and not user.by_mode(inode, grants.READ | grants.WRITE):
        raise AccessDenied(f"{name_of(user.credentials)} may neither read nor write inode {inode.number}")


def _nothing(user: User, request: Any, draft: Draft) -> None:
    """Remember nothing."""


_SAY_FOR_WHOM = frozenset(
    (
        wire.META_CREATE,
        wire.META_OPEN,
        wire.META_SETATTR,
        wire.META_UNLINK,
        wire.META_RMDIR,
        wire.META_RENAME,
        wire.META_LINK,
        wire.META_SETXATTR,
        wire.META_REMOVEXATTR,
    )
)
"""Changes whose uid and gid are those of a process. Other changes are made for the session that has the file
open, whichever process that is."""
GUARDS: dict[int, tuple[Callable[[User, Any], None], Callable[[User, Any, Draft], None]]] = {
    wire.META_LOOKUP: (_guard_lookup, _note_lookup),
    wire.META_GETATTR: (_guard_getattr, _note_getattr),
    wire.META_READLINK: (_guard_inode, _nothing),
    wire.META_GETXATTR: (_guard_getxattr, _nothing),
    wire.META_LISTXATTR: (_guard_inode, _nothing),
    wire.META_LOCKS: (_guard_inode, _nothing),
    wire.META_CREATE: (_guard_create, _note_create),
    wire.META_OPEN: (_guard_open, _note_open),
    wire.META_REPORT: (_guard_report, _note_report),
    wire.META_RESERVE: (_guard_write, _nothing),
    wire.META_ALLOCATE: (_guard_allocate, _note_changed),
    wire.META_SETATTR: (_guard_setattr, _note_changed),
    wire.META_UNLINK: (_guard_removal, _nothing),
    wire.META_RMDIR: (_guard_removal, _nothing),
    wire.META_RENAME: (_guard_rename, _note_rename),
    wire.META_LINK: (_guard_link, _note_link),
    wire.META_SETXATTR: (_guard_change_of_xattr, _nothing),
    wire.META_REMOVEXATTR: (_guard_change_of_xattr, _nothing),
    wire.META_LOCK: (_guard_lock, _nothing),
}
