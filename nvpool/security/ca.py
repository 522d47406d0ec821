"""Certificate authority (CA) of a pool: keys, certificate requests and certificates.

The only importer of the X.509 part of the package `cryptography`. Used when a pool is created, when a member
joins, when a certificate is renewed, and by the CLI of a joining machine. Keys are ECDSA P-256 (FIPS 186-5)
and never leave the machine that created them, except the CA's key, which is sent to nodes that may lead.

A certificate (RFC 5280) names its owner as a URI in subjectAltName: nvpool://POOL_ID/node/NAME, client/NAME
or bridge/NAME. A node's certificate also has the DNS names and addresses that gRPC and etcd verify, because
they support no other names. Client certificates are not valid for servers (extendedKeyUsage). This module
does not check whether a member is still in the pool; security/tls does, using the pool map.
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
from nvpool.core.names import (
    DAY_S,
    MEMBER_DAYS,
    MEMBER_S,
    SKEW_S,
    check_member,
    dns_of,
    member_in,
    uri_of,
)

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.types import (
        CertificateIssuerPrivateKeyTypes,
        CertificatePublicKeyTypes,
    )

AUTHORITY_S = 20 * 365 * DAY_S


class MemberRequest(NamedTuple):
    """Key pair of a joining member: the key stays there, the request (PKCS #10, PEM) is sent to the CA."""

    key: bytes
    request: bytes


def request_certificate(name: str = "nvpool") -> MemberRequest:
    key = ec.generate_private_key(ec.SECP256R1())
    made = x509.CertificateSigningRequestBuilder().subject_name(_named(name)).sign(key, hashes.SHA256())
    return MemberRequest(_key_pem(key), made.public_bytes(serialization.Encoding.PEM))


def request_again(key: bytes, name: str = "nvpool") -> MemberRequest:
    """Create another request for an existing key; CorruptRecord if `key` is unreadable."""
    loaded = _private_key(key, "our own key")
    made = x509.CertificateSigningRequestBuilder().subject_name(_named(name)).sign(loaded, hashes.SHA256())
    return MemberRequest(key, made.public_bytes(serialization.Encoding.PEM))


def key_of_request(request: bytes) -> str:
    """Return hex digits that identify the public key of a request.

    InvalidRequest: this is not a request, or the request is not signed with its own key.
    """
    return hashlib.sha256(_public(_request(request).public_key())).hexdigest()


def fingerprint_of(certificate: bytes) -> bytes:
    """Return the SHA-256 of a certificate (PEM); CorruptRecord if it is unreadable."""
    return _certificate(certificate).fingerprint(hashes.SHA256())


def ends_s(certificate: bytes) -> float:
    """Return the end of validity in seconds since 1970; CorruptRecord if the certificate is unreadable."""
    return _certificate(certificate).not_valid_after_utc.timestamp()


class CertificateFacts(NamedTuple):
    """Facts of a certificate that are shown to people."""

    member: str
    """Member named by the certificate; empty for a CA certificate."""
    serial: str
    """Serial number in hex digits, as openssl prints it."""
    begins_s: float
    ends_s: float
    """Validity in seconds since 1970."""


def described(certificate: bytes) -> CertificateFacts:
    """Return the facts of a certificate (PEM); CorruptRecord if it is unreadable."""
    found = _certificate(certificate)
    try:
        names = found.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
        uris = names.get_values_for_type(x509.UniformResourceIdentifier)
    except (x509.ExtensionNotFound, ValueError):
        uris = []
    member = next((named[1] for uri in uris if (named := member_in(uri))), "")
    return CertificateFacts(
        member,
        f"{found.serial_number:X}",
        found.not_valid_before_utc.timestamp(),
        found.not_valid_after_utc.timestamp(),
    )


class CertificateAuthority:
    """The CA of a pool. `certificate` and `key` are PEM."""

    def __init__(self, certificate: bytes, key: bytes):
        self.certificate = certificate
        self.key = key
        self._certificate = _certificate(certificate)
        self._key = _private_key(key, "the CA's key")
        if _public(self._key.public_key()) != _public(self._certificate.public_key()):
            raise CorruptRecord("the CA's key is not that of its certificate")

    @property
    def fingerprint(self) -> bytes:
        """SHA-256 of the CA certificate."""
        return self._certificate.fingerprint(hashes.SHA256())

    @classmethod
    def make(cls, pool_id: str, clock: Clock = SYSTEM_CLOCK) -> CertificateAuthority:
        key = ec.generate_private_key(ec.SECP256R1())
        name = _named(f"nvpool {pool_id[:8]}")
        made = (
            _begun(name, name, key.public_key(), AUTHORITY_S, clock)
            .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
            .add_extension(_usage(signs=True), critical=True)
            .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
            .serial_number(int.from_bytes(clock.secret(16)) >> 1 | 1)
            .sign(key, hashes.SHA256())
        )
        return cls(made.public_bytes(serialization.Encoding.PEM), _key_pem(key))

    def sign(
        self,
        request: bytes,
        pool_id: str,
        member: str,
        addresses: tuple[str, ...] = (),
        *,
        lives_s: float = MEMBER_S,
        clock: Clock = SYSTEM_CLOCK,
    ) -> bytes:
        """Return a certificate (PEM) for the key of `request`; the names in the request are ignored.

        `addresses` are the host names or addresses of a node under which other members reach it.
        InvalidRequest: the request, the member or an address is invalid.
        """
        check_member(member)
        asked = _request(request)
        serves = member.startswith("node/")
        names: list[x509.GeneralName] = [x509.UniformResourceIdentifier(uri_of(pool_id, member))]
        if serves:
            names += [x509.DNSName(dns_of(pool_id, member)), *map(_general_name, addresses)]
        uses = [ExtendedKeyUsageOID.CLIENT_AUTH] + ([ExtendedKeyUsageOID.SERVER_AUTH] if serves else [])
        made = (
            _begun(self._certificate.subject, _named(member), asked.public_key(), lives_s, clock)
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .add_extension(_usage(signs=False), critical=True)
            .add_extension(x509.ExtendedKeyUsage(uses), critical=False)
            .add_extension(x509.SubjectAlternativeName(names), critical=False)
            .add_extension(
                x509.AuthorityKeyIdentifier.from_issuer_public_key(self._key.public_key()), critical=False
            )
            .serial_number(_serial(pool_id, member, clock.wall_ns() // 1_000_000_000 // DAY_S))
            .sign(self._key, hashes.SHA256())
        )
        return made.public_bytes(serialization.Encoding.PEM)

    def revoke(
        self, pool_id: str, left: Collection[tuple[str, float]], *, clock: Clock = SYSTEM_CLOCK
    ) -> bytes:
        """Return a revocation list (CRL, PEM) for former members.

        `left` lists (member, time of removal in seconds since 1970). The list covers every certificate that
        such a member may still hold.
        """
        now = datetime.datetime.fromtimestamp(clock.wall_ns() // 1_000_000_000, datetime.UTC)
        made = (
            x509.CertificateRevocationListBuilder()
            .issuer_name(self._certificate.subject)
            .last_update(now)
            .next_update(now + datetime.timedelta(seconds=AUTHORITY_S))
        )  # readers use only the serials
        for member, at_s in left:
            last = int(at_s + SKEW_S) // DAY_S
            for day in range(last - MEMBER_DAYS - 1, last + 1):
                made = made.add_revoked_certificate(
                    x509.RevokedCertificateBuilder()
                    .revocation_date(now)
                    .serial_number(_serial(pool_id, member, day))
                    .build()
                )
        return made.sign(self._key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM)


def _serial(pool_id: str, member: str, day: int) -> int:
    """Return the serial number of a member's certificates of one day.

    The number is computed, so revocation needs no list of signed certificates. Two certificates of one day
    have equal serial numbers, but also the same member, so they are revoked together.
    """
    return int.from_bytes(hashlib.sha256(f"{pool_id}/{member}/{day}".encode()).digest()[:16]) >> 1 | 1


def _named(name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name[:64])])


def _begun(
    issuer: x509.Name, subject: x509.Name, key: CertificatePublicKeyTypes, lives_s: float, clock: Clock
) -> x509.CertificateBuilder:
    now = datetime.datetime.fromtimestamp(clock.wall_ns() // 1_000_000_000, datetime.UTC)
    return (
        x509.CertificateBuilder()
        .issuer_name(issuer)
        .subject_name(subject)
        .public_key(key)
        .not_valid_before(
            now - datetime.timedelta(seconds=SKEW_S) if lives_s > 0 else now - datetime.timedelta(days=2)
        )
        .not_valid_after(now + datetime.timedelta(seconds=lives_s))
    )


def _usage(signs: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not signs,
        key_cert_sign=signs,
        crl_sign=signs,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )


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
        raise CorruptRecord(f"a certificate cannot be read: {error}") from None


def _private_key(pem: bytes, what: str) -> CertificateIssuerPrivateKeyTypes:
    try:
        # Only `sign` rejects a key that cannot sign.
        return cast("CertificateIssuerPrivateKeyTypes", serialization.load_pem_private_key(pem, None))
    except (ValueError, TypeError) as error:
        raise CorruptRecord(f"{what} cannot be read: {error}") from None


def _request(pem: bytes) -> x509.CertificateSigningRequest:
    try:
        asked = x509.load_pem_x509_csr(pem)
    except ValueError as error:
        raise InvalidRequest(f"the request for a certificate cannot be read: {error}") from None
    key = asked.public_key()
    if (
        not isinstance(key, ec.EllipticCurvePublicKey)
        or key.curve.name != "secp256r1"
        or not asked.is_signature_valid
    ):
        raise InvalidRequest("the request for a certificate is not one of a P-256 key, signed with it")
    return asked


def _public(key: CertificatePublicKeyTypes) -> bytes:
    return key.public_bytes(serialization.Encoding.DER, serialization.PublicFormat.SubjectPublicKeyInfo)


def _key_pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
