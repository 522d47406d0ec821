"""The compiled modules: built from the sources here, loaded unless NVPOOL_PURE=1, and never left out silently."""

from __future__ import annotations

import importlib
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TYPED = [
    path.with_suffix(".py")
    for path in (ROOT / "nvpool").rglob("*.pxd")
    if path.with_suffix(".py").exists() and not path.with_suffix(".pyx").exists()
]
SOURCES = sorted([*(ROOT / "nvpool").rglob("*.pyx"), *TYPED])
WITH_IT = sorted(path for kind in ("pyx", "pxd", "h") for path in (ROOT / "nvpool").rglob(f"*.{kind}"))


@pytest.mark.compiled
@pytest.mark.parametrize("source", SOURCES, ids=lambda path: path.stem)
def test_extension_is_newer_than_its_source(source):
    name = ".".join(source.relative_to(ROOT).with_suffix("").parts)
    built = Path(importlib.import_module(name).__file__)
    assert built.suffix == ".so" and built.stat().st_mtime >= source.stat().st_mtime, (
        "not compiled from this source: run make setup"
    )


@pytest.mark.parametrize("path", WITH_IT, ids=lambda path: path.name)
def test_build_inputs_are_in_the_package(path):
    data = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"]
    assert f"*{path.suffix}" in data["*"], "pyproject.toml does not name it"


@pytest.mark.parametrize("source", SOURCES, ids=lambda path: path.stem)
def test_clock_in_c_is_that_of_the_process(source):
    """A simulated process has another clock than the machine's, so C asks first which one it is."""
    calls = re.compile(r"(?:\bprimitives\.|(?<![\w.]))(?:boottime_s|wall_ns)\(\)")
    for number, line in enumerate(source.read_text().splitlines(), 1):
        if calls.search(line) and not re.search(r"\bnogil$|^cpdef |^def ", line.rstrip()):
            assert re.search(r"\bif (?:self\.)?_?is_system else\b", line), (
                f"{source.name}:{number}: {line.strip()}"
            )


def run_python(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return run([sys.executable, "-c", code], ROOT, environment)


def run(command: list[str], place: Path, environment: dict[str, str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command, cwd=place, env=os.environ | environment, capture_output=True, text=True, check=False
    )


def test_pure_mode_loads_no_compiled_module():
    code = (
        "import sys, nvpool.daemons.nvpoold, nvpool.cli.main, nvpool.sdk, nvpool.fuse.engines; "
        "print([name for name, module in sys.modules.items() if name.startswith('nvpool.') "
        "and (getattr(module, '__file__', None) or '').endswith('.so')])"
    )
    assert run_python(code, NVPOOL_PURE="1").stdout.strip() == "[]"
    assert "nvpool.core._checksum" in run_python(code, NVPOOL_PURE="0").stdout


def test_missing_compiled_module_is_an_error():
    code = "import sys; sys.modules['nvpool.core._checksum'] = None; import nvpool.core.checksum"
    done = run_python(code, NVPOOL_PURE="0")
    assert (
        done.returncode == 1
        and "nvpool.core._checksum is not compiled" in done.stderr
        and "NVPOOL_PURE=1" in done.stderr
    )


def test_build_fails_without_compiler_unless_pure(tmp_path):
    """A copy of the package's smallest extension: the build's rules are those of setup.py."""
    source = ROOT / "nvpool/core/_checksum.pyx"
    (tmp_path / "nvpool/core").mkdir(parents=True)
    for path in (source, *source.parent.glob("*.h")):
        shutil.copy(path, tmp_path / "nvpool/core")
    shutil.copy(ROOT / "setup.py", tmp_path)
    (tmp_path / "nvpool/__init__.py").touch()
    (tmp_path / "nvpool/core/__init__.py").touch()
    build = [sys.executable, "setup.py", "-q", "build_ext", "--inplace"]
    pytest.importorskip("Cython")
    failed = run(build, tmp_path, {"CC": "/bin/false", "NVPOOL_PURE": "0"})
    assert failed.returncode != 0 and not list(tmp_path.rglob("*.so"))
    pure = run(build, tmp_path, {"CC": "/bin/false", "NVPOOL_PURE": "1"})
    assert pure.returncode == 0, pure.stderr


def test_c_source_older_than_an_indirectly_named_header_is_made_again(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    header, source = Path("nvpool/core/shared.pxd"), Path("nvpool/typed.py")
    made = Path("build/typed/nvpool/typed.c")
    for path, text in (
        (header, ""),
        (source, ""),
        (source.with_suffix(".pxd"), "from nvpool.core cimport shared\n"),
        (made, "old"),
    ):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    spec = importlib.util.spec_from_file_location("nvpool_setup", ROOT / "setup.py")
    build = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(build)
    build.remove_outdated_c(source)
    assert made.exists()
    later = made.stat().st_mtime + 1
    os.utime(header, (later, later))
    build.remove_outdated_c(source)
    assert not made.exists()
