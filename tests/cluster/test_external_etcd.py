"""Pools whose map is in the operator's own etcd: created, used, joined, and refused before anything is created."""

import asyncio
import shutil
import subprocess

import pytest
from aetcd import rpc

from nvpool.cluster.etcd.client import EtcdCalls
from nvpool.core.clock import SYSTEM_CLOCK
from nvpool.core.programs import Program, command
from nvpool.provision.map_location import read_map_location
from nvpool.testing.env import etcd as real_etcd
from nvpool.testing.env import namespaces
from nvpool.testing.env.etcd_members import has_keys, token_of, until
from nvpool.testing.env.multi_node_pool import Pool
from nvpool.testing.env.namespaces import Machines
from nvpool.testing.env.pool import TCP, RealPool

pytestmark = pytest.mark.skipif(bool(real_etcd.missing()), reason=real_etcd.missing() or "")


def nvpool(*words) -> subprocess.CompletedProcess:
    return subprocess.run(
        command(Program.CLI, *map(str, words)),
        capture_output=True,
        text=True,
        timeout=200,
        stdin=subprocess.DEVNULL,
    )


class ExternalEtcdPool(RealPool):
    """A pool in `etcd`."""

    def __init__(self, directory, etcd):
        super().__init__(directory, sizes=(64 << 20,), config=TCP)
        self.etcd = {"urls": etcd.urls} | dict(zip(("ca", "cert", "key"), map(str, etcd.files), strict=False))

    def request(self):
        return super().request() | {"etcd": self.etcd}


@pytest.mark.parametrize("secured", [False, True], ids=["http", "https"])
def test_pool_of_one_node_in_an_external_etcd(tmp_path, secured):
    with (
        real_etcd.RealEtcd(1 if secured else 3, secured=secured) as etcd,
        ExternalEtcdPool(tmp_path / "pool", etcd) as pool,
    ):
        pool.make()
        location = read_map_location(pool.directory)
        assert location.external == ("secured" if secured else "plain") and location.members == tuple(
            etcd.members
        )
        pool.start()
        assert not pool.status()["problems"] and pool.pool_map.etcd == ()
        files = pool.connect()
        files.write_bytes("/kept", b"kept")
        epoch = pool.pool_map.epoch
        pool.end_daemons()
        pool.start()
        assert files.read_bytes("/kept") == b"kept" and pool.pool_map.epoch >= epoch
        etcd.kill(0)
        if secured:
            pool.until(
                lambda: any("do not answer" in problem for problem in pool.status()["problems"]),
                "status reports the problem",
                60,
            )
            assert files.read_bytes("/kept") == b"kept"
            etcd.start(0)
            etcd.wait(0)
        pool.until(lambda: not pool.status()["problems"], "all is well again", 90)
        pool.until(lambda: nvpool("client", "token", pool.path).returncode == 0, "a change", 90)


def test_interrupted_creation_continues_with_the_same_pool(tmp_path):
    with real_etcd.RealEtcd() as etcd, ExternalEtcdPool(tmp_path / "pool", etcd) as pool:
        pool.make()
        first = pool.pool_map
        (pool.path / "FORMAT").write_text("nvpool pool being made\n")
        (pool.path / "being-made").write_text(first.pool_id)
        pool.make()
        assert pool.pool_map.pool_id == first.pool_id
        pool.start()
        assert not pool.status()["problems"]


@pytest.mark.smoke
def test_unusable_etcd_is_refused_before_creation(tmp_path):
    drive, directory = tmp_path / "drive", tmp_path / "pool"
    drive.mkdir()
    for options, words in (
        (["--etcd", "http://127.0.0.1:9"], "etcd does not answer"),
        (["--etcd", "127.0.0.1:2379"], "https://HOST:PORT"),
        (["--etcd", "https://127.0.0.1:9"], "--etcd-key"),
        (["--etcd", "http://127.0.0.1:9", "--etcd-ca", "/dev/null"], "https://"),
        (["--etcd-ca", "/dev/null"], "go with --etcd"),
    ):
        done = nvpool("pool", "create", directory, "--drive", f"{drive}:64M", *options)
        assert done.returncode and words in done.stderr, done
        assert not directory.exists() and not list(drive.iterdir())


@pytest.mark.skipif(bool(namespaces.missing()), reason=namespaces.missing() or "")
def test_nodes_join_a_pool_in_an_external_etcd():
    with Machines(2) as hosts:
        pool = Pool(hosts, plain=False)
        first, second = pool.nodes
        at = f"http://{first.machine.address}"
        etcd = first.machine.popen(
            shutil.which("etcd"),
            "--data-dir",
            str(first.machine.place / "own-etcd"),
            "--log-level",
            "error",
            "--listen-client-urls",
            f"{at}:2379",
            "--advertise-client-urls",
            f"{at}:2379",
        )
        try:
            until(
                lambda: (
                    first.machine.run(
                        "bash", "-c", f"exec 3<>/dev/tcp/{first.machine.address}/2379", check=False
                    ).returncode
                    == 0
                ),
                "etcd listens",
                first,
            )
            pool.found("--etcd", f"{at}:2379")
            pool.join(second, first.json("node", "token", str(first.path)))
            assert len(second.until_all_serve()["nodes"]) == 2 and second.map().etcd == ()
            assert read_map_location(second.directory).external == "plain"
            until(lambda: has_keys(second), "the second node lets others in", second)
            until(lambda: token_of(second).returncode == 0, "a change", second)
        finally:
            etcd.kill()
            etcd.wait()
            for node in pool.nodes:
                node.kill_all()


def keys(etcd) -> int:
    """Number of keys of all pools."""

    async def count() -> int:
        calls = EtcdCalls(etcd.members, SYSTEM_CLOCK)
        try:
            return (
                await calls.range(
                    rpc.RangeRequest(key=b"nvpool/", range_end=b"nvpool0", count_only=True), 10.0
                )
            ).count
        finally:
            await calls.close()

    return asyncio.run(count())


def test_destroyed_pool_leaves_no_key_or_names_the_rest(tmp_path):
    with real_etcd.RealEtcd() as etcd:
        with ExternalEtcdPool(tmp_path / "pool", etcd) as pool:
            pool.make()
            pool.start()
            assert keys(etcd) > 1
            done = nvpool("pool", "destroy", pool.path, "--yes")
            assert done.returncode == 0 and "removed what was below nvpool/" in done.stdout, done
            assert not keys(etcd) and not pool.path.exists()
        with ExternalEtcdPool(tmp_path / "other", etcd) as pool:
            pool.make()
            pool_id = pool.pool_map.pool_id
            etcd.kill(0)
            done = nvpool("pool", "destroy", pool.path, "--yes")
            assert done.returncode == 0 and f"etcdctl del --prefix nvpool/{pool_id}/" in done.stdout, done
            assert not pool.path.exists()
            etcd.start(0)
            etcd.wait(0)
            assert keys(etcd) == 2
