"""TLS identity of a process, and authentication of its peers.

A greeting carries an Identity to the transports. Traffic between hosts uses TLS 1.3, and both sides present
certificates signed by the pool's own CA (security/ca); so does TCP on loopback. Unix sockets need no TLS.
After the handshake, each side checks that the other is a member of the pool in the newest pool map it knows,
and repeats the check whenever the members change. The side closes the connection of a peer that is no longer
a member. This module is the adapter of `ssl`. This module never reads the pool map: the owner of the Identity
calls `update_members`.
"""

from __future__ import annotations

import asyncio
import ipaddress
import os
import ssl
import tempfile
from collections.abc import Collection
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple, Protocol
from weakref import WeakKeyDictionary

from nvpool.core.endpoint import Endpoint
from nvpool.core.errors import AccessDenied, BadConfiguration, NvpoolError, StaleIdentity, from_os_error
from nvpool.core.names import member_in
from nvpool.host.pool_directory import sync_directory

AUTHORITY_FILE, CERTIFICATE_FILE, KEY_FILE = "authority.crt", "member.crt", "member.key"
"""PEM files in secret/ of a pool directory."""
TlsContext = ssl.SSLContext
"""Type of the context that asyncio and grpc take; only this module imports ssl."""

KEY_NEXT_FILE = "member.key.next"
"""Exists while a certificate for a new key replaces the old one: until this file is renamed, either key may
belong to the certificate."""
ETCD_SECRET = "etcd"
"""Directory below secret/ with the same files for etcd, which has its own CA. Only nodes get its
certificates: with the pool's CA, every client could write the pool map."""
AUTHORITY_KEY_FILE = "authority.key"
"""CA key on nodes that store the pool map (they have an etcd member), mode 0600."""


class TlsMaterial(NamedTuple):
    """PEM texts: the CA certificate that signed both sides, our certificate, and its key."""

    authority: bytes
    certificate: bytes
    key: bytes


def read_key(secret: Path) -> bytes:
    """Return the key (PEM) that belongs to the certificate in `secret`; OSError if a file is unreadable."""
    key = (secret / KEY_FILE).read_bytes()
    try:
        following = (secret / KEY_NEXT_FILE).read_bytes()
    except FileNotFoundError:
        return key
    return following if is_key_of((secret / CERTIFICATE_FILE).read_bytes(), following) else key


def settle_key(secret: Path) -> None:
    """Complete or undo an interrupted key change; do nothing if there was none."""
    following = secret / KEY_NEXT_FILE
    if not following.exists():
        return
    if is_key_of((secret / CERTIFICATE_FILE).read_bytes(), following.read_bytes()):
        os.replace(following, secret / KEY_FILE)
        sync_directory(secret)
    else:
        following.unlink()


def is_key_of(certificate: bytes, key: bytes) -> bool:
    try:
        _load(ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT), TlsMaterial(b"", certificate, key))
    except BadConfiguration:
        return False
    return True


class Revocable(Protocol):
    """A connection that can be revoked, as `TlsIdentity` needs it."""

    def revoked(self, error: NvpoolError) -> None:
        """Close the connection; `error` is the reason."""


class TlsIdentity:
    """TLS identity of a process.

    `secured` is False if TLS is explicitly switched off; then no certificates are used.
    """

    def __init__(self, pool_id: str, shown: TlsMaterial | None):
        """Create the identity.

        Certificates are loaded on first use, so a pool on one machine never loads them.
        """
        self.pool_id = pool_id
        self.secured = shown is not None
        self.shown = shown
        self._secret: Path | None = None
        self.seen_ns = 0
        """Modification time of the certificate file that was loaded."""
        self.members: frozenset[str] | None = None
        """Current members of the pool; None while no pool map is known: then a certificate signed by the CA
        suffices."""
        self._watched: WeakKeyDictionary[Revocable, str] = WeakKeyDictionary()

    def certificates(self) -> TlsMaterial:
        """Return `shown`. Only for processes in which TLS is switched on."""
        assert self.shown is not None, "TLS is switched off in this process"
        return self.shown

    @cached_property
    def _serving(self) -> ssl.SSLContext:
        return _context(self.certificates(), ssl.PROTOCOL_TLS_SERVER)

    @cached_property
    def _asking(self) -> ssl.SSLContext:
        return _context(self.certificates(), ssl.PROTOCOL_TLS_CLIENT)

    @cached_property
    def _joining(self) -> ssl.SSLContext:
        context = _context(self.certificates(), ssl.PROTOCOL_TLS_SERVER)
        context.verify_mode = ssl.CERT_OPTIONAL
        return context

    @classmethod
    def load(cls, secret: Path, pool_id: str) -> TlsIdentity:
        """Load the identity from the files in `secret`.

        BadConfiguration: a file is missing; the text has the remedy.
        """
        try:
            # The time is read before the content: a renewal in between is then noticed at the next refresh.
            seen_ns = (secret / CERTIFICATE_FILE).stat().st_mtime_ns
            shown = TlsMaterial(
                (secret / AUTHORITY_FILE).read_bytes(),
                (secret / CERTIFICATE_FILE).read_bytes(),
                read_key(secret),
            )
        except FileNotFoundError as error:
            raise BadConfiguration(
                f"{error.filename} is missing: this directory has no certificate of its pool; join it "
                f"again, or set network.plain_text = true in node.toml"
            ) from None
        except OSError as error:
            raise from_os_error(error, f"read {error.filename}") from error
        found = cls(pool_id, shown)
        found._secret, found.seen_ns = secret, seen_ns
        return found

    def refresh(self) -> None:
        """Load the files of `secret` again if they were renewed.

        On BadConfiguration the old certificate stays in use.
        """
        if self._secret is None:
            return
        try:
            if (self._secret / CERTIFICATE_FILE).stat().st_mtime_ns == self.seen_ns:
                return
        except OSError:
            return
        found = TlsIdentity.load(self._secret, self.pool_id)
        self.replace(found.certificates())
        self.seen_ns = found.seen_ns

    def replace(self, shown: TlsMaterial) -> None:
        """Use another certificate from the next handshake on; BadConfiguration if it is unusable."""
        for name in ("_serving", "_asking", "_joining"):
            if (context := self.__dict__.get(name)) is not None:
                _load(context, shown)
        self.shown = shown

    def own_member(self) -> str:
        """Return the member that our certificate names; BadConfiguration if the certificate is unusable."""
        return member_of(self._own_certificate(), self.pool_id)

    def own_end_s(self) -> float:
        """Return the end of our certificate, in seconds since 1970; BadConfiguration if it is unusable."""
        return ssl.cert_time_to_seconds(self._own_certificate()["notAfter"])

    def _own_certificate(self) -> dict[str, Any]:
        """Return our certificate as `SSLObject.getpeercert` does: OpenSSL parses it in a handshake with
        ourselves."""
        ours, theirs = ssl.MemoryBIO(), ssl.MemoryBIO()
        context = authority_unseen()  # a client's certificate is not valid for servers
        _load(context, self.certificates())
        asks = context.wrap_bio(ours, theirs)
        serves = self._joining.wrap_bio(theirs, ours, server_side=True)
        try:
            for _ in range(4):
                for end in (asks, serves):
                    try:
                        end.do_handshake()
                    except ssl.SSLWantReadError:
                        pass
            return serves.getpeercert() or {}
        except ssl.SSLError as error:
            raise BadConfiguration(
                f"our own certificate cannot be used: {refusal_of(error) or error}"
            ) from None

    def own_trouble(self) -> str:
        """Return why peers reject our certificate, as far as this process knows; otherwise "".

        For a connection that ended between handshake and greeting: the event loop's TLS and gRPC close the
        connection without a reason when they reject a certificate.
        """
        if self.shown is None:
            return ""
        try:
            self.own_member()
        except BadConfiguration as error:
            return str(error)
        return ""

    # -- used by the transports ------------------------------------------------------------------------------

    def covers(self, where: Endpoint) -> bool:
        """Return whether traffic with `where` needs TLS: everything except unix sockets and in-process
        endpoints."""
        return self.secured and bool(where.host)

    def context(self, *, serving: bool, admit_unauthenticated: bool = False) -> ssl.SSLContext:
        """Return the TLS context.

        With `admit_unauthenticated`, the context accepts peers without a certificate; they are not authenticated.
        """
        if not serving:
            return self._asking
        return self._joining if admit_unauthenticated else self._serving

    def admit(self, member: str, *, as_server: bool = False) -> None:
        """Verify that `member` may connect.

        StaleIdentity: `member` is not in the pool.
        AccessDenied: `member` serves (`as_server`) but is not a node.
        """
        if as_server and not member.startswith("node/"):
            raise AccessDenied(f"{member} serves here, which only nodes of a pool may")
        if self.members is not None and member not in self.members:
            raise StaleIdentity(
                f"{member} is not in the pool (any more); it has to join it again, with another directory"
            )

    def watch(self, connection: Revocable, member: str) -> None:
        """Call `connection.revoked` when `member`, the peer of the connection, leaves the pool."""
        self._watched[connection] = member

    def update_members(self, members: Collection[str]) -> None:
        """Set the members from a new pool map; connections of removed members are closed before this returns.

        An empty collection is ignored.
        """
        members = frozenset(members)
        if not members or members == self.members:
            return
        self.members = members
        for connection, member in list(self._watched.items()):
            if member not in members:
                connection.revoked(StaleIdentity(f"{member} is not in the pool any more"))


class JoiningIdentity(TlsIdentity):
    """Identity of a joining machine: no certificate, and either the CA certificate or only its
    fingerprint."""

    def __init__(self, pool_id: str = "", authority: bytes = b""):
        super().__init__(pool_id, None)
        self.secured = True
        self.__dict__["_asking"] = authority_known(authority) if authority else authority_unseen()


PLAIN_TEXT = TlsIdentity("", None)
"""Identity with TLS explicitly switched off."""


def identity_in(secret: Path, pool_id: str, plain_text: bool) -> TlsIdentity | None:
    """Return the identity of a program that uses the pool directory with this `secret`.

    None if there is no readable certificate: then the program can send nothing to another host.
    BadConfiguration: the certificate is unusable.
    """
    if plain_text:
        return PLAIN_TEXT
    try:
        there = (secret / CERTIFICATE_FILE).exists() and os.access(secret / KEY_FILE, os.R_OK)
    except PermissionError:
        return None
    return TlsIdentity.load(secret, pool_id) if there else None


def security(identity: TlsIdentity | None, where: Endpoint, endpoint: str) -> TlsIdentity | None:
    """Return the identity to use with `where`, or None for plain text.

    AccessDenied: plain text would leave this host.
    """
    if identity is None:
        if leaves_host(where):
            raise AccessDenied(
                f"{endpoint} is not on this host, and without a certificate of the pool nothing is sent there; "
                f"join the pool, or, where the network is nobody else's, set network.plain_text = true"
            )
        return None
    return identity if identity.covers(where) else None


def leaves_host(where: Endpoint) -> bool:
    if not where.host:
        return False
    try:
        return not ipaddress.ip_address(where.host.partition("%")[0]).is_loopback
    except ValueError:
        return where.host != "localhost"


def member_of(certificate: dict[str, Any] | None, pool_id: str) -> str:
    """Return the member named by a certificate (from `SSLObject.getpeercert`); "" if the peer presented none.

    AccessDenied: the certificate belongs to another pool, or is no certificate of a pool.
    """
    if not certificate:
        return ""
    return member_of_uris(
        [value for kind, value in certificate.get("subjectAltName", ()) if kind == "URI"], pool_id
    )


def member_of_uris(uris: list[str], pool_id: str) -> str:
    """Return the member of this pool that `uris` name; AccessDenied if there is none or the pool differs."""
    found = [named for uri in uris if (named := member_in(uri))]
    if len(found) != 1:
        raise AccessDenied("the certificate that was shown names no member of a pool")
    pool, member = found[0]
    if pool != pool_id:
        raise AccessDenied(
            f"the certificate that was shown is for the pool {pool[:8]}, this one is {pool_id[:8]}"
        )
    return member


_REASONS = {
    "CERTIFICATE_VERIFY_FAILED": "its certificate is not signed by this pool's CA",
    "TLSV1_ALERT_UNKNOWN_CA": "our certificate is not signed by its pool's CA: another pool, or we have to join again",
    "TLSV1_ALERT_DECRYPT_ERROR": "our certificate is not signed by its pool's CA: another pool, or join again",
    "SSLV3_ALERT_CERTIFICATE_EXPIRED": "our certificate has ended: join the pool again",
    "SSLV3_ALERT_CERTIFICATE_REVOKED": "our certificate was revoked: join the pool again",
    "SSLV3_ALERT_BAD_CERTIFICATE": "our certificate is not accepted",
    "SSLV3_ALERT_CERTIFICATE_UNKNOWN": "our certificate is not accepted",
    "TLSV13_ALERT_CERTIFICATE_REQUIRED": "it lets nobody in without a certificate of its pool: join it first",
    "PEER_DID_NOT_RETURN_A_CERTIFICATE": "it has shown no certificate",
    "WRONG_VERSION_NUMBER": "it speaks plain text, and we do not: network.plain_text differs",
    "HTTP_REQUEST": "it speaks plain text, and we do not: network.plain_text differs",
    "UNSUPPORTED_PROTOCOL": "it knows no TLS 1.3",
    "TLSV1_ALERT_PROTOCOL_VERSION": "it knows no TLS 1.3",
}
"""Reason as OpenSSL names it -> explanation for the user."""
_X509_EXPIRED, _X509_NOT_YET = 10, 9


def refusal_of(error: BaseException | None) -> str:
    """Explain a failed handshake; "" for other errors."""
    if isinstance(error, ssl.SSLCertVerificationError):
        if error.verify_code == _X509_EXPIRED:
            return "its certificate has ended"
        if error.verify_code == _X509_NOT_YET:
            return "its certificate is not valid yet: are the clocks right?"
    if isinstance(error, ssl.SSLError):
        return _REASONS.get(error.reason or "", f"TLS failed ({error.reason or type(error).__name__})")
    return ""


async def member_at(identity: TlsIdentity, host: str, port: int, protocols: tuple[str, ...]) -> str:
    """Return the member that serves at an address, using only a handshake.

    For libraries that do not report the peer's certificate. AccessDenied: the peer is not a member of this
    pool.
    OSError: no connection.
    """
    context = _context(identity.certificates(), ssl.PROTOCOL_TLS_CLIENT)
    context.set_alpn_protocols(protocols)
    _, writer = await asyncio.open_connection(host, port, ssl=context, server_hostname=host)
    try:
        return member_of(writer.get_extra_info("peercert"), identity.pool_id)
    finally:
        writer.transport.abort()


def authority_unseen() -> ssl.SSLContext:
    """Return a context for a machine that has only the CA's fingerprint; it must not send secrets."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    return context


def authority_known(authority: bytes) -> ssl.SSLContext:
    """Return a context for a machine that has the CA certificate (PEM) but no certificate of its own."""
    context = authority_unseen()
    context.verify_mode = ssl.CERT_REQUIRED
    context.load_verify_locations(cadata=authority.decode())
    return context


def _context(shown: TlsMaterial, protocol: ssl._SSLMethod) -> ssl.SSLContext:
    context = ssl.SSLContext(protocol)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname = False  # members have their own names, which this module verifies
    context.verify_mode = ssl.CERT_REQUIRED
    if protocol == ssl.PROTOCOL_TLS_SERVER:
        context.num_tickets = 0  # no session resumption: each connection presents its certificate
    try:
        context.load_verify_locations(cadata=shown.authority.decode())
    except (ssl.SSLError, ValueError) as error:
        raise BadConfiguration(f"the certificate of the pool's CA cannot be used: {error}") from None
    _load(context, shown)
    return context


def _load(context: ssl.SSLContext, shown: TlsMaterial) -> None:
    # OpenSSL reads files only; this file is private (0600) and is deleted on return.
    with tempfile.NamedTemporaryFile() as file:
        file.write(shown.key + b"\n" + shown.certificate)
        file.flush()
        try:
            context.load_cert_chain(file.name)
        except ssl.SSLError as error:
            raise BadConfiguration(f"our certificate and its key cannot be used: {error}") from None
