"""Names of pool members, of volumes and of volume holders, and their validation.

A member is node/NAME, client/NAME or bridge/NAME. `security/ca` writes these names into certificates, and
`rpc/` reads the names from there. Each name is issued once in the life of a pool, so the name of a removed
member never identifies another member.

A volume name is valid in every interface to a volume: as a path, a Docker name, a CSI handle and a metric
label. The metadata service, the SDK, the CLI and the bridges check it here.
"""

from __future__ import annotations

import hashlib
import os
import re
from functools import lru_cache

from nvpool.core.clock import SYSTEM_CLOCK, Clock
from nvpool.core.errors import InvalidRequest

DAY_S = 86_400
MEMBER_DAYS = 90
MEMBER_S = min(
    float(os.environ.get("NVPOOL_CERTIFICATE_S") or MEMBER_DAYS * DAY_S), float(MEMBER_DAYS * DAY_S)
)
"""Lifetime of a certificate; the environment variable shortens it, for tests of expiry."""
SKEW_S = 3600
"""Backdating of a certificate: its validity begins this long before the signature, because clocks differ."""
RENEW_S = MEMBER_S / 3
"""Remaining lifetime at which a certificate is renewed: a pool that is switched off for a month still
works."""

ANONYMOUS_ID = 65534
"""User and group to which requests of root are mapped under root squash (exports(5), anonuid and anongid)."""
SQUASH_ROOT = "squash-root"
"""Suffix of the name of a client whose requests as root are mapped to ANONYMOUS_ID."""
_ACTS_AS = re.compile(r"client/[A-Za-z0-9_-]+\.[0-9a-f]{8}\.u([0-9]{1,10})-([0-9]{1,10})")
_SQUASHED = re.compile(rf"client/[A-Za-z0-9_-]+\.[0-9a-f]{{8}}\.{SQUASH_ROOT}")
_MEMBER = re.compile(r"(node|client|bridge)/[A-Za-z0-9_.-]{1,80}")

VOLUMES = b"volumes"
"""Name of the directory of all volumes, in the root of the pool."""
VOLUME_NAME_MAX, HOLDER_BYTES_MAX = 63, 255
_VOLUME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]*")


def check_member(member: str) -> None:
    """Raise InvalidRequest unless `member` is KIND/NAME."""
    if not _MEMBER.fullmatch(member):
        raise InvalidRequest(f"{member!r} is not a member of a pool: node/NAME, client/NAME or bridge/NAME")


def new_member(
    kind: str,
    name: str,
    clock: Clock = SYSTEM_CLOCK,
    acts_as: tuple[int, int] | None = None,
    squash_root: bool = False,
) -> str:
    """Return a new, never used member name.

    The name consists of `name`, reduced to the characters that a certificate accepts, and random digits. A
    client that may act as only one user has the user and group after the digits; a client that may not act as
    root has SQUASH_ROOT.
    """
    plain = (
        "".join(c if c.isascii() and (c.isalnum() or c in "_-") else "-" for c in name.split(".")[0])[:48]
        or kind
    )
    behind = (
        f".u{acts_as[0]}-{acts_as[1]}" if acts_as is not None else f".{SQUASH_ROOT}" if squash_root else ""
    )
    return f"{kind}/{plain}.{clock.secret(4).hex()}{behind}"


@lru_cache(maxsize=1024)
def user_in(member: str) -> tuple[int, int] | None:
    """Return the only user and group as which the client may act; None if it may act as any user."""
    found = _ACTS_AS.fullmatch(member)
    return (int(found[1]), int(found[2])) if found is not None else None


@lru_cache(maxsize=1024)
def squashes_root(member: str) -> bool:
    """Return whether requests of root on that client are mapped to ANONYMOUS_ID."""
    return _SQUASHED.fullmatch(member) is not None


def users_of(member: str) -> str:
    """Describe as which users a member may act, for a table."""
    if (user := user_in(member)) is not None:
        return f"user {user[0]}, group {user[1]}"
    return "any user, root squashed" if squashes_root(member) else "any user"


def uri_of(pool_id: str, member: str) -> str:
    return f"nvpool://{pool_id}/{member}"


def dns_of(pool_id: str, member: str) -> str:
    """Return the DNS name that gRPC and etcd verify.

    The name contains a hash of `member`, because a DNS label has at most 63 characters and a member name may
    be longer.
    """
    label = hashlib.sha256(member.encode()).hexdigest()[:32]
    return f"{label}.{pool_id[:32]}.nvpool"


def member_in(uri: str) -> tuple[str, str] | None:
    """Return (pool, member) of a URI made by `uri_of`; None for any other URI."""
    scheme, _, rest = uri.partition("://")
    pool_id, _, member = rest.partition("/")
    return (pool_id, member) if scheme == "nvpool" and pool_id and _MEMBER.fullmatch(member) else None


def check_volume_name(name: str) -> str:
    """Return `name` if it is a valid volume name.

    InvalidRequest: the name breaks the rule, which the text states. The rule ensures that no name leads out
    of the directory of volumes, and that no two names differ only in their Unicode encoding.
    """
    if not isinstance(name, str) or len(name) > VOLUME_NAME_MAX or not _VOLUME.fullmatch(name):
        shown = repr(name) if len(str(name)) <= 80 else f"{str(name)[:40]!r}... ({len(name)} characters)"
        raise InvalidRequest(
            f"{shown} cannot be the name of a volume: 1 to {VOLUME_NAME_MAX} letters, digits, _ . and - of "
            f"ASCII, the first a letter or a digit"
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
