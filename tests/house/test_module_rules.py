"""Rules for modules: each has a docstring, stays small and keeps to the patterns of the package."""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

from nvpool.core import errors

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "nvpool"
MODULES = sorted(p for p in PACKAGE.rglob("*.py") if "v1" not in p.parts)

MODULES_MAX = 15
"""Number of modules in a folder, without compiled sources. cli/commands has one for each command."""


def package_of(path):
    parts = path.relative_to(PACKAGE).parts
    return parts[0] if len(parts) > 1 else None


@pytest.mark.parametrize("path", MODULES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_modules_are_short_and_documented(path):
    source = path.read_text()
    if source.strip():
        assert ast.get_docstring(ast.parse(source)), f"{path} has no docstring"
    assert source.count("\n") <= 900, f"{path} has grown over 900 lines: make a folder of it"


@pytest.mark.parametrize("path", MODULES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_module_names_say_something(path):
    assert path.stem not in {"util", "utils", "common", "helper", "helpers", "misc", "handler", "info"}


def test_folders_are_small_and_documented():
    for folder in {path.parent for path in MODULES} - {PACKAGE, PACKAGE / "cli" / "commands"}:
        assert len([path for path in folder.glob("*.py") if path.name != "__init__.py"]) <= MODULES_MAX, (
            folder
        )
    for folder in {path.parent for path in PACKAGE.rglob("*.py")}:
        tree = ast.parse((folder / "__init__.py").read_text())
        assert ast.get_docstring(tree), f"{folder}/__init__.py has no docstring"
        assert folder == PACKAGE or len(tree.body) == 1, f"{folder}/__init__.py has code"


def test_map_and_metadata_decisions_are_synchronous():
    for path in [*(PACKAGE / "poolmap").rglob("*.py"), *(PACKAGE / "meta" / "operations").rglob("*.py")]:
        for node in ast.walk(ast.parse(path.read_text())):
            assert not isinstance(node, ast.AsyncFunctionDef | ast.Await), f"{path}:{node.lineno} waits"


def test_daemons_do_not_use_wait_for():
    # In Python 3.11 asyncio.wait_for loses a cancellation that arrives in the loop iteration in which its
    # awaitable completes, so the task is never cancelled. asyncio.timeout does not have this bug.
    for path in MODULES:
        if package_of(path) != "testing":
            assert "asyncio.wait_for(" not in path.read_text(), path


def test_wire_codes_are_unique_within_their_family():
    classes = errors.every_error()
    names = {cls.__name__ for cls in classes}
    codes = [cls.wire_code for cls in classes]
    assert len(set(codes)) == len(codes)
    for cls in classes:
        family = next(base for base in cls.__mro__ if errors.NvpoolError in base.__bases__)
        assert cls.wire_code // 100 == family.wire_code // 100, cls
        assert cls.__doc__ and cls.errno > 0, cls
    derived = re.compile(rf"\bclass \w+[^:]*\b(?:{'|'.join(names)})\b")
    for path in MODULES:
        source = path.read_text()
        if path.name == "errors.py" or not derived.search(source):
            continue  # to parse every module takes seconds
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.ClassDef):
                bases = {base.id for base in node.bases if isinstance(base, ast.Name)}
                assert not bases & names, f"{path} defines its own error: {node.name}"


def test_cli_does_not_import_daemon_libraries():
    heavy = ("grpc", "lmdb", "pyfuse3", "uvloop", "rich")
    program = f"import sys, nvpool.cli.main; print([m for m in {heavy} if m in sys.modules])"
    out = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60
    ).stdout
    assert out.strip() == "[]"


def test_supervisor_starts_without_the_client():
    program = (
        "import sys, nvpool.node.coordination.map_backend, nvpool.node.supervisor; "
        "print([m for m in sys.modules if m.startswith(('nvpool.client.vfs', 'nvpool.client.pool_client', 'nvpool.sdk'))])"
    )
    out = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60
    ).stdout
    assert out.strip() == "[]"


def test_links_in_documents_resolve():
    for document in ROOT.glob("*.md"):
        for target in re.findall(r"\]\(([^)#\s]+)[^)]*\)", document.read_text()):
            if "://" not in target and not target.startswith("mailto:"):
                assert (document.parent / target).exists(), f"{document.name} links to {target}"


def test_test_file_names_are_unique():
    # Test files are modules without a package: with two of one name, pytest fails at collection.
    names = [path.name for path in (ROOT / "tests").rglob("test_*.py")]
    assert sorted(set(names)) == sorted(names)


def test_class_names_are_unique():
    """A reader who searches for a class finds one. Typed classes of `.pyx` files count too."""
    found: dict[str, list[str]] = {}
    compiled = [path for path in PACKAGE.rglob("*.pyx") if not path.with_suffix(".py").exists()]
    for path in sorted([*MODULES, *compiled]):
        for name in re.findall(r"^(?:cdef )?class (\w+)", path.read_text(), re.M):
            found.setdefault(name, []).append(str(path.relative_to(ROOT)))
    assert not {name: places for name, places in found.items() if len(places) > 1}
