"""AES-256-XTS over the 4 KiB blocks of chunks: the cipher of encrypted volumes.

XTS-AES as in IEEE 1619-2018 and NIST SP 800-38E, with a data unit of one block of a chunk. The number of a data unit is its
position: inode u64, chunk index u32, block within the chunk u32, little-endian in this order. So each replica of a block has
the same ciphertext, a block can be rewritten in place, and what is moved to another position does not decrypt. XTS keeps what
is stored secret; it does not detect changes. Checksums, which are of the ciphertext, detect damage by accident.

A block of zeros in ciphertext stands for a hole, and decrypts to zeros: no block encrypts to it but with probability 2^-32768.

The library's own XTS makes a context for each block, which takes 8 µs, some ten times as long as the cipher itself. So the
compiled part (`_xts.pyx`) applies the tweaks itself around the library's AES in ECB mode, for many blocks at once: some 2 µs
a block alone, 0.6 in large buffers. Without it the library's XTS is used; tests hold the two against one another. Used by
clients, which decrypt what they read, and by stores, which encrypt what is written. Any thread may call it. """

from __future__ import annotations

import struct
import threading
from collections.abc import Sequence
from typing import Protocol

from cryptography.hazmat.primitives.ciphers import Cipher, CipherContext, algorithms, modes

from nvpool.core.compiled import load_compiled
from nvpool.core.units import BLOCK_BYTES, Buffer

_xts = load_compiled("nvpool.security._xts")
Scratch = _xts.Scratch if _xts is not None else None

KEY_BYTES = 64
"""Two keys of AES-256: that of the data, and that of the tweaks."""
_ZERO_BLOCK = bytes(BLOCK_BYTES)

Writable = bytearray | memoryview


class BlockEngine(Protocol):
    """Work of one direction with one key, for one thread: `_xts.Scratch`, or `_PlainXts` where that is not compiled."""

    def run_many(self, pieces: Sequence[tuple[int, int, int, int, int]], into: Writable) -> None:
        """Decrypt pieces of `into` where they are; see BlockCipher.decrypt_many."""

    def run(self, source: Buffer, to: Writable, inode: int, index: int, first: int, keeps_zeros: bool) -> None:
        """Encrypt or decrypt whole blocks of `source` to `to`; with `keeps_zeros`, a block of zeros stays one."""


class BlockCipher:
    """Encrypts and decrypts whole blocks with one key of KEY_BYTES; the halves must differ (SP 800-38E)."""

    def __init__(self, key: bytes) -> None:
        if len(key) != KEY_BYTES or key[:32] == key[32:]:
            raise ValueError(f"a key of XTS has {KEY_BYTES} bytes, in two halves that differ")
        self._key = key
        self._local = threading.local()

    def encrypt(self, inode: int, index: int, first: int, blocks: Buffer) -> bytearray:
        """The ciphertext of `blocks`, which lie in chunk `index` of the inode from block `first` on."""
        made = bytearray(len(blocks))
        self._run("encrypting", inode, index, first, blocks, made, False)
        return made

    def decrypt(self, inode: int, index: int, first: int, blocks: Buffer, into: memoryview | None = None) -> memoryview:
        """What `encrypt` was given; in `into`, where that is given, which may be `blocks` itself."""
        plain = memoryview(bytearray(len(blocks))) if into is None else into
        self._run("decrypting", inode, index, first, blocks, plain, True)
        return plain

    def decrypt_many(self, pieces: Sequence[tuple[int, int, int, int, int]], into: Writable) -> None:
        """Decrypt pieces of `into` where they are: (inode, chunk index, first block, place in `into`, bytes) of each."""
        self._scratch("decrypting").run_many(pieces, into)

    def _run(self, way: str, inode: int, index: int, first: int, source: Buffer, into: Writable, keeps_zeros: bool) -> None:
        self._scratch(way).run(source, into, inode, index, first, keeps_zeros)

    def _scratch(self, way: str) -> BlockEngine:
        """This thread's."""
        scratch: BlockEngine | None = getattr(self._local, way, None)
        if scratch is None:
            scratch = self.scratch(way)
            setattr(self._local, way, scratch)
        return scratch

    def scratch(self, way: str) -> BlockEngine:
        """What does the work "encrypting" or "decrypting", for one thread."""
        if Scratch is None:
            return _PlainXts(self._key, way)
        # ECB is the primitive of which XTS is made.
        data = Cipher(algorithms.AES(self._key[:32]), modes.ECB())
        tweak = Cipher(algorithms.AES(self._key[32:]), modes.ECB())
        context: CipherContext = data.encryptor() if way == "encrypting" else data.decryptor()
        engine: BlockEngine = Scratch(tweak.encryptor().update_into, context.update_into)
        return engine


class _PlainXts:
    """As _xts.Scratch, with the library's XTS."""

    def __init__(self, key: bytes, way: str) -> None:
        self._algorithm = algorithms.AES(key)
        self._encrypts = way == "encrypting"

    def run_many(self, pieces: Sequence[tuple[int, int, int, int, int]], into: Writable) -> None:
        for inode, index, first, place, length in pieces:
            part = memoryview(into)[place:place + length]
            self.run(part, part, inode, index, first, True)

    def run(self, source: Buffer, to: Writable, inode: int, index: int, first: int, keeps_zeros: bool) -> None:
        given, made = memoryview(source).cast("B"), memoryview(to).cast("B")
        if len(given) % BLOCK_BYTES or len(made) != len(given):
            raise ValueError(f"{len(given)} bytes to {len(made)} are not whole blocks")
        for at in range(0, len(given), BLOCK_BYTES):
            block = given[at:at + BLOCK_BYTES]
            if keeps_zeros and block == _ZERO_BLOCK:
                made[at:at + BLOCK_BYTES] = _ZERO_BLOCK
                continue
            tweak = struct.pack("<QII", inode, index, first + at // BLOCK_BYTES)
            cipher = Cipher(self._algorithm, modes.XTS(tweak))
            context: CipherContext = cipher.encryptor() if self._encrypts else cipher.decryptor()
            made[at:at + BLOCK_BYTES] = context.update(bytes(block))
