"""Bridge daemon: gives containers volumes of a pool, through Docker's plugin protocol and Kubernetes' CSI.

Run as `python -m nvpool.daemons.bridge POOL`, by the CLI (`nvpool bridge`) or by systemd; stays in the
foreground, one per state directory. Exit codes as in runtime/daemon_process. The daemon is ready when its
sockets answer. When it ends, in whatever way, containers continue: they use mounts, which have their own
processes. The next bridge reads from the state directory which container uses which volume.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import logging
import os
import socket
import sys
from functools import partial
from pathlib import Path

from nvpool.bridge.docker import FACE, DockerFace, check_path
from nvpool.bridge.metrics import BridgeMetrics
from nvpool.bridge.pool_mount import PoolMount
from nvpool.bridge.request_validation import checked_holder
from nvpool.bridge.volumes import SETTLED_S, BridgeVolumes, our_errors
from nvpool.client.state.options import configured
from nvpool.core.clock import SYSTEM_CLOCK
from nvpool.core.config import Config, load, parse_address
from nvpool.core.errors import (
    AccessDenied,
    BadConfiguration,
    NvpoolError,
    Refused,
    Unavailable,
    from_os_error,
)
from nvpool.core.programs import Program
from nvpool.host.pool_directory import Flock, PoolDirectory
from nvpool.metrics import registry as metrics
from nvpool.metrics.exposition import Page
from nvpool.metrics.http import serve_metrics
from nvpool.runtime.daemon_process import Stop, exit_code, keep_alive, notify_ready, run
from nvpool.runtime.logging_setup import start_log
from nvpool.runtime.metrics import own_page
from nvpool.runtime.scheduling import schedule
from nvpool.sdk.async_filesystem import AsyncFileSystem

STATE = Path("/var/lib/nvpool-bridge")
DOCKER_SOCKET = Path("/run/docker/plugins/nvpool.sock")
CLIENT_DEADLINE_S = 20.0
"""Deadline of one request to the pool: an engine's request may need several, and has 50 s."""
UPKEEP_S = 30.0

log = logging.getLogger("nvpool.daemons.bridge")


def parse_words(words: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog=f"python -m {Program.BRIDGE.module}", description="Volumes of a pool for containers."
    )
    parser.add_argument(
        "pool", help="directory of a pool or of a client on this machine, or HOST:PORT of any node"
    )
    parser.add_argument("--state", type=Path, default=STATE, help=f"directory of the bridge's own ({STATE})")
    parser.add_argument(
        "--mountpoint",
        type=Path,
        help="where the whole pool is mounted, or will be (pool in the state directory)",
    )
    parser.add_argument("--docker-socket", default=str(DOCKER_SOCKET), help=f"empty: none ({DOCKER_SOCKET})")
    parser.add_argument(
        "--no-mount", action="store_true", help="use the mount at --mountpoint; make none where there is none"
    )
    parser.add_argument(
        "--csi", default="", metavar="ADDRESS", help="serve CSI at this unix socket, as unix:///csi/csi.sock"
    )
    parser.add_argument(
        "--csi-controller", action="store_true", help="CSI's Controller service, and not Node"
    )
    parser.add_argument("--csi-node", action="store_true", help="CSI's Node service, and not Controller")
    parser.add_argument(
        "--csi-pool", default="", help="how nodes are labeled that have the pool (the pool's name)"
    )
    parser.add_argument(
        "--metrics",
        metavar="HOST:PORT",
        default="",
        help="serve metrics for Prometheus at http://HOST:PORT/metrics",
    )
    parser.add_argument(
        "--settled-s",
        type=float,
        default=SETTLED_S,
        help=f"from which age on a use of a volume without a container counts as lost ({SETTLED_S:.0f})",
    )
    parser.add_argument("--node", default="", help="name of this host for the pool (its host name)")
    parser.add_argument("--log", type=Path, help="file to log to (stderr)")
    parser.add_argument(
        "--log-level", choices=["debug", "info", "warning", "error"], help="as node.toml says, info"
    )
    parser.add_argument("--log-format", choices=["text", "json"], help="as node.toml says, text")
    return parser.parse_args(words)


def mount_words(arguments: argparse.Namespace) -> tuple[str, ...]:
    """Arguments of the mount that the bridge makes: it uses the log settings of the bridge."""
    options = (("--log-level", arguments.log_level), ("--log-format", arguments.log_format))
    return tuple(f"{word}={value}" for word, value in options if value)


def _check_words(arguments: argparse.Namespace) -> None:
    """Check the arguments before anything is created. BadConfiguration."""
    if arguments.csi:
        from nvpool.bridge.csi.server import check_label, socket_path

        socket_path(arguments.csi)
        if arguments.csi_pool:
            check_label(arguments.csi_pool)
    if arguments.docker_socket:
        check_path(Path(arguments.docker_socket))
    for word, given, check in (
        ("--metrics", arguments.metrics, parse_address),
        ("--node", arguments.node, checked_holder),
    ):
        if given:
            try:
                check(given)
            except Refused as error:
                raise BadConfiguration(f"{word}: {error}") from None


def main(words: list[str]) -> int:
    arguments = parse_words(words)
    # gRPC's fork handlers kill the child processes that make bind mounts before they start (SIGSEGV; gRPC
    # 1.85).
    os.environ["GRPC_ENABLE_FORK_SUPPORT"] = "0"
    config, directory = Config(), PoolDirectory(arguments.pool)
    try:
        here = "://" not in arguments.pool and directory.exists()
        if here:
            directory.check()
            config = load(directory.node_toml)
        start_log(
            "bridge",
            arguments.log_level or config.log.level,
            arguments.log,
            form=arguments.log_format or config.log.format,
            node_toml=directory.node_toml if here and arguments.log_level is None else None,
        )
        schedule(config.processors.scheduling)
        if os.geteuid():
            raise AccessDenied("the bridge makes mounts for containers; run it as root")
        if not arguments.docker_socket and not arguments.csi:
            raise BadConfiguration("the bridge has no socket to answer at; give it --docker-socket or --csi")
        _check_words(arguments)
        arguments.state.mkdir(mode=0o700, parents=True, exist_ok=True)
        lock = Flock.take(arguments.state / "lock", f"the state directory {arguments.state}")
    except NvpoolError as error:
        start_log("bridge", "info", arguments.log, form=arguments.log_format or config.log.format)
        log.error("%s", error)
        return exit_code(error)
    except OSError as error:
        log.error("%s", from_os_error(error, f"use {arguments.state}"))
        return 1
    try:
        place = Path(os.path.abspath(arguments.mountpoint or arguments.state / "pool"))
        return run(lambda stop: _serve(arguments, config, place, stop))
    finally:
        lock.release()


async def _serve(arguments: argparse.Namespace, config: Config, place: Path, stop: Stop) -> None:
    node = arguments.node or socket.gethostname()
    with our_errors():
        pool = await AsyncFileSystem.connect(
            arguments.pool,
            name=f"bridge {node}",
            options=configured(config.client)._replace(deadline_s=CLIENT_DEADLINE_S, short_circuit=False),
        )
    try:
        name = pool.client.pool_map.name
        mount = PoolMount(arguments.pool, name, place, mount_words(arguments), make=not arguments.no_mount)
        volumes = BridgeVolumes(
            pool, mount.place, arguments.state, node=node, mounted=mount.ensure, settled_s=arguments.settled_s
        )
        await volumes.begin()
        counts = BridgeMetrics()
        docker = DockerFace(volumes, counts=counts) if arguments.docker_socket else None
        if docker is not None:
            await docker.start(Path(arguments.docker_socket))
            log.info("volumes of the pool %s for Docker at %s, as %s", name, arguments.docker_socket, node)
        try:
            async with asyncio.TaskGroup() as tasks:
                upkeep = [tasks.create_task(keep_alive()), tasks.create_task(_keep_up(volumes, docker))]
                if arguments.metrics:
                    upkeep.append(
                        tasks.create_task(serve_metrics(arguments.metrics, partial(_page, volumes, counts)))
                    )
                if arguments.csi:
                    answers = asyncio.Event()
                    upkeep.append(tasks.create_task(_serve_csi(volumes, arguments, name, answers, counts)))
                    await answers.wait()
                # only now: a bridge that could not listen leaves no mount behind
                if arguments.docker_socket or arguments.csi_node or not arguments.csi_controller:
                    try:
                        await mount.ensure()
                    except Unavailable as error:
                        log.warning("%s; it is tried again with the first volume that is used", error)
                notify_ready()
                await stop.asked.wait()
                for task in upkeep:
                    task.cancel()
        except BaseExceptionGroup as group:
            if len(group.exceptions) == 1 and isinstance(group.exceptions[0], NvpoolError):
                raise group.exceptions[0] from None  # the message is sufficient without the group
            raise
        finally:
            if docker is not None:
                await docker.close()
    finally:
        await pool.close()


async def _page(volumes: BridgeVolumes, counts: BridgeMetrics, wait_s: float) -> Page:
    def measure(page: Page) -> None:
        page.set(metrics.UP, 1)
        counts.measure(page)
        in_use, unreported = volumes.uses()
        page.set(metrics.BRIDGE_USES, in_use)
        page.set(metrics.BRIDGE_UNREPORTED, unreported)

    return own_page(measure)


async def _serve_csi(
    volumes: BridgeVolumes,
    arguments: argparse.Namespace,
    name: str,
    answers: asyncio.Event,
    counts: BridgeMetrics,
) -> None:
    from nvpool.bridge.csi.server import serve_csi  # here: gRPC takes 30 MB, unused for Docker

    await serve_csi(
        volumes,
        arguments.csi,
        pool=arguments.csi_pool or name,
        started=answers.set,
        counts=counts,
        controller=arguments.csi_controller or not arguments.csi_node,
        node=arguments.csi_node or not arguments.csi_controller,
    )


async def _keep_up(volumes: BridgeVolumes, docker: DockerFace | None) -> None:
    """Report ended uses of volumes to the pool periodically; reconcile uses after an engine starts.

    After a start of an engine the uses are reconciled until what was found has settled.
    """
    activated, look_until_s = docker.activated if docker is not None else asyncio.Event(), 0.0
    while True:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(UPKEEP_S):
                await activated.wait()
        if activated.is_set():
            activated.clear()
            look_until_s = SYSTEM_CLOCK.boottime_s() + volumes.settled_s + UPKEEP_S
        try:
            if SYSTEM_CLOCK.boottime_s() <= look_until_s:
                await volumes.reconcile(FACE)
            await volumes.settle()
        except NvpoolError as error:
            log.warning("what is in use could not be looked at: %s", error)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
