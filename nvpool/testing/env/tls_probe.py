"""TLS handshake with a server, to see the version that both agree on. Used by tests."""

from __future__ import annotations

import socket
import ssl
from pathlib import Path

from nvpool.security.tls import authority_known


def agreed_version(
    host: str, port: int, authority: bytes, certificate: Path, key: Path, newest: ssl.TLSVersion | None = None
) -> str | None:
    """Return the TLS version of a handshake by a client with this CA (PEM), certificate and key.

    The client offers TLS 1.3 alone, or all versions up to `newest`. OSError: the server refuses them all.
    Blocks.
    """
    context = authority_known(authority)
    context.load_cert_chain(certificate, key)
    context.set_alpn_protocols(["h2"])  # gRPC servers require it
    if newest is not None:
        context.set_ciphers("DEFAULT@SECLEVEL=0")  # otherwise OpenSSL does not even offer the old versions
        context.minimum_version, context.maximum_version = ssl.TLSVersion.TLSv1, newest
    with socket.create_connection((host, port), timeout=60) as plain, context.wrap_socket(plain) as secured:
        return secured.version()
