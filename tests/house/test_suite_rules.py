"""Distribution of the suite by `make test`: tests of one file may share a pool, so they share a worker. And its tiers."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

TESTS = """
import os, pathlib, pytest

@pytest.mark.parametrize("number", range(4))
def test_something(number):
    with open(pathlib.Path(__file__).with_suffix(".workers"), "a") as file:
        print(os.environ["PYTEST_XDIST_WORKER"], file=file)
"""


def test_tests_of_a_file_run_in_one_worker(tmp_path):
    spread = re.search(r"SPREAD := (.*)", (ROOT / "Makefile").read_text())[1]
    files = [tmp_path / "test_one.py", tmp_path / "test_other.py"]
    for file in files:
        file.write_text(TESTS)
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-n", "2", *spread.split(), tmp_path],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert "8 passed" in done.stdout, done
    for file in files:
        assert len(set(file.with_suffix(".workers").read_text().split())) == 1


SLOW_FOLDERS = ("cluster", "bridge", "packaging")
LONG = {
    "test_certificate_renewal",
    "test_systemd_machine",
    "test_node_operations",
    "test_node_tutorial",
    "test_striped_directory",
    "test_supervisor_endpoints",
    "test_slow_node",
    "test_lock_release",
    "test_wheel",
    "test_rolling_upgrade",
}
"""Files whose shortest test takes more than 15 s with its set-up: `make test-all` runs them, or `make soak` the last
one. Smoke tests of other files start nodes, shards with standbys and systemd services too."""


@pytest.mark.parametrize("path", sorted((ROOT / "tests").rglob("test_*.py")), ids=lambda path: path.stem)
def test_slow_file_has_a_smoke_test(path):
    """`make test` runs the smoke tests of tier T3; without one, a change that breaks all of the file would pass."""
    text = path.read_text()
    module = re.sub(r"^@.*", "", text, flags=re.M)  # without the marks of single tests
    slow = (
        path.relative_to(ROOT / "tests").parts[0] in SLOW_FOLDERS and "pytest.mark.t1" not in module
    ) or "pytest.mark.t3" in module
    slow = slow and path.stem not in LONG
    assert ("pytest.mark.smoke" in text) == slow


def test_durations_name_files_that_exist():
    known = json.loads((ROOT / "tests/durations.json").read_text())
    assert known and not [name for name in known if not (ROOT / name).is_file()]
