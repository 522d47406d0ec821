"""Access tokens (grants): signed rights to the chunks of one inode.

The metadata service issues grants, and every store verifies them. A grant has 60 bytes, packed little-endian,
and its encoding is part of the format:

    version u8 = 1 · rights u8 · key u16 · session u64 · inode u64 · cut u64
    · ends u64 (wall clock, ms since 1970) · chain table of the inode u8 (0: table 1)
    · epoch u24 (its upper 8 bits first, then the lower 16) · volume tag u16 · member tag u16
    · mac 16 (BLAKE2b of all before it, keyed with the pool's grant key, RFC 7693; a fifth of the time of HMAC)

`cut` is the truncate number of the file. Inode 0 with the right SERVICE gives a metadata service access to all
inodes of a store. The epoch and the two tags serve revocation (`poolmap/grant_revocation`): the lower 24 bits
of the pool map epoch that the issuer knew, a 16-bit tag of the volume of the file, and a 16-bit tag of the
member to which the volume is granted by name. Both tags are 0 for a file outside all volumes. The member tag
is also 0 for a node, and for a volume that is open to all clients. Two volumes may share a tag: when one of
them is revoked, clients renew the grants of both. Grants use the wall clock because issuer and verifier are
different machines; both allow CLOCK_SKEW_S.
"""

from __future__ import annotations

import hmac
import struct
from collections.abc import Callable
from functools import lru_cache
from hashlib import blake2b
from typing import Any, NamedTuple

from nvpool.core.errors import StaleGrant

READ, WRITE, SERVICE, ENCRYPTED = 1, 2, 4, 8
"""Rights. ENCRYPTED: the file is in an encrypted volume. Its blocks are stored as `security/xts` describes,
and each write carries the volume's wrapped key."""
CLOCK_SKEW_S = 5.0
_BODY = struct.Struct("<BBHQQQQBBHHH")
_MAC_BYTES = 16
GRANT_BYTES = _BODY.size + _MAC_BYTES
_GRANT_BYTES = GRANT_BYTES
BODY_BYTES = _BODY.size
"""Bytes before the mac."""
_VERSION = 1
_new_tuple = tuple.__new__  # does not check the number of fields, which costs a third
EPOCH_MASK = (1 << 24) - 1
_SPREAD = 0x9E3779B97F4A7C15
"""2**64 divided by the golden ratio: its multiples differ in their upper bits (Knuth, The Art of Computer
Programming, 6.4)."""


class Grant(NamedTuple):
    rights: int
    key: int
    session: int
    inode: int
    cut: int
    ends_ms: int
    table: int = 1
    """Chain table of the inode; a store records the table with the chunks that are written with this
    grant."""
    epoch: int = 0
    """Lower 24 bits of the epoch of the pool map that the issuer knew."""
    volume: int = 0
    """Tag of the volume; 0 for a file outside all volumes."""
    member: int = 0
    """Tag of the member to which the volume is granted by name; 0 if there is none."""


def volume_tag(volume: int) -> int:
    """Return the 16-bit tag of a volume: never 0 for a volume, and 0 for no volume."""
    return (volume * _SPREAD >> 48 & 0xFFFF or 1) if volume else 0


@lru_cache(maxsize=4096)
def member_tag(member: str) -> int:
    """Return the 16-bit tag of a member: never 0 for a member of the pool, and 0 for an empty name."""
    return (int.from_bytes(blake2b(member.encode(), digest_size=2).digest(), "little") or 1) if member else 0


def sign(grant: Grant, secret: bytes) -> bytes:
    body = _BODY.pack(
        _VERSION,
        grant.rights,
        grant.key,
        grant.session,
        grant.inode,
        grant.cut,
        grant.ends_ms,
        grant.table if grant.table > 1 else 0,
        grant.epoch >> 16 & 0xFF,
        grant.epoch & 0xFFFF,
        grant.volume,
        grant.member,
    )
    return body + blake2b(body, key=secret, digest_size=_MAC_BYTES).digest()


def keyed_hash(secret: bytes) -> Callable[[], Any]:
    """Return the function that begins the mac of a grant with this key, as hashlib.blake2b."""
    return blake2b(key=secret, digest_size=_MAC_BYTES).copy


def grant_signer(secret: bytes) -> Callable[[bytes], bytes]:
    """Return the function that signs the body of a grant, all bytes before the mac, with this key."""
    keyed = keyed_hash(secret)

    def signed(body: bytes) -> bytes:
        state = keyed()
        state.update(body)
        mac: bytes = state.digest()
        return body + mac

    return signed


def read(raw: bytes) -> Grant:
    """Return the fields of a grant without verifying it.

    For a client that needs the expiry of its own grant.

    StaleGrant: `raw` is not a grant of a known version.
    """
    if len(raw) != _GRANT_BYTES or raw[0] != _VERSION:
        raise StaleGrant("not a grant of a version that is known here")
    _, rights, key, session, inode, cut, ends_ms, table, above, below, volume, member = _BODY.unpack_from(raw)
    return _new_tuple(
        Grant, (rights, key, session, inode, cut, ends_ms, table or 1, above << 16 | below, volume, member)
    )


def terms(raw: bytes) -> tuple[int, int, int, int]:
    """Return rights, session, truncate number (`cut`) and expiry (`ends_ms`) of a grant; StaleGrant as in
    `read`."""
    if len(raw) != GRANT_BYTES or raw[0] != _VERSION:
        raise StaleGrant("not a grant of a version that is known here")
    _, rights, _, session, _, cut, ends_ms, *_ = _BODY.unpack_from(raw)
    return rights, session, cut, ends_ms


def allows(raw: bytes, rights: int) -> bool:
    """Return whether `raw` grants all of `rights`, regardless of expiry.

    Used by the client that holds the grant.
    """
    return len(raw) == GRANT_BYTES and raw[1] & rights == rights


def verify(raw: bytes, secret: bytes, now_ms: int) -> Grant:
    """Return the fields of a grant after checking its signature and expiry.

    StaleGrant: the signature is wrong or the grant has expired. Callers cache the result and check only
    `ends_ms` on later requests.
    """
    grant = read(raw)
    if not hmac.compare_digest(
        blake2b(raw[: _BODY.size], key=secret, digest_size=_MAC_BYTES).digest(), raw[_BODY.size :]
    ):
        raise StaleGrant("the grant's signature is wrong")
    if grant.ends_ms + CLOCK_SKEW_S * 1000 < now_ms:
        raise StaleGrant("the grant has ended")
    return grant
