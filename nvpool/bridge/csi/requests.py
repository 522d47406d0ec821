"""Parsing of CSI requests: capabilities, sizes, parameters, places.

The services of bridge/csi use these pure functions without I/O. Names and paths inside a volume are not
validated here but in bridge/volumes.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from grpc import StatusCode

from nvpool.bridge.csi.errors import CsiRefusal, invalid
from nvpool.bridge.request_validation import Options, parse_options, shown
from nvpool.bridge.v1 import csi_pb2 as pb
from nvpool.core.units import format_bytes

TOPOLOGY_KEY = "nvpool.io/pool"
"""Label of nodes that mount the pool; the value is the name of the pool."""
VOLUME_BYTES_MAX = (1 << 63) - 1
_FOREIGN = ("csi.storage.k8s.io/", "storage.kubernetes.io/")
"""Prefixes of keys that Kubernetes and its sidecars add to the maps of a request."""
EPHEMERAL = "csi.storage.k8s.io/ephemeral"
_FS_TYPES = ("", "nvpool")
_MOUNT_FLAGS = ("ro", "rw", "nosuid", "nodev")
"""nosuid and nodev hold for every volume, with or without the option."""

Mode = pb.VolumeCapability.AccessMode.Mode
READERS = (Mode.SINGLE_NODE_READER_ONLY, Mode.MULTI_NODE_READER_ONLY)
ONCE = (Mode.SINGLE_NODE_WRITER, Mode.SINGLE_NODE_READER_ONLY, Mode.SINGLE_NODE_SINGLE_WRITER)
"""Modes in which a volume is published at one place of a node only."""
SUPPORTED = (
    *READERS,
    Mode.SINGLE_NODE_WRITER,
    Mode.MULTI_NODE_MULTI_WRITER,
    Mode.SINGLE_NODE_SINGLE_WRITER,
    Mode.SINGLE_NODE_MULTI_WRITER,
)
"""Not MULTI_NODE_SINGLE_WRITER: the bridge does not enforce that only one node writes."""


class RequestedAccess(NamedTuple):
    """Requested use of a volume."""

    mode: int
    read_only: bool

    @property
    def once(self) -> bool:
        return self.mode in ONCE

    def __str__(self) -> str:
        return f"{Mode.Name(self.mode)}{' (ro)' if self.read_only and self.mode not in READERS else ''}"


def read_use(capability: pb.VolumeCapability, what: str = "volume_capability") -> RequestedAccess:
    """Parse a capability. INVALID_ARGUMENT: it is incomplete. `objection` checks whether it is supported."""
    if capability.WhichOneof("access_type") is None:
        raise invalid(f"{what} has no access type; set mount")
    if not capability.HasField("access_mode") or capability.access_mode.mode == Mode.UNKNOWN:
        raise invalid(f"{what} has no access mode; set one")
    mode = capability.access_mode.mode
    return RequestedAccess(mode, mode in READERS or "ro" in capability.mount.mount_flags)


def objection(capability: pb.VolumeCapability) -> str:
    """Return why no nvpool volume supports the capability; empty if volumes do."""
    if capability.HasField("block"):
        return "volumes of nvpool are file systems and no block devices; use volumeMode: Filesystem"
    if capability.access_mode.mode not in SUPPORTED:
        known = dict(Mode.items())
        wanted = next(
            (name for name, mode in known.items() if mode == capability.access_mode.mode), "the access mode"
        )
        return f"{wanted} is not supported; these are: {', '.join(Mode.Name(mode) for mode in SUPPORTED)}"
    if capability.mount.fs_type not in _FS_TYPES:
        return f"{shown(capability.mount.fs_type)} is not a file system of nvpool; leave fs_type empty"
    if unknown := [flag for flag in capability.mount.mount_flags if flag not in _MOUNT_FLAGS]:
        return f"there is no mount option {shown(unknown[0])}; a volume takes: {', '.join(_MOUNT_FLAGS)}"
    if {"ro", "rw"} <= set(capability.mount.mount_flags):
        return "the mount options ro and rw exclude one another"
    if capability.mount.volume_mount_group:
        return "volume_mount_group is not supported; the orchestrator gives the files to the group by itself (fsGroup)"
    return ""


def read_uses(capabilities: Iterable[pb.VolumeCapability]) -> list[RequestedAccess]:
    """Parse capabilities. INVALID_ARGUMENT: the list is empty, or one of them is incomplete."""
    uses = [read_use(capability, "one of volume_capabilities") for capability in capabilities]
    if not uses:
        raise invalid("volume_capabilities is empty; say how the volume is to be used")
    return uses


def first_objection(capabilities: Iterable[pb.VolumeCapability], *, sealed: bool = False) -> str:
    """Return the first objection to use a (sealed) volume with these capabilities; empty if there is none."""
    for capability in capabilities:
        if found := objection(capability):
            return found
        if sealed and not read_use(capability).read_only:
            return "the volume is sealed and cannot be written; use a read-only access mode (ReadOnlyMany)"
    return ""


class SizeRange(NamedTuple):
    """Range of sizes in bytes; 0 means that the bound is not given."""

    least: int
    most: int

    @property
    def wanted(self) -> int:
        """Size of a new volume."""
        return self.least or self.most

    def admits(self, bytes_max: int) -> bool:
        """Return whether a volume with quota `bytes_max` matches the range; 0 is a volume without a limit."""
        if not bytes_max:
            return not self.least and not self.most
        return self.least <= bytes_max and (not self.most or bytes_max <= self.most)


def read_size(capacity: pb.CapacityRange) -> SizeRange:
    """Parse a range. INVALID_ARGUMENT: a bound is negative. OUT_OF_RANGE: the range is empty."""
    least, most = capacity.required_bytes, capacity.limit_bytes
    if least < 0 or most < 0:
        raise invalid(f"a size is never below 0: required_bytes is {least}, limit_bytes {most}")
    if most and most < least:
        raise CsiRefusal(
            StatusCode.OUT_OF_RANGE,
            f"no size is {format_bytes(least)} at least and {format_bytes(most)} at most",
        )
    return SizeRange(least, most)


def read_parameters(parameters: Mapping[str, str]) -> Options:
    """Parse the parameters of a storage class: files, replicas, sealed, subpath.

    The size comes from the claim, so the parameter size is INVALID_ARGUMENT. InvalidRequest: of the others.
    """
    ours = {key: value for key, value in parameters.items() if not key.startswith(_FOREIGN)}
    if "size" in ours:
        raise invalid("the parameter size is not taken: a volume is as large as its claim says; leave it out")
    return parse_options(ours)


def read_context(context: Mapping[str, str]) -> str:
    """Return the subpath in the volume_context of a volume that an operator defined by hand."""
    ours = {key: value for key, value in context.items() if not key.startswith(_FOREIGN)}
    if unknown := sorted(set(ours) - {"subpath"}):
        raise invalid(f"volume_context has {shown(unknown[0])}, which is not ours; it takes: subpath")
    return ours.get("subpath", "")


def topology_of(pool: str) -> pb.Topology:
    return pb.Topology(segments={TOPOLOGY_KEY: pool})


def reachable(places: Iterable[pb.Topology], pool: str) -> bool:
    """Return whether the pool is mounted at one of the places; a place must have exactly its one segment."""
    return any(dict(place.segments) == {TOPOLOGY_KEY: pool} for place in places)


def required(request: object, *names: str) -> None:
    """Raise INVALID_ARGUMENT for the first of these fields that is empty."""
    for name in names:
        if not getattr(request, name):
            raise invalid(f"{name} is missing; set it")


def place_of(request: object, what: str) -> str:
    """Return the normalized path in the field `what`. INVALID_ARGUMENT: it is not an absolute path."""
    path = getattr(request, what)
    if not path.startswith("/") or "\0" in path:
        raise invalid(f"{what} is {shown(path)}, and shall be an absolute path")
    return os.path.normpath(path)
