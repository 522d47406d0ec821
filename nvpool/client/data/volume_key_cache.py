"""Cache of the keys of encrypted volumes, filled at the first read or write.

A key stays in memory as long as the client lives. The metadata service gives the key to clients that may read
in the volume. Used by `client/data/chunk_client`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from nvpool.client.rpc.meta_client import MetaClient
from nvpool.client.state.metadata_cache import OpenInode
from nvpool.core.errors import CorruptRecord
from nvpool.rpc.v1 import meta_pb2, wire_pb2
from nvpool.security.volume_keys import VolumeKey
from nvpool.security.xts import KEY_BYTES, BlockCipher


class VolumeKeys:
    """The keys of a client. `volume_of(inode)` returns the volume of an inode whose attributes lack it."""

    def __init__(self, meta: MetaClient, volume_of: Callable[[int], Awaitable[int]]) -> None:
        self._meta = meta
        self._volume_of = volume_of
        self._known: dict[int, VolumeKey] = {}
        self._fetching: dict[int, asyncio.Task[VolumeKey]] = {}

    async def fetch(self, file: OpenInode, *, stale: VolumeKey | None = None) -> None:
        """Set `file.key` to the volume's key; if this raises, `file.key` is unchanged.

        `stale`: a key that a store could not unwrap because its pool key was replaced; the key is fetched
        again.

        AccessDenied: the client has no right to the volume. KeyMissing: the shard's node has no pool key.
        CorruptRecord, and the errors of MetaClient.ask.
        """
        volume = file.volume or await self._volume_of(file.inode)
        known = self._known.get(volume)
        if known is None or known is stale:
            task = self._fetching.get(volume)
            if task is None:
                task = self._fetching[volume] = asyncio.create_task(self._ask(volume))
                task.add_done_callback(
                    lambda done: (self._fetching.pop(volume, None), done.cancelled() or done.exception())
                )
            known = self._known[volume] = await asyncio.shield(task)
        file.key = known

    async def _ask(self, volume: int) -> VolumeKey:
        request = meta_pb2.VolumeRequest(inode=volume, action=meta_pb2.VolumeRequest.KEY)
        reply = await self._meta.ask(volume, wire_pb2.META_VOLUME, request, meta_pb2.VolumeReply)
        if len(reply.key) != KEY_BYTES:
            raise CorruptRecord(f"volume {volume} is encrypted, and its shard has no key of it")
        return VolumeKey(reply.wrapped_key, BlockCipher(reply.key))
