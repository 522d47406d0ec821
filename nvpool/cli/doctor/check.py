"""What `nvpool doctor` finds: the form of a finding, and how findings are shown and counted.

Called by the parts of the doctor. A check is a function that looks at one thing and gives a Check, or several; it never changes
anything, and never waits long.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

from nvpool.core.errors import NvpoolError

OK, WARN, BAD = "ok", "warn", "bad"


class Check(NamedTuple):
    """`state`: ok; warn: slower or less safe than it could be; bad: something does not work or is not safe. `seen`: what it was
    judged by. `remedy`: what to do; "" where nothing is to be done."""

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
    """What `look` finds; where it can not look, that is said and the others go on."""
    try:
        found = look()
        yield from [found] if isinstance(found, Check) else found
    except (OSError, NvpoolError, ValueError) as error:
        yield warn(name, f"it could not be looked at: {error}", "run it as root, or as the user of the daemons")
