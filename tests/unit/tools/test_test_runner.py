"""The test suite itself: runs in continuous integration, and settings of the programs that it starts."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture
def checkout(tmp_path):
    """A checkout with the suite's conftest and runner, but with its own tests."""
    for name in (".ci/run", "tests/conftest.py"):
        (tmp_path / name).parent.mkdir()
        shutil.copy(ROOT / name, tmp_path / name)
    (tmp_path / ".venv/bin").mkdir(parents=True)
    (tmp_path / ".venv/bin/python").write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')
    (tmp_path / ".venv/bin/python").chmod(0o755)
    (tmp_path / "Makefile").write_text(
        "test:\n\t@.venv/bin/python -m pytest -p no:cacheprovider -n 1 tests\n"
    )
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    return tmp_path


def ran(checkout, tests, *command):
    """Exit code and output. The run sees no mounts of other tests, which it would take for its own."""
    alone = ["unshare", "--mount", "--propagation", "private"] if os.geteuid() == 0 else []
    (checkout / "tests/test_it.py").write_text(tests)
    env = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST")}
    done = subprocess.run(
        [*alone, *(command or [".ci/run"])],
        cwd=checkout,
        env=env,
        text=True,
        timeout=250,
        check=False,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    return done.returncode, done.stdout


SECOND_TIME = """
import os, pytest

@pytest.mark.parametrize("name", ["a b", "c"])
def test_only_alone(name):
    there = os.path.exists(name)
    open(name, "w").close()
    assert there

def test_good():
    pass
"""


def test_failure_that_passes_alone_is_listed_and_accepted(checkout):
    code, said = ran(checkout, SECOND_TIME)
    assert code == 0, said
    first, second = said.split("run again alone and one by one:")
    assert "2 failed, 1 passed" in first and "2 passed" in second
    assert second.endswith(
        "ci: failed beside others, passed alone:\n  tests/test_it.py::test_only_alone[a b]\n"
        "  tests/test_it.py::test_only_alone[c]\n"
    )


@pytest.mark.t3
def test_second_failure_fails_the_run(checkout):
    code, said = ran(checkout, SECOND_TIME + "\ndef test_bad():\n    assert False\n")
    assert code == 2, said
    assert "1 failed, 2 passed" in said and said.endswith("not all passed alone\n")


@pytest.mark.t3
def test_failed_module_fixture_reruns_the_whole_file(checkout):
    code, said = ran(
        checkout,
        "import os, pytest\n\n@pytest.fixture(scope='module', autouse=True)\ndef found():\n    yield\n"
        "    there = os.path.exists('x')\n    open('x', 'w').close()\n    assert there\n\n"
        "def test_one():\n    pass\n\ndef test_two():\n    pass\n",
    )
    assert code == 0, said
    assert "2 passed" in said.split("run again")[1] and said.endswith("  tests/test_it.py\n")


@pytest.mark.few(0)
@pytest.mark.parametrize(
    "tests, why",
    [
        (
            "import pytest\n\n@pytest.mark.parametrize('n', range(11))\ndef test_bad(n):\n    assert False\n",
            "11 entries",
        ),
        (
            "import subprocess\n\ndef test_leaves():\n    subprocess.Popen(['sleep', '120'])\n",
            "never again: left behind",
        ),
        ("import no_such_module\n", "never again: tests/test_it.py cannot be collected"),
    ],
    ids=["many", "a process is left", "not collected"],
)
def test_failures_that_prove_themselves_are_not_rerun(checkout, tests, why):
    code, said = ran(checkout, tests)
    assert code == 2 and why in said and "run again alone" not in said, said


@pytest.mark.few(1)
@pytest.mark.parametrize("workers", [0, 1])
def test_started_programs_accept_interrupts_in_the_background(checkout, workers):
    code, said = ran(
        checkout,
        """
import signal, subprocess, sys

def test_interrupt():
    waiting = "import time; print(1, flush=True); time.sleep(200)"
    program = subprocess.Popen([sys.executable, "-c", waiting], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    program.stdout.read(1)
    program.send_signal(signal.SIGINT)
    assert program.wait(100) == -signal.SIGINT
""",
        "sh",
        "-c",
        f".venv/bin/python -m pytest -n {workers} tests & wait $!",
    )
    assert code == 0, said
