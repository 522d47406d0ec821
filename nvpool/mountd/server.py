"""The mount daemon: mounts a pool at a mount point and serves it.

Run as `python -m nvpool.mountd.server [options] POOL MOUNTPOINT` by the CLI, by systemd or by hand. It stays
in the foreground. The exit codes are those of runtime/daemon_process. The daemon is ready when the mount
answers requests: then it notifies systemd and announces itself in the pool directory, if that is on this
machine.

The daemon ends when a user unmounts, or on SIGTERM or SIGINT. It unmounts while it still answers requests. If
files are open in the mount, the daemon immediately detaches it from the name space, and gives the users of
the files --drain-s seconds. Then it stores all written data and closes its session. A second signal shortens
the wait. No mount remains after any end, except after kill -9 without a holder: the next start with --force
removes that one.

With a holder (the default where it is possible) this process immediately becomes mountd/holder, and the code
here runs in a process that is forked off mountd/forkserver. Then kill -9 of any of the processes causes only
a pause.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import logging
import os
import socket
import sys
from functools import partial
from pathlib import Path

import nvpool
from nvpool.client.metrics import measure_client
from nvpool.client.pool_client import Client
from nvpool.core.clock import SYSTEM_CLOCK
from nvpool.core.config import Config, parse_address
from nvpool.core.endpoint import parse_endpoint
from nvpool.core.errors import InUse, InvalidRequest, NvpoolError, Unavailable
from nvpool.core.ids import ROOT_INODE
from nvpool.core.names import MEMBER_S
from nvpool.core.units import MIB
from nvpool.fuse.engines import Engine, engine_of, is_held, make_engine
from nvpool.fuse.mount_point import MountOptions, check_mount_point, set_read_ahead, unmount
from nvpool.fuse.ops.mount_views import directory_at, parts_of
from nvpool.fuse.ops.operations import FuseOps, FuseOptions
from nvpool.host.mountinfo import Mount, mount_at, place_of
from nvpool.host.pool_directory import PoolDirectory, announcement
from nvpool.host.process_identity import host_id, identity_of
from nvpool.metrics import registry as metrics
from nvpool.metrics.exposition import Page
from nvpool.metrics.http import serve_metrics
from nvpool.mountd.arguments import (
    client_options,
    configured_pool,
    given,
    is_read_only,
    keeps_requests,
    parse_words,
    start_mount_log,
)
from nvpool.mountd.holder_client import HolderClient, hand_to_holder
from nvpool.mountd.read_worker_pool import IdleWorker, ReadWorkerPool, fork_readers
from nvpool.poolmap.model import PoolMap
from nvpool.runtime.cpu_latency import CpuLatencyRequest
from nvpool.runtime.daemon_process import Stop, exit_code, notify_ready, run
from nvpool.runtime.metrics import own_page
from nvpool.runtime.scheduling import schedule
from nvpool.shm.mount_state import KeptMemory, Word

LEAVE_S = 5.0
"""Time to complete pending requests when a successor takes over on purpose.

Less than the holder's `LEAVE_S`.
"""
_ARENA_SHARE = 4
"""Size of the arena for unstored writes, in multiples of the bound for those writes.

Pieces take powers of two, and the places of one length stay together, so the arena must be larger.
"""

_OF_ONE = (metrics.BUILD_INFO, metrics.PROCESS_START, metrics.PROCESS_DESCRIPTORS_MAX)
"""Metrics that must not be summed over the processes of a mount.

Those of the serving process are reported.
"""

_CERTIFICATE_LOOK_S = min(600.0, MEMBER_S / 12)

log = logging.getLogger("nvpool.mountd.server")


def main(words: list[str]) -> int:
    arguments = parse_words(words)
    start_mount_log("mount", arguments)
    try:
        directory, config = configured_pool(arguments)
        engine = engine_of(arguments.engine or config.client.engine, writeback=arguments.writeback)
        with_holder = is_held(arguments.holder, engine)
        if (not with_holder or keeps_requests(arguments)) and (arguments.workers or 1) > 1:
            raise InvalidRequest(
                "several processes need a holder, which keeps what belongs to one that dies, and a kernel "
                "that hands requests out again; mount without --workers, or by engine kernel on Linux 6.9 "
                "and newer"
            )
        parts_of(arguments.subtree)
        if arguments.metrics:
            parse_address(arguments.metrics)
        place = check_mount_point(arguments.mountpoint, force=arguments.force)
        if with_holder:
            hand_to_holder([f"--log-format={arguments.log_format or config.log.format}", *words])
    except NvpoolError as error:
        log.error("%s", error)
        return exit_code(error)
    schedule(config.processors.scheduling)
    return run(lambda stop: _Mounted(arguments, directory, config, place, stop).serve())


def serve_held(arguments: argparse.Namespace, held: HolderClient, notices: socket.socket) -> int:
    """Serve the mount in a process that mountd/forkserver forked for it; return the exit code.

    `notices`: a socket to the process that sends notifications to the kernel for this one.
    """
    held.here()
    start_mount_log("mount", arguments)
    try:
        directory, config = configured_pool(arguments)
        place = place_of(arguments.mountpoint)  # checked before; a mount that is there now may be ours
        schedule(config.processors.scheduling)
        workers = 1 if keeps_requests(arguments) else given(arguments.workers, config.client.workers)
        # while this process is a copy without threads
        beside = fork_readers(workers - 1, arguments, config, held, notices)
    except NvpoolError as error:
        log.error("%s", error)
        code = exit_code(error)
    else:
        code = run(
            lambda stop: _Mounted(arguments, directory, config, place, stop, held, beside, notices).serve()
        )
    if held.serves or not held.goes_on:
        held.ended(code)
    return code


def directory_here(pool_map: PoolMap) -> PoolDirectory | None:
    """Directory of a pool that was named by an address, or None.

    The directory must be on this machine and writable. The mount is announced there, so that the pool's
    status shows it too.
    """
    for node in pool_map.nodes:
        if node.host_id == host_id():
            for endpoint in map(parse_endpoint, node.endpoints):
                directory = PoolDirectory(Path(endpoint.path).parent.parent) if endpoint.path else None
                if directory is not None and directory.exists() and os.access(directory.run, os.W_OK):
                    return directory
    return None


class _Mounted:
    def __init__(
        self,
        arguments: argparse.Namespace,
        directory: PoolDirectory | None,
        config: Config,
        place: Path,
        stop: Stop,
        held: HolderClient | None = None,
        beside: list[IdleWorker] | None = None,
        notices: socket.socket | None = None,
    ) -> None:
        self._arguments = arguments
        self._directory = directory
        self._config = config
        self._place = place
        self._stop = stop
        self._mount: Mount | None = None
        self._held = held
        self._engine = ""
        self._readers: ReadWorkerPool | None = None
        self._beside = beside or []
        self._notices = notices
        self._announcing: asyncio.Future | None = None

    async def serve(self) -> None:
        arguments, section, held = self._arguments, self._config.client, self._held
        kept = None
        if held is not None:
            held.on_stop = lambda: self._stop.ask("the holder says so")
            kept = held.memory(_ARENA_SHARE * max(section.write_buffer_bytes, 64 * MIB))
            if held.goes_on:
                if not await held.wait_for_our_turn():
                    return
                held.end_readers()
                kept = held.memory(0)  # read again: from now on no other process changes it
            held.serves = True
            held.on_holder = self._announce_holder
            held.listen()
        client = await Client.open(
            arguments.pool, name=f"mount {self._place}", kept=kept, options=client_options(arguments, section)
        )
        try:
            root = await self._root(client, kept)
        except BaseException:
            await client.close()
            raise
        ops = FuseOps(
            client.vfs,
            FuseOptions(
                given(arguments.attr_timeout_s, section.attr_timeout_s),
                given(arguments.entry_timeout_s, section.entry_timeout_s),
                given(arguments.negative_timeout_s, 0.0),
                arguments.writeback,
            ),
            root=root,
            read_only=is_read_only(arguments),
        )
        # A user other than root may pass allow_other only where /etc/fuse.conf permits it; such a user adds
        # -o allow_other.
        options = MountOptions(
            client.pool_map.name,
            is_read_only(arguments),
            not os.geteuid() and not arguments.no_allow_other,
            tuple(arguments.extra),
            arguments.max_read,
            arguments.max_background,
            arguments.congestion_threshold,
            arguments.writeback,
            self._source(client.pool_map.name),
            not arguments.no_acl,
        )
        if self._directory is None:
            self._directory = directory_here(client.pool_map)
        renewing = asyncio.ensure_future(self._keep_certificate(client))
        awake = CpuLatencyRequest(self._config.processors.awake)
        keeps = held is not None and (held.has_requests if held.goes_on else keeps_requests(arguments))
        engine = make_engine(
            arguments.engine or section.engine,
            ops,
            self._place,
            options,
            self._ready,
            awake.touch,
            held.requests if keeps else None,
        )
        self._engine = engine.name
        if held is not None:
            ops.published.on = bool(self._beside)
            self._readers = ReadWorkerPool(
                held, engine, self._beside, lambda pid: self._announce("reader", pid)
            )
        scraping: asyncio.Future | None = None
        name = f"mount-{os.getpid()}"
        try:
            if held is not None and held.goes_on:
                self._mount = engine.go_on(held.fuse)
                await ops.take_over()
            else:
                self._mount = engine.mount()
                if held is not None:
                    held.keep(engine.descriptor)
                set_read_ahead(self._mount, arguments.read_ahead)
            if held is not None:
                await engine.notices.send_by_process(self._notices, engine.descriptor)
            serving = asyncio.ensure_future(engine.serve())
            asked = asyncio.ensure_future(self._stop.asked.wait())
            left = asyncio.ensure_future(held.left.wait() if held is not None else asyncio.Future())
            if self._arguments.metrics:
                scraping = asyncio.ensure_future(
                    serve_metrics(self._arguments.metrics, partial(self._page, client, engine))
                )
            gc.freeze()  # the collector need never visit the objects that exist now
            await asyncio.wait([serving, asked, left], return_when=asyncio.FIRST_COMPLETED)
            if left.done() and not serving.done() and not asked.done():
                self._readers.let_go()
                await engine.leave(LEAVE_S)
                self._readers.end()
                log.info("another process continues to serve")
                logging.shutdown()
                os._exit(0)  # as if killed: an orderly end would take resources from the successor
            left.cancel()
            if not serving.done():
                await self._leave(serving)
                engine.stop()
            asked.cancel()
            await serving
            await ops.drain()
        finally:
            if held is not None:
                self._readers.end()
                held.drop()
            engine.close()
            if scraping is not None:
                scraping.cancel()
            renewing.cancel()
            awake.close()
            await client.close()
            if self._announcing is not None:
                await asyncio.wait([self._announcing])
            if self._directory is not None:
                self._directory.withdraw(name)

    async def _root(self, client: Client, kept: KeptMemory | None) -> int:
        """Inode of the mounted directory.

        The first process finds it by path; a successor takes the recorded one.
        """
        subtree = self._arguments.subtree
        if self._held is not None and self._held.goes_on:
            return kept.word(Word.ROOT) or ROOT_INODE
        if not parts_of(subtree):
            return ROOT_INODE
        finding = asyncio.ensure_future(directory_at(client.vfs, subtree))
        asked = asyncio.ensure_future(self._stop.asked.wait())
        await asyncio.wait([finding, asked], return_when=asyncio.FIRST_COMPLETED)
        asked.cancel()
        if not finding.done():
            finding.cancel()
            raise Unavailable(f"the mount was to end before {subtree} was found in the pool")
        root = finding.result()
        if kept is not None:
            kept.set_word(Word.ROOT, root)
        return root

    def _source(self, name: str) -> str:
        parts = parts_of(self._arguments.subtree)
        return self._arguments.source or f"nvpool:{name}" + (
            ":/" + os.fsdecode(b"/".join(parts)) if parts else ""
        )

    async def _page(self, client: Client, engine: Engine, wait_s: float) -> Page:
        """The metrics of all processes of this mount, summed."""

        def measure(page: Page) -> None:
            page.set(metrics.UP, 1)
            engine.measure(page)
            measure_client(client.vfs, page)

        page = own_page(measure)
        beside = await self._readers.pages(wait_s) if self._readers is not None else []
        for other in beside:
            page.add(other, without=_OF_ONE)
        page.set(metrics.MOUNT_WORKERS, 1 + len(beside))
        return page

    async def _keep_certificate(self, client: Client) -> None:
        """Load the certificate again as the supervisor renews it.

        If the pool is named by a client's directory, the client renews and loads the certificate itself.
        """
        identity = client.dialer.greeting.identity
        place = PoolDirectory(self._arguments.pool)
        if identity is None or not identity.secured or not place.exists() or not place.node:
            return
        while True:
            await asyncio.sleep(_CERTIFICATE_LOOK_S)
            try:
                identity.refresh()
            except NvpoolError as error:
                log.error("the renewed certificate cannot be used: %s", error)

    def _announce(self, role: str, pid: int, pause_ms: int = 0) -> None:
        identity = identity_of(pid)
        if self._directory is not None and identity is not None:
            self._directory.announce(
                f"{role}-{pid}",
                announcement(
                    role,
                    mountpoint=str(self._place),
                    software=f"nvpool {nvpool.__version__}",
                    engine=self._engine,
                    now_ms=SYSTEM_CLOCK.wall_ns() // 1_000_000,
                    pause_ms=pause_ms,
                    identity=identity,
                ),
            )

    def _announce_holder(self) -> None:
        if self._held is not None:
            self._announce("holder", self._held.holder_pid)

    def _ready(self) -> None:
        pause_ms = 0
        if self._held is None:
            notify_ready()
        else:
            self._readers.start()
            self._held.ready()
            if self._held.goes_on and self._held.since_s:
                pause_ms = int((SYSTEM_CLOCK.boottime_s() - self._held.since_s) * 1000)
        # In a thread: all callers wait for this process now, and a busy drive can be slow even for a small
        # file.
        self._announcing = asyncio.ensure_future(asyncio.to_thread(self._announce_us, pause_ms))
        if pause_ms:
            log.info("this process goes on at %s after a pause of %d ms", self._place, pause_ms)
        else:
            log.info("mounted at %s", self._place)

    def _announce_us(self, pause_ms: int) -> None:
        self._announce("mount", os.getpid(), pause_ms)
        self._announce_holder()
        if self._directory is not None:
            self._directory.states()  # removes announcements of processes that no longer run

    async def _leave(self, serving: asyncio.Future) -> None:
        """Unmount while this process still answers.

        Returns when the mount is unused or its users' time is over.
        """
        gone = asyncio.ensure_future(asyncio.to_thread(self._unmount))
        hurry = asyncio.ensure_future(self._stop.hurry.wait())
        await asyncio.wait([gone, hurry], return_when=asyncio.FIRST_COMPLETED)
        await asyncio.wait(
            [serving, hurry], timeout=self._arguments.drain_s, return_when=asyncio.FIRST_COMPLETED
        )
        hurry.cancel()

    def _unmount(self) -> None:
        there = mount_at(self._place)
        if there is None or self._mount is None or there.device != self._mount.device:
            return  # not mounted here any more; another name space has a copy
        try:
            unmount(self._place)
        except InUse:
            log.warning(
                "files are open in %s: it is detached, they get %.0f s", self._place, self._arguments.drain_s
            )
            unmount(self._place, lazy=True)
        except NvpoolError as error:
            log.warning("%s", error)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
