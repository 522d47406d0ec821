"""The pool's own certificate authority: keys, requests, certificates. The door to the package `cryptography`.

Called by run/ when a pool is made, when somebody joins and when a certificate is renewed; by the CLI of who joins. Keys are
ECDSA P-256 (FIPS 186-5) and never leave the machine that made them, but for the authority's, which is sent to those who may
lead. A certificate (RFC 5280) names its owner as a URI in subjectAltName: nvpool://POOL_ID/node/NAME, client/NAME or
bridge/NAME; a node's also the DNS names and addresses under which gRPC and etcd, which know no others, look for it. Clients'
may not serve (extendedKeyUsage). Nothing here asks whether somebody is still in the pool: security/tls does, by the map.
"""

from __future__ import annotations

import datetime
import hashlib
import ipaddress
from collections.abc import Collection
from typing import TYPE_CHECKING, NamedTuple, cast

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from nvpool.core.clock import SYSTEM_CLOCK, Clock
from nvpool.core.errors import CorruptRecord, InvalidRequest
from nvpool.core.member_names import DAY_S, MEMBER_DAYS, MEMBER_S, SKEW_S, check_member, dns_of, member_in, uri_of

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.types import CertificateIssuerPrivateKeyTypes, CertificatePublicKeyTypes

AUTHORITY_S = 20 * 365 * DAY_S


class MemberRequest(NamedTuple):
    """What who joins makes: the key stays with him, the request (PKCS #10, PEM) goes to the authority."""

    key: bytes
    request: bytes


def request_certificate(name: str = "nvpool") -> MemberRequest:
    key = ec.generate_private_key(ec.SECP256R1())
    made = x509.CertificateSigningRequestBuilder().subject_name(_named(name)).sign(key, hashes.SHA256())
    return MemberRequest(_key_pem(key), made.public_bytes(serialization.Encoding.PEM))


def request_again(key: bytes, name: str = "nvpool") -> MemberRequest:
    """Another request of the same key. CorruptRecord."""
    loaded = _private_key(key, "our own key")
    made = x509.CertificateSigningRequestBuilder().subject_name(_named(name)).sign(loaded, hashes.SHA256())
    return MemberRequest(key, made.public_bytes(serialization.Encoding.PEM))


def key_of_request(request: bytes) -> str:
    """Hex digits that stand for the public key of a request. InvalidRequest when it is none, or not signed with that key."""
    return hashlib.sha256(_public(_request(request).public_key())).hexdigest()


def fingerprint_of(certificate: bytes) -> bytes:
    """SHA-256 of a certificate (PEM). CorruptRecord."""
    return _certificate(certificate).fingerprint(hashes.SHA256())


def ends_s(certificate: bytes) -> float:
    """When it ends, in seconds since 1970. CorruptRecord."""
    return _certificate(certificate).not_valid_after_utc.timestamp()


class Described(NamedTuple):
    """What people want to know of a certificate."""

    member: str
    """Nobody for an authority."""
    serial: str
    """Hex digits, as openssl prints them."""
    begins_s: float
    ends_s: float
    """Seconds since 1970."""


def described(certificate: bytes) -> Described:
    """CorruptRecord for what is no certificate (PEM)."""
    found = _certificate(certificate)
    try:
        names = found.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
        uris = names.get_values_for_type(x509.UniformResourceIdentifier)
    except (x509.ExtensionNotFound, ValueError):
        uris = []
    member = next((named[1] for uri in uris if (named := member_in(uri))), "")
    return Described(member, f"{found.serial_number:X}", found.not_valid_before_utc.timestamp(),
                     found.not_valid_after_utc.timestamp())


class Authority:
    """`certificate` and `key` are PEM."""

    def __init__(self, certificate: bytes, key: bytes):
        self.certificate = certificate
        self.key = key
        self._certificate = _certificate(certificate)
        self._key = _private_key(key, "the authority's key")
        if _public(self._key.public_key()) != _public(self._certificate.public_key()):
            raise CorruptRecord("the authority's key is not that of its certificate")

    @property
    def fingerprint(self) -> bytes:
        """SHA-256 of the certificate."""
        return self._certificate.fingerprint(hashes.SHA256())

    @classmethod
    def make(cls, pool_id: str, clock: Clock = SYSTEM_CLOCK) -> Authority:
        key = ec.generate_private_key(ec.SECP256R1())
        name = _named(f"nvpool {pool_id[:8]}")
        made = (_begun(name, name, key.public_key(), AUTHORITY_S, clock)
                .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
                .add_extension(_usage(signs=True), critical=True)
                .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
                .serial_number(int.from_bytes(clock.secret(16)) >> 1 | 1)
                .sign(key, hashes.SHA256()))
        return cls(made.public_bytes(serialization.Encoding.PEM), _key_pem(key))

    def sign(self, request: bytes, pool_id: str, member: str, addresses: tuple[str, ...] = (), *, lives_s: float = MEMBER_S,
             clock: Clock = SYSTEM_CLOCK) -> bytes:
        """A certificate (PEM) for the key of `request`, whose other words are not looked at. `addresses` of a node: what others
        call it by, names or addresses. InvalidRequest."""
        check_member(member)
        asked = _request(request)
        serves = member.startswith("node/")
        names: list[x509.GeneralName] = [x509.UniformResourceIdentifier(uri_of(pool_id, member))]
        if serves:
            names += [x509.DNSName(dns_of(pool_id, member)), *map(_general_name, addresses)]
        uses = [ExtendedKeyUsageOID.CLIENT_AUTH] + ([ExtendedKeyUsageOID.SERVER_AUTH] if serves else [])
        made = (_begun(self._certificate.subject, _named(member), asked.public_key(), lives_s, clock)
                .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
                .add_extension(_usage(signs=False), critical=True)
                .add_extension(x509.ExtendedKeyUsage(uses), critical=False)
                .add_extension(x509.SubjectAlternativeName(names), critical=False)
                .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(self._key.public_key()),
                               critical=False)
                .serial_number(_serial(pool_id, member, clock.wall_ns() // 1_000_000_000 // DAY_S))
                .sign(self._key, hashes.SHA256()))
        return made.public_bytes(serialization.Encoding.PEM)

    def revoke(self, pool_id: str, left: Collection[tuple[str, float]], *, clock: Clock = SYSTEM_CLOCK) -> bytes:
        """A list (CRL, PEM) of all certificates that members may hold who left then (seconds since 1970)."""
        now = datetime.datetime.fromtimestamp(clock.wall_ns() // 1_000_000_000, datetime.UTC)
        made = (x509.CertificateRevocationListBuilder().issuer_name(self._certificate.subject).last_update(now)
                .next_update(now + datetime.timedelta(seconds=AUTHORITY_S)))  # who reads it looks at the serials only
        for member, at_s in left:
            last = int(at_s + SKEW_S) // DAY_S
            for day in range(last - MEMBER_DAYS - 1, last + 1):
                made = made.add_revoked_certificate(x509.RevokedCertificateBuilder().revocation_date(now).serial_number(
                    _serial(pool_id, member, day)).build())
        return made.sign(self._key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM)


def _serial(pool_id: str, member: str, day: int) -> int:
    """Of a member's certificates of that day: who revokes them needs no list of what was signed. Two of one day are equal, and
    for the same member, so they end together as well."""
    return int.from_bytes(hashlib.sha256(f"{pool_id}/{member}/{day}".encode()).digest()[:16]) >> 1 | 1


def _named(name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name[:64])])


def _begun(issuer: x509.Name, subject: x509.Name, key: CertificatePublicKeyTypes, lives_s: float,
           clock: Clock) -> x509.CertificateBuilder:
    now = datetime.datetime.fromtimestamp(clock.wall_ns() // 1_000_000_000, datetime.UTC)
    return (x509.CertificateBuilder().issuer_name(issuer).subject_name(subject).public_key(key)
            .not_valid_before(now - datetime.timedelta(seconds=SKEW_S) if lives_s > 0 else now - datetime.timedelta(days=2))
            .not_valid_after(now + datetime.timedelta(seconds=lives_s)))


def _usage(signs: bool) -> x509.KeyUsage:
    return x509.KeyUsage(digital_signature=not signs, key_cert_sign=signs, crl_sign=signs, content_commitment=False,
                         key_encipherment=False, data_encipherment=False, key_agreement=False, encipher_only=False,
                         decipher_only=False)


def _general_name(text: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(text))
    except ValueError:
        pass
    try:
        return x509.DNSName(text)
    except ValueError:
        raise InvalidRequest(f"{text!r} is neither an address nor a name of a host") from None


def _certificate(pem: bytes) -> x509.Certificate:
    try:
        return x509.load_pem_x509_certificate(pem)
    except ValueError as error:
        raise CorruptRecord(f"a certificate can not be read: {error}") from None


def _private_key(pem: bytes, what: str) -> CertificateIssuerPrivateKeyTypes:
    try:
        # `sign` itself refuses a key that can not sign.
        return cast("CertificateIssuerPrivateKeyTypes", serialization.load_pem_private_key(pem, None))
    except (ValueError, TypeError) as error:
        raise CorruptRecord(f"{what} can not be read: {error}") from None


def _request(pem: bytes) -> x509.CertificateSigningRequest:
    try:
        asked = x509.load_pem_x509_csr(pem)
    except ValueError as error:
        raise InvalidRequest(f"the request for a certificate can not be read: {error}") from None
    key = asked.public_key()
    if not isinstance(key, ec.EllipticCurvePublicKey) or key.curve.name != "secp256r1" or not asked.is_signature_valid:
        raise InvalidRequest("the request for a certificate is not one of a P-256 key, signed with it")
    return asked


def _public(key: CertificatePublicKeyTypes) -> bytes:
    return key.public_bytes(serialization.Encoding.DER, serialization.PublicFormat.SubjectPublicKeyInfo)


def _key_pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
