"""Many calls of `nvpool` on one machine without the start of an interpreter for each.

A measurement that asks for `nvpool status` every second would spend more processor time on importing modules than the pool it
looks at. `CommandServer` keeps one process on a machine that has imported the modules of its commands. It forks a child for
each call: the child runs the command's own `main` with its own arguments, as the installed program does. Used by
bench/failure_soak.py.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import select
import signal
import subprocess
import sys
import threading
import time
import traceback
from pathlib import Path
from typing import Any, NamedTuple

from nvpool.testing.env.namespaces import Machine


class CommandResult(NamedTuple):
    """Exit code and output of one call."""

    returncode: int
    stdout: str
    stderr: str


class CommandServer:
    """One process on `machine` that runs commands of `nvpool` in forked children, one at a time.

    Safe to use from several threads. `stop` ends the process and a child that still runs.
    """

    def __init__(self, machine: Machine) -> None:
        self._machine = machine
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None

    def call(self, *words: str, timeout_s: float) -> CommandResult:
        """Run `nvpool WORDS` and return what it printed.

        subprocess.TimeoutExpired: it had not ended after `timeout_s` seconds and was killed. The next call starts a new
        process.
        """
        with self._lock:
            if self._process is None:
                self._process = self._started()
            deadline_s = time.monotonic() + timeout_s
            answer = self._answer(list(words), deadline_s)
            if answer:
                return CommandResult(*json.loads(answer))
            self._stop()
            if answer is None:
                raise subprocess.TimeoutExpired(["nvpool", *words], timeout_s)
            return CommandResult(1, "", "the process of the commands has ended")

    def stop(self) -> None:
        """End the process. May be called twice."""
        with self._lock:
            self._stop()

    def _started(self) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-P", "-m", "nvpool.testing.env.command_forkserver"]
        return subprocess.Popen(
            self._machine.command(*command),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,
            cwd=Path(__file__).resolve().parents[3],
        )

    def _answer(self, words: list[str], deadline_s: float) -> bytes | None:
        """The line that answers the call; empty if the process has ended, None if no line came in time."""
        assert self._process is not None
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with contextlib.suppress(OSError):
            self._process.stdin.write(json.dumps(words).encode() + b"\n")
            self._process.stdin.flush()
            line = bytearray()
            while (left_s := deadline_s - time.monotonic()) > 0:
                if not select.select([self._process.stdout], [], [], left_s)[0]:
                    return None
                part = os.read(self._process.stdout.fileno(), 1 << 16)
                line += part
                if not part:
                    return b""
                if line.endswith(b"\n"):
                    return bytes(line)
            return None
        return b""

    def _stop(self) -> None:
        if self._process is None:
            return
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.communicate()
        self._process = None


def _run(words: list[str], to: int) -> None:
    """In a child: run the command and write [exit code, stdout, stderr, modules] to the descriptor `to`."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            from nvpool.cli.main import main

            code = main(words)
        except SystemExit as end:
            code = end.code if isinstance(end.code, int) else 1
        except BaseException:
            traceback.print_exc()
            code = 1
    with open(to, "w") as file:
        json.dump([code, out.getvalue(), err.getvalue(), sorted(sys.modules)], file)


def _serve() -> None:
    """Answer each line of stdin, a list of words, with a line [exit code, stdout, stderr]."""
    known = set(sys.modules)
    for line in sys.stdin.buffer:
        read, write = os.pipe()
        child = os.fork()
        if not child:
            os.close(read)
            _run(json.loads(line), write)
            os._exit(0)
        os.close(write)
        with open(read) as file:
            answer = file.read()
        os.waitpid(child, 0)
        found: list[Any] = [1, "", "the command was killed", []]
        with contextlib.suppress(ValueError):  # it was killed while it wrote
            found = json.loads(answer)
        code, out, err, modules = found
        sys.stdout.write(json.dumps([code, out, err]) + "\n")
        sys.stdout.flush()
        for name in modules:
            if name.startswith("nvpool.") and name not in known:
                known.add(name)
                with contextlib.suppress(ImportError):
                    __import__(name)


if __name__ == "__main__":
    _serve()
