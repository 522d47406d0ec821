"""Programs: how they are started, and how their processes are found by their titles."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from nvpool.core.programs import COMMANDS, OF_A_MOUNT, Program, command, command_line, processes, program_of

ROOT = Path(__file__).resolve().parents[3]
SLEEP = "import sys; print(flush=True); sys.stdin.read()"


def test_module_of_each_program_exists():
    for program in Program:
        assert program.module is None or importlib.util.find_spec(program.module), program


def test_titles_are_unique():
    titles = [program.title for program in Program]
    assert len(set(titles)) == len(titles) and all(program.purpose for program in Program)


def test_started_program_shows_its_title():
    for program in set(Program) - {Program.MOUNT_NOTIFIER}:
        words = command(program, "a", "b")
        assert words[0] == sys.executable and words[-2:] == ["a", "b"] and program_of(words) is program


def test_forked_only_program_cannot_be_started():
    with pytest.raises(ValueError, match="MOUNT_NOTIFIER"):
        command(Program.MOUNT_NOTIFIER)


def test_title_of_a_forked_program_fits():
    for program in OF_A_MOUNT - {Program.MOUNT_HOLDER}:
        assert len(program.title) <= len(Program.MOUNT_FORK_SERVER.title)
    assert len(Program.MOUNT_WORKER.title) <= len(Program.MOUNT.title)  # also without a fork server


def test_processes_are_found_by_title_and_argument(tmp_path):
    words = [sys.executable, "-c", SLEEP, Program.STORE.title, str(tmp_path), "1"]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        child.stdout.readline()
        assert list(processes(naming=tmp_path)) == [(child.pid, words)]
        assert list(processes(Program.STORE, naming=str(tmp_path))) == [(child.pid, words)]
        assert not list(processes(Program.META, naming=tmp_path)) and not list(
            processes(naming=tmp_path.parent)
        )
        child.stdin.close()
    assert command_line(child.pid) == []


def test_commands_are_no_daemons(tmp_path):
    for program in COMMANDS:
        words = [sys.executable, "-c", SLEEP, program.title, str(tmp_path)]
        with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
            child.stdout.readline()
            assert not list(processes(naming=tmp_path))
            assert list(processes(program, naming=tmp_path)) == [(child.pid, words)]
            child.stdin.close()


@pytest.mark.parametrize("title", [Program.MOUNT, Program.MOUNT_WORKER, Program.MOUNT_NOTIFIER])
def test_title_is_replaced_in_place(title):
    code = (
        "import sys; from nvpool.core.programs import Program, set_title; "
        f"set_title(Program.MOUNT_FORK_SERVER); set_title(Program.{title.name}); " + SLEEP
    )
    words = [
        sys.executable,
        "-P",
        "-c",
        code,
        Program.MOUNT_FORK_SERVER.title,
        "--workers",
        "",
        "/pool",
        "/place",
    ]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        child.stdout.readline()
        expected = [title.title if word == Program.MOUNT_FORK_SERVER.title else word for word in words]
        assert command_line(child.pid) == expected
        child.stdin.close()


def test_title_that_does_not_fit_is_refused():
    code = (
        "from nvpool.core.programs import Program, set_title\n"
        "Program.MOUNT.title = 'x' * 200\n"
        "try:\n    set_title(Program.MOUNT)\nexcept ValueError as error:\n    print(error)"
    )
    words = [sys.executable, "-P", "-c", code, Program.MOUNT_HOLDER.title]
    done = subprocess.run(words, capture_output=True, text=True, check=True)
    assert "does not fit" in done.stdout


def test_modules_of_programs_are_named_in_the_table_alone():
    modules = "|".join(re.escape(program.title) for program in Program)
    started = re.compile(rf"""b?["']({modules})["']""")
    for folder in ("nvpool", "tests", "bench", "tools"):
        for path in (ROOT / folder).rglob("*.py"):
            if path.stem not in {"programs", "test_program_table"}:
                found = [
                    line
                    for line in path.read_text().splitlines()
                    if started.search(line) and "getLogger" not in line
                ]
                assert not found, f"{path}: {found}"


def test_table_needs_the_standard_library_alone():
    code = "import sys, nvpool.core.programs; print([m for m in sys.modules if m.startswith('nvpool.')])"
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-S", "-c", code], capture_output=True, text=True, check=True, env=environment
    )
    assert "nvpool.core.version" in done.stdout
