"""Units of systemd: `systemd-analyze` accepts them, and the daemon's unit is well confined."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

UNITS = Path(__file__).resolve().parents[2] / "systemd"
SERVICES = sorted(UNITS.glob("*.service"))

pytestmark = pytest.mark.skipif(
    shutil.which("systemd-analyze") is None, reason="systemd-analyze is not installed (Debian: systemd)"
)


def analyze(*words: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["systemd-analyze", *words], capture_output=True, text=True, timeout=60)


def installed_copy(unit: Path, tmp_path: Path) -> Path:
    """A copy of a unit whose programs exist, as after an installation."""
    programs = tmp_path / "bin"
    programs.mkdir()
    for name in ("nvpool", "nvpoold"):
        (programs / name).write_text("#!/bin/sh\n")
        (programs / name).chmod(0o755)
    (tmp_path / unit.name).write_text(unit.read_text().replace("/usr/bin/nvpool", str(programs / "nvpool")))
    return tmp_path / unit.name


@pytest.mark.parametrize("unit", SERVICES, ids=lambda unit: unit.name)
def test_systemd_accepts_the_unit(unit, tmp_path):
    found = analyze("verify", "--man=no", installed_copy(unit, tmp_path))
    assert (found.returncode, found.stdout + found.stderr) == (0, "")


def test_mount_unit_ignores_failures_of_pre_commands():
    before = re.findall(r"^ExecStartPre=(.*)", (UNITS / "nvpool-mount@.service").read_text(), re.MULTILINE)
    assert before and all(line.startswith("-") for line in before)


def test_systemd_rejects_a_wrong_unit(tmp_path):
    unit = installed_copy(UNITS / "nvpoold.service", tmp_path)
    unit.write_text(unit.read_text().replace("Restart=always", "Restart=at-times"))
    assert "at-times" in analyze("verify", "--man=no", unit).stderr


def test_daemon_exposure_is_at_most_three():
    found = analyze("security", "--offline=true", "--threshold=30", "--no-pager", UNITS / "nvpoold.service")
    assert found.returncode == 0, found.stdout[-300:]
    assert "Overall exposure level for nvpoold.service" in found.stdout


@pytest.mark.parametrize("name", ["nvpool.sysusers", "nvpool.tmpfiles"])
def test_users_and_directories_are_created(name, tmp_path):
    program = (
        ["systemd-sysusers", f"--root={tmp_path}"]
        if name.endswith("sysusers")
        else ["systemd-tmpfiles", "--create", f"--root={tmp_path}"]
    )
    if shutil.which(program[0]) is None:
        pytest.skip(f"{program[0]} is not installed (Debian: systemd)")
    (tmp_path / "etc").mkdir()
    if name.endswith("tmpfiles"):
        (tmp_path / "etc" / "passwd").write_text("nvpool:x:990:990::/:/bin/false\nroot:x:0:0::/:/bin/sh\n")
        (tmp_path / "etc" / "group").write_text("nvpool:x:990:\nroot:x:0:\n")
    done = subprocess.run([*program, UNITS / name], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    if name.endswith("sysusers"):
        assert re.search(r"^nvpool:x:\d+:\d+:", (tmp_path / "etc" / "passwd").read_text(), re.M)
    else:
        assert (tmp_path / "var/lib/nvpool").stat().st_uid == 990
        assert (tmp_path / "var/lib/nvpool").stat().st_mode & 0o777 == 0o751
