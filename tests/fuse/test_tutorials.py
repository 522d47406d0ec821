"""The commands and examples of the tutorials, run as printed there, on their own pool."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.fuse.conftest import ROOT

pytestmark = pytest.mark.mount
TUTORIAL = ROOT / "docs" / "tutorial"
PRINTED_POOL = "/tmp/try"
"""The pool of the tutorials; /tmp/try-mnt is its mount point. Each test replaces both by its own folder."""


def blocks(page, language):
    return re.findall(rf"^```{language}\n(.*?)^```", (TUTORIAL / page).read_text(), re.MULTILINE | re.DOTALL)


def run(script, timeout_s):
    environment = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    return subprocess.run(
        ["bash", "-euo", "pipefail", "-c", script],
        cwd=ROOT,
        env=environment,
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
