"""The CSI plugin as a whole: identity, socket, errors, pages of lists, and a killed process."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest
from grpc import StatusCode

from nvpool.bridge.bind_helper import unbind
from nvpool.bridge.csi import controller, identity
from nvpool.bridge.csi.errors import CODES, CsiRefusal, status_of
from nvpool.bridge.csi.server import serve_csi, socket_path
from nvpool.bridge.v1 import csi_pb2 as pb
from nvpool.core.errors import (
    BadConfiguration,
    Busy,
    InUse,
    InvariantBroken,
    NvpoolError,
    Unreachable,
    every_error,
)
from nvpool.core.programs import Program, command
from nvpool.core.units import MIB
from nvpool.host.mountinfo import mounts_below
from nvpool.testing.env.bridge import RealBridge
from nvpool.testing.env.etcd import free_ports
from nvpool.testing.env.pool import RealPool
from nvpool.testing.fakes.bridge_volumes import MemoryVolumes
from tests.bridge.csi_caller import POOL, block, caller_at, places, plugin, size, use

WHY_NOT = (
    "only root can mount" if os.geteuid() else "" if os.path.exists("/dev/fuse") else "there is no /dev/fuse"
)
needs_mount = pytest.mark.skipif(bool(WHY_NOT), reason=WHY_NOT or "-")


@pytest.fixture
def volumes():
    return MemoryVolumes()


def asked(volumes, place, questions, **how):
    """The result of `questions`, called with a caller."""

    async def ask():
        async with plugin(volumes, place, **how) as call:
            return await questions(call)

    return asyncio.run(ask())


# -- errors ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("error", every_error(), ids=lambda error: error.__name__)
def test_error_codes_agree_on_whether_to_retry(error):
    code, text = status_of(error())
    assert code is not StatusCode.OK and text
    repeated = {StatusCode.UNAVAILABLE, StatusCode.ABORTED, StatusCode.DEADLINE_EXCEEDED}
    family = next(base for base in error.__mro__ if NvpoolError in base.__bases__).__name__
    if family == "Unavailable":
        assert code in repeated
    if family == "Refused":
        assert code not in repeated
    if family == "Bug":
        assert code is StatusCode.INTERNAL


def test_unknown_error_is_internal_and_logged(caplog):
    code, text = status_of(KeyError("x"))
    assert code is StatusCode.INTERNAL and "KeyError" in text
    assert caplog.records[0].exc_info
    assert status_of(CsiRefusal(StatusCode.ABORTED, "x" * 9000))[1].startswith("x" * 1000)
    assert len(status_of(Unreachable("x" * 9000))[1]) < 1100
    assert all(code is not StatusCode.OK for code in CODES.values())


class Failing(MemoryVolumes):
    """Every call fails with `raises`."""

    raises: type[Exception] = InvariantBroken

    async def get(self, name):
        raise self.raises("as the test wants it")


@pytest.mark.parametrize(
    "error, code",
    [
        (InvariantBroken, "INTERNAL"),
        (Busy, "ABORTED"),
        (Unreachable, "UNAVAILABLE"),
        (ZeroDivisionError, "INTERNAL"),
    ],
)
def test_internal_error_is_returned_as_a_status(tmp_path, error, code, caplog):
    volumes = Failing()
    volumes.raises = error
    answer = asked(volumes, tmp_path, lambda call: call("ControllerGetVolume", volume_id="v"))
    assert answer.code == code and answer.text
    caplog.clear()


def test_malformed_request_is_refused(volumes, tmp_path):
    async def ask(call):
        return await call.raw("/csi.v1.Controller/CreateVolume", b"\xff\xff\xff"), await call("Probe")

    nonsense, after = asked(volumes, tmp_path, ask)
    assert nonsense.code == "INVALID_ARGUMENT" and after.code == "OK"


def test_secrets_are_not_logged(volumes, tmp_path, caplog):
    caplog.set_level("DEBUG", logger="nvpool")  # gRPC's own records hold calls
    answer = asked(
        volumes, tmp_path, lambda call: call("CreateVolume", name="", secrets={"key": "hush-hush"})
    )
    assert (
        answer.code == "INVALID_ARGUMENT" and "hush-hush" not in caplog.text and "CreateVolume" in caplog.text
    )


# -- identity --------------------------------------------------------------------------------------------------------------


def test_capabilities_are_the_same_on_every_node(volumes, tmp_path):
    async def ask(call):
        return (
            (await call("GetPluginInfo")).reply,
            (await call("GetPluginCapabilities")).reply,
            await call("ControllerGetCapabilities"),
            await call("NodeGetCapabilities"),
            (await call("Probe")).reply,
        )

    whole = asked(volumes, tmp_path, ask)
    assert whole[0].name == "csi.nvpool.io" and whole[0].vendor_version
    kinds = [(each.service.type, each.volume_expansion.type) for each in whole[1].capabilities]
    assert kinds == [(1, 0), (2, 0), (0, 1)]  # CONTROLLER_SERVICE, VOLUME_ACCESSIBILITY_CONSTRAINTS, ONLINE
    rpc = pb.ControllerServiceCapability.RPC
    assert {rpc.Type.Name(each.rpc.type) for each in whole[2].reply.capabilities} == {
        "CREATE_DELETE_VOLUME",
        "LIST_VOLUMES",
        "GET_CAPACITY",
        "EXPAND_VOLUME",
        "VOLUME_CONDITION",
        "GET_VOLUME",
        "SINGLE_NODE_MULTI_WRITER",
    }
    rpc = pb.NodeServiceCapability.RPC
    assert {rpc.Type.Name(each.rpc.type) for each in whole[3].reply.capabilities} == {
        "STAGE_UNSTAGE_VOLUME",
        "GET_VOLUME_STATS",
        "VOLUME_CONDITION",
        "SINGLE_NODE_MULTI_WRITER",
    }
    assert whole[4].ready.value
    for how, missing in (({"node": False}, 3), ({"controller": False}, 2)):
        part = asked(volumes, tmp_path, ask, **how)
        assert part[:2] == whole[:2] and part[missing].code == "UNIMPLEMENTED"


def test_node_plugin_without_mount_privilege_fails_its_probe(volumes, tmp_path, monkeypatch):
    status = tmp_path / "status"
    status.write_text(
        "Name:\tx\nCapEff:\t00000000a80425fb\n"
    )  # Docker's set for containers without privileges
    assert not identity.may_mount(str(status))
    status.write_text("CapEff:\t000001ffffffffff\n")
    assert identity.may_mount(str(status))
    monkeypatch.setattr(identity, "may_mount", lambda: False)
    answer = asked(volumes, tmp_path, lambda call: call("Probe"))
    assert answer.code == "FAILED_PRECONDITION" and "privileged" in answer.text
    assert asked(volumes, tmp_path, lambda call: call("Probe"), node=False).code == "OK"


def test_node_reports_its_name_and_pool(volumes, tmp_path):
    reply = asked(volumes, tmp_path, lambda call: call("NodeGetInfo")).reply
    assert reply.node_id == "node-1" and dict(reply.accessible_topology.segments) == {"nvpool.io/pool": POOL}


# -- lists and sizes -------------------------------------------------------------------------------------------------------


def test_pages_list_every_volume_once_under_changes(volumes, tmp_path):
    async def ask(call):
        for number in range(10):
            await call("CreateVolume", name=f"v{number}", volume_capabilities=[use()])
        names, token, pages = [], "", 0
        while True:
            page = await call("ListVolumes", max_entries=3, starting_token=token)
            assert page.code == "OK" and len(page.reply.entries) <= 3
            names += [entry.volume.volume_id for entry in page.reply.entries]
            token, pages = page.reply.next_token, pages + 1
            if not token:
                return names, pages
            if pages == 1:
                for gone in ("v0", "v2"):  # the token names v2
                    await call("DeleteVolume", volume_id=gone)

    names, pages = asked(volumes, tmp_path, ask)
    assert names == [f"v{number}" for number in range(10)] and pages == 4


def test_unbounded_list_is_paged_by_message_size(volumes, tmp_path, monkeypatch):
    monkeypatch.setattr(controller, "PAGE_ENTRIES_MAX", 2)

    async def ask(call):
        for name in ("a", "b", "c"):
            await call("CreateVolume", name=name, volume_capabilities=[use()])
        first = (await call("ListVolumes")).reply
        return first, (await call("ListVolumes", starting_token=first.next_token)).reply

    first, second = asked(volumes, tmp_path, ask)
    assert (
        [len(page.entries) for page in (first, second)] == [2, 1]
        and first.next_token
        and not second.next_token
    )


def test_full_page_of_long_names_fits_into_a_grpc_message():
    entry = pb.ListVolumesResponse.Entry(
        volume=pb.Volume(
            volume_id="x" * 128,
            capacity_bytes=1 << 62,
            accessible_topology=[pb.Topology(segments={"nvpool.io/pool": "p" * 63})],
        ),
        status=pb.ListVolumesResponse.VolumeStatus(
            volume_condition=pb.VolumeCondition(abnormal=True, message="x" * 200)
        ),
    )
    assert pb.ListVolumesResponse(entries=[entry] * controller.PAGE_ENTRIES_MAX).ByteSize() < 4 * MIB


def test_capacity_is_zero_where_no_volume_can_be(volumes, tmp_path):
    async def ask(call):
        argument_sets = [
            {},
            {"accessible_topology": places(POOL).requisite[0]},
            {"accessible_topology": places("other").requisite[0]},
            {"volume_capabilities": [use(), block()]},
            {"parameters": {"files": "5"}},
        ]
        return [
            (await call("GetCapacity", **arguments)).reply.available_capacity for arguments in argument_sets
        ]

    left = volumes.pool_bytes
    assert asked(volumes, tmp_path, ask) == [left, left, 0, 0, left]


def test_condition_names_the_exhausted_resource(volumes, tmp_path):
    async def ask(call):
        await call(
            "CreateVolume",
            name="v",
            volume_capabilities=[use()],
            capacity_range=size(10),
            parameters={"files": "5"},
        )
        seen = []
        for change in ({}, {"bytes_used": 10}, {"bytes_used": 0, "files_used": 5}, {"files_used": 1}):
            volumes.change("v", **change)
            seen.append((await call("ControllerGetVolume", volume_id="v")).reply.status.volume_condition)
        volumes.pool_bytes = 0
        seen.append((await call("ListVolumes")).reply.entries[0].status.volume_condition)
        return seen

    seen = asked(volumes, tmp_path, ask)
    assert [condition.abnormal for condition in seen] == [False, True, True, False, True]
    assert (
        "larger" in seen[1].message
        and "volume resize POOL v --files COUNT" in seen[2].message
        and "full" in seen[4].message
    )


@pytest.mark.parametrize(
    "asks, message",
    [
        ({"volume_capabilities": [block()]}, "block"),
        ({"parameters": {"files": "9"}}, "files"),
        ({"parameters": {"replicas": "3"}}, "replicas"),
        ({"parameters": {"sealed": "true"}}, "sealed"),
        ({"parameters": {"colour": "red"}}, "colour"),
        ({"volume_context": {"colour": "red"}}, "colour"),
        ({"mutable_parameters": {"files": "9"}}, "mutable"),
    ],
)
def test_missing_capabilities_are_not_confirmed(volumes, tmp_path, asks, message):
    async def ask(call):
        await call("CreateVolume", name="v", volume_capabilities=[use()], parameters={"files": "5"})
        return await call(
            "ValidateVolumeCapabilities", **{"volume_id": "v", "volume_capabilities": [use()], **asks}
        )

    answer = asked(volumes, tmp_path, ask)
    assert answer.code == "OK" and not answer.reply.HasField("confirmed") and message in answer.reply.message


# -- on a node -------------------------------------------------------------------------------------------------------------


async def published(call, place, name, mode, *pods):
    await call("CreateVolume", name=name, volume_capabilities=[use(mode)])
    await call(
        "NodeStageVolume",
        volume_id=name,
        staging_target_path=str(place / "stage"),
        volume_capability=use(mode),
    )
    return [
        (
            await call(
                "NodePublishVolume",
                volume_id=name,
                staging_target_path=str(place / "stage"),
                target_path=str(place / pod),
                volume_capability=use(mode),
            )
        ).code
        for pod in pods
    ]


@pytest.mark.parametrize(
    "mode, second",
    [
        ("SINGLE_NODE_WRITER", "FAILED_PRECONDITION"),
        ("SINGLE_NODE_READER_ONLY", "FAILED_PRECONDITION"),
        ("SINGLE_NODE_SINGLE_WRITER", "FAILED_PRECONDITION"),
        ("SINGLE_NODE_MULTI_WRITER", "OK"),
        ("MULTI_NODE_READER_ONLY", "OK"),
        ("MULTI_NODE_MULTI_WRITER", "OK"),
    ],
)
def test_access_mode_limits_pods_on_a_node(volumes, tmp_path, mode, second):
    codes = asked(volumes, tmp_path, lambda call: published(call, tmp_path, "v", mode, "pod-1", "pod-2"))
    assert codes == ["OK", second]


def test_concurrent_pods_do_not_share_a_single_writer_volume(volumes, tmp_path):
    async def ask(call):
        await published(call, tmp_path, "v", "SINGLE_NODE_SINGLE_WRITER")
        calls = [
            call(
                "NodePublishVolume",
                volume_id="v",
                staging_target_path=str(tmp_path / "stage"),
                target_path=str(tmp_path / f"pod-{number}"),
                volume_capability=use("SINGLE_NODE_SINGLE_WRITER"),
            )
            for number in range(8)
        ]
        return sorted(answer.code for answer in await asyncio.gather(*calls))

    assert asked(volumes, tmp_path, ask) == ["FAILED_PRECONDITION"] * 7 + ["OK"]


def test_single_writer_volume_is_free_after_unpublish(volumes, tmp_path):
    async def ask(call):
        codes = await published(call, tmp_path, "v", "SINGLE_NODE_SINGLE_WRITER", "pod-1")
        await call("NodeUnpublishVolume", volume_id="v", target_path=str(tmp_path / "pod-1"))
        return codes + await published(call, tmp_path, "v", "SINGLE_NODE_SINGLE_WRITER", "pod-2", "pod-3")

    assert asked(volumes, tmp_path, ask) == ["OK", "OK", "FAILED_PRECONDITION"]


def test_unreachable_pool_blocks_no_unpublish(volumes, tmp_path):
    async def ask(call):
        await published(call, tmp_path, "v", "MULTI_NODE_MULTI_WRITER", "pod-1")
        volumes.silent = True
        stats = await call("NodeGetVolumeStats", volume_id="v", volume_path=str(tmp_path / "pod-1"))
        again = await call(
            "NodePublishVolume",
            volume_id="v",
            staging_target_path=str(tmp_path / "stage"),
            target_path=str(tmp_path / "pod-1"),
            volume_capability=use(),
        )
        ends = [
            (await call("NodeUnpublishVolume", volume_id="v", target_path=str(tmp_path / "pod-1"))).code
            for _ in "12"
        ]
        return (
            stats,
            again.code,
            ends,
            (await call("CreateVolume", name="w", volume_capabilities=[use()])).code,
        )

    stats, again, ends, made = asked(volumes, tmp_path, ask)
    assert stats.code == "OK" and stats.reply.volume_condition.abnormal and not stats.reply.usage
    assert again == "OK" and ends == ["OK", "OK"] and made == "UNAVAILABLE"


def test_stale_target_is_removed_without_its_volume(volumes, tmp_path):
    (tmp_path / "pod-1").mkdir()
    arguments = {"volume_id": "v", "target_path": str(tmp_path / "pod-1")}
    answer = asked(volumes, tmp_path, lambda call: call("NodeUnpublishVolume", **arguments))
    assert answer.code == "OK" and not (tmp_path / "pod-1").exists()


@pytest.mark.smoke
def test_subpath_of_a_manual_volume_is_staged(volumes, tmp_path):
    async def ask(call):
        await call("CreateVolume", name="v", volume_capabilities=[use()])
        arguments = {
            "volume_id": "v",
            "staging_target_path": str(tmp_path / "stage"),
            "volume_capability": use(),
        }
        return [
            (await call("NodeStageVolume", **arguments, volume_context=context)).code
            for context in (
                {"subpath": "train", "csi.storage.k8s.io/pod.name": "p"},
                {"subpath": "./train/"},
                {"subpath": "other"},
            )
        ]

    assert asked(volumes, tmp_path, ask) == ["OK", "OK", "ALREADY_EXISTS"]


# -- the socket ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "address", ["", "csi.sock", "tcp://h:1", "unix:csi.sock", "unix:///", "/" + "x" * 120, "/a\0b"]
)
def test_invalid_address_is_refused(address):
    with pytest.raises(BadConfiguration):
        socket_path(address)


@pytest.mark.parametrize("address", ["unix:///run/x.sock", "unix:/run/x.sock", "/run/x.sock"])
def test_address_has_three_forms(address):
    assert socket_path(address) == Path("/run/x.sock")


def test_socket_is_private_and_a_dead_one_is_replaced(volumes, tmp_path):
    async def ask(_call):
        assert os.stat(tmp_path / "csi.sock").st_mode & 0o777 == 0o600
        with pytest.raises(InUse, match="another bridge"):
            await serve_csi(volumes, f"unix://{tmp_path}/csi.sock", pool=POOL)
        with pytest.raises(BadConfiguration, match="--csi-pool"):
            await serve_csi(volumes, f"unix://{tmp_path}/other.sock", pool="a pool")

    asked(volumes, tmp_path, ask)
    program = f"import socket; socket.socket(socket.AF_UNIX).bind({str(tmp_path / 'csi.sock')!r})"
    (tmp_path / "csi.sock").unlink(missing_ok=True)
    subprocess.run([sys.executable, "-c", program], check=True)
    asked(volumes, tmp_path, ask)
    (tmp_path / "csi.sock").unlink(missing_ok=True)
    (tmp_path / "csi.sock").write_text("somebody's")
    with pytest.raises(BadConfiguration, match="not a socket"):
        asyncio.run(serve_csi(volumes, f"unix://{tmp_path}/csi.sock", pool=POOL))
    assert (tmp_path / "csi.sock").read_text() == "somebody's"


# -- the process -----------------------------------------------------------------------------------------------------------


class CsiBridge(RealBridge):
    """`nvpool bridge --csi`, without Docker."""

    metrics_port = 0

    def page(self):
        with urllib.request.urlopen(f"http://127.0.0.1:{self.metrics_port}/metrics", timeout=20) as reply:
            return reply.read().decode()

    def start(self):
        words = command(
            Program.CLI,
            "bridge",
            str(self.pool),
            f"--state={self.place}/state",
            "--docker-socket=",
            f"--csi=unix://{self.place}/csi.sock",
            f"--node={self.node}",
            f"--log={self.log}",
            "--csi-pool=pool-1",
            f"--metrics=127.0.0.1:{self.metrics_port}",
        )
        self.process = subprocess.Popen(
            words,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
            cwd="/",
        )
        self.until(self._probed, "the plugin answers", 120)

    def _probed(self):
        assert self.process.poll() is None, f"the bridge has ended\n{self.said()}"
        return self.csi("Probe").code == "OK"

    def csi(self, call, /, **fields):
        async def ask():
            async with caller_at(f"unix://{self.place}/csi.sock") as caller:
                return await caller(call, **fields)

        return asyncio.run(ask())


@needs_mount
def test_only_binds_of_volumes_are_unmounted(tmp_path):
    whole, pods = tmp_path / "whole", tmp_path / "pods"
    arguments = {"volume_id": "v", "staging_target_path": str(tmp_path / "stage"), "volume_capability": use()}
    with RealPool(tmp_path / "pool", sizes=(256 * MIB,)) as pool:
        pool.make()
        pool.start()
        bridge = CsiBridge(pool.path, tmp_path / "b")
        bridge.metrics_port = free_ports(1)[0]
        with bridge:
            try:
                made = bridge.csi(
                    "CreateVolume", name="v", volume_capabilities=[use()], capacity_range=size(64 * MIB)
                )
                assert made.code == "OK", made
                assert bridge.csi("NodeStageVolume", **arguments).code == "OK"
                own = next(mount.point for mount in mounts_below(tmp_path / "b") if mount.root == Path("/"))
                assert (
                    bridge.csi("NodeUnpublishVolume", volume_id="v", target_path=str(own)).code
                    == "INVALID_ARGUMENT"
                )
                (own / "somebodys").mkdir()
                whole.mkdir()
                for shows in (own / "somebodys", own):  # the second path looks like a mount of the whole pool
                    subprocess.run(["mount", "--bind", shows, whole], check=True)
                    done = bridge.csi("NodeUnpublishVolume", volume_id="v", target_path=str(whole))
                    assert done.code == "FAILED_PRECONDITION", done
                for call in ("NodeUnpublishVolume", "NodePublishVolume"):
                    fields = arguments if call == "NodePublishVolume" else {"volume_id": "v"}
                    assert bridge.csi(call, **fields, target_path=str(whole)).code == "FAILED_PRECONDITION", (
                        call
                    )
                assert (whole / "volumes/v").is_dir()
                (tmp_path / "file").write_text("somebody's")
                second = subprocess.run(
                    command(
                        Program.CLI,
                        "bridge",
                        pool.path,
                        "--docker-socket=",
                        f"--state={tmp_path}/second",
                        f"--csi={tmp_path}/file",
                    ),
                    capture_output=True,
                    text=True,
                    timeout=60,
                )
                assert second.returncode == 2 and "is not a socket" in second.stderr, second
                assert not mounts_below(tmp_path / "second"), "a plugin that cannot listen leaves no mount"
                done = bridge.csi("NodePublishVolume", **arguments, target_path=str(tmp_path / "file"))
                assert done.code == "INVALID_ARGUMENT", done
                pods.mkdir()
                assert bridge.csi("NodePublishVolume", **arguments, target_path=str(pods / "a")).code == "OK"
                assert (
                    bridge.csi("NodePublishVolume", **arguments, target_path=str(pods / "a/b")).code
                    == "ALREADY_EXISTS"
                )
                subprocess.run(["mount", "-t", "tmpfs", "none", pods], check=True)
                done = bridge.csi("NodeUnpublishVolume", volume_id="v", target_path=str(pods / "a"))
                assert done.code == "FAILED_PRECONDITION" and "another mount lies over" in done.text, done
                subprocess.run(["umount", pods], check=True)
                assert (
                    bridge.csi("NodeUnpublishVolume", volume_id="v", target_path=str(pods / "a")).code == "OK"
                )
                unstaged = bridge.csi(
                    "NodeUnstageVolume", volume_id="v", staging_target_path=str(tmp_path / "stage")
                )
                assert unstaged.code == "OK", unstaged
            finally:
                for mount in reversed([*mounts_below(pods), *mounts_below(whole)]):
                    subprocess.run(["umount", "--lazy", mount.point], check=True)


@needs_mount
def test_killed_plugin_finds_its_mounts_alive(tmp_path):
    place, pod = tmp_path / "b", tmp_path / "pod"
    arguments = {"volume_id": "v", "staging_target_path": str(tmp_path / "stage"), "volume_capability": use()}
    with RealPool(tmp_path / "pool", sizes=(256 * MIB,)) as pool:
        pool.make()
        pool.start()
        bridge = CsiBridge(pool.path, place)
        bridge.metrics_port = free_ports(1)[0]
        with bridge:
            try:
                made = bridge.csi(
                    "CreateVolume", name="v", volume_capabilities=[use()], capacity_range=size(64 * MIB)
                )
                assert made.code == "OK", made
                assert bridge.csi("NodeStageVolume", **arguments).code == "OK"
                done = bridge.csi("NodePublishVolume", **arguments, target_path=str(pod))
                assert done.code == "OK", (done, bridge.said())
                with open(pod / "log", "w") as log:
                    for number in range(3):
                        bridge.kill()
                        log.write(f"{number}\n")
                        log.flush()
                        os.fsync(log.fileno())
                        bridge.start()
                        assert (pod / "log").read_text().count("\n") == number + 1
                        stats = bridge.csi("NodeGetVolumeStats", volume_id="v", volume_path=str(pod))
                        assert stats.code == "OK" and not stats.reply.volume_condition.abnormal, stats
                        done = bridge.csi("NodePublishVolume", **arguments, target_path=str(pod))
                assert done.code == "OK", (done, bridge.said())
                assert bridge.csi("DeleteVolume", volume_id="v").code == "FAILED_PRECONDITION"
                page = bridge.page()
                assert "nvpool_bridge_volume_uses 1\n" in page and "nvpool_bridge_ended_uses 0\n" in page
                refused = 'op="deletevolume",transport="csi",error="failed_precondition"'
                assert f"nvpool_bridge_request_errors_total{{{refused}}} 1\n" in page
                assert (
                    'nvpool_bridge_request_seconds_count{op="nodegetvolumestats",transport="csi"} 1\n' in page
                )
                assert bridge.csi("NodeUnpublishVolume", volume_id="v", target_path=str(pod)).code == "OK"
                unstaged = bridge.csi(
                    "NodeUnstageVolume", volume_id="v", staging_target_path=str(tmp_path / "stage")
                )
                assert unstaged.code == "OK" and bridge.csi("DeleteVolume", volume_id="v").code == "OK"
                bridge.process.send_signal(signal.SIGTERM)
                assert bridge.process.wait(60) == 0, bridge.said()
                assert "ERROR" not in bridge.log.read_text(), bridge.said()
            finally:
                for mount in mounts_below(pod):
                    unbind(str(mount.point), "volumes")
