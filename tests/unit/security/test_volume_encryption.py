"""Encrypted volumes: the cipher, the keys, and files of such a volume on a pool in one process."""

from __future__ import annotations

import asyncio
import errno
import os
import random
import subprocess
import sys
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes

from nvpool.client.state.options import ClientOptions
from nvpool.client.state.vfs_types import Caller
from nvpool.core.checksum import piece_checksums
from nvpool.core.errors import BadConfiguration, CorruptRecord, InvalidRequest, KeyMissing
from nvpool.core.grants import ENCRYPTED, WRITE
from nvpool.core.units import BLOCK_BYTES, KIB, MIB
from nvpool.meta.state.volume_records import ENCRYPTED as ENCRYPTED_FLAG
from nvpool.meta.state.volume_records import VolumeRecord, decode_volume, encode_volume
from nvpool.sdk.async_filesystem import AsyncFileSystem
from nvpool.security import xts
from nvpool.security.volume_keys import WRAPPED_BYTES, PoolKeys, identity_of, wrapped_by
from nvpool.security.xts import BlockCipher
from nvpool.store.chunks.api import create_chunk_store
from nvpool.store.chunks.block_store import open_chunk_store
from nvpool.store.chunks.memory_store import MemoryChunkStore
from nvpool.testing.fakes.in_process_pool import InProcessPool

ROOT = Caller(0, 0)
MARK = b"nobody may find this on a drive "


def key_file(directory: Path, *keys: bytes) -> str:
    path = directory / "pool.key"
    path.write_text("# of a test\n" + "".join(f"{key.hex()}\n" for key in keys or (bytes(range(32)),)))
    path.chmod(0o600)
    return str(path)


# -- the cipher --------------------------------------------------------------------------------------------------------


def library(key: bytes, inode: int, index: int, block: int, content: bytes) -> bytes:
    tweak = inode.to_bytes(8, "little") + index.to_bytes(4, "little") + block.to_bytes(4, "little")
    return Cipher(algorithms.AES(key), modes.XTS(tweak)).encryptor().update(content)


@pytest.mark.parametrize("compiled", [pytest.param(True, marks=pytest.mark.compiled), False])
def test_cipher_equals_the_library_xts(compiled, monkeypatch):
    if not compiled:
        monkeypatch.setattr(xts, "Scratch", None)
    chance = random.Random(1)
    for blocks in (1, 2, 31, 32, 33, 64, 65):
        key, content = chance.randbytes(64), chance.randbytes(blocks * BLOCK_BYTES)
        inode, index, first = chance.getrandbits(64), chance.getrandbits(32), chance.randrange(4000)
        cipher = BlockCipher(key)
        stored = cipher.encrypt(inode, index, first, content)
        assert stored == b"".join(
            library(key, inode, index, first + n, content[n * BLOCK_BYTES : (n + 1) * BLOCK_BYTES])
            for n in range(blocks)
        )
        assert cipher.decrypt(inode, index, first, stored) == content
        whole = memoryview(bytearray(stored))
        cipher.decrypt(inode, index, first, whole, whole)  # in place
        assert whole == content


@pytest.mark.parametrize("compiled", [pytest.param(True, marks=pytest.mark.compiled), False])
def test_cipher_keeps_holes(compiled, monkeypatch):
    if not compiled:
        monkeypatch.setattr(xts, "Scratch", None)
    cipher, zeros = BlockCipher(os.urandom(64)), bytes(BLOCK_BYTES)
    stored = cipher.encrypt(1, 2, 3, zeros + MARK * 128 + zeros)
    assert stored[:BLOCK_BYTES] != zeros and stored[:BLOCK_BYTES] != stored[-BLOCK_BYTES:]
    assert cipher.decrypt(1, 2, 3, stored) == zeros + MARK * 128 + zeros
    assert (
        cipher.decrypt(1, 2, 3, zeros + stored[BLOCK_BYTES : 2 * BLOCK_BYTES] + zeros)
        == zeros + MARK * 128 + zeros
    )


@pytest.mark.compiled
def test_cipher_works_without_libcrypto():
    """A machine whose Python brings its own OpenSSL may have no libcrypto that can be loaded."""
    program = """if True:
        import os, sys
        from nvpool.security import _xts, xts
        _xts.LIBRARIES = ("libcrypto.so.none",)
        cipher = xts.BlockCipher(bytes(range(64)))
        content, zeros = b"block of" * 512, bytes(4096)
        stored = cipher.encrypt(7, 8, 9, content + zeros)
        whole = memoryview(bytearray(stored[:4096] + zeros))
        cipher.decrypt_many([(7, 8, 9, 0, 8192)], whole)
        assert whole == content + zeros and not cipher.scratch("decrypting").uses_libcrypto
        sys.stdout.write(stored.hex())
    """
    found = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True)
    cipher = BlockCipher(bytes(range(64)))
    assert cipher.scratch("encrypting").uses_libcrypto
    assert cipher.encrypt(7, 8, 9, b"block of" * 512 + bytes(4096)).hex() == found.stdout


def test_cipher_refuses_incomplete_blocks():
    cipher = BlockCipher(os.urandom(64))
    with pytest.raises(ValueError):
        cipher.encrypt(1, 0, 0, b"x" * 100)
    with pytest.raises(ValueError):
        cipher.decrypt(1, 0, 0, bytes(BLOCK_BYTES), memoryview(bytearray(2 * BLOCK_BYTES)))
    for key in (b"", b"k" * 32, b"k" * 64):
        with pytest.raises(ValueError):
            BlockCipher(key)


# -- keys --------------------------------------------------------------------------------------------------------------


def test_pool_key_wraps_and_is_replaced(tmp_path):
    old, new = os.urandom(32), os.urandom(32)
    keys = PoolKeys(key_file=key_file(tmp_path, old))
    wrapped = keys.new()
    assert len(wrapped) == WRAPPED_BYTES and wrapped_by(wrapped) == identity_of(old).hex()
    assert len(keys.unwrap(wrapped)) == 64 and keys.rewrap(wrapped) == wrapped
    key_file(tmp_path, new, old)
    both = PoolKeys(key_file=str(tmp_path / "pool.key"))
    again = both.rewrap(wrapped)
    assert wrapped_by(again) == identity_of(new).hex() and both.unwrap(again) == keys.unwrap(wrapped)
    key_file(tmp_path, new)
    last = PoolKeys(key_file=str(tmp_path / "pool.key"))
    assert last.unwrap(again) == keys.unwrap(wrapped)
    with pytest.raises(KeyMissing, match=identity_of(old).hex()):
        last.unwrap(wrapped)


def test_damaged_wrapped_key_is_detected(tmp_path):
    keys = PoolKeys(key_file=key_file(tmp_path))
    wrapped = keys.new()
    for at in (0, 20, 60, WRAPPED_BYTES - 1):
        damaged = bytearray(wrapped)
        damaged[at] ^= 1
        with pytest.raises(CorruptRecord):
            keys.unwrap(bytes(damaged))
    with pytest.raises(CorruptRecord):
        keys.unwrap(wrapped[:-1])


def test_key_file_mode_and_content_are_checked(tmp_path):
    path = Path(key_file(tmp_path))
    path.chmod(0o640)
    with pytest.raises(BadConfiguration, match="chmod 600"):
        PoolKeys(key_file=str(path)).load()
    path.chmod(0o600)
    for text, reason in (("", "has no pool key"), ("12 34\n", "line 1"), ("\n" + "g" * 64, "line 2")):
        path.write_text(text)
        with pytest.raises(BadConfiguration, match=reason):
            PoolKeys(key_file=str(path)).load()
    with pytest.raises(BadConfiguration, match="cannot be read"):
        PoolKeys(key_file=str(tmp_path / "none")).load()
    with pytest.raises(KeyMissing, match="encryption.key_file"):
        PoolKeys().new()


def test_key_command(tmp_path):
    secret = bytes(range(32))
    keys = PoolKeys(key_command=f"echo {secret.hex()}")
    keys.load()
    assert keys.identities == [identity_of(secret).hex()] and len(keys.unwrap(keys.new())) == 64
    with pytest.raises(BadConfiguration, match="exit code 3.*no module"):
        PoolKeys(key_command="echo no module >&2; exit 3").load()


def test_volume_record_holds_the_key(tmp_path):
    plain = VolumeRecord("name", 1, 2, 3, 4, 2, 0, (("client/a.1", True),))
    encrypted = plain._replace(
        flags=2 | ENCRYPTED_FLAG, wrapped_key=PoolKeys(key_file=key_file(tmp_path)).new()
    )
    assert decode_volume(encode_volume(encrypted)) == encrypted and encrypted.is_restricted
    assert not encrypted._replace(flags=ENCRYPTED_FLAG).is_restricted
    for raw in (
        encode_volume(encrypted)[:-1],
        encode_volume(encrypted) + b"x",
        encode_volume(plain) + b"x",
        encode_volume(encrypted._replace(wrapped_key=b"")),
    ):
        with pytest.raises(CorruptRecord):
            decode_volume(raw)


# -- stores --------------------------------------------------------------------------------------------------------------


async def the_store(kind: str, directory: Path):
    if kind == "memory":
        return MemoryChunkStore(64 * MIB)
    path = directory / "store"
    create_chunk_store(path, 1, "pool", 64 * MIB)
    return await open_chunk_store(path, target=1)


@pytest.mark.parametrize("kind", ["memory", "file"])
def test_store_encrypts_writes_and_cuts(kind, tmp_path):
    """Writes at any offset and of any length, truncations and holes: the decrypted content is what was written."""

    async def main():
        store, cipher, chance = await the_store(kind, tmp_path), BlockCipher(os.urandom(64)), random.Random(7)
        wanted, cut = bytearray(MIB), 0
        for _ in range(150):
            if chance.random() < 0.2:
                begin = chance.randrange(MIB)
                end = chance.randrange(begin, MIB) + 1
                cut += 1
                await store.cut(5, begin, cut, 20, end, cipher=cipher)
                wanted[begin:end] = bytes(end - begin)
            else:
                length = chance.choice([1, 100, 4096, 5000, 8192, 256 * KIB])
                offset = chance.randrange(MIB - length) & chance.choice([-1, -4096])
                content = chance.randbytes(length)
                await store.write(
                    5,
                    0,
                    offset,
                    memoryview(content),
                    piece_checksums(content, offset),
                    cut=cut,
                    cipher=cipher,
                )
                wanted[offset : offset + length] = content
        copy = await store.fetch(5, 0)
        found = bytearray(MIB)
        at = 0
        for first, count in copy.runs:
            stored = copy.content[at : at + count * BLOCK_BYTES]
            found[first * BLOCK_BYTES : (first + count) * BLOCK_BYTES] = cipher.decrypt(5, 0, first, stored)
            at += count * BLOCK_BYTES
        assert found == wanted and not copy.bad
        await store.close() if kind == "file" else None

    asyncio.run(main())


# -- files -----------------------------------------------------------------------------------------------------------------


@asynccontextmanager
async def pool_and_client(directory: Path | None, **options):
    async with InProcessPool(directory, **options) as pool:
        client = await pool.client(options=ClientOptions(deadline_s=10.0))
        yield pool, AsyncFileSystem(client, ROOT)
        await client.close()


async def work(fs: AsyncFileSystem, path: str, wanted: bytearray, chance: random.Random, count: int) -> None:
    async with await fs.open(path, "r+") as file:
        for _ in range(count):
            place, length = chance.randrange(3 * MIB), chance.choice([1, 33, 4096, 10_000, 65536, MIB])
            drawn = chance.random()
            if drawn < 0.5:
                content = chance.randbytes(length)
                await file.write(place, content)
                if len(wanted) < place:
                    wanted.extend(bytes(place - len(wanted)))
                wanted[place : place + length] = content
            elif drawn < 0.6:
                await file.truncate(place)
                if place < len(wanted):
                    del wanted[place:]
                else:
                    wanted.extend(bytes(place - len(wanted)))
            elif drawn < 0.65:
                await file.punch(place, length)
                end = min(place + length, len(wanted))
                wanted[place:end] = bytes(max(0, end - place))
            elif drawn < 0.7:
                await file.flush()
            else:
                assert bytes(await file.read(place, length)) == bytes(wanted[place : place + length])


@pytest.mark.parametrize("replicas", [1, 2])
@pytest.mark.parametrize("kind", ["memory", "file"])
def test_files_of_encrypted_volumes(kind, replicas, tmp_path):
    async def main():
        directory = tmp_path / "pool" if kind == "file" else None
        if directory is not None:
            directory.mkdir()
        async with pool_and_client(directory, replicas=replicas, key_file=key_file(tmp_path)) as (pool, fs):
            volume = await fs.volumes.create("secret", encrypted=True, replicas=replicas)
            assert volume.encrypted and volume.pool_key == identity_of(bytes(range(32))).hex()
            assert (
                await fs.volumes.create("secret", encrypted=True, replicas=replicas)
            ).inode == volume.inode
            with pytest.raises(FileExistsError, match="encryption on, not off"):
                await fs.volumes.create("secret", replicas=replicas)
            await fs.write_bytes("/volumes/secret/file", b"")
            wanted, chance = bytearray(), random.Random(replicas)
            await work(fs, "/volumes/secret/file", wanted, chance, 60)
            for n in range(20):
                await fs.write_bytes(f"/volumes/secret/small{n}", MARK * (n + 1))
            other = AsyncFileSystem(await pool.client("other"), ROOT)
            assert bytes(await other.read_bytes("/volumes/secret/file")) == bytes(wanted)
            assert [
                bytes(one) for one in await other.read_many([f"/volumes/secret/small{n}" for n in range(20)])
            ] == [MARK * (n + 1) for n in range(20)]
            for shard in [shard.id for shard in pool.pool_map.shards]:
                await pool.stop_shard(shard=shard)
                await pool.start_shard(shard)
            for target in list(pool.stores):
                await pool.stop_store(target)
                await pool.start_store(target)
            await work(fs, "/volumes/secret/file", wanted, chance, 60)
            again = AsyncFileSystem(await pool.client("again"), ROOT)
            assert bytes(await again.read_bytes("/volumes/secret/file")) == bytes(wanted)
            await again.write_bytes("/volumes/secret/marked", MARK * 10_000)
            await fs.write_bytes("/plain", b"this one may be found")
        if directory is not None:
            stored = b"".join(path.read_bytes() for path in directory.glob("targets/*/data"))
            assert MARK not in stored and b"this one may be found" in stored

    asyncio.run(main())


def test_copy_within_and_out_of_an_encrypted_volume(tmp_path):
    async def main():
        async with pool_and_client(None, key_file=key_file(tmp_path)) as (_, fs):
            await fs.volumes.create("secret", encrypted=True)
            content = os.urandom(2 * MIB + 5000)
            await fs.write_bytes("/volumes/secret/a", content)
            for target in ("/volumes/secret/b", "/outside", "/volumes/secret/c"):
                source = "/outside" if target.endswith("c") else "/volumes/secret/a"
                async with await fs.open(source) as one, await fs.open(target, "w+") as two:
                    done = 0
                    while done < len(content):
                        done += await fs.vfs.copy_range(
                            one.handle, done, two.handle, done, len(content) - done
                        )
                assert bytes(await fs.read_bytes(target)) == content, target

    asyncio.run(main())


def test_encrypted_volume_needs_a_pool_key(tmp_path):
    async def main():
        async with pool_and_client(None) as (_, fs):
            with pytest.raises(OSError, match="encryption.key_file") as caught:
                await fs.volumes.create("secret", encrypted=True)
            assert caught.value.errno == errno.ENOKEY
            assert await fs.volumes.list() == []
            await fs.volumes.create("open")  # volumes without encryption work

    asyncio.run(main())


def test_store_without_the_pool_key_refuses_writes(tmp_path):
    async def main():
        async with pool_and_client(None, key_file=key_file(tmp_path), capacities=(64 * MIB,)) as (pool, fs):
            await fs.volumes.create("secret", encrypted=True)
            await fs.write_bytes("/volumes/secret/file", MARK * 1000)
            await pool.stop_store(1)
            pool.key_file = ""
            await pool.start_store(1)
            with pytest.raises(OSError) as caught:
                await fs.write_bytes("/volumes/secret/other", MARK)
            assert caught.value.errno == errno.ENOKEY
            assert bytes(await fs.read_bytes("/volumes/secret/file")) == MARK * 1000  # the reader decrypts

    asyncio.run(main())


def test_rewrap_while_clients_work(tmp_path):
    async def main():
        old, new = os.urandom(32), os.urandom(32)
        async with pool_and_client(None, key_file=key_file(tmp_path, old), capacities=(64 * MIB,)) as (
            pool,
            fs,
        ):
            await fs.volumes.create("secret", encrypted=True)
            await fs.write_bytes("/volumes/secret/file", MARK * 1000)
            for keys in ((new, old), (new,)):
                key_file(tmp_path, *keys)
                await pool.stop_shard()
                await pool.start_shard()
                if keys == (new, old):
                    assert (await fs.volumes.rewrap("secret")).pool_key == identity_of(new).hex()
                await pool.stop_store(1)
                await pool.start_store(1)
                async with await fs.open("/volumes/secret/file", "r+") as file:
                    await file.write(5, b"once more")  # by a client that has the key with its old wrapping
                    await file.flush()
            other = AsyncFileSystem(await pool.client("other"), ROOT)
            assert bytes(await other.read_bytes("/volumes/secret/file"))[5:14] == b"once more"

    asyncio.run(main())


def test_write_without_the_key_is_refused(tmp_path):
    """A client sends plain bytes to a file of an encrypted volume, or a key to a file outside of any."""

    async def main():
        async with pool_and_client(None, key_file=key_file(tmp_path), capacities=(64 * MIB,)) as (_, fs):
            await fs.volumes.create("secret", encrypted=True)
            for path in ("/volumes/secret/file", "/plain"):
                async with await fs.open(path, "w+") as file:
                    inode = file.handle.file
                    assert bool(inode.grant[1] & ENCRYPTED) == inode.encrypted == (path != "/plain")
                    await file.write(0, b"good")
                    await file.flush()
                    await fs.vfs.parts.inodes.refresh(inode, WRITE)
                    keys, inode.encrypted = inode.key, False
                    inode.key = None if keys is not None else (await wrapped(fs))
                    with pytest.raises(InvalidRequest):
                        await fs.vfs.chunks.write(
                            inode,
                            0,
                            0,
                            3,
                            [b"bad"],
                            piece_checksums(b"bad", 0),
                            fs.vfs.clock.boottime_s() + 5,
                        )
                    inode.key, inode.encrypted = keys, keys is not None
                assert bytes(await fs.read_bytes(path)) == b"good"

    async def wrapped(fs):
        async with await fs.open("/volumes/secret/file") as file:
            await fs.vfs.chunks.keys.fetch(file.handle.file)
            return file.handle.file.key

    asyncio.run(main())
