"""Controller service of CSI: create, expand, list and delete volumes. Needs the pool but no mount.

bridge/csi/server calls it. The service is stateless, so several may run at a time. The id of a volume is its
name. Each call may be repeated. Status codes are those of the tables of the specification (spec.md,
"Controller Service RPC").
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from google.protobuf.wrappers_pb2 import Int64Value
from grpc import StatusCode

from nvpool.bridge.csi import requests as csi_requests
from nvpool.bridge.csi.errors import CsiRefusal, invalid, precondition
from nvpool.bridge.csi.requests import VOLUME_BYTES_MAX, SizeRange
from nvpool.bridge.request_validation import Options, checked_name
from nvpool.bridge.v1 import csi_pb2 as pb
from nvpool.core.errors import AlreadyExists, InUse, Refused, StaleCursor
from nvpool.core.units import format_bytes

if TYPE_CHECKING:
    from nvpool.bridge.volumes import BridgeVolumes
    from nvpool.sdk.volumes import Volume

_Rpc = pb.ControllerServiceCapability.RPC
CAPABILITIES = (
    _Rpc.CREATE_DELETE_VOLUME,
    _Rpc.LIST_VOLUMES,
    _Rpc.GET_CAPACITY,
    _Rpc.EXPAND_VOLUME,
    _Rpc.VOLUME_CONDITION,
    _Rpc.GET_VOLUME,
    _Rpc.SINGLE_NODE_MULTI_WRITER,
)
PAGE_ENTRIES_MAX = 5000
"""More would not fit into the 4 MiB that gRPC clients accept by default; next_token leads to the rest."""
_TOKEN = "after:"


class Controller:
    def __init__(self, volumes: BridgeVolumes, pool: str) -> None:
        self._volumes, self._pool = volumes, pool

    async def CreateVolume(self, request: pb.CreateVolumeRequest) -> pb.CreateVolumeResponse:
        csi_requests.required(request, "name")
        csi_requests.read_uses(request.volume_capabilities)
        if objection := csi_requests.first_objection(request.volume_capabilities):
            raise invalid(objection)
        if request.HasField("volume_content_source"):
            raise invalid("a volume cannot be made from another one or from a snapshot; leave the source out")
        if request.mutable_parameters:
            raise invalid("mutable_parameters are not supported; use parameters")
        size, options = (
            csi_requests.read_size(request.capacity_range),
            csi_requests.read_parameters(request.parameters),
        )
        if options.sealed and csi_requests.first_objection(request.volume_capabilities, sealed=True):
            raise invalid(
                "a volume that is sealed from the beginning cannot be written; leave the parameter sealed out, and "
                f"seal it when it is filled: nvpool volume seal POOL {request.name}"
            )
        await self._check_places(request)
        volume = await self._made(request.name, size, options)
        if objection := csi_requests.first_objection(request.volume_capabilities, sealed=volume.sealed):
            raise AlreadyExists(f"the volume {volume.name} is there: {objection}")
        return pb.CreateVolumeResponse(volume=self._volume(volume))

    async def _check_places(self, request: pb.CreateVolumeRequest) -> None:
        if not request.HasField("accessibility_requirements"):
            return
        asked = request.accessibility_requirements
        if not asked.requisite and not asked.preferred:
            raise invalid("accessibility_requirements names no place; leave it out, or name one")
        if asked.requisite and not csi_requests.reachable(asked.requisite, self._pool):
            raise CsiRefusal(
                StatusCode.RESOURCE_EXHAUSTED,
                "no place of accessibility_requirements is one of this pool's: its "
                f"volumes are where {csi_requests.TOPOLOGY_KEY} is {self._pool}",
            )

    async def _made(self, name: str, size: SizeRange, options: Options) -> Volume:
        """Create the volume, or accept an existing one of another size within the range of the request."""
        try:
            return await self._volumes.create(name, options._replace(bytes_max=size.wanted))
        except AlreadyExists:
            found = await self._volumes.get(name)
            if found.bytes_max == size.wanted or not size.admits(found.bytes_max):
                raise
        return await self._volumes.create(name, options)

    async def DeleteVolume(self, request: pb.DeleteVolumeRequest) -> pb.DeleteVolumeResponse:
        """Delete the volume. A name that no volume can have counts as a volume that does not exist: OK."""
        csi_requests.required(request, "volume_id")
        try:
            checked_name(request.volume_id)
        except Refused:
            return pb.DeleteVolumeResponse()
        try:
            await self._volumes.remove(request.volume_id)
        except InUse as error:
            raise precondition(str(error)) from None
        return pb.DeleteVolumeResponse()

    async def ValidateVolumeCapabilities(
        self, request: pb.ValidateVolumeCapabilitiesRequest
    ) -> pb.ValidateVolumeCapabilitiesResponse:
        csi_requests.required(request, "volume_id")
        csi_requests.read_uses(request.volume_capabilities)
        volume = await self._volumes.get(request.volume_id)
        why = csi_requests.first_objection(request.volume_capabilities, sealed=volume.sealed)
        why = why or ("mutable_parameters are not supported" if request.mutable_parameters else "")
        try:
            why = why or _differs(volume, csi_requests.read_parameters(request.parameters))
            csi_requests.read_context(request.volume_context)
        except (Refused, CsiRefusal) as error:
            why = why or str(error)
        if why:
            return pb.ValidateVolumeCapabilitiesResponse(message=why)
        confirmed = pb.ValidateVolumeCapabilitiesResponse.Confirmed(
            volume_context=request.volume_context,
            volume_capabilities=request.volume_capabilities,
            parameters=request.parameters,
        )
        return pb.ValidateVolumeCapabilitiesResponse(confirmed=confirmed)

    async def ListVolumes(self, request: pb.ListVolumesRequest) -> pb.ListVolumesResponse:
        """List the volumes, sorted by name.

        A token is the last name of its page, so it stays valid when volumes are created or deleted.
        """
        if request.max_entries < 0:
            raise invalid(f"max_entries is {request.max_entries}, and is never below 0")
        after = _after(request.starting_token)
        rest = [volume for volume in await self._volumes.list() if volume.name > after]
        page = rest[: min(request.max_entries or PAGE_ENTRIES_MAX, PAGE_ENTRIES_MAX)]
        left = await self._volumes.capacity() if page else 0
        entries = [
            pb.ListVolumesResponse.Entry(
                volume=self._volume(volume),
                status=pb.ListVolumesResponse.VolumeStatus(volume_condition=_condition(volume, left)),
            )
            for volume in page
        ]
        token = f"{_TOKEN}{page[-1].name}" if len(page) < len(rest) else ""
        return pb.ListVolumesResponse(entries=entries, next_token=token)

    async def GetCapacity(self, request: pb.GetCapacityRequest) -> pb.GetCapacityResponse:
        """Return the free bytes of the pool; 0 if no volume can match the request.

        The size of a volume is a limit and reserves nothing, so a claim may be larger than the free space.
        """
        for capability in request.volume_capabilities:
            csi_requests.read_use(capability, "one of volume_capabilities")
        options = csi_requests.read_parameters(request.parameters)
        elsewhere = request.HasField("accessible_topology") and not csi_requests.reachable(
            [request.accessible_topology], self._pool
        )
        if elsewhere or csi_requests.first_objection(
            request.volume_capabilities, sealed=bool(options.sealed)
        ):
            return pb.GetCapacityResponse(available_capacity=0)
        return pb.GetCapacityResponse(
            available_capacity=await self._volumes.capacity(),
            maximum_volume_size=Int64Value(value=VOLUME_BYTES_MAX),
        )

    async def ControllerGetCapabilities(
        self, _request: pb.ControllerGetCapabilitiesRequest
    ) -> pb.ControllerGetCapabilitiesResponse:
        return pb.ControllerGetCapabilitiesResponse(
            capabilities=[pb.ControllerServiceCapability(rpc=_Rpc(type=kind)) for kind in CAPABILITIES]
        )

    async def ControllerExpandVolume(
        self, request: pb.ControllerExpandVolumeRequest
    ) -> pb.ControllerExpandVolumeResponse:
        """Raise the size of a volume; effective immediately on all nodes, which have nothing to do.

        A volume without a limit stays without one.
        """
        csi_requests.required(request, "volume_id")
        if not request.HasField("capacity_range") or request.capacity_range == pb.CapacityRange():
            raise invalid("capacity_range is missing; set required_bytes")
        size = csi_requests.read_size(request.capacity_range)
        if request.HasField("volume_capability"):
            csi_requests.read_use(request.volume_capability)
            if objection := csi_requests.objection(request.volume_capability):
                raise invalid(objection)
        volume = await self._volumes.get(request.volume_id)
        if size.most and (not volume.bytes_max or volume.bytes_max > size.most):
            has = format_bytes(volume.bytes_max) if volume.bytes_max else "no bound"
            raise CsiRefusal(
                StatusCode.OUT_OF_RANGE,
                f"the volume {volume.name} has {has} already, and volumes do not shrink; "
                f"ask for more than {format_bytes(size.most)}",
            )
        if size.least:
            volume = await self._volumes.expand(request.volume_id, size.least)
        return pb.ControllerExpandVolumeResponse(
            capacity_bytes=volume.bytes_max or size.least, node_expansion_required=False
        )

    async def ControllerGetVolume(
        self, request: pb.ControllerGetVolumeRequest
    ) -> pb.ControllerGetVolumeResponse:
        csi_requests.required(request, "volume_id")
        volume = await self._volumes.get(request.volume_id)
        condition = _condition(volume, await self._volumes.capacity())
        return pb.ControllerGetVolumeResponse(
            volume=self._volume(volume),
            status=pb.ControllerGetVolumeResponse.VolumeStatus(volume_condition=condition),
        )

    def _volume(self, volume: Volume) -> pb.Volume:
        return pb.Volume(
            volume_id=volume.name,
            capacity_bytes=volume.bytes_max,
            accessible_topology=[csi_requests.topology_of(self._pool)],
        )


def _after(token: str) -> str:
    """Return the name in a token. StaleCursor (ABORTED): the token is not ours."""
    if not token:
        return ""
    try:
        if not token.startswith(_TOKEN):
            raise StaleCursor
        return checked_name(token.removeprefix(_TOKEN))
    except (StaleCursor, Refused):
        raise StaleCursor(
            "starting_token is none of ours; list from the beginning, with an empty one"
        ) from None


def _condition(volume: Volume, left: int) -> pb.VolumeCondition:
    """Return the condition of the volume in the pool. NodeGetVolumeStats reports the condition on a node."""
    purging = f" and purge its trash (nvpool trash purge POOL {volume.name})" if volume.trash_s else ""
    if volume.bytes_max and volume.bytes_used >= volume.bytes_max:
        return pb.VolumeCondition(
            abnormal=True,
            message=f"all of its {format_bytes(volume.bytes_max)} are used; remove files"
            f"{purging}, or make the claim larger",
        )
    if volume.files_max and volume.files_used >= volume.files_max:
        return pb.VolumeCondition(
            abnormal=True,
            message=f"all of its {volume.files_max} files are there; remove some"
            f"{purging}, or: nvpool volume resize POOL {volume.name} "
            "--files COUNT",
        )
    if left <= 0:
        return pb.VolumeCondition(abnormal=True, message="the pool is full; add a drive, or remove files")
    return pb.VolumeCondition(abnormal=False, message="the pool serves it")


def _differs(volume: Volume, wanted: Options) -> str:
    if wanted.files_max and wanted.files_max != volume.files_max:
        return f"the volume takes {volume.files_max or 'any number of'} files"
    if wanted.replicas and wanted.replicas != volume.replicas:
        return f"the volume has {volume.replicas} replicas"
    if wanted.sealed is not None and wanted.sealed != volume.sealed:
        return f"the volume is {'' if volume.sealed else 'not '}sealed"
    return ""
