"""Parser of POOL:/path arguments, and a client session for the duration of a command.

The commands that work on files and directories of a pool use this module. Parsing does not check the pool:
whether the pool exists shows when the session opens.
"""

from __future__ import annotations

import os
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, NamedTuple

import click

from nvpool.cli.output import remember_pool
from nvpool.cli.pool_connection import REACH_S, ask
from nvpool.cli.pool_suggestions import pool_behind

if TYPE_CHECKING:
    from nvpool.client.pool_client import Client
    from nvpool.client.vfs.filesystem import Vfs
    from nvpool.rpc.messages.meta_messages import Attr


class PoolPath(NamedTuple):
    pool: str
    path: bytes

    def __str__(self) -> str:
        return f"{self.pool}:{os.fsdecode(self.path)}"


def _divider(text: str) -> int:
    scheme = re.match(r"[a-z][a-z+]*://", text)
    return text.find(":/", scheme.end() if scheme else 0)


def divided(text: str) -> tuple[str, str]:
    """Split `text` into the pool and the path in it, which is "/" if `text` names no path.

    A text that is the path of a local directory is a pool, even if it contains ":/".
    """
    at = _divider(text)
    return (text[:at], text[at + 1 :]) if at > 0 and not os.path.isdir(text) else (text, "/")


class PlaceType(click.ParamType):  # type: ignore[type-arg]  # generic only in newer click; 8.1 is supported
    """Click type of POOL:/path.

    POOL may contain colons (HOST:PORT, a URL), so the text is split at the first ':/' after the '://' of a
    URL.
    """

    name = "POOL:/path"

    def convert(
        self, value: str | PoolPath, parameter: click.Parameter | None, context: click.Context | None
    ) -> PoolPath:
        if isinstance(value, PoolPath):
            return value
        at = _divider(value)
        if at <= 0:
            self.fail(
                f"{value!r} is not a place in a pool; write POOL:/path, as in /srv/pool:/data or 10.0.0.1:17512:/data",
                parameter,
                context,
            )
        if context is not None:
            remember_pool(context, parameter, value[:at])
        return PoolPath(value[:at], os.fsencode(value[at + 1 :]))


@asynccontextmanager
async def session(pool: str, doing: str) -> AsyncIterator[Client]:
    """Open a client of the pool; `doing` names the client in the pool's logs. Errors as `Client.open`."""
    from nvpool.client.pool_client import Client
    from nvpool.rpc.v1 import pool_pb2, wire_pb2

    # Reports a wrong directory, or a pool that does not run, long before the deadline of `Client.open`.
    await ask(pool, wire_pb2.POOL_MAP, pool_pb2.MapRequest(), pool_pb2.MapReply, wait_s=REACH_S)
    client = await Client.open(pool_behind(pool), name=f"nvpool {doing} pid {os.getpid()}")
    try:
        yield client
    finally:
        await client.close()


async def find(vfs: Vfs, path: bytes) -> Attr:
    """Return the attributes of `path`, not following links. NotFound names the first missing part."""
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
