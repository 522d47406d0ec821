"""A mount that is killed with locks: no other client gets them while the mount could still write, and any can afterwards."""

import fcntl
import os
import signal
import subprocess
import time

import pytest

from nvpool.core.programs import Program, command
from nvpool.testing.env.pool import RealPool

pytestmark = [
    pytest.mark.mount,
    pytest.mark.skipif(
        not os.path.exists("/dev/fuse") or os.geteuid() != 0, reason="a mount needs /dev/fuse and root"
    ),
]
LEASE_S, GRANT_S, SKEWS_S = 1.0, 2.0, 10.0


def mount(pool, place):
    place.mkdir()
    daemon = subprocess.Popen(
        command(Program.MOUNT, "--no-holder", str(pool.path), str(place)),
        cwd="/",
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    pool.until(lambda: os.path.ismount(place), f"mount of {place}")
    return daemon


@pytest.mark.soak
@pytest.mark.parametrize("shard_dies", [False, True])
def test_locks_of_a_killed_mount_are_released_after_its_tokens(tmp_path, shard_dies):
    with RealPool(
        tmp_path / "pool", config=f"[meta]\nsession_lease_s = {LEASE_S}\ngrant_s = {GRANT_S}\n"
    ) as pool:
        pool.make()
        pool.start()
        one, other = tmp_path / "one", tmp_path / "other"
        daemons = [mount(pool, one), mount(pool, other)]
        try:
            (one / "f").write_bytes(b"x")
            holder = open(one / "f", "r+b", buffering=0)
            fcntl.lockf(holder, fcntl.LOCK_EX)
            daemons[0].kill()
            died = time.monotonic()
            if shard_dies:
                time.sleep(3)
                os.kill(pool.pid("meta-1"), signal.SIGKILL)
                died = time.monotonic() - LEASE_S
            with open(other / "f", "r+b", buffering=0) as waiting:
                with pytest.raises(BlockingIOError):
                    fcntl.lockf(waiting, fcntl.LOCK_EX | fcntl.LOCK_NB)
                fcntl.lockf(waiting, fcntl.LOCK_EX)
                took = time.monotonic() - died
                assert LEASE_S / 2 + GRANT_S + SKEWS_S < took < LEASE_S + GRANT_S + SKEWS_S + 60
                fcntl.lockf(waiting, fcntl.LOCK_UN)
            assert pool.fsck() == []
        finally:
            for daemon in daemons:
                daemon.send_signal(signal.SIGTERM)
            for place in (one, other):
                subprocess.run(["umount", "-l", str(place)], capture_output=True)
            for daemon in daemons:
                daemon.wait(120)
            try:
                holder.close()
            except OSError:
                pass  # its mount is gone
