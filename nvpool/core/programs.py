"""Table of the programs of nvpool: how each is started, and how its processes are recognised.

A program is started as `python -P -m MODULE ARGUMENTS`. /proc/PID/cmdline then contains its title. Commands,
tests and benchmarks use the title to find the processes of a pool or of a mount. A forked process sets the
title of its own program (mountd/process_fork). Titles and modules are defined here only, so that a module can
move. This module imports only the standard library, because tools/clean.py loads it without an installation.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from enum import Enum


class Program(Enum):
    """A program: its module (None if it is only forked), its title in /proc/PID/cmdline, and its purpose."""

    CLI = "nvpool.cli.main", "nvpool.cli.main", "the nvpool command"
    MOUNT_COMMAND = (
        "nvpool.cli.mount.mount_nvpool",
        "nvpool.cli.mount.mount_nvpool",
        "mount.nvpool, the helper of mount(8)",
    )
    SUPERVISOR = "nvpool.daemons.nvpoold", "nvpool.daemons.nvpoold", "nvpoold, the supervisor of a node"
    META = "nvpool.daemons.meta", "nvpool.daemons.meta", "one member of a metadata shard"
    STORE = "nvpool.daemons.store", "nvpool.daemons.store", "the chunk store of one target"
    ETCD = (
        "nvpool.daemons.etcd",
        "nvpool.daemons.etcd",
        "a member of the pool's own etcd, before it becomes etcd",
    )
    BRIDGE = "nvpool.daemons.bridge", "nvpool.daemons.bridge", "volumes for containers"
    BIND_MOUNT = "nvpool.bridge.bind_helper", "nvpool.bridge.bind_helper", "one bind mount of the bridge"
    POOL_MAKER = "nvpool.provision.create", "nvpool.provision.create", "makes pools and chunk stores"
    MOUNT = "nvpool.mountd.server", "nvpool.mountd.server", "serves a mount"
    MOUNT_HOLDER = "nvpool.mountd.holder", "nvpool.mountd.holder", "keeps /dev/fuse and the state of a mount"
    MOUNT_FORK_SERVER = (
        "nvpool.mountd.forkserver",
        "nvpool.mountd.forkserver",
        "forks the processes that serve a mount",
    )
    MOUNT_WORKER = (
        "nvpool.mountd.read_worker",
        "nvpool.mountd.worker",
        "reads beside the process that serves a mount",
    )
    MOUNT_NOTIFIER = None, "nvpool.mountd.notifier", "writes notifications of a mount to the kernel"

    def __init__(self, module: str | None, title: str, purpose: str) -> None:
        self.module = module
        self.title = title
        self.purpose = purpose


COMMANDS = frozenset({Program.CLI, Program.MOUNT_COMMAND})
"""Programs that a user runs and waits for; their arguments may name a pool although they are not a process of
the pool."""
DAEMONS = frozenset(Program) - COMMANDS
OF_A_MOUNT = frozenset(
    {
        Program.MOUNT,
        Program.MOUNT_HOLDER,
        Program.MOUNT_FORK_SERVER,
        Program.MOUNT_WORKER,
        Program.MOUNT_NOTIFIER,
    }
)
"""Programs whose last two arguments are the pool and the mount point."""

_BY_TITLE = {program.module: program for program in Program if program.module}
_BY_TITLE |= {program.title: program for program in Program}
"""A started process shows its module until it sets its title."""


def command(program: Program, *arguments: str) -> list[str]:
    """Return the command that starts a program with this Python.

    The program cannot import modules from the current directory.
    """
    if program.module is None:
        raise ValueError(f"{program.name} is forked by another program and cannot be started")
    return [sys.executable, "-P", "-m", program.module, *arguments]


def command_line(pid: int) -> list[str]:
    """Return the arguments of a process from /proc, its executable first.

    The list is empty if the process has ended or is hidden from this user.
    """
    try:
        with open(f"/proc/{pid}/cmdline", "rb") as file:
            # A title that became shorter leaves zero bytes at the end.
            content = file.read().rstrip(b"\0")
    except OSError:
        return []
    return [os.fsdecode(argument) for argument in content.split(b"\0")] if content else []


def program_of(words: list[str]) -> Program | None:
    """Return the program that a command line runs; None for a program that is not part of nvpool."""
    return next((_BY_TITLE[word] for word in words if word in _BY_TITLE), None)


def processes(
    *programs: Program, naming: str | os.PathLike[str] | None = None
) -> Iterator[tuple[int, list[str]]]:
    """Yield (pid, command line) of each process that runs one of `programs`, by default any daemon.

    With `naming`, only processes that have this text as an argument, such as a pool directory or a mount
    point. Before the caller uses a pid, the process may have ended and the pid may belong to another process.
    """
    wanted = programs or DAEMONS
    named = None if naming is None else os.fspath(naming)
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            words = command_line(int(entry))
            if program_of(words) in wanted and (named is None or named in words):
                yield int(entry), words


def set_title(program: Program) -> None:
    """Show this process as `program` in /proc/PID/cmdline, replacing the title with which it was started.

    ValueError: the new title is longer than the original one; the kernel reserves no more space for
    arguments.
    """
    with open("/proc/self/stat", "rb") as file:
        start, end = map(int, file.read().rpartition(b")")[2].split()[45:47])  # proc(5): arg_start, arg_end
    with open("/proc/self/mem", "r+b", buffering=0) as memory:
        memory.seek(start)
        words = memory.read(end - start).rstrip(b"\0").split(b"\0")
        place = next(number for number, word in enumerate(words) if os.fsdecode(word) in _BY_TITLE)
        words[place] = program.title.encode()
        content = b"\0".join(words) + b"\0"
        if len(content) > end - start:
            raise ValueError(f"the title {program.title} does not fit into the arguments of this process")
        memory.seek(start)
        memory.write(content.ljust(end - start, b"\0"))
