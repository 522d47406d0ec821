"""deploy/kubernetes: the manifests satisfy Kubernetes' own schemas and fit the plugin."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path

import kubernetes_validate
import pytest
import yaml
from click.testing import CliRunner
from kubernetes_validate.utils import all_versions

from nvpool.bridge.csi.identity import DRIVER
from nvpool.bridge.csi.requests import TOPOLOGY_KEY, read_context, read_parameters
from nvpool.cli.commands.bridge import bridge
from nvpool.core.version import VERSION
from nvpool.daemons.bridge import parse_words
from nvpool.testing.fakes.bridge_volumes import MemoryVolumes
from tests.bridge.csi_caller import plugin

pytestmark = pytest.mark.t1

ROOT = Path(__file__).resolve().parents[2]
PLACE = ROOT / "deploy" / "kubernetes"
FILES = sorted(PLACE.glob("*.yaml"))
KUBERNETES = [version for version in all_versions() if int(version.split(".")[1]) >= 29]
"""Supported releases: ReadWriteOncePod is stable since 1.29."""


def documents(path):
    return [document for document in yaml.safe_load_all(path.read_text()) if document]


DOCUMENTS = [(path.name, document) for path in FILES for document in documents(path)]
OBJECTS = [(name, document) for name, document in DOCUMENTS if document["kind"] != "Kustomization"]


def of(kind, name=""):
    found = [
        document
        for _, document in DOCUMENTS
        if document["kind"] == kind and name in document["metadata"]["name"]
    ]
    assert found, f"no {kind}"
    return found


NODE, CONTROLLER = (
    of("DaemonSet")[0]["spec"]["template"]["spec"],
    of("Deployment")[0]["spec"]["template"]["spec"],
)
PODS = [pytest.param(NODE, id="node"), pytest.param(CONTROLLER, id="controller")]


def container(pod, name):
    return next(each for each in pod["containers"] if each["name"] == name)


def plugin_words(pod):
    words = container(pod, "nvpool")["args"]
    assert words[0] == "bridge"
    return words[1:]


def shown_in(pod, name):
    """mount path -> (volume, mount propagation) of a container."""
    volumes = {volume["name"]: volume for volume in pod["volumes"]}
    return {
        mount["mountPath"]: (volumes[mount["name"]], mount.get("mountPropagation", "None"))
        for mount in container(pod, name)["volumeMounts"]
    }


@pytest.mark.parametrize("version", [KUBERNETES[0], KUBERNETES[-1]])
@pytest.mark.parametrize(
    "document",
    [
        pytest.param(document, id=f"{name}-{document['metadata']['name']}-{document['kind']}")
        for name, document in OBJECTS
    ],
)
def test_objects_satisfy_kubernetes_schemas(document, version):
    kubernetes_validate.validate(document, version, strict=True)


def test_schemas_refuse_a_wrong_object():
    wrong = of("CSIDriver")[0] | {"spec": {"fsGroupPolizei": "File"}}
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(wrong, KUBERNETES[-1], strict=True)


def test_kustomization_lists_every_file_but_the_example():
    taken = next(document for _, document in DOCUMENTS if document["kind"] == "Kustomization")
    assert {*taken["resources"], "kustomization.yaml", "example.yaml"} == {path.name for path in FILES}
    assert [image["name"] for image in taken["images"]] == ["nvpool"] and taken["images"][0][
        "newTag"
    ] == VERSION


def test_manifests_use_the_drivers_name():
    assert [document["metadata"]["name"] for document in of("CSIDriver")] == [DRIVER]
    assert {document["provisioner"] for document in of("StorageClass")} == {DRIVER}
    assert {document["spec"]["csi"]["driver"] for document in of("PersistentVolume")} == {DRIVER}
    for path in FILES:
        assert set(re.findall(r"\bcsi\.nvpool\.[a-z]+", path.read_text())) <= {DRIVER}


@pytest.mark.parametrize("pod", PODS)
def test_plugin_accepts_its_containers_arguments(pod):
    help_text = CliRunner().invoke(bridge, ["--help"]).output
    words = plugin_words(pod)
    for word in words[1:]:
        assert word.split("=")[0] in help_text, word
    taken = parse_words(words)
    assert taken.csi == "unix:///csi/csi.sock" and taken.docker_socket == ""
    assert (taken.csi_controller, taken.csi_node) == ((True, False) if pod is CONTROLLER else (False, True))
    assert taken.node.startswith("$(") and taken.node[2:-1] in {
        each["name"] for each in container(pod, "nvpool")["env"]
    }


@pytest.mark.parametrize("pod", PODS)
def test_sidecars_use_the_plugins_socket(pod):
    place = parse_words(plugin_words(pod)).csi.removeprefix("unix://")
    volume = shown_in(pod, "nvpool")[str(Path(place).parent)][0]
    for each in pod["containers"]:
        assert shown_in(pod, each["name"])[str(Path(place).parent)][0] == volume, each["name"]
        if each["name"] != "nvpool":
            assert f"--csi-address={place}" in each["args"], each["name"]


@pytest.mark.parametrize("pod", PODS)
def test_liveness_probe_uses_its_sidecars_port(pod):
    port = next(port for port in container(pod, "nvpool")["ports"] if port["name"] == "healthz")[
        "containerPort"
    ]
    assert container(pod, "nvpool")["livenessProbe"]["httpGet"]["port"] == "healthz"
    assert any(
        word.startswith(("--health-port=", "--http-endpoint=")) and word.endswith(str(port))
        for word in container(pod, "liveness-probe")["args"]
    )


def test_kubelet_finds_the_socket_on_the_host():
    registered = next(
        word.split("=")[1]
        for word in container(NODE, "node-driver-registrar")["args"]
        if word.startswith("--kubelet-registration-path=")
    )
    served = parse_words(plugin_words(NODE)).csi.removeprefix("unix://")
    on_host = shown_in(NODE, "nvpool")[str(Path(served).parent)][0]["hostPath"]["path"]
    assert registered == f"{on_host}/{Path(served).name}" and Path(on_host).name == DRIVER
    registry = shown_in(NODE, "node-driver-registrar")["/registration"][0]["hostPath"]["path"]
    assert registry == "/var/lib/kubelet/plugins_registry"


def test_node_plugin_mounts_on_the_host():
    taken, shown = parse_words(plugin_words(NODE)), shown_in(NODE, "nvpool")
    assert container(NODE, "nvpool")["securityContext"] == {"privileged": True}
    for place in ("/var/lib/kubelet", str(taken.state)):
        volume, propagation = shown[place]
        assert (
            volume["hostPath"]["path"] == place and propagation == "Bidirectional"
        )  # the same name inside and outside
    volume, propagation = shown[str(taken.mountpoint.parent)]
    assert volume["hostPath"]["path"] == str(taken.mountpoint.parent) and propagation == "HostToContainer"
    assert taken.no_mount
    assert shown[taken.pool][0]["hostPath"] == {"path": taken.pool, "type": "Directory"}


def test_controller_and_sidecars_have_no_privileges():
    for pod in (CONTROLLER, NODE):
        for each in pod["containers"]:
            if (pod is NODE) > (each["name"] != "nvpool"):
                continue
            context = each["securityContext"]
            assert not context.get("privileged") and context["capabilities"] == {"drop": ["ALL"]}, each[
                "name"
            ]
            assert context["allowPrivilegeEscalation"] is False and context["readOnlyRootFilesystem"] is True


@pytest.mark.parametrize("pod", PODS)
def test_service_accounts_exist(pod):
    names = {document["metadata"]["name"] for document in of("ServiceAccount")}
    assert pod["serviceAccountName"] in names
    assert {
        document["metadata"].get("namespace")
        for _, document in OBJECTS
        if document["kind"] in ("ServiceAccount", "Deployment", "DaemonSet", "Role", "RoleBinding")
    } == {document["metadata"]["name"] for document in of("Namespace")}
    for kind, ref in (("ClusterRoleBinding", "ClusterRole"), ("RoleBinding", "Role")):
        for binding in of(kind):
            assert binding["roleRef"]["kind"] == ref and of(ref, binding["roleRef"]["name"])
            assert all(subject["name"] in names for subject in binding["subjects"])


def test_driver_supports_what_the_manifests_declare(tmp_path):
    async def ask():
        async with plugin(MemoryVolumes(), tmp_path) as call:
            whole = (await call("GetPluginCapabilities")).reply
            rpc = {each.rpc.type for each in (await call("ControllerGetCapabilities")).reply.capabilities}
            return (
                {each.service.type for each in whole.capabilities},
                {each.volume_expansion.type for each in whole.capabilities},
                rpc,
                (await call("NodeGetInfo")).reply,
            )

    services, expansions, rpc, node = asyncio.run(ask())
    driver, sidecars = of("CSIDriver")[0]["spec"], [each["name"] for each in CONTROLLER["containers"]]
    assert driver["attachRequired"] is (2 in rpc) and ("csi-attacher" in sidecars) is (
        2 in rpc
    )  # PUBLISH_UNPUBLISH_VOLUME
    assert ("csi-provisioner" in sidecars) is (1 in rpc)
    assert ("csi-snapshotter" in sidecars) is (5 in rpc)
    assert ("csi-resizer" in sidecars) is (9 in rpc)
    assert all(
        document["allowVolumeExpansion"] is (9 in rpc and 1 in expansions) for document in of("StorageClass")
    )
    topology = "--feature-gates=Topology=true" in container(CONTROLLER, "csi-provisioner")["args"]
    assert topology is (2 in services) and TOPOLOGY_KEY in node.accessible_topology.segments
    assert driver["volumeLifecycleModes"] == ["Persistent"] and driver["fsGroupPolicy"] == "File"
    if any("ReadWriteOncePod" in document["spec"]["accessModes"] for document in of("PersistentVolumeClaim")):
        assert 13 in rpc  # SINGLE_NODE_MULTI_WRITER


def test_storage_class_parameters_are_accepted():
    for document in of("StorageClass"):
        read_parameters(document.get("parameters", {}))
    for document in of("PersistentVolume"):
        read_context(document["spec"]["csi"]["volumeAttributes"])
    classes = {document["metadata"]["name"] for document in of("StorageClass")}
    assert {document["spec"]["storageClassName"] for document in of("PersistentVolumeClaim")} <= classes


def test_image_matches_the_dockerfile():
    text = (ROOT / "deploy" / "Dockerfile").read_text()
    assert 'ENTRYPOINT ["nvpool"]' in text and f"nvpool:{VERSION}" in text
    assert {container(pod, "nvpool")["image"] for pod in (NODE, CONTROLLER)} == {f"nvpool:{VERSION}"}
