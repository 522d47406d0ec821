"""Adapter to etcd: calls to whichever member answers, and its messages under one name.

The messages and stubs are those that the package aetcd has generated from etcd's own definitions (protocol
version 3.4 and later). aetcd's client is not used: it talks to one host, without certificates, and its watch
ends with its stream. Used by the other modules of cluster/etcd; node/coordination and provision use
`EtcdCertificates` and `answers_alone`.
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
"""Time for one member to answer."""
NEXT_S = 0.5
"""Time without an answer after which the next member is tried as well. With one member, the same again.

A member that is cut off reports nothing, and a request that a member forwarded to a dead etcd leader is lost
silently."""
PAUSE_S = 0.1
"""Pause after an error."""

LATE_S = 1.0
"""A call that has not ended by its deadline is given up after this time: no wait relies on gRPC alone."""

_ANSWER_BYTES_MAX = 64 << 20
"""Largest response: a stream that was interrupted gets many maps together; gRPC's default limit is 4 MiB."""
_OPTIONS = (
    ("grpc.max_receive_message_length", _ANSWER_BYTES_MAX),
    ("grpc.keepalive_time_ms", 5000),
    ("grpc.keepalive_timeout_ms", 3000),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1000),
    ("grpc.enable_retries", 0),
)
# Retry these with another member or later: no leader at the moment, an internal timeout, or a member that is
# starting.
_ELSEWHERE = {
    grpc.StatusCode.UNAVAILABLE,
    grpc.StatusCode.DEADLINE_EXCEEDED,
    grpc.StatusCode.CANCELLED,
    grpc.StatusCode.UNKNOWN,
    grpc.StatusCode.INTERNAL,
    grpc.StatusCode.RESOURCE_EXHAUSTED,
}
_NOT_LET_IN = {grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.PERMISSION_DENIED}

_Answer = TypeVar("_Answer")

NEEDS_LEADER = (("hasleader", "true"),)
"""Metadata of a stream: a member that has lost the others then ends the stream instead of leaving it
silent."""


class EtcdCertificates(NamedTuple):
    """PEM data: the CA that signed both sides, and our certificate and key."""

    authority: bytes
    certificate: bytes
    key: bytes


class _Member:
    """A channel to one etcd member, with its stubs."""

    def __init__(self, address: str, credentials: grpc.ChannelCredentials | None) -> None:
        self.address = address
        self.channel = (
            grpc.aio.secure_channel(address, credentials, _OPTIONS)
            if credentials
            else grpc.aio.insecure_channel(address, _OPTIONS)
        )
        self.kv = rpc.KVStub(self.channel)
        self.leases = rpc.LeaseStub(self.channel)
        self.watches = rpc.WatchStub(self.channel)
        self.cluster = rpc.ClusterStub(self.channel)


class EtcdCalls:
    """Calls to an etcd cluster with failover between members.

    `members`: "host:port" of each member, the nearest first. Plain text without `certificates`.
    """

    def __init__(
        self, members: Sequence[str], clock: Clock, certificates: EtcdCertificates | None = None
    ) -> None:
        self._clock = clock
        self._certificates: EtcdCertificates | None = None
        self._members: list[_Member] = []
        self.at = 0
        """Index of the member that is called first."""
        self._closed = False
        self._closing: set[asyncio.Task[None]] = set()
        self.use(members, certificates)

    def use(self, members: Sequence[str], certificates: EtcdCertificates | None) -> None:
        """Use these members and certificates from now on.

        Calls to other members, or with the old certificates, get time to end. A stream on such a channel
        breaks, and its reader opens a new one.
        """
        if not members:
            raise BadConfiguration("no member of etcd is named")
        if tuple(members) == self.members and certificates == self._certificates:
            return
        credentials = certificates and grpc.ssl_channel_credentials(
            certificates.authority, certificates.key, certificates.certificate
        )
        kept = {one.address: one for one in self._members} if certificates == self._certificates else {}
        before, self._members = (
            self._members,
            [kept.get(address) or _Member(address, credentials) for address in members],
        )
        self._certificates = certificates
        self.at = 0
        for one in before:
            if one not in self._members:
                task = asyncio.ensure_future(one.channel.close(CALL_S))
                self._closing.add(task)
                task.add_done_callback(self._closing.discard)

    @property
    def members(self) -> tuple[str, ...]:
        return tuple(one.address for one in self._members)

    def elsewhere(self) -> None:
        """Send the next call to another member."""
        self.at = (self.at + 1) % len(self._members)

    async def call(self, stub: str, method: str, request, wait_s: float):
        """Return the first member's answer. May be sent more than once, so `request` must be idempotent."""
        return await self._first(
            lambda member, timeout_s: getattr(getattr(member, stub), method)(request, timeout=timeout_s),
            wait_s,
        )

    async def _first(self, ask: Callable[[_Member, float], Awaitable[_Answer]], wait_s: float) -> _Answer:
        """Return the answer of the first member that has one. That member is tried first the next time."""
        until_s = self._clock.boottime_s() + wait_s
        asked: dict[asyncio.Future[_Answer], _Member] = {}
        at, reason = self.at, ""
        try:
            while True:
                left_s = until_s - self._clock.boottime_s()
                if left_s > PAUSE_S or not (reason or asked):
                    member = self._members[at % len(self._members)]
                    trying = asyncio.ensure_future(_answer(ask, member, max(0.05, min(CALL_S, left_s))))
                    # Retrieved, even if late.
                    trying.add_done_callback(lambda done: done.cancelled() or done.exception())
                    asked[trying] = member
                    at += 1
                elif not asked:
                    raise Unavailable(
                        f"etcd does not answer ({reason}); are most of its members up?", may_be_applied=True
                    )
                done, _ = await asyncio.wait(asked, timeout=NEXT_S, return_when=asyncio.FIRST_COMPLETED)
                if not done and left_s < -LATE_S:
                    raise Unavailable("calls to etcd do not end by their deadlines", may_be_applied=True)
                for one in done:
                    member = asked.pop(one)
                    if one.cancelled():
                        reason = "its channel was closed"
                        continue
                    try:
                        answer = one.result()
                    except grpc.aio.UsageError:
                        if self._closed:
                            raise Unavailable(
                                "our connections to etcd are closed", may_be_applied=True
                            ) from None
                        reason = "its channel was closed"
                    except grpc.aio.AioRpcError as error:
                        if error.code() in _NOT_LET_IN:
                            raise AccessDenied(f"etcd does not let us in: {error.details()}") from None
                        if error.code() not in _ELSEWHERE:
                            raise
                        reason = error.details()
                    else:
                        if member in self._members:
                            self.at = self._members.index(member)
                        return answer
                if done:
                    await asyncio.sleep(PAUSE_S)
        finally:
            for one in asked:
                one.cancel()

    async def range(self, request: rpc.RangeRequest, wait_s: float) -> rpc.RangeResponse:
        return await self.call("kv", "Range", request, wait_s)

    async def ranges(self, ranges: Sequence[tuple[bytes, bytes]], wait_s: float) -> rpc.TxnResponse:
        """Read several key ranges (first, end exclusive) at the same revision."""
        return await self.call(
            "kv",
            "Txn",
            rpc.TxnRequest(
                success=[
                    rpc.RequestOp(request_range=rpc.RangeRequest(key=first, range_end=behind))
                    for first, behind in ranges
                ]
            ),
            wait_s,
        )

    async def transact(self, request: rpc.TxnRequest, wait_s: float) -> rpc.TxnResponse:
        """Run a transaction. After Unavailable, or without success, it may have been applied: read to find
        out."""
        try:
            return await self.call("kv", "Txn", request, wait_s)
        except grpc.aio.AioRpcError as error:
            if error.code() != grpc.StatusCode.NOT_FOUND:
                raise
            # For a key on a lease that has ended meanwhile: an etcd election takes longer than short leases
            # last.
            raise Unavailable(
                f"etcd refuses a change: {error.details()}", retry_after_s=0.1, may_be_applied=True
            ) from None

    async def grant_lease(self, lease_s: int, wait_s: float) -> int:
        """Create a lease and return its number. If the answer is lost, the lease expires by itself."""
        return (await self.call("leases", "LeaseGrant", rpc.LeaseGrantRequest(TTL=lease_s), wait_s)).ID

    async def revoke_lease(self, number: int, wait_s: float) -> None:
        """Revoke a lease, whether it exists or not."""
        try:
            await self.call("leases", "LeaseRevoke", rpc.LeaseRevokeRequest(ID=number), wait_s)
        except grpc.aio.AioRpcError as error:
            if error.code() != grpc.StatusCode.NOT_FOUND:
                raise

    async def keep_alive(self, number: int, wait_s: float) -> bool:
        """Renew a lease; return whether it exists.

        Its whole time then counts from this call. Unavailable.
        """
        try:
            call = self._members[self.at].leases.LeaseKeepAlive(
                timeout=min(CALL_S, wait_s), metadata=NEEDS_LEADER
            )
        except grpc.aio.UsageError:
            raise Unavailable("our connections to etcd are closed") from None
        try:
            async with asyncio.timeout(min(CALL_S, wait_s) + LATE_S):
                await call.write(rpc.LeaseKeepAliveRequest(ID=number))
                answer = await call.read()
            if answer is grpc.aio.EOF:
                raise Unavailable("etcd has ended a renewal")
            return answer.TTL > 0
        except (grpc.aio.AioRpcError, grpc.aio.UsageError, asyncio.InvalidStateError, TimeoutError) as error:
            self.elsewhere()
            raise Unavailable(f"etcd does not renew a lease: {error}") from None
        except asyncio.CancelledError:
            if asyncio.current_task().cancelling():
                raise
            raise Unavailable("the channel of a renewal was closed") from None
        finally:
            call.cancel()

    def watch(self, at: int):
        """Open a stream of WatchRequest and WatchResponse (grpc.aio) at member number `at`, modulo their
        count.

        Unavailable: after `close`.
        """
        try:
            return self._members[at % len(self._members)].watches.Watch(metadata=NEEDS_LEADER)
        except grpc.aio.UsageError:
            raise Unavailable("our connections to etcd are closed") from None

    # -- members -----------------------------------------------------------------------------------------------------------

    async def list_members(self, wait_s: float) -> list[rpc.Member]:
        """Present members of etcd.

        A member answers with what it has applied, so a read first makes it catch up with the others.
        """

        async def ask(member: _Member, timeout_s: float) -> list[rpc.Member]:
            await member.kv.Range(rpc.RangeRequest(key=b"nvpool/", count_only=True), timeout=timeout_s)
            return list((await member.cluster.MemberList(rpc.MemberListRequest(), timeout=timeout_s)).members)

        return await self._first(ask, wait_s)

    async def add_member(self, peer_url: str, wait_s: float) -> None:
        """Add a member as a learner. Unavailable, with etcd's reason: not possible now."""
        await self._change_members(
            "MemberAdd", rpc.MemberAddRequest(peerURLs=[peer_url], isLearner=True), wait_s
        )

    async def promote_member(self, number: int, wait_s: float) -> None:
        """Make a learner a voting member. Unavailable, with etcd's reason: the member has not caught up."""
        await self._change_members("MemberPromote", rpc.MemberPromoteRequest(ID=number), wait_s)

    async def remove_member(self, number: int, wait_s: float) -> None:
        """Remove a member, whether it exists or not.

        Unavailable, with etcd's reason: it would break the quorum.
        """
        await self._change_members("MemberRemove", rpc.MemberRemoveRequest(ID=number), wait_s)

    async def _change_members(self, method: str, request, wait_s: float) -> None:
        try:
            await self.call("cluster", method, request, wait_s)
        except grpc.aio.AioRpcError as error:
            if error.code() != grpc.StatusCode.NOT_FOUND:
                raise Unavailable(
                    f"etcd does not change its members: {error.details()}", retry_after_s=1.0
                ) from None

    async def close(self) -> None:
        """Close all channels. Pending and later calls raise Unavailable."""
        self._closed = True
        await asyncio.gather(
            *(one.channel.close() for one in self._members), *self._closing, return_exceptions=True
        )


async def _answer(
    ask: Callable[[_Member, float], Awaitable[_Answer]], member: _Member, timeout_s: float
) -> _Answer:
    return await ask(member, timeout_s)


async def answers_alone(address: str, certificates: EtcdCertificates | None, wait_s: float) -> bool:
    """Whether that member answers, with or without a quorum."""
    member = _Member(
        address,
        certificates
        and grpc.ssl_channel_credentials(certificates.authority, certificates.key, certificates.certificate),
    )
    try:
        async with asyncio.timeout(wait_s + LATE_S):
            await member.kv.Range(
                rpc.RangeRequest(key=b"nvpool/", count_only=True, serializable=True), timeout=wait_s
            )
        return True
    except (grpc.aio.AioRpcError, TimeoutError):
        return False
    finally:
        await member.channel.close()


STREAM_ERRORS = (grpc.aio.AioRpcError, asyncio.InvalidStateError, Unavailable)
"""Errors that end a stream; a new stream may work."""
END_OF_STREAM = grpc.aio.EOF
