"""An unprivileged user on the pool's host: the SDK shows the same as a mount, and refuses the same."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.fuse.conftest import FLOOR
from tests.fuse.unprivileged_operations import FOLDERS, make

pytestmark = [
    pytest.mark.mount,
    pytest.mark.skipif(FLOOR, reason="the floor has no service"),
    pytest.mark.skipif(bool(os.geteuid()), reason="only root becomes another user"),
]
PROGRAM = Path(__file__).with_name("unprivileged_operations.py")


def attempted(*words):
    done = subprocess.run(
        [sys.executable, PROGRAM, *map(str, words)], capture_output=True, text=True, timeout=240
    )
    assert not done.returncode, done.stderr
    return json.loads(done.stdout)


def test_sdk_and_mount_give_a_user_the_same_results(pool, mounted, here):
    make(here / "mount")
    make(here / "sdk")
    by_mount = attempted("mount", here / "mount")
    by_sdk = attempted("sdk", f"/{here.name}/sdk", pool.directory)
    differ = {what: (by_mount[what], by_sdk[what]) for what in by_mount if by_mount[what] != by_sdk[what]}
    assert not differ, "\n".join(f"{what}: {both}" for what, both in differ.items())
    refused = {what for what, found in by_sdk.items() if found in ("EACCES", "EPERM")}
    assert len(refused) > 100 and len(by_sdk) - len(refused) > 100
    assert {"open f600 rb", "open d700/f", "chown own600 (0, -1)", "set trusted.a of f666"} <= refused


def test_user_reaches_the_pool_without_its_map_or_secrets(pool, mounted, here):
    """With the permissions of a node's files: the map is readable by its group at most, and run/ is searchable but not
    listable.
    """
    make(here / "tree")
    kept = {
        path: path.stat().st_mode & 0o7777
        for path in (
            pool.directory / "poolmap.json",
            pool.directory / "node.toml",
            pool.directory / "run",
            pool.directory,
        )
    }
    try:
        for path, mode in zip(kept, (0o640, 0o640, 0o711, 0o711), strict=True):
            path.chmod(mode)
        found = attempted("sdk", f"/{here.name}/tree", pool.directory)
    finally:
        for path, mode in kept.items():
            path.chmod(mode)
    assert found["open f600 rb"] == "EACCES" and found["open f644 rb"] == "con"
    assert sum(found[f"list {name}"] == "EACCES" for name in FOLDERS) == 2
