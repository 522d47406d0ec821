"""How `make test` spreads the suite: tests of one file may share a pool, so they share a worker."""

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]

TESTS = """
import os, pathlib, pytest

@pytest.mark.parametrize("number", range(4))
def test_something(number):
    with open(pathlib.Path(__file__).with_suffix(".workers"), "a") as file:
        print(os.environ["PYTEST_XDIST_WORKER"], file=file)
"""


def test_the_tests_of_a_file_run_in_one_worker(tmp_path):
    spread = re.search(r"\$\(PYTEST\) -n \$\(WORKERS\) (.*)", (ROOT / "Makefile").read_text())[1]
    files = [tmp_path / "test_one.py", tmp_path / "test_other.py"]
    for file in files:
        file.write_text(TESTS)
    done = subprocess.run([sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-n", "2", *spread.split(), tmp_path],
                          cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False)
    assert "8 passed" in done.stdout, done
    for file in files:
        assert len(set(file.with_suffix(".workers").read_text().split())) == 1
