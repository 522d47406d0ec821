"""The door to etcd: calls to whichever of its members answers, and its messages under one name.

The messages and stubs are those that the package aetcd has generated from etcd's own definitions (version 3.4 of the protocol
and later). Its client is not used: it speaks to one host, without certificates, and a watch of it ends with its stream.
Called by cluster/etcd/coordinator and cluster/etcd/leases only.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import NamedTuple, TypeVar

import grpc
from aetcd import rpc

from nvpool.core.clock import Clock
from nvpool.core.errors import AccessDenied, BadConfiguration, Unavailable

CALL_S = 2.0
"""One member gets so long to answer."""
NEXT_S = 0.5
"""Without an answer for so long the next one is asked as well, the only one again: a member that is cut off says nothing, and
what another one has passed on to a leader of theirs that is gone is lost without a word."""
PAUSE_S = 0.1
"""After an error."""

_ANSWER_BYTES_MAX = 64 << 20
"""Of a stream that was away for a while, which is told many maps at once; gRPC's own bound is 4 MiB."""
_OPTIONS = (
    ("grpc.max_receive_message_length", _ANSWER_BYTES_MAX),
    ("grpc.keepalive_time_ms", 5000), ("grpc.keepalive_timeout_ms", 3000), ("grpc.http2.max_pings_without_data", 0),
    ("grpc.initial_reconnect_backoff_ms", 100), ("grpc.max_reconnect_backoff_ms", 1000), ("grpc.enable_retries", 0),
)
# They need the same call again, with another member or later: no leader at the moment, a time-out inside, a member that starts.
_ELSEWHERE = {grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.CANCELLED,
              grpc.StatusCode.UNKNOWN, grpc.StatusCode.INTERNAL, grpc.StatusCode.RESOURCE_EXHAUSTED}
_NOT_LET_IN = {grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.PERMISSION_DENIED}

_Answer = TypeVar("_Answer")

NEEDS_LEADER = (("hasleader", "true"),)
"""With a stream: a member that has lost the others ends it, and does not leave it silent."""


class Certificates(NamedTuple):
    """PEM: the authority that signed both sides, and what we show."""

    authority: bytes
    certificate: bytes
    key: bytes


class _Member:
    """A channel to one member, and the stubs on it."""

    def __init__(self, address: str, credentials: grpc.ChannelCredentials | None) -> None:
        self.address = address
        self.channel = grpc.aio.secure_channel(address, credentials, _OPTIONS) if credentials else \
            grpc.aio.insecure_channel(address, _OPTIONS)
        self.kv = rpc.KVStub(self.channel)
        self.leases = rpc.LeaseStub(self.channel)
        self.watches = rpc.WatchStub(self.channel)
        self.cluster = rpc.ClusterStub(self.channel)


class EtcdCalls:
    """`members`: "host:port" of each, the nearest first. Plain text without `certificates`."""

    def __init__(self, members: Sequence[str], clock: Clock, certificates: Certificates | None = None) -> None:
        self._clock = clock
        self._certificates: Certificates | None = None
        self._members: list[_Member] = []
        self._at = 0
        self._closed = False
        self._closing: set[asyncio.Task[None]] = set()
        self.use(members, certificates)

    def use(self, members: Sequence[str], certificates: Certificates | None) -> None:
        """Go on with these members and certificates. Calls to others, and those under the certificates of before, are given
        time to end; a stream there breaks, and is begun anew by who reads it."""
        if not members:
            raise BadConfiguration("no member of etcd is named")
        if tuple(members) == self.members and certificates == self._certificates:
            return
        credentials = certificates and grpc.ssl_channel_credentials(
            certificates.authority, certificates.key, certificates.certificate)
        kept = {one.address: one for one in self._members} if certificates == self._certificates else {}
        before, self._members = self._members, [kept.get(address) or _Member(address, credentials) for address in members]
        self._certificates = certificates
        self._at = 0
        for one in before:
            if one not in self._members:
                task = asyncio.ensure_future(one.channel.close(CALL_S))
                self._closing.add(task)
                task.add_done_callback(self._closing.discard)

    @property
    def members(self) -> tuple[str, ...]:
        return tuple(one.address for one in self._members)

    def elsewhere(self) -> None:
        """The next call goes to another member."""
        self._at = (self._at + 1) % len(self._members)

    async def _call(self, stub: str, method: str, request, wait_s: float):
        """The answer of the first member that has one. Repeated, so `request` must mean the same a second time."""
        return await self._first(lambda member, timeout_s: getattr(getattr(member, stub), method)(request, timeout=timeout_s),
                                 wait_s)

    async def _first(self, ask: Callable[[_Member, float], Awaitable[_Answer]], wait_s: float) -> _Answer:
        """What the first member says that has an answer; it is asked first the next time."""
        until_s = self._clock.boottime_s() + wait_s
        asked: dict[asyncio.Future[_Answer], _Member] = {}
        at, told = self._at, ""
        try:
            while True:
                left_s = until_s - self._clock.boottime_s()
                if left_s > PAUSE_S or not (told or asked):
                    member = self._members[at % len(self._members)]
                    trying = asyncio.ensure_future(_answer(ask, member, max(0.05, min(CALL_S, left_s))))
                    trying.add_done_callback(lambda done: done.cancelled() or done.exception())  # seen, also when it comes late
                    asked[trying] = member
                    at += 1
                elif not asked:
                    raise Unavailable(f"etcd does not answer ({told}); are most of its members up?", may_be_applied=True)
                done, _ = await asyncio.wait(asked, timeout=NEXT_S, return_when=asyncio.FIRST_COMPLETED)
                for one in done:
                    member = asked.pop(one)
                    if one.cancelled():
                        told = "its channel was closed"
                        continue
                    try:
                        answer = one.result()
                    except grpc.aio.UsageError:
                        if self._closed:
                            raise Unavailable("our connections to etcd are closed", may_be_applied=True) from None
                        told = "its channel was closed"
                    except grpc.aio.AioRpcError as error:
                        if error.code() in _NOT_LET_IN:
                            raise AccessDenied(f"etcd does not let us in: {error.details()}") from None
                        if error.code() not in _ELSEWHERE:
                            raise
                        told = error.details()
                    else:
                        if member in self._members:
                            self._at = self._members.index(member)
                        return answer
                if done:
                    await asyncio.sleep(PAUSE_S)
        finally:
            for one in asked:
                one.cancel()

    async def range(self, request: rpc.RangeRequest, wait_s: float) -> rpc.RangeResponse:
        return await self._call("kv", "Range", request, wait_s)

    async def ranges(self, ranges: Sequence[tuple[bytes, bytes]], wait_s: float) -> rpc.TxnResponse:
        """What the keys from the first to the second, without it, hold, all of one moment."""
        return await self._call("kv", "Txn", rpc.TxnRequest(success=[rpc.RequestOp(request_range=rpc.RangeRequest(
            key=first, range_end=behind)) for first, behind in ranges]), wait_s)

    async def transact(self, request: rpc.TxnRequest, wait_s: float) -> rpc.TxnResponse:
        """After Unavailable, and also where it has not succeeded, it may have been carried out: look."""
        try:
            return await self._call("kv", "Txn", request, wait_s)
        except grpc.aio.AioRpcError as error:
            if error.code() != grpc.StatusCode.NOT_FOUND:
                raise
            # What hangs on a lease that has ended meanwhile: an election of theirs takes longer than short leases last.
            raise Unavailable(f"etcd refuses a change: {error.details()}", retry_after_s=0.1, may_be_applied=True) from None

    async def grant_lease(self, lease_s: int, wait_s: float) -> int:
        """Its number. One whose answer was lost ends by itself."""
        return (await self._call("leases", "LeaseGrant", rpc.LeaseGrantRequest(TTL=lease_s), wait_s)).ID

    async def revoke_lease(self, number: int, wait_s: float) -> None:
        """Whether it is there or not."""
        try:
            await self._call("leases", "LeaseRevoke", rpc.LeaseRevokeRequest(ID=number), wait_s)
        except grpc.aio.AioRpcError as error:
            if error.code() != grpc.StatusCode.NOT_FOUND:
                raise

    async def keep_alive(self, number: int, wait_s: float) -> bool:
        """Whether the lease is there, and has its whole time again from some moment of this call on. Unavailable."""
        try:
            call = self._members[self._at].leases.LeaseKeepAlive(timeout=min(CALL_S, wait_s), metadata=NEEDS_LEADER)
        except grpc.aio.UsageError:
            raise Unavailable("our connections to etcd are closed") from None
        try:
            await call.write(rpc.LeaseKeepAliveRequest(ID=number))
            answer = await call.read()
            if answer is grpc.aio.EOF:
                raise Unavailable("etcd has ended a renewal")
            return answer.TTL > 0
        except (grpc.aio.AioRpcError, grpc.aio.UsageError, asyncio.InvalidStateError) as error:
            self.elsewhere()
            raise Unavailable(f"etcd does not renew a lease: {error}") from None
        except asyncio.CancelledError:
            if asyncio.current_task().cancelling():
                raise
            raise Unavailable("the channel of a renewal was closed") from None
        finally:
            call.cancel()

    def watch(self, at: int):
        """A stream of WatchRequest and WatchResponse, as grpc.aio has it, at the member of that number, counted round.
        Unavailable after `close`."""
        try:
            return self._members[at % len(self._members)].watches.Watch(metadata=NEEDS_LEADER)
        except grpc.aio.UsageError:
            raise Unavailable("our connections to etcd are closed") from None

    # -- members -----------------------------------------------------------------------------------------------------------

    async def list_members(self, wait_s: float) -> list[rpc.Member]:
        """As of now. A member answers with what it has applied, so it is made to look first that this is all there is."""
        async def ask(member: _Member, timeout_s: float) -> list[rpc.Member]:
            await member.kv.Range(rpc.RangeRequest(key=b"nvpool/", count_only=True), timeout=timeout_s)
            return list((await member.cluster.MemberList(rpc.MemberListRequest(), timeout=timeout_s)).members)

        return await self._first(ask, wait_s)

    async def add_member(self, peer_url: str, wait_s: float) -> None:
        """As one that learns. Unavailable, with etcd's reason: not now."""
        await self._change_members("MemberAdd", rpc.MemberAddRequest(peerURLs=[peer_url], isLearner=True), wait_s)

    async def promote_member(self, number: int, wait_s: float) -> None:
        """It votes from then on. Unavailable, with etcd's reason, while it has not caught up."""
        await self._change_members("MemberPromote", rpc.MemberPromoteRequest(ID=number), wait_s)

    async def remove_member(self, number: int, wait_s: float) -> None:
        """Whether it is there or not. Unavailable, with etcd's reason: the others could not decide without it."""
        await self._change_members("MemberRemove", rpc.MemberRemoveRequest(ID=number), wait_s)

    async def _change_members(self, method: str, request, wait_s: float) -> None:
        try:
            await self._call("cluster", method, request, wait_s)
        except grpc.aio.AioRpcError as error:
            if error.code() != grpc.StatusCode.NOT_FOUND:
                raise Unavailable(f"etcd does not change its members: {error.details()}", retry_after_s=1.0) from None

    async def close(self) -> None:
        """What is under way, and what comes later, is Unavailable."""
        self._closed = True
        await asyncio.gather(*(one.channel.close() for one in self._members), *self._closing, return_exceptions=True)


async def _answer(ask: Callable[[_Member, float], Awaitable[_Answer]], member: _Member, timeout_s: float) -> _Answer:
    return await ask(member, timeout_s)


async def answers_alone(address: str, certificates: Certificates | None, wait_s: float) -> bool:
    """Whether that member is there, with or without the others."""
    member = _Member(address, certificates and grpc.ssl_channel_credentials(
        certificates.authority, certificates.key, certificates.certificate))
    try:
        await member.kv.Range(rpc.RangeRequest(key=b"nvpool/", count_only=True, serializable=True), timeout=wait_s)
        return True
    except grpc.aio.AioRpcError:
        return False
    finally:
        await member.channel.close()


STREAM_ERRORS = (grpc.aio.AioRpcError, asyncio.InvalidStateError, Unavailable)
"""What ends a stream; the next one may do better."""
END_OF_STREAM = grpc.aio.EOF
