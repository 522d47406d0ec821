"""Who we are to others and whom we let in: the certificate that a process shows and the demands on those it is shown.

A greeting carries an Identity to the transports. What leaves this host travels under TLS 1.3 with certificates of both sides,
signed by the pool's own authority (security/ca), and so does TCP on loopback; unix sockets need none. After the handshake
each side looks whether the other is a member of the pool by the newest map it knows, again whenever that changes, and hangs up
on who is not one any more. The door to `ssl`. Never reads the map itself: its owner calls `update_members`.
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
from nvpool.core.member_names import member_in
from nvpool.host.pool_directory import sync_directory

AUTHORITY_FILE, CERTIFICATE_FILE, KEY_FILE = "authority.crt", "member.crt", "member.key"
"""In secret/ of a pool directory, PEM."""
KEY_NEXT_FILE = "member.key.next"
"""There while a certificate of a new key takes the place of the former: until the key's name is changed, either may belong to
the certificate."""
ETCD_SECRET = "etcd"
"""Below secret/: the same for etcd, with an authority of its own, which only nodes get a certificate of. With the pool's every
client could write the map."""
AUTHORITY_KEY_FILE = "authority.key"
"""On nodes that keep the map (they have a member of etcd), 0600."""


class Shown(NamedTuple):
    """PEM: the authority that signed both sides, our certificate, its key."""

    authority: bytes
    certificate: bytes
    key: bytes


def read_key(secret: Path) -> bytes:
    """The key (PEM) of the certificate in `secret`. OSError."""
    key = (secret / KEY_FILE).read_bytes()
    try:
        following = (secret / KEY_NEXT_FILE).read_bytes()
    except FileNotFoundError:
        return key
    return following if is_key_of((secret / CERTIFICATE_FILE).read_bytes(), following) else key


def settle_key(secret: Path) -> None:
    """Finish the change of a key that was interrupted, or undo it; nothing where none was."""
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
        _load(ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT), Shown(b"", certificate, key))
    except BadConfiguration:
        return False
    return True


class Revocable(Protocol):
    """A connection, as Identity sees it."""

    def revoked(self, error: NvpoolError) -> None:
        """End it; `error` says why."""


class Identity:
    """One for a process. `secured` is False where TLS was switched off in so many words: then nothing is shown or demanded."""

    def __init__(self, pool_id: str, shown: Shown | None):
        """Nothing is looked at before it is needed: a pool on one machine never pays for it."""
        self.pool_id = pool_id
        self.secured = shown is not None
        self.shown = shown
        self._secret: Path | None = None
        self._seen_ns = 0
        self.members: frozenset[str] | None = None
        """Who is in; None while no map is known: then the authority's word is enough."""
        self._watched: WeakKeyDictionary[Revocable, str] = WeakKeyDictionary()

    def _required(self) -> Shown:
        assert self.shown is not None, "TLS is switched off in this process"
        return self.shown

    @cached_property
    def _serving(self) -> ssl.SSLContext:
        return _context(self._required(), ssl.PROTOCOL_TLS_SERVER)

    @cached_property
    def _asking(self) -> ssl.SSLContext:
        return _context(self._required(), ssl.PROTOCOL_TLS_CLIENT)

    @cached_property
    def _joining(self) -> ssl.SSLContext:
        context = _context(self._required(), ssl.PROTOCOL_TLS_SERVER)
        context.verify_mode = ssl.CERT_OPTIONAL
        return context

    @classmethod
    def load(cls, secret: Path, pool_id: str) -> Identity:
        """The identity whose files lie in `secret`. BadConfiguration, with the remedy, where they do not."""
        try:
            seen_ns = (secret / CERTIFICATE_FILE).stat().st_mtime_ns  # before it is read: what comes between is seen again
            shown = Shown((secret / AUTHORITY_FILE).read_bytes(), (secret / CERTIFICATE_FILE).read_bytes(), read_key(secret))
        except FileNotFoundError as error:
            raise BadConfiguration(f"{error.filename} is missing: this directory has no certificate of its pool; join it "
                                   f"anew, or set network.plain_text = true in node.toml") from None
        except OSError as error:
            raise from_os_error(error, f"read {error.filename}") from error
        found = cls(pool_id, shown)
        found._secret, found._seen_ns = secret, seen_ns
        return found

    def refresh(self) -> None:
        """Show what lies in `secret` now, where that was renewed. BadConfiguration: what was shown so far is shown on."""
        if self._secret is None:
            return
        try:
            if (self._secret / CERTIFICATE_FILE).stat().st_mtime_ns == self._seen_ns:
                return
        except OSError:
            return
        found = Identity.load(self._secret, self.pool_id)
        self.replace(found._required())
        self._seen_ns = found._seen_ns

    def replace(self, shown: Shown) -> None:
        """Show another certificate from the next handshake on. BadConfiguration."""
        for name in ("_serving", "_asking", "_joining"):
            if (context := self.__dict__.get(name)) is not None:
                _load(context, shown)
        self.shown = shown

    def own_member(self) -> str:
        """Whom our certificate names. BadConfiguration where nobody would take it."""
        return member_of(self._own_certificate(), self.pool_id)

    def own_end_s(self) -> float:
        """When our certificate ends, in seconds since 1970. BadConfiguration as of own_member."""
        return ssl.cert_time_to_seconds(self._own_certificate()["notAfter"])

    def _own_certificate(self) -> dict[str, Any]:
        """As SSLObject.getpeercert gives it: OpenSSL reads it when it is shown to ourselves."""
        ours, theirs = ssl.MemoryBIO(), ssl.MemoryBIO()
        context = authority_unseen()  # a client's is none that may serve
        _load(context, self._required())
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
            raise BadConfiguration(f"our own certificate can not be used: {refusal_of(error) or error}") from None

    def own_trouble(self) -> str:
        """Why others refuse what we show, as far as we can see ourselves; else nothing. For a connection that ended between the
        handshake and the greeting: the loops' TLS and gRPC hang up on a certificate that they refuse, and say nothing."""
        if self.shown is None:
            return ""
        try:
            self.own_member()
        except BadConfiguration as error:
            return str(error)
        return ""

    # -- what the transports ask ------------------------------------------------------------------------------------------

    def covers(self, where: Endpoint) -> bool:
        """Whether what goes to or comes from `where` has to be under TLS: all that is no unix socket and not in-process."""
        return self.secured and bool(where.host)

    def context(self, *, serving: bool, strangers: bool = False) -> ssl.SSLContext:
        """`strangers`: who shows no certificate is let in, as nobody."""
        if not serving:
            return self._asking
        return self._joining if strangers else self._serving

    def admit(self, member: str, *, as_server: bool = False) -> None:
        """Nothing when `member` is in, else StaleIdentity; AccessDenied for one that never may do this."""
        if as_server and not member.startswith("node/"):
            raise AccessDenied(f"{member} serves here, which only nodes of a pool may")
        if self.members is not None and member not in self.members:
            raise StaleIdentity(f"{member} is not in the pool (any more); it has to join it anew, with "
                                f"another directory")

    def watch(self, connection: Revocable, member: str) -> None:
        """Call `connection.revoked` when `member`, who is at its other end, leaves the pool."""
        self._watched[connection] = member

    def update_members(self, members: Collection[str]) -> None:
        """Who is in from now on, as the map says. Connections of others end before this returns."""
        members = frozenset(members)
        if not members or members == self.members:
            return
        self.members = members
        for connection, member in list(self._watched.items()):
            if member not in members:
                connection.revoked(StaleIdentity(f"{member} is not in the pool any more"))


class Stranger(Identity):
    """Of who wants to join: shows nothing, and knows the authority or only how to recognize it once it is there."""

    def __init__(self, pool_id: str = "", authority: bytes = b""):
        super().__init__(pool_id, None)
        self.secured = True
        self.__dict__["_asking"] = authority_known(authority) if authority else authority_unseen()


PLAIN_TEXT = Identity("", None)
"""TLS is switched off, in so many words."""


def identity_in(secret: Path, pool_id: str, plain_text: bool) -> Identity | None:
    """The identity of a program that uses the pool directory with this `secret`; None, with which nothing can leave the host,
    where there is none or it is not for us to read. BadConfiguration for one that can not be used."""
    if plain_text:
        return PLAIN_TEXT
    try:
        there = (secret / CERTIFICATE_FILE).exists() and os.access(secret / KEY_FILE, os.R_OK)
    except PermissionError:
        return None
    return Identity.load(secret, pool_id) if there else None


def security(identity: Identity | None, where: Endpoint, endpoint: str) -> Identity | None:
    """The identity under which `where` is spoken with, or None for plain text. AccessDenied where that would leave the host."""
    if identity is None:
        if leaves_host(where):
            raise AccessDenied(f"{endpoint} is not on this host, and without a certificate of the pool nothing is sent there; "
                               f"join the pool, or, where the network is nobody else's, set network.plain_text = true")
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
    """Whom a certificate names, as SSLObject.getpeercert gives it; nothing where none was shown. AccessDenied for another
    pool's and for what is no certificate of a pool."""
    if not certificate:
        return ""
    return member_of_uris([value for kind, value in certificate.get("subjectAltName", ()) if kind == "URI"], pool_id)


def member_of_uris(uris: list[str], pool_id: str) -> str:
    """The one of `uris` that names a member of this pool. AccessDenied where there is none, and for another pool's."""
    found = [named for uri in uris if (named := member_in(uri))]
    if len(found) != 1:
        raise AccessDenied("the certificate that was shown names no member of a pool")
    pool, member = found[0]
    if pool != pool_id:
        raise AccessDenied(f"the certificate that was shown is for the pool {pool[:8]}, this one is {pool_id[:8]}")
    return member


_REASONS = {
    "CERTIFICATE_VERIFY_FAILED": "its certificate is not signed by this pool's authority",
    "TLSV1_ALERT_UNKNOWN_CA": "our certificate is not signed by its pool's authority: another pool, or we have to join anew",
    "TLSV1_ALERT_DECRYPT_ERROR": "our certificate is not signed by its pool's authority: another pool, or we have to join anew",
    "SSLV3_ALERT_CERTIFICATE_EXPIRED": "our certificate has ended: join the pool anew",
    "SSLV3_ALERT_CERTIFICATE_REVOKED": "our certificate was revoked: join the pool anew",
    "SSLV3_ALERT_BAD_CERTIFICATE": "our certificate is not accepted",
    "SSLV3_ALERT_CERTIFICATE_UNKNOWN": "our certificate is not accepted",
    "TLSV13_ALERT_CERTIFICATE_REQUIRED": "it lets nobody in without a certificate of its pool: join it first",
    "PEER_DID_NOT_RETURN_A_CERTIFICATE": "it has shown no certificate",
    "WRONG_VERSION_NUMBER": "it speaks plain text, and we do not: network.plain_text differs",
    "HTTP_REQUEST": "it speaks plain text, and we do not: network.plain_text differs",
    "UNSUPPORTED_PROTOCOL": "it knows no TLS 1.3",
    "TLSV1_ALERT_PROTOCOL_VERSION": "it knows no TLS 1.3",
}
"""What OpenSSL calls it -> what it means here."""
_X509_EXPIRED, _X509_NOT_YET = 10, 9


def refusal_of(error: BaseException | None) -> str:
    """What a failed handshake means, or nothing for other ends of a connection."""
    if isinstance(error, ssl.SSLCertVerificationError):
        if error.verify_code == _X509_EXPIRED:
            return "its certificate has ended"
        if error.verify_code == _X509_NOT_YET:
            return "its certificate is not valid yet: are the clocks right?"
    if isinstance(error, ssl.SSLError):
        return _REASONS.get(error.reason or "", f"TLS failed ({error.reason or type(error).__name__})")
    return ""


async def member_at(identity: Identity, host: str, port: int, protocols: tuple[str, ...]) -> str:
    """Who serves there: a handshake and no more, for libraries that do not say whom they have met. AccessDenied, OSError."""
    context = _context(identity._required(), ssl.PROTOCOL_TLS_CLIENT)
    context.set_alpn_protocols(protocols)
    _, writer = await asyncio.open_connection(host, port, ssl=context, server_hostname=host)
    try:
        return member_of(writer.get_extra_info("peercert"), identity.pool_id)
    finally:
        writer.transport.abort()


def authority_unseen() -> ssl.SSLContext:
    """For who has only the authority's fingerprint yet, and will send nothing secret."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    return context


def authority_known(authority: bytes) -> ssl.SSLContext:
    """For who has no certificate yet, and knows the authority (PEM)."""
    context = authority_unseen()
    context.verify_mode = ssl.CERT_REQUIRED
    context.load_verify_locations(cadata=authority.decode())
    return context


def _context(shown: Shown, protocol: ssl._SSLMethod) -> ssl.SSLContext:
    context = ssl.SSLContext(protocol)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname = False  # members have names of their own, which we look at ourselves
    context.verify_mode = ssl.CERT_REQUIRED
    if protocol == ssl.PROTOCOL_TLS_SERVER:
        context.num_tickets = 0  # nobody resumes: each connection shows its certificate
    try:
        context.load_verify_locations(cadata=shown.authority.decode())
    except (ssl.SSLError, ValueError) as error:
        raise BadConfiguration(f"the certificate of the pool's authority can not be used: {error}") from None
    _load(context, shown)
    return context


def _load(context: ssl.SSLContext, shown: Shown) -> None:
    # OpenSSL takes files only; this one is ours alone (0600), and gone when we return.
    with tempfile.NamedTemporaryFile() as file:
        file.write(shown.key + b"\n" + shown.certificate)
        file.flush()
        try:
            context.load_cert_chain(file.name)
        except ssl.SSLError as error:
            raise BadConfiguration(f"our certificate and its key can not be used: {error}") from None
