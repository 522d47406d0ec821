"""The rules of the house: imports point downward, each library has one door, modules say what they are for."""

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

LAYERS = ("core", "metrics shm host security poolmap", "rpc", "kv blockio", "meta store client cluster", "fuse sdk runtime",
          "provision node mountd bridge", "daemons cli", "testing")
"""Packages from the lowest layer to the highest. Of one layer, packages import one another only where `BELOW` says so."""

BELOW = {
    "core": "",
    "metrics": "core",
    "shm": "core",
    "host": "core",
    "security": "core host",
    "poolmap": "core",
    "rpc": "core metrics security poolmap",
    "kv": "core metrics poolmap",
    "blockio": "core",
    "meta": "core metrics security poolmap rpc kv",
    "store": "core metrics host security poolmap rpc kv blockio",
    "client": "core metrics shm host security poolmap rpc blockio",
    "cluster": "core metrics poolmap rpc kv",
    "fuse": "core metrics shm host security poolmap rpc blockio client",
    "sdk": "core host poolmap rpc client",
    "runtime": "core metrics host security poolmap rpc",
    "provision": "core host security poolmap rpc kv store cluster runtime",
    "node": "core metrics host security poolmap rpc kv meta store client cluster sdk runtime provision",
    "mountd": "core metrics shm host poolmap rpc client fuse runtime",
    "bridge": "core metrics host poolmap rpc client sdk",
    "daemons": "core metrics host security poolmap rpc kv meta store client cluster sdk runtime provision node bridge",
    "cli": "core metrics host security poolmap rpc client fuse sdk",
    "testing": "core metrics shm host security poolmap rpc kv blockio meta store client cluster fuse sdk runtime provision "
               "node mountd bridge daemons",
}
"""Package -> the packages that it may import beside itself."""

MODULES_MAX = 15
"""In a folder, without compiled sources. cli/commands has one for each command."""

DOORS = {
    "uvloop": {"runtime/daemon_process.py", "sdk/loop_thread.py"},
    "grpc": {"rpc/transports/grpc.py", "cluster/etcd/client.py", "bridge/csi/"},
    "aetcd": {"cluster/etcd/client.py", "cluster/etcd/election.py", "cluster/etcd/coordinator.py"},
    "lmdb": {"kv/"},
    "ssl": {"security/tls.py", "testing/env/tls_probe.py"},
    "cryptography": {"security/ca.py", "security/volume_keys.py", "security/xts.py"},
    "pyfuse3": {"fuse/pyfuse3_engine.py"},
    "time": {"core/clock.py", "testing/"},
    "random": {"core/clock.py", "testing/"},
    "secrets": {"core/clock.py"},
    "threading": {"security/xts.py", "store/disk/device.py", "sdk/", "cluster/", "runtime/", "kv/", "testing/"},
    "concurrent": {"store/disk/device.py", "blockio/reader.py", "fuse/kernel/notify.py", "sdk/", "cluster/", "kv/", "testing/"},
    "aiohttp": {"bridge/docker.py"},
    "click": {"cli/"},
    "rich": {"cli/"},
    "multiprocessing": set(),
}
"""Library -> the files or rooms that may import it."""


def imports_of(path):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def room_of(path):
    parts = path.relative_to(PACKAGE).parts
    return parts[0] if len(parts) > 1 else None


@pytest.mark.parametrize("path", MODULES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_imports_point_downward_and_libraries_come_through_their_door(path):
    room, here = room_of(path), str(path.relative_to(PACKAGE))
    for name in imports_of(path):
        parts = name.split(".")
        if parts[0] == "nvpool" and len(parts) > 1 and room:
            assert parts[1] == room or parts[1] in BELOW[room].split(), f"{here} imports {name}"
        doors = DOORS.get(parts[0])
        if doors is not None:
            allowed = any(here == door or (door.endswith("/") and here.startswith(door)) for door in doors)
            assert allowed, f"{here} imports {parts[0]}"


@pytest.mark.parametrize("path", MODULES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_a_module_says_what_it_is_for_and_is_not_the_one_that_swallows_the_project(path):
    source = path.read_text()
    if source.strip():
        assert ast.get_docstring(ast.parse(source)), f"{path} has no docstring"
    assert source.count("\n") <= 900, f"{path} has grown over 900 lines: make a folder of it"


@pytest.mark.parametrize("path", MODULES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_no_module_is_named_after_nothing(path):
    assert path.stem not in {"util", "utils", "common", "helper", "helpers", "misc", "handler", "data", "info", "process"}


def test_packages_import_only_lower_layers():
    layer = {package: number for number, packages in enumerate(LAYERS) for package in packages.split()}
    folders = {path.name for path in PACKAGE.iterdir() if path.is_dir() and path.name != "__pycache__"}
    assert set(layer) == set(BELOW) == folders
    for package, below in BELOW.items():
        for other in below.split():
            assert layer[other] <= layer[package] and package not in BELOW[other].split(), f"{package} and {other}"
    assert not [package for package in LAYERS[4].split() if set(BELOW[package].split()) & set(LAYERS[4].split())]


def test_folders_are_small_and_say_what_they_are_for():
    for folder in {path.parent for path in MODULES} - {PACKAGE, PACKAGE / "cli" / "commands"}:
        assert len([path for path in folder.glob("*.py") if path.name != "__init__.py"]) <= MODULES_MAX, folder
    for folder in {path.parent for path in PACKAGE.rglob("*.py")}:
        tree = ast.parse((folder / "__init__.py").read_text())
        assert ast.get_docstring(tree), f"{folder}/__init__.py has no docstring"
        assert folder == PACKAGE or len(tree.body) == 1, f"{folder}/__init__.py has code"


def test_pool_map_and_metadata_operations_decide_without_waiting():
    for path in [*(PACKAGE / "poolmap").rglob("*.py"), *(PACKAGE / "meta" / "operations").rglob("*.py")]:
        for node in ast.walk(ast.parse(path.read_text())):
            assert not isinstance(node, ast.AsyncFunctionDef | ast.Await), f"{path}:{node.lineno} waits"


def test_daemons_do_not_use_wait_for():
    # In Python 3.11 asyncio.wait_for loses a cancellation that comes in the iteration in which what it waits for has come: the
    # task goes on for ever. asyncio.timeout does not.
    for path in MODULES:
        if room_of(path) != "testing":
            assert "asyncio.wait_for(" not in path.read_text(), path


def test_each_error_has_its_own_wire_code_in_the_range_of_its_family():
    classes = errors.every_error()
    codes = [cls.wire_code for cls in classes]
    assert len(set(codes)) == len(codes)
    for cls in classes:
        family = next(base for base in cls.__mro__ if errors.NvpoolError in base.__bases__)
        assert cls.wire_code // 100 == family.wire_code // 100, cls
        assert cls.__doc__ and cls.errno > 0, cls
    for path in MODULES:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef) and path.name != "errors.py":
                bases = {base.id for base in node.bases if isinstance(base, ast.Name)}
                assert not bases & {cls.__name__ for cls in classes}, f"{path} defines an error of its own: {node.name}"


def test_the_command_starts_without_what_only_daemons_need():
    heavy = ("grpc", "lmdb", "pyfuse3", "uvloop", "rich")
    program = f"import sys, nvpool.cli.main; print([m for m in {heavy} if m in sys.modules])"
    out = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60).stdout
    assert out.strip() == "[]"


def test_supervisor_starts_without_the_client():
    program = ("import sys, nvpool.node.coordination.map_backend, nvpool.node.supervisor; "
               "print([m for m in sys.modules if m.startswith(('nvpool.client.vfs', 'nvpool.client.session', 'nvpool.sdk'))])")
    out = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60).stdout
    assert out.strip() == "[]"


def test_links_in_the_documents_lead_somewhere():
    for document in ROOT.glob("*.md"):
        for target in re.findall(r"\]\(([^)#\s]+)[^)]*\)", document.read_text()):
            if "://" not in target and not target.startswith("mailto:"):
                assert (document.parent / target).exists(), f"{document.name} links to {target}"


def test_no_two_files_of_tests_have_one_name():
    # They are modules without a package: of two with one name pytest collects one, and ends.
    names = [path.name for path in (ROOT / "tests").rglob("test_*.py")]
    assert sorted(set(names)) == sorted(names)
