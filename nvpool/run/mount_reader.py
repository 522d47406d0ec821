"""A process that reads for the one that serves a mount: `python -m nvpool.run.mount_reader --reader=… [options] POOL
MOUNTPOINT`, with the words of run/mount_daemon, by which it is started.

It is a client of its own, which opens files to read them and does nothing else. It ends when the serving process does or closes
its socket, and when the mount is gone; never by SIGTERM, which a service manager sends to all of a mount's processes.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import socket
import sys
from pathlib import Path

from nvpool.base.config import Config, load
from nvpool.base.directory import PoolDirectory
from nvpool.base.errors import NvpoolError
from nvpool.base.kept import KeptHandles
from nvpool.client.session import Client
from nvpool.fuse.passing import Channel
from nvpool.fuse.reader_engine import ReaderEngine
from nvpool.fuse.reader_ops import LOOK_S, ReaderOps
from nvpool.run.awake import Awake
from nvpool.run.daemon import run, start_log
from nvpool.run.mount_daemon import client_options, parse_words

LEAVE_S = 0.5
"""For what is in work. What is left the kernel hands out again, where the mount goes on."""
CLOSE_S = 1.0

log = logging.getLogger("nvpool.run.reader")


async def serve(arguments: argparse.Namespace, config: Config, control: int, clone: int, memory: int) -> None:
    client = await Client.open(arguments.pool, name=f"mount {arguments.mountpoint} reader",
                               options=client_options(arguments, config.client)._replace(leases=False))
    awake = Awake(config.processors.awake)
    ops = ReaderOps(client.vfs, KeptHandles(memory))
    connection = socket.socket(fileno=control)
    engine = ReaderEngine(ops, Channel(connection, 4096), awake.touch)
    engine.adopt(clone)
    serving = asyncio.ensure_future(engine.serve())
    alone = asyncio.ensure_future(engine.alone.wait())
    closing = asyncio.ensure_future(_close_old(ops))
    try:
        await asyncio.wait([serving, alone], return_when=asyncio.FIRST_COMPLETED)
        if alone.done():
            await engine.leave(LEAVE_S)
        log.info("this process has answered %d requests and passed %d on", engine.answered, engine.passed)
    finally:
        for task in (serving, alone, closing):
            task.cancel()
        await asyncio.gather(serving, alone, closing, return_exceptions=True)
        os.close(clone)
        connection.close()
        awake.close()
        await client.close(CLOSE_S)


async def _close_old(ops: ReaderOps) -> None:
    while True:
        await asyncio.sleep(LOOK_S)
        try:
            await ops.close_old()
        except NvpoolError as error:
            log.warning("a file that was read here is not closed: %s", error)


def main(words: list[str]) -> int:
    control, clone, memory = map(int, words.pop(0).partition("=")[2].split(","))
    arguments = parse_words(words)
    start_log("reader", arguments.log_level, arguments.log)
    for descriptor in (control, clone, memory):
        os.set_inheritable(descriptor, False)
    directory = PoolDirectory(arguments.pool) if "://" not in arguments.pool and Path(arguments.pool).is_dir() else None
    config = load(directory.node_toml) if directory is not None else Config()
    return run(lambda _: serve(arguments, config, control, clone, memory))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
