"""The door to etcd: calls to whichever of its members answers, and its messages under one name.

The messages and stubs are those that the package aetcd has generated from etcd's own definitions (version 3.4 of the protocol
and later). Its client is not used: it speaks to one host, without certificates, and a watch of it ends with its stream.
Called by cluster/etcd and cluster/etcd_leases only.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import NamedTuple

import grpc
from aetcd import rpc

from nvpool.base.clock import Clock
from nvpool.base.errors import AccessDenied, BadConfiguration, Unavailable

CALL_S = 2.0
"""One member gets so long to answer; then another one is asked, while there is time. An election of theirs takes 1 to 2 s."""
PAUSE_S = 0.1
"""Between two tries."""

_OPTIONS = (
    ("grpc.keepalive_time_ms", 5000), ("grpc.keepalive_timeout_ms", 3000), ("grpc.http2.max_pings_without_data", 0),
    ("grpc.initial_reconnect_backoff_ms", 100), ("grpc.max_reconnect_backoff_ms", 1000), ("grpc.enable_retries", 0),
)
# They need the same call again, with another member or later: no leader at the moment, a time-out inside, a member that starts.
_ELSEWHERE = {grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.CANCELLED,
              grpc.StatusCode.UNKNOWN, grpc.StatusCode.INTERNAL, grpc.StatusCode.RESOURCE_EXHAUSTED}
_NOT_LET_IN = {grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.PERMISSION_DENIED}

NEEDS_LEADER = (("hasleader", "true"),)
"""With a stream: a member that has lost the others ends it, and does not leave it silent."""


class Certificates(NamedTuple):
    """PEM: the authority that signed both sides, and what we show."""

    authority: bytes
    certificate: bytes
    key: bytes


class EtcdCalls:
    """`members`: "host:port" of each. Plain text without `certificates`."""

    def __init__(self, members: Sequence[str], clock: Clock, certificates: Certificates | None = None) -> None:
        if not members:
            raise BadConfiguration("no member of etcd is named")
        self._clock = clock
        credentials = certificates and grpc.ssl_channel_credentials(
            certificates.authority, certificates.key, certificates.certificate)
        self._channels = [grpc.aio.secure_channel(member, credentials, _OPTIONS) if credentials
                          else grpc.aio.insecure_channel(member, _OPTIONS) for member in members]
        self._at = 0
        self._kv = [rpc.KVStub(channel) for channel in self._channels]
        self._leases = [rpc.LeaseStub(channel) for channel in self._channels]
        self._watches = [rpc.WatchStub(channel) for channel in self._channels]

    def elsewhere(self) -> None:
        """The next call goes to another member."""
        self._at = (self._at + 1) % len(self._channels)

    async def _call(self, stubs: list, method: str, request, wait_s: float):
        """The answer of the first member that has one. Repeated, so `request` must mean the same a second time."""
        until_s = self._clock.boottime_s() + wait_s
        while True:
            left_s = until_s - self._clock.boottime_s()
            try:
                return await getattr(stubs[self._at], method)(request, timeout=max(0.05, min(CALL_S, left_s)))
            except grpc.aio.AioRpcError as error:
                if error.code() in _NOT_LET_IN:
                    raise AccessDenied(f"etcd does not let us in: {error.details()}") from None
                if error.code() not in _ELSEWHERE:
                    raise
                self.elsewhere()
                if until_s - self._clock.boottime_s() <= PAUSE_S:
                    raise Unavailable(f"etcd does not answer ({error.details()}); are most of its members up?",
                                      may_be_applied=True) from None
            await asyncio.sleep(PAUSE_S)

    async def range(self, request: rpc.RangeRequest, wait_s: float) -> rpc.RangeResponse:
        return await self._call(self._kv, "Range", request, wait_s)

    async def transact(self, request: rpc.TxnRequest, wait_s: float) -> rpc.TxnResponse:
        """After Unavailable, and also where it has not succeeded, it may have been carried out: look."""
        return await self._call(self._kv, "Txn", request, wait_s)

    async def grant_lease(self, lease_s: int, wait_s: float) -> int:
        """Its number. One whose answer was lost ends by itself."""
        return (await self._call(self._leases, "LeaseGrant", rpc.LeaseGrantRequest(TTL=lease_s), wait_s)).ID

    async def revoke_lease(self, number: int, wait_s: float) -> None:
        """Whether it is there or not."""
        try:
            await self._call(self._leases, "LeaseRevoke", rpc.LeaseRevokeRequest(ID=number), wait_s)
        except grpc.aio.AioRpcError as error:
            if error.code() != grpc.StatusCode.NOT_FOUND:
                raise

    async def keep_alive(self, number: int, wait_s: float) -> bool:
        """Whether the lease is there, and has its whole time again from some moment of this call on. Unavailable."""
        call = self._leases[self._at].LeaseKeepAlive(timeout=min(CALL_S, wait_s), metadata=NEEDS_LEADER)
        try:
            await call.write(rpc.LeaseKeepAliveRequest(ID=number))
            answer = await call.read()
            if answer is grpc.aio.EOF:
                raise Unavailable("etcd has ended a renewal")
            return answer.TTL > 0
        except (grpc.aio.AioRpcError, asyncio.InvalidStateError) as error:
            self.elsewhere()
            raise Unavailable(f"etcd does not renew a lease: {error}") from None
        finally:
            call.cancel()

    def watch(self):
        """A stream of WatchRequest and WatchResponse, as grpc.aio has it."""
        return self._watches[self._at].Watch(metadata=NEEDS_LEADER)

    async def close(self) -> None:
        await asyncio.gather(*(channel.close() for channel in self._channels))


STREAM_ERRORS = (grpc.aio.AioRpcError, asyncio.InvalidStateError, Unavailable)
"""What ends a stream; the next one may do better."""
END_OF_STREAM = grpc.aio.EOF
