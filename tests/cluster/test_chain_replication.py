"""Real processes with two replicas of each chunk: corrupt blocks, and stores that are killed or stopped.

Data that is lost or damaged on one target is read from the other one; readers and writers see no error.
"""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import nvpool
from nvpool.client.state.options import ClientOptions
from nvpool.core.units import MIB
from nvpool.testing.env.pool import RealPool, end_process
from nvpool.testing.loads.crash_history import content
from nvpool.testing.loads.data_verification import CheckingLoad, ClientLoad

CONFIG = """
[supervisor]
restart_delay_max_s = 0.5
"""
SIZES = (96 * MIB, 96 * MIB, 96 * MIB)
NVPOOL = str(Path(sys.executable).with_name("nvpool"))


@pytest.fixture
def pool(tmp_path):
    with RealPool(tmp_path / "pool", sizes=SIZES, config=CONFIG, replicas=2) as pool:
        pool.make()
        pool.start()
        yield pool


def places_of(pool, wanted: bytes) -> dict[int, int]:
    """target -> offset of these bytes in its data file."""
    found = {}
    for target in range(1, len(SIZES) + 1):
        at = (pool.directory.target(target) / "data").read_bytes().find(wanted)
        if at >= 0:
            found[target] = at
    return found


def flip(path: Path, at: int) -> None:
    with open(path, "r+b") as file:
        file.seek(at)
        byte = file.read(1)[0]
        file.seek(at)
        file.write(bytes([byte ^ 0x10]))


@pytest.mark.parametrize("options", [{}, {"short_circuit": False}], ids=["short-circuit", "remote"])
def test_corrupt_block_is_read_from_the_other_target(pool, options):
    client = nvpool.connect(str(pool.path), options=ClientOptions(deadline_s=60.0, **options))
    with client:
        for number in range(20):
            with client.open(f"/f{number}", "wb", buffering=0) as file:
                file.write(content(number, 200_000))
                file.fsync()
    rotten = 0
    for number in range(20):  # damage one of the two copies, alternately
        places = places_of(pool, content(number, 200_000)[4096:8192])
        assert len(places) == 2, f"f{number} is on the targets {sorted(places)}"
        target = sorted(places)[number % 2]
        flip(pool.directory.target(target) / "data", places[target] + 77)
        rotten += 1
    with nvpool.connect(str(pool.path), options=ClientOptions(deadline_s=60.0, **options)) as client:
        for _ in range(2):
            for number in range(20):
                assert client.read_bytes(f"/f{number}") == content(number, 200_000)
    assert rotten == 20


def test_clients_see_no_error_while_stores_are_killed(pool):
    with ClientLoad(lambda: nvpool.connect(str(pool.path), options=ClientOptions(deadline_s=60.0))) as load:
        load.goes_on()
        for target in (1, 2, 3, 1):
            end_process(killed := pool.pid(f"target-{target}"), signal.SIGKILL)
            pool.until(lambda: pool.pid(f"target-{target}") != killed, "another process serves the target")  # noqa: B023
            pool.wait()
            load.goes_on()
    load.verify()
    pool.until(lambda: pool.fsck() == [], "nothing is wrong")


@pytest.mark.smoke
@pytest.mark.mount
@pytest.mark.skipif(
    not os.path.exists("/dev/fuse") or os.geteuid() != 0, reason="a mount needs /dev/fuse and root"
)
def test_mount_keeps_everything_while_stores_are_killed(pool, tmp_path):
    place = tmp_path / "mount"
    place.mkdir()
    subprocess.run(
        [NVPOOL, "mount", str(pool.path), str(place)], check=True, timeout=240, capture_output=True
    )
    try:
        with CheckingLoad(place, threads=3, seed=7) as load:
            for target in (2, 3, 1):
                load.goes_on(15)
                end_process(pool.pid(f"target-{target}"), signal.SIGKILL)
            load.goes_on(15)
        load.verify()
    finally:
        subprocess.run([NVPOOL, "umount", str(place)], timeout=240, capture_output=True)
    pool.until(lambda: pool.fsck() == [], "nothing is wrong")
