"""AES-256-XTS over the 4 KiB blocks of chunks: the cipher of encrypted volumes.

XTS-AES follows IEEE 1619-2018 and NIST SP 800-38E; the data unit is one block of a chunk. The number of a
data unit is its position: inode u64, chunk index u32, block within the chunk u32, little-endian in this
order. So each replica of a block has the same ciphertext, a block can be rewritten in place, and a block
moved to another position does not decrypt. XTS keeps stored data secret; it does not detect changes.
Checksums of the ciphertext detect accidental damage.

A block of zeros in ciphertext represents a hole, and decrypts to zeros. The probability that another block
encrypts to zeros is 2^-32768.

The `cryptography` package creates a context for each block. This takes 8 µs, about ten times as long as the
cipher itself. So the compiled part (`_xts.pyx`) calls the machine's OpenSSL directly: about 0.7 µs a block.
Without the compiled part, or without libcrypto, the package does the work; tests compare both. Clients use
this module to decrypt reads, stores to encrypt writes. Any thread may call it."""

from __future__ import annotations

import logging
import struct
import threading
from collections.abc import Sequence
from functools import cache
from typing import Protocol

from cryptography.hazmat.primitives.ciphers import Cipher, CipherContext, algorithms, modes

from nvpool.core.compiled_loader import load_compiled
from nvpool.core.units import BLOCK_BYTES, Buffer

_xts = load_compiled("nvpool.security._xts")
Scratch = _xts.XtsScratch if _xts is not None else None

_log = logging.getLogger(__name__)
KEY_BYTES = 64
"""Two AES-256 keys: one for the data, one for the tweaks."""
_ZERO_BLOCK = bytes(BLOCK_BYTES)

Writable = bytearray | memoryview


class BlockEngine(Protocol):
    """Encryption or decryption with one key in one thread: `_xts.XtsScratch`, or `_PlainXts` without compiled
    modules."""

    def run_many(self, pieces: Sequence[tuple[int, int, int, int, int]], into: Writable) -> None:
        """Decrypt pieces of `into` in place; see `BlockCipher.decrypt_many`."""

    def run(
        self, source: Buffer, to: Writable, inode: int, index: int, first: int, keeps_zeros: bool
    ) -> None:
        """Encrypt or decrypt whole blocks of `source` into `to`; with `keeps_zeros`, a block of zeros stays
        zeros."""


@cache
def _warn_once() -> None:
    _log.warning(
        "this machine has no libcrypto with AES-256-XTS: encryption takes ten times as long; install OpenSSL (libssl3)"
    )


class BlockCipher:
    """Encrypts and decrypts whole blocks with one key of KEY_BYTES; the halves must differ (SP 800-38E)."""

    def __init__(self, key: bytes) -> None:
        if len(key) != KEY_BYTES or key[:32] == key[32:]:
            raise ValueError(f"a key of XTS has {KEY_BYTES} bytes, in two halves that differ")
        self._key = key
        self._local = threading.local()

    def encrypt(self, inode: int, index: int, first: int, blocks: Buffer) -> bytearray:
        """Return the ciphertext of `blocks`, which begin at block `first` of chunk `index` of the inode."""
        made = bytearray(len(blocks))
        self._run("encrypting", inode, index, first, blocks, made, False)
        return made

    def decrypt(
        self, inode: int, index: int, first: int, blocks: Buffer, into: memoryview | None = None
    ) -> memoryview:
        """Return the plaintext of `blocks`, in `into` if given; `into` may be `blocks` itself."""
        plain = memoryview(bytearray(len(blocks))) if into is None else into
        self._run("decrypting", inode, index, first, blocks, plain, True)
        return plain

    def decrypt_many(self, pieces: Sequence[tuple[int, int, int, int, int]], into: Writable) -> None:
        """Decrypt pieces of `into` in place; each is (inode, chunk index, first block, offset in `into`,
        bytes)."""
        self._scratch("decrypting").run_many(pieces, into)

    def _run(
        self, way: str, inode: int, index: int, first: int, source: Buffer, into: Writable, keeps_zeros: bool
    ) -> None:
        self._scratch(way).run(source, into, inode, index, first, keeps_zeros)

    def _scratch(self, way: str) -> BlockEngine:
        """Return the engine of this thread."""
        scratch: BlockEngine | None = getattr(self._local, way, None)
        if scratch is None:
            scratch = self.scratch(way)
            setattr(self._local, way, scratch)
        return scratch

    def scratch(self, way: str) -> BlockEngine:
        """Create an engine for "encrypting" or "decrypting", to be used by one thread."""
        plain = _PlainXts(self._key, way)
        if Scratch is None:
            return plain
        engine = Scratch(self._key, way == "encrypting", plain)
        if not engine.uses_libcrypto:
            _warn_once()
        made: BlockEngine = engine
        return made


class _PlainXts:
    """The same as `_xts.XtsScratch`, by the `cryptography` package."""

    def __init__(self, key: bytes, way: str) -> None:
        self._algorithm = algorithms.AES(key)
        self._encrypts = way == "encrypting"

    def run_many(self, pieces: Sequence[tuple[int, int, int, int, int]], into: Writable) -> None:
        for inode, index, first, place, length in pieces:
            part = memoryview(into)[place : place + length]
            self.run(part, part, inode, index, first, True)

    def run(
        self, source: Buffer, to: Writable, inode: int, index: int, first: int, keeps_zeros: bool
    ) -> None:
        given, made = memoryview(source).cast("B"), memoryview(to).cast("B")
        if len(given) % BLOCK_BYTES or len(made) != len(given):
            raise ValueError(f"{len(given)} bytes to {len(made)} are not whole blocks")
        for at in range(0, len(given), BLOCK_BYTES):
            block = given[at : at + BLOCK_BYTES]
            if keeps_zeros and block == _ZERO_BLOCK:
                made[at : at + BLOCK_BYTES] = _ZERO_BLOCK
                continue
            tweak = struct.pack("<QII", inode, index, first + at // BLOCK_BYTES)
            cipher = Cipher(self._algorithm, modes.XTS(tweak))
            context: CipherContext = cipher.encryptor() if self._encrypts else cipher.decryptor()
            made[at : at + BLOCK_BYTES] = context.update(bytes(block))
