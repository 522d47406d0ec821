"""Linearizability of clients' calls (Herlihy, Wing 1990): each takes effect at one moment between begin and
end.

Registers whose written values are all different are checked by zones (Gibbons and Korach, 1997), in n log n.
Truncated registers (zeros are written repeatedly), names in a directory and sizes are checked by search (Wing
and Gong, 1993, with Lowe's memory of visited states), so their histories are short.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Hashable, Iterable, Sequence
from math import inf
from typing import NamedTuple

INITIAL: Hashable = 0
"""Value of a register before the first write."""


class RegisterOperation(NamedTuple):
    """One write or read of a register. A write of unknown outcome has end = inf; a failed read is left out."""

    kind: str  # "write", "read"
    value: Hashable
    begin: float
    end: float
    who: str = ""


def without_what_was_seen_too_early(
    calls: Sequence,
    losses: Sequence[float],
    changes: Callable[[NamedTuple], bool],
    concerns: Callable[[NamedTuple, NamedTuple], bool] = lambda seen, change: True,
) -> list:
    """Return the calls without reads that may have seen a change that a power loss removed.

    Such a change was not answered when power was lost. Answered changes were durable.
    """

    def seen_too_early(call) -> bool:
        return any(
            call.begin <= loss <= change.end and change.begin < call.end and concerns(call, change)
            for loss in losses
            if loss >= call.begin
            for change in made
        )

    made = [call for call in calls if changes(call)]
    return [call for call in calls if changes(call) or not losses or not seen_too_early(call)]


def register_problems(accesses: Sequence[RegisterOperation]) -> list[str]:
    """Return why no order explains the history of one register, as sentences; empty if one does."""
    if any(access.kind == "write" and access.value == INITIAL for access in accesses):
        return _search(
            [
                _Step(access.begin, access.end, access.kind == "write" and access.end == inf, access)
                for access in accesses
            ],
            INITIAL,
            _register_step,
        )
    writes = {INITIAL: RegisterOperation("write", INITIAL, -inf, -inf)}
    for access in accesses:
        if access.kind == "write":
            if access.value in writes:
                raise ValueError(f"{access.value!r} is written twice; give each write a value of its own")
            writes[access.value] = access
    clusters: dict[Hashable, list[RegisterOperation]] = {}
    for access in accesses:
        if access.kind == "read":
            write = writes.get(access.value)
            if write is None:
                return [f"{access.who} read {access.value!r}, which nobody wrote"]
            if access.end < write.begin:
                return [f"{access.who} read {access.value!r} before it was written"]
            clusters.setdefault(access.value, []).append(access)
    forward, backward = [], []
    for value, write in writes.items():
        reads = clusters.get(value, [])
        if not reads and write.end == inf:
            continue  # it may never have taken effect
        first_end = min([write.end] + [read.end for read in reads])
        last_begin = max([write.begin] + [read.begin for read in reads])
        zone = (min(first_end, last_begin), max(first_end, last_begin), value)
        (forward if first_end < last_begin else backward).append(zone)
    forward.sort(key=lambda zone: zone[:2])
    problems = []
    for before, after in itertools.pairwise(forward):
        if after[0] < before[1]:
            problems.append(
                f"{before[2]!r} was there from {before[0]:.6f} to {before[1]:.6f}, and {after[2]!r} from "
                f"{after[0]:.6f} to {after[1]:.6f}"
            )
    for low, high, value in backward:
        for begin, end, other in forward:
            if begin < low and high < end:
                problems.append(
                    f"{value!r} was written and seen within {low:.6f} to {high:.6f}, but {other!r} was there from "
                    f"{begin:.6f} to {end:.6f}"
                )
    return problems


class _Step(NamedTuple):
    """One call of a search. `optional`: its outcome is unknown."""

    begin: float
    end: float
    optional: bool
    call: NamedTuple


def _search(
    steps: Sequence[_Step],
    initial: Hashable,
    step: Callable[[Hashable, NamedTuple], Iterable[Hashable]],
    final: Callable[[Hashable], bool] = lambda state: True,
    states_max: int = 500_000,
) -> list[str]:
    """Return why no order of the steps leads from `initial` to a `final` state; empty if one does.

    `step` returns the states to which a call can lead.
    """
    steps = sorted(steps, key=lambda one: one.begin)
    required = sum(1 << place for place, one in enumerate(steps) if not one.optional)
    seen: set[tuple[int, Hashable]] = set()
    stack: list[tuple[int, Hashable]] = [(0, initial)]
    furthest = 0
    while stack:
        done, state = stack.pop()
        if (done, state) in seen:
            continue
        seen.add((done, state))
        if len(seen) > states_max:
            raise OverflowError(
                f"more than {states_max} states for {len(steps)} calls: record shorter histories"
            )
        if done & required == required and final(state):
            return []
        furthest = max(furthest, done, key=lambda bits: (bits & required).bit_count())
        limit = min((one.end for place, one in enumerate(steps) if not done >> place & 1), default=inf)
        for place, one in enumerate(steps):
            if one.begin > limit:
                break
            if not done >> place & 1:
                stack += [(done | 1 << place, after) for after in step(state, one.call)]
    left = [one.call for place, one in enumerate(steps) if required & ~furthest & 1 << place]
    return [f"no order of {len(steps)} calls explains {left[0] if left else 'what is there in the end'}"]


def _register_step(value: Hashable, access: RegisterOperation) -> Iterable[Hashable]:
    if access.kind == "write":
        return (access.value,)
    return (value,) if value == access.value else ()


NOT_LOOKED_AT = -1
"""Link count that was not read: name and file are in two shards, which are queried one after the other."""


class NameCall(NamedTuple):
    """One call on names of a directory.

    `outcome`: "ok", "exists", "missing", or None if it is unknown (then end = inf). `inode`: the created,
    linked or found inode, with `links` if it was found.
    """

    kind: str  # "create", "link", "unlink", "rename" (never over another), "replace" (over another), "lookup"
    name: bytes
    other: bytes
    outcome: str | None
    begin: float
    end: float
    who: str = ""
    inode: int = 0
    links: int = 0


Names = frozenset[tuple[bytes, int]]
"""Content of a directory. A create of unknown outcome has a negative inode number until a call has seen it.
"""


def names_problems(calls: Sequence[NameCall], final: Names | None = None) -> list[str]:
    """Check calls on the names of one directory that was empty, like `register_problems`.

    `final`: its content at the end.
    """
    known = {call.inode for call in calls if call.kind == "create" and call.outcome == "ok"}
    steps = [
        _Step(
            call.begin,
            call.end,
            call.outcome is None,
            call if call.outcome is not None else call._replace(inode=call.inode or -1 - place),
        )
        for place, call in enumerate(calls)
    ]

    def is_final(names: Names) -> bool:
        return (
            final is None
            or names == final
            or (
                any(inode < 0 for _, inode in names)
                and any(bound == final for bound in _bindings(names, final, known))
            )
        )

    found = _search(steps, frozenset(), lambda names, call: _name_step(names, call, known), is_final)
    return [
        f"{problem}; in the end there is {sorted(final)}" if final is not None else problem
        for problem in found
    ]


def _bindings(names: Names, final: Names, known: set[int]) -> Iterable[Names]:
    unseen = {inode for _, inode in final} - known
    for nobody in {inode for _, inode in names if inode < 0}:
        for inode in unseen:
            yield from ((bound := _bound(names, nobody, inode)), *_bindings(bound, final, known | {inode}))


def _bound(names: Names, before: int, inode: int) -> Names:
    return frozenset((name, inode if its == before else its) for name, its in names)


def _name_step(names: Names, call: NameCall, known: set[int]) -> Iterable[Names]:
    """Return the possible names after the call; none if its outcome does not fit.

    A call of unknown outcome has every possible effect.
    """
    there = dict(names)
    inode = there.get(call.name)
    if call.kind == "lookup":
        if (
            inode is not None
            and inode < 0
            and call.outcome == "ok"
            and call.inode not in known
            and all(its != call.inode for its in there.values())
        ):
            names = _bound(names, inode, call.inode)
            inode, there = call.inode, dict(names)
        count = list(there.values()).count(inode)
        fits = (
            call.outcome == "missing"
            if inode is None
            else call.outcome == "ok" and inode == call.inode and call.links in (count, NOT_LOOKED_AT)
        )
        return (names,) if fits else ()
    if call.kind == "create":  # O_EXCL
        expected, after = (
            ("exists", names) if inode is not None else ("ok", names | {(call.name, call.inode)})
        )
    elif call.kind == "unlink":
        expected, after = ("missing", names) if inode is None else ("ok", names - {(call.name, inode)})
    elif call.kind == "link":
        lives = any(its == call.inode for its in there.values())
        if inode is not None or not lives:
            possible = (
                {"exists"}
                if inode is not None and lives
                else {"missing"}
                if inode is None
                else {"exists", "missing"}
            )
            return (names,) if call.outcome is None or call.outcome in possible else ()
        expected, after = "ok", names | {(call.name, call.inode)}
    elif inode is None:
        expected, after = "missing", names
    elif call.kind == "rename" and call.other in there:
        expected, after = "exists", names
    elif there.get(call.other) == inode:
        expected, after = "ok", names  # two names of one file: no effect
    else:
        expected, after = (
            "ok",
            frozenset((name, its) for name, its in names if name not in (call.name, call.other))
            | {(call.other, inode)},
        )
    return (after,) if call.outcome is None or call.outcome == expected else ()


class SizeCall(NamedTuple):
    """`kind`: "cut" sets the size, "write" makes it at least `size`, "look" has read `size`. end = inf:
    unknown."""

    kind: str
    size: int
    begin: float
    end: float
    who: str = ""


def without_looks_at_unanswered_cuts(calls: Sequence[SizeCall]) -> list[SizeCall]:
    """Return the calls without reads of the size during a truncation.

    A truncation is visible when it is decided, and answered when every target has truncated. In between a
    target may accept a write of another client and remove it. So a read of the size then does not prove that
    a later write comes after the truncation.
    """

    def overtaken(look: SizeCall) -> bool:
        return any(
            cut.begin < look.end
            and look.begin < cut.end
            and any(
                write.who != cut.who and look.begin < write.begin < cut.end
                for write in calls
                if write.kind == "write"
            )
            for cut in calls
            if cut.kind == "cut"
        )

    return [call for call in calls if call.kind != "look" or not overtaken(call)]


def sizes_problems(calls: Sequence[SizeCall]) -> list[str]:
    """Check calls on the size of a file that was empty, like `register_problems`."""

    def step(size: int, call: SizeCall) -> Iterable[int]:
        if call.kind == "look":
            return (size,) if size == call.size else ()
        return (call.size if call.kind == "cut" else max(size, call.size),)

    return _search([_Step(call.begin, call.end, call.end == inf, call) for call in calls], 0, step)
