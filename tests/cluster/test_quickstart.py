"""The quickstart on a small tree: once, again, without FUSE, interrupted, and with a wrong byte."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from nvpool.core import programs

ROOT = Path(__file__).resolve().parents[2]
CAN_MOUNT = os.path.exists("/dev/fuse") and os.geteuid() == 0


@pytest.fixture
def place(tmp_path):
    source = tmp_path / "source"
    (source / "sub").mkdir(parents=True)
    for number in range(30):
        (source / "sub" / f"file {number}").write_bytes(os.urandom(10_000 * number))
    (source / "link").symlink_to("sub")
    yield tmp_path
    subprocess.run(
        programs.command(programs.Program.CLI, "dev", "down", tmp_path / "p"), check=True, capture_output=True
    )


def command(place):
    return [
        sys.executable,
        str(ROOT / "tools" / "quickstart.py"),
        "--source",
        str(place / "source"),
        "--directory",
        str(place / "p"),
        "--mount",
        str(place / "m"),
        "--seconds",
        "0.3",
    ]


def quickstart(place, *, prefix=(), code=0):
    done = subprocess.run([*prefix, *command(place)], capture_output=True, text=True, timeout=240)
    assert done.returncode == code, done.stdout + done.stderr
    return done


@pytest.mark.mount
@pytest.mark.skipif(not CAN_MOUNT, reason="a mount needs /dev/fuse and root")
def test_second_run_finds_the_mounted_tree(place):
    first = quickstart(place).stdout
    assert (
        "30 files" in first
        and "equal, byte for byte" in first
        and "mount, 16 threads" in first
        and "SDK read_many" in first
    )
    assert (place / "m" / "source" / "sub" / "file 7").read_bytes() == (
        place / "source" / "sub" / "file 7"
    ).read_bytes()
    second = quickstart(place)
    assert "from an earlier run" in second.stdout and "were there already" in second.stderr

    # A difference in the pool is reported, a later change of the source is not.
    (place / "source" / "sub" / "file 3").write_bytes(b"changed")
    stand_in = place / "m" / "source" / "sub" / "file 5"
    times = stand_in.stat()
    stand_in.write_bytes(os.urandom(times.st_size))
    os.utime(stand_in, ns=(times.st_atime_ns, times.st_mtime_ns))
    third = quickstart(place, code=1)
    assert "1 files are not what they were" in third.stderr and "file 5" in third.stderr


@pytest.mark.skipif(os.geteuid() != 0, reason="hiding /dev/fuse needs root")
def test_without_fuse_the_sdk_is_used(place):
    if not os.path.exists("/dev/fuse"):
        shown = quickstart(place).stdout
    else:
        hidden = ["unshare", "-m", "sh", "-c", 'mount --bind /dev/null /dev/fuse && exec "$@"', "sh"]
        shown = quickstart(place, prefix=hidden).stdout
    assert "cannot be mounted here" in shown and "equal, byte for byte" in shown and "SDK read_many" in shown
    assert not os.path.ismount(place / "m")


def test_interrupted_quickstart_continues(place):
    for wait_for in ("1. A pool", "2. Import", "4. Read"):
        running = subprocess.Popen(
            command(place),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        for line in running.stdout:
            if wait_for in line:
                time.sleep(0.2)
                os.killpg(running.pid, signal.SIGINT)
                break
        rest, _ = running.communicate(timeout=240)
        assert running.returncode in (130, 0), rest
        assert "Traceback" not in rest, rest
    assert "equal, byte for byte" in quickstart(place).stdout


@pytest.mark.smoke
def test_tree_with_the_pool_itself_is_refused(place):
    done = subprocess.run(
        [*command(place), "--source", str(place)], capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 2 and "choose another tree" in done.stderr
