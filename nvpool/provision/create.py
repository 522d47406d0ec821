"""Provisioning program: creates pools and chunk stores. `python -m nvpool.provision.create`.

It reads a JSON request on stdin and writes a JSON response to stdout. Started by the CLI (`pool create`, `dev
up`) and by the supervisor (`drive add`). Guarantees: a directory is a pool only when it is complete and durable
(FORMAT is written last). A refused request leaves nothing behind. An interrupted creation starts again and uses
the same pool id. The program overwrites only what it made itself and what is empty, except that `force` allows
the content of a block device. It never starts a process of the pool.

    {"verb": "pool", "directory", "name", "drives": [{"path", "capacity_bytes"}], "chunk_bytes", "replicas", "config": text,
     "standbys", "shards", "force"}
        -> {"directory", "pool_id", "drives": [{"path", "capacity_bytes"}], "join": {"address", "token", "ends_ms"} or null}
    {"verb": "join", …} as provision/join has it
    {"verb": "check", … as store} -> {"capacity_bytes"}, or the error with which store would refuse; nothing is changed
    {"verb": "erase", "path", "pool_id"} -> {}, the head of a block device is overwritten with zeros
    {"verb": "forget", "directory", "pool_id"} -> {"done": sentences}, removes the pool from the operator's own etcd
    {"verb": "store", "directory", "path", "capacity_bytes", "target", "pool_id", "known": [paths], "force"}
        -> {"path", "capacity_bytes"}
    any -> {"error": text, "code": exit code}
"""

from __future__ import annotations

import asyncio
import errno
import itertools
import json
import os
import shutil
import socket
import stat
import sys
from pathlib import Path
from urllib.parse import quote

from nvpool.cluster.embedded_coordinator import EmbeddedCoordinator
from nvpool.core.clock import SYSTEM_CLOCK
from nvpool.core.config import NetworkConfig, parse
from nvpool.core.endpoint import host_port_url, parse_endpoint
from nvpool.core.errors import (
    AlreadyExists,
    InUse,
    InvalidRequest,
    NoSpace,
    NotFound,
    NvpoolError,
    from_os_error,
)
from nvpool.core.names import new_member
from nvpool.core.units import BLOCK_BYTES, MIB, format_bytes
from nvpool.host.mountinfo import mounts
from nvpool.host.pool_directory import (
    BEING_MADE_TEXT,
    FORMAT_TEXT,
    Flock,
    PoolDirectory,
    check_name,
    make_passed_through,
    sync_directory,
    write_whole,
)
from nvpool.host.pool_directory_modes import group_number, protect
from nvpool.host.process_identity import host_id
from nvpool.kv.engine import LmdbKv, LmdbOptions
from nvpool.poolmap.chains.placement import build_table
from nvpool.poolmap.file_layout import layout_of
from nvpool.poolmap.model import MAP_FORMAT, Drive, Node, PoolMap, PoolSettings, Shard, StandbyMember, Target
from nvpool.poolmap.shards.members import SHARDS_MAX, STANDBYS_MAX, dealt, process_name
from nvpool.provision.tokens import TOKEN_S, address_of, new_token, read_authority
from nvpool.security.ca import CertificateAuthority, request_certificate
from nvpool.security.tls import (
    AUTHORITY_FILE,
    AUTHORITY_KEY_FILE,
    CERTIFICATE_FILE,
    ETCD_SECRET,
    KEY_FILE,
    leaves_host,
)
from nvpool.store.chunks.api import create_chunk_store
from nvpool.store.disk.superblock import decode_superblock

CAPACITY_BYTES_MIN = 64 * MIB
MARKER = "being-made"
"""File that holds the id of a pool during its creation."""

_SHARE_OF_FREE = 0.9
"""Share of a file system's free space used if no size is given.

The rest is for the index, the journals and other users."""

_PORT_FIRST, _PORT_LAST = 17000, 32000
"""Port range below the kernel's ephemeral ports.

A restarted daemon therefore finds its own ports free."""

_HEAD_BYTES = 16 * BLOCK_BYTES
"""Head of a block device: superblock and the space reserved after it (store/disk/superblock)."""

_OF_A_POOL = (
    "throw-away",
    "node.toml",
    "lock",
    "secret",
    "map",
    "poolmap.json",
    "meta",
    "run",
    "log",
    "reserve",
    "targets",
    "coordinator.json",
)


def free_ports(count: int, network: NetworkConfig, used: set[int]) -> list[int]:
    """Find TCP ports that nobody listens on now, and that are not in `used`.

    Empty if nothing shall listen on TCP (`network.host` is empty). InUse: there are not enough.
    """
    if not network.host:
        return []
    first = network.base_port or _PORT_FIRST + SYSTEM_CLOCK.random().randrange(
        _PORT_LAST - _PORT_FIRST - 1000
    )
    found: list[int] = []
    for port in range(first, min(first + 1000, 65536)):
        if port in used:
            continue
        family = socket.AF_INET6 if ":" in network.host else socket.AF_INET
        with socket.socket(family, socket.SOCK_STREAM | socket.SOCK_CLOEXEC) as probe:
            try:
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                probe.bind((network.host, port))
            except OSError:
                continue
        found.append(port)
        if len(found) == count:
            return found
    raise InUse(
        f"no {count} free TCP ports on {network.host} from {first} on; set network.base_port in node.toml"
    )


def endpoints_for(directory: PoolDirectory, name: str, host: str, ports: list[int]) -> tuple[str, ...]:
    """Endpoints of a process: a unix socket and, with ports, framed TCP and gRPC."""
    tcp = (host_port_url("stream", host, ports[0]), host_port_url("grpc", host, ports[1])) if ports else ()
    return (f"stream+unix://{quote(str(directory.socket_directory() / name))}.sock", *tcp)


def store_path(path: str, pool_id: str, target: int, inside: Path | None) -> Path:
    """Path of a target's store on the drive that the operator named.

    A block device is itself the store; on any other drive the store has its own directory. InvalidRequest,
    NotFound.
    """
    place = Path(os.path.abspath(path))
    if inside is not None and place.parent == inside:
        return place
    try:
        mode = place.stat().st_mode
    except OSError as error:
        raise NotFound(f"drive {path}: {error.strerror}; is it mounted? Make the directory first") from None
    if stat.S_ISBLK(mode):
        return place
    if not stat.S_ISDIR(mode):
        raise InvalidRequest(f"drive {path} is neither a directory nor a block device")
    if file_system_type(place).startswith("fuse.nvpool"):
        raise InvalidRequest(
            f"drive {path} lies in a mounted pool, which would wait for itself; name a directory of a local "
            f"drive"
        )
    return place / store_name(pool_id, target)


def file_system_type(path: Path) -> str:
    """Type of a path's file system in the kernel's terms, like ext4 or fuse.nvpool. "" if unknown."""
    device = path.stat().st_dev
    number = f"{os.major(device)}:{os.minor(device)}"
    return next((mount.type for mount in mounts() if mount.device == number), "")


def capacity_for(path: Path, wanted: int) -> int:
    """Bytes that the store at `path` may use.

    InvalidRequest, NoSpace: the size is not possible there. The error names the existing file system, not the
    future store.
    """
    existing = next(p for p in (path, *path.parents) if p.exists())
    if stat.S_ISBLK(existing.stat().st_mode):
        with open(existing, "rb") as device:
            room = device.seek(0, os.SEEK_END)
        if wanted > room:
            raise NoSpace(f"drive {path} has {format_bytes(room)}, {format_bytes(wanted)} were asked for")
        capacity = wanted or room
    else:
        free = os.statvfs(existing)
        room = free.f_bavail * free.f_frsize
        capacity = wanted or int(room * _SHARE_OF_FREE)
        if capacity > free.f_blocks * free.f_frsize:
            raise NoSpace(
                f"drive {existing}: {format_bytes(capacity)} are more than its whole file system has"
            )
    if capacity < CAPACITY_BYTES_MIN:
        raise InvalidRequest(
            f"drive {existing}: {format_bytes(capacity)} are too little, "
            f"{format_bytes(CAPACITY_BYTES_MIN)} is the least"
        )
    return capacity - capacity % MIB


def check_device(path: Path, pool_id: str, force: bool) -> None:
    """Check that a block device may become a store. Does nothing for other paths and changes nothing.

    InUse: the device is mounted or in use. AlreadyExists: without `force`, there is data where the superblock
    goes; file systems, partition tables and volumes begin there.
    """
    if not path.is_block_device():
        return
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_EXCL)
    except OSError as error:
        if error.errno == errno.EBUSY:
            raise InUse(f"drive {path} is mounted, or in use by another program; unmount it first") from None
        raise from_os_error(error, f"open drive {path}") from None
    try:
        head = os.pread(fd, _HEAD_BYTES, 0)
    finally:
        os.close(fd)
    owner = pool_on(path)
    if owner and owner == pool_id:
        return
    if any(head) and not force:
        what = (
            f"a drive of the pool {owner[:8]} already"
            if owner
            else "a file system, a partition table or something else"
        )
        raise AlreadyExists(
            f"drive {path} holds {what}; look at it with: lsblk -f {path}   --force overwrites it"
        )


def make_store(
    directory: PoolDirectory, place: Path, capacity_bytes: int, target: int, pool_id: str, force: bool
) -> None:
    """Make an empty chunk store at `place`. For a block device its index is in targets/ of the pool
    directory.

    The remains of an interrupted attempt for the same target of the same pool are removed first: the map
    never named that store, so it holds nothing.
    """
    device = place if place.is_block_device() else None
    path = directory.target(target) if device else place
    ours = path.parent == directory.target(0).parent or path.name == store_name(pool_id, target)
    if path.is_dir():
        if not ours and any(path.iterdir()):
            raise AlreadyExists(f"{path} is not empty")
        shutil.rmtree(path)
    create_chunk_store(
        path,
        target,
        pool_id,
        capacity_bytes,
        device=device,
        force=device is not None and (force or pool_on(device) == pool_id),
    )
    sync_directory(path.parent)


def make_standby_place(directory: PoolDirectory, store: str, pool_id: str, shard: int, member: int) -> str:
    """Make an empty directory for the records of a shard's standby.

    It is beside the store of a drive, or in the pool directory if the store is a device or is itself in the
    pool directory. The remains of an interrupted attempt are removed.
    """
    place = Path(store)
    if place.is_block_device() or place.parent == directory.target(0).parent:
        path = directory.shard(shard).with_name(f"{shard}.{member}")
    else:
        path = place.with_name(f"nvpool-{pool_id[:8]}-{process_name(shard, member)}")
    if path.is_dir():
        shutil.rmtree(path)
    path.mkdir(mode=0o700)
    sync_directory(path.parent)
    return str(path)


def store_name(pool_id: str, target: int) -> str:
    return f"nvpool-{pool_id[:8]}-target-{target}"


def pool_on(device: Path) -> str:
    """Id of the pool that a block device belongs to, or ""."""
    with open(device, "rb") as file:
        head = file.read(BLOCK_BYTES)
    try:
        return decode_superblock(head, str(device)).pool_id
    except (NvpoolError, ValueError):
        return ""


async def make_pool(request: dict) -> dict:
    from nvpool.provision.external_etcd import check, external, found

    directory = PoolDirectory(request["directory"])
    check_name(request["name"])
    chunk_bytes, replicas = int(request["chunk_bytes"]), int(request["replicas"])
    layout_of(chunk_bytes)
    config = parse(request["config"], "node.toml")
    drives, force = request["drives"], bool(request.get("force"))
    if not drives or len(drives) > 1024:
        raise InvalidRequest(
            "a pool needs at least one drive, and at most 1,024 on a node: --drive PATH[:SIZE]"
        )
    if len(drives) < replicas:
        raise InvalidRequest(f"{replicas} replicas need as many drives, there are {len(drives)}")
    if not 1 <= replicas <= 3:
        raise InvalidRequest(f"a chunk has 1, 2 or 3 replicas, not {replicas}: --replicas")
    standbys = int(request.get("standbys") or 0)
    if not 0 <= standbys <= min(STANDBYS_MAX, len(drives)):
        raise InvalidRequest(
            f"{standbys} standbys of the metadata need as many drives; at most {STANDBYS_MAX} are possible"
        )
    shard_count = int(request.get("shards") or 1)
    if not 1 <= shard_count <= SHARDS_MAX:
        raise InvalidRequest(
            f"a pool begins with 1 to {SHARDS_MAX} metadata shards, not {shard_count}: --shards"
        )
    if len(_real_paths([drive["path"] for drive in drives])) < len(drives):
        raise InvalidRequest("a drive is named twice")
    given = external(request.get("etcd"))
    if given is not None:
        await check(given)
    for drive in drives:  # before anything is created, so that a refused request leaves nothing behind
        place = store_path(drive["path"], "", 0, directory.path / "targets")
        capacity_for(place, int(drive.get("capacity_bytes") or 0))
        check_device(place, _id_of_begun(directory), force)

    make_passed_through(directory.path)
    pool_id = _begin(directory)
    lock = Flock.take(directory.lock, f"the pool directory {directory.path}")
    try:
        for name in _OF_A_POOL:
            if name not in ("lock", "targets"):
                _remove(directory.path / name)
        shard_numbers = range(1, shard_count + 1)
        make_passed_through(directory.run)
        for path in (
            directory.map,
            *map(directory.shard, shard_numbers),
            directory.log,
            directory.path / "targets",
        ):
            path.mkdir(parents=True, exist_ok=True)
        protect(directory, group_number(config.access.operators, "access.operators"))
        directory.secret.mkdir(mode=0o700)
        write_whole(directory.grant_key, SYSTEM_CLOCK.secret(32), 0o600)
        member = found_authority(directory, pool_id, config.network.host)
        token, kept = new_token(read_authority(directory), "node", TOKEN_S)
        write_whole(directory.node_toml, request["config"].encode())
        if request.get("throw_away"):
            write_whole(
                directory.path / "throw-away",
                b"made by nvpool dev up; removed, with all in it, by nvpool dev down\n",
            )

        ports = free_ports(2 * (len(drives) + shard_count * (standbys + 1) + 1), config.network, set())
        host = config.network.host
        made = []
        for number, drive in enumerate(drives, 1):
            place = store_path(drive["path"], pool_id, number, directory.path / "targets")
            capacity = capacity_for(place, int(drive.get("capacity_bytes") or 0))
            make_store(directory, place, capacity, number, pool_id, force)
            made.append({"path": str(place), "capacity_bytes": capacity})
        targets = tuple(
            Target(
                n,
                n,
                1,
                drive["capacity_bytes"],
                endpoints_for(directory, f"target-{n}", host, ports[2 * n : 2 * n + 2]),
            )
            for n, drive in enumerate(made, 1)
        )
        places = itertools.count(2 + 2 * len(drives), 2)

        def make_shard(number: int) -> Shard:
            def endpoints(member: int) -> tuple[str, ...]:
                return endpoints_for(directory, process_name(number, member), host, ports[next(places) :][:2])

            # The standbys of different shards start with different drives.
            beside = [made[(number - 1 + at) % len(made)] for at in range(standbys)]
            return Shard(
                number,
                1,
                endpoints(0),
                standbys=tuple(
                    StandbyMember(
                        n,
                        1,
                        endpoints(n),
                        path=make_standby_place(directory, drive["path"], pool_id, number, n),
                    )
                    for n, drive in enumerate(beside, 1)
                ),
            )

        first = PoolMap(
            format=MAP_FORMAT,
            pool_id=pool_id,
            name=request["name"],
            epoch=1,
            settings=PoolSettings(chunk_bytes, replicas),
            nodes=(
                Node(
                    1,
                    socket.gethostname(),
                    host_id(),
                    endpoints_for(directory, "node", host, ports[0:2]),
                    member=member,
                ),
            ),
            drives=tuple(
                Drive(n, 1, drive["path"], drive["capacity_bytes"]) for n, drive in enumerate(made, 1)
            ),
            targets=targets,
            tables=(build_table(targets, replicas),),
            shards=tuple(map(make_shard, shard_numbers)),
            partitions=dealt(shard_count),
            members=(member,),
            tokens=(kept,),
        )
        for place in map(directory.shard, shard_numbers):
            await (await LmdbKv.open(place, LmdbOptions())).close()
        if given is not None:
            await found(directory, given, first)
        else:
            kv = await LmdbKv.open(directory.map, LmdbOptions())
            await (await EmbeddedCoordinator.found(kv, first, directory.publish)).close()
        for place in (
            directory.path / "meta",
            directory.path / "targets",
            directory.path,
            directory.path.parent,
        ):
            sync_directory(place)
        for target in targets:  # all are equal: they are empty
            write_whole(directory.ended(target.id), b"%d" % first.epoch)
        write_whole(directory.format, FORMAT_TEXT.encode())  # last: this makes the directory a pool
        (directory.path / MARKER).unlink(missing_ok=True)
    finally:
        lock.release()
    address = address_of(first.nodes[0])
    return {
        "directory": str(directory.path),
        "pool_id": pool_id,
        "drives": made,
        "join": {"address": address, "token": token.text(), "ends_ms": kept.ends_ms}
        if address and leaves_host(parse_endpoint(address))
        else None,
    }


def found_authority(directory: PoolDirectory, pool_id: str, host: str) -> str:
    """Create the CAs of pool and etcd, and this node's certificates, in secret/. Return the member."""
    member = new_member("node", socket.gethostname())
    asked, hosts = request_certificate(), (host,) if host else ()
    for place in (directory.secret, directory.secret / ETCD_SECRET):
        place.mkdir(mode=0o700, exist_ok=True)
        authority = CertificateAuthority.make(pool_id)
        for name, content, mode in (
            (AUTHORITY_FILE, authority.certificate, 0o644),
            (AUTHORITY_KEY_FILE, authority.key, 0o600),
            (KEY_FILE, asked.key, 0o600),
            (CERTIFICATE_FILE, authority.sign(asked.request, pool_id, member, hosts), 0o644),
        ):
            write_whole(place / name, content, mode)
    return member


def _begin(directory: PoolDirectory) -> str:
    """Start or restart a creation; return the pool's id. AlreadyExists: the directory holds anything else."""
    for half in directory.path.glob(".FORMAT.[0-9]*"):  # of a creation that ended before FORMAT was in place
        half.unlink()
    found = sorted(entry.name for entry in directory.path.iterdir())
    if "FORMAT" in found and directory.format.read_bytes() != BEING_MADE_TEXT.encode():
        raise AlreadyExists(
            f"{directory.path} holds a pool already; `nvpool status {directory.path}` shows it"
        )
    if "FORMAT" in found:
        if pool_id := _id_of_begun(directory):
            return pool_id
    elif found:
        raise AlreadyExists(
            f"{directory.path} is not empty; name an empty directory or one that does not exist"
        )
    pool_id = SYSTEM_CLOCK.secret(16).hex()
    write_whole(directory.format, BEING_MADE_TEXT.encode())
    write_whole(directory.path / MARKER, pool_id.encode())
    return pool_id


def _id_of_begun(directory: PoolDirectory) -> str:
    """Id of a pool whose creation was interrupted, or ""."""
    try:
        pool_id = (directory.path / MARKER).read_text().strip()
    except OSError:
        return ""
    return pool_id if len(pool_id) == 32 else ""


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def _real_paths(paths: list[str]) -> set[str]:
    return {os.path.realpath(path) for path in paths}


def _answer_store(request: dict) -> tuple[Path, int]:
    place = store_path(request["path"], request["pool_id"], request["target"], None)
    if os.path.realpath(request["path"]) in _real_paths(
        [*request["known"], *map(os.path.dirname, request["known"])]
    ):
        raise AlreadyExists(f"drive {request['path']} is in the pool already")
    return place, capacity_for(place, int(request.get("capacity_bytes") or 0))


def _erase_head(path: str, pool_id: str) -> None:
    """Overwrite a store's head with zeros, so that nobody takes it for a store.

    InvalidRequest: no store of this pool.
    """
    if pool_on(Path(path)) != pool_id:
        raise InvalidRequest(f"{path} does not begin like a store of this pool; nothing was erased")
    with open(path, "r+b", buffering=0) as device:
        device.write(bytes(_HEAD_BYTES))
        os.fsync(device.fileno())


async def _answer(request: dict) -> dict:
    if request["verb"] == "pool":
        return await make_pool(request)
    if request["verb"] == "join":
        from nvpool.provision.join import join

        directory = PoolDirectory(request["directory"])
        return await join(
            request,
            lambda config, name: endpoints_for(
                directory, name, config.network.host, free_ports(2, config.network, set())
            ),
        )
    if request["verb"] == "erase":
        _erase_head(request["path"], request["pool_id"])
        return {}
    if request["verb"] == "forget":
        from nvpool.provision.external_etcd import forget

        return {"done": await forget(PoolDirectory(request["directory"]), request["pool_id"])}
    place, capacity = _answer_store(request)
    force = bool(request.get("force"))
    check_device(place, "", force)
    if request["verb"] == "check":
        return {"capacity_bytes": capacity}
    make_store(
        PoolDirectory(request["directory"]), place, capacity, request["target"], request["pool_id"], force
    )
    return {"path": str(place), "capacity_bytes": capacity}


def main() -> int:
    from nvpool.runtime.daemon_process import exit_code

    try:
        answer, code = asyncio.run(_answer(json.load(sys.stdin))), 0
    except KeyboardInterrupt:
        return 130  # the terminal has interrupted our parent as well; the same command continues later
    except NvpoolError as error:
        answer, code = {"error": str(error)}, exit_code(error)
    except OSError as error:
        ours = from_os_error(error, f"make {error.filename or 'the pool'}")
        answer, code = {"error": str(ours)}, exit_code(ours)
    try:
        print(json.dumps(answer | ({"code": code} if code else {})), flush=True)
    except BrokenPipeError:  # the caller was killed; the same command continues later
        # Redirects the output that Python flushes at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return code


if __name__ == "__main__":
    sys.exit(main())
