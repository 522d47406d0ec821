"""A small CSI orchestrator for tests: calls the services of a plugin over its socket and records each answer."""

from __future__ import annotations

import asyncio
import contextlib
import gc
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, NamedTuple

import grpc
import grpc.aio
from google.protobuf.message_factory import GetMessageClass

from nvpool.bridge.csi.server import serve_csi
from nvpool.bridge.v1 import csi_pb2 as pb

POOL = "pool-1"
CALL_S = 60.0
Mode = pb.VolumeCapability.AccessMode


class Answer(NamedTuple):
    code: str
    """Name of a gRPC status code."""
    reply: Any
    text: str


class Caller:
    def __init__(self, channel: grpc.aio.Channel) -> None:
        self._channel = channel
        self._calls = {}
        for service in pb.DESCRIPTOR.services_by_name.values():
            for method in service.methods:
                self._calls[method.name] = (
                    f"/csi.v1.{service.name}/{method.name}",
                    GetMessageClass(method.input_type),
                    GetMessageClass(method.output_type),
                )

    async def __call__(self, call: str, /, **fields: Any) -> Answer:
        path, request, reply = self._calls[call]
        return await self.raw(path, request(**fields).SerializeToString(), reply.FromString)

    async def raw(self, path: str, request: bytes, read: Any = bytes) -> Answer:
        try:
            return Answer(
                "OK", await self._channel.unary_unary(path, None, read)(request, timeout=CALL_S), ""
            )
        except grpc.aio.AioRpcError as error:
            return Answer(error.code().name, None, error.details() or "")


@contextlib.asynccontextmanager
async def caller_at(address: str) -> AsyncIterator[Caller]:
    options = (("grpc.use_local_subchannel_pool", 1), ("grpc.enable_http_proxy", 0))
    async with grpc.aio.insecure_channel(address, options=options) as channel:
        yield Caller(channel)
        gc.collect()


@contextlib.asynccontextmanager
async def plugin(volumes: Any, place: Path, **how: Any) -> AsyncIterator[Caller]:
    """A plugin over `volumes` in this process, and a caller connected to it."""
    address, answers = f"unix://{place}/csi.sock", asyncio.Event()
    serving = asyncio.ensure_future(serve_csi(volumes, address, pool=POOL, started=answers.set, **how))
    try:
        waiting = asyncio.ensure_future(answers.wait())
        await asyncio.wait([serving, waiting], return_when=asyncio.FIRST_COMPLETED)
        if serving.done():
            waiting.cancel()
            serving.result()
        async with caller_at(address) as caller:
            yield caller
    finally:
        serving.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await serving
        gc.collect()  # gRPC calls in reference cycles: freed after the last server and channel, they crash the process


def use(
    mode: str = "MULTI_NODE_MULTI_WRITER", *, flags: tuple[str, ...] = (), fs_type: str = ""
) -> pb.VolumeCapability:
    return pb.VolumeCapability(
        mount=pb.VolumeCapability.MountVolume(fs_type=fs_type, mount_flags=flags),
        access_mode=Mode(mode=Mode.Mode.Value(mode)),
    )


def block(mode: str = "SINGLE_NODE_WRITER") -> pb.VolumeCapability:
    return pb.VolumeCapability(
        block=pb.VolumeCapability.BlockVolume(), access_mode=Mode(mode=Mode.Mode.Value(mode))
    )


def places(*values: str, key: str = "nvpool.io/pool") -> pb.TopologyRequirement:
    return pb.TopologyRequirement(requisite=[pb.Topology(segments={key: value}) for value in values])


def size(least: int = 0, most: int = 0) -> pb.CapacityRange:
    return pb.CapacityRange(required_bytes=least, limit_bytes=most)
