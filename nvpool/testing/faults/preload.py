"""Builds the preloaded library and arms its faults.

    faults = PreloadFaults.create(root, work)
    process = subprocess.Popen(command, env=os.environ | faults.environment())
    faults.arm(on=WRITE, action=FAIL, error=errno.ENOSPC, path="data")
    faults.disarm()

`root` is the directory whose files are watched, `work` one next to it for the record, the rules and the first
image.
"""

from __future__ import annotations

import fcntl
import hashlib
import mmap
import os
import struct
import subprocess
import tempfile
from pathlib import Path

from nvpool.core.errors import NotSupported

WRITE, SYNC, READ, OPEN, ALLOCATE, RENAME = 1, 2, 4, 8, 16, 32
FAIL, SHORT, LIE = 1, 2, 3

_RULE = struct.Struct("<IIIIqq160s")
_RULES = 16
_SOURCE = Path(__file__).with_name("record.c")


def build_library() -> Path:
    """Compile the library from this source if needed, and return its path.

    Libraries of other sources are kept: another checkout may be using them, and a program that does not find
    its preloaded library runs without faults and without an error. NotSupported: there is no compiler.
    """
    directory = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "nvpool"
    directory.mkdir(parents=True, exist_ok=True)
    library = directory / f"faults-{hashlib.sha256(_SOURCE.read_bytes()).hexdigest()[:16]}.so"
    if library.exists():
        return library
    with (directory / "faults.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not library.exists():
            with tempfile.TemporaryDirectory(dir=directory) as temporary:
                built = Path(temporary) / "faults.so"
                command = [
                    "cc",
                    "-shared",
                    "-fPIC",
                    "-O2",
                    "-o",
                    str(built),
                    str(_SOURCE),
                    "-ldl",
                    "-lpthread",
                ]
                try:
                    subprocess.run(command, check=True, capture_output=True, text=True, timeout=120)
                except FileNotFoundError:
                    raise NotSupported(
                        "a C compiler (cc) is needed for faults on purpose; install gcc"
                    ) from None
                built.rename(library)
    return library


class PreloadFaults:
    """One watched directory. The rules are in shared memory: arming one affects all processes immediately."""

    def __init__(self, root: Path, work: Path) -> None:
        self.root, self.work = Path(root), Path(work)
        self.log = self.work / "log"
        self.base = self.work / "base"
        self._rules_path = self.work / "rules"
        with self._rules_path.open("r+b") as file:
            self._rules = mmap.mmap(file.fileno(), _RULE.size * _RULES)

    @classmethod
    def create(cls, root: Path, work: Path) -> PreloadFaults:
        """Start from the present state of `root`: a copy of it becomes the first image."""
        work = Path(work)
        (work / "log").mkdir(parents=True)
        (work / "rules").write_bytes(bytes(_RULE.size * _RULES))
        subprocess.run(
            ["cp", "-a", "--sparse=always", "--reflink=auto", f"{root}/.", str(work / "base")],
            check=True,
            timeout=600,
        )
        return cls(root, work)

    def environment(self, *, record: bool = True) -> dict[str, str]:
        """Return the variables to add to the environment of a process.

        Without `record` faults can be armed, and nothing is logged.
        """
        variables = {
            "LD_PRELOAD": str(build_library()),
            "NVPOOL_FAULTS_ROOT": str(self.root.resolve()),
            "NVPOOL_FAULTS_RULES": str(self._rules_path),
        }
        if record:
            variables["NVPOOL_FAULTS_LOG"] = str(self.log)
        return variables

    def arm(
        self,
        *,
        on: int,
        action: int,
        error: int = 0,
        path: str = "",
        skip: int = 0,
        count: int = -1,
        slot: int = 0,
    ) -> None:
        """Let operations of the kinds `on` fail, on files whose path contains `path`, from now on.

        They fail with `error` (FAIL), write half (SHORT) or claim to have synced (LIE). `skip` operations
        pass before that; `count` of them are affected (-1: until disarm).
        """
        packed = _RULE.pack(0, on, action, error, skip, count, path.encode())
        at = slot * _RULE.size
        self._rules[at : at + 4] = bytes(4)
        self._rules[at + 4 : at + _RULE.size] = packed[4:]
        self._rules[at : at + 4] = (1).to_bytes(4, "little")

    def disarm(self) -> None:
        """Let all operations pass again."""
        self._rules[:] = bytes(len(self._rules))

    def close(self) -> None:
        self._rules.close()
