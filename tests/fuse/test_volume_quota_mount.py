"""Volumes on a real mount: quotas seen by dd and df, mv across the volume's border, and a takeover close to the quota."""

import errno
import os
import subprocess

import pytest

import nvpool as sdk
from tests.fuse.conftest import FLOOR, needs, nvpool, wait_until
from tests.fuse.kill_loads import kill_serving

pytestmark = [pytest.mark.mount, pytest.mark.skipif(FLOOR, reason="the floor has no volumes")]
ENGINES = ("kernel", "pyfuse3")
MIB = 1 << 20


@pytest.fixture
def volume(pool, mounted, request):
    """A volume of 10 MiB and 50 files, and its path on the mount."""
    name = f"v{abs(hash(request.node.name)) % 10**8}"
    nvpool("volume", "create", pool.directory, name, "--size", "10MiB", "--files", "50")
    yield name, mounted.place / "volumes" / name
    nvpool("volume", "rm", pool.directory, name, "--wait", "--force")


def shown(pool, name):
    with sdk.connect(str(pool.directory)) as fs:
        return fs.volumes.show(name)


@needs("dd", "df")
def test_dd_beyond_the_quota_writes_what_fits(pool, volume):
    name, place = volume
    ended = subprocess.run(
        ["dd", "if=/dev/zero", f"of={place}/f", "bs=1000000", "count=20"], capture_output=True, text=True
    )
    assert ended.returncode and "quota exceeded" in ended.stderr.lower(), ended.stderr
    assert os.stat(place / "f").st_size == 10 * MIB
    found = shown(pool, name)
    assert (found.bytes_used, found.files_used) == (10 * MIB, 1)
    with pytest.raises(OSError) as refused:
        (place / "g").write_bytes(b"x")
    assert refused.value.errno == errno.EDQUOT
    os.remove(place / "f")
    os.remove(place / "g")
    (place / "g").write_bytes(b"x" * 10 * MIB)
    assert shown(pool, name).bytes_used == 10 * MIB


@needs("df")
def test_df_shows_quota_and_usage(volume, engine):
    if engine == "pyfuse3":
        pytest.skip("libfuse's binding does not pass on the path of a statfs: df shows the pool")
    _, place = volume
    (place / "d").mkdir()
    (place / "d" / "f").write_bytes(b"x" * 4 * MIB)
    columns = (
        subprocess.run(
            ["df", "-B1", "--output=size,used,avail,itotal,iused", place / "d"],
            check=True,
            capture_output=True,
            text=True,
        )
        .stdout.split("\n")[1]
        .split()
    )
    assert columns == [str(10 * MIB), str(4 * MIB), str(6 * MIB), "50", "2"]


def test_files_are_counted_and_renames_across_the_border_fail(pool, mounted, volume):
    name, place = volume
    for number in range(50):
        (place / f"{number}").touch()
    with pytest.raises(OSError) as refused:
        (place / "more").touch()
    assert refused.value.errno == errno.EDQUOT
    with pytest.raises(OSError) as refused:
        (place / "more").mkdir()
    assert refused.value.errno == errno.EDQUOT
    with pytest.raises(OSError) as refused:
        os.rename(place / "0", mounted.place / "0")
    assert refused.value.errno == errno.EXDEV
    with pytest.raises(OSError) as refused:
        os.link(place / "0", mounted.place / "0")
    assert refused.value.errno == errno.EXDEV
    (place / "0").write_bytes(b"content")
    outside = mounted.place / f"out-{name}"
    subprocess.run(["mv", place / "0", outside], check=True)
    assert outside.read_bytes() == b"content"
    outside.unlink()
    wait_until(lambda: shown(pool, name).files_used == 49, "the service knows that it is closed")
    with pytest.raises(OSError) as refused:
        os.rmdir(place)
    assert refused.value.errno == errno.EBUSY
    with pytest.raises(OSError) as refused:
        os.rename(place, mounted.place / "volumes" / "elsewhere")
    assert refused.value.errno == errno.EBUSY


def test_process_that_takes_over_keeps_the_quota(pool, volume, engine):
    if engine == "pyfuse3":
        pytest.skip("a mount by libfuse's binding ends with its process")
    name, _ = volume
    mounted = pool.mount(pool.directory.parent / f"over-{name}", "--holder", "--drain-s", "2")
    place = mounted.place / "volumes" / name
    try:
        with open(place / "f", "wb", buffering=0) as file:
            written = 0
            for _ in range(3):
                written += file.write(b"x" * 2 * MIB)
            kill_serving(mounted)
            with pytest.raises(OSError) as refused:
                while True:
                    written += file.write(b"y" * MIB)
            assert refused.value.errno == errno.EDQUOT and written == 10 * MIB
        wait_until(lambda: shown(pool, name).bytes_used == 10 * MIB, "all is counted", 20)
        wait_until(lambda: not shown(pool, name).bytes_reserved, "no reservation is left", 20)
    finally:
        mounted.end()


def test_volume_closed_before_a_kill_can_be_removed(pool, engine):
    if engine == "pyfuse3":
        pytest.skip("a mount by libfuse's binding ends with its process")
    nvpool("volume", "create", pool.directory, "closed", "--size", "10MiB")
    mounted = pool.mount(pool.directory.parent / "over-closed", "--holder", "--drain-s", "2")
    try:
        for turn in range(4):
            for number in range(8):
                (mounted.place / "volumes" / "closed" / f"{turn}-{number}").write_bytes(b"x" * 1000)
            kill_serving(mounted)
        os.stat(mounted.place / "volumes" / "closed" / "0-0")
        nvpool("volume", "rm", pool.directory, "closed", "--wait")
    finally:
        mounted.end()
