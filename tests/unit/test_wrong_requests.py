"""Requests that no client of ours sends: refused, and nothing is changed. Most were found by `make fuzz`."""

from __future__ import annotations

import pytest
from test_meta_service import run

from nvpool.base.errors import NotADirectory
from nvpool.base.ids import ROOT_INODE as ROOT


def scenario(function):
    def test():
        run(function)

    test.__name__, test.__doc__ = function.__name__, function.__doc__
    return test


@scenario
async def test_file_is_no_directory_for_its_own_names(shard, client):
    file = await client.file(ROOT, b"f")
    with pytest.raises(NotADirectory):
        await client.link(file.inode, file.inode, b"g")
    assert (await client.getattr(file.inode)).attr.links == 1
    assert not await client.fsck()
