"""Audit log of a node, log/audit.log: line format, retention and reading.

One JSON object per line. Keys: time (RFC 3339, UTC), event (for example `token`, `drive-add`,
`volume-grant`), result (done, refused, failed), who (`member` of a certificate; or `uid`, `user`,
`login_user`, `pid` and `command` of a process of this machine; else `unknown`), from (address, or unix),
process (the writer of the line), what (arguments, without secrets), error, left_out (number of preceding
events that were dropped because there were too many). Written by runtime/audit_log, read by `nvpool audit`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

FILE = "audit.log"
KEPT = 4
"""Number of older files that are kept; audit.log.1 is the newest of them."""
TEXT_MAX, LINE_MAX = 300, 8000
"""Maximum characters of one value, and maximum bytes of a line."""
_SECRET_WORDS = ("token", "secret", "password", "key")


def older(path: Path, number: int) -> Path:
    return path.with_name(f"{path.name}.{number}")


def line_of(record: dict[str, Any]) -> bytes:
    """Encode a record as ASCII.

    Names chosen by unauthenticated peers must not send control codes to a terminal.
    """
    line = json.dumps(record).encode()
    return line if len(line) <= LINE_MAX else json.dumps(record | {"what": {"left_out": "too long"}}).encode()


def without_secrets(what: Any, depth: int = 4) -> Any:
    """Return `what` with texts shortened to TEXT_MAX, and without values whose name suggests a secret."""
    if isinstance(what, Mapping):
        if depth == 0:
            return "..."
        return {
            str(name)[:TEXT_MAX]: "..." if _is_secret(str(name), value) else without_secrets(value, depth - 1)
            for name, value in list(what.items())[:50]
        }
    if isinstance(what, list | tuple):
        return [without_secrets(value, depth - 1) for value in what[:50]] if depth else "..."
    if what is None or isinstance(what, bool | int | float):
        return what
    return str(what)[:TEXT_MAX]


def _is_secret(name: str, value: Any) -> bool:
    return not isinstance(value, bool | int | float | None) and any(
        word in name.lower() for word in _SECRET_WORDS
    )


def read_audit(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the records of the log at `path` and of its older files, the oldest first.

    Lines that are not records are skipped. OSError: a file exists but is unreadable.
    """
    for file in (*(older(path, number) for number in range(KEPT, 0, -1)), path):
        try:
            opened = open(file, encoding="utf-8", errors="replace")
        except FileNotFoundError:
            continue
        with opened:
            for line in opened:
                try:
                    record = json.loads(line)
                except ValueError:
                    continue
                if isinstance(record, dict) and "event" in record:
                    yield record
