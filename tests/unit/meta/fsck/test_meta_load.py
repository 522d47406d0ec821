"""Loading accepts only records that a dump can contain; the fsck after it repairs contradictions between them."""

import random

import msgspec
import pytest

from nvpool.core.errors import CorruptRecord, InvalidRequest, NvpoolError
from nvpool.core.ids import ROOT_INODE as ROOT
from nvpool.core.ids import inode_number
from nvpool.kv.memory_engine import MemoryKv
from nvpool.meta.server.service import MetaService
from nvpool.meta.state import records, session_records
from nvpool.testing.fakes.meta_shard import ShardClient, StoreRecorder, small_map
from tests.unit.meta.fsck.test_meta_fsck import OPTIONS, dump_all, load_all, on_a_shard


class Empty:
    """An empty shard that can be started again on the same records."""

    def __init__(self):
        self.kv = MemoryKv()

    async def __aenter__(self):
        return await self.start()

    async def start(self):
        self.service = MetaService(
            self.kv, grant_secret=b"another" * 5, dialer=StoreRecorder(), options=OPTIONS
        )
        self.service.update_map(small_map())
        await self.service.start()
        return ShardClient(self.service)

    async def __aexit__(self, *_):
        await self.service.close()


def rows_of(lines):
    return [msgspec.json.decode(line) for line in lines.splitlines()]


def lines_of(rows):
    return b"".join(msgspec.json.encode(row) + b"\n" for row in rows)


def raw(key, value):
    return {"type": "raw", "key": key.hex(), "value": value.hex()}


@on_a_shard
async def test_record_that_no_dump_contains_is_refused(shard):
    rows = rows_of(await dump_all(shard.client))
    session = session_records.encode_session(session_records.SessionRecord(b"s" * 16, 0, "me"))
    for bad, error in (
        (raw(records.session_key(7), session), InvalidRequest),
        (raw(records.slot_key(7, 1), session_records.encode_slot(1, 0, b"")), InvalidRequest),
        (raw(records.IDENTITY_KEY + b"x", b"y"), InvalidRequest),
        (raw(records.COUNTS_KEY, b"?"), CorruptRecord),
        (raw(records.BOUNDS_KEY, b"?"), CorruptRecord),
        (raw(records.inode_key(ROOT), b"\xffgarbage"), CorruptRecord),
        (raw(records.inode_key(ROOT), records.encode_inode(records.Inode(ROOT, 0o100644))), InvalidRequest),
    ):
        empty = Empty()
        async with empty as client:
            with pytest.raises(error):
                await load_all(client, lines_of([*rows, bad]), parts=1)
        async with empty as client:
            assert (await client.status()).state == "loading"
            await load_all(client, lines_of(rows))
            assert await client.fsck() == []


def without_a_kind(rows, chance):
    kind = chance.choice(["dentry", "inode", "orphan", "xattr", "counts", "bounds"])
    victims = [row for row in rows if row.get("type") == kind and row.get("inode") != ROOT]
    victim = chance.choice(victims) if victims else None
    return [row for row in rows if row is not victim]


def with_another_number(rows, chance):
    victim = chance.choice(
        [
            row
            for row in rows
            if row.get("type") in ("dentry", "inode", "orphan", "xattr") and row.get("inode") != ROOT
        ]
    )
    fields = ("inode", "directory", "links", "size", "parent", "kind", "partition", "mode", "flags", "cut")
    field = chance.choice([name for name in fields if name in victim])
    victim[field] = chance.choice([0, 1, 2, 3, 4, 8, inode_number(17, 5), victim[field] + 1, 1 << 62])
    return rows


def with_noise(rows, chance):
    key = bytes([chance.randrange(128)]) + chance.randbytes(chance.choice((1, 3, 8, 9, 16, 17, 30)))
    return [*rows, raw(key, chance.randbytes(chance.choice((0, 1, 2, 9, 30))))]


async def walk(client):
    """Read everything that has a name; no directory is reached twice."""
    seen, waiting = {ROOT}, [ROOT]
    while waiting:
        inode = waiting.pop()
        for entry in await client.list(inode, attrs=True):
            assert (await client.lookup(inode, entry.name)).attr.inode == entry.inode
            if entry.kind == 4:
                assert entry.inode not in seen
                seen.add(entry.inode)
                waiting.append(entry.inode)


@pytest.mark.few(5)
@pytest.mark.parametrize("seed", range(20))
def test_contradictory_dump_is_repaired_by_fsck(seed):
    chance = random.Random(seed)

    async def main(shard):
        whole = await dump_all(shard.client)
        for _ in range(15):
            rows = rows_of(whole)
            for _ in range(chance.choice((1, 1, 2, 4))):
                rows = chance.choice([without_a_kind, with_another_number, with_noise])(rows, chance)
            empty = Empty()
            async with empty as client:
                try:
                    await load_all(client, lines_of(rows))
                except NvpoolError:
                    continue  # refused
                await client.begin()
                for _ in range(3):
                    if not await client.fsck(repair=True):
                        break
                assert await client.fsck() == []
                await walk(client)

    on_a_shard(main)()
