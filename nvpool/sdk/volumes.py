"""Volumes of a pool: create, show, change and remove directories with a policy.

Each call describes the desired state of a volume. So it may be repeated: a call that finds that state
succeeds. Errors are OSError, as everywhere in the SDK, with nvpool's own error as `__cause__`:
FileExistsError names the differences, FileNotFoundError a volume that does not exist, EBUSY the users of the
volume, EDQUOT a quota. The CLI and the bridges use this module; programs reach it as `.volumes` of a file
system.
"""

from __future__ import annotations

import builtins
import contextlib
import os
import stat
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, Protocol, TypeVar

from nvpool.client.inode_paths import PathFinder
from nvpool.client.state.vfs_types import Caller
from nvpool.core.errors import AlreadyExists, InvalidRequest, NotADirectory, NotFound
from nvpool.core.ids import ROOT_INODE
from nvpool.core.names import VOLUMES, check_holder, check_volume_name, member_named, path_of
from nvpool.core.units import GIB, KIB, MIB, TIB, size_argument
from nvpool.poolmap.file_layout import layout_of
from nvpool.rpc.messages.meta_messages import Attr
from nvpool.rpc.v1 import meta_pb2 as pb
from nvpool.rpc.v1 import wire_pb2
from nvpool.sdk.argument_checks import integer, text
from nvpool.sdk.paths import as_detailed_os_error, locate, name_bytes, names_of

if TYPE_CHECKING:
    from nvpool.client.pool_client import Client

OPEN, LISTED = "open", "listed"
READY, REMOVING = "ready", "removing"
_RIGHTS = {"ro": False, "rw": True}
_ROOT_MODE, _MODE = 0o755, 0o777
_KINDS = {stat.S_IFREG: "file", stat.S_IFDIR: "directory", stat.S_IFLNK: "link"}
_FIND_S, _DEPTH_MAX = 5.0, 100
_TRIES = 3
_Request = pb.VolumeRequest

_Arguments = ParamSpec("_Arguments")
_Result = TypeVar("_Result")


@dataclass(frozen=True)
class Volume:
    """A volume as its metadata shard reported it. Sizes are in bytes; a limit of 0 means no limit. `inode`
    identifies the volume: its name may be given to another volume later, an inode number never is."""

    name: str
    inode: int
    path: str
    bytes_max: int = 0
    files_max: int = 0
    bytes_used: int = 0
    files_used: int = 0
    replicas: int = 1
    chunk_bytes: int = 1 << 20
    sealed: bool = False
    trash_s: int = 0
    access: str = OPEN
    """"open": every client of the pool has access. "listed": only the clients in `grants` have access."""
    grants: Mapping[str, str] = field(default_factory=dict)
    """Rights by member of the pool: "ro" or "rw"."""
    attachments: tuple[str, ...] = ()
    """Holders that declared that they use the volume. Without `force`, a volume with holders is not
    removed."""
    state: str = READY
    """"ready" or "removing". A volume that is being removed has no name any more, and `files_used` of its
    `files_removing` files are left to delete."""
    created_ns: int = 0
    encrypted: bool = False
    """File contents are encrypted in the stores; names and attributes are not."""
    pool_key: str = ""
    """Encrypted volumes only: identity of the pool key that protects the volume's key."""
    bytes_reserved: int = 0
    """Quota reservations of clients, in addition to the bytes used."""
    files_removing: int = 0
    revoked_in_s: int = 0
    """Seconds for which a silent target may still accept older access tokens after `revoke`. 0: none does."""


@dataclass(frozen=True)
class TrashEntry:
    """A removed entry of a volume that is kept in the trash for a while."""

    inode: int
    path: str
    """Path before the removal, if known; otherwise the name after the number of its directory."""
    kind: str
    """"file", "directory", "link" or "other"."""
    bytes: int
    removed_ns: int
    expires_ns: int


def volume_of(state: pb.VolumeState) -> Volume:
    return Volume(
        name=state.name,
        inode=state.inode,
        path=path_of(state.name),
        bytes_max=state.bytes_max,
        files_max=state.files_max,
        bytes_used=state.bytes_used,
        files_used=state.files_used,
        replicas=state.table,
        chunk_bytes=1 << state.chunk_bits,
        sealed=state.sealed,
        trash_s=state.trash_s,
        access=LISTED if state.listed else OPEN,
        grants={grant.client: "rw" if grant.write else "ro" for grant in state.grants},
        attachments=tuple(state.attachments),
        state=REMOVING if state.removing else READY,
        created_ns=state.created_ns,
        encrypted=bool(state.pool_key),
        pool_key=state.pool_key,
        bytes_reserved=state.bytes_reserved,
        files_removing=state.files_removing,
    )


class AsyncVolumes:
    """Volume operations of an AsyncFileSystem."""

    def __init__(self, client: Client) -> None:
        self._vfs = client.vfs
        self.client = client
        self._directory = 0

    async def create(
        self,
        name: str,
        *,
        bytes_max: int = 0,
        files_max: int = 0,
        replicas: int | None = None,
        chunk_bytes: int | None = None,
        trash_s: int = 0,
        mode: int | None = None,
        encrypted: bool = False,
    ) -> Volume:
        """Create a volume, or return the existing one with the same properties.

        An existing volume need not be empty. 0 means no limit. `replicas` and `chunk_bytes` default to those
        of /volumes. `mode` is the mode of the volume's directory, which belongs to root; the default is
        0o777. `encrypted`: file contents are stored encrypted with the volume's own key, which the pool key
        protects.

        FileExistsError  a volume of that name has other properties, or a directory of that name is not a
                         volume; the text says what differs
        EINVAL           the name is not valid, or a size or the mode is out of range
        ENOKEY           `encrypted` is set, and the volume's node has no pool key: set encryption.key_file in
                         node.toml
        """
        return (
            await self.made(
                name,
                bytes_max=bytes_max,
                files_max=files_max,
                replicas=replicas,
                chunk_bytes=chunk_bytes,
                trash_s=trash_s,
                mode=mode,
                encrypted=encrypted,
            )
        )[0]

    async def made(
        self,
        name: str,
        *,
        bytes_max: int = 0,
        files_max: int = 0,
        replicas: int | None = None,
        chunk_bytes: int | None = None,
        trash_s: int = 0,
        mode: int | None = None,
        encrypted: bool = False,
    ) -> tuple[Volume, bool]:
        """Create a volume as `create` does; return it, and whether this call created it."""
        with as_detailed_os_error(path_of(name) if _is_name(name) else None):
            wanted = _policy(name, bytes_max, files_max, replicas, chunk_bytes, trash_s, encrypted)
            if mode is not None and not 0 <= integer("mode", mode) <= 0o7777:
                raise InvalidRequest(f"{mode!r} is not a mode of a directory; it is from 0 to 0o7777")
            if wanted.table and wanted.table not in self._vfs.view.map.table_by_id:
                await self._vfs.view.refresh()
            for _ in range(_TRIES):
                directory = await self._home(make=True)
                try:
                    attr = await self._vfs.make_volume(
                        directory, name.encode(), _MODE if mode is None else mode, wanted
                    )
                    return await self._shown(attr.inode), True
                except AlreadyExists:
                    try:
                        found = await self._found(name)
                    except NotFound:
                        if other := await self._other(name):
                            raise AlreadyExists(other) from None
                        continue  # removed in the meantime
                    _check_same(found, wanted, mode, (await self._attr(name)).mode if mode is not None else 0)
                    return found, False
                except NotFound:
                    self._directory = 0  # the directory of volumes itself was removed in the meantime
            raise AlreadyExists(f"volume {name} is made and removed by others all the time")

    async def list(self, *, removing: bool = False) -> list[Volume]:
        """All volumes, sorted by name. `removing` includes volumes that have lost their name and are being
        emptied."""
        with as_detailed_os_error():
            replies = await self._vfs.ask_all(wire_pb2.META_VOLUMES, pb.VolumesReply, pb.VolumesRequest)
            found = {state.inode: volume_of(state) for reply in replies for state in reply.volumes}
            shown = [volume for volume in found.values() if removing or volume.state == READY]
            return sorted(shown, key=lambda volume: (volume.name, volume.created_ns))

    async def show(self, name: str) -> Volume:
        """The volume of that name. FileNotFoundError: no volume has that name."""
        with as_detailed_os_error(_place(name)):
            return await self._found(name)

    async def resize(
        self, name: str, *, bytes_max: int | None = None, files_max: int | None = None
    ) -> Volume:
        """Set the limits of a volume: 0 means no limit, None leaves a limit unchanged. EINVAL: more is in
        use; the text says how much."""
        return await self.set(name, bytes_max=bytes_max, files_max=files_max)

    async def set(
        self,
        name: str,
        *,
        trash_s: int | None = None,
        access: str | None = None,
        bytes_max: int | None = None,
        files_max: int | None = None,
    ) -> Volume:
        """Change every property that is not None. `access` is "open" or "listed"."""
        with as_detailed_os_error(_place(name)):
            if access not in (None, OPEN, LISTED):
                raise InvalidRequest(f"access to a volume is {OPEN!r} or {LISTED!r}, not {access!r}")
            _check_size("bytes_max", 0 if bytes_max is None else bytes_max)
            _check_size("files_max", 0 if files_max is None else files_max)
            _check_trash(0 if trash_s is None else trash_s)
            return await self._change(
                name,
                _Request.SET,
                trash_s=trash_s,
                bytes_max=bytes_max,
                files_max=files_max,
                listed=None if access is None else access == LISTED,
            )

    async def rewrap(self, name: str) -> Volume:
        """Protect the key of an encrypted volume with a pool key again. The first pool key of the node
        that answers is used. The data does not change."""
        with as_detailed_os_error(path_of(name) if _is_name(name) else None):
            return await self._change(name, _Request.REWRAP)

    async def seal(self, name: str) -> Volume:
        """Make the contents of a volume read-only for ever. EBUSY: files of the volume are open."""
        with as_detailed_os_error(_place(name)):
            await self._vfs.meta.release_now((await self._attr(name)).inode)
            return await self._change(name, _Request.SEAL)

    async def grant(self, name: str, client: str, rights: str) -> Volume:
        """Give a client the right to read ("ro") or write ("rw"). The volume becomes "listed", so clients
        without a right lose access. `client` is a NAME, or a member as `nvpool client ls` shows it."""
        with as_detailed_os_error(_place(name)):
            if text("rights", rights) not in _RIGHTS:
                raise InvalidRequest(f"a right to a volume is 'ro' or 'rw', not {rights!r}")
            member = member_named(text("client", client))
            return await self._change(
                name, _Request.GRANT, grant=pb.VolumeGrant(client=member, write=_RIGHTS[rights])
            )

    async def revoke(self, name: str, client: str) -> Volume:
        """Take all rights from a client. On return the pool refuses also the files that the client has
        open. `revoked_in_s` of the result is not 0 if a target that does not answer may still accept older
        access tokens."""
        with as_detailed_os_error(_place(name)):
            return await self._change(
                name, _Request.REVOKE, grant=pb.VolumeGrant(client=member_named(text("client", client)))
            )

    async def attach(self, name: str, holder: str) -> Volume:
        """Record that `holder` uses the volume. Without `force` the volume is not removed until that
        holder is detached."""
        with as_detailed_os_error(_place(name)):
            check_holder(holder)
            return await self._change(name, _Request.ATTACH, holder=holder)

    async def detach(self, name: str, holder: str) -> Volume:
        """Record that `holder` does not use the volume. A holder that never did is no error."""
        with as_detailed_os_error(_place(name)):
            check_holder(holder)
            return await self._change(name, _Request.DETACH, holder=holder)

    async def remove(self, name: str, *, force: bool = False) -> Volume | None:
        """Remove a volume. On return its name is free; its contents are deleted in the background.

        The result is the volume that is being deleted, or None if there was nothing to delete.

        FileNotFoundError  no volume has that name
        EBUSY              the volume is attached (ignored with `force`), or files of it are open; the text
                           names the users
        """
        with as_detailed_os_error(_place(name)):
            async with self._named(name) as inode:
                await self._vfs.meta.release_now(inode)
                reply = await self._ask(inode, _Request.REMOVE, force=bool(force))
            directory = await self._home()
            self._vfs.forget_name(directory, name.encode(), inode)
            return volume_of(reply.volume) if reply.HasField("volume") else None

    async def removing(self, inode: int) -> Volume | None:
        """Progress of the removal of a volume; None when the removal is complete."""
        with as_detailed_os_error():
            _check_entry(inode, 1)
            try:
                return await self._shown(inode)
            except NotFound:
                return None

    # -- trash ---------------------------------------------------------------------------------------------------------

    async def trash(self, name: str) -> builtins.list[TrashEntry]:
        """Entries of the volume's trash, the oldest first."""
        with as_detailed_os_error(_place(name)):
            after = 0
            found: list[pb.TrashEntry] = []
            async with self._named(name) as volume:
                while True:
                    reply = await self._ask_trash(volume, pb.TrashRequest.LIST, entry=after)
                    found += reply.entries
                    after = reply.next
                    if not after:
                        break
            return sorted(await self._described(found), key=lambda entry: (entry.removed_ns, entry.inode))

    async def restore(self, name: str, inode: int, to: str | None = None) -> None:
        """Restore an entry of the trash to its old path, or to `to`.

        `to` is a path in the volume. If the entry's directory was removed too, that directory is restored
        first.

        FileExistsError    the name belongs to another entry by now
        FileNotFoundError  the entry is not in the trash, or its directory is deleted for good: pass `to`
        """
        with as_detailed_os_error(_place(name)):
            _check_entry(inode, 1)
            if to is not None:
                name_bytes(to)
            place = None
            if to is not None:
                with as_detailed_os_error(to):
                    if not names_of(to):
                        raise InvalidRequest(
                            f"{to!r} is not a name to put it back under; say one in the volume, as "
                            f"{path_of(name)}/again"
                        )
                    try:
                        place = await locate(self._vfs, to, follow=False)
                    except NotFound:
                        raise NotFound(
                            f"the pool has no such directory to put it in; say a path without the name of the "
                            f"pool, as {path_of(name)}/again"
                        ) from None
                    if place.attr is not None:
                        raise AlreadyExists(f"{to} exists")
            async with self._named(name) as volume:
                await self._ask_trash(
                    volume,
                    pb.TrashRequest.RESTORE,
                    entry=inode,
                    directory=place.parent if place else 0,
                    name=place.name if place else b"",
                )
            self._vfs.cache.reset_inodes(lambda inode: True)

    async def purge(self, name: str, inode: int = 0) -> int:
        """Delete an entry of the trash for good; 0 deletes all entries. The result is the number of
        deleted entries."""
        with as_detailed_os_error(_place(name)):
            _check_entry(inode, 0)
            purged = 0
            async with self._named(name) as volume:
                while True:
                    reply = await self._ask_trash(volume, pb.TrashRequest.PURGE, entry=inode)
                    purged += reply.purged
                    if inode or not reply.next:
                        return purged

    async def _ask_trash(self, volume: int, action: pb.TrashRequest.Action, **fields: Any) -> pb.TrashReply:
        request = pb.TrashRequest(inode=volume, action=action, **fields)
        reply: pb.TrashReply = await self._vfs.meta.ask(volume, wire_pb2.META_TRASH, request, pb.TrashReply)
        return reply

    async def _described(self, found: builtins.list[pb.TrashEntry]) -> builtins.list[TrashEntry]:
        removed = {entry.inode: entry for entry in found}
        finder = PathFinder(lambda: self._vfs.view.map, self.client.dialer, self._vfs.clock)
        there = (
            await finder.find({entry.directory for entry in found} - removed.keys(), _FIND_S) if found else {}
        )

        def path_of_entry(entry: pb.TrashEntry, depth: int = 0) -> str:
            above = removed.get(entry.directory)
            if above is not None and depth < _DEPTH_MAX:
                return f"{path_of_entry(above, depth + 1)}/{os.fsdecode(entry.name)}"
            known = there.get(entry.directory)
            return f"{os.fsdecode(known) if known is not None else f'#{entry.directory}'}/{os.fsdecode(entry.name)}"

        return [
            TrashEntry(
                entry.inode,
                path_of_entry(entry),
                _KINDS.get(stat.S_IFMT(entry.mode), "other"),
                entry.size if stat.S_ISREG(entry.mode) else 0,
                entry.removed_ns,
                entry.expires_ns,
            )
            for entry in found
        ]

    # -- below ---------------------------------------------------------------------------------------------------------

    async def _home(self, make: bool = False) -> int:
        """Inode of the directory of volumes. NotFound: the pool has no volumes yet."""
        if self._directory:
            return self._directory
        try:
            attr = await self._vfs.look(ROOT_INODE, VOLUMES)
        except NotFound:
            if not make:
                raise NotFound("this pool has no volumes yet") from None
            try:
                attr = await self._vfs.mkdir(ROOT_INODE, VOLUMES, _ROOT_MODE, Caller(0, 0))
            except AlreadyExists:
                attr = await self._vfs.look(ROOT_INODE, VOLUMES)
        if not stat.S_ISDIR(attr.mode):
            raise NotADirectory("/volumes of this pool is not a directory; rename it")
        self._directory = attr.inode
        return attr.inode

    async def _attr(self, name: str) -> Attr:
        """Attributes of the entry with that name, volume or not."""
        check_volume_name(name)
        try:
            return await self._vfs.look(await self._home(), name.encode())
        except NotFound:
            self._directory = 0
            try:
                return await self._vfs.look(await self._home(), name.encode())
            except NotFound:
                raise NotFound(f"there is no volume {name}") from None

    @contextlib.asynccontextmanager
    async def _named(self, name: str) -> AsyncIterator[int]:
        """Context manager with the inode of that name, for requests about the volume. If the entry is not
        a volume, their NotFound gets a text that says what the entry is."""
        attr = await self._attr(name)
        try:
            yield attr.inode
        except NotFound:
            if other := await self._other(name):
                raise NotFound(other) from None
            raise

    async def _other(self, name: str) -> str:
        """Text that says what a non-volume entry of that name is, with the remedy. Empty: the entry is a
        volume, or does not exist any more."""
        try:
            attr = await self._attr(name)
        except NotFound:
            return ""
        try:
            await self._shown(attr.inode)
        except NotFound:
            kind = _KINDS.get(stat.S_IFMT(attr.mode), "special file")
            return f"{path_of(name)} is a {kind}, not a volume; rename it"
        return ""

    async def _found(self, name: str) -> Volume:
        async with self._named(name) as inode:
            return await self._shown(inode)

    async def _shown(self, inode: int) -> Volume:
        return volume_of((await self._ask(inode, _Request.SHOW)).volume)

    async def _change(self, name: str, action: pb.VolumeRequest.Action, **fields: Any) -> Volume:
        async with self._named(name) as inode:
            reply = await self._ask(inode, action, **fields)
            return replace(volume_of(reply.volume), revoked_in_s=reply.revoked_in_s)

    async def _ask(self, inode: int, action: pb.VolumeRequest.Action, **fields: Any) -> pb.VolumeReply:
        request = _Request(
            inode=inode, action=action, **{name: value for name, value in fields.items() if value is not None}
        )
        reply: pb.VolumeReply = await self._vfs.meta.ask(inode, wire_pb2.META_VOLUME, request, pb.VolumeReply)
        return reply


class _AsyncPool(Protocol):
    """A connected AsyncFileSystem."""

    @property
    def volumes(self) -> AsyncVolumes: ...


class _PoolRuntime(Protocol):
    """The event loop of a FileSystem, in its own thread, and the client that runs on it; see loop_thread."""

    @property
    def pool(self) -> _AsyncPool: ...

    def call(self, work: Coroutine[Any, Any, _Result]) -> _Result: ...


class Volumes:
    """Volume operations of a FileSystem, callable from any thread. See AsyncVolumes."""

    def __init__(self, runtime: Callable[[], _PoolRuntime]) -> None:
        """`runtime()` connects the file system if it is not connected yet."""
        self._runtime = runtime

    def _call(
        self,
        method: Callable[Concatenate[AsyncVolumes, _Arguments], Coroutine[Any, Any, _Result]],
        *arguments: _Arguments.args,
        **named: _Arguments.kwargs,
    ) -> _Result:
        runtime = self._runtime()
        return runtime.call(method(runtime.pool.volumes, *arguments, **named))

    def create(
        self,
        name: str,
        *,
        bytes_max: int = 0,
        files_max: int = 0,
        replicas: int | None = None,
        chunk_bytes: int | None = None,
        trash_s: int = 0,
        mode: int | None = None,
        encrypted: bool = False,
    ) -> Volume:
        return self._call(
            AsyncVolumes.create,
            name,
            bytes_max=bytes_max,
            files_max=files_max,
            replicas=replicas,
            chunk_bytes=chunk_bytes,
            trash_s=trash_s,
            mode=mode,
            encrypted=encrypted,
        )

    def list(self, *, removing: bool = False) -> list[Volume]:
        return self._call(AsyncVolumes.list, removing=removing)

    def show(self, name: str) -> Volume:
        return self._call(AsyncVolumes.show, name)

    def resize(self, name: str, *, bytes_max: int | None = None, files_max: int | None = None) -> Volume:
        return self._call(AsyncVolumes.resize, name, bytes_max=bytes_max, files_max=files_max)

    def set(
        self,
        name: str,
        *,
        trash_s: int | None = None,
        access: str | None = None,
        bytes_max: int | None = None,
        files_max: int | None = None,
    ) -> Volume:
        return self._call(
            AsyncVolumes.set, name, trash_s=trash_s, access=access, bytes_max=bytes_max, files_max=files_max
        )

    def rewrap(self, name: str) -> Volume:
        return self._call(AsyncVolumes.rewrap, name)

    def seal(self, name: str) -> Volume:
        return self._call(AsyncVolumes.seal, name)

    def grant(self, name: str, client: str, rights: str) -> Volume:
        return self._call(AsyncVolumes.grant, name, client, rights)

    def revoke(self, name: str, client: str) -> Volume:
        return self._call(AsyncVolumes.revoke, name, client)

    def attach(self, name: str, holder: str) -> Volume:
        return self._call(AsyncVolumes.attach, name, holder)

    def detach(self, name: str, holder: str) -> Volume:
        return self._call(AsyncVolumes.detach, name, holder)

    def remove(self, name: str, *, force: bool = False) -> Volume | None:
        return self._call(AsyncVolumes.remove, name, force=force)

    def removing(self, inode: int) -> Volume | None:
        return self._call(AsyncVolumes.removing, inode)

    def trash(self, name: str) -> builtins.list[TrashEntry]:
        return self._call(AsyncVolumes.trash, name)

    def restore(self, name: str, inode: int, to: str | None = None) -> None:
        self._call(AsyncVolumes.restore, name, inode, to)

    def purge(self, name: str, inode: int = 0) -> int:
        return self._call(AsyncVolumes.purge, name, inode)


def _is_name(name: str) -> bool:
    try:
        check_volume_name(name)
    except InvalidRequest:
        return False
    return True


def _place(name: str) -> str | None:
    """Path of the volume for error messages; None if the name is not valid."""
    return path_of(name) if _is_name(name) else None


def _check_size(name: str, value: int) -> None:
    if not 0 <= integer(name, value) < 1 << 63:
        raise InvalidRequest(f"{value!r} can be no quota: a whole number of bytes or files from 0 (none) on")


def _check_trash(trash_s: int) -> None:
    if not 0 <= integer("trash_s", trash_s) < 1 << 32:
        raise InvalidRequest(
            f"nothing removed can be kept for {trash_s!r} s: a whole number of seconds from 0 (not at all) "
            "on, and 136 years at most"
        )


def _check_entry(inode: int, least: int) -> None:
    if not least <= integer("inode", inode) < 1 << 64:
        raise InvalidRequest(
            f"{inode!r} is not an inode number; the trash, when listed, shows those that it has"
        )


def _policy(
    name: str,
    bytes_max: int,
    files_max: int,
    replicas: int | None,
    chunk_bytes: int | None,
    trash_s: int,
    encrypted: bool,
) -> pb.VolumePolicy:
    check_volume_name(name)
    _check_size("bytes_max", bytes_max)
    _check_size("files_max", files_max)
    _check_trash(trash_s)
    policy = pb.VolumePolicy(bytes_max=bytes_max, files_max=files_max, trash_s=trash_s, encrypted=encrypted)
    if replicas is not None:
        if not 1 <= integer("replicas", replicas) <= 3:
            raise InvalidRequest(f"a volume has 1 to 3 replicas, not {replicas}")
        policy.table = replicas
    if chunk_bytes is not None:
        policy.chunk_bits = layout_of(integer("chunk_bytes", chunk_bytes)).chunk_bits
    return policy


def _check_same(found: Volume, wanted: pb.VolumePolicy, mode: int | None, found_mode: int) -> None:
    """Raise AlreadyExists if an existing volume differs from the requested one."""
    given = stat.S_IMODE(found_mode) if mode is None else mode
    rows: tuple[tuple[str, object, object, Callable[[Any], str]], ...] = (
        ("size", found.bytes_max, wanted.bytes_max, _exact_bytes),
        ("files", found.files_max, wanted.files_max, _count),
        ("encryption", found.encrypted, wanted.encrypted, lambda on: "on" if on else "off"),
        ("trash", found.trash_s, wanted.trash_s, _seconds),
        ("mode", f"{stat.S_IMODE(found_mode):o}", f"{given:o}", str),
        ("replicas", found.replicas, wanted.table or found.replicas, str),
        (
            "chunk size",
            found.chunk_bytes,
            1 << wanted.chunk_bits if wanted.chunk_bits else found.chunk_bytes,
            _exact_bytes,
        ),
    )
    differs = [f"{what} {show(is_)}, not {show(asked)}" for what, is_, asked, show in rows if is_ != asked]
    if differs:
        ways = _changing(found, wanted)
        remedy = (
            f"change it with: {'   and: '.join(ways)}   or choose another name"
            if ways
            else "choose another name"
        )
        raise AlreadyExists(
            f"volume {found.name} is there already, with {', '.join(differs)}; nothing was changed",
            remedy=remedy,
        )


def _changing(found: Volume, wanted: pb.VolumePolicy) -> list[str]:
    """Commands that change the volume as requested, as far as possible."""
    quotas = []
    if found.bytes_max != wanted.bytes_max:
        quotas.append(f"--size {size_argument(wanted.bytes_max)}")
    if found.files_max != wanted.files_max:
        quotas.append(f"--files {wanted.files_max}")
    ways = [f"nvpool volume resize POOL {found.name} {' '.join(quotas)}"] if quotas else []
    if found.trash_s != wanted.trash_s:
        ways.append(f"nvpool volume set POOL {found.name} --trash {wanted.trash_s}s")
    return ways


def _exact_bytes(count: int) -> str:
    """Size with a unit only if the unit is exact. Two sizes that differ must not look alike."""
    if not count:
        return "none"
    for size, unit in ((TIB, "TiB"), (GIB, "GiB"), (MIB, "MiB"), (KIB, "KiB")):
        if count % size == 0:
            return f"{count // size} {unit}"
    return f"{count:,} bytes"


def _count(count: int) -> str:
    return f"{count:,}" if count else "no limit"


def _seconds(seconds: int) -> str:
    for size, unit in ((86400, "d"), (3600, "h"), (60, "m")):
        if seconds and seconds % size == 0:
            return f"{seconds // size}{unit}"
    return f"{seconds}s" if seconds else "off"
