"""Node service of CSI: stage and publish volumes for the containers of this host.

bridge/csi/server calls it. The service has no state of its own: uses are in the state file of bridge/volumes,
and the kernel keeps the binds, so a restarted node plugin finds both. The id of a holder records how the volume
is used: csi/MODE/ro or rw/hash of the staging path. Nothing is mounted at the staging path, because the
kubelet counts the mounts of a volume before it releases the staging path, and would count such a mount.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
from pathlib import Path
from typing import TYPE_CHECKING
from weakref import WeakValueDictionary

from grpc import StatusCode

from nvpool.bridge.csi import requests as csi_requests
from nvpool.bridge.csi.errors import CsiRefusal, invalid, precondition
from nvpool.bridge.csi.requests import Mode, RequestedAccess
from nvpool.bridge.v1 import csi_pb2 as pb
from nvpool.core.errors import InUse, NotFound, Unavailable

if TYPE_CHECKING:
    from nvpool.bridge.volumes import BridgeVolumes, Stats

_Rpc = pb.NodeServiceCapability.RPC
CAPABILITIES = (
    _Rpc.STAGE_UNSTAGE_VOLUME,
    _Rpc.GET_VOLUME_STATS,
    _Rpc.VOLUME_CONDITION,
    _Rpc.SINGLE_NODE_MULTI_WRITER,
)
FACE = "csi/"
"""Prefix of the holder ids of this service."""


def holder_of(use: RequestedAccess, staging_path: str) -> str:
    digest = hashlib.sha256(staging_path.encode()).hexdigest()[:32]
    return f"{FACE}{Mode.Name(use.mode)}/{'ro' if use.read_only else 'rw'}/{digest}"


def use_of(holder: str) -> RequestedAccess:
    _, mode, kind, _ = holder.split("/")
    return RequestedAccess(Mode.Value(mode), kind == "ro")


class CsiNode:
    def __init__(self, volumes: BridgeVolumes, pool: str) -> None:
        self._volumes, self._pool = volumes, pool
        self._turns: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()

    # -- staging ---------------------------------------------------------------------------------------------------------

    async def NodeStageVolume(self, request: pb.NodeStageVolumeRequest) -> pb.NodeStageVolumeResponse:
        """Stage the volume. The pool then records the use by this node, so the volume cannot be removed."""
        csi_requests.required(request, "volume_id", "staging_target_path")
        staging = csi_requests.place_of(request, "staging_target_path")
        use = self._use(request)
        subpath = csi_requests.read_context(request.volume_context)
        async with self._turn(request.volume_id):
            for holder in await self._staged(request.volume_id, staging):
                if use_of(holder) != use:
                    raise CsiRefusal(
                        StatusCode.ALREADY_EXISTS,
                        f"the volume {request.volume_id} is staged there as {use_of(holder)}; unstage it first",
                    )
            await self._volumes.stage(
                request.volume_id, holder_of(use, staging), read_only=use.read_only, subpath=subpath
            )
        return pb.NodeStageVolumeResponse()

    async def NodeUnstageVolume(self, request: pb.NodeUnstageVolumeRequest) -> pb.NodeUnstageVolumeResponse:
        """End the staging of a volume.

        A volume that does not exist is not staged, and the specification requires OK for it. Otherwise a
        retry after the removal of the volume would never succeed.
        """
        csi_requests.required(request, "volume_id", "staging_target_path")
        staging = csi_requests.place_of(request, "staging_target_path")
        async with self._turn(request.volume_id):
            for holder in await self._staged(request.volume_id, staging):
                try:
                    await self._volumes.unstage(request.volume_id, holder)
                except InUse as error:
                    raise precondition(str(error)) from None
        return pb.NodeUnstageVolumeResponse()

    # -- publishing ------------------------------------------------------------------------------------------------------

    async def NodePublishVolume(self, request: pb.NodePublishVolumeRequest) -> pb.NodePublishVolumeResponse:
        """Publish a staged volume. The access mode decides on a second place (second table, spec.md)."""
        csi_requests.required(request, "volume_id", "target_path")
        name, target = request.volume_id, csi_requests.place_of(request, "target_path")
        if request.volume_context.get(csi_requests.EPHEMERAL) == "true":
            raise invalid(
                "volumes that are written into a pod (csi: in its volumes) are not supported: they would end with "
                "the pod; use a claim (persistentVolumeClaim, or ephemeral with a volumeClaimTemplate)"
            )
        use = self._use(request)
        if not request.staging_target_path:
            raise precondition("staging_target_path is missing; stage the volume first, and say where")
        staging, read_only = (
            csi_requests.place_of(request, "staging_target_path"),
            use.read_only or request.readonly,
        )
        async with self._turn(name):
            published = await self._volumes.publications(name)
            if target in published:
                holder, there_read_only = published[target]
                if (use_of(holder), there_read_only) != (use, read_only):
                    access = "read-only" if there_read_only else "writable"
                    raise CsiRefusal(
                        StatusCode.ALREADY_EXISTS,
                        f"the volume {name} is published at {target} already, as "
                        f"{use_of(holder)}, {access}; unpublish it first",
                    )
                await self._volumes.publish(name, holder, Path(target), there_read_only)
                return pb.NodePublishVolumeResponse()
            volume = await self._volumes.get(name)
            staged = await self._staged(name, staging)
            if not staged:
                raise precondition(f"the volume {name} is not staged at {staging}; stage it there first")
            if use_of(staged[0]) != use:
                raise precondition(
                    f"the volume {name} is staged as {use_of(staged[0])} and cannot be published as {use}"
                )
            if published and (use.once or any(use_of(holder).once for holder, _ in published.values())):
                raise precondition(
                    f"the volume {name} is published at {next(iter(published))} already, and {use} admits one "
                    "pod only; wait until that one has ended"
                )
            if volume.sealed and not read_only:
                raise precondition(
                    f"the volume {name} is sealed and cannot be written; mount it with readOnly: true"
                )
            await self._volumes.publish(name, staged[0], Path(target), read_only)
        return pb.NodePublishVolumeResponse()

    async def NodeUnpublishVolume(
        self, request: pb.NodeUnpublishVolumeRequest
    ) -> pb.NodeUnpublishVolumeResponse:
        """Remove the published bind. NOT_FOUND: the volume does not exist and nothing was there to remove.

        A pool that does not answer is no error, so it does not delay the end of a pod.
        """
        csi_requests.required(request, "volume_id", "target_path")
        target = csi_requests.place_of(request, "target_path")
        async with self._turn(request.volume_id):
            there = await self._volumes.publication(Path(target))
            if there is not None and there != request.volume_id:
                return await self._nothing_there(request.volume_id)  # by now another volume's place
            was_there = there is not None or await asyncio.to_thread(_is_named, target)
            await self._volumes.unpublish(Path(target))
            return (
                pb.NodeUnpublishVolumeResponse()
                if was_there
                else await self._nothing_there(request.volume_id)
            )

    async def _nothing_there(self, name: str) -> pb.NodeUnpublishVolumeResponse:
        try:
            await self._volumes.get(name)
        except Unavailable:
            pass
        return pb.NodeUnpublishVolumeResponse()

    # -- statistics ----------------------------------------------------------------------------------------------------

    async def NodeGetVolumeStats(
        self, request: pb.NodeGetVolumeStatsRequest
    ) -> pb.NodeGetVolumeStatsResponse:
        """Return use and condition of the volume.

        A pool that does not answer is an abnormal condition and no error: the operator wants to see it then.
        """
        csi_requests.required(request, "volume_id", "volume_path")
        path = csi_requests.place_of(request, "volume_path")
        try:
            usage = _usage(await self._volumes.stats(request.volume_id))
            condition = await self._volumes.condition(request.volume_id)
            health = pb.VolumeCondition(abnormal=condition.abnormal, message=condition.text)
        except Unavailable as error:
            usage, health = (
                [],
                pb.VolumeCondition(abnormal=True, message=f"the pool does not answer: {error}"),
            )
        if path not in await self._volumes.publications(request.volume_id) and not await self._staged(
            request.volume_id, path
        ):
            raise NotFound(
                f"the volume {request.volume_id} is neither staged nor published at {path} on this node"
            )
        return pb.NodeGetVolumeStatsResponse(usage=usage, volume_condition=health)

    async def NodeGetCapabilities(
        self, _request: pb.NodeGetCapabilitiesRequest
    ) -> pb.NodeGetCapabilitiesResponse:
        return pb.NodeGetCapabilitiesResponse(
            capabilities=[pb.NodeServiceCapability(rpc=_Rpc(type=kind)) for kind in CAPABILITIES]
        )

    async def NodeGetInfo(self, _request: pb.NodeGetInfoRequest) -> pb.NodeGetInfoResponse:
        return pb.NodeGetInfoResponse(
            node_id=self._volumes.node, accessible_topology=csi_requests.topology_of(self._pool)
        )

    # -- steps -----------------------------------------------------------------------------------------------------------

    @staticmethod
    def _use(request: pb.NodeStageVolumeRequest | pb.NodePublishVolumeRequest) -> RequestedAccess:
        if not request.HasField("volume_capability"):
            raise invalid("volume_capability is missing; say how the volume is to be used")
        use = csi_requests.read_use(request.volume_capability)
        if objection := csi_requests.objection(request.volume_capability):
            raise precondition(objection)
        return use

    async def _staged(self, name: str, staging_path: str) -> list[str]:
        """Return the holders that staged the volume at this path: one at most."""
        digest = holder_of(RequestedAccess(Mode.UNKNOWN, False), staging_path).rpartition("/")[2]
        return [
            holder
            for holder in await self._volumes.holders(name)
            if holder.startswith(FACE) and holder.endswith(f"/{digest}")
        ]

    def _turn(self, name: str) -> asyncio.Lock:
        lock = self._turns.get(name)
        if lock is None:
            self._turns[name] = lock = asyncio.Lock()
        return lock


def _is_named(target: str) -> bool:
    """Return whether `target` exists, by listing its parent: access to a mount at `target` may hang."""
    try:
        return os.path.basename(target) in os.listdir(os.path.dirname(target))
    except OSError:
        return False


def _usage(stats: Stats) -> list[pb.VolumeUsage]:
    usage = [
        pb.VolumeUsage(
            unit=pb.VolumeUsage.BYTES,
            total=stats.bytes_total,
            used=stats.bytes_used,
            available=stats.bytes_available,
        )
    ]
    if stats.files_total:
        usage.append(
            pb.VolumeUsage(
                unit=pb.VolumeUsage.INODES,
                total=stats.files_total,
                used=stats.files_used,
                available=stats.files_available,
            )
        )
    else:
        usage.append(pb.VolumeUsage(unit=pb.VolumeUsage.INODES, used=stats.files_used))
    return usage
