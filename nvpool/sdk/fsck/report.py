"""What a check of a pool has looked at and found. Written by `checkup` and `checkup_names`, read by whoever shows it."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple

PROBLEMS_KEPT_MAX = 10_000


class Problem(NamedTuple):
    kind: str
    where: str
    text: str
    repaired: bool = False
    inode: int = 0
    """Of the file that is damaged, where one is."""


@dataclass
class Checkup:
    """What was looked at and found; written by `check`, read by whoever shows progress."""

    stage: str = "metadata"
    records: int = 0
    inodes_on_stores: int = 0
    chunks: int = 0
    blocks: int = 0
    blocks_total: int = 0
    """Of all targets, as they were at the start."""
    begun_anew: list[str] = field(default_factory=list)
    """Why, each time that the metadata was begun from the beginning again: a shard has another primary, or has left."""
    problems: list[Problem] = field(default_factory=list)
    found: int = 0
    unrepaired: int = 0

    def note(self, problem: Problem) -> None:
        self.found += 1
        self.unrepaired += not problem.repaired
        if len(self.problems) < PROBLEMS_KEPT_MAX:
            self.problems.append(problem)

    def summary(self) -> dict[str, Any]:
        found = asdict(self)
        del found["stage"], found["blocks_total"]
        found["problems"] = [problem._asdict() for problem in self.problems]
        return found
