"""Whether what clients were told can have happened at single moments, one after another: linearizability (Herlihy, Wing 1990).

Registers whose written values are all different are decided by zones (Gibbons and Korach, 1997), in n log n. Names in a
directory by search (Wing and Gong, 1993, with Lowe's memory of states seen), so their histories are kept short.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from math import inf
from typing import NamedTuple

INITIAL: Hashable = 0
"""What a register holds before anything is written."""


class Access(NamedTuple):
    """One write or read of a register. A write whose outcome nobody knows has end = inf; a read that failed is left out."""

    kind: str  # "write", "read"
    value: Hashable
    begin: float
    end: float
    who: str = ""


def register_problems(accesses: Sequence[Access]) -> list[str]:
    """Why no order explains the history of one register, as sentences; an empty list where one does."""
    writes = {INITIAL: Access("write", INITIAL, -inf, -inf)}
    for access in accesses:
        if access.kind == "write":
            if access.value in writes:
                raise ValueError(f"{access.value!r} is written twice; give each write a value of its own")
            writes[access.value] = access
    clusters: dict[Hashable, list[Access]] = {}
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
            continue  # it may never have happened
        first_end = min([write.end] + [read.end for read in reads])
        last_begin = max([write.begin] + [read.begin for read in reads])
        zone = (min(first_end, last_begin), max(first_end, last_begin), value)
        (forward if first_end < last_begin else backward).append(zone)
    forward.sort(key=lambda zone: zone[:2])
    problems = []
    for before, after in zip(forward, forward[1:], strict=False):
        if after[0] < before[1]:
            problems.append(f"{before[2]!r} was there from {before[0]:.6f} to {before[1]:.6f}, and {after[2]!r} from "
                            f"{after[0]:.6f} to {after[1]:.6f}")
    for low, high, value in backward:
        for begin, end, other in forward:
            if begin < low and high < end:
                problems.append(f"{value!r} was written and seen within {low:.6f} to {high:.6f}, but {other!r} was there from "
                                f"{begin:.6f} to {end:.6f}")
    return problems


class NameCall(NamedTuple):
    """One call that concerns names of a directory. `outcome`: "ok", "exists", "missing", or None where nobody knows whether it
    was done (then end = inf)."""

    kind: str  # "create", "unlink", "rename", "lookup"
    name: bytes
    other: bytes
    outcome: str | None
    begin: float
    end: float
    who: str = ""


def _step(there: frozenset[bytes], call: NameCall) -> frozenset[bytes] | None:
    """The names after the call, None where its outcome does not fit. A call of unknown outcome does what it can."""
    has = call.name in there
    if call.kind == "lookup":
        expected, after = "ok" if has else "missing", there
    elif call.kind == "create":  # O_EXCL
        expected, after = ("exists", there) if has else ("ok", there | {call.name})
    elif call.kind == "unlink":
        expected, after = ("ok", there - {call.name}) if has else ("missing", there)
    elif not has:  # rename, without replacing
        expected, after = "missing", there
    elif call.other in there:
        expected, after = "exists", there
    else:
        expected, after = "ok", there - {call.name} | {call.other}
    return after if call.outcome is None or call.outcome == expected else None


def names_problems(calls: Sequence[NameCall], final: frozenset[bytes] | None = None, states_max: int = 500_000) -> list[str]:
    """As `register_problems`, for the names of one directory that was empty; `final`: what is in it in the end."""
    calls = sorted(calls, key=lambda call: call.begin)
    required = sum(1 << place for place, call in enumerate(calls) if call.end < inf)
    seen: set[tuple[int, frozenset[bytes]]] = set()
    stack: list[tuple[int, frozenset[bytes]]] = [(0, frozenset())]
    furthest = 0
    while stack:
        done, there = stack.pop()
        if (done, there) in seen:
            continue
        seen.add((done, there))
        if len(seen) > states_max:
            raise OverflowError(f"more than {states_max} states for {len(calls)} calls: record shorter histories")
        if done & required == required and final in (None, there):
            return []
        furthest = max(furthest, done, key=lambda bits: (bits & required).bit_count())
        limit = min((call.end for place, call in enumerate(calls) if not done >> place & 1), default=inf)
        for place, call in enumerate(calls):
            if call.begin > limit:
                break
            if not done >> place & 1 and (after := _step(there, call)) is not None:
                stack.append((done | 1 << place, after))
    left = [call for place, call in enumerate(calls) if required & ~furthest & 1 << place]
    what = f"{left[0]}" if left else f"what is there in the end: {sorted(final or ())}"
    return [f"no order of {len(calls)} calls explains {what}"]
