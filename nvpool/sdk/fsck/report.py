"""Progress and problems of an fsck. sdk/fsck/check and sdk/fsck/metadata write it; the CLI shows it."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple

PROBLEMS_KEPT_MAX = 10_000


class PoolProblem(NamedTuple):
    kind: str
    where: str
    text: str
    repaired: bool = False
    inode: int = 0
    """Inode number of the damaged file, if there is one."""


@dataclass
class FsckReport:
    """Progress and problems of one run of `check`; may be read while the check runs."""

    stage: str = "metadata"
    records: int = 0
    inodes_on_stores: int = 0
    chunks: int = 0
    blocks: int = 0
    blocks_total: int = 0
    """Blocks of all targets at the start of the check."""
    restarts: list[str] = field(default_factory=list)
    """Reasons of the restarts of the metadata pass: a new primary, or a removed shard."""
    problems: list[PoolProblem] = field(default_factory=list)
    found: int = 0
    unrepaired: int = 0

    def note(self, problem: PoolProblem) -> None:
        self.found += 1
        self.unrepaired += not problem.repaired
        if len(self.problems) < PROBLEMS_KEPT_MAX:
            self.problems.append(problem)

    def summary(self) -> dict[str, Any]:
        # "begun_anew" is a key of `nvpool fsck --json`.
        found = {"begun_anew" if name == "restarts" else name: value for name, value in asdict(self).items()}
        del found["stage"], found["blocks_total"]
        found["problems"] = [problem._asdict() for problem in self.problems]
        return found
