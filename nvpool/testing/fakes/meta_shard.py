"""One metadata shard without a transport: requests go directly into `handle`. For tests and benchmarks of the
service.

`ShardClient` is one session with its slots; its methods build the message, keep the sequence and return the
decoded reply or raise its error. `StoreRecorder` stands for all targets and records their requests.
"""

from __future__ import annotations

import asyncio
import stat
from functools import cache
from typing import Any

from nvpool.core.errors import NvpoolError, Unreachable
from nvpool.core.posix.byte_range_locks import LAST_BYTE, RECORD
from nvpool.meta.server.service import MetaService
from nvpool.poolmap.chains.placement import build_table
from nvpool.poolmap.model import MAP_FORMAT, Drive, Node, PartitionRange, PoolMap, PoolSettings, Shard, Target
from nvpool.rpc.api import Reply
from nvpool.rpc.peer_roles import Peer
from nvpool.rpc.v1 import data_pb2, wire_pb2
from nvpool.rpc.v1 import meta_pb2 as pb
from nvpool.rpc.v1.wire_pb2 import Method

PEER = Peer("test", "inproc", True)


class DirectCall:
    """A Call whose answer is a future; `answer` is already set if the service replies before it returns."""

    def __init__(
        self, method: int, message: bytes, payload: bytes = b"", deadline_s: float = 1e9, peer: Peer = PEER
    ) -> None:
        self.method = method
        self.message = message
        self.payload = memoryview(payload)
        self.since_s = 0.0  # adds nothing to measured waiting times
        self.deadline_s = deadline_s
        self.peer = peer
        self.cancelled = False
        self.answer: tuple[bytes, bytes] | BaseException | None = None
        self._waiter: asyncio.Future | None = None

    def room(self, byte_count: int) -> None:
        return None

    def reply(self, message=b"", payload=()) -> None:
        self._end((bytes(message), b"".join(payload)))

    def fail(self, error: BaseException) -> None:
        self._end(error)

    def on_cancel(self, callback) -> None:
        pass

    def _end(self, answer) -> None:
        assert self.answer is None, "a call was answered twice"
        self.answer = answer
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def wait(self) -> tuple[bytes, bytes]:
        if self.answer is None:
            self._waiter = asyncio.get_running_loop().create_future()
            await asyncio.wait_for(self._waiter, 20)
        if isinstance(self.answer, BaseException):
            raise self.answer
        return self.answer


class ShardClient:
    """A client with one session. Every method may raise the error of the reply."""

    ANSWERS = {
        "ALLOCATE": pb.Entry,
        "SETATTR": pb.Entry,
        "LOOKUP": pb.Entry,
        "GETATTR": pb.Entry,
        "OPEN": pb.Entry,
        "CREATE": pb.CreateReply,
        "VOLUME": pb.VolumeReply,
        "VOLUMES": pb.VolumesReply,
        "VOLUME_ROOM": pb.VolumeRoomReply,
        "TRASH": pb.TrashReply,
        "UNLINK": pb.UnlinkReply,
        "RMDIR": pb.UnlinkReply,
        "RENAME": pb.RenameReply,
        "LINK": pb.AttrReply,
        "REPORT": pb.AttrReply,
        "RESERVE": pb.ReserveReply,
        "SETXATTR": pb.AttrReply,
        "REMOVEXATTR": pb.AttrReply,
        "LIST": pb.ListDirReply,
        "STATFS": pb.StatFsReply,
        "GETXATTR": pb.GetXattrReply,
        "LISTXATTR": pb.ListXattrReply,
        "READLINK": pb.ReadLinkReply,
        "OPEN_SESSION": pb.OpenSessionReply,
        "RENEW_SESSION": pb.RenewSessionReply,
        "CLOSE_SESSION": pb.CloseSessionReply,
        "SYNC": pb.SyncReply,
        "RELEASE": pb.ReleaseReply,
        "STATUS": pb.MetaStatusReply,
        "COLLECT": pb.CollectReply,
        "FSCK": pb.FsckReply,
        "DUMP": pb.DumpReply,
        "LOAD": pb.LoadReply,
        "NAMES": pb.NamesReply,
        "LOCK": pb.LockReply,
        "LOCK_WAIT": pb.LockWaitReply,
        "LOCKS": pb.LocksReply,
        "WATCH": pb.WatchReply,
        "LOOKUP_MANY": pb.LookupManyReply,
    }

    def __init__(self, service: MetaService, uid: int = 0, gid: int = 0, peer: Peer = PEER) -> None:
        self.service, self.peer = service, peer
        self.uid, self.gid = uid, gid
        self.session = 0
        self.secret = b""
        self.sequences = [0] * 64
        self.last: DirectCall | None = None

    async def begin(self, watch: bool = False) -> ShardClient:
        reply = await self.ask(
            "OPEN_SESSION",
            pb.OpenSessionRequest(client="test", session=self.session, secret=self.secret, watch=watch),
        )
        self.session, self.secret = reply.session, reply.secret
        return self

    def send(self, method: str, request: Any, payload: bytes = b"") -> DirectCall:
        call = self.last = DirectCall(
            Method.Value("META_" + method), request.SerializeToString(), payload, peer=self.peer
        )
        self.service.handle(call)
        return call

    async def ask(self, method: str, request: Any, payload: bytes = b"") -> Any:
        message, self.payload = await self.send(method, request, payload).wait()
        return self.ANSWERS[method].FromString(message)

    def change(self, slot: int = 0) -> pb.Change:
        self.sequences[slot] += 1
        return pb.Change(
            session=self.session, slot=slot, sequence=self.sequences[slot], uid=self.uid, gid=self.gid
        )

    async def lookup(self, parent: int, name: bytes, rights: int = 0) -> pb.Entry:
        return await self.ask(
            "LOOKUP", pb.LookupRequest(session=self.session, parent=parent, name=name, rights=rights)
        )

    async def getattr(self, inode: int, rights: int = 0) -> pb.Entry:
        return await self.ask("GETATTR", pb.GetAttrRequest(session=self.session, inode=inode, rights=rights))

    async def create(
        self, parent: int, name: bytes, mode: int = stat.S_IFREG | 0o644, **fields
    ) -> pb.CreateReply:
        return await self.ask(
            "CREATE", pb.CreateRequest(change=self.change(), parent=parent, name=name, mode=mode, **fields)
        )

    async def mkdir(self, parent: int, name: bytes, **fields) -> pb.Attr:
        return (await self.create(parent, name, stat.S_IFDIR | 0o755, exclusive=True, **fields)).entry.attr

    async def file(self, parent: int, name: bytes, **fields) -> pb.Attr:
        return (await self.create(parent, name, exclusive=True, **fields)).entry.attr

    async def unlink(self, parent: int, name: bytes) -> pb.UnlinkReply:
        return await self.ask("UNLINK", pb.UnlinkRequest(change=self.change(), parent=parent, name=name))

    async def rmdir(self, parent: int, name: bytes) -> pb.UnlinkReply:
        return await self.ask("RMDIR", pb.UnlinkRequest(change=self.change(), parent=parent, name=name))

    async def rename(
        self, parent: int, name: bytes, new_parent: int, new_name: bytes, flags: int = 0
    ) -> pb.RenameReply:
        return await self.ask(
            "RENAME",
            pb.RenameRequest(
                change=self.change(),
                parent=parent,
                name=name,
                new_parent=new_parent,
                new_name=new_name,
                flags=flags,
            ),
        )

    async def link(self, inode: int, parent: int, name: bytes) -> pb.Attr:
        return (
            await self.ask(
                "LINK", pb.LinkRequest(change=self.change(), inode=inode, parent=parent, name=name)
            )
        ).attr

    async def setattr(self, inode: int, valid: int, slot: int = 0, **fields) -> pb.Entry:
        return await self.ask(
            "SETATTR", pb.SetAttrRequest(change=self.change(slot), inode=inode, valid=valid, **fields)
        )

    async def allocate(self, inode: int, offset: int, length: int, **fields) -> pb.Entry:
        return await self.ask(
            "ALLOCATE",
            pb.AllocateRequest(change=self.change(), inode=inode, offset=offset, length=length, **fields),
        )

    async def open(self, inode: int, rights: int = 1, truncate: bool = False) -> pb.Entry:
        return await self.ask(
            "OPEN", pb.OpenRequest(change=self.change(), inode=inode, rights=rights, truncate=truncate)
        )

    async def report(self, inode: int, end: int, cut: int = 0, **fields) -> pb.Attr:
        fields.setdefault("wrote", True)
        return (
            await self.ask(
                "REPORT", pb.ReportRequest(change=self.change(), inode=inode, end=end, cut=cut, **fields)
            )
        ).attr

    async def lock(
        self,
        inode: int,
        mode: int,
        start: int = 0,
        end: int = LAST_BYTE,
        *,
        owner: int = 1,
        kind: int = RECORD,
        slot: int = 0,
        **fields,
    ) -> pb.LockReply:
        return await self.ask(
            "LOCK",
            pb.LockRequest(
                change=self.change(slot),
                inode=inode,
                kind=kind,
                owner=owner,
                start=start,
                end=end,
                mode=mode,
                **fields,
            ),
        )

    async def locks(
        self,
        inode: int,
        mode: int = 0,
        start: int = 0,
        end: int = LAST_BYTE,
        *,
        owner: int = 1,
        kind: int = RECORD,
    ) -> list[pb.HeldLock]:
        return list(
            (
                await self.ask(
                    "LOCKS",
                    pb.LocksRequest(
                        session=self.session,
                        inode=inode,
                        kind=kind,
                        owner=owner,
                        start=start,
                        end=end,
                        mode=mode,
                    ),
                )
            ).locks
        )

    async def list(self, inode: int, limit: int = 0, attrs: bool = False) -> list[pb.DirEntry]:
        entries: list[pb.DirEntry] = []
        cursor = 0
        while True:
            reply = await self.ask(
                "LIST",
                pb.ListDirRequest(session=self.session, inode=inode, cursor=cursor, limit=limit, attrs=attrs),
            )
            entries += reply.entries
            if not reply.more:
                return entries
            cursor = reply.entries[-1].cursor

    async def names(self, inode: int, limit: int = 0) -> set[bytes]:
        entries = await self.list(inode, limit)
        names = {entry.name for entry in entries}
        assert len(names) == len(entries), "a name came twice"
        return names

    async def collect(self) -> pb.CollectReply:
        return await self.ask("COLLECT", pb.CollectRequest())

    async def status(self) -> pb.MetaStatusReply:
        return await self.ask("STATUS", pb.MetaStatusRequest())

    async def fsck(self, repair: bool = False, limit: int = 100) -> list[pb.FsckProblem]:
        problems: list[pb.FsckProblem] = []
        cursor = b""
        while True:
            reply = await self.ask("FSCK", pb.FsckRequest(cursor=cursor, limit=limit, repair=repair))
            problems += reply.problems
            if reply.done:
                return problems
            cursor = reply.cursor


class StoreRecorder:
    """A dialer that answers for every target; `away` has the endpoints of unreachable ones."""

    def __init__(self) -> None:
        self.cuts: list[data_pb2.CutRequest] = []
        self.removed: list[data_pb2.RemoveRequest] = []
        self.freed = 0
        """Freed bytes in the next reply to a truncation."""
        self.away: set[str] = set()
        self.kept: dict[int, list[int]] = {}
        """Inodes that have chunks, by target: the reply to DATA_LIST."""

    async def call(self, endpoints, method, message, payload=(), *, deadline_s: float, into=None) -> Reply:
        await asyncio.sleep(0)
        if self.away & set(endpoints):
            raise Unreachable("away")
        if method == wire_pb2.DATA_CUT:
            self.cuts.append(data_pb2.CutRequest.FromString(message))
            freed, self.freed = self.freed, 0
            return Reply(data_pb2.CutReply(bytes=freed).SerializeToString(), memoryview(b""))
        if method == wire_pb2.DATA_REMOVE:
            self.removed.append(data_pb2.RemoveRequest.FromString(message))
        elif method == wire_pb2.DATA_LIST:
            request = data_pb2.ListRequest.FromString(message)
            left = sorted(inode for inode in self.kept.get(request.target, ()) if inode > request.after)
            inodes = b"".join(inode.to_bytes(8, "little") for inode in left[:2])
            return Reply(
                data_pb2.ListReply(inodes=inodes, more=len(left) > 2).SerializeToString(), memoryview(b"")
            )
        else:
            raise NvpoolError(f"method {method} was not expected")
        return Reply(b"", memoryview(b""))


@cache
def small_map(targets: int = 2) -> PoolMap:
    """Return a map of one node, one shard, one table and `targets` targets at inproc://1, inproc://2, and so
    on; equal calls return the same map."""
    drives = tuple(Drive(number, 1, f"/drive/{number}", 1 << 30) for number in range(1, targets + 1))
    there = tuple(Target(d.id, d.id, 1, d.capacity_bytes, (f"inproc://{d.id}",)) for d in drives)
    return PoolMap(
        MAP_FORMAT,
        "pool",
        "test",
        1,
        PoolSettings(),
        (Node(1, "n", "h", ("inproc://n",)),),
        drives,
        there,
        (build_table(there, 1),),
        (Shard(1, 1, ("inproc://m",)),),
        (PartitionRange(0, 4096, 1),),
    )
