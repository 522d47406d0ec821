"""Fuzzing of the daemons' ports under load: noise, half connections, mutated frames, well-formed senseless requests.

No daemon dies, no request meets a bug, the load and its stored data are unharmed.
"""

import asyncio
import random
import re
import socket
import subprocess
import sys
import time

import pytest

from nvpool.core.clock import SYSTEM_CLOCK
from nvpool.core.endpoint import parse_endpoint
from nvpool.core.errors import Bug, NvpoolError
from nvpool.host.pool_directory import PoolDirectory
from nvpool.host.process_identity import host_id
from nvpool.rpc.api import Greeting
from nvpool.rpc.connection_pool import Dialer
from nvpool.rpc.transports.frame import CANCEL, HELLO, REQUEST, pack_head
from nvpool.rpc.v1 import data_pb2, meta_pb2, pool_pb2, wire_pb2
from nvpool.sdk.async_filesystem import AsyncFileSystem
from nvpool.sdk.fsck.replicas import service_right
from nvpool.testing.env.pool import RealPool, end_process
from nvpool.testing.loads.crash_history import CrashHistory, now_ns, read_tree

META = {
    wire_pb2.META_OPEN_SESSION: meta_pb2.OpenSessionRequest,
    wire_pb2.META_RENEW_SESSION: meta_pb2.RenewSessionRequest,
    wire_pb2.META_CLOSE_SESSION: meta_pb2.CloseSessionRequest,
    wire_pb2.META_LOOKUP: meta_pb2.LookupRequest,
    wire_pb2.META_GETATTR: meta_pb2.GetAttrRequest,
    wire_pb2.META_SETATTR: meta_pb2.SetAttrRequest,
    wire_pb2.META_READLINK: meta_pb2.ReadLinkRequest,
    wire_pb2.META_CREATE: meta_pb2.CreateRequest,
    wire_pb2.META_UNLINK: meta_pb2.UnlinkRequest,
    wire_pb2.META_RMDIR: meta_pb2.UnlinkRequest,
    wire_pb2.META_RENAME: meta_pb2.RenameRequest,
    wire_pb2.META_LINK: meta_pb2.LinkRequest,
    wire_pb2.META_OPEN: meta_pb2.OpenRequest,
    wire_pb2.META_RELEASE: meta_pb2.ReleaseRequest,
    wire_pb2.META_REPORT: meta_pb2.ReportRequest,
    wire_pb2.META_RESERVE: meta_pb2.ReserveRequest,
    wire_pb2.META_LIST: meta_pb2.ListDirRequest,
    wire_pb2.META_STATFS: meta_pb2.StatFsRequest,
    wire_pb2.META_GETXATTR: meta_pb2.GetXattrRequest,
    wire_pb2.META_SETXATTR: meta_pb2.SetXattrRequest,
    wire_pb2.META_LISTXATTR: meta_pb2.ListXattrRequest,
    wire_pb2.META_REMOVEXATTR: meta_pb2.RemoveXattrRequest,
    wire_pb2.META_LOCK: meta_pb2.LockRequest,
    wire_pb2.META_LOCK_WAIT: meta_pb2.LockWaitRequest,
    wire_pb2.META_LOCKS: meta_pb2.LocksRequest,
    wire_pb2.META_SYNC: meta_pb2.SyncRequest,
    wire_pb2.META_DUMP: meta_pb2.DumpRequest,
    wire_pb2.META_FSCK: meta_pb2.FsckRequest,
    wire_pb2.META_NAMES: meta_pb2.NamesRequest,
    wire_pb2.META_ALLOCATE: meta_pb2.AllocateRequest,
    wire_pb2.META_GETATTR_MANY: meta_pb2.GetAttrManyRequest,
    wire_pb2.META_FSCK_SUMS: meta_pb2.FsckSumsRequest,
    wire_pb2.META_HOLD: meta_pb2.HoldRequest,
    wire_pb2.META_SETTLE: meta_pb2.SettleRequest,
    wire_pb2.META_OUTCOME: meta_pb2.OutcomeRequest,
    wire_pb2.META_STATUS: meta_pb2.MetaStatusRequest,
    wire_pb2.META_COLLECT: meta_pb2.CollectRequest,
}
DATA = {
    wire_pb2.DATA_READ: data_pb2.ReadRequest,
    wire_pb2.DATA_WRITE: data_pb2.WriteRequest,
    wire_pb2.DATA_FLUSH: data_pb2.FlushRequest,
    wire_pb2.DATA_CUT: data_pb2.CutRequest,
    wire_pb2.DATA_REMOVE: data_pb2.RemoveRequest,
    wire_pb2.DATA_DESCRIBE: data_pb2.DescribeRequest,
    wire_pb2.DATA_LIST: data_pb2.ListRequest,
    wire_pb2.DATA_SCRUB: data_pb2.ScrubRequest,
    wire_pb2.DATA_EXTENTS: data_pb2.ExtentsRequest,
    wire_pb2.DATA_COPY: data_pb2.CopyRequest,
    wire_pb2.DATA_VERSIONS: data_pb2.VersionsRequest,
    wire_pb2.DATA_FETCH: data_pb2.FetchRequest,
    wire_pb2.DATA_PULL: data_pb2.PullRequest,
    wire_pb2.DATA_STATUS: data_pb2.DataStatusRequest,
}
POOL = {
    wire_pb2.POOL_MAP: pool_pb2.MapRequest,
    wire_pb2.POOL_STATUS: pool_pb2.PoolStatusRequest,
    wire_pb2.POOL_CHANGE: pool_pb2.PoolChangeRequest,
    wire_pb2.POOL_AUTHORITY: pool_pb2.AuthorityRequest,
    wire_pb2.POOL_JOIN: pool_pb2.JoinRequest,
    wire_pb2.POOL_RENEW: pool_pb2.RenewRequest,
}
HARMLESS = {"repair": False, "wait_s": 0.01, "valid": None}


class Fuzzer:
    def __init__(self, pool, seed):
        self.chance = random.Random(seed)
        self.pool_map = pool.pool_map
        self.sequence = 0
        self.sent = 0
        self.right = service_right(PoolDirectory(pool.path).grant_key.read_bytes())
        """Access token of the pool itself: with another one, a chunk that is fetched from another target is never examined."""
        self.bugs = []
        self.daemons = [(META, shard.endpoints, 0) for shard in self.pool_map.shards]
        self.daemons += [(DATA, target.endpoints, target.id) for target in self.pool_map.targets]
        self.daemons += [(POOL, node.endpoints, 0) for node in self.pool_map.nodes]

    # -- bytes ---------------------------------------------------------------------------------------------------------------

    def number(self, bits):
        chance = self.chance
        return chance.choice(
            (0, 1, 2, 3, chance.randrange(100), chance.getrandbits(bits), (1 << bits) - 1, 1 << bits - 1)
        )

    def bytes(self):
        chance = self.chance
        return chance.choice(
            (
                b"",
                b"\0",
                b"a/b",
                b"..",
                b"x" * 300,
                bytes(range(1, 256)),
                b"fuzz%d" % chance.randrange(9),
                chance.randbytes(chance.choice((8, 24, 40, 1000))),
            )
        )

    def fill(self, message, target):
        """Set about half of the fields to arbitrary values."""
        for field in message.DESCRIPTOR.fields:
            if self.chance.random() < 0.5 and field.name not in ("change", "session", "target"):
                continue
            if field.name in HARMLESS and HARMLESS[field.name] is not None:
                setattr(message, field.name, HARMLESS[field.name])
                continue
            if field.name == "session":
                message.session = self.chance.choice(
                    (self.session, self.session, self.session, self.number(64))
                )
            elif field.name == "target" and field.type == field.TYPE_UINT32:
                message.target = self.chance.choice((target, target, target, self.number(32)))
            elif field.name == "authority" and isinstance(message, data_pb2.PullRequest):
                message.authority = self.chance.choice((self.right, self.right, self.bytes()))
            elif field.name == "sequence":
                self.sequence += 1
                message.sequence = self.chance.choice((self.sequence, self.sequence, self.number(64)))
            elif field.name in (
                "inode",
                "parent",
                "new_parent",
            ):  # not the session of the load: the owner of a session may change anything
                setattr(
                    message,
                    field.name,
                    self.chance.choice((0, 1, 1, self.chance.getrandbits(64), (1 << 64) - 1)),
                )
            elif field.name == "map_epoch":
                message.map_epoch = self.chance.choice((self.pool_map.epoch, self.number(64)))
            elif field.message_type is not None and field.is_repeated:
                self.fill(getattr(message, field.name).add(), target)
            elif field.message_type is not None:
                self.fill(getattr(message, field.name), target)
            elif field.is_repeated:
                value = {
                    field.TYPE_BYTES: self.bytes,
                    field.TYPE_STRING: lambda: self.bytes().decode(errors="replace"),
                }.get(
                    field.type, lambda bits=32 if field.type == field.TYPE_UINT32 else 63: self.number(bits)
                )
                getattr(message, field.name).extend(value() for _ in range(self.chance.randrange(4)))
            elif field.type == field.TYPE_BYTES:
                setattr(message, field.name, self.bytes())
            elif field.type == field.TYPE_STRING:
                setattr(message, field.name, self.chance.choice(("", "x" * 500, "\0", "drive-add")))
            elif field.type == field.TYPE_BOOL:
                setattr(message, field.name, self.chance.random() < 0.5)
            elif field.type in (field.TYPE_DOUBLE, field.TYPE_FLOAT):
                setattr(
                    message, field.name, self.chance.choice((0.0, -1.0, float("nan"), float("inf"), 0.01))
                )
            else:
                bits = 32 if field.type in (field.TYPE_UINT32, field.TYPE_FIXED32) else 63
                setattr(message, field.name, self.number(bits))

    # -- requests ------------------------------------------------------------------------------------------------------------

    async def requests(self, seconds):
        """Well-formed requests with arbitrary fields, and arbitrary bytes for well-known methods, over every transport."""
        dialer = Dialer(Greeting("fuzz", self.pool_map.fingerprint), host_id=host_id())
        shard = self.daemons[0][1]
        try:
            reply = await dialer.call(
                shard, wire_pb2.META_OPEN_SESSION, b"", deadline_s=SYSTEM_CLOCK.boottime_s() + 10
            )
            self.session = meta_pb2.OpenSessionReply.FromString(bytes(reply.message)).session
            end = time.monotonic() + seconds
            while time.monotonic() < end:
                await asyncio.gather(*(self.one(dialer) for _ in range(20)))
        finally:
            await dialer.close()

    async def one(self, dialer):
        methods, endpoints, target = self.chance.choice(self.daemons)
        method = self.chance.choice([*methods, self.number(16)])
        if method in (wire_pb2.POOL_STOP, wire_pb2.META_LOAD):
            return  # valid ones stop the pool, or start a load, which refuses every client until it ends
        if method in methods and self.chance.random() < 0.8:
            message = methods[method]()
            self.fill(message, target)
            raw = message.SerializeToString()
            if self.chance.random() < 0.2 and method != wire_pb2.META_FSCK:
                raw = bytes(
                    b ^ (1 << self.chance.randrange(8)) if self.chance.random() < 0.05 else b for b in raw
                )
                if self.has_another_session(raw):
                    return
        else:
            raw = self.chance.randbytes(self.chance.randrange(60)) if method != wire_pb2.META_FSCK else b""
        payload = (
            [self.chance.randbytes(self.chance.choice((1, 4096, 5000)))] if self.chance.random() < 0.2 else ()
        )
        self.sent += 1
        try:
            await dialer.call(
                (self.chance.choice(endpoints),),
                method,
                raw,
                payload,
                deadline_s=SYSTEM_CLOCK.boottime_s() + self.chance.choice((0.001, 0.3, 1.0)),
            )
        except Bug as error:
            self.bugs.append(f"method {method}, {raw.hex()}: {error}")
        except NvpoolError:
            pass

    def has_another_session(self, raw):
        """Sessions have consecutive numbers: one flipped bit may turn ours into the load's, which suffers as any client
        would.
        """
        ours = self.session.to_bytes(8, "little")
        return any(found[0] != ours for found in re.finditer(rb"(?s)." + re.escape(ours[1:]), raw))

    # -- noise ---------------------------------------------------------------------------------------------------------------

    def noise(self, seconds):
        """Bytes that are no requests, from clients that disconnect in the middle."""
        chance, end, open_ones = self.chance, time.monotonic() + seconds, []
        sound = pack_head(HELLO, 0, 0, 0, wire_pb2.Hello(version=1, name="noise").SerializeToString(), 0)
        while time.monotonic() < end:
            _, endpoints, _ = chance.choice(self.daemons)
            place = parse_endpoint(chance.choice(endpoints))
            web = (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", b"GET / HTTP/1.1\r\n\r\n")
            stream = bytearray(chance.choice((b"", sound, sound, *web)))
            for number in range(chance.randrange(4)):
                stream += pack_head(
                    chance.choice((REQUEST, CANCEL)), chance.randrange(210), number, 100, self.bytes(), 0
                )
            stream += chance.randbytes(chance.choice((0, 0, 3, 40, 3000)))
            for _ in range(chance.randrange(3)):
                if stream:
                    stream[chance.randrange(len(stream))] ^= 1 << chance.randrange(8)
            one = socket.socket(socket.AF_UNIX if place.path else socket.AF_INET)
            one.settimeout(2)
            try:
                one.connect(place.path or (place.host, place.port))
                one.sendall(stream)
                self.sent += 1
            except OSError:
                pass
            open_ones.append(one)
            if len(open_ones) > chance.randrange(40):
                open_ones.pop(chance.randrange(len(open_ones))).close()
            time.sleep(0.002)
        for one in open_ones:
            one.close()


def fuzz(tmp_path, seed, seconds):
    with RealPool(tmp_path / "pool") as pool:
        pool.make()
        pool.start()
        pids = {name: pool.pid(name) for name in ("supervisor", "meta-1", "target-1", "target-2")}
        load = subprocess.Popen(
            [
                sys.executable,
                "-m",
                "nvpool.testing.loads.crash_history",
                str(pool.path),
                str(seed),
                str(seconds),
                "2",
            ],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        fuzzer = Fuzzer(pool, seed)

        async def both():
            await asyncio.gather(fuzzer.requests(seconds), asyncio.to_thread(fuzzer.noise, seconds))

        try:
            asyncio.run(both())
            out, said = load.communicate(timeout=seconds + 240)
        finally:
            load.kill()
        print(fuzzer.sent, "sent")
        assert load.returncode == 0, said
        assert not fuzzer.bugs, fuzzer.bugs[:5]
        assert {name: pool.pid(name) for name in pids} == pids, pool.said()
        pool.wait()
        history = CrashHistory(out)

        async def look():
            pool_of_sdk = await AsyncFileSystem.connect(str(pool.path))
            try:
                return await read_tree(pool_of_sdk, history.workers)
            finally:
                await pool_of_sdk.close()

        for operation in history.operations:
            operation["end"] = min(
                operation["end"], now_ns() - 10**10
            )  # no power was lost: everything acknowledged is durable
        assert not history.judge(asyncio.run(look()), now_ns())
        # Each daemon has as many abandoned checks and dumps under way as it allows.
        for shard in pool.pool_map.shards:
            end_process(pool.pid(f"meta-{shard.id}"))
        pool.wait()
        pool.until(lambda: pool.fsck() == [], "fsck is clean", 240)
        assert "unhandled" not in pool.said("*", 10_000)


@pytest.mark.smoke
def test_malformed_input_at_every_port_does_no_harm(tmp_path):
    fuzz(tmp_path, seed=1, seconds=3.0)


@pytest.mark.soak
@pytest.mark.parametrize("seed", range(2, 12))
def test_malformed_input_for_long_does_no_harm(tmp_path, seed):
    fuzz(tmp_path, seed, seconds=60.0)
