"""The arguments of read_many, checked before anything is read.

One read is a path or an open file (all of it), or (path or open file, offset, length). What is wrong with one raises TypeError
or ValueError that names its index and what was expected. Called by the SDK's file systems.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from nvpool.client.state.types import FileHandle
from nvpool.sdk.argument_checks import OFFSET_MAX, integer
from nvpool.sdk.paths import Path, name_bytes

Read = tuple[Path | FileHandle, int, int | None]
"""(path or handle, offset, length); a length of None reaches to the end of the file."""

ON_ERROR = ("raise", "return")
_EXPECTED = "expected a path, an open file, or (path or open file, offset, length)"


def reads_of(reads: Iterable[Any], handle_of: Callable[[Any], FileHandle | None]) -> tuple[list[Read], Sequence[Any]]:
    """The reads as the client takes them, and the same ones as they were given, for errors.

    `handle_of` gives the handle of an open file, None for what is none, and raises ValueError for one that can not be read.
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
    for number, one in enumerate(given):
        if type(one) is tuple and len(one) == 3:
            what, offset, length = one
            if type(offset) is type(length) is int and 0 <= offset | length <= most:
                if type(what) is str:
                    found.append(one)
                    continue
                try:
                    handle = what if type(what) is FileHandle else handle_of(what)
                except ValueError:
                    handle = None  # said below, with the index
                if type(handle) is FileHandle and handle.readable and not handle.closed:
                    found.append((handle, offset, length))
                    continue
        found.append(_read(number, one, handle_of))
    return found, given


def _are_plain(given: Sequence[Any]) -> bool:
    """Whether all are (text, offset, length) and right: nearly always, so looked at without a turn of Python for each."""
    if set(map(type, given)) != {tuple}:
        return False
    try:
        paths, offsets, lengths = zip(*given, strict=True)
    except ValueError:
        return False  # not of three
    return (set(map(type, offsets)) == {int} == set(map(type, lengths)) and set(map(type, paths)) == {str}
            and min(offsets) >= 0 and min(lengths) >= 0 and max(offsets) <= OFFSET_MAX)


def _read(number: int, one: Any, handle_of: Callable[[Any], FileHandle | None]) -> Read:
    """Any read; ValueError and TypeError."""
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
    """The path of a read, as it was given; None for a handle."""
    what = given[0] if isinstance(given, tuple | list) else given
    if isinstance(what, str | bytes | os.PathLike):
        return what
    name = getattr(what, "path", None) or getattr(what, "name", None)
    return name if isinstance(name, str | bytes | os.PathLike) else None


def check_on_error(on_error: str) -> bool:
    """Whether errors are returned. ValueError."""
    if on_error not in ON_ERROR:
        raise ValueError(f"on_error has to be 'raise' or 'return', not {on_error!r}")
    return on_error == "return"
