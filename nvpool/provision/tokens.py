"""Join tokens and the CA's key, for creating pools and admitting members.

Used by provision/create and node/admin/join_server. The secret of a token is given out once and stored
nowhere.
"""

from __future__ import annotations

from nvpool.core.clock import SYSTEM_CLOCK
from nvpool.core.endpoint import parse_endpoint
from nvpool.core.errors import AccessDenied, from_os_error
from nvpool.host.pool_directory import PoolDirectory
from nvpool.poolmap.model import JoinToken, Node
from nvpool.security.ca import CertificateAuthority
from nvpool.security.join_tokens import SECRET_BYTES, Token, hash_of
from nvpool.security.tls import AUTHORITY_FILE, AUTHORITY_KEY_FILE

TOKEN_S = 3600.0
TOKEN_S_MAX = 7 * 86_400.0
KINDS = ("node", "client", "bridge")


def new_token(authority: CertificateAuthority, kind: str, lives_s: float) -> tuple[Token, JoinToken]:
    """Create a token: the part for its holder, and the record for the map."""
    secret = SYSTEM_CLOCK.secret(SECRET_BYTES)
    return (
        Token(secret, authority.fingerprint),
        JoinToken(hash_of(secret), kind, now_ms() + int(lives_s * 1000)),
    )


def now_ms() -> int:
    return SYSTEM_CLOCK.wall_ns() // 1_000_000


def read_authority(directory: PoolDirectory, below: str = "") -> CertificateAuthority:
    """Read the pool's CA from secret/. AccessDenied: this node does not have its key."""
    secret = directory.secret / below
    try:
        return CertificateAuthority(
            (secret / AUTHORITY_FILE).read_bytes(), (secret / AUTHORITY_KEY_FILE).read_bytes()
        )
    except FileNotFoundError:
        raise AccessDenied(
            "this node cannot admit members: it does not hold the pool's CA key; use the first node of the pool"
        ) from None
    except OSError as error:
        raise from_os_error(error, f"read {error.filename}") from error


def hosts_of(node: Node | None) -> tuple[str, ...]:
    """Hosts in a node's endpoints, under which others reach it."""
    if node is None:
        return ()
    return tuple({where.host for endpoint in node.endpoints if (where := parse_endpoint(endpoint)).host})


def address_of(node: Node) -> str:
    return next((endpoint for endpoint in node.endpoints if endpoint.startswith("stream://")), "")
