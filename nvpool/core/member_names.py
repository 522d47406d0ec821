"""The names of the members of a pool: node/NAME, client/NAME, bridge/NAME, and how certificates write them.

Called by whoever makes certificates (security/ca) and whoever looks at them (rpc/). A name is given once in the life of a
pool, so that one that was taken away never comes back with somebody else.
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
MEMBER_S = min(float(os.environ.get("NVPOOL_CERTIFICATE_S") or MEMBER_DAYS * DAY_S), float(MEMBER_DAYS * DAY_S))
"""How long a certificate is good; the variable makes it shorter, for tests of what happens then."""
SKEW_S = 3600
"""A certificate begins so long before it is signed: clocks differ."""
RENEW_S = MEMBER_S / 3
"""What is left of a certificate when it is renewed: a pool that is switched off for a month goes on."""

NOBODY = 65534
"""User and group as which root counts where it is squashed (exports(5), anonuid and anongid)."""
SQUASH_ROOT = "squash-root"
"""Behind the name of a client whose requests for root count as nobody's."""
_ACTS_AS = re.compile(r"client/[A-Za-z0-9_-]+\.[0-9a-f]{8}\.u([0-9]{1,10})-([0-9]{1,10})")
_SQUASHED = re.compile(rf"client/[A-Za-z0-9_-]+\.[0-9a-f]{{8}}\.{SQUASH_ROOT}")
_MEMBER = re.compile(r"(node|client|bridge)/[A-Za-z0-9_.-]{1,80}")


def check_member(member: str) -> None:
    """InvalidRequest unless it is KIND/NAME."""
    if not _MEMBER.fullmatch(member):
        raise InvalidRequest(f"{member!r} is no member of a pool: node/NAME, client/NAME or bridge/NAME")


def new_member(kind: str, name: str, clock: Clock = SYSTEM_CLOCK, acts_as: tuple[int, int] | None = None,
               squash_root: bool = False) -> str:
    """A member that never was: `name`, as far as a certificate takes it, and random digits behind it; a client that may act as
    one user alone has user and group behind those, one that may not act as root SQUASH_ROOT."""
    plain = "".join(c if c.isascii() and (c.isalnum() or c in "_-") else "-" for c in name.split(".")[0])[:48] or kind
    behind = f".u{acts_as[0]}-{acts_as[1]}" if acts_as is not None else f".{SQUASH_ROOT}" if squash_root else ""
    return f"{kind}/{plain}.{clock.secret(4).hex()}{behind}"


@lru_cache(maxsize=1024)
def user_in(member: str) -> tuple[int, int] | None:
    """User and group as which alone the client may act; None: as any."""
    found = _ACTS_AS.fullmatch(member)
    return (int(found[1]), int(found[2])) if found is not None else None


@lru_cache(maxsize=1024)
def squashes_root(member: str) -> bool:
    """Whether root of that client counts as nobody."""
    return _SQUASHED.fullmatch(member) is not None


def users_of(member: str) -> str:
    """As whom a member may act, in words for a table."""
    if (user := user_in(member)) is not None:
        return f"user {user[0]}, group {user[1]}"
    return "any user, root as nobody" if squashes_root(member) else "any user"


def uri_of(pool_id: str, member: str) -> str:
    return f"nvpool://{pool_id}/{member}"


def dns_of(pool_id: str, member: str) -> str:
    """The name that gRPC and etcd look for: a label has at most 63 letters, and a member may have more."""
    label = hashlib.sha256(member.encode()).hexdigest()[:32]
    return f"{label}.{pool_id[:32]}.nvpool"


def member_in(uri: str) -> tuple[str, str] | None:
    """(pool, member) of what uri_of makes, None for any other URI."""
    scheme, _, rest = uri.partition("://")
    pool_id, _, member = rest.partition("/")
    return (pool_id, member) if scheme == "nvpool" and pool_id and _MEMBER.fullmatch(member) else None
