"""`make clean` removes only what the Makefile made, and never a file below a mount."""

import importlib.util
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from nvpool.core.programs import Program

_spec = importlib.util.spec_from_file_location(
    "tools_clean", Path(__file__).parents[3] / "tools" / "clean.py"
)
clean = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(clean)

needs_mounts = pytest.mark.skipif(
    os.geteuid() != 0 or subprocess.run(["unshare", "-m", "true"], capture_output=True).returncode != 0,
    reason="needs a mount namespace of its own",
)


@pytest.fixture
def checkout(tmp_path):
    """A directory that looks like a checkout after setup and quickstart."""
    for name in (
        ".venv/bin/python",
        ".quickstart/targets/1/data",
        "nvpool/store/_uring.c",
        "nvpool/store/_uring.abi3.so",
        "nvpool/__pycache__/a.pyc",
        "nvpool/a.py",
        "README.md",
        "nvpool.egg-info/PKG-INFO",
    ):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(name)
    (tmp_path / "pool").mkdir()
    return tmp_path


def files_in(root):
    return sorted(
        str(path.relative_to(root)) for path in root.rglob("*") if path.is_file() or path.is_symlink()
    )


def test_built_files_are_removed_and_sources_stay(checkout):
    clean.clean(str(checkout))
    assert files_in(checkout) == ["README.md", "nvpool/a.py"]
    assert not (checkout / "pool").exists()
    clean.clean(str(checkout))


def test_symbolic_link_is_removed_and_its_target_stays(checkout, tmp_path_factory):
    other = tmp_path_factory.mktemp("other")
    (other / "precious").write_text("x")
    (checkout / ".quickstart" / "link").symlink_to(other)
    (checkout / "build").symlink_to(other)
    clean.clean(str(checkout))
    assert (other / "precious").exists() and not (checkout / "build").is_symlink()


def test_file_in_the_mount_point_stops_the_removal(checkout):
    (checkout / "pool" / "mine").write_text("x")
    before = files_in(checkout)
    with pytest.raises(clean.Kept, match="pool is not removed"):
        clean.clean(str(checkout))
    assert files_in(checkout) == before


@needs_mounts
@pytest.mark.parametrize("mount", ["mount -t tmpfs none {at}", "mount --bind {other} {at}"])
def test_tree_with_a_mount_below_is_kept(checkout, tmp_path_factory, mount):
    other = tmp_path_factory.mktemp("other")
    (other / "precious").write_text("x")
    at = checkout / ".quickstart" / "targets" / "with blank"
    at.mkdir()
    command = (
        mount.format(at=f"'{at}'", other=other) + f"; touch '{at}/inside'; exec {sys.executable} -c \"$0\""
    )
    program = f"""
import importlib.util, sys
spec = importlib.util.spec_from_file_location("c", {clean.__file__!r}); c = importlib.util.module_from_spec(spec)
spec.loader.exec_module(c)
try:
    c.clean({str(checkout)!r})
except c.Kept as kept:
    print(kept)
import os; print(os.listdir({str(at)!r}))
"""
    done = subprocess.run(
        ["unshare", "-m", "sh", "-c", command, program], capture_output=True, text=True, timeout=240
    )
    assert "nothing of it was removed" in done.stdout and "inside" in done.stdout, done
    assert (checkout / ".quickstart" / "targets" / "1" / "data").exists() and (other / "precious").exists()


def test_removal_does_not_cross_file_systems(checkout, monkeypatch):
    monkeypatch.setattr(clean, "mounts_below", lambda path: [])
    real = os.fstat
    inner = (checkout / ".quickstart" / "targets").stat().st_ino

    def another_device_below_targets(fd):
        found = real(fd)
        return os.stat_result((*found[:2], found.st_dev + 1, *found[3:])) if found.st_ino == inner else found

    monkeypatch.setattr(clean.os, "fstat", another_device_below_targets)
    with pytest.raises(clean.Kept, match="another file system"):
        clean.remove_tree(str(checkout / ".quickstart"))
    assert (checkout / ".quickstart" / "targets" / "1" / "data").exists()


def test_mount_points_are_read_with_escaped_blanks():
    line = (
        rb"36 35 98:0 / /a/b\040c\134d rw,noatime master:1 - fuse.nvpool nvpool rw"
        + b"\n"
        + b"37 35 98:0 / /a/bc rw - tmpfs none rw\n"
    )
    assert clean.mounts_below("/a", line) == [("/a/b c\\d", "fuse.nvpool nvpool"), ("/a/bc", "tmpfs none")]
    assert clean.mounts_below("/a/b", line) == []


def test_only_daemons_of_this_pool_directory_are_stopped(checkout, tmp_path_factory):
    other = tmp_path_factory.mktemp("other")
    program = ["-c", "import time; time.sleep(60)", Program.STORE.title]
    ours = subprocess.Popen([sys.executable, *program, str(checkout / ".quickstart"), "1"])
    relative = subprocess.Popen([sys.executable, *program, ".quickstart", "1"], cwd=checkout)
    theirs = subprocess.Popen([sys.executable, *program, str(other), "1"])
    named = subprocess.Popen(
        [sys.executable, "-c", "import time; time.sleep(60)", str(checkout / ".quickstart")]
    )
    try:
        deadline = time.monotonic() + 120
        while len(clean.daemons_of(str(checkout / ".quickstart"))) < 2 and time.monotonic() < deadline:
            time.sleep(0.01)
        clean.stop(str(checkout / ".quickstart"))
        assert ours.wait(10) and relative.wait(10)
        assert theirs.poll() is None and named.poll() is None
    finally:
        for child in (ours, relative, theirs, named):
            child.kill()
            child.wait()
