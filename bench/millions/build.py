"""Offline construction of a shard's database: the code of a checkpoint writes the records of a Tree.

The service's work before a checkpoint (decisions, journal, memtable) is left out. `kv/lmdb_env` writes the records in its
slices, with checks and marks, so a daemon opens the database as its own. `compared` compares it with a database that a
running service has made.
"""

from __future__ import annotations

import asyncio
import marshal
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import islice
from pathlib import Path
from typing import BinaryIO

import lmdb

from nvpool.core.ids import ROOT_INODE, partition_of
from nvpool.kv.api import Kv
from nvpool.kv.engine import LmdbKv, LmdbOptions
from nvpool.kv.lmdb_env import LmdbTree
from nvpool.meta.state import records
from nvpool.meta.state.shard_identity import take_identity
from nvpool.poolmap.file_layout import Layout

from . import beside
from .tree import BATCH_KEYS, Records, Tree

BYTES_A_FILE = 180
"""At most, with what is free in the file: to see beforehand whether a drive has room."""
ENGINE_BYTES = 200 << 20
"""Of an empty shard, with its journals, and what is reserved for a checkpoint."""
_PAIR_BYTES = 64

Progress = Callable[[float], None]
"""Called with the share of the work that is done, from 0 to 1."""


async def begun(shard: Path) -> tuple[bytes, records.Inode]:
    """Make an empty shard, as its first start does: (name key, root). All have the same name key."""
    kv = await LmdbKv.open(shard, LmdbOptions())
    try:
        identity = take_identity(kv, 1, bytes(32), None, time.time_ns())
        root = records.decode_inode(ROOT_INODE, kv.get(records.inode_key(ROOT_INODE)))
    finally:
        await kv.close()
    return identity.name_key, root


def build(shard: Path, files: int, per_directory: int, dense: Path | None, progress: Progress) -> dict:
    """Make the shard of so many files in the directory `shard`, which does not exist, durably. What is known of it; with
    `dense`, a place for a scratch directory, also how little room its records could have."""
    began_s = time.monotonic()
    name_key, root = asyncio.run(begun(shard))
    tree = Tree(files, per_directory, name_key, Layout(root.table, root.chunk_bits))
    _put(shard, tree, root, progress)
    found = {
        "files": files,
        "per_directory": per_directory,
        "name_key": name_key.hex(),
        "made_s": time.monotonic() - began_s,
        **pages(shard),
    }
    return found | ({"dense_bytes": packed_bytes(shard, dense)} if dense else {})


def _put(shard: Path, tree: Tree, root: records.Inode, progress: Progress) -> None:
    stored, done = LmdbTree(shard, 64 << 20), 0.0
    try:
        mark = stored.mark()
        with made_beside(tree, root) as batches:
            for share, batch in batches:
                if batch:
                    mark = mark._replace(sequence=mark.sequence + 1)
                    stored.prepare(len(batch) * _PAIR_BYTES)
                    while not stored.write(batch, mark, lambda step: None):
                        stored.double_map()
                done += share
                progress(done)
    finally:
        stored.close()


@contextmanager
def made_beside(tree: Tree, root: records.Inode) -> Iterator[Iterator[tuple[float, Records]]]:
    """`beside.batches` of the tree, made by a process of its own while the one before is worked off; it ends with the block.

    A new program, no fork: gRPC's threads are not there in a forked process, and it waits for their end for ever."""
    command = [sys.executable, "-m", beside.__name__, *beside.described(tree, root)]
    environment = os.environ | {"PYTHONPATH": os.fspath(Path(__file__).resolve().parents[1])}
    process = subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, env=environment, start_new_session=True
    )  # so that nothing interrupts it but us, who end it
    try:
        yield iter(partial(_next_batch, process.stdout), None)
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


def _next_batch(pipe: BinaryIO) -> tuple[float, Records] | None:
    """Not marshal.load: Python 3.11.2 makes an EOFError of the signal that interrupts it."""
    raw = pipe.read(int.from_bytes(pipe.read(8), "little"))
    if not raw:
        raise EOFError("the process that makes records has ended")
    return marshal.loads(raw)


def packed_bytes(shard: Path, scratch: Path) -> int:
    """Of the pages that the records of a shard need at least: appended in the order of their keys to a database in `scratch`,
    which is made and removed."""
    scratch.mkdir()
    try:
        with (
            lmdb.open(os.fspath(shard), readonly=True, lock=False) as source,
            source.begin() as stored,
            lmdb.open(os.fspath(scratch), map_size=1 << 40, sync=False, lock=False) as target,
        ):
            pairs = stored.cursor().iternext()
            while part := list(islice(pairs, BATCH_KEYS)):
                with target.begin(write=True) as transaction:
                    transaction.cursor().putmulti(part, append=True)
            return _used_bytes(target.stat())
    finally:
        shutil.rmtree(scratch)


def _used_bytes(found: dict) -> int:
    return found["psize"] * (found["branch_pages"] + found["leaf_pages"] + found["overflow_pages"])


def pages(shard: Path) -> dict:
    """Statistics of LMDB of a database that no process has open for writing."""
    with lmdb.open(os.fspath(shard), readonly=True, lock=False) as env:
        found, info = env.stat(), env.info()
    return {
        "used_bytes": _used_bytes(found),
        "inner_bytes": found["psize"] * found["branch_pages"],
        "depth": found["depth"],
        "entries": found["entries"] - 1,
        "file_bytes": found["psize"] * (info["last_pgno"] + 1),
    }


def compared(offline: Kv, served: Kv, files: int, per_directory: int, progress: Progress) -> dict:
    """Whether both hold the same files: each name is in both, under inodes that are alike but for number and times and whose
    records are equally long; so are the directories. The reasons where they do not, ten at most."""
    trees = [
        Tree(files, per_directory, records.decode_identity(kv.get(records.IDENTITY_KEY)).name_key, Layout())
        for kv in (offline, served)
    ]
    if trees[0].home != trees[1].home:
        raise ValueError("the two shards have different name keys")
    tree, differences = trees[0], []

    def directory(kv: Kv, index: int) -> int:
        return records.decode_dentry(partition_of(tree.home), kv.get(tree.directory_key(index)) or b"")[0]

    def compare(
        what: str, kept: tuple[records.Inode, int] | None, made: tuple[records.Inode, int] | None
    ) -> None:
        if kept is None or made is None or kept != made:
            differences.append(f"{what}: {kept} offline, {made} by the service")

    compare("data", _seen(offline, tree.home), _seen(served, tree.home))
    parents = [tree.home, tree.home]
    for number in range(files):
        if per_directory and not number % per_directory:
            parents = [directory(kv, number // per_directory) for kv in (offline, served)]
            compare(
                f"directory {number // per_directory}", _seen(offline, parents[0]), _seen(served, parents[1])
            )
        found = []
        for kv, parent in zip((offline, served), parents, strict=True):
            raw = kv.get(next(tree.dentry_keys([number], parent)))
            inode = records.decode_dentry(partition_of(parent), raw)[0] if raw is not None else 0
            found.append(_seen(kv, inode))
        compare(f"file {number}", *found)
        if len(differences) >= 10:
            break
        if not number % 1000:
            progress(number / files)
    return {"same": not differences, "differences": differences}


def _seen(kv: Kv, number: int) -> tuple[records.Inode, int] | None:
    """An inode without what depends on when it was born, and of a file the length of its record."""
    raw = kv.get(records.inode_key(number)) if number else None
    if raw is None:
        return None
    inode = records.decode_inode(number, raw)
    inode.number = inode.parent = inode.atime_ns = inode.mtime_ns = inode.ctime_ns = inode.birth_ns = 0
    return inode, len(raw) if inode.is_file else 0
