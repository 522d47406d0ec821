"""What can be the name of a volume, and of who uses one. Pure; the one place where they are looked at: the metadata service,
the SDK, the CLI and the bridges call this.

The names are those that every door to a volume can say: a path, a name of Docker's, a handle of CSI's, a label of a metric.
"""

from __future__ import annotations

import re

from nvpool.core.errors import InvalidRequest
from nvpool.core.member_names import check_member

VOLUMES = b"volumes"
"""In the root of the pool: the directory of all volumes."""
NAME_MAX, HOLDER_BYTES_MAX = 63, 255
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]*")


def check_volume_name(name: str) -> str:
    """The name itself. InvalidRequest with the rule where it can be none: so no name leads out of the directory of volumes,
    and no two differ only in how Unicode writes them."""
    if not isinstance(name, str) or len(name) > NAME_MAX or not _NAME.fullmatch(name):
        shown = repr(name) if len(str(name)) <= 80 else f"{str(name)[:40]!r}... ({len(name)} characters)"
        raise InvalidRequest(f"{shown} can not be the name of a volume: 1 to {NAME_MAX} letters, digits, _ . and - of ASCII, "
                             f"the first a letter or a digit")
    return name


def path_of(name: str) -> str:
    return f"/{VOLUMES.decode()}/{check_volume_name(name)}"


def check_holder(holder: str) -> bytes:
    """Who is attached to a volume, as a record names him. InvalidRequest."""
    raw = holder.encode("utf-8", "surrogatepass") if isinstance(holder, str) else b""
    if not 0 < len(raw) <= HOLDER_BYTES_MAX or any(byte < 32 or byte == 127 for byte in raw):
        raise InvalidRequest(f"who holds a volume is named with 1 to {HOLDER_BYTES_MAX} bytes without control characters")
    return raw


def member_named(client: str) -> str:
    """The member of the pool that is meant: client/NAME, or NAME alone. InvalidRequest."""
    member = client if "/" in client else f"client/{client}"
    check_member(member)
    return member
