"""Keys of encrypted volumes, and the pool key that protects them.

Each encrypted volume has its own key (security/xts). The volume's key is stored only *wrapped*: encrypted and
authenticated with AES-256-GCM by the pool key, which is stored nowhere in the pool. Metadata services create
wrapped keys and store them in the volume's record; clients and stores receive a wrapped key with the requests
that need it. A daemon reads the pool key from the source in `[encryption]` of node.toml:

    key_file      one key to a line, 64 hexadecimal digits; # begins a comment; readable by its owner only
    key_command   a program that prints the same: of a key management service, or tpm2_unseal

The first key wraps; the other keys only unwrap what they wrapped before. To replace a pool key, insert a new
first line on each node, and wrap all volume keys again (`nvpool encryption rewrap`); the data is not
encrypted again.

A wrapped key, part of the format:

    version u8 = 1 · identity of the pool key 8 (BLAKE2b of it) · nonce 12 · ciphertext of the volume's key 64
    · tag 16

The version and the identity are authenticated too. Used by `nvpool encryption` and by the daemons. A daemon
reads the pool keys once, and reads a key file again when a key is unknown.
"""

from __future__ import annotations

import os
import stat
import subprocess
from hashlib import blake2b
from typing import NamedTuple

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from nvpool.core.clock import SYSTEM_CLOCK, Clock
from nvpool.core.errors import BadConfiguration, CorruptRecord, KeyMissing, from_os_error
from nvpool.security.xts import KEY_BYTES, BlockCipher

POOL_KEY_BYTES = 32
IDENTITY_BYTES = 8
WRAPPED_BYTES = 1 + IDENTITY_BYTES + 12 + KEY_BYTES + 16
COMMAND_S = 30.0
"""Time limit of a key command; a key management service that takes longer counts as unavailable."""
LOOK_AGAIN_S = 5.0
"""Minimum interval between searches for an unknown key, so that not every request searches."""
_VERSION = 1
_CIPHERS_MAX = 1024
_FILE_BYTES_MAX = 65536


class VolumeKey(NamedTuple):
    """Key of an encrypted volume in a client or store. `wrapped` is sent to processes that have the pool
    key."""

    wrapped: bytes
    cipher: BlockCipher


def identity_of(pool_key: bytes) -> bytes:
    """Return a public identifier of a pool key."""
    return blake2b(pool_key, digest_size=IDENTITY_BYTES, person=b"nvpool pool key").digest()


def wrapped_by(wrapped: bytes) -> str:
    """Return the identity, in hex digits, of the pool key that wrapped `wrapped`.

    CorruptRecord: the wrapped key has an unknown form.
    """
    if len(wrapped) != WRAPPED_BYTES or wrapped[0] != _VERSION:
        raise CorruptRecord("the wrapped key of a volume has an unknown form")
    return wrapped[1 : 1 + IDENTITY_BYTES].hex()


class PoolKeys:
    """Pool keys of this node; the first one wraps. Use from one event loop only."""

    def __init__(self, *, key_file: str = "", key_command: str = "", clock: Clock = SYSTEM_CLOCK) -> None:
        """Create the object without reading keys; `load`, or the first use of an unknown key, reads them."""
        self._file = key_file
        self._command = key_command
        self._clock = clock
        self._keys: dict[bytes, bytes] = {}
        self._ciphers: dict[bytes, BlockCipher] = {}
        self._looked_s = float("-inf")

    @property
    def is_configured(self) -> bool:
        return bool(self._file or self._command)

    @property
    def identities(self) -> list[str]:
        """Identities of the known pool keys, the wrapping key first."""
        return [identity.hex() for identity in self._keys]

    def load(self) -> None:
        """Read the keys again.

        BadConfiguration: the source is unreadable or wrong, with the remedy; the previous keys stay in use.
        """
        self._looked_s = self._clock.boottime_s()
        if not self.is_configured:
            return
        text = _read_file(self._file) if self._file else _run(self._command)
        where = self._file or f"what `{self._command}` prints"
        keys: dict[bytes, bytes] = {}
        for number, line in enumerate(text.splitlines(), 1):
            digits = line.partition("#")[0].strip()
            if not digits:
                continue
            try:
                key = bytes.fromhex(digits)
            except ValueError:
                key = b""
            if len(key) != POOL_KEY_BYTES:
                raise BadConfiguration(
                    f"line {number} of {where} is not a pool key, which has {2 * POOL_KEY_BYTES} hexadecimal "
                    f"digits; make a key file with: nvpool encryption key FILE"
                )
            keys.setdefault(identity_of(key), key)
        if not keys:
            raise BadConfiguration(
                f"{where} has no pool key; make a key file with: nvpool encryption key FILE"
            )
        self._keys = keys

    def new(self) -> bytes:
        """Create a new volume key and return it wrapped; KeyMissing if this node has no pool key."""
        return self._wrap(self._clock.secret(KEY_BYTES))

    def rewrap(self, wrapped: bytes) -> bytes:
        """Return the same volume key, wrapped by the first pool key; unchanged if that key already wraps it.

        KeyMissing, CorruptRecord: as for `unwrap`.
        """
        self._look()
        if self._keys and wrapped_by(wrapped) == self.identities[0]:
            return wrapped
        return self._wrap(self.unwrap(wrapped))

    def unwrap(self, wrapped: bytes) -> bytes:
        """Return the volume's key.

        KeyMissing: the pool key that wrapped it is not known here.
        CorruptRecord: the wrapped key is damaged.
        """
        identity = bytes.fromhex(wrapped_by(wrapped))
        if identity not in self._keys:
            self._look()
        pool_key = self._keys.get(identity)
        if pool_key is None:
            raise KeyMissing(self._missing(identity))
        at = 1 + IDENTITY_BYTES
        try:
            return AESGCM(pool_key).decrypt(wrapped[at : at + 12], wrapped[at + 12 :], wrapped[:at])
        except InvalidTag:
            raise CorruptRecord("the wrapped key of a volume is damaged") from None

    def cipher(self, wrapped: bytes) -> BlockCipher:
        """Return the cipher of a volume; fails as `unwrap` does."""
        found = self._ciphers.get(wrapped)
        if found is None:
            found = BlockCipher(self.unwrap(wrapped))
            while len(self._ciphers) >= _CIPHERS_MAX:
                del self._ciphers[next(iter(self._ciphers))]
            self._ciphers[wrapped] = found
        return found

    def _wrap(self, key: bytes) -> bytes:
        self._look()
        if not self._keys:
            raise KeyMissing(self._missing(b""))
        identity, pool_key = next(iter(self._keys.items()))
        head = bytes((_VERSION,)) + identity
        nonce = self._clock.secret(12)
        return head + nonce + AESGCM(pool_key).encrypt(nonce, key, head)

    def _look(self) -> None:
        """Read the key file again, since it may have changed. A key command runs at start only, since it may
        block."""
        if self._file and self._clock.boottime_s() >= self._looked_s + LOOK_AGAIN_S:
            try:
                self.load()
            except BadConfiguration as error:
                raise KeyMissing(str(error)) from None

    def _missing(self, identity: bytes) -> str:
        if not self.is_configured:
            return (
                "this node has no pool key, which encrypted volumes need; set encryption.key_file in node.toml on each "
                "node (nvpool encryption key FILE makes a key), and restart its daemons"
            )
        return (
            f"this node does not have the pool key {identity.hex()}, which protects the volume's key; add it to "
            f"{self._file or 'what encryption.key_command prints'}, behind the first one"
        )


def _read_file(path: str) -> str:
    try:
        with open(path, "rb") as file:
            mode = os.fstat(file.fileno()).st_mode
            if stat.S_ISREG(mode) and mode & 0o077:
                raise BadConfiguration(
                    f"others than its owner may read the key file {path}; take that right away: "
                    f"chmod 600 {path}"
                )
            return file.read(_FILE_BYTES_MAX).decode("ascii")
    except OSError as error:
        raise BadConfiguration(f"the key file cannot be read: {from_os_error(error, path)}") from None
    except UnicodeDecodeError:
        raise BadConfiguration(
            f"{path} is not a key file; make one with: nvpool encryption key FILE"
        ) from None


def _run(command: str) -> str:
    try:
        done = subprocess.run(
            ["/bin/sh", "-c", command],
            capture_output=True,
            timeout=COMMAND_S,
            check=False,
            stdin=subprocess.DEVNULL,
        )
    except subprocess.TimeoutExpired:
        raise BadConfiguration(f"the key command did not end within {COMMAND_S:.0f} s: {command}") from None
    if done.returncode:
        said = done.stderr.decode(errors="replace").strip().splitlines()
        raise BadConfiguration(
            f"the key command failed with exit code {done.returncode}: {command}"
            f"{': ' + said[-1] if said else ''}"
        )
    return done.stdout[:_FILE_BYTES_MAX].decode("ascii", "replace")
