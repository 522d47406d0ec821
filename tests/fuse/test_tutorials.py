"""The commands and examples of the tutorials, run as printed there, on their own pool."""

import contextlib
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from nvpool.core.programs import processes
from tests.fuse.conftest import ROOT, wait_until
from tests.fuse.test_mount_type import Administrator
from tests.tutorial_commands import blocks, commands, environment, placed

pytestmark = pytest.mark.mount
PRINTED_POOL = "/tmp/try"
"""The pool of the tutorials; /tmp/try-mnt is its mount point. Each test replaces both by its own folder."""


def run(script, timeout_s):
    return subprocess.run(
        ["bash", "-euo", "pipefail", "-c", script],
        cwd=ROOT,
        env=environment(),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )


@pytest.fixture
def place(tmp_path):
    yield tmp_path / "try"
    run(f"nvpool dev down {tmp_path / 'try'}", 120)


@pytest.fixture
def root():
    """A directory that stands for / in printed commands: pools, drives, mount points. Sockets need a short path."""
    made = Path(tempfile.mkdtemp(prefix="nvpool-tutorial-"))
    for name in ("srv", "mnt/pool", "mnt/x", *(f"mnt/nvme{number}" for number in range(5)), "dev/nvme1n1"):
        (made / name).mkdir(parents=True)
    yield made
    shutil.rmtree(made)


@pytest.fixture
def administrator(root):
    made = Administrator(root)
    if not made.up:
        made.close()
        pytest.skip("a mount namespace cannot be created here")
    yield made
    while made.found(root / "mnt" / "x") is not None:
        made.run("umount", "-l", root / "mnt" / "x")
    made.close()


@contextlib.contextmanager
def served(command, root):
    """While the body runs, `nvpool serve` does, in the foreground of its own shell. Then nothing of the pool runs."""
    with open(root / "serve.log", "wb") as log:
        server = subprocess.Popen(
            ["bash", "-c", f"exec {command}"],
            env=environment(),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
        )
    try:
        yield
    finally:
        run(f"nvpool umount --lazy {root / 'mnt' / 'pool'}", 120)
        server.terminate()
        server.wait(120)
        wait_until(
            lambda: not any(str(root) in "\0".join(words) for _, words in processes()), "the end of the pool"
        )


def test_first_pool_runs_as_printed(place):
    commands = "\n".join(blocks("first-pool.md", "sh")).replace(". .venv/bin/activate\n", "")
    assert commands.count("nvpool ") >= 6
    done = run(commands.replace(PRINTED_POOL, str(place)), 300)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("hello") == 2, "the file is read before and after a store was killed"
    assert not place.exists()


def test_python_sdk_runs_as_printed(place):
    made = run(f"nvpool dev up {place} --drives 2 --size 1G", 120)
    assert made.returncode == 0, made.stdout + made.stderr
    examples = "\n".join(blocks("python-sdk.md", "python"))
    assert examples.count("pool.") >= 8
    done = subprocess.run(
        [sys.executable, "-c", examples.replace(PRINTED_POOL, str(place))],
        cwd=place,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_mount_runs_as_printed(root, administrator):
    # The page's machine that is not a node is in the tutorial about several nodes.
    texts = [(one.is_root, placed(one.text, root)) for one in commands("mount.md") if not one.host]
    assert len(texts) >= 9
    with contextlib.ExitStack() as stack:
        for is_root, text in texts:
            if text.startswith("nvpool serve "):
                stack.enter_context(served(text, root))
            elif is_root:
                administrator.run("sh", "-c", text)
            else:
                done = run(text, 240)
                assert done.returncode == 0, (text, done.stdout, done.stderr)


def test_volume_commands_run_as_printed(place):
    made = run(f"nvpool dev up {place} --drives 2 --size 1G", 120)
    assert made.returncode == 0, made.stdout + made.stderr
    texts = [one.text for one in commands("containers.md") if one.text.startswith("nvpool volume ")]
    assert len(texts) >= 7
    for text in texts:
        # This pool has no clients.
        text = text.replace("client/NAME ro", "client/trainer.9f31c2aa ro --force")
        done = run(text.replace("/srv/pool", str(place)), 120)
        assert done.returncode == 0, (text, done.stdout, done.stderr)
