"""The commands `nvpool dev`: a throw-away pool on this machine, under one directory."""

from __future__ import annotations

import asyncio
import os
from typing import TYPE_CHECKING, Any

import click

from nvpool.cli.output import ByteSize, json_option, print_json, say
from nvpool.core import config as configuration
from nvpool.core.errors import AccessDenied, InvalidRequest, NotADirectory, NotFound, from_os_error
from nvpool.core.units import CHUNK_BYTES_DEFAULT, GIB, MIB, format_bytes
from nvpool.host.pool_directory import PoolDirectory, being_made

if TYPE_CHECKING:
    from nvpool.cli.dev_up_rollback import DevUpRollback


@click.group(
    epilog="""\b
examples:
  nvpool dev up /tmp/pool --mount /mnt/pool
  nvpool dev down /tmp/pool
"""
)
def dev() -> None:
    """Create and remove a throw-away pool on this machine, under one directory."""


def default_sizes(count: int, free_bytes: int) -> list[int]:
    """Return the sizes of new drives: 8 and 16 GiB in turn, in sparse files.

    The sizes are smaller if their sum exceeds four fifths of the free space.
    """
    sizes = [8 * GIB if number % 2 == 0 else 16 * GIB for number in range(count)]
    share = min(1.0, 0.8 * free_bytes / sum(sizes))
    return [max(128 * MIB, int(size * share) // MIB * MIB) for size in sizes]


async def _give_to_us(pool: str) -> None:
    """Give the root directory of the new pool to the current user.

    Otherwise the directory belongs to root, and another user could create nothing in his own pool.
    """
    from nvpool.cli.pool_path import session
    from nvpool.client.state.vfs_types import Caller
    from nvpool.core.ids import ROOT_INODE

    async with session(pool, "dev up") as client:
        await client.vfs.setattr(
            ROOT_INODE, uid=os.geteuid(), gid=os.getegid(), caller=Caller(0, 0, os.getpid())
        )


@dev.command(
    epilog="""\b
examples:
  nvpool dev up /tmp/pool
  nvpool dev up /tmp/pool --drives 4 --mount /mnt/pool
  nvpool dev up /tmp/pool --size 1G --size 3G
  nvpool dev up /tmp/pool --mount /mnt/pool --engine pyfuse3
"""
)
@click.argument("directory", metavar="DIR", type=click.Path(file_okay=False))
@click.option(
    "--drives",
    type=click.IntRange(1, 64),
    help="Number of targets; default: 2, or the number of --size options.",
)
@click.option(
    "--standbys",
    type=click.IntRange(0, 4),
    default=0,
    help="Further copies of the metadata, at most one per drive.",
)
@click.option(
    "--shards",
    type=click.IntRange(1, 64),
    default=1,
    help="Number of metadata processes; each serves a part of the metadata.",
)
@click.option(
    "--size",
    "sizes",
    type=ByteSize(),
    multiple=True,
    help="Size of a drive; may be repeated. Default: 8 and 16 GiB in turn.",
)
@click.option(
    "--replicas",
    type=click.IntRange(1, 3),
    default=1,
    show_default=True,
    help="Copies of each chunk of a new pool.",
)
@click.option(
    "--mount",
    "mountpoint",
    metavar="MOUNTPOINT",
    help="Also mount the pool there; a missing directory is created.",
)
@click.option(
    "--engine",
    type=click.Choice(["auto", "kernel", "pyfuse3"]),
    help="Engine of the mount; see nvpool mount --help.",
)
@click.option(
    "--config", "config_file", type=click.Path(exists=True, dir_okay=False), help="Configuration of the node."
)
@json_option
def up(
    directory: str,
    drives: int | None,
    standbys: int,
    shards: int,
    sizes: tuple[int, ...],
    replicas: int,
    mountpoint: str | None,
    engine: str | None,
    config_file: str | None,
    as_json: bool,
) -> None:
    """Create a pool under DIR if there is none, start it, and mount it with --mount. You own the pool and its files.

    Returns when the pool serves. May be repeated: an existing pool stays as it is. If you interrupt the command, a new pool is
    removed again. A pool that existed before stays, and so does a new pool after an error, for example if it cannot be
    mounted; a message says what runs.
    """
    from nvpool.cli.dev_up_rollback import DevUpRollback

    with DevUpRollback(PoolDirectory(directory), mountpoint) as undoing:
        seen = _up(
            undoing, directory, drives, standbys, shards, sizes, replicas, mountpoint, engine, config_file
        )
        # inside the block: a user who does not see this message sees that the pool was removed
        if as_json:
            print_json(seen)
        else:
            click.echo(
                f"pool {seen['pool']['name']} serves in {undoing.directory.path}"
                + (f" and is mounted at {mountpoint}" if mountpoint else "")
            )
            say(f"look at it with: nvpool status {directory}   remove it with: nvpool dev down {directory}")


def _up(
    undoing: DevUpRollback,
    directory: str,
    drives: int | None,
    standbys: int,
    shards: int,
    sizes: tuple[int, ...],
    replicas: int,
    mountpoint: str | None,
    engine: str | None,
    config_file: str | None,
) -> dict[str, Any]:
    from nvpool.cli import pool_lifecycle
    from nvpool.cli.commands.pool import name_of
    from nvpool.cli.mount.command import log_of
    from nvpool.cli.mount.control import mount_pool, unmount
    from nvpool.host.mountinfo import look_at, mount_at, place_of

    where = undoing.directory
    is_new = being_made(where) or not where.exists()
    if mountpoint is not None:
        check_place(where, mountpoint)
    if is_new:
        wanted = list(sizes) or default_sizes(drives or max(2, replicas), free_bytes(where))
        if drives is not None and len(wanted) < drives:
            wanted += [wanted[-1]] * (drives - len(wanted))
        config = configuration.load(config_file) if config_file else configuration.Config()
        pool_lifecycle.make(
            {
                "verb": "pool",
                "directory": str(where.path),
                "name": name_of(directory),
                "throw_away": True,
                "drives": [
                    {"path": str(where.target(number)), "capacity_bytes": size}
                    for number, size in enumerate(wanted, 1)
                ],
                "chunk_bytes": CHUNK_BYTES_DEFAULT,
                "replicas": replicas,
                "standbys": standbys,
                "shards": shards,
                "config": configuration.sample(config),
            }
        )
        say(f"made a pool in {where.path} with drives of {', '.join(map(format_bytes, wanted))}")
    elif drives is not None or sizes or config_file:
        say(
            f"{where.path} holds a pool already; --drives, --size and --config are for a new one and change nothing"
        )
    seen = pool_lifecycle.start(where)
    if is_new and os.geteuid():
        asyncio.run(_give_to_us(str(where.path)))
    if mountpoint is not None:
        found = mount_at(mountpoint)
        if found is not None and found.ours and look_at(found.point) != "alive":
            unmount(str(found.point), lazy=True)
            say(f"{mountpoint} was a dead mount; cleaned")
            found = mount_at(mountpoint)
        if found is None or not found.ours:
            try:
                os.makedirs(place_of(mountpoint), exist_ok=True)
            except OSError as error:
                raise from_os_error(error, f"make the directory {mountpoint} to mount the pool at") from error
            mount_pool(
                str(where.path),
                os.path.abspath(mountpoint),
                log_of(str(where.path), os.path.abspath(mountpoint)),
                (f"--engine={engine}",) if engine else (),
            )
            seen = pool_lifecycle.start(where)
        elif not any(process.get("mountpoint") == str(found.point) for process in seen["processes"]):
            raise _other_pool(mountpoint)
    return seen


def check_place(where: PoolDirectory, mountpoint: str) -> None:
    """Check, before anything is created, that the pool in `where` can be mounted at `mountpoint`.

    Allowed are an empty directory, a directory that can be created, and a mount of this pool, dead or alive.
    InvalidRequest, NotADirectory, AccessDenied, with the remedy: any other place.
    """
    from nvpool.fuse.mount_point import check_fuse, check_mount_point
    from nvpool.host.mountinfo import look_at, mount_at, place_of, pool_of

    found = mount_at(mountpoint)
    if found is not None and found.ours:
        if look_at(found.point) == "alive":
            behind = pool_of(found)
            if not where.exists() or (
                behind is not None and behind[0] != str(where.path) and behind[0].startswith("/")
            ):
                raise _other_pool(mountpoint)
        return  # a dead mount is removed once the pool runs
    place = place_of(mountpoint)
    if where.path.resolve().is_relative_to(place):
        raise InvalidRequest(
            f"{mountpoint} holds the directory of the pool, which the mount would hide; name another "
            f"directory after --mount"
        )
    if os.path.lexists(place):
        check_mount_point(place)
        return
    above = next(path for path in place.parents if os.path.lexists(path))
    if not above.is_dir():
        raise NotADirectory(
            f"{mountpoint} cannot be made to mount the pool at: {above} is not a directory; name an empty "
            f"directory after --mount, or one that can be made"
        )
    if not os.access(above, os.W_OK | os.X_OK):
        raise AccessDenied(
            f"{mountpoint} cannot be made to mount the pool at: this user may make nothing in {above}; name an "
            f"empty directory after --mount, or have it made"
        )
    check_fuse()


def _other_pool(mountpoint: str) -> InvalidRequest:
    return InvalidRequest(f"{mountpoint} is the mount of another pool; first: nvpool umount {mountpoint}")


def free_bytes(directory: PoolDirectory) -> int:
    place = next(path for path in (directory.path, *directory.path.parents) if path.exists())
    free = os.statvfs(place)
    return free.f_bavail * free.f_frsize


@dev.command(epilog="example: nvpool dev down /tmp/pool")
@click.argument("directory", metavar="DIR", type=click.Path(file_okay=False))
@json_option
def down(directory: str, as_json: bool) -> None:
    """Unmount and stop the pool under DIR, and remove DIR with all its contents.

    Refused if `dev up` did not create the pool, or while another file system is mounted below DIR. If DIR does not exist, the
    command does nothing.
    """
    from nvpool.cli import pool_lifecycle
    from nvpool.cli.mount.control import mountpoints_of, unmount
    from nvpool.cli.pool_suggestions import remedy_for

    where = PoolDirectory(directory)
    if not os.path.lexists(where.path):
        say(f"{where.path} does not exist; nothing to do")
        if as_json:
            print_json({"directory": str(where.path), "unmounted": []})
        return
    if not being_made(where):
        try:
            where.check()
        except NotFound as error:
            raise NotFound(f"{error}. Nothing was removed", remedy=remedy_for(directory)) from None
        if not (where.path / "throw-away").exists():
            raise InvalidRequest(
                f"{where.path} was not made by dev up; nothing was removed. To destroy that pool: "
                f"nvpool pool destroy {where.path}"
            )
    pool_lifecycle.check_removable(where)
    unmounted = mountpoints_of(where)
    for place in unmounted:
        unmount(place)
        say(f"unmounted {place}")
    lock = pool_lifecycle.stop(where)
    pool_lifecycle.remove(where, lock)
    if as_json:
        print_json({"directory": str(where.path), "unmounted": unmounted})
    else:
        click.echo(f"removed {where.path}")
