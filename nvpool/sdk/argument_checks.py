"""Argument checks of the SDK, made before a call changes anything.

A wrong type raises TypeError and a value out of bounds ValueError, as in Python's os and io. The text names
the argument, the expected value and the given one. Each check returns the value in the form that the client
takes. The SDK's file systems and volumes use this module; `sdk/read_many_checks` checks the arguments of
read_many.
"""

from __future__ import annotations

import codecs
import operator
import os
import stat
from typing import Any

from nvpool.client.state.vfs_types import NOW, XATTR_CREATE, XATTR_REPLACE
from nvpool.core.errors import NameTooLong
from nvpool.core.units import NAME_BYTES_MAX
from nvpool.sdk.paths import Path, name_bytes, names_of

OFFSET_MAX = (1 << 63) - 1
_MODE_MAX = 0o177777
"""File type bits are accepted, so that st_mode can be passed to chmod. They change nothing."""
_ID_MAX = (1 << 32) - 2
_REPLICAS_MAX = 3
_MODES = {
    "r": os.O_RDONLY,
    "w": os.O_WRONLY | os.O_CREAT | os.O_TRUNC,
    "a": os.O_WRONLY | os.O_CREAT | os.O_APPEND,
    "x": os.O_WRONLY | os.O_CREAT | os.O_EXCL,
}


def integer(name: str, value: Any, expected: str = "an integer") -> int:
    """`value` as an int. TypeError if it is not an integer."""
    try:
        return operator.index(value)
    except TypeError:
        raise TypeError(
            f"{name} has to be {expected}, not {type(value).__name__} ({_shown(value)})"
        ) from None


def integer_between(name: str, value: Any, least: int, most: int, expected: str) -> int:
    """`value` as an int in the given range. Errors: TypeError, ValueError."""
    exact = integer(name, value, expected)
    if not least <= exact <= most:
        raise ValueError(f"{name} has to be {expected}, not {exact}")
    return exact


def text(name: str, value: Any) -> str:
    """`value` as a string. TypeError if it is not one."""
    if not isinstance(value, str):
        raise TypeError(f"{name} has to be a string, not {type(value).__name__} ({_shown(value)})")
    return value


def timeout(name: str, value: Any) -> float:
    """`value` as a number of seconds, at least 0. Errors: TypeError, ValueError."""
    if not isinstance(value, int | float):
        raise TypeError(f"{name} has to be a number of seconds, not {type(value).__name__} ({_shown(value)})")
    if not value >= 0:
        raise ValueError(f"{name} has to be a number of seconds from 0 on, not {value}")
    return value


# -- attributes --------------------------------------------------------------------------------------------------------


def mode_of(value: Any, name: str = "mode") -> int:
    """Permissions of a file or directory, from 0 to 0o7777."""
    expected = "an integer of permissions, from 0 to 0o7777"
    return stat.S_IMODE(integer_between(name, value, 0, _MODE_MAX, expected))


def owner_of(name: str, value: Any) -> int | None:
    """User or group number; None for -1, which leaves the owner unchanged."""
    exact = integer_between(
        name, value, -1, _ID_MAX, f"an integer from 0 to {_ID_MAX}, or -1 to keep what is there"
    )
    return None if exact == -1 else exact


def times_of(ns: Any) -> tuple[int | str, int | str]:
    """Access and modification times as the client takes them. The client clamps times that are out of
    range."""
    if ns is None:
        return NOW, NOW
    expected = "a tuple of two integers (atime and mtime in nanoseconds), or None for now"
    if not isinstance(ns, tuple | list) or len(ns) != 2:
        of = f" of {len(ns)}" if isinstance(ns, tuple | list) else ""
        raise TypeError(f"ns has to be {expected}, not {type(ns).__name__}{of} ({_shown(ns)})")
    return integer("ns[0]", ns[0]), integer("ns[1]", ns[1])


def size_of(size: Any) -> int:
    """New size of a file, in bytes."""
    return integer_between("the size of a file", size, 0, OFFSET_MAX, f"an integer from 0 to {OFFSET_MAX}")


def attribute_name(name: Any) -> bytes:
    """Name of an extended attribute."""
    if not isinstance(name, str | bytes | os.PathLike):
        raise TypeError(
            f"the name of an attribute has to be a string or bytes, not {type(name).__name__} ({_shown(name)})"
        )
    raw = os.fsencode(name)
    if b"\0" in raw:
        raise ValueError(f"the name of an attribute cannot have a null character in it: {name!r}")
    return raw


def attribute_flags(flags: Any) -> int:
    """Flags of setxattr."""
    exact = integer("flags", flags)
    if exact not in (0, XATTR_CREATE, XATTR_REPLACE):
        raise ValueError(f"flags has to be 0, os.XATTR_CREATE or os.XATTR_REPLACE, not {exact}")
    return exact


def layout_of(replicas: Any, chunk_bytes: Any) -> tuple[int, int]:
    """Arguments of set_layout. The pool itself checks whether it supports the chunk size."""
    return (
        integer_between(
            "replicas", replicas, 0, _REPLICAS_MAX, f"an integer from 1 to {_REPLICAS_MAX}, or 0 to keep it"
        ),
        integer_between(
            "chunk_bytes", chunk_bytes, 0, OFFSET_MAX, "an integer number of bytes, or 0 to keep it"
        ),
    )


def check_new_names(path: Path) -> None:
    """Check the path of a new entry. TypeError and ValueError: not a path. NameTooLong: a part is too long
    for a name."""
    if any(len(name) > NAME_BYTES_MAX for name in names_of(path)):
        raise NameTooLong


# -- bytes -------------------------------------------------------------------------------------------------------------


def contiguous(into: Any) -> memoryview:
    """`into` as a writable byte buffer. TypeError: it is not a buffer, is read-only, or is not contiguous."""
    try:
        view = memoryview(into)
    except TypeError:
        raise TypeError(
            f"the buffer to read into has to be a bytearray or another writable buffer, not "
            f"{type(into).__name__}"
        ) from None
    if view.readonly:
        raise TypeError("the buffer to read into is read-only")
    return view if view.format == "B" and view.ndim == 1 and view.contiguous else view.cast("B")


def bytes_of(content: Any, name: str = "what is written") -> bytes | memoryview:
    """`content` as bytes. TypeError: it is not a buffer, or not contiguous. The callers check this before
    they change a file."""
    if type(content) is bytes:
        return content
    try:
        view = memoryview(content)
    except TypeError:
        hint = "; encode it first, as text.encode()" if isinstance(content, str) else ""
        raise TypeError(
            f"{name} has to be bytes or another buffer, not {type(content).__name__}{hint}"
        ) from None
    return view if view.format == "B" and view.ndim == 1 and view.contiguous else view.cast("B")


# -- open --------------------------------------------------------------------------------------------------------------


def flags_of(mode: str) -> int:
    """Flags of open(2) for a mode string of Python's open. The letters b and t are accepted and ignored.
    Errors: TypeError, ValueError."""
    if not isinstance(mode, str):
        raise TypeError(f"the mode of open has to be a string like 'rb', not {type(mode).__name__}")
    if mode.count("b") + mode.count("t") > 1:
        raise ValueError(f"{mode!r} is not a mode of open: b and t stand once, and not together")
    kind = mode.replace("b", "").replace("t", "")
    flags = _MODES.get(kind.replace("+", ""))
    if flags is None or kind.count("+") > 1:
        raise ValueError(f"{mode!r} is not a mode of open")
    return flags & ~os.O_ACCMODE | os.O_RDWR if "+" in kind else flags


def check_opening(
    path: Path, mode: str, buffering: int, encoding: str | None, errors: str | None, newline: str | None
) -> None:
    """Check the arguments of `open`. The errors are those of io.open (TypeError, ValueError, LookupError),
    but raised before the file is opened, because opening may truncate it."""
    name_bytes(path)
    integer("buffering", buffering)
    for name, value in (("encoding", encoding), ("errors", errors), ("newline", newline)):
        if value is not None and not isinstance(value, str):
            raise TypeError(f"{name} has to be a string or None, not {type(value).__name__}")
        if value is not None and "b" in mode:
            raise ValueError(f"a binary file takes no {name}")
    if "b" in mode:
        return
    if buffering == 0:
        raise ValueError("a text file cannot be unbuffered")
    if encoding not in (None, "locale"):
        codecs.lookup(encoding)
    if errors is not None:
        codecs.lookup_error(errors)
    if newline not in (None, "", "\n", "\r", "\r\n"):
        raise ValueError(f"{newline!r} is not a newline; it is None, '', '\\n', '\\r' or '\\r\\n'")


def _shown(value: Any) -> str:
    shown = repr(value)
    return shown if len(shown) <= 60 else f"{shown[:57]}..."
