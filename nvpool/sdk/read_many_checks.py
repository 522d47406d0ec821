"""Argument checks of read_many, made before anything is read.

One read is a path or an open file (all of it), or a tuple (path or open file, offset, length). An invalid
read raises TypeError or ValueError, which names its index and the expected form. The SDK's file systems use
this module.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from nvpool.client.state.vfs_types import FileHandle
from nvpool.sdk.argument_checks import OFFSET_MAX, integer
from nvpool.sdk.paths import Path, name_bytes

Read = tuple[Path | FileHandle, int, int | None]
"""One read: (path or handle, offset, length). A length of None reaches to the end of the file."""

ON_ERROR = ("raise", "return")
_EXPECTED = "expected a path, an open file, or (path or open file, offset, length)"


def reads_of(
    reads: Iterable[Any], handle_of: Callable[[Any], FileHandle | None]
) -> tuple[list[Read], Sequence[Any]]:
    """Check all reads; return them as the client takes them, and as given. The caller needs the given ones
    for error messages.

    `handle_of` returns the handle of an open file, and None for any other object. For a file that cannot be
    read it raises ValueError.
    """
    if isinstance(reads, str | bytes | bytearray | os.PathLike):
        raise TypeError(f"expected several reads, not one path; write read_many([{reads!r}])")
    try:
        given = reads if isinstance(reads, list | tuple) else list(reads)
    except TypeError:
        raise TypeError(f"expected an iterable of reads, not {type(reads).__name__}") from None
    if _are_plain(given):
        return list(given), given
    found: list[Read] = []
    most = OFFSET_MAX
    before: Any = None  # the file of the read before, whose handle is known
    handle: FileHandle | None = None
    for number, one in enumerate(given):
        if type(one) is tuple and len(one) == 3:
            what, offset, length = one
            if type(offset) is type(length) is int and 0 <= offset | length <= most:
                if type(what) is str:
                    found.append(one)
                    continue
                if what is not before:
                    before = what
                    try:
                        handle = what if type(what) is FileHandle else handle_of(what)
                    except ValueError:
                        handle = None  # reported by `_read` below, with the index
                if type(handle) is FileHandle and handle.readable and not handle.closed:
                    found.append((handle, offset, length))
                    continue
        found.append(_read(number, one, handle_of))
    return found, given


def _are_plain(given: Sequence[Any]) -> bool:
    """Whether all reads are valid tuples (str, offset, length). This is the usual case, so it is checked
    without a Python loop."""
    if set(map(type, given)) != {tuple}:
        return False
    try:
        paths, offsets, lengths = zip(*given, strict=True)
    except ValueError:
        return False  # some do not have three parts
    return (
        set(map(type, offsets)) == {int} == set(map(type, lengths))
        and set(map(type, paths)) == {str}
        and min(offsets) >= 0
        and min(lengths) >= 0
        and max(offsets) <= OFFSET_MAX
    )


def _read(number: int, one: Any, handle_of: Callable[[Any], FileHandle | None]) -> Read:
    """Check one read of any form. Errors: ValueError, TypeError."""
    what, offset, length = one, 0, None
    if isinstance(one, tuple | list):
        if len(one) != 3:
            raise TypeError(f"read {number}: {_EXPECTED}, not {type(one).__name__} of {len(one)}")
        what, offset, length = one
        offset = _whole_number(number, "offset", offset)
        length = None if length is None else _whole_number(number, "length", length)
        if offset + (length or 0) > OFFSET_MAX:
            raise ValueError(f"read {number}: {length} bytes at {offset} are beyond the largest file")
    return _source(number, what, handle_of), offset, length


def _whole_number(number: int, name: str, value: Any) -> int:
    wanted = "an integer from 0 on" + (", or None for the rest of the file" if name == "length" else "")
    exact = integer(f"read {number}: the {name}", value, wanted)
    if exact < 0:
        raise ValueError(f"read {number}: the {name} has to be {wanted}, not {exact}")
    return exact


def _source(number: int, what: Any, handle_of: Callable[[Any], FileHandle | None]) -> Path | FileHandle:
    try:
        handle = what if isinstance(what, FileHandle) else handle_of(what)
        if handle is None:
            if not isinstance(what, str | bytes | os.PathLike):
                raise TypeError(f"{_EXPECTED}, not {type(what).__name__}")
            return name_bytes(what)
        if handle.closed:
            raise ValueError("the file is closed")
        if not handle.readable:
            raise ValueError("the file is not open for reading")
        return handle
    except (TypeError, ValueError) as error:
        raise type(error)(f"read {number}: {error}") from None


def name_of(given: Any) -> Path | None:
    """Path of a read as the caller wrote it; None for a file handle."""
    what = given[0] if isinstance(given, tuple | list) else given
    if isinstance(what, str | bytes | os.PathLike):
        return what
    name = getattr(what, "path", None) or getattr(what, "name", None)
    return name if isinstance(name, str | bytes | os.PathLike) else None


def check_on_error(on_error: str) -> bool:
    """Whether errors are returned instead of raised. ValueError: `on_error` is neither 'raise' nor
    'return'."""
    if on_error not in ON_ERROR:
        raise ValueError(f"on_error has to be 'raise' or 'return', not {on_error!r}")
    return on_error == "return"
