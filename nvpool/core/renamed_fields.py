"""Renamed fields of JSON results: for one release each has its present name and its old one.

Code reads and writes present names only. The supervisor and the CLI add the old names where a result leaves
the process: scripts and commands of an earlier version read those. The CLI adds the present names where the
result of a supervisor arrives, because one of an earlier version sends the old names alone. Stored formats
keep their own names and do not come through here.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

RENAMED_FIELDS = {"desired_state": "wish", "striped": "wide"}
"""Present name -> old name. A line is removed with the release after the one that renamed the field."""


def with_old_fields(value: Any) -> Any:
    """Return a copy of a JSON value whose objects have each renamed field under its old name too."""

    def extended(found: dict[str, Any]) -> dict[str, Any]:
        return found | {old: found[new] for new, old in RENAMED_FIELDS.items() if new in found}

    return _mapped(value, extended)


def with_present_fields(value: Any) -> Any:
    """Return a copy of a JSON value whose objects have each renamed field under its present name too.

    An object that has both names keeps the value of the present one.
    """

    def extended(found: dict[str, Any]) -> dict[str, Any]:
        return {new: found[old] for new, old in RENAMED_FIELDS.items() if old in found} | found

    return _mapped(value, extended)


def _mapped(value: Any, change: Callable[[dict[str, Any]], dict[str, Any]]) -> Any:
    """Apply `change` to each object in a JSON value. Values of other types stay as they are."""
    if isinstance(value, dict):
        return change({key: _mapped(inner, change) for key, inner in value.items()})
    if isinstance(value, list | tuple):
        return [_mapped(inner, change) for inner in value]
    return value
