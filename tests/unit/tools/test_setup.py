"""`make setup` names its changes to the machine; without root it only prints the command that needs root."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
SHELL = shutil.which("sh")


@pytest.fixture
def machine(tmp_path):
    """A checkout, and programs that record their arguments."""
    (tmp_path / "checkout" / "tools").mkdir(parents=True)
    (tmp_path / "checkout" / "nvpool").mkdir()
    for name in ("Makefile", "pyproject.toml", "tools/setup.sh"):
        shutil.copy(ROOT / name, tmp_path / "checkout" / name)
    programs = tmp_path / "programs"
    programs.mkdir()

    def program(name, text):
        (programs / name).write_text(f"#!{SHELL}\n{text}\n")
        (programs / name).chmod(0o755)

    program(
        "apt-get",
        f'echo "apt-get $*" >>{tmp_path}/asked; test "$1" = update || {{ echo no such package >&2; exit 100; }}',
    )
    program("dpkg-query", 'case "$*" in *fio*) exit 1 ;; esac; echo "install ok installed"')
    return tmp_path, program


def setup(place, *words):
    env = os.environ | {"PATH": f"{place / 'programs'}:{os.environ['PATH']}"}
    return subprocess.run(
        [SHELL, "tools/setup.sh", *words],
        cwd=place / "checkout",
        env=env,
        capture_output=True,
        text=True,
        timeout=240,
    )


def test_setup_without_root_only_prints_the_command(machine):
    place, program = machine
    program("id", "echo 1000")
    done = setup(place)
    assert done.returncode == 1
    assert (
        done.stdout.strip() == "sudo apt-get update && sudo apt-get install --yes --no-install-recommends fio"
    )
    assert not (place / "asked").exists() and not (place / "checkout" / ".venv").exists()


def test_setup_as_root_installs_only_the_named_packages(
    machine,
):
    place, program = machine
    program("id", "echo 0")
    done = setup(place)
    assert done.returncode == 1 and "could not install: fio" in done.stderr
    assert done.stderr.index("installing Debian packages: fio") < done.stderr.index("no such package")
    install, update, again = (place / "asked").read_text().splitlines()
    assert install == again and install.startswith("apt-get install --yes") and install.endswith(" fio")
    assert update.startswith("apt-get update")


def test_clean_finds_a_python_before_setup(machine):
    place, _ = machine
    found = setup(place, "--print-python").stdout.strip()
    assert subprocess.run([found, "-c", "import sys; sys.exit(sys.version_info < (3, 8))"]).returncode == 0
