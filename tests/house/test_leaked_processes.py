"""The test suite detects processes that a test leaves behind."""

import contextlib
import subprocess
import sys
from pathlib import Path


def test_leaked_process_is_named_killed_and_fails_the_run(tmp_path):
    (tmp_path / "conftest.py").write_text(
        (Path(__file__).parents[1] / "conftest.py").read_text().replace("15.0", "0.5")
    )
    (tmp_path / "test_it.py").write_text("""
import subprocess, sys
def test_it():
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(99)"], start_new_session=True)
    open("pid", "w").write(str(child.pid))
    child.returncode = 0  # so that Python does not warn of it
""")
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "."],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=240,
    )
    pid = int((tmp_path / "pid").read_text())
    assert done.returncode == 1 and f"LEFT BEHIND process {pid}" in done.stdout, done.stdout
    assert done.stdout.splitlines()[-1].startswith("1 passed")
    with contextlib.suppress(FileNotFoundError):  # or it is a zombie that its new parent has not reaped
        assert Path(f"/proc/{pid}/cmdline").read_bytes() == b""
