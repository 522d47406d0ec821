"""Validation of requests to the bridge: names of volumes and holders, options, paths inside a volume.

bridge/volumes and the two services use it. Pure functions without I/O. A value that passes names nothing
outside of a volume's directory. A name is one path component in ASCII, so no two names differ only in their
Unicode form. A path inside a volume is relative and without `..`, and bridge/bind_helper resolves it without
symbolic links.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, NamedTuple

from nvpool.core.errors import InvalidRequest, NameTooLong
from nvpool.core.names import check_volume_name
from nvpool.core.units import FILE_BYTES_MAX, parse_bytes

HOLDER_CHARACTERS_MAX = 180
SUBPATH_BYTES_MAX = 1024
"""With the mount point in front, a path stays below PATH_MAX (4,096 bytes)."""
_COMPONENT_BYTES_MAX = 255
SOCKET_BYTES_MAX = 107
"""Limit of a path in sockaddr_un (unix(7)), without the NUL."""
_SHOWN = 60

_HOLDER = re.compile(r"[A-Za-z0-9][A-Za-z0-9_./:@=+-]*")
_YES, _NO = ("", "1", "true", "yes", "on"), ("0", "false", "no", "off")


class Options(NamedTuple):
    """Options of a volume. 0 and None: not given; a new volume gets the default, an existing one stays."""

    bytes_max: int = 0
    files_max: int = 0
    replicas: int | None = None
    sealed: bool | None = None
    subpath: str = ""


OPTION_NAMES = ("size", "files", "replicas", "sealed", "subpath")


def shown(text: object) -> str:
    """Return `text` for a message: unprintable characters are escaped, a long text is shortened."""
    whole = ascii(text)
    return whole if len(whole) <= _SHOWN else f"{whole[:_SHOWN]}… ({len(str(text))} characters)"


def checked_name(name: object) -> str:
    """Return `name` if it is a valid volume name (core/names). InvalidRequest: it is not."""
    if not isinstance(name, str) or not name:
        raise InvalidRequest("a volume has a name; give one")
    return check_volume_name(name)


def checked_holder(holder: object) -> str:
    """Return `holder` if it is a valid id of a user of a volume. InvalidRequest: it is not."""
    if not isinstance(holder, str) or len(holder) > HOLDER_CHARACTERS_MAX or not _HOLDER.fullmatch(holder):
        raise InvalidRequest(
            f"{shown(holder)} cannot be the id of who uses a volume: it takes 1 to {HOLDER_CHARACTERS_MAX} "
            "letters, digits and _ . / : @ = + -"
        )
    return holder


def checked_subpath(subpath: object) -> str:
    """Return `subpath` without empty and `.` components; empty for the volume itself.

    InvalidRequest: the path is absolute, contains `..` or invalid characters. NameTooLong: it is too long.
    """
    if not isinstance(subpath, str):
        raise InvalidRequest(f"subpath is {shown(subpath)}, and shall be a path inside of the volume")
    if "\0" in subpath or any(0xD800 <= ord(character) < 0xE000 for character in subpath):
        raise InvalidRequest(f"subpath {shown(subpath)} has characters that no path has")
    if subpath.startswith("/"):
        raise InvalidRequest(
            f"subpath {shown(subpath)} is absolute; it begins in the volume: leave the first / out"
        )
    names = [name for name in subpath.split("/") if name not in ("", ".")]
    if ".." in names:
        raise InvalidRequest(f"subpath {shown(subpath)} has .. in it; it may only lead down, into the volume")
    whole = "/".join(names)
    if len(whole.encode()) > SUBPATH_BYTES_MAX or any(
        len(name.encode()) > _COMPONENT_BYTES_MAX for name in names
    ):
        raise NameTooLong(
            f"subpath {shown(subpath)} is too long: it takes {SUBPATH_BYTES_MAX} bytes, and "
            f"{_COMPONENT_BYTES_MAX} for each of its names"
        )
    return whole


def parse_options(options: Mapping[str, Any] | None) -> Options:
    """Parse options as people write them: {"size": "10G", "files": "1000000"}.

    InvalidRequest, NameTooLong: the text names the wrong option and the possible values.
    """
    given: dict[str, str] = {}
    for key, value in (options or {}).items():
        if key not in OPTION_NAMES:
            raise InvalidRequest(
                f"there is no option {shown(key)}; a volume takes: {', '.join(OPTION_NAMES)}"
            )
        if not isinstance(value, str):
            raise InvalidRequest(f"the option {key} is {shown(value)}, and shall be text")
        given[key] = value.strip()
    return Options(
        _size(given.get("size", "")),
        _count("files", given.get("files", ""), 1 << 62),
        _count("replicas", given.get("replicas", ""), 3) or None,
        _parse_bool("sealed", given["sealed"]) if "sealed" in given else None,
        checked_subpath(given.get("subpath", "")),
    )


def _size(text: str) -> int:
    if not text:
        return 0
    try:
        size = parse_bytes(text)
    except ValueError as error:
        raise InvalidRequest(f"the option size: {error}") from None
    if not 0 < size < FILE_BYTES_MAX << 13:
        raise InvalidRequest(f"the option size is {shown(text)}; leave it out for a volume without a bound")
    return size


def _count(name: str, text: str, most: int) -> int:
    if not text:
        return 0
    if not (text.isascii() and text.isdigit() and len(text) < 20 and 0 < int(text) <= most):
        raise InvalidRequest(
            f"the option {name} is {shown(text)}, and shall be a whole number from 1 to {most}"
        )
    return int(text)


def _parse_bool(name: str, text: str) -> bool:
    if text.lower() not in (*_YES, *_NO):
        raise InvalidRequest(f"the option {name} is {shown(text)}, and shall be true or false")
    return text.lower() in _YES
