"""Access control of the wire protocol: one table of required rights, and the check in each service.

The table gives for each method the least right that its caller must have. `checks` describes in words what
the service checks in addition (a grant, the owner of a session, the right to a volume). A method without an
entry is refused to all callers except nodes, and a test fails for it. A client that is bound to one user, or
whose root is squashed, may send to a metadata service what a local user may. The metadata service, the
members of a shard, the chunk store and the supervisor use this module in their `handle`.
"""

from __future__ import annotations

import enum
from typing import NamedTuple

from nvpool.core.errors import AccessDenied, InvalidRequest
from nvpool.rpc.api import MESSAGE_BYTES_MAX, Call
from nvpool.rpc.peer_limits import identify
from nvpool.rpc.peer_roles import Credentials, Peer, Role, acts_as, role_of
from nvpool.rpc.v1 import wire_pb2 as wire


class LeastRight(enum.Enum):
    """Least right of a caller."""

    UNAUTHENTICATED = "every peer that can connect"
    USER = "each local user, client and node of the pool"
    VOLUME = "local users, clients and nodes with a right to the volume that the request is about"
    MEMBER = "each client and node of the pool"
    VOLUME_OF_CLIENT = "clients with a right to the volume that the request is about, and nodes"
    NODE = "nodes of the pool"
    OPERATOR = "operators, by the unix socket of a node"


class Right(NamedTuple):
    least: LeastRight
    checks: str
    """Checks that the service makes in addition."""


_SESSION = "the session is the caller's own"
_CHANGE = f"{_SESSION}; it may change what is in the volume; a repetition is of the same request"
_SEE = f"{_SESSION}; it may see what is in the volume"
_SIGNED = "the message bears the right of a service, signed with the key of the pool"
_NOTHING = "nothing more"

RIGHTS: dict[int, Right] = {
    wire.DATA_READ: Right(LeastRight.VOLUME, "a grant to read each inode"),
    wire.DATA_WRITE: Right(LeastRight.VOLUME, "a grant to write each inode, of the session in the request"),
    wire.DATA_FLUSH: Right(LeastRight.USER, _NOTHING),
    wire.DATA_CUT: Right(LeastRight.NODE, _SIGNED),
    wire.DATA_REMOVE: Right(LeastRight.NODE, _SIGNED),
    wire.DATA_DESCRIBE: Right(LeastRight.VOLUME_OF_CLIENT, "a grant of the inode, but of nodes"),
    wire.DATA_LIST: Right(LeastRight.NODE, _NOTHING),
    wire.DATA_SCRUB: Right(LeastRight.NODE, _NOTHING),
    wire.DATA_STATUS: Right(LeastRight.USER, "all but nodes learn the room alone"),
    wire.DATA_LOCATE: Right(
        LeastRight.VOLUME, "the token of the descriptors that were handed over; a grant to read each inode"
    ),
    wire.DATA_EXTENTS: Right(LeastRight.VOLUME, "a grant of the inode"),
    wire.DATA_COPY: Right(LeastRight.VOLUME, "a grant to read the one inode and to write the other"),
    wire.DATA_PEER_WRITE: Right(LeastRight.NODE, _SIGNED),
    wire.DATA_VERSIONS: Right(LeastRight.NODE, _SIGNED),
    wire.DATA_FETCH: Right(LeastRight.NODE, _SIGNED),
    wire.DATA_SCRUB_ORDER: Right(LeastRight.NODE, _SIGNED),
    wire.DATA_PULL: Right(LeastRight.NODE, _SIGNED),
    wire.DATA_USE: Right(LeastRight.NODE, _NOTHING),
    wire.META_OPEN_SESSION: Right(
        LeastRight.USER, "of an earlier session: its secret, and that it is the caller's own"
    ),
    wire.META_RENEW_SESSION: Right(LeastRight.USER, _SESSION),
    wire.META_CLOSE_SESSION: Right(LeastRight.USER, _SESSION),
    wire.META_LOOKUP: Right(LeastRight.VOLUME, _SEE),
    wire.META_GETATTR: Right(LeastRight.VOLUME, _SEE),
    wire.META_SETATTR: Right(LeastRight.VOLUME, _CHANGE),
    wire.META_READLINK: Right(LeastRight.VOLUME, _SEE),
    wire.META_CREATE: Right(LeastRight.VOLUME, _CHANGE),
    wire.META_UNLINK: Right(LeastRight.VOLUME, _CHANGE),
    wire.META_RMDIR: Right(LeastRight.VOLUME, _CHANGE),
    wire.META_RENAME: Right(LeastRight.VOLUME, _CHANGE),
    wire.META_LINK: Right(LeastRight.VOLUME, _CHANGE),
    wire.META_OPEN: Right(LeastRight.VOLUME, f"{_SEE}, and change it where it opens to write"),
    wire.META_RELEASE: Right(LeastRight.USER, _SESSION),
    wire.META_REPORT: Right(LeastRight.VOLUME, _CHANGE),
    wire.META_RESERVE: Right(LeastRight.VOLUME, _CHANGE),
    wire.META_LIST: Right(LeastRight.VOLUME, _SEE),
    wire.META_STATFS: Right(LeastRight.USER, _SESSION),
    wire.META_GETXATTR: Right(LeastRight.VOLUME, _SEE),
    wire.META_SETXATTR: Right(LeastRight.VOLUME, _CHANGE),
    wire.META_LISTXATTR: Right(LeastRight.VOLUME, _SEE),
    wire.META_REMOVEXATTR: Right(LeastRight.VOLUME, _CHANGE),
    wire.META_SYNC: Right(LeastRight.USER, f"{_SESSION}; nodes need none"),
    wire.META_LOCK: Right(LeastRight.VOLUME, _SEE),
    wire.META_LOCK_WAIT: Right(LeastRight.USER, _SESSION),
    wire.META_LOCKS: Right(LeastRight.VOLUME, _SEE),
    wire.META_ALLOCATE: Right(LeastRight.VOLUME, _CHANGE),
    wire.META_WATCH: Right(LeastRight.USER, _SESSION),
    wire.META_LOOKUP_MANY: Right(LeastRight.VOLUME, _SEE),
    wire.META_GETATTR_MANY: Right(LeastRight.VOLUME, _SEE),
    wire.META_DUMP: Right(LeastRight.NODE, _NOTHING),
    wire.META_LOAD: Right(LeastRight.NODE, "the shard has no files"),
    wire.META_FSCK: Right(LeastRight.NODE, _NOTHING),
    wire.META_STATUS: Right(LeastRight.MEMBER, _NOTHING),
    wire.META_COLLECT: Right(LeastRight.NODE, _NOTHING),
    wire.META_NAMES: Right(
        LeastRight.VOLUME_OF_CLIENT, "names in volumes that the caller may not see are left out"
    ),
    wire.META_FSCK_SUMS: Right(LeastRight.NODE, _NOTHING),
    wire.META_FSCK_CLIMB: Right(LeastRight.NODE, _NOTHING),
    wire.META_PARTS: Right(LeastRight.MEMBER, _SESSION),
    wire.META_MOMENT: Right(
        LeastRight.NODE, "the number of the moment is not 0; changes go on by themselves after a while"
    ),
    wire.META_SESSIONS: Right(LeastRight.NODE, _NOTHING),
    wire.META_SHIP: Right(LeastRight.NODE, _SIGNED),
    wire.META_FOLLOW: Right(LeastRight.NODE, _SIGNED),
    wire.META_ALIVE: Right(LeastRight.NODE, _SIGNED),
    wire.META_STANDBY: Right(LeastRight.NODE, _SIGNED),
    wire.META_TAKE_RIGHT: Right(LeastRight.NODE, _SIGNED),
    wire.META_HOLD: Right(LeastRight.NODE, _SIGNED),
    wire.META_SETTLE: Right(LeastRight.NODE, _SIGNED),
    wire.META_OUTCOME: Right(LeastRight.NODE, _SIGNED),
    wire.META_MOVE: Right(LeastRight.NODE, _SIGNED),
    wire.META_MOVED: Right(LeastRight.NODE, _SIGNED),
    wire.META_VOLUMES: Right(
        LeastRight.MEMBER,
        f"{_SESSION}; a client gets the volumes to which it has a right, and its own rights alone",
    ),
    wire.META_VOLUME: Right(
        LeastRight.USER,
        f"{_SESSION}; the action: clients with the right to write, rights by nodes, a local user only looks; "
        "a caller without a right sees nothing of it",
    ),
    wire.META_VOLUME_ROOM: Right(LeastRight.VOLUME, _CHANGE),
    wire.META_TRASH: Right(LeastRight.VOLUME_OF_CLIENT, f"{_SEE}, and write in it to change the trash"),
    wire.POOL_MAP: Right(LeastRight.USER, _NOTHING),
    wire.POOL_STATUS: Right(LeastRight.MEMBER, _NOTHING),
    wire.POOL_CHANGE: Right(LeastRight.OPERATOR, "the arguments of the verb"),
    wire.POOL_STOP: Right(LeastRight.OPERATOR, _NOTHING),
    wire.POOL_ALIVE: Right(LeastRight.NODE, "the caller is the node that it speaks of"),
    wire.POOL_AUTHORITY: Right(LeastRight.UNAUTHENTICATED, _NOTHING),
    wire.POOL_JOIN: Right(LeastRight.UNAUTHENTICATED, "a token that was not used yet"),
    wire.POOL_RENEW: Right(LeastRight.MEMBER, "the caller shows the certificate that is renewed"),
    wire.POOL_KEYS: Right(LeastRight.NODE, f"{_SIGNED}; the node keeps the pool map"),
    wire.PROCESS_METRICS: Right(LeastRight.MEMBER, _NOTHING),
}
_LEAST = {
    LeastRight.UNAUTHENTICATED: Role.UNAUTHENTICATED,
    LeastRight.USER: Role.USER,
    LeastRight.VOLUME: Role.USER,
    LeastRight.MEMBER: Role.CLIENT,
    LeastRight.VOLUME_OF_CLIENT: Role.CLIENT,
    LeastRight.NODE: Role.NODE,
    LeastRight.OPERATOR: Role.NODE,
}
_PEERS_KEPT = 4096
"""Connections whose callers are cached. A full cache is cleared, and all callers are determined again."""


def _refused(role: Role, local: bool) -> frozenset[int]:
    """Methods of this version that are refused to such callers.

    Unknown methods are left to the service, which rejects them.
    """
    refused = set()
    for method in wire.Method.values():
        right = RIGHTS.get(method)
        least = Role.NODE if right is None else _LEAST[right.least]
        if role < least or (right is not None and right.least is LeastRight.OPERATOR and not local):
            refused.add(method)
    return frozenset(refused)


_REFUSED = {(role, local): _refused(role, local) for role in Role for local in (False, True)}
_REFUSED_METADATA = frozenset(
    method for method in _REFUSED[Role.USER, False] if wire.Method.Name(method).startswith("META_")
)
"""Metadata methods refused to local users and to clients with restricted users."""


class CallerRights(NamedTuple):
    """Authorization of a peer: its role, and the owner name for what the peer opens."""

    role: Role
    owner: str
    """Member name of a client, or uid of a local user. Empty for nodes, which may act for all."""
    refused: frozenset[int]
    """Methods that the caller may not call."""
    user: Credentials | None = None
    """The only user and groups as which the caller may act, whatever user the request names.

    ANY_USER_BUT_ROOT: any user except root. None: the caller is trusted to name the user.
    """
    account: str = ""
    """Name that the limits count the caller for (rpc/peer_limits.identify). Empty for nodes, which have no share."""


CLIENT_MESSAGE_BYTES_MAX = 136 << 10
"""Longest message that a client may send, payload not counted: a longer one takes the event loop more than half a
millisecond to decode. It has room for an extended attribute, and for two lists of the most inodes or tickets
(meta/sessions)."""
_MESSAGE_BYTES_MAX: dict[int, int] = {
    wire.META_OPEN_SESSION: MESSAGE_BYTES_MAX,  # the open files of a session that is resumed, in one list
    wire.META_LOOKUP_MANY: 384 << 10,
    wire.DATA_LOCATE: 512 << 10,
}
"""Methods with another limit than CLIENT_MESSAGE_BYTES_MAX."""


class Callers:
    """Callers of one service. Each connection is examined once: it has one `Peer` for its lifetime."""

    def __init__(self, operators: int | None = None, *, admit_unauthenticated: bool = False) -> None:
        """`operators`: id of the operator group.

        `admit_unauthenticated`: peers without a certificate are accepted, with `Role.UNAUTHENTICATED`.
        """
        self.operators = operators
        self._admit_unauthenticated = admit_unauthenticated
        self._known: dict[int, tuple[Peer, CallerRights]] = {}

    def of(self, peer: Peer) -> CallerRights:
        known = self._known.get(id(peer))
        if known is not None and known[0] is peer:
            return known[1]
        if len(self._known) >= _PEERS_KEPT:
            self._known.clear()
        caller = self._look_at(peer)
        self._known[id(peer)] = peer, caller
        return caller

    def owner_of(self, call: Call) -> str:
        """Owner name whose sessions the caller may use; "" for a node, which may use all sessions."""
        return self.of(call.peer).owner

    def user_of(self, call: Call) -> Credentials | None:
        """User as which the caller must act; see CallerRights.user."""
        return self.of(call.peer).user

    def account_of(self, call: Call) -> str:
        """Peer whose steps take turns with those of other peers; "" for a node, which is trusted."""
        return self.of(call.peer).account

    def _look_at(self, peer: Peer) -> CallerRights:
        if self._admit_unauthenticated and not peer.member:
            refused = _REFUSED[Role.UNAUTHENTICATED, peer.local]
            return CallerRights(Role.UNAUTHENTICATED, "", refused, account=identify(peer)[0])
        role, user = role_of(peer, self.operators), acts_as(peer, self.operators)
        owner = "" if role == Role.NODE else peer.member
        if role != Role.NODE and not owner:
            assert peer.credentials is not None  # a peer with neither member nor credentials is a node
            owner = f"uid/{peer.credentials.uid}"
        refused = _REFUSED[role, peer.local]
        if user is not None:
            refused |= _REFUSED_METADATA
        account = "" if role == Role.NODE else identify(peer, self.operators)[0]
        return CallerRights(role, owner, refused, user, account)

    def check(self, call: Call) -> CallerRights:
        """Return the caller of a request.

        AccessDenied: this caller may not call the method. InvalidRequest: the message is longer than a client may
        send.
        """
        peer = call.peer
        known = self._known.get(id(peer))
        caller = known[1] if known is not None and known[0] is peer else self.of(peer)
        if call.method in caller.refused:
            raise AccessDenied(_refusal(call.method, caller, peer))
        if len(call.message) > CLIENT_MESSAGE_BYTES_MAX and caller.account:
            longest = _MESSAGE_BYTES_MAX.get(call.method, CLIENT_MESSAGE_BYTES_MAX)
            if len(call.message) > longest:
                raise InvalidRequest(
                    f"a client's message of method {call.method} has at most {longest} bytes, and this one has "
                    f"{len(call.message)}; send several shorter ones"
                )
        return caller


def _refusal(method: int, caller: CallerRights, peer: Peer) -> str:
    if caller.role == Role.UNAUTHENTICATED:
        return "a peer without a certificate may only ask how to join; show a certificate of this pool"
    name = wire.Method.Name(method)
    if caller.role == Role.USER and caller.user is not None:
        return (
            f"user {caller.user.uid} has not the rights of a node, which {name} needs; ask root, or a member of the "
            "operator group (access.operators)"
        )
    right = RIGHTS.get(method)
    if right is not None and right.least is LeastRight.OPERATOR:
        return "a pool is changed through the unix socket of its node only, by who runs it; do it there"
    return f"{caller.owner or peer.name} may not ask for {name}, which is for nodes of the pool: run the command on a node"
