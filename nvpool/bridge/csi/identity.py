"""Identity service of CSI: name, version and capabilities of the driver, the same on every node.

bridge/csi/server calls it.
"""

from __future__ import annotations

from google.protobuf.wrappers_pb2 import BoolValue

from nvpool.bridge.csi.errors import precondition
from nvpool.bridge.v1 import csi_pb2 as pb
from nvpool.core.version import VERSION

DRIVER = "csi.nvpool.io"
_CAP_SYS_ADMIN = 21
_Service = pb.PluginCapability.Service
_Expansion = pb.PluginCapability.VolumeExpansion
SERVICES = (_Service.CONTROLLER_SERVICE, _Service.VOLUME_ACCESSIBILITY_CONSTRAINTS)


def may_mount(status: str = "/proc/self/status") -> bool:
    """Return whether this process has CAP_SYS_ADMIN, which bind mounts need (capabilities(7))."""
    with open(status) as file:
        effective = next((line.split()[1] for line in file if line.startswith("CapEff:")), "0")
    return bool(int(effective, 16) >> _CAP_SYS_ADMIN & 1)


class CsiIdentity:
    def __init__(self, *, node: bool) -> None:
        self._node = node

    async def GetPluginInfo(self, _request: pb.GetPluginInfoRequest) -> pb.GetPluginInfoResponse:
        return pb.GetPluginInfoResponse(name=DRIVER, vendor_version=VERSION)

    async def GetPluginCapabilities(
        self, _request: pb.GetPluginCapabilitiesRequest
    ) -> pb.GetPluginCapabilitiesResponse:
        can = [pb.PluginCapability(service=_Service(type=kind)) for kind in SERVICES]
        can.append(pb.PluginCapability(volume_expansion=_Expansion(type=_Expansion.ONLINE)))
        return pb.GetPluginCapabilitiesResponse(capabilities=can)

    async def Probe(self, _request: pb.ProbeRequest) -> pb.ProbeResponse:
        """Report whether the plugin can work. FAILED_PRECONDITION: only a change by an operator can help.

        A pool that does not answer is no failure here: the orchestrator would restart the plugin in vain,
        with ever longer pauses, and the plugin would miss the return of the pool.
        """
        if self._node and not may_mount():
            raise precondition(
                "the node plugin may not mount anything: it needs CAP_SYS_ADMIN (securityContext: privileged)"
            )
        return pb.ProbeResponse(ready=BoolValue(value=True))
