"""POOL:/path on the command line, and a client session for as long as a command needs one.

Called by the commands that work inside a pool's tree. Decides nothing about the pool itself: whether it is there shows when
the session opens.
"""

from __future__ import annotations

import os
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, NamedTuple

import click

from nvpool.cli.known_pools import pool_behind
from nvpool.cli.output import remember_pool
from nvpool.cli.pool_connection import REACH_S, ask

if TYPE_CHECKING:
    from nvpool.client.session import Client
    from nvpool.client.vfs.filesystem import Vfs
    from nvpool.rpc.v1.meta_pb2 import Attr


class Place(NamedTuple):
    pool: str
    path: bytes

    def __str__(self) -> str:
        return f"{self.pool}:{os.fsdecode(self.path)}"


def _divider(text: str) -> int:
    scheme = re.match(r"[a-z][a-z+]*://", text)
    return text.find(":/", scheme.end() if scheme else 0)


def divided(text: str) -> tuple[str, str]:
    """POOL, and the path in it where one is named, else "/". What is a directory here is a pool, whatever its name."""
    at = _divider(text)
    return (text[:at], text[at + 1:]) if at > 0 and not os.path.isdir(text) else (text, "/")


class PlaceType(click.ParamType):  # type: ignore[type-arg]  # generic only in newer click; 8.1 is supported
    """POOL:/path. POOL may hold colons of its own (HOST:PORT, a URL), so the first ':/' behind a URL's '://' divides."""

    name = "POOL:/path"

    def convert(self, value: str | Place, parameter: click.Parameter | None, context: click.Context | None) -> Place:
        if isinstance(value, Place):
            return value
        at = _divider(value)
        if at <= 0:
            self.fail(f"{value!r} is no place in a pool; write POOL:/path, as in /srv/pool:/data or 10.0.0.1:17512:/data",
                      parameter, context)
        if context is not None:
            remember_pool(context, parameter, value[:at])
        return Place(value[:at], os.fsencode(value[at + 1:]))


@asynccontextmanager
async def session(pool: str, doing: str) -> AsyncIterator[Client]:
    """A client of the pool; `doing` names it in the pool's logs. Errors as Client.open."""
    from nvpool.client.session import Client
    from nvpool.rpc.v1 import pool_pb2, wire_pb2
    # Says what is wrong with a directory, and what to do about a pool that does not run, long before the deadline of its work.
    await ask(pool, wire_pb2.POOL_MAP, pool_pb2.MapRequest(), pool_pb2.MapReply, wait_s=REACH_S)
    client = await Client.open(pool_behind(pool), name=f"nvpool {doing} pid {os.getpid()}")
    try:
        yield client
    finally:
        await client.close()


async def find(vfs: Vfs, path: bytes) -> Attr:
    """The Attr of what lies at `path`, symbolic links not followed. NotFound names the first part that is missing."""
    from nvpool.core.errors import NotFound
    from nvpool.core.ids import ROOT_INODE
    attr, walked = await vfs.getattr(ROOT_INODE), b""
    for name in (name for name in path.split(b"/") if name not in (b"", b".")):
        walked += b"/" + name
        try:
            attr = await vfs.lookup(attr.inode, name)
        except NotFound:
            raise NotFound(f"{os.fsdecode(walked)} does not exist in the pool") from None
    return attr
