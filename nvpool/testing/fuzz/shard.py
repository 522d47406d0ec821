"""Fuzz target: a metadata shard in memory, on virtual time, with one caller that sends random requests.

At the end all records that the caller has no right to change are compared: names, attributes, extended
attributes, locks, volumes, and sessions of others with their slots and open files. Then fsck of the shard
must find nothing, and the shard is started again from its records. Each kind of caller has its own tree to
attack. Used by `runner`.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import stat
from sys import getsizeof
from typing import Any, NamedTuple

from google.protobuf.message import DecodeError

from nvpool.core import grants
from nvpool.core.errors import NvpoolError
from nvpool.core.ids import ROOT_INODE
from nvpool.core.names import SQUASH_ROOT
from nvpool.core.posix.acl import (
    ACCESS,
    DEFAULT,
    GROUP_OBJ,
    MASK,
    OTHER,
    USER,
    USER_OBJ,
    AclEntry,
    encode_acl,
)
from nvpool.core.posix.byte_range_locks import EXCLUSIVE, LAST_BYTE, RECORD, SHARED, WHOLE
from nvpool.kv.memory_engine import MemoryKv
from nvpool.meta.server.service import MetaOptions, MetaService
from nvpool.meta.service_auth import ServiceRight
from nvpool.meta.sessions.table import Session
from nvpool.meta.state import records, volume_records
from nvpool.rpc.access_control import Callers
from nvpool.rpc.peer_roles import Credentials, Peer
from nvpool.rpc.v1 import meta_pb2 as pb
from nvpool.rpc.v1 import wire_pb2 as wire
from nvpool.testing.fakes.meta_shard import DirectCall, ShardClient, StoreRecorder, small_map
from nvpool.testing.fuzz.connections import FuzzFailure, Witness
from nvpool.testing.fuzz.harness import FuzzTarget
from nvpool.testing.fuzz.messages import REQUESTS
from nvpool.testing.sim.virtual_time_loop import VirtualClock, VirtualLoop

SECRET = b"s" * 32
OPTIONS = MetaOptions(session_lease_s=600, linger_s=2, sessions_per_peer=200)
UID = 1000
SETTLES_S = 1.0
"""Time for background work that the last requests have started."""
RENEW_EVERY = 500
SESSION_BYTES_MAX = 1 << 20
"""Most memory that a session keeps between requests, open files left out: 64 slots with a reply or a refusal each, names, and
a margin."""
UNKNOWN_SESSION = 1 << 48 | 0x7FFF_FFFF

VICTIM = Peer("victim", "192.0.2.9:1", False, "client/victim.0a1b2c3d")
_CLIENT = "client/fuzz.0a1b2c3d"


class Kind(NamedTuple):
    peer: Peer
    protects: str
    """State that the caller must not change.

    "volumes": the content of those in which it has no right to write. "all": everything but its own
    directory. "sessions": those of others, in a shard without access control, where requests take the fast
    path. "": nothing.
    """


KINDS = {
    "client": Kind(Peer("fuzz", "192.0.2.1:1", False, _CLIENT), "volumes"),
    "open": Kind(Peer("fuzz", "192.0.2.1:1", False, _CLIENT), "sessions"),
    "bound": Kind(Peer("fuzz", "192.0.2.1:1", False, f"{_CLIENT}.u{UID}-{UID}"), "all"),
    "user": Kind(Peer("fuzz", "unix", True, "", Credentials(UID, frozenset((UID, 50)), 1)), "all"),
    "squash": Kind(Peer("fuzz", "192.0.2.1:1", False, f"{_CLIENT}.{SQUASH_ROOT}"), "all"),
    "node": Kind(Peer("fuzz", "192.0.2.1:1", False, "node/fuzz"), ""),
}
METHODS = [method for method in REQUESTS if 100 <= method < 200 and method != wire.META_VOLUMES]
CHANGING = [method for method in METHODS if "change" in REQUESTS[method].DESCRIPTOR.fields_by_name]
FAST_PATH_METHODS = (
    wire.META_CREATE,
    wire.META_UNLINK,
    wire.META_REPORT,
    wire.META_LOOKUP,
    wire.META_GETATTR,
)
NOT_BY_NODES = {wire.META_LOAD, wire.META_MOMENT, wire.META_HOLD, wire.META_SETTLE, wire.META_MOVE}
"""Requests of nodes that would succeed: empty the shard, block its changes, write any record."""


class ShardPlace(FuzzTarget):
    name = "shard"

    waits_s = 400.0
    unlike_others = frozenset((wire.META_LOCK_WAIT, wire.META_WATCH))

    def __init__(self, kind: str, seed: str, witness: Witness) -> None:
        super().__init__(kind, seed, witness)
        self._protects = KINDS[kind].protects
        self._sequences = [0] * 64
        self._session, self._secret = 0, b""
        self._inodes: list[int] = []
        self._grants: list[bytes] = [b"\0" * 60]
        self._tickets: list[int] = [1]
        self._cursors: list[bytes] = [b""]
        self._since = 0

    @staticmethod
    def loop() -> asyncio.AbstractEventLoop:
        return VirtualLoop()

    # -- the shard ---------------------------------------------------------------------------------------------------------

    async def begin(self, loop: VirtualLoop) -> None:
        self._clock = VirtualClock(loop, self._seed)
        self._kv = MemoryKv()
        self._store = StoreRecorder()
        self.service = await self._serve()
        self._peer = KINDS[self.kind].peer
        await self._plant()
        self._know()
        self.connect(self.service.handle, self._peer, self.service.dispatch.answer)
        self._protected = self._guarded()
        self._open_session()
        self._others = self._of_others()

    async def _serve(self) -> MetaService:
        service = MetaService(
            self._kv,
            grant_secret=SECRET,
            dialer=self._store,
            clock=self._clock,
            options=OPTIONS,
            callers=Callers(4711),
        )
        service.update_map(small_map())
        await service.start()
        return service

    async def _plant(self) -> None:
        """Make files of root and of a victim, volumes of each kind, and locks and open files of the victim."""
        root = self._root = await ShardClient(self.service).begin()
        victim = self._victim = await ShardClient(self.service, 0, 0, VICTIM).begin(watch=True)
        corpus = self._corpus
        send = ShardClient.send

        def recorded(self: ShardClient, method: str, request: Any, payload: bytes = b"") -> DirectCall:
            corpus.append((wire.Method.Value("META_" + method), request.SerializeToString()))
            return send(self, method, request, payload)

        root.send = recorded.__get__(root)
        self._exempt = {ROOT_INODE} if self._protects == "volumes" else set()
        self._directories = [ROOT_INODE]
        at = {}
        for name, mode in ((b"etc", 0o755), (b"secret", 0o700), (b"drop", 0o1777)):
            at[name] = (
                await root.create(ROOT_INODE, name, stat.S_IFDIR | mode, exclusive=True)
            ).entry.attr.inode
        home = await root.mkdir(ROOT_INODE, b"home")
        await root.setattr(home.inode, 6, uid=UID, gid=UID)
        at[b"home"] = home.inode
        self._entries = [(ROOT_INODE, name) for name in (*at, b"home", b"f", b"g", b"wide", b"volumes")]
        self._exempt.update((at[b"home"], at[b"drop"]))
        files = []
        for directory in (ROOT_INODE, at[b"etc"], at[b"secret"], at[b"drop"]):
            for name, mode in (
                (b"f", 0o644),
                (b"g", 0o600),
                (b"s", 0o4755),
                (b"w", 0o622 if directory != at[b"drop"] else 0o600),
            ):
                files.append((await root.file(directory, name, mode=stat.S_IFREG | mode)).inode)
                if mode == 0o622:
                    self._exempt.add(files[-1])  # everybody may write to it
        wide = (
            await root.create(ROOT_INODE, b"wide", stat.S_IFDIR | 0o755, exclusive=True, wide=True)
        ).entry.attr.inode
        files += [(await root.file(wide, b"n%d" % number)).inode for number in range(8)]
        link = (
            await root.create(at[b"etc"], b"link", stat.S_IFLNK | 0o777, target=b"/etc/f", exclusive=True)
        ).entry.attr.inode
        self._exempt.add(link)  # everybody may set the times of a symlink to now, as on Linux
        acl = encode_acl(
            (
                AclEntry(USER_OBJ, 6),
                AclEntry(USER, 4, UID),
                AclEntry(GROUP_OBJ, 4),
                AclEntry(MASK, 4),
                AclEntry(OTHER, 0),
            )
        )
        await root.ask(
            "SETXATTR", pb.SetXattrRequest(change=root.change(), inode=files[1], name=ACCESS, value=acl)
        )
        for name in (b"user.a", b"trusted.b"):
            await root.ask(
                "SETXATTR",
                pb.SetXattrRequest(change=root.change(), inode=files[0], name=name, value=b"v" * 40),
            )
        volumes = await root.mkdir(ROOT_INODE, b"volumes")
        self._volumes: dict[str, int] = {}
        member = self._peer.member
        for name, grants_of, sealed in (
            ("closed", {}, False),
            ("shown", {member: False}, False),
            ("mine", {member: True}, False),
            ("sealed", {}, True),
            ("limited", {member: False}, False),
        ):
            made = await root.create(
                volumes.inode,
                name.encode(),
                stat.S_IFDIR | 0o777,
                exclusive=True,
                volume=pb.VolumePolicy(bytes_max=1 << 30, files_max=50, trash_s=60),
            )
            number = self._volumes[name] = made.entry.attr.inode
            below = await root.mkdir(number, b"d")
            files += [(await root.file(number, one, mode=stat.S_IFREG | 0o666)).inode for one in (b"f", b"g")]
            files.append((await root.file(below.inode, b"f")).inode)
            await root.unlink(number, b"g")  # into the trash
            self._directories += [number, below.inode]
            self._entries += [(number, b"f"), (number, b"d"), (below.inode, b"f"), (number, b"n1")]
            request = pb.VolumeRequest(session=root.session, inode=number, action=pb.VolumeRequest.SEAL)
            if sealed and self._protects != "sessions":
                await root.ask("VOLUME", request)
            for client, write in ({VICTIM.member: True} | grants_of).items() if not sealed else ():
                if client and self._protects != "sessions":
                    request.action, request.listed = pb.VolumeRequest.GRANT, True
                    request.grant.client, request.grant.write = client, write
                    await root.ask("VOLUME", request)
        self._directories += [*at.values(), wide, volumes.inode]
        self._entries += [(directory, name) for directory in at.values() for name in (b"f", b"g", b"s", b"w")]
        self._planted = tuple(files)
        self._inodes = [*files, link]
        await victim.open(files[0], grants.READ | grants.WRITE)
        shown = (await victim.lookup(self._volumes["shown"], b"f")).attr.inode
        await victim.open(shown, grants.READ)
        await victim.lock(files[0], EXCLUSIVE, 0, 10, owner=7)
        await victim.lock(shown, SHARED, kind=WHOLE, owner=8)
        await victim.lock(files[2], SHARED, 5, 9, kind=RECORD, owner=9)

    # -- requests ----------------------------------------------------------------------------------------------------------

    def _know(self) -> None:
        chance, known = self._chance, self._known
        names = [
            b"f",
            b"g",
            b"s",
            b"w",
            b"d",
            b"etc",
            b"secret",
            b"home",
            b"drop",
            b"link",
            b"wide",
            b"volumes",
            b"lost+found",
            *(name.encode() for name in self._volumes),
            *(b"n%d" % number for number in range(12)),
        ]
        right = ServiceRight(self._clock, SECRET, 1)

        def inode() -> int:
            drawn = chance.random()
            pool = self._inodes if drawn < 0.6 else self._directories
            return (
                chance.choice(pool)
                if drawn < 0.93
                else chance.choice((0, ROOT_INODE, chance.getrandbits(64)))
            )

        def directory() -> int:
            return chance.choice(self._directories) if chance.random() < 0.9 else inode()

        def volume() -> int:
            return chance.choice(tuple(self._volumes.values())) if chance.random() < 0.8 else inode()

        def session() -> int:
            drawn = chance.random()
            return (
                self._session if drawn < 0.88 else self._victim.session if drawn < 0.96 else UNKNOWN_SESSION
            )

        def packed() -> bytes:
            return self._generator.packed(inode)

        def gid() -> int:
            return chance.choice((0, 0, UID, UID, 50, 65534, 0xFFFFFFFF))

        def small() -> int:
            return chance.choice((0, 1, 4096, 65536, 1 << 30, chance.randrange(1 << 20)))

        known.draw.update(
            inode=inode,
            parent=directory,
            new_parent=directory,
            directory=directory,
            session=session,
            name=lambda: chance.choice(names),
            new_name=lambda: chance.choice(names),
            names=lambda: chance.choice(names),
            inodes=packed,
            opened=packed,
            released=packed,
            gone=packed,
            held=packed,
            rights=lambda: chance.randrange(4),
            wanted=lambda: chance.randrange(4),
            uid=gid,
            gid=gid,
            mode=lambda: chance.choice(
                (
                    0o100644,
                    0o100666,
                    0o040755,
                    0o120777,
                    0o104755,
                    0o102755,
                    0o020666,
                    0o010644,
                    0o600,
                    0o7777,
                    0,
                    1,
                    2,
                )
            ),
            valid=lambda: chance.choice(
                (1, 2, 4, 6, 8, 16, 32, 64, 128, 192, 256, 512, 1024, 2048, 1 << 13, chance.getrandbits(12))
            ),
            change=lambda: None,
            secret=lambda: chance.choice((self._secret, self._victim.secret, b"")),
            authority=lambda: right() if self.kind == "node" or chance.random() < 0.05 else b"\0" * 60,
            grant=lambda: chance.choice(self._grants),
            grants=lambda: chance.choice(self._grants),
            tickets=lambda: self._generator.packed(lambda: chance.choice(self._tickets)),
            ticket=lambda: chance.choice(self._tickets),
            kind=lambda: chance.choice((1, 2)),
            owner=lambda: chance.choice((1, 2, 7, 8)),
            start=small,
            end=small,
            offset=small,
            size=small,
            length=small,
            own=small,
            cursor=lambda: chance.choice(self._cursors),
            limit=lambda: chance.choice((0, 1, 10, 1000, 1 << 31)),
            shard=lambda: 1,
            id=lambda: chance.randrange(3),
            term=lambda: chance.randrange(2),
            flags=lambda: chance.randrange(8),
            map_epoch=lambda: chance.choice((0, 1, 2)),
            deferred=lambda: True,
            wait=lambda: chance.random() < 0.3,
            spread=lambda: chance.random() < 0.05,
            truncate=lambda: chance.random() < 0.1,
            unnamed=lambda: chance.random() < 0.1,
            repair=lambda: chance.random() < 0.5,
            leaves=lambda: chance.random() < 0.2,
            value=lambda: chance.choice((b"v", b"v" * 300, acl_of(chance))),
            slots=lambda: chance.randrange(70),
            cut=lambda: chance.randrange(3),
            client=lambda: chance.choice((self._peer.member, VICTIM.member, "x")),
            volume=lambda: None,
            holder=lambda: chance.choice(("fuzz", "gpu-1", "x" * 300)),
            needed=small,
            bytes=small,
        )
        self._volume_of = volume

    def _open_session(self) -> None:
        reply = None
        call = DirectCall(
            wire.META_OPEN_SESSION,
            pb.OpenSessionRequest(client="fuzz", watch=True).SerializeToString(),
            peer=self._peer,
        )
        self.service.handle(call)
        if isinstance(call.answer, tuple):
            reply = pb.OpenSessionReply.FromString(call.answer[0])
        elif isinstance(call.answer, NvpoolError):  # the peer has as many sessions as it may have
            self._end_sessions()
            return self._open_session()
        if reply is None:
            raise FuzzFailure(f"no session is opened: {call.answer!r}")
        self._session, self._secret = reply.session, reply.secret
        self._sequences = [0] * 64
        return None

    def _end_sessions(self) -> None:
        owner = self.service.parts.callers.of(self._peer).owner
        for session in [one for one in self.service.parts.sessions.by_number.values() if one.owner == owner]:
            request = pb.CloseSessionRequest(session=session.number).SerializeToString()
            self.service.handle(DirectCall(wire.META_CLOSE_SESSION, request, peer=self._peer))

    def request(self, only: int | None) -> tuple[int, bytes, bytes]:
        chance = self._chance
        payload = chance.randbytes(chance.choice((1, 100, 4096))) if chance.random() < 0.03 else b""
        if only is None and chance.random() < 0.1:
            method, raw = chance.choice(self._corpus[1:])
            message = REQUESTS[method].FromString(raw)
            if chance.random() < 0.3:
                return method, raw, payload
        else:
            method = only or (chance.choice(CHANGING) if chance.random() < 0.4 else chance.choice(METHODS))
            if only is None and self._protects == "sessions" and chance.random() < 0.5:
                method = chance.choice(FAST_PATH_METHODS)
            if only is None and chance.random() < 0.003:
                method = wire.META_VOLUMES  # reads all partitions
            message = self._generator.fill(REQUESTS[method]())
        if chance.random() < 0.8:
            self._make_sense(method, message)
        if method in CHANGING:
            self._name(message.change)
        elif (
            chance.random() < 0.9
            and "session" in message.DESCRIPTOR.fields_by_name
            and isinstance(message.session, int)
        ):
            message.session = self._session
        if method in (wire.META_VOLUME, wire.META_VOLUME_ROOM, wire.META_TRASH):
            message.inode = self._volume_of()
        return method, message.SerializeToString(), payload

    def _make_sense(self, method: int, message: Any) -> None:
        """Make the fields consistent, so that the request is not refused as invalid."""
        chance = self._chance
        if method in (wire.META_GETXATTR, wire.META_SETXATTR, wire.META_REMOVEXATTR):
            message.name = chance.choice((b"user.a", b"user.b", b"trusted.b", b"security.c", ACCESS, DEFAULT))
            if message.name in (ACCESS, DEFAULT) and method == wire.META_SETXATTR:
                message.value = acl_of(chance)
        elif method == wire.META_LOCK:
            message.mode, message.start = chance.randrange(3), chance.randrange(20)
            message.end = chance.choice((LAST_BYTE, message.start + chance.randrange(20)))
            if message.kind == WHOLE:
                message.start, message.end = 0, LAST_BYTE
            message.ClearField("ticket")
        elif method == wire.META_RELEASE:
            message.gone = b""
        elif hasattr(message, "name") and hasattr(message, "parent"):
            message.parent, message.name = chance.choice(self._entries)
            if hasattr(message, "spread"):
                message.spread = False
            if method in (wire.META_CREATE, wire.META_LINK) and chance.random() < 0.7:
                message.name = b"n%d" % chance.randrange(500)
            if method == wire.META_CREATE:
                message.mode = chance.choice(
                    (0o100644, 0o100600, 0o104755, 0o102755, 0o040755, 0o042777, 0o120777, 0o010644, 0o140600)
                )
                message.wide, message.unnamed = chance.random() < 0.05, False
                message.target = b"/etc/f" if stat.S_ISLNK(message.mode) else b""
                if chance.random() < 0.95:
                    message.ClearField("volume")
            elif method == wire.META_RENAME:
                message.flags = chance.choice((0, 0, 0, 1, 2))
                if chance.random() < 0.5:
                    message.new_name = b"n%d" % chance.randrange(500)

    def _name(self, change: pb.Change) -> None:
        """Fill in the change: mostly as a client does, with its session and the next sequence of a slot."""
        chance, sequences = self._chance, self._sequences
        change.session = self._session if chance.random() < 0.92 else self.known_session()
        change.map_epoch, change.uid, change.gid = (
            chance.choice((0, 1)),
            chance.choice((0, 0, UID, 65534)),
            chance.choice((0, UID, 50)),
        )
        drawn = chance.random()
        slot = change.slot = chance.randrange(60)
        if drawn < 0.94:
            sequences[slot] += 1
            change.sequence = sequences[slot]
        elif drawn < 0.97:
            change.sequence = sequences[slot]
        elif drawn < 0.985:
            change.sequence = chance.choice((0, max(0, sequences[slot] - 1)))
        else:  # these slots cannot be used afterwards
            change.slot, change.sequence = (
                chance.choice((60, 61, 62, 63, 64, (1 << 32) - 1)),
                chance.choice((1, 1 << 63, (1 << 64) - 1)),
            )

    def known_session(self) -> int:
        return self._chance.choice(
            (self._victim.session, self._root.session, UNKNOWN_SESSION, 0, (1 << 64) - 1)
        )

    def may(self, method: int, message: bytes) -> bool:
        return self.kind != "node" or method not in NOT_BY_NODES

    async def pause(self) -> None:
        self._since += 1
        if self._since % RENEW_EVERY == 0:
            await self._renew()
        if self._chance.random() < 0.99:
            await self.iteration()
        else:
            await asyncio.sleep(self._chance.random() * 2)
        if self._session not in self.service.parts.sessions.by_number:
            self._open_session()

    async def _renew(self) -> None:
        await self._renew_others()
        if chance_of_new := self._chance.random() < 0.2:
            self._end_sessions()
        if chance_of_new or self._session not in self.service.parts.sessions.by_number:
            self._open_session()

    async def wait_a_little(self, waited_s: float) -> float:
        await asyncio.sleep(1)
        if not (waited_s + 1) % 100:
            await self._renew_others()
        return 1.0

    async def _renew_others(self) -> None:
        for one in (self._victim, self._root):
            with contextlib.suppress(() if self._protects else (NvpoolError,)):  # a node may end all sessions
                await one.ask("RENEW_SESSION", pb.RenewSessionRequest(session=one.session))

    # -- replies -----------------------------------------------------------------------------------------------------------

    def learn(self, method: int, asked: bytes, message: bytes) -> None:
        if (
            method in (wire.META_CREATE, wire.META_OPEN, wire.META_LOOKUP, wire.META_LOCK)
            and len(message) < 2000
        ):
            try:
                self._learn_from(method, asked, message)
            except DecodeError as error:
                raise FuzzFailure(f"the answer to method {method} cannot be read: {message.hex()}") from error

    def _learn_from(self, method: int, note: bytes, message: bytes) -> None:
        if method == wire.META_LOCK:
            ticket = pb.LockReply.FromString(message).ticket
            if ticket:
                self._tickets[1:] = [*self._tickets[-7:], ticket]
            return
        if method == wire.META_CREATE:
            asked = pb.CreateRequest.FromString(note)
            self._entries.append((asked.parent, asked.name))
            if len(self._entries) > 150:
                del self._entries[60]
        entry = (
            pb.CreateReply.FromString(message).entry
            if method == wire.META_CREATE
            else pb.Entry.FromString(message)
        )
        if entry.grant:
            self._grants = [*self._grants[-15:], entry.grant]
        if entry.attr.inode and method == wire.META_CREATE:
            kept = self._directories if stat.S_ISDIR(entry.attr.mode) else self._inodes
            kept.append(entry.attr.inode)
            if len(kept) > 80:
                del kept[40]

    # -- records that must not change --------------------------------------------------------------------------------------

    def _all(self) -> dict[bytes, bytes]:
        return dict(self._kv.scan(b"", b"\xff" * 12, 10_000_000))

    def _guarded(self) -> dict[bytes, bytes]:
        """Return the records that the caller has no right to change."""
        if not self._protects:
            return {}
        everything = self._all()
        inodes: dict[int, records.Inode] = {}
        for key, raw in everything.items():
            if records.kind_of(key) == records.INODE:
                number = records.inode_of_key(key)
                inodes[number] = records.decode_inode(number, raw)
        shut = ("closed", "shown", "sealed", "limited") if self._protects == "volumes" else ()
        locked_up = {self._volumes[name] for name in shut}
        self._guarded_inodes = {
            number
            for number, inode in inodes.items()
            if (
                inode.volume in locked_up or number in locked_up
                if self._protects != "all"
                else number not in self._exempt and self._volumes["mine"] not in (number, inode.volume)
            )
        }
        self._in_sealed = {
            number for number, inode in inodes.items() if inode.volume == self._volumes["sealed"]
        }
        return {key: raw for key, raw in everything.items() if self._is_guarded(key)}

    def _is_guarded(self, key: bytes) -> bool:
        kind = records.kind_of(key)
        if kind == records.DENTRY:
            return records.directory_of_key(key) in self._guarded_inodes
        if kind in (records.INODE, records.XATTR, records.ORPHAN, records.COLLECT, records.INTENT):
            return records.inode_of_key(key) in self._guarded_inodes
        if kind == records.OTHER:
            number = volume_records.volume_of_key(key)
            kinds = (volume_records.USE, volume_records.TRASH, volume_records.VOLUME)
            return (
                number in self._guarded_inodes
                and volume_records.kind_of_volume_key(key)
                in kinds[: 2 if number == self._volumes["sealed"] else 3]
            )
        if kind == records.LOCK:
            return records.lock_of_key(key)[1] == self._victim.session
        return False

    def _of_others(self) -> Any:
        """Return the victim's session: its open files, slots with replies, and locks."""
        session = self.service.parts.sessions.by_number.get(self._victim.session)
        if session is None:
            return None
        slots = [(slot.sequence, slot.answer, slot.mark) for slot in session.slots if slot is not None]
        locks = sorted(
            (one.owner, one.span.start, one.span.end, one.span.mode)
            for inode in self._planted
            for one in self.service.parts.view.locks.locks_on(inode)
            if one.owner.session == session.number and not one.waits
        )
        return session.secret, session.owner, dict(session.opens), slots, session.identity, locks

    def check(self) -> None:
        super().check()
        if self.service.died.done():
            raise FuzzFailure(f"the service has died: {self.service.died.exception()!r}")
        for session in self.service.parts.sessions.by_number.values():
            if (kept := retained_bytes(session)) > SESSION_BYTES_MAX:
                raise FuzzFailure(
                    f"session {session.number:#x} retains {kept:,} bytes beside its open files; {SESSION_BYTES_MAX:,} at "
                    f"most are allowed"
                )
        if not self._protects:
            return
        self._let_removed_go()
        now = {key: raw for key, raw in self._all().items() if self._is_guarded(key)}
        if now != self._protected:
            changed = [
                key for key in now.keys() | self._protected.keys() if now.get(key) != self._protected.get(key)
            ]
            changes = "\n".join(
                f"{key.hex()} (kind {records.kind_of(key)}): {_hex(self._protected.get(key))} -> {_hex(now.get(key))}"
                for key in sorted(changed)[:10]
            )
            raise FuzzFailure(
                f"{self.kind} has changed {len(changed)} records without a right to:\n{changes}"
            )
        if self._of_others() != self._others:
            raise FuzzFailure(f"the session of another was changed: {self._others} -> {self._of_others()}")

    def _let_removed_go(self) -> None:
        """Do not protect a volume that the caller has removed.

        Writers of a volume may remove it, sealed or not, and set its limits.
        """
        sealed = self._volumes["sealed"]
        raw = self._kv.get(volume_records.volume_key(volume_records.VOLUME, sealed))
        if sealed in self._guarded_inodes and (
            raw is None or volume_records.decode_volume(raw).flags & volume_records.REMOVING
        ):
            self._guarded_inodes -= {sealed, *self._in_sealed}
            self._protected = {key: raw for key, raw in self._protected.items() if self._is_guarded(key)}

    async def end(self) -> None:
        """Check everything and stop the shard."""
        await self.answer_all()
        self.check()
        self._wire.hang_up()
        await asyncio.sleep(SETTLES_S)
        if self._protects:
            problems = await self._root.fsck()
            if problems:
                raise FuzzFailure(f"fsck finds: {[str(one) for one in problems[:5]]}")
        await self.service.close()
        if self._protects:
            again = await self._serve()
            await again.close()
        self._witness.check()
        left = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
        if left:
            raise FuzzFailure(f"tasks are left: {left[:3]}")


def retained_bytes(session: Session) -> int:
    """Bytes that a session keeps between requests. Its open files are left out: they have a limit of their own."""
    texts = (session.client, session.secret, session.member, session.peer, session.owner)
    slots = [slot for slot in session.slots if slot is not None]
    return (
        sum(map(getsizeof, texts))
        + sum([getsizeof(slot.answer) for slot in slots])
        + sum([getsizeof(str(slot.error)) for slot in slots if slot.error is not None])
    )


def acl_of(chance: random.Random) -> bytes:
    raw = encode_acl(
        (
            AclEntry(USER_OBJ, 6),
            AclEntry(USER, chance.randrange(8), UID),
            AclEntry(GROUP_OBJ, 4),
            AclEntry(MASK, 6),
            AclEntry(OTHER, 0),
        )
    )
    return raw if chance.random() < 0.7 else raw[: chance.randrange(len(raw))]


def _hex(raw: bytes | None) -> str:
    return "nothing" if raw is None else raw.hex()
