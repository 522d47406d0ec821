"""Supervisor daemon: `nvpoold DIR`, also `nvpool serve DIR` and `python -m nvpool.daemons.nvpoold DIR`.

Runs in the foreground, under systemd or in a terminal, until SIGTERM or SIGINT. Started by an operator, by
`nvpool dev up`, or by an orphaned child with --inherit-lock; then it leaves that child's process immediately
by a fork, before any large import. It takes DIR/lock before it touches anything else: a second daemon on one
directory is refused with the pid of the first.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import sys

from nvpool.core.config import load
from nvpool.core.errors import Fenced, InvalidRequest, NotFound, NvpoolError, WrongFormat
from nvpool.host.pool_directory import Flock, PoolDirectory
from nvpool.host.pool_directory_modes import group_number, protect

log = logging.getLogger("nvpool.daemons.nvpoold")


def _arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        "nvpoold",
        description="Serve the part of a pool that is on this node, in the foreground.",
        epilog="example: nvpoold /srv/pool   (make one with: nvpool pool create /srv/pool --drive PATH)",
    )
    parser.add_argument("directory", metavar="DIR", help="pool directory of this node")
    parser.add_argument(
        "--log",
        choices=("file", "stderr"),
        help="where to write the log (default: the terminal, else as node.toml says)",
    )
    parser.add_argument("--inherit-lock", type=int, metavar="FD", help=argparse.SUPPRESS)
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    arguments = _arguments(argv)
    directory = PoolDirectory(arguments.directory)
    if arguments.inherit_lock is not None and os.fork():
        os._exit(0)  # our parent waits only for this process; the child's descriptor holds the lock
    from nvpool.runtime import daemon_process, logging_setup, scheduling  # heavy: after the fork

    logging_setup.start_log("nvpoold", "info", None)
    try:
        directory.check()
        if directory.node == 0:
            raise InvalidRequest(
                f"{directory.path} is a client's directory, which serves nothing; mount it with: nvpool mount "
                f"{directory.path} MOUNTPOINT"
            )
        config = load(directory.node_toml)
        if arguments.inherit_lock is not None:
            lock = Flock.inherited(arguments.inherit_lock, directory.lock)
        else:
            lock = Flock.take(directory.lock, f"the pool directory {directory.path}")
            check_formats(directory)
        protect(directory, group_number(config.access.operators, "access.operators"))
    except NvpoolError as error:
        log.error("%s", error)
        return daemon_process.exit_code(error)
    to_file = (arguments.log or ("stderr" if sys.stderr.isatty() else config.log.to)) == "file"
    logging_setup.start_log(
        "nvpoold",
        config.log.level,
        directory.log / "nvpoold.log" if to_file else None,
        form=config.log.format,
        node_toml=directory.node_toml,
    )
    scheduling.schedule(config.processors.scheduling)
    try:
        return daemon_process.run(lambda stop: _serve(directory, config, stop))
    finally:
        lock.release()


def check_formats(directory: PoolDirectory) -> None:
    """Raise WrongFormat if a part of the pool on this node has another format. Then nothing is started.

    A daemon of such a part would only end again and again. Missing parts are left to their daemons: a missing
    drive must not stop the others.
    """
    from pathlib import Path

    from nvpool.kv.data_dir import FORMAT
    from nvpool.poolmap.shards.members import endpoints_of, members, node_and_path
    from nvpool.runtime.daemon_lifecycle import read_map
    from nvpool.store.chunks.api import FORMAT_TEXT

    try:
        pool_map = read_map(directory)
    except NvpoolError:
        return  # the coordinator writes the file again from its records
    paths = {drive.id: drive.path for drive in pool_map.drives}
    node = directory.node
    stores = [
        directory.store(paths[target.drive], target.id)
        for target in pool_map.targets
        if target.node == node and target.state != "gone"
    ]
    # The path of a member without endpoints is that of the store beside which the member is to be created.
    places = [
        (shard, *node_and_path(shard, member))
        for shard in pool_map.shards
        for member in members(shard)
        if endpoints_of(shard, member)
    ]
    shards = [
        Path(path) if path else directory.shard(shard.id) for shard, where, path in places if where == node
    ]
    parts = [
        (directory.map, FORMAT),
        *((shard, FORMAT) for shard in shards),
        *((store, FORMAT_TEXT) for store in stores),
        *((store / "index", FORMAT) for store in stores),
    ]
    for path, known in parts:
        try:
            found = (path / "FORMAT").read_bytes()
        except OSError:
            continue
        if found != known.encode():
            raise WrongFormat(
                f"{path} has the format {found[:40].decode(errors='replace').strip()!r}, this nvpool knows "
                f"{known.strip()!r}; use the version of nvpool that made it. Nothing was started"
            )


async def _serve(directory: PoolDirectory, config, stop) -> None:
    from nvpool.core.clock import SYSTEM_CLOCK
    from nvpool.core.endpoint import parse_endpoint
    from nvpool.host.pool_directory import announcement
    from nvpool.node.admin.certificate_renewal import settle_keys
    from nvpool.node.coordination.map_backend import MapBackend
    from nvpool.node.supervisor import Supervisor
    from nvpool.rpc.api import Greeting
    from nvpool.runtime.daemon_lifecycle import follow_members, is_wanted, limits_of, listen_on
    from nvpool.security.tls import identity_in

    failed: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def fence(reason: str) -> None:
        """End the process because the map's records may not be trusted.

        The next supervisor reads the drive.
        """
        if not failed.done():
            failed.set_exception(Fenced(reason))
            failed.exception()  # mark as retrieved, in case the process ends for another reason

    settle_keys(directory)
    keeper = await MapBackend.open(directory, config, fence)
    coordinator = keeper.relay
    directory.keep_reserve()
    pool_map = coordinator.pool_map
    if directory.node not in pool_map.node_by_id:
        raise NotFound(
            f"this node was removed from the pool, and serves nothing; what it had can go: nvpool pool destroy "
            f"{directory.path}"
        )
    identity = identity_in(directory.secret, pool_map.pool_id, config.network.plain_text)
    greeting = Greeting("supervisor", pool_map.fingerprint, identity=identity, limits=limits_of(config))
    supervisor = Supervisor(directory, config, coordinator, stop, failed, directory.node, greeting, keeper)
    listeners = []
    try:
        follow_members(identity, pool_map)
        directory.make_socket_directory()
        endpoints = tuple(
            endpoint
            for endpoint in pool_map.node_by_id[directory.node].endpoints
            if is_wanted(endpoint, config.network)
        )
        for endpoint in endpoints:
            where = parse_endpoint(endpoint)
            secured = identity is not None and identity.covers(where)
            listeners += await listen_on(
                (endpoint,),
                greeting._replace(admit_unauthenticated=secured, local_users=True),
                supervisor.handle_secured if secured else supervisor.handle,
            )
        directory.show_socket([path for endpoint in endpoints if (path := parse_endpoint(endpoint).path)])
        directory.announce(
            "supervisor",
            announcement("supervisor", endpoints=endpoints, now_ms=SYSTEM_CLOCK.wall_ns() // 1_000_000),
        )
        await supervisor.run()
    finally:
        directory.withdraw("supervisor")
        await supervisor.close()
        for listener in listeners:
            await listener.close(0.0)
        await keeper.close(config.supervisor.drain_s, stop.hurry, stop=stop.asked.is_set())


if __name__ == "__main__":
    sys.exit(main())
