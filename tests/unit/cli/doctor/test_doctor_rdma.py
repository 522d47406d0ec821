"""`nvpool doctor rdma`: its checks on machines with and without RDMA devices, and its output."""

import json
import resource

import pytest
from click.testing import CliRunner

from nvpool.cli.doctor import rdma as doctor_rdma
from nvpool.cli.doctor.check_results import BAD, OK, WARN, Check
from nvpool.cli.doctor.command import doctor
from nvpool.rpc.transports import ucx


def machine(
    root,
    *,
    state="4: ACTIVE",
    layer="Ethernet",
    gids=("RoCE v2",),
    modules=("ib_core", "ib_uverbs", "mlx5_ib"),
    nodes=("uverbs0",),
):
    port = root / "sys/class/infiniband/mlx5_0/ports/1"
    (port / "gid_attrs/types").mkdir(parents=True)
    (port / "state").write_text(state + "\n")
    (port / "rate").write_text("100 Gb/sec (4X EDR)\n")
    (port / "link_layer").write_text(layer + "\n")
    for number, kind in enumerate(gids):
        (port / "gid_attrs/types" / str(number)).write_text(kind + "\n")
    (root / "sys/class/infiniband/mlx5_0/fw_ver").write_text("22.39.1002\n")
    (root / "proc").mkdir()
    (root / "proc/modules").write_text("".join(f"{name} 16384 0 - Live 0x0\n" for name in modules))
    (root / "dev/infiniband").mkdir(parents=True)
    for name in nodes:
        (root / "dev/infiniband" / name).touch()
    return root


def of(root):
    return {check.name: check for check in doctor_rdma.checks(root)}


def test_machine_without_devices_needs_nothing(tmp_path):
    found = of(tmp_path)
    assert found["devices"].state == found["kernel"].state == "ok"
    assert not [check for check in found.values() if check.state == "bad"]
    network = found.get("UCX over the network")
    assert (network is None) == bool(ucx.missing()) and (network is None or "can be used" not in network.seen)


@pytest.mark.compiled
def test_machine_with_a_device_gets_remedies(tmp_path, monkeypatch):
    monkeypatch.setattr(ucx, "library", lambda: ("/somewhere", False))
    monkeypatch.setattr(ucx, "version", lambda: "1.22.0")
    monkeypatch.setattr(ucx, "missing", lambda: "")
    monkeypatch.setattr(resource, "getrlimit", lambda which: (8 << 20, 8 << 20))
    found = of(machine(tmp_path))
    assert found["devices"].state == found["link mlx5_0:1"].state == found["kernel"].state == "ok"
    assert "22.39.1002" in found["devices"].seen and "100 Gb" in found["link mlx5_0:1"].seen
    assert found["memlock"].state == "bad" and "LimitMEMLOCK" in found["memlock"].remedy
    assert found["UCX"].state == "bad" and "libucx0" in found["UCX"].remedy


def test_inactive_link_and_missing_kernel_modules_are_bad(tmp_path):
    down = of(machine(tmp_path / "down", state="1: DOWN"))["link mlx5_0:1"]
    assert down.state == "bad" and "DOWN" in down.seen and down.remedy
    old = of(machine(tmp_path / "old", gids=("IB/RoCE v1",)))["link mlx5_0:1"]
    assert old.state == "warn" and "RoCE v2" in old.remedy
    assert of(machine(tmp_path / "ib", layer="InfiniBand", gids=()))["link mlx5_0:1"].state == "ok"
    bare = of(machine(tmp_path / "bare", modules=(), nodes=()))["kernel"]
    assert bare.state == "bad" and "modprobe ib_core ib_uverbs" in bare.remedy


def test_exit_code_is_one_if_something_is_bad(monkeypatch):
    monkeypatch.setattr(
        doctor_rdma, "checks", lambda: [Check("a", OK, "fine"), Check("b", BAD, "broken", "mend it")]
    )
    shown = CliRunner().invoke(doctor, ["rdma"])
    assert shown.exit_code == 1 and "mend it" in shown.output
    in_json = CliRunner().invoke(doctor, ["rdma", "--json"])
    assert json.loads(in_json.stdout)[1] == {
        "name": "b",
        "state": "bad",
        "seen": "broken",
        "remedy": "mend it",
    }
    before = CliRunner().invoke(doctor, ["--json", "-q", "rdma"])
    assert [one["name"] for one in json.loads(before.stdout)] == ["b"]
    for words in (["--pool", "/srv/pool", "rdma"], ["--drive", "/mnt", "rdma"], ["--drive", ""]):
        assert CliRunner().invoke(doctor, words).exit_code == 2
    assert CliRunner().invoke(doctor, ["rdma"], env={"NVPOOL_POOL": "/srv/pool"}).exit_code == 1
    monkeypatch.setattr(doctor_rdma, "checks", lambda: [Check("a", WARN, "slow", "hurry")])
    assert CliRunner().invoke(doctor, ["rdma"]).exit_code == 0
