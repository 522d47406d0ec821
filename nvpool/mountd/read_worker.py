"""Read worker: a process that answers read requests beside the serving process of a mount.

It is forked from the serving process (mountd/read_worker_pool) and has a client of its own, which only opens
and reads files. The worker ends when the serving process ends or closes its socket, and when
the mount is gone. SIGTERM does not end it: a service manager sends that to all processes of a mount.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import socket

from nvpool.client.metrics import measure_client
from nvpool.client.pool_client import Client
from nvpool.core.config import Config
from nvpool.core.errors import NvpoolError
from nvpool.fuse.kernel.read_worker import ReadWorkerEngine
from nvpool.fuse.kernel.read_worker_channel import Channel
from nvpool.fuse.ops.read_worker import LOOK_S, ReadWorkerOps
from nvpool.metrics.exposition import Page
from nvpool.mountd.arguments import client_options, start_mount_log
from nvpool.runtime.cpu_latency import CpuLatencyRequest
from nvpool.runtime.daemon_process import run
from nvpool.runtime.metrics import own_page
from nvpool.shm.mount_state import KeptHandles

LEAVE_S = 0.5
"""Time to complete pending requests.

The kernel resends the rest to the next process if the mount continues.
"""
CLOSE_S = 1.0

log = logging.getLogger("nvpool.mountd.read_worker")


async def serve(
    arguments: argparse.Namespace, config: Config, connection: socket.socket, clone: int, memory: int
) -> None:
    client = await Client.open(
        arguments.pool,
        name=f"mount {arguments.mountpoint} reader",
        options=client_options(arguments, config.client)._replace(leases=False),
    )
    awake = CpuLatencyRequest(config.processors.awake)
    ops = ReadWorkerOps(client.vfs, KeptHandles(memory))

    def measure(page: Page) -> None:
        engine.measure(page)
        measure_client(client.vfs, page)

    engine = ReadWorkerEngine(ops, Channel(connection, 4096), awake.touch, lambda: own_page(measure).pack())
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


async def _close_old(ops: ReadWorkerOps) -> None:
    while True:
        await asyncio.sleep(LOOK_S)
        try:
            await ops.close_old()
        except NvpoolError as error:
            log.warning("a file that was read here is not closed: %s", error)


def wait_and_read(arguments: argparse.Namespace, config: Config, connection: socket.socket) -> int:
    """Run the worker and return its exit code. It reads nothing until the serving process permits it."""
    start_mount_log("reader", arguments)
    said, descriptors, _, _ = socket.recv_fds(connection, 1, 2, socket.MSG_CMSG_CLOEXEC)
    if not said:
        return 0
    clone, memory = descriptors
    return run(lambda _: serve(arguments, config, connection, clone, memory))
