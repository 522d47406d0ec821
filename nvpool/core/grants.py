"""Grants: signed rights to an inode's chunks, given by the metadata service, checked by every store.

Packed little-endian, 60 bytes, part of the format:

    version u8 = 1 · rights u8 · key u16 · session u64 · inode u64 · cut u64 · ends u64 (wall clock, ms since 1970)
    · chain table of the inode u8 (0: table 1) · epoch u24 (its upper 8 bits first, then the lower 16) · volume tag u16
    · member tag u16
    · mac 16 (BLAKE2b of all before it, keyed with the pool's grant key, RFC 7693; a fifth of the time of HMAC)

inode 0 with the right SERVICE is the authority of a metadata service over all inodes of a store.
The last three fields are for revocation (poolmap/grant_revocation): the lower 24 bits of the epoch of the pool map that the
giver knew, and 16 bits each that stand for the volume of the file and for the member to whom the volume is granted by name.
Both tags are 0 for a file in no volume; the member's is 0 where the volume is open to all clients, and for a node. Two volumes
may have one tag: then the grants of both are renewed when one of them is revoked.
The clock is the wall clock because giver and checker are different machines; both sides allow CLOCK_SKEW_S.
"""

from __future__ import annotations

import hmac
import struct
from functools import lru_cache
from hashlib import blake2b
from typing import NamedTuple

from nvpool.core.errors import StaleGrant

READ, WRITE, SERVICE, ENCRYPTED = 1, 2, 4, 8
"""ENCRYPTED: the file is in an encrypted volume, so its blocks are stored as security/xts says, and a write brings the volume's
wrapped key."""
CLOCK_SKEW_S = 5.0
_BODY = struct.Struct("<BBHQQQQBBHHH")
_MAC_BYTES = 16
GRANT_BYTES = _BODY.size + _MAC_BYTES
_VERSION = 1
EPOCH_MASK = (1 << 24) - 1
_SPREAD = 0x9E3779B97F4A7C15
"""2**64 by the golden ratio: its multiples differ in their upper bits (Knuth, The Art of Computer Programming, 6.4)."""


class Grant(NamedTuple):
    rights: int
    key: int
    session: int
    inode: int
    cut: int
    ends_ms: int
    table: int = 1
    """Of chains: a store keeps it with the chunks that are written by this right."""
    epoch: int = 0
    """Lower 24 bits of the epoch of the map that the giver knew."""
    volume: int = 0
    """Tag of the volume; 0: in none."""
    member: int = 0
    """Tag of the member that the volume is granted to; 0: to no one by name."""


def volume_tag(volume: int) -> int:
    """16 bits, never 0, for a volume; 0 for no volume."""
    return (volume * _SPREAD >> 48 & 0xFFFF or 1) if volume else 0


@lru_cache(maxsize=4096)
def member_tag(member: str) -> int:
    """16 bits, never 0, for a member of the pool; 0 for no name."""
    return (int.from_bytes(blake2b(member.encode(), digest_size=2).digest(), "little") or 1) if member else 0


def sign(grant: Grant, secret: bytes) -> bytes:
    body = _BODY.pack(_VERSION, grant.rights, grant.key, grant.session, grant.inode, grant.cut, grant.ends_ms,
                      grant.table if grant.table > 1 else 0, grant.epoch >> 16 & 0xFF, grant.epoch & 0xFFFF, grant.volume,
                      grant.member)
    return body + blake2b(body, key=secret, digest_size=_MAC_BYTES).digest()


def read(raw: bytes) -> Grant:
    """The fields of a grant, unchecked: for its holder, who wants to know when it ends. StaleGrant when it is none."""
    if len(raw) != GRANT_BYTES or raw[0] != _VERSION:
        raise StaleGrant("not a grant of a version that is known here")
    _, rights, key, session, inode, cut, ends_ms, table, above, below, volume, member = _BODY.unpack(raw[:_BODY.size])
    return Grant(rights, key, session, inode, cut, ends_ms, table or 1, above << 16 | below, volume, member)


def terms(raw: bytes) -> tuple[int, int, int, int]:
    """Rights, session, cut and end (`ends_ms`) of a grant, as `read`."""
    if len(raw) != GRANT_BYTES or raw[0] != _VERSION:
        raise StaleGrant("not a grant of a version that is known here")
    _, rights, _, session, _, cut, ends_ms, *_ = _BODY.unpack_from(raw)
    return rights, session, cut, ends_ms


def allows(raw: bytes, rights: int) -> bool:
    """Whether it is a grant of these rights, whenever it ends. For its holder."""
    return len(raw) == GRANT_BYTES and raw[1] & rights == rights


def verify(raw: bytes, secret: bytes, now_ms: int) -> Grant:
    """The fields of a grant whose signature and time are good; StaleGrant otherwise. Callers keep the result and only
    look at `ends_ms` on later requests."""
    grant = read(raw)
    if not hmac.compare_digest(blake2b(raw[:_BODY.size], key=secret, digest_size=_MAC_BYTES).digest(), raw[_BODY.size:]):
        raise StaleGrant("the grant's signature is wrong")
    if grant.ends_ms + CLOCK_SKEW_S * 1000 < now_ms:
        raise StaleGrant("the grant has ended")
    return grant
