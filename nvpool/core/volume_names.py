"""Validation of the names of volumes and of volume holders.

A volume name is valid in every interface to a volume: as a path, a Docker name, a CSI handle and a metric
label. Pure functions; the metadata service, the SDK, the CLI and the bridges call them.
"""

from __future__ import annotations

import re

from nvpool.core.errors import InvalidRequest
from nvpool.core.member_names import check_member

VOLUMES = b"volumes"
"""Name of the directory of all volumes, in the root of the pool."""
NAME_MAX, HOLDER_BYTES_MAX = 63, 255
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]*")


def check_volume_name(name: str) -> str:
    """Return `name` if it is a valid volume name.

    InvalidRequest: the name breaks the rule, which the text states. The rule ensures that no name leads out
    of the directory of volumes, and that no two names differ only in their Unicode encoding.
    """
    if not isinstance(name, str) or len(name) > NAME_MAX or not _NAME.fullmatch(name):
        shown = repr(name) if len(str(name)) <= 80 else f"{str(name)[:40]!r}... ({len(name)} characters)"
        raise InvalidRequest(
            f"{shown} cannot be the name of a volume: 1 to {NAME_MAX} letters, digits, _ . and - of ASCII, "
            f"the first a letter or a digit"
        )
    return name


def path_of(name: str) -> str:
    return f"/{VOLUMES.decode()}/{check_volume_name(name)}"


def check_holder(holder: str) -> bytes:
    """Return the name of a volume's holder as the record stores it.

    InvalidRequest: the name is empty, too long, or has control characters.
    """
    raw = holder.encode("utf-8", "surrogatepass") if isinstance(holder, str) else b""
    if not 0 < len(raw) <= HOLDER_BYTES_MAX or any(byte < 32 or byte == 127 for byte in raw):
        raise InvalidRequest(
            f"who holds a volume is named with 1 to {HOLDER_BYTES_MAX} bytes without control characters"
        )
    return raw


def member_named(client: str) -> str:
    """Return the member named by client/NAME or by NAME alone; InvalidRequest if the name is invalid."""
    member = client if "/" in client else f"client/{client}"
    check_member(member)
    return member
