"""Requests that create files: one function makes them, and one object sends them, whichever way a create takes."""

import asyncio
import os
import stat

from nvpool.client.state.vfs_types import Caller
from nvpool.client.vfs.files import create_and_open_request
from nvpool.client.vfs.namespace import create_request
from nvpool.core.grants import READ, WRITE
from nvpool.core.ids import ROOT_INODE
from nvpool.rpc.v1.wire_pb2 import META_CREATE
from nvpool.testing.fakes.in_process_pool import InProcessPool

MASKED = Caller(5, 6, 7, 0o027)


def test_umask_applies_to_all_types_but_links():
    for kind, mode in ((stat.S_IFREG, 0o640), (stat.S_IFDIR, 0o750), (stat.S_IFIFO, 0o640)):
        request = create_request(1, b"n", kind | 0o777, MASKED, exclusive=True)
        assert (request.mode, request.masked, request.exclusive) == (kind | 0o750, 0o027, True), (kind, mode)
    link = create_request(1, b"n", stat.S_IFLNK | 0o777, MASKED, target=b"t")
    assert (link.mode, link.masked, link.target) == (stat.S_IFLNK | 0o777, 0, b"t")


def test_unnamed_file_is_requested_like_a_named_one():
    flags = os.O_RDWR | os.O_EXCL | os.O_TRUNC
    named = create_and_open_request(1, b"n", 0o4777, flags, MASKED, READ | WRITE)
    unnamed = create_and_open_request(1, b"", 0o4777, flags, MASKED, READ | WRITE)
    assert (named.mode, named.open, named.exclusive, named.truncate, named.unnamed) == (
        stat.S_IFREG | 0o4750,
        True,
        True,
        True,
        False,
    )
    assert unnamed.unnamed and not unnamed.truncate
    for request in (named, unnamed):
        request.ClearField("name")
        request.ClearField("truncate")
        request.ClearField("unnamed")
    assert named == unnamed


def test_each_create_is_sent_once_and_by_one_path():
    async def main() -> None:
        async with InProcessPool() as pool:
            vfs = (await pool.client("client")).vfs
            sent = []
            change = vfs.meta.change

            async def counted(place, method, request, *arguments, **fields):
                if method == META_CREATE:
                    sent.append((request.name, request.unnamed, fields["once"]))
                return await change(place, method, request, *arguments, **fields)

            vfs.meta.change = counted
            root = Caller(0, 0)
            for flags in (os.O_RDWR, os.O_RDWR | os.O_EXCL):
                attr, handle = await vfs.create_unnamed(ROOT_INODE, 0o644, flags, root)
                assert attr.links == 0
                await vfs.release(handle)
            attr, handle = await vfs.create(ROOT_INODE, b"file", 0o644, os.O_RDWR, root)
            await vfs.release(handle)
            assert sent == [(b"", True, True), (b"", True, True), (b"file", False, True)]

    asyncio.run(main())
