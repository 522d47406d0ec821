"""`nvpool doctor`: each check finds the fault that the test makes, and reports ok without it."""

import errno
import json
import os
import socket
import subprocess
from pathlib import Path

import pytest

from nvpool.cli.doctor import drive as doctor_drive
from nvpool.cli.doctor import machine as doctor_machine
from nvpool.cli.doctor import network_mtu
from nvpool.cli.doctor import pool as doctor_pool
from nvpool.cli.doctor.check_results import BAD, OK, WARN, all_of
from nvpool.core.clock import SYSTEM_CLOCK
from nvpool.core.programs import Program, command
from nvpool.host.mountinfo import Mount
from nvpool.security.ca import CertificateAuthority, CertificateFacts


@pytest.fixture
def root(tmp_path):
    """Function that writes files of a tree that stands for /."""

    def write(**files):
        for path, text in files.items():
            place = tmp_path / path.replace("__", "-").replace("|", "/")
            place.parent.mkdir(parents=True, exist_ok=True)
            place.write_text(text)
        return tmp_path

    return write


def put(root, path, text):
    place = root / path
    place.parent.mkdir(parents=True, exist_ok=True)
    place.write_text(text)
    return root


def state(found, remedies=()):
    """State of a Check, which has a remedy exactly when it is not ok."""
    assert (found.state == OK) == (not found.remedy), found
    assert found.seen and all(word in found.remedy for word in remedies), found
    return found.state


def states(found):
    return [(one.name, state(one)) for one in found]


# -- a machine -----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "release, wanted", [("6.9.1", OK), ("6.1.0-18-amd64", WARN), ("4.19.0", WARN), ("strange", WARN)]
)
def test_kernel_version(release, wanted):
    assert state(doctor_machine.kernel(release)) == wanted


def test_missing_fuse_device_is_bad(tmp_path):
    assert state(doctor_machine.fuse_device(tmp_path), ["modprobe fuse"]) == BAD
    put(tmp_path, "dev/fuse", "")
    assert state(doctor_machine.fuse_device(tmp_path)) == OK
    (tmp_path / "dev/fuse").unlink()
    (tmp_path / "dev/fuse").mkdir()  # a directory cannot be opened for writing
    assert state(doctor_machine.fuse_device(tmp_path)) == BAD


def test_fuse_settings(tmp_path):
    assert state(doctor_machine.request_pages(tmp_path)) == OK
    assert (
        state(doctor_machine.request_pages(put(tmp_path, "proc/sys/fs/fuse/max_pages_limit", "32\n"))) == WARN
    )
    assert state(doctor_machine.fusermount(str(tmp_path)), ["fuse3"]) == WARN
    assert "for himself" in doctor_machine.allow_other(tmp_path).seen
    assert (
        "share" in doctor_machine.allow_other(put(tmp_path, "etc/fuse.conf", "# x\nuser_allow_other\n")).seen
    )


def test_process_limits():
    for check, few, many in (
        (doctor_machine.open_files, 1024, 1 << 20),
        (doctor_machine.locked_memory, 64 << 10, -1),
        (doctor_machine.processes, 100, -1),
    ):
        assert state(check((few, few)), ["ulimit"]) in (WARN, BAD)
        assert state(check((many, many))) == OK
    assert (
        state(doctor_machine.open_files((1024, 1024))) == BAD
        and state(doctor_machine.open_files((1024, 20_000))) == WARN
    )
    assert state(doctor_machine.open_files((1024, -1))) == OK


def test_forbidden_io_uring_is_a_warning(tmp_path):
    assert state(doctor_machine.io_uring(tmp_path, errno.EFAULT)) == OK
    assert (state(doctor_machine.compiled_modules(False)), state(doctor_machine.compiled_modules(True))) == (
        OK,
        WARN,
    )
    for refused in (errno.EPERM, errno.ENOSYS):
        assert state(doctor_machine.io_uring(tmp_path, refused)) == WARN
    assert (
        state(
            doctor_machine.io_uring(put(tmp_path, "proc/sys/kernel/io_uring_disabled", "2\n"), errno.EFAULT)
        )
        == WARN
    )


def test_machine_clocks(tmp_path):
    assert state(doctor_machine.clock_synchronized(0x2001)) == OK
    assert state(doctor_machine.clock_synchronized(0x41), ["chrony"]) == WARN
    place = "sys/devices/system/clocksource/clocksource0/current_clocksource"
    assert state(doctor_machine.clock_source(put(tmp_path, place, "tsc\n"))) == OK
    assert state(doctor_machine.clock_source(put(tmp_path, place, "hpet\n"))) == WARN


def test_memory_and_swap(tmp_path):
    put(tmp_path, "proc/meminfo", "MemTotal:       16384000 kB\n")
    put(tmp_path, "proc/self/cgroup", "0::/a/b\n")
    assert state(doctor_machine.memory(tmp_path)) == OK
    put(tmp_path, "sys/fs/cgroup/a/b/memory.max", "max\n")
    assert state(doctor_machine.memory(tmp_path)) == OK
    put(tmp_path, "sys/fs/cgroup/a/memory.max", f"{512 << 20}\n")
    found = doctor_machine.memory(tmp_path)
    assert state(found) == WARN and "512 MiB" in found.seen
    put(tmp_path, "proc/swaps", "Filename Type Size Used Priority\n")
    assert state(doctor_machine.swap(tmp_path)) == OK
    put(tmp_path, "proc/swaps", "Filename Type Size Used Priority\n/dev/sda2 partition 1 0 -2\n")
    assert state(doctor_machine.swap(tmp_path)) == WARN
    assert state(doctor_machine.overcommit(put(tmp_path, "proc/sys/vm/overcommit_memory", "0\n"))) == OK
    assert state(doctor_machine.overcommit(put(tmp_path, "proc/sys/vm/overcommit_memory", "2\n"))) == WARN


def test_power_saving_governor_is_a_warning(tmp_path):
    assert state(doctor_machine.governor(tmp_path)) == OK
    put(tmp_path, "sys/devices/system/cpu/cpu0/cpufreq/scaling_governor", "powersave\n")
    assert state(doctor_machine.governor(tmp_path), ["performance"]) == WARN
    put(tmp_path, "sys/devices/system/cpu/cpu0/cpufreq/scaling_driver", "intel_pstate\n")
    assert state(doctor_machine.governor(tmp_path)) == OK


def test_network_ports(tmp_path):
    def port(name, mtu, speed, up="up"):
        place = tmp_path / "sys/class/net" / name
        (place / "device").mkdir(parents=True, exist_ok=True)
        for file, text in (("mtu", mtu), ("speed", speed), ("operstate", up)):
            (place / file).write_text(f"{text}\n")

    port("eth0", 9000, 25_000)
    port("eth9", 1500, 1000, "down")
    (tmp_path / "sys/class/net/lo").mkdir()
    assert state(doctor_machine.packet_sizes(tmp_path)) == OK == state(doctor_machine.link_speeds(tmp_path))
    port("eth1", 1500, 25_000)
    assert state(doctor_machine.packet_sizes(tmp_path), ["mtu"]) == WARN
    port("eth0", 1500, 1000)
    port("eth1", 1500, 1000)
    assert state(doctor_machine.link_speeds(tmp_path), ["10 Gbit/s"]) == WARN
    for again, wanted in ((10, OK), (5000, WARN)):
        put(tmp_path, "proc/net/snmp", f"Ip: A\nIp: 1\nTcp: OutSegs RetransSegs\nTcp: 1000000 {again}\n")
        assert state(doctor_machine.retransmits(tmp_path)) == wanted


def test_rdma_devices_and_their_problems_are_named(tmp_path):
    bare = doctor_machine.rdma_devices(tmp_path)
    assert state(bare) == OK and "no InfiniBand or RoCE device" in bare.seen
    put(tmp_path, "sys/class/infiniband/mlx5_0/ports/1/state", "1: DOWN\n")
    put(tmp_path, "sys/class/infiniband/mlx5_0/fw_ver", "22.39.1002\n")
    found = doctor_machine.rdma_devices(tmp_path)
    assert (
        state(found, ["nvpool doctor rdma"]) == WARN
        and "mlx5_0" in found.seen
        and "link mlx5_0:1 bad" in found.seen
    )
    assert any(one.name == "rdma" for one in doctor_machine.machine(tmp_path))


def test_machine_names():
    assert state(doctor_machine.own_name("localhost")) == OK
    assert state(doctor_machine.own_name("no-such-name.invalid"), ["/etc/hosts"]) == WARN


def test_all_checks_run_and_report_when_they_cannot_look():
    found = list(doctor_machine.machine())
    assert len(found) >= 19 and len({one.name for one in found}) == len(found)
    for one in found:
        state(one)
    assert {state(one) for one in doctor_machine.machine(Path("/nowhere-at-all"))} >= {WARN, BAD}

    def fails():
        raise PermissionError(errno.EACCES, "no")

    assert states(all_of("x", fails)) == [("x", WARN)]


# -- drives --------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "kind, options, wanted",
    [
        ("ext4", "rw,relatime", OK),
        ("xfs", "rw", OK),
        ("tmpfs", "rw", BAD),
        ("nfs4", "rw", BAD),
        ("fuse.sshfs", "rw", BAD),
        ("overlay", "rw", WARN),
        ("btrfs", "rw", WARN),
        ("ext4", "rw,nobarrier", BAD),
        ("ext4", "rw,barrier=0", BAD),
        ("xfs", "rw,sync", WARN),
    ],
)
def test_file_system_types_and_options(kind, options, wanted):
    assert state(doctor_drive.file_system(Path("/d"), Mount("8:1", Path("/d"), kind, "x", options))) == wanted


def test_mount_of_a_drive_is_the_deepest():
    all_mounts = [
        Mount("8:1", Path(place), "ext4", place, "rw") for place in ("/", "/mnt", "/mnt/a", "/mnt/ab")
    ]
    assert doctor_drive.mount_of(Path("/mnt/a/b"), all_mounts).source == "/mnt/a"


def test_block_devices(tmp_path):
    queue = tmp_path / "sys/dev/block/8:1/queue"
    for file, text in (("rotational", "0"), ("write_cache", "write back"), ("logical_block_size", "512")):
        put(tmp_path, queue / file, text + "\n")
    number = os.makedev(8, 1)
    assert {one for _, one in states(doctor_drive.device(Path("/d"), number, tmp_path))} == {OK}
    (queue / "rotational").write_text("1\n")
    (queue / "logical_block_size").write_text("8192\n")
    assert [one for _, one in states(doctor_drive.device(Path("/d"), number, tmp_path))] == [WARN, OK, BAD]
    assert [one for _, one in states(doctor_drive.device(Path("/d"), os.makedev(9, 9), tmp_path))] == [WARN]


def test_direct_reads_are_tried(tmp_path):
    def refuses(path, flags, mode=0):
        raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))

    assert state(doctor_drive.direct(tmp_path, refuses)) == WARN
    place = Path("/dev/shm") if Path("/dev/shm").is_dir() else tmp_path
    before = set(os.listdir(place))
    assert doctor_drive.direct(place).state in (OK, WARN) and set(os.listdir(place)) == before


def test_invalid_drive_is_reported_without_a_crash(tmp_path):
    class Broken(type(tmp_path)):
        def stat(self, **_):
            number = errno.EACCES if self.name == "others" else errno.EIO
            raise OSError(number, os.strerror(number))

    os.mkfifo(tmp_path / "pipe")
    for path, said in (
        (tmp_path / "pipe", "neither"),
        (Path("/dev/null"), "neither"),
        (tmp_path / "none", "not there"),
        (Broken(tmp_path / "dead"), "Input/output error"),
        (Broken(tmp_path / "others"), "may not look"),
    ):
        first, last = doctor_drive.drives([path])
        assert (
            state(first) == (WARN if "may not" in said else BAD)
            and said in first.seen
            and first.name == f"drive {path}"
        )
        assert state(last) == OK and "none" in last.seen


def test_space_and_drives_that_share_a_device(tmp_path):
    assert [doctor_drive.space(tmp_path, "x", (free, 1000)).state for free in (500, 50, 5)] == [OK, WARN, BAD]
    assert state(doctor_drive.space(tmp_path, "x")) in (OK, WARN, BAD)
    one, other = tmp_path / "a", tmp_path / "b"
    one.mkdir()
    other.mkdir()
    assert (
        state(doctor_drive.apart([one])) == OK
        and state(doctor_drive.apart([one, other]), ["one drive"]) == WARN
    )
    found = dict(states(doctor_drive.drives([one, tmp_path / "none"])))
    assert found[f"drive {tmp_path / 'none'}"] == BAD


# -- a pool --------------------------------------------------------------------------------------------------------------------


def node(number, state="serving", **more):
    return {
        "node": number,
        "name": f"n{number}",
        "address": f"10.0.0.{number}",
        "state": state,
        "etcd": True,
        "leads": number == 1,
    } | more


def test_chains_nodes_and_problems():
    for without, fewer, wanted in ((0, 0, OK), (0, 2, WARN), (1, 2, BAD)):
        seen = {"chains": {"total": 10, "without": without, "fewer": fewer, "filling": 0}}
        assert state(doctor_pool.chains(seen)) == wanted
    assert state(doctor_pool.nodes({"nodes": [node(1), node(2)]})) == OK
    assert state(doctor_pool.nodes({"nodes": [node(1), node(2, "silent")]})) == BAD
    problems = ["3 chains have too few copies", "the mount at /m is dead", "store 1 is fenced"]
    assert states(doctor_pool.problems({"problems": problems})) == [("pool", BAD)]
    fields = [
        {"kind": kind, "reason": f"reason {kind}", "remedy": remedy}
        for kind, remedy in (
            ("copies-missing", "wait"),
            ("shard-no-standby", "nvpool shard standbys POOL 1 1"),
            ("bad-block", ""),
        )
    ]
    shown = list(doctor_pool.problems({"problems": problems, "health": {"problems": fields}}))
    assert [(one.seen, one.remedy) for one in shown] == [
        ("reason shard-no-standby", "nvpool shard standbys POOL 1 1"),
        ("reason bad-block", "see nvpool status"),
    ]
    noticed = {"kind": "plain-text", "severity": "notice", "reason": "plain text", "remedy": "TLS"}
    assert states(doctor_pool.problems({"problems": problems, "health": {"problems": [noticed]}})) == [
        ("pool", WARN)
    ]


def test_etcd_members_and_leader():
    three = [node(1), node(2), node(3)]
    assert state(doctor_pool.etcd({"nodes": three})) == OK == state(doctor_pool.etcd({"nodes": three[:1]}))
    assert state(doctor_pool.etcd({"nodes": [*three[:2], node(3, "silent")]})) == WARN
    assert state(doctor_pool.etcd({"nodes": three[:2]}), ["another"]) == WARN
    assert state(doctor_pool.etcd({"nodes": [node(1, leads=False), *three[1:]]})) == BAD


def test_mounts_of_this_machine():
    def process(role, place, state="serving"):
        return {"role": role, "mountpoint": place, "state": state}

    status = {
        "processes": [
            process("mount", "/a"),
            process("holder", "/a"),
            process("mount", "/b"),
            process("mount", "/c", "dead"),
            {"role": "meta", "state": "serving"},
        ]
    }
    assert states(doctor_pool.mounts(status, True)) == [
        ("mount /a", OK),
        ("mount /b", WARN),
        ("mount /c", BAD),
    ]
    assert states(doctor_pool.mounts(status, False))[1] == ("mount /b", OK)


def test_different_versions_and_clocks_are_warned_about():
    assert (
        state(doctor_pool.versions({"a": "1", "b": "1"})) == OK
        and state(doctor_pool.versions({"a": "1", "b": "2"})) == WARN
    )
    for seconds, wanted in ((0.1, OK), (-3.0, WARN), (1000.0, BAD)):
        assert state(doctor_pool.skews({"a": 0.0, "b": seconds})) == wanted


def test_certificates_that_expire(tmp_path):
    now_s = 1_000_000.0
    ends = {
        "a.crt": 29.5,
        "b.crt": 28.0,
        "c.crt": 6.0,
        "d.crt": -0.1,
        "etcd/authority.crt": 31.0,
        "f/authority.crt": 29.5,
        "g/authority.crt": 6.0,
    }
    found = {
        name: CertificateFacts("", "1", now_s - 90 * 86_400, now_s + days * 86_400)
        for name, days in ends.items()
    }
    assert [one for _, one in states(doctor_pool.certificates(found, now_s))] == [
        OK,
        WARN,
        BAD,
        BAD,
        OK,
        WARN,
        BAD,
    ]
    (tmp_path / "etcd").mkdir()
    for name in ("authority.crt", "etcd/authority.crt"):
        (tmp_path / name).write_bytes(CertificateAuthority.make("0" * 32).certificate)
    read = doctor_pool.certificate_files(tmp_path)
    assert set(read) == {"authority.crt", "etcd/authority.crt"}
    assert read["authority.crt"].ends_s > SYSTEM_CLOCK.wall_ns() / 1e9


def test_public_metrics_are_a_warning():
    for listen, wanted in (("", OK), ("9477", OK), ("unix:/run/m.sock", OK), ("0.0.0.0:9477", WARN)):
        assert state(doctor_pool.metrics(listen)) == wanted


def test_addresses():
    found = dict(
        states(
            doctor_pool.names(
                [
                    "stream://127.0.0.1:1",
                    "stream://no-such-name.invalid:1",
                    "stream://192.0.2.7:1",
                    "stream+unix:///x.sock",
                ],
                ["stream://127.0.0.1:1", "stream://192.0.2.7:1"],
            )
        )
    )
    assert found == {"address 127.0.0.1": OK, "address no-such-name.invalid": BAD, "address 192.0.2.7": BAD}
    assert dict(states(doctor_pool.names(["stream://192.0.2.7:1"], []))) == {"address 192.0.2.7": OK}


def test_closed_ports_and_ports_of_other_programs():
    with socket.create_server(("127.0.0.1", 0)) as unrelated:
        port = unrelated.getsockname()[1]
        with socket.create_server(("127.0.0.1", 0)) as gone:
            closed = gone.getsockname()[1]
        there, away = f"stream://127.0.0.1:{port}", f"stream://127.0.0.1:{closed}"
        assert states(doctor_pool.ports({there: "serving"}, [there])) == [("ports", OK)]
        assert states(doctor_pool.ports({there: "stopped"}, [there]))[0] == (f"port 127.0.0.1:{port}", BAD)
        assert states(doctor_pool.ports({there: "stopped"}, [])) == [
            ("ports", OK)
        ]  # the port of another node
        assert states(doctor_pool.ports({away: "serving", "stream+unix:///x": "serving"}, []))[0] == (
            f"port 127.0.0.1:{closed}",
            BAD,
        )
        assert states(doctor_pool.ports({away: "silent"}, [])) == [
            ("ports", OK)
        ]  # reported with the processes


@pytest.mark.parametrize(
    ("interface", "agreed", "answers", "arrives", "wanted"),
    [
        (9000, 9000, True, True, OK),
        (9000, 9000, True, False, BAD),
        (9000, 1500, True, True, WARN),
        (9000, 1500, True, False, BAD),
        (9000, 1500, False, False, WARN),
        (1500, 1500, False, False, OK),
    ],
)
def test_lost_large_packets_are_reported(interface, agreed, answers, arrives, wanted):
    found = network_mtu.judge(network_mtu.Path("h", interface, agreed, answers, arrives))
    assert state(found, ["MTU"] if wanted != OK else []) == wanted
    assert ("not known" in found.seen) == (wanted == OK and not answers)


def test_paths_lead_only_to_other_machines():
    node = {"state": "serving", "endpoints": ["stream://127.0.0.1:9", "stream://no-such-name.invalid:9"]}
    assert list(doctor_pool.paths({"nodes": [node]})) == []


# -- the command -------------------------------------------------------------------------------------------------------------


def nvpool(*words):
    return subprocess.run(
        command(Program.CLI, *map(str, words)),
        capture_output=True,
        text=True,
        check=False,
        timeout=240,
        cwd="/",
        env={**os.environ, "NVPOOL_POOL": ""},
    )


def test_command_reports_all_and_fails_if_something_is_bad(tmp_path):
    done = nvpool("doctor", "--drive", tmp_path / "none", "--json")
    found = json.loads(done.stdout)
    assert done.returncode == 1 and {"name", "state", "seen", "remedy"} == set(found[0])
    bad = [one["name"] for one in found if one["state"] == "bad"]
    assert f"drive {tmp_path / 'none'}" in bad
    quiet = nvpool("doctor", "--drive", tmp_path / "none", "--json", "--quiet")
    assert all(one["state"] != "ok" for one in json.loads(quiet.stdout)) and quiet.returncode == 1


def test_running_pool_is_checked_and_a_stopped_one_is_bad(tmp_path):
    pool = tmp_path / "pool"
    try:
        assert nvpool("dev", "up", pool, "--size", "1G").returncode == 0
        found = {one["name"]: one for one in json.loads(nvpool("doctor", "--pool", pool, "--json").stdout)}
        assert {
            found[name]["state"] for name in ("nodes", "map", "copies", "versions", "clocks", "ports")
        } == {OK}
        assert (
            "+0.0 s" in found["clocks"]["seen"]
            and "drives apart" in found
            and "nvpool " in found["versions"]["seen"]
        )
    finally:
        nvpool("dev", "down", pool)
    gone = nvpool("doctor", "--pool", pool, "--json")
    assert gone.returncode == 1
