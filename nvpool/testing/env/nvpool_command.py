"""The command `nvpool`, called as an operator calls it, and a pool with a mount that it makes.

Used by tests; never by the product.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from nvpool.host.pool_directory import PoolDirectory
from nvpool.poolmap.model import PoolMap, decode_map

NVPOOL = str(Path(sys.executable).with_name("nvpool"))


def nvpool(*words: object, check: bool = True, timeout_s: float = 400.0) -> subprocess.CompletedProcess[str]:
    """Run the command and return its output and exit code. AssertionError if it fails and `check` is set."""
    done = subprocess.run([NVPOOL, *map(str, words)], capture_output=True, text=True, timeout=timeout_s)
    assert not check or done.returncode == 0, (
        f"nvpool {words}: exit {done.returncode}\n{done.stdout}\n{done.stderr}"
    )
    return done


class CommandPool:
    """A pool at `path`, mounted at `mountpoint`."""

    def __init__(self, top: Path) -> None:
        self.path, self.mountpoint = top / "p", top / "m"
        self.directory = PoolDirectory(self.path)

    @property
    def map(self) -> PoolMap:
        return decode_map(self.directory.poolmap.read_bytes())

    @contextmanager
    def up(self, *words: object) -> Iterator[None]:
        """Make, serve and mount the pool; end all of it with the block. `words` are further arguments of the
        command."""
        nvpool("dev", "up", self.path, "--drives", 2, "--mount", self.mountpoint, *words)
        try:
            yield
        finally:
            nvpool("dev", "down", self.path)

    def check(self, *options: str) -> None:
        """Assert that fsck finds nothing."""
        found = nvpool("fsck", self.path, *options, check=False)
        assert found.returncode == 0, found.stdout + found.stderr
