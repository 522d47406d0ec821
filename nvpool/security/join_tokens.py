"""Join tokens: a short-lived single-use secret, and the fingerprint of the pool's CA.

node/admin/join_server creates tokens, provision/create uses one to join. Text form: "nvp1." and 48 bytes as
URL-safe base64 without padding (RFC 4648): 16 bytes of secret, 32 bytes of SHA-256 of the CA certificate.
Only the holder of the token knows the secret; the pool stores its SHA-256. The fingerprint lets the joining
machine verify the server that answers.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
from typing import NamedTuple

from nvpool.core.errors import InvalidRequest

_PREFIX = "nvp1."
SECRET_BYTES = 16
_FINGERPRINT_BYTES = 32


class Token(NamedTuple):
    secret: bytes
    fingerprint: bytes

    def text(self) -> str:
        return _PREFIX + base64.urlsafe_b64encode(self.secret + self.fingerprint).decode().rstrip("=")


def read_token(text: str, kind: str) -> Token:
    """Parse a token; InvalidRequest if `text` is not a complete token.

    `kind` is that of the joining member. The error names the command for such a token only, and never that
    for a token with more rights.
    """
    text = text.strip()
    try:
        raw = base64.b64decode(
            text[len(_PREFIX) :] + "=" * (-len(text[len(_PREFIX) :]) % 4), b"-_", validate=True
        )
    except (binascii.Error, ValueError):
        raw = b""
    if not text.startswith(_PREFIX) or len(raw) != SECRET_BYTES + _FINGERPRINT_BYTES:
        raise InvalidRequest(
            f"this is not a whole token; copy all of the line that `nvpool {kind} token POOL` prints on a node "
            f"of the pool"
        )
    return Token(raw[:SECRET_BYTES], raw[SECRET_BYTES:])


def hash_of(secret: bytes) -> str:
    return hashlib.sha256(b"nvpool token " + secret).hexdigest()
