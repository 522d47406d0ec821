"""Findings of a check: the problems of one step, and their repairs. Used by `meta/fsck/walker` and its checks."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from nvpool.core.errors import NvpoolError
from nvpool.kv.api import Effect, Kv
from nvpool.meta.state import records
from nvpool.meta.state.transaction import Draft

Mend = Callable[..., Draft]  # (view, now_ns=)
Effects = list[Effect]


class ShardProblem(NamedTuple):
    """A problem that a check has found."""

    kind: str
    text: str
    repaired: bool
    inode: int = 0


class Findings:
    """Problems of one check."""

    def __init__(self, kv: Kv, repair: bool) -> None:
        self._kv = kv
        self._repair = repair
        self.problems: list[ShardProblem] = []
        """Problems of this step."""
        self.pending: list[tuple[int, Mend]] = []
        """Repairs that need other shards, with the indexes of their problems in this step's list."""
        self.unread = 0
        """Number of unreadable records: without them no sum is right."""

    def begin_step(self) -> None:
        """Forget the problems of the step before."""
        self.problems, self.pending = [], []

    def found(self, kind: str, text: str, mend: Callable[[], Effects | None] | None) -> None:
        """Report a problem; if repair is wanted, apply the effects of `mend`, which reads the present
        records."""
        repaired = False
        if self._repair and mend is not None:
            try:
                effects = mend()
                if effects:
                    self._kv.apply(effects, reclaims=True)
                repaired = effects is not None
            except NvpoolError as error:
                text = f"{text}; not repaired: {error}"
        self.problems.append(ShardProblem(kind, text, repaired))

    def postpone(self, decide: Mend) -> None:
        """Carry out the repair of the next problem after this step."""
        self.pending.append((len(self.problems), decide))

    def lay_aside(self, key: bytes, raw: bytes, text: str, more: Callable[[], Effects] = list) -> None:
        """Report a record that cannot be decoded; a repair stores it under another key."""
        if self._kv.get(key) == raw:
            self.found(
                "undecodable",
                f"{text} (key {key.hex()})",
                lambda: [(key, None), (records.damaged_key(key), raw), *more()],
            )
