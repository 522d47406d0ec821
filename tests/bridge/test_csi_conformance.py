"""CSI conformance: every row of the specification's error tables, every call twice, and the life of a volume.

Over volumes in memory, and over a real pool with its mount and binds. `make csi-report` prints the table.
"""

from __future__ import annotations

import asyncio
import os
import tempfile
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from nvpool.bridge.bind_helper import unbind
from nvpool.bridge.pool_mount import PoolMount
from nvpool.bridge.v1 import csi_pb2 as pb
from nvpool.bridge.volumes import BridgeVolumes
from nvpool.core.units import GIB, MIB
from nvpool.host.mountinfo import mounts_below
from nvpool.sdk.async_filesystem import AsyncFileSystem
from nvpool.testing.env.bridge import RealBridge
from nvpool.testing.env.pool import RealPool
from nvpool.testing.fakes.bridge_volumes import MemoryVolumes
from tests.bridge.csi_caller import POOL, Caller, block, places, plugin, size, use

SIZE = 64 * MIB


class Row(NamedTuple):
    """A wrong or unusual call: `fields` is a function of the folder in which a test may publish."""

    call: str
    condition: str
    code: str
    fields: Callable[[Path], dict[str, Any]]
    says: str = ""
    """Words that the error message has to contain."""


def row(call: str, condition: str, code: str, says: str = "", **fields: Any) -> Row:
    return Row(
        call,
        condition,
        code,
        lambda place: {name: value(place) if callable(value) else value for name, value in fields.items()},
        says,
    )


def at(name: str) -> Callable[[Path], str]:
    return lambda place: str(place / name)


def create(condition: str, code: str, says: str = "", **fields: Any) -> Row:
    return row(
        "CreateVolume", condition, code, says, **{"name": "new", "volume_capabilities": [use()], **fields}
    )


def stage(condition: str, code: str, says: str = "", **fields: Any) -> Row:
    return row(
        "NodeStageVolume",
        condition,
        code,
        says,
        **{"volume_id": "there", "staging_target_path": at("stage"), "volume_capability": use(), **fields},
    )


def publish(condition: str, code: str, says: str = "", **fields: Any) -> Row:
    return row(
        "NodePublishVolume",
        condition,
        code,
        says,
        **{
            "volume_id": "used",
            "staging_target_path": at("stage-used"),
            "target_path": at("other"),
            "volume_capability": use(),
            **fields,
        },
    )


LONG = "x" * 10_000
ROWS = [
    # -- Error Scheme, for each call that has required fields
    create("Missing required field: name", "INVALID_ARGUMENT", "name", name=""),
    create(
        "Missing required field: volume_capabilities",
        "INVALID_ARGUMENT",
        "volume_capabilities",
        volume_capabilities=[],
    ),
    create(
        "Missing required field: access_type",
        "INVALID_ARGUMENT",
        "access type",
        volume_capabilities=[pb.VolumeCapability(access_mode=use().access_mode)],
    ),
    create(
        "Missing required field: access_mode",
        "INVALID_ARGUMENT",
        "access mode",
        volume_capabilities=[pb.VolumeCapability(mount=pb.VolumeCapability.MountVolume())],
    ),
    create("Invalid field: name leads elsewhere", "INVALID_ARGUMENT", "name", name="../new"),
    create("Invalid field: name is absolute", "INVALID_ARGUMENT", "name", name="/etc"),
    create("Invalid field: name with NUL", "INVALID_ARGUMENT", "name", name="a\0b"),
    create("Invalid field: name of 10,000 characters", "INVALID_ARGUMENT", "name", name=LONG),
    create("Invalid field: name in another Unicode form", "INVALID_ARGUMENT", "ASCII", name="é"),
    create(
        "Unsupported field: block volume", "INVALID_ARGUMENT", "block", volume_capabilities=[use(), block()]
    ),
    create(
        "Unsupported field: MULTI_NODE_SINGLE_WRITER",
        "INVALID_ARGUMENT",
        "MULTI_NODE_SINGLE_WRITER",
        volume_capabilities=[use("MULTI_NODE_SINGLE_WRITER")],
    ),
    create(
        "Unsupported field: fs_type", "INVALID_ARGUMENT", "ext4", volume_capabilities=[use(fs_type="ext4")]
    ),
    create(
        "Unsupported field: mount option",
        "INVALID_ARGUMENT",
        "suid",
        volume_capabilities=[use(flags=("suid",))],
    ),
    create(
        "Unsupported field: ro and rw",
        "INVALID_ARGUMENT",
        "exclude",
        volume_capabilities=[use(flags=("ro", "rw"))],
    ),
    create(
        "Unsupported field: mutable_parameters",
        "INVALID_ARGUMENT",
        "mutable",
        mutable_parameters={"files": "5"},
    ),
    create("Invalid field: unknown parameter", "INVALID_ARGUMENT", "colour", parameters={"colour": "red"}),
    create("Invalid field: parameter files", "INVALID_ARGUMENT", "files", parameters={"files": "many"}),
    create("Invalid field: parameter replicas", "INVALID_ARGUMENT", "replicas", parameters={"replicas": "0"}),
    create("Invalid field: parameter size", "INVALID_ARGUMENT", "claim", parameters={"size": "10G"}),
    create("Invalid field: parameter subpath", "INVALID_ARGUMENT", "..", parameters={"subpath": "../x"}),
    create("Invalid field: sealed and writable", "INVALID_ARGUMENT", "sealed", parameters={"sealed": "true"}),
    create(
        "Invalid field: topology without a place",
        "INVALID_ARGUMENT",
        "place",
        accessibility_requirements=pb.TopologyRequirement(),
    ),
    create("Invalid field: size below 0", "INVALID_ARGUMENT", "0", capacity_range=size(-1)),
    # -- CreateVolume
    create(
        "Source incompatible or not supported",
        "INVALID_ARGUMENT",
        "source",
        volume_content_source=pb.VolumeContentSource(
            snapshot=pb.VolumeContentSource.SnapshotSource(snapshot_id="s")
        ),
    ),
    create(
        "Source incompatible or not supported (volume)",
        "INVALID_ARGUMENT",
        "source",
        volume_content_source=pb.VolumeContentSource(
            volume=pb.VolumeContentSource.VolumeSource(volume_id="there")
        ),
    ),
    create(
        "Volume already exists but is incompatible: larger wanted",
        "ALREADY_EXISTS",
        "there",
        name="there",
        capacity_range=size(2 * SIZE),
    ),
    create(
        "Volume already exists but is incompatible: smaller wanted",
        "ALREADY_EXISTS",
        "there",
        name="there",
        capacity_range=size(0, SIZE // 2),
    ),
    create(
        "Volume already exists but is incompatible: files",
        "ALREADY_EXISTS",
        "there",
        name="there",
        capacity_range=size(SIZE),
        parameters={"files": "7"},
    ),
    create("Volume already exists but is incompatible: sealed", "ALREADY_EXISTS", "sealed", name="sealed"),
    create(
        "Volume already exists but is incompatible: no bound",
        "ALREADY_EXISTS",
        "there",
        name="unbounded",
        capacity_range=size(SIZE),
    ),
    create(
        "Unable to provision in accessible_topology",
        "RESOURCE_EXHAUSTED",
        POOL,
        accessibility_requirements=places("pool-2"),
    ),
    create(
        "Unable to provision in accessible_topology: foreign key",
        "RESOURCE_EXHAUSTED",
        POOL,
        accessibility_requirements=places("z1", key="topology.kubernetes.io/zone"),
    ),
    create("Unsupported capacity_range", "OUT_OF_RANGE", "size", capacity_range=size(2 * GIB, GIB)),
    create("(compatible: within the range)", "OK", name="there", capacity_range=size(SIZE // 2, 2 * SIZE)),
    create("(compatible: no range)", "OK", name="there", parameters={"csi.storage.k8s.io/pvc/name": "claim"}),
    create(
        "(compatible: in this pool)", "OK", name="there", accessibility_requirements=places("pool-2", POOL)
    ),
    # -- DeleteVolume
    row("DeleteVolume", "Missing required field: volume_id", "INVALID_ARGUMENT", "volume_id"),
    row("DeleteVolume", "Volume in use", "FAILED_PRECONDITION", "used", volume_id="used"),
    row("DeleteVolume", "(no such volume)", "OK", volume_id="gone"),
    row("DeleteVolume", "(no volume can have the name)", "OK", volume_id="../there"),
    row("DeleteVolume", "(a name of 10,000 characters)", "OK", volume_id=LONG),
    # -- ValidateVolumeCapabilities
    row(
        "ValidateVolumeCapabilities",
        "Missing required field: volume_id",
        "INVALID_ARGUMENT",
        "volume_id",
        volume_capabilities=[use()],
    ),
    row(
        "ValidateVolumeCapabilities",
        "Missing required field: volume_capabilities",
        "INVALID_ARGUMENT",
        "volume_capabilities",
        volume_id="there",
    ),
    row(
        "ValidateVolumeCapabilities",
        "Volume does not exist",
        "NOT_FOUND",
        "gone",
        volume_id="gone",
        volume_capabilities=[use()],
    ),
    row(
        "ValidateVolumeCapabilities",
        "Invalid field: volume_id",
        "INVALID_ARGUMENT",
        "name",
        volume_id="../there",
        volume_capabilities=[use()],
    ),
    # -- ListVolumes
    row("ListVolumes", "Invalid starting_token", "ABORTED", "starting_token", starting_token="nonsense"),
    row(
        "ListVolumes",
        "Invalid starting_token: leads elsewhere",
        "ABORTED",
        "starting_token",
        starting_token="after:../x",
    ),
    row("ListVolumes", "Invalid field: max_entries", "INVALID_ARGUMENT", "max_entries", max_entries=-1),
    # -- ControllerGetVolume
    row("ControllerGetVolume", "Missing required field: volume_id", "INVALID_ARGUMENT", "volume_id"),
    row("ControllerGetVolume", "Volume does not exist", "NOT_FOUND", "gone", volume_id="gone"),
    # -- GetCapacity
    row(
        "GetCapacity", "Invalid field: parameter", "INVALID_ARGUMENT", "colour", parameters={"colour": "red"}
    ),
    row(
        "GetCapacity",
        "Missing required field: access_mode",
        "INVALID_ARGUMENT",
        "access mode",
        volume_capabilities=[pb.VolumeCapability(mount=pb.VolumeCapability.MountVolume())],
    ),
    # -- ControllerExpandVolume
    row(
        "ControllerExpandVolume",
        "Missing required field: volume_id",
        "INVALID_ARGUMENT",
        "volume_id",
        capacity_range=size(1),
    ),
    row(
        "ControllerExpandVolume",
        "Missing required field: capacity_range",
        "INVALID_ARGUMENT",
        "capacity_range",
        volume_id="there",
    ),
    row(
        "ControllerExpandVolume",
        "Exceeds capabilities",
        "INVALID_ARGUMENT",
        "block",
        volume_id="there",
        capacity_range=size(2 * SIZE),
        volume_capability=block(),
    ),
    row(
        "ControllerExpandVolume",
        "Volume does not exist",
        "NOT_FOUND",
        "gone",
        volume_id="gone",
        capacity_range=size(SIZE),
    ),
    row(
        "ControllerExpandVolume",
        "Unsupported capacity_range",
        "OUT_OF_RANGE",
        "size",
        volume_id="there",
        capacity_range=size(2 * GIB, GIB),
    ),
    row(
        "ControllerExpandVolume",
        "Unsupported capacity_range: shrinks",
        "OUT_OF_RANGE",
        "shrink",
        volume_id="there",
        capacity_range=size(0, SIZE // 2),
    ),
    row(
        "ControllerExpandVolume",
        "(Volume in use: is expanded ONLINE)",
        "OK",
        volume_id="used",
        capacity_range=size(SIZE),
    ),
    row(
        "ControllerExpandVolume", "(larger already)", "OK", volume_id="there", capacity_range=size(SIZE // 2)
    ),
    # -- NodeStageVolume
    stage("Missing required field: volume_id", "INVALID_ARGUMENT", "volume_id", volume_id=""),
    stage(
        "Missing required field: staging_target_path",
        "INVALID_ARGUMENT",
        "staging_target_path",
        staging_target_path="",
    ),
    stage(
        "Missing required field: volume_capability",
        "INVALID_ARGUMENT",
        "volume_capability",
        volume_capability=None,
    ),
    stage("Invalid field: staging_target_path", "INVALID_ARGUMENT", "absolute", staging_target_path="stage"),
    stage("Invalid field: volume_id", "INVALID_ARGUMENT", "name", volume_id="../there"),
    stage("Invalid field: volume_context", "INVALID_ARGUMENT", "colour", volume_context={"colour": "red"}),
    stage("Invalid field: subpath leads out", "INVALID_ARGUMENT", "..", volume_context={"subpath": "../x"}),
    stage("Volume does not exist", "NOT_FOUND", "gone", volume_id="gone"),
    stage(
        "Volume published but is incompatible",
        "ALREADY_EXISTS",
        "used",
        volume_id="used",
        staging_target_path=at("stage-used"),
        volume_capability=use("SINGLE_NODE_WRITER"),
    ),
    stage("Exceeds capabilities: block", "FAILED_PRECONDITION", "block", volume_capability=block()),
    stage(
        "Exceeds capabilities: access mode",
        "FAILED_PRECONDITION",
        "MULTI_NODE_SINGLE_WRITER",
        volume_capability=use("MULTI_NODE_SINGLE_WRITER"),
    ),
    # -- NodeUnstageVolume
    row(
        "NodeUnstageVolume",
        "Missing required field: volume_id",
        "INVALID_ARGUMENT",
        "volume_id",
        staging_target_path=at("stage"),
    ),
    row(
        "NodeUnstageVolume",
        "Missing required field: staging_target_path",
        "INVALID_ARGUMENT",
        "staging_target_path",
        volume_id="there",
    ),
    row(
        "NodeUnstageVolume",
        "(still published)",
        "FAILED_PRECONDITION",
        "published",
        volume_id="used",
        staging_target_path=at("stage-used"),
    ),
    row(
        "NodeUnstageVolume", "(not staged there)", "OK", volume_id="used", staging_target_path=at("elsewhere")
    ),
    row(
        "NodeUnstageVolume",
        "Volume does not exist (not staged: the text above the table wants OK)",
        "OK",
        volume_id="gone",
        staging_target_path=at("stage"),
    ),
    # -- NodePublishVolume
    publish("Missing required field: volume_id", "INVALID_ARGUMENT", "volume_id", volume_id=""),
    publish("Missing required field: target_path", "INVALID_ARGUMENT", "target_path", target_path=""),
    publish(
        "Missing required field: volume_capability",
        "INVALID_ARGUMENT",
        "volume_capability",
        volume_capability=None,
    ),
    publish("Invalid field: target_path", "INVALID_ARGUMENT", "absolute", target_path="target"),
    publish(
        "Unsupported field: ephemeral inline volume",
        "INVALID_ARGUMENT",
        "claim",
        staging_target_path="",
        volume_context={"csi.storage.k8s.io/ephemeral": "true"},
    ),
    publish("Volume does not exist", "NOT_FOUND", "gone", volume_id="gone"),
    publish(
        "Staging target path not set", "FAILED_PRECONDITION", "staging_target_path", staging_target_path=""
    ),
    publish("(not staged there)", "FAILED_PRECONDITION", "staged", staging_target_path=at("elsewhere")),
    publish("Exceeds capabilities: block", "FAILED_PRECONDITION", "block", volume_capability=block()),
    publish(
        "Exceeds capabilities: another than staged",
        "FAILED_PRECONDITION",
        "staged",
        volume_capability=use("SINGLE_NODE_MULTI_WRITER"),
    ),
    publish(
        "Exceeds capabilities: a sealed volume, writable",
        "FAILED_PRECONDITION",
        "readOnly",
        volume_id="sealed",
        staging_target_path=at("stage-sealed"),
    ),
    publish(
        "Volume published but is incompatible: readonly",
        "ALREADY_EXISTS",
        "published",
        target_path=at("target-used"),
        readonly=True,
    ),
    publish(
        "Volume published but is incompatible: capability",
        "ALREADY_EXISTS",
        "published",
        target_path=at("target-used"),
        volume_capability=use("SINGLE_NODE_MULTI_WRITER"),
    ),
    publish(
        "SINGLE_NODE_SINGLE_WRITER, T1!=T2",
        "FAILED_PRECONDITION",
        "one pod",
        volume_id="once",
        staging_target_path=at("stage-once"),
        volume_capability=use("SINGLE_NODE_SINGLE_WRITER"),
    ),
    publish(
        "SINGLE_NODE_SINGLE_WRITER, T1!=T2, P1!=P2",
        "FAILED_PRECONDITION",
        "one pod",
        volume_id="once",
        readonly=True,
        staging_target_path=at("stage-once"),
        volume_capability=use("SINGLE_NODE_SINGLE_WRITER"),
    ),
    publish(
        "SINGLE_NODE_SINGLE_WRITER, T1=T2, P1!=P2",
        "ALREADY_EXISTS",
        "published",
        volume_id="once",
        readonly=True,
        staging_target_path=at("stage-once"),
        target_path=at("target-once"),
        volume_capability=use("SINGLE_NODE_SINGLE_WRITER"),
    ),
    publish(
        "SINGLE_NODE_SINGLE_WRITER, T1=T2, P1=P2",
        "OK",
        volume_id="once",
        staging_target_path=at("stage-once"),
        target_path=at("target-once"),
        volume_capability=use("SINGLE_NODE_SINGLE_WRITER"),
    ),
    publish("MULTI_NODE_..., T1=T2, P1=P2", "OK", target_path=at("target-used")),
    publish("MULTI_NODE_..., T1!=T2, P1=P2", "OK", target_path=at("second")),
    publish("MULTI_NODE_..., T1!=T2, P1!=P2", "OK", target_path=at("third"), readonly=True),
    # -- NodeUnpublishVolume
    row(
        "NodeUnpublishVolume",
        "Missing required field: volume_id",
        "INVALID_ARGUMENT",
        "volume_id",
        target_path=at("target"),
    ),
    row(
        "NodeUnpublishVolume",
        "Missing required field: target_path",
        "INVALID_ARGUMENT",
        "target_path",
        volume_id="there",
    ),
    row(
        "NodeUnpublishVolume",
        "Invalid field: target_path",
        "INVALID_ARGUMENT",
        "absolute",
        volume_id="there",
        target_path="target",
    ),
    row(
        "NodeUnpublishVolume",
        "Volume does not exist",
        "NOT_FOUND",
        "gone",
        volume_id="gone",
        target_path=at("nowhere"),
    ),
    row("NodeUnpublishVolume", "(not published there)", "OK", volume_id="there", target_path=at("nowhere")),
    row(
        "NodeUnpublishVolume",
        "(another volume is published there: it stays)",
        "OK",
        volume_id="there",
        target_path=at("target-used"),
    ),
    # -- NodeGetVolumeStats
    row(
        "NodeGetVolumeStats",
        "Missing required field: volume_id",
        "INVALID_ARGUMENT",
        "volume_id",
        volume_path=at("target"),
    ),
    row(
        "NodeGetVolumeStats",
        "Missing required field: volume_path",
        "INVALID_ARGUMENT",
        "volume_path",
        volume_id="used",
    ),
    row(
        "NodeGetVolumeStats",
        "Volume does not exist",
        "NOT_FOUND",
        "gone",
        volume_id="gone",
        volume_path=at("target-used"),
    ),
    row(
        "NodeGetVolumeStats",
        "Volume does not exist on volume_path",
        "NOT_FOUND",
        "published",
        volume_id="there",
        volume_path=at("target-used"),
    ),
    row(
        "NodeGetVolumeStats", "(where it is published)", "OK", volume_id="used", volume_path=at("target-used")
    ),
    row("NodeGetVolumeStats", "(where it is staged)", "OK", volume_id="used", volume_path=at("stage-used")),
    # -- the rest: always answered
    row("GetPluginInfo", "(always)", "OK"),
    row("GetPluginCapabilities", "(always)", "OK"),
    row("Probe", "(healthy)", "OK"),
    row("ControllerGetCapabilities", "(always)", "OK"),
    row("NodeGetCapabilities", "(always)", "OK"),
    row("NodeGetInfo", "(always)", "OK"),
]
UNSERVED = [
    "Controller/ControllerPublishVolume",
    "Controller/ControllerUnpublishVolume",
    "Controller/ControllerModifyVolume",
    "Controller/CreateSnapshot",
    "Controller/DeleteSnapshot",
    "Controller/ListSnapshots",
    "Controller/GetSnapshot",
    "Node/NodeExpandVolume",
    "GroupController/GroupControllerGetCapabilities",
    "GroupController/CreateVolumeGroupSnapshot",
    "SnapshotMetadata/GetMetadataAllocated",
]


# -- volumes that the rows use ---------------------------------------------------------------------------------------------


@asynccontextmanager
async def over_memory(_place: Path) -> AsyncIterator[MemoryVolumes]:
    yield MemoryVolumes()


@asynccontextmanager
async def over_a_pool(place: Path) -> AsyncIterator[BridgeVolumes]:
    """Real daemons, a mount and binds; the bridge itself in this process."""
    with RealPool(place / "pool", sizes=(256 * MIB,)) as real:
        await asyncio.to_thread(real.make)
        await asyncio.to_thread(real.start)
        kept = RealBridge(real.path, place / "bridge", node="node-1")
        kept.place.mkdir()
        sdk = await AsyncFileSystem.connect(str(real.path), name="csi test")
        mount = PoolMount(str(real.path), sdk.client.pool_map.name, kept.mountpoint)

        async def restarted() -> BridgeVolumes:
            volumes = BridgeVolumes(
                sdk, mount.place, kept.place / "state", node="node-1", mounted=mount.ensure
            )
            await volumes.begin()
            volumes.restart_bridge = restarted  # type: ignore[attr-defined]
            return volumes

        try:
            yield await restarted()
        finally:
            for bound in mounts_below(place):
                if bound.root != Path("/"):
                    unbind(str(bound.point), "volumes")
            await sdk.close()
            await asyncio.to_thread(kept.__exit__)
            assert not mounts_below(place)


WHY_NOT = (
    "only root can mount" if os.geteuid() else "" if os.path.exists("/dev/fuse") else "there is no /dev/fuse"
)
WORLDS = {"memory": over_memory, "a real pool": over_a_pool}
worlds = pytest.mark.parametrize(
    "world",
    ["memory", pytest.param("a real pool", marks=pytest.mark.skipif(bool(WHY_NOT), reason=WHY_NOT or "-"))],
)


async def create_volumes(call: Caller, volumes: Any, place: Path) -> None:
    """Create the volumes that the rows use."""
    for name in ("there", "used", "once"):
        done = await call("CreateVolume", name=name, volume_capabilities=[use()], capacity_range=size(SIZE))
        assert done.code == "OK", done
    assert (await call("CreateVolume", name="unbounded", volume_capabilities=[use()])).code == "OK"
    readers = [use("MULTI_NODE_READER_ONLY")]
    assert (
        await call("CreateVolume", name="sealed", volume_capabilities=readers, parameters={"sealed": "1"})
    ).code == "OK"
    for name, mode in (("used", "MULTI_NODE_MULTI_WRITER"), ("once", "SINGLE_NODE_SINGLE_WRITER")):
        done = await call(
            "NodeStageVolume",
            volume_id=name,
            staging_target_path=str(place / f"stage-{name}"),
            volume_capability=use(mode),
        )
        assert done.code == "OK", done
        done = await call(
            "NodePublishVolume",
            volume_id=name,
            staging_target_path=str(place / f"stage-{name}"),
            target_path=str(place / f"target-{name}"),
            volume_capability=use(mode),
        )
        assert done.code == "OK", done
    assert (
        await call(
            "NodeStageVolume",
            volume_id="sealed",
            staging_target_path=str(place / "stage-sealed"),
            volume_capability=use(),
        )
    ).code == "OK"


async def run_rows(world: str) -> list[tuple[Row, str, str]]:
    """Each row twice, from the same initial state: (row, actual result, what is wrong or "")."""
    found = []
    with tempfile.TemporaryDirectory(prefix="csi-") as directory:
        place = Path(directory)
        async with AsyncExitStack() as stack:
            volumes = await stack.enter_async_context(WORLDS[world](place))
            call = await stack.enter_async_context(plugin(volumes, place))
            await create_volumes(call, volumes, place)
            for each in ROWS:
                first = await call(each.call, **each.fields(place))
                again = await call(each.call, **each.fields(place))
                wrong = ""
                if first.code != each.code:
                    wrong = f"{first.code} instead of {each.code}: {first.text}"
                elif (again.code, again.text, again.reply) != (first.code, first.text, first.reply):
                    wrong = f"the second answer differs: {again.code}: {again.text}"
                elif first.code != "OK" and (each.says not in first.text or len(first.text) < 20):
                    wrong = f"the sentence does not say {each.says!r}: {first.text!r}"
                found.append((each, first.code, wrong))
            for name in UNSERVED:
                came = await call.raw(f"/csi.v1.{name}", b"")
                there = Row(name.split("/")[1], "Call not implemented", "UNIMPLEMENTED", lambda _place: {})
                found.append((there, came.code, "" if came.code == "UNIMPLEMENTED" else came.text))
    return found


def report(world: str, found: list[tuple[Row, str, str]]) -> str:
    wrongs = sum(1 for *_, wrong in found if wrong)
    lines = [f"CSI conformance, over {world}: {len(found)} calls, each twice, {wrongs} wrong", ""]
    lines += [
        f"  {'ok  ' if not wrong else 'FAIL'} {each.call:28} {code:20} {each.condition}{'  <- ' + wrong if wrong else ''}"
        for each, code, wrong in found
    ]
    return "\n".join(lines)


@worlds
def test_error_tables_are_met_by_repeated_calls_too(world):
    found = asyncio.run(run_rows(world))
    print("\n" + report(world, found))
    assert not [f"{each.call}: {each.condition}: {wrong}" for each, _, wrong in found if wrong]


def test_every_call_of_the_services_has_a_row():
    calls = {method.name for service in pb.DESCRIPTOR.services_by_name.values() for method in service.methods}
    assert calls == {each.call for each in ROWS}


# -- the life of a volume --------------------------------------------------------------------------------------------------


async def twice(call: Caller, what: str, /, **fields: Any) -> Any:
    """The reply of a call that succeeds twice with the same reply."""
    first, again = await call(what, **fields), await call(what, **fields)
    assert first.code == again.code == "OK", (first, again)
    assert first.reply == again.reply
    return first.reply


async def run_life_cycle(world: str, place: Path) -> None:
    staged, pods = str(place / "stage"), [place / "pod-1", place / "pod-2"]
    published = [
        {
            "volume_id": "life",
            "staging_target_path": staged,
            "target_path": str(pod),
            "volume_capability": use(),
        }
        for pod in pods
    ]
    async with AsyncExitStack() as stack:
        volumes = await stack.enter_async_context(WORLDS[world](place))
        real = not isinstance(volumes, MemoryVolumes)
        async with plugin(volumes, place) as call:
            made = await twice(
                call,
                "CreateVolume",
                name="life",
                volume_capabilities=[use()],
                capacity_range=size(SIZE, 2 * SIZE),
                parameters={"files": "100"},
                accessibility_requirements=places(POOL),
            )
            assert made.volume.volume_id == "life" and made.volume.capacity_bytes == SIZE
            assert dict(made.volume.accessible_topology[0].segments) == {"nvpool.io/pool": POOL}
            checked = await twice(
                call,
                "ValidateVolumeCapabilities",
                volume_id="life",
                parameters={"files": "100"},
                volume_capabilities=[use(), use("SINGLE_NODE_SINGLE_WRITER")],
            )
            assert len(checked.confirmed.volume_capabilities) == 2
            await twice(
                call, "NodeStageVolume", volume_id="life", staging_target_path=staged, volume_capability=use()
            )
            for arguments in published:
                await twice(call, "NodePublishVolume", **arguments)
            if real:
                await asyncio.to_thread((pods[0] / "shared").write_bytes, b"x" * 4096)
                assert await asyncio.to_thread((pods[1] / "shared").read_bytes) == b"x" * 4096
            stats = (await call("NodeGetVolumeStats", volume_id="life", volume_path=str(pods[0]))).reply
            usage = {entry.unit: entry for entry in stats.usage}
            assert usage[pb.VolumeUsage.BYTES].total == SIZE and usage[pb.VolumeUsage.INODES].total == 100
            assert not stats.volume_condition.abnormal, stats.volume_condition.message
            grown = await twice(
                call, "ControllerExpandVolume", volume_id="life", capacity_range=size(2 * SIZE)
            )
            assert grown.capacity_bytes == 2 * SIZE and not grown.node_expansion_required
            stats = (await call("NodeGetVolumeStats", volume_id="life", volume_path=str(pods[1]))).reply
            assert {entry.unit: entry.total for entry in stats.usage}[pb.VolumeUsage.BYTES] == 2 * SIZE
            refused = await call("DeleteVolume", volume_id="life")
            assert refused.code == "FAILED_PRECONDITION" and "in use" in refused.text
            inside = [open(pods[0] / "open", "wb") if real else None]  # noqa: ASYNC230
        volumes = await _restarted(volumes)
        async with plugin(volumes, place) as call:
            if real:
                await asyncio.to_thread(_still_works, inside[0], pods)
            for arguments in published:
                await twice(call, "NodePublishVolume", **arguments)
            stats = (await call("NodeGetVolumeStats", volume_id="life", volume_path=str(pods[0]))).reply
            assert not stats.volume_condition.abnormal, stats.volume_condition.message
            volume_reply = await twice(call, "ControllerGetVolume", volume_id="life")
            assert (
                volume_reply.volume.capacity_bytes == 2 * SIZE
                and not volume_reply.status.volume_condition.abnormal
            )
            listed = await twice(call, "ListVolumes")
            assert [entry.volume.volume_id for entry in listed.entries] == ["life"] and not listed.next_token
            assert listed.entries[0].status.volume_condition.message
            early = await call("NodeUnstageVolume", volume_id="life", staging_target_path=staged)
            assert early.code == "FAILED_PRECONDITION"
            for pod in pods:
                await twice(call, "NodeUnpublishVolume", volume_id="life", target_path=str(pod))
                assert pod.name not in os.listdir(place)
            refused = await call("DeleteVolume", volume_id="life")
            assert refused.code == "FAILED_PRECONDITION"  # staged
            await twice(call, "NodeUnstageVolume", volume_id="life", staging_target_path=staged)
            await twice(call, "DeleteVolume", volume_id="life")
            assert (await call("ControllerGetVolume", volume_id="life")).code == "NOT_FOUND"
            await twice(call, "NodeUnstageVolume", volume_id="life", staging_target_path=staged)


def _still_works(file: Any, pods: list[Path]) -> None:
    """A container that was started before the restart of the plugin reads and writes as before."""
    file.write(b"before and after")
    file.close()
    assert (pods[1] / "open").read_bytes() == b"before and after"


async def _restarted(volumes: Any) -> Any:
    again = getattr(volumes, "restart_bridge", None)
    return await again() if again is not None else volumes


@pytest.mark.smoke
@worlds
def test_volume_life_cycle_with_repeated_calls(world, tmp_path):
    asyncio.run(run_life_cycle(world, tmp_path))
