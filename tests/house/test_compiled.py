"""The compiled modules: each is optional, so one that does not compile is left out without a word. Here somebody says it."""

from __future__ import annotations

import importlib
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOURCES = sorted((ROOT / "nvpool").rglob("*.pyx"))
WITH_IT = sorted(path for kind in ("pyx", "pxd", "h") for path in (ROOT / "nvpool").rglob(f"*.{kind}"))


@pytest.mark.parametrize("source", SOURCES, ids=lambda path: path.stem)
def test_it_is_compiled_from_the_source_that_is_here(source):
    if shutil.which("gcc") is None and shutil.which("cc") is None:
        pytest.skip("there is no compiler here")
    name = ".".join(source.relative_to(ROOT).with_suffix("").parts)
    built = Path(importlib.import_module(name).__file__)
    assert built.suffix == ".so" and built.stat().st_mtime >= source.stat().st_mtime, "it does not compile: see make setup"


@pytest.mark.parametrize("path", WITH_IT, ids=lambda path: path.name)
def test_what_it_is_compiled_from_is_in_the_package(path):
    data = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"]
    assert f"*{path.suffix}" in data["*"], "pyproject.toml does not name it"


def test_who_needs_a_compiled_module_that_is_not_there_is_left_out_too():
    code = ("import sys; sys.modules['nvpool.rpc.transports._frame'] = None; "
            "from nvpool.client.write import fast_writes; from nvpool.rpc.transports import fast_replies; "
            "from nvpool.fuse.fast_path import creates, remote_reads, small_files; "
            "print(fast_writes._fast_writes, creates._creates, remote_reads._remote_reads, small_files._small_files, "
            "fast_replies._frame)")
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=True)
    assert said.stdout.split() == ["None"] * 5
