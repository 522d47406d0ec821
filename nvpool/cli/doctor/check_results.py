"""Results of `nvpool doctor`: the type of a result, and helpers that create results.

All checks of the doctor use this module. A check is a function that inspects one thing and returns one Check
or several. A check changes nothing and has a short time limit for everything that it waits for.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

from nvpool.core.errors import NvpoolError

OK, WARN, BAD = "ok", "warn", "bad"


class Check(NamedTuple):
    """Result of one check.

    `state` is ok, warn (slower or less safe than possible) or bad (does not work, or is not safe). `seen` is
    the observation behind the state. `remedy` says what to do; "" if nothing is to be done.
    """

    name: str
    state: str
    seen: str
    remedy: str = ""


def ok(name: str, seen: str) -> Check:
    return Check(name, OK, seen)


def warn(name: str, seen: str, remedy: str) -> Check:
    return Check(name, WARN, seen, remedy)


def bad(name: str, seen: str, remedy: str) -> Check:
    return Check(name, BAD, seen, remedy)


def all_of(name: str, look: Callable[[], Check | Iterable[Check]]) -> Iterator[Check]:
    """Yield the results of `look`; if it fails, a warning instead, so that other checks continue."""
    try:
        found = look()
        yield from [found] if isinstance(found, Check) else found
    except (OSError, NvpoolError, ValueError) as error:
        yield warn(
            name, f"it could not be looked at: {error}", "run it as root, or as the user of the daemons"
        )
