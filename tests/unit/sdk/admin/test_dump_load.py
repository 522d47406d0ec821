"""Loading a dump into a pool reports repaired records and the number of files without contents."""

import asyncio
import os
import struct

import msgspec

from nvpool.client.state.vfs_types import Caller
from nvpool.core.checksum import crc32c
from nvpool.core.ids import ROOT_INODE
from nvpool.sdk import dump as sdk_dump
from nvpool.sdk.dump import SAMPLE_MAX, ContentSample, dump, load
from nvpool.sdk.fsck.check import FsckReport, check
from nvpool.testing.fakes.in_process_pool import InProcessPool, run

ROOT = Caller(0, 0)
FULL = 5


async def fill(client):
    """Create FULL files with contents, and files that have none: empty, only a size, removed but open."""
    vfs = client.vfs
    for number in range(FULL):
        _, handle = await vfs.create(ROOT_INODE, b"full %d" % number, 0o644, os.O_RDWR, ROOT)
        await vfs.write(handle, number * 4_000_000, b"x" * 5000)
        await vfs.release(handle)
    await vfs.create(ROOT_INODE, b"empty", 0o644, os.O_RDWR, ROOT)
    _, handle = await vfs.create(ROOT_INODE, b"hole", 0o644, os.O_RDWR, ROOT)
    await vfs.setattr(handle.inode, size=1 << 30, caller=ROOT)
    _, handle = await vfs.create(ROOT_INODE, b"gone", 0o644, os.O_RDWR, ROOT)
    await vfs.write(handle, 0, b"y")
    await vfs.flush(handle)
    await vfs.unlink(ROOT_INODE, b"gone", ROOT)


def dumped(path):
    """Fill a pool, dump it to `path`, and return its stores."""
    stores = {}

    async def main(pool):
        client = await pool.client()
        await fill(client)
        await dump(client, path)
        stores.update({key: store for key, store in pool.memory.items() if key[0] == "target"})

    run(main)
    return stores


def loaded(path, stores=(), look=None):
    async def main():
        pool = InProcessPool()
        pool.memory.update(stores)
        async with pool:
            client = await pool.client()
            found = await load(client, path)
            checkup = FsckReport()
            await check(client, checkup)
            assert {problem.kind for problem in checkup.problems} <= {"leaked"}
            if look is not None:
                await look(client)
            return found

    return asyncio.run(main())


def rewritten(path, change):
    """Replace the lines of the dump at `path` by those that `change` returns, with correct checksums."""
    with open(path, "rb") as file:
        sdk_dump.read_header(file)
        head = file.tell()
        rows = [
            msgspec.json.decode(line) for _, records in sdk_dump.frames(file) for line in records.splitlines()
        ]
        file.seek(0)
        content = file.read(head)
    records = b"".join(msgspec.json.encode(row) + b"\n" for row in change(rows))
    content += sdk_dump.FRAME.pack(1, len(records), crc32c(records)) + records
    end = struct.pack("<Q", len(rows))
    with open(path, "wb") as file:
        file.write(content + sdk_dump.FRAME.pack(sdk_dump.END_OF_FRAMES, len(end), crc32c(end)) + end)


def test_files_without_contents_on_any_target_are_counted(tmp_path):
    path = str(tmp_path / "dump")
    stores = dumped(path)
    found = loaded(path)
    assert (found.files_sampled, found.files_without_data, found.unanswered) == (FULL, FULL, "")
    found = loaded(path, stores)
    assert (found.files_sampled, found.files_without_data, found.unanswered) == (FULL, 0, "")
    assert not found.problems and not found.left


def test_silent_targets_are_reported_and_the_load_succeeds(tmp_path):
    path = str(tmp_path / "dump")
    dumped(path)

    async def main(pool):
        for target in (1, 2):
            await pool.stop_store(target)
        found = await load(await pool.client(), path)
        assert found.records and "no such listener" in found.unanswered
        assert not found.files_sampled and not found.files_without_data

    run(main)


def test_contradicting_records_are_repaired_and_reported(tmp_path):
    path = str(tmp_path / "dump")
    stores = dumped(path)

    def spoil(rows):
        victim = next(row for row in rows if row.get("name") == "full 3")
        full = next(row for row in rows if row.get("name") == "full 1")
        next(row for row in rows if row.get("type") == "inode" and row["inode"] == full["inode"])["links"] = 9
        return [row for row in rows if row.get("type") != "inode" or row["inode"] != victim["inode"]]

    rewritten(path, spoil)

    async def look(client):
        assert (await client.vfs.lookup(ROOT_INODE, b"full 1")).links == 1

    found = loaded(path, stores, look)
    assert {problem.kind for problem in found.problems} >= {"dentry", "links", "counts"} and not found.left
    assert all(problem.repaired for problem in found.problems)


def test_sample_is_spread_over_all_files_with_contents():
    sample, made = ContentSample(), 10_000
    rows = [
        {
            "type": "inode",
            "inode": number,
            "mode": 0o100644,
            "links": 1,
            "size": 5,
            "blocks": number % 3,
            "table": 1,
        }
        for number in range(1, made + 1)
    ]
    rows[5:5] = [{"type": "dentry"}, {"type": "inode"}, {"type": "inode", "mode": "x"}, {}]
    lines = b"".join(msgspec.json.encode(row) + b"\n" for row in rows) + b"no json\n"
    sample.look(lines)
    files = [file.inode for file in sample.files()]
    assert len(files) == SAMPLE_MAX == len(set(files)) and files == sorted(files)
    assert all(number % 3 for number in files)
    gaps = [after - before for before, after in zip([0, *files], [*files, made], strict=True)]
    assert max(gaps) < 5 * made / SAMPLE_MAX
