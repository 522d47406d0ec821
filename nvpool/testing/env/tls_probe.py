"""A TLS handshake with the server at an address, and the version that was negotiated. Called by tests."""

from __future__ import annotations

import socket
import ssl
from pathlib import Path

from nvpool.security.tls import authority_known


def agreed_version(
    host: str, port: int, authority: bytes, certificate: Path, key: Path, newest: ssl.TLSVersion | None = None
) -> str | None:
    """By a client that knows the authority (PEM) and shows this certificate: of 1.3 alone, or of all up to `newest`. OSError
    where the other side wants none of these. Blocks."""
    context = authority_known(authority)
    context.load_cert_chain(certificate, key)
    context.set_alpn_protocols(["h2"])  # nobody serves gRPC without
    if newest is not None:
        context.set_ciphers("DEFAULT@SECLEVEL=0")  # else OpenSSL would not even propose the old ones
        context.minimum_version, context.maximum_version = ssl.TLSVersion.TLSv1, newest
    with socket.create_connection((host, port), timeout=60) as plain, context.wrap_socket(plain) as secured:
        return secured.version()
