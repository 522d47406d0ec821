"""Volumes of a pool: directories with a policy, made, shown, changed and removed.

Every call says how a volume is to be, so it may be repeated: what is so already is done. Errors are OSError as everywhere in
the SDK, with nvpool's own as their cause: FileExistsError names what differs, FileNotFoundError a volume that is not there,
EBUSY who uses it, EDQUOT a quota. Called by the CLI and the bridges; reached as `.volumes` of a file system.
"""

from __future__ import annotations

import builtins
import contextlib
import os
import stat
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, TypeVar

from nvpool.client.reverse_paths import PathFinder
from nvpool.client.state.types import Caller
from nvpool.core.errors import AlreadyExists, InvalidRequest, NotADirectory, NotFound
from nvpool.core.ids import ROOT_INODE
from nvpool.core.names import VOLUMES, check_holder, check_volume_name, member_named, path_of
from nvpool.core.units import GIB, KIB, MIB, TIB
from nvpool.poolmap.layout import layout_of
from nvpool.rpc.v1 import meta_pb2 as pb
from nvpool.rpc.v1 import wire_pb2
from nvpool.sdk.argument_checks import integer, text
from nvpool.sdk.paths import as_told, locate, name_bytes, names_of

if TYPE_CHECKING:
    from nvpool.sdk.aio import AsyncFileSystem
    from nvpool.sdk.filesystem import FileSystem

OPEN, LISTED = "open", "listed"
READY, REMOVING = "ready", "removing"
_RIGHTS = {"ro": False, "rw": True}
_ROOT_MODE, _MODE = 0o755, 0o777
_KINDS = {stat.S_IFREG: "file", stat.S_IFDIR: "directory", stat.S_IFLNK: "link"}
_FIND_S, _DEPTH_MAX = 5.0, 100
_TRIES = 3
_Wish = pb.VolumeRequest

_Arguments = ParamSpec("_Arguments")
_Result = TypeVar("_Result")


@dataclass(frozen=True)
class Volume:
    """A volume as its shard told it. Sizes in bytes; 0 is no limit. `inode` is its identity: a name may stand for another
    volume later, an inode number never does."""

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
    """"open" to every client of the pool, or "listed": only to those of `grants`."""
    grants: Mapping[str, str] = field(default_factory=dict)
    """By member of the pool: "ro" or "rw"."""
    attachments: tuple[str, ...] = ()
    """Who has said that he uses it; it is not removed meanwhile."""
    state: str = READY
    """"removing": it has no name any more, and `files_used` of `files_removing` are left to go."""
    created_ns: int = 0
    encrypted: bool = False
    """What is stored of its files is encrypted; their names and attributes are not."""
    pool_key: str = ""
    """Of an encrypted volume: identity of the pool key that protects its key."""
    bytes_reserved: int = 0
    """Promised to writers, beside what is used."""
    files_removing: int = 0
    revoked_in_s: int = 0
    """Of a right that was just taken back: for up to so long some target takes grants from before; 0: none does."""


@dataclass(frozen=True)
class TrashEntry:
    """Something that was removed in a volume and is kept for a while."""

    inode: int
    path: str
    """Where it was, as far as that is known; else its name behind the number of its directory."""
    kind: str
    """file, directory, link or other."""
    bytes: int
    removed_ns: int
    expires_ns: int


def volume_of(state: pb.VolumeState) -> Volume:
    return Volume(name=state.name, inode=state.inode, path=path_of(state.name), bytes_max=state.bytes_max,
                  files_max=state.files_max, bytes_used=state.bytes_used, files_used=state.files_used, replicas=state.table,
                  chunk_bytes=1 << state.chunk_bits, sealed=state.sealed, trash_s=state.trash_s,
                  access=LISTED if state.listed else OPEN,
                  grants={grant.client: "rw" if grant.write else "ro" for grant in state.grants},
                  attachments=tuple(state.attachments), state=REMOVING if state.removing else READY,
                  created_ns=state.created_ns, encrypted=bool(state.pool_key), pool_key=state.pool_key,
                  bytes_reserved=state.bytes_reserved, files_removing=state.files_removing)


class AsyncVolumes:
    """Of an AsyncFileSystem."""

    def __init__(self, pool: AsyncFileSystem) -> None:
        self._pool = pool
        self._vfs = pool.vfs
        self.client = pool.client
        self._directory = 0

    async def create(self, name: str, *, bytes_max: int = 0, files_max: int = 0, replicas: int | None = None,
                     chunk_bytes: int | None = None, trash_s: int = 0, mode: int | None = None,
                     encrypted: bool = False) -> Volume:
        """The volume, which is there on return, empty or not. 0 is no limit; replicas and chunk_bytes are those of /volumes
        where not given. `mode` is of its directory, which belongs to root (0o777 where not given). `encrypted`: what is
        stored of its files is encrypted with a key of the volume's own, which the pool key protects.

        FileExistsError  there is a volume of that name with other limits, or a directory that is none: the text says what
                         differs
        EINVAL           the name can be none, or a size or the mode makes no sense
        ENOKEY           `encrypted`, and the volume's node has no pool key: set encryption.key_file in node.toml
        """
        return (await self.made(name, bytes_max=bytes_max, files_max=files_max, replicas=replicas, chunk_bytes=chunk_bytes,
                                trash_s=trash_s, mode=mode, encrypted=encrypted))[0]

    async def made(self, name: str, *, bytes_max: int = 0, files_max: int = 0, replicas: int | None = None,
                   chunk_bytes: int | None = None, trash_s: int = 0, mode: int | None = None,
                   encrypted: bool = False) -> tuple[Volume, bool]:
        """As `create`: the volume, and whether it was made now; else it was there already, as it was asked for."""
        with as_told(path_of(name) if _is_name(name) else None):
            wanted = _wish(name, bytes_max, files_max, replicas, chunk_bytes, trash_s, encrypted)
            if mode is not None and not 0 <= integer("mode", mode) <= 0o7777:
                raise InvalidRequest(f"{mode!r} is no mode of a directory; it is from 0 to 0o7777")
            if wanted.table and wanted.table not in self._vfs.view.map.table_by_id:
                await self._vfs.view.refresh()
            for _ in range(_TRIES):
                directory = await self._home(make=True)
                try:
                    attr = await self._vfs.make_volume(directory, name.encode(), _MODE if mode is None else mode, wanted)
                    return await self._shown(attr.inode), True
                except AlreadyExists:
                    try:
                        found = await self._found(name)
                    except NotFound:
                        if other := await self._other(name):
                            raise AlreadyExists(other) from None
                        continue  # removed since
                    _check_same(found, wanted, mode, (await self._attr(name)).mode if mode is not None else 0)
                    return found, False
                except NotFound:
                    self._directory = 0  # the directory of volumes itself was removed since
            raise AlreadyExists(f"volume {name} is made and removed by others all the time")

    async def list(self, *, removing: bool = False) -> list[Volume]:
        """All volumes by name; with `removing` those too that have lost theirs and are being emptied."""
        with as_told():
            replies = await self._vfs.ask_all(wire_pb2.META_VOLUMES, pb.VolumesReply, pb.VolumesRequest)
            found = {state.inode: volume_of(state) for reply in replies for state in reply.volumes}
            shown = [volume for volume in found.values() if removing or volume.state == READY]
            return sorted(shown, key=lambda volume: (volume.name, volume.created_ns))

    async def show(self, name: str) -> Volume:
        """FileNotFoundError: no volume has that name."""
        with as_told(_place(name)):
            return await self._found(name)

    async def resize(self, name: str, *, bytes_max: int | None = None, files_max: int | None = None) -> Volume:
        """With these limits from now on; 0 is none, None leaves it. EINVAL where more is used: it names how much."""
        return await self.set(name, bytes_max=bytes_max, files_max=files_max)

    async def set(self, name: str, *, trash_s: int | None = None, access: str | None = None, bytes_max: int | None = None,
                  files_max: int | None = None) -> Volume:
        """Change what is not None. `access`: "open" or "listed"."""
        with as_told(_place(name)):
            if access not in (None, OPEN, LISTED):
                raise InvalidRequest(f"access to a volume is {OPEN!r} or {LISTED!r}, not {access!r}")
            _check_size("bytes_max", 0 if bytes_max is None else bytes_max)
            _check_size("files_max", 0 if files_max is None else files_max)
            _check_trash(0 if trash_s is None else trash_s)
            return await self._tell(name, _Wish.SET, trash_s=trash_s, bytes_max=bytes_max, files_max=files_max,
                                    listed=None if access is None else access == LISTED)

    async def rewrap(self, name: str) -> Volume:
        """Protect the key of an encrypted volume with the first pool key of the node that answers. The data stays as it is."""
        with as_told(path_of(name) if _is_name(name) else None):
            return await self._tell(name, _Wish.REWRAP)

    async def seal(self, name: str) -> Volume:
        """What is in it stays as it is for ever. EBUSY while files of it are open."""
        with as_told(_place(name)):
            await self._vfs.meta.release_now((await self._attr(name)).inode)
            return await self._tell(name, _Wish.SEAL)

    async def grant(self, name: str, client: str, rights: str) -> Volume:
        """The client (NAME, or a member as in `nvpool client ls`) may read ("ro") or write ("rw") from now on; the volume is
        "listed" from then on, so nobody else may."""
        with as_told(_place(name)):
            if text("rights", rights) not in _RIGHTS:
                raise InvalidRequest(f"a right to a volume is 'ro' or 'rw', not {rights!r}")
            member = member_named(text("client", client))
            return await self._tell(name, _Wish.GRANT, grant=pb.VolumeGrant(client=member, write=_RIGHTS[rights]))

    async def revoke(self, name: str, client: str) -> Volume:
        """The client has no right any more, and what it has open is refused on return. `revoked_in_s` of the answer is not 0
        where a target that does not answer may take grants from before."""
        with as_told(_place(name)):
            return await self._tell(name, _Wish.REVOKE, grant=pb.VolumeGrant(client=member_named(text("client", client))))

    async def attach(self, name: str, holder: str) -> Volume:
        """`holder` uses it: it is not removed until he is detached."""
        with as_told(_place(name)):
            check_holder(holder)
            return await self._tell(name, _Wish.ATTACH, holder=holder)

    async def detach(self, name: str, holder: str) -> Volume:
        """`holder` does not use it, or never did."""
        with as_told(_place(name)):
            check_holder(holder)
            return await self._tell(name, _Wish.DETACH, holder=holder)

    async def remove(self, name: str, *, force: bool = False) -> Volume | None:
        """It has no name any more on return; what is in it goes in the background, and is what is returned (None: nothing was).

        FileNotFoundError  there is none of that name
        EBUSY              it is attached (not looked at with `force`), or files of it are open; the text says by whom
        """
        with as_told(_place(name)):
            async with self._named(name) as inode:
                await self._vfs.meta.release_now(inode)
                reply = await self._ask(inode, _Wish.REMOVE, force=bool(force))
            directory = await self._home()
            self._vfs.forget_name(directory, name.encode(), inode)
            return volume_of(reply.volume) if reply.HasField("volume") else None

    async def removing(self, inode: int) -> Volume | None:
        """How far the removal of the volume has come; None: it is over."""
        with as_told():
            _check_entry(inode, 1)
            try:
                return await self._shown(inode)
            except NotFound:
                return None

    # -- trash ---------------------------------------------------------------------------------------------------------

    async def trash(self, name: str) -> builtins.list[TrashEntry]:
        """What is in the volume's trash, the oldest first."""
        with as_told(_place(name)):
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
        """Put an entry of the trash back where it was, first its directory where that was removed too; or to the path `to` in
        the volume.

        FileExistsError    its name stands for something else by now
        FileNotFoundError  it is not in the trash, or its directory is gone for good: say `to`
        """
        with as_told(_place(name)):
            _check_entry(inode, 1)
            if to is not None:
                name_bytes(to)
            place = None
            if to is not None:
                with as_told(to):
                    if not names_of(to):
                        raise InvalidRequest(f"{to!r} is no name to put it back under; say one in the volume, as "
                                             f"{path_of(name)}/again")
                    try:
                        place = await locate(self._vfs, to, follow=False)
                    except NotFound:
                        raise NotFound(f"the pool has no such directory to put it in; say a path without the name of the "
                                       f"pool, as {path_of(name)}/again") from None
                    if place.attr is not None:
                        raise AlreadyExists(f"{to} exists")
            async with self._named(name) as volume:
                await self._ask_trash(volume, pb.TrashRequest.RESTORE, entry=inode, directory=place.parent if place else 0,
                                      name=place.name if place else b"")
            self._vfs.cache.begin_anew(lambda inode: True)

    async def purge(self, name: str, inode: int = 0) -> int:
        """Remove an entry of the trash for good, or (0) all of them; how many."""
        with as_told(_place(name)):
            _check_entry(inode, 0)
            purged = 0
            async with self._named(name) as volume:
                while True:
                    reply = await self._ask_trash(volume, pb.TrashRequest.PURGE, entry=inode)
                    purged += reply.purged
                    if inode or not reply.next:
                        return purged

    async def _ask_trash(self, volume: int, wish: pb.TrashRequest.Wish, **fields: Any) -> pb.TrashReply:
        request = pb.TrashRequest(inode=volume, wish=wish, **fields)
        reply: pb.TrashReply = await self._vfs.meta.ask(volume, wire_pb2.META_TRASH, request, pb.TrashReply)
        return reply

    async def _described(self, found: builtins.list[pb.TrashEntry]) -> builtins.list[TrashEntry]:
        removed = {entry.inode: entry for entry in found}
        finder = PathFinder(lambda: self._vfs.view.map, self.client.dialer, self._vfs.clock)
        there = await finder.find({entry.directory for entry in found} - removed.keys(), _FIND_S) if found else {}

        def path_of_entry(entry: pb.TrashEntry, depth: int = 0) -> str:
            above = removed.get(entry.directory)
            if above is not None and depth < _DEPTH_MAX:
                return f"{path_of_entry(above, depth + 1)}/{os.fsdecode(entry.name)}"
            known = there.get(entry.directory)
            return f"{os.fsdecode(known) if known is not None else f'#{entry.directory}'}/{os.fsdecode(entry.name)}"

        return [TrashEntry(entry.inode, path_of_entry(entry), _KINDS.get(stat.S_IFMT(entry.mode), "other"),
                           entry.size if stat.S_ISREG(entry.mode) else 0, entry.removed_ns, entry.expires_ns)
                for entry in found]

    # -- below ---------------------------------------------------------------------------------------------------------

    async def _home(self, make: bool = False) -> int:
        """The inode of the directory of volumes. NotFound where there are none yet."""
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
            raise NotADirectory("/volumes of this pool is no directory; rename it")
        self._directory = attr.inode
        return attr.inode

    async def _attr(self, name: str) -> pb.Attr:
        """Of what has the name, volume or not."""
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
        """The inode of that name, for questions about the volume. Where it is none, their NotFound says what it is."""
        attr = await self._attr(name)
        try:
            yield attr.inode
        except NotFound:
            if other := await self._other(name):
                raise NotFound(other) from None
            raise

    async def _other(self, name: str) -> str:
        """What has the name and is no volume, with the remedy; "": a volume has it, or nothing any more."""
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
        return volume_of((await self._ask(inode, _Wish.SHOW)).volume)

    async def _tell(self, name: str, wish: pb.VolumeRequest.Wish, **fields: Any) -> Volume:
        async with self._named(name) as inode:
            reply = await self._ask(inode, wish, **fields)
            return replace(volume_of(reply.volume), revoked_in_s=reply.revoked_in_s)

    async def _ask(self, inode: int, wish: pb.VolumeRequest.Wish, **fields: Any) -> pb.VolumeReply:
        request = _Wish(inode=inode, wish=wish, **{name: value for name, value in fields.items() if value is not None})
        reply: pb.VolumeReply = await self._vfs.meta.ask(inode, wire_pb2.META_VOLUME, request, pb.VolumeReply)
        return reply


class Volumes:
    """As AsyncVolumes, for ordinary programs: of a FileSystem, from any thread."""

    def __init__(self, pool: FileSystem) -> None:
        self._pool = pool

    def _call(self, method: Callable[Concatenate[AsyncVolumes, _Arguments], Coroutine[Any, Any, _Result]],
              *arguments: _Arguments.args, **named: _Arguments.kwargs) -> _Result:
        runtime = self._pool._running()
        return runtime.call(method(runtime.pool.volumes, *arguments, **named))

    def create(self, name: str, *, bytes_max: int = 0, files_max: int = 0, replicas: int | None = None,
               chunk_bytes: int | None = None, trash_s: int = 0, mode: int | None = None,
               encrypted: bool = False) -> Volume:
        return self._call(AsyncVolumes.create, name, bytes_max=bytes_max, files_max=files_max, replicas=replicas,
                          chunk_bytes=chunk_bytes, trash_s=trash_s, mode=mode, encrypted=encrypted)

    def list(self, *, removing: bool = False) -> list[Volume]:
        return self._call(AsyncVolumes.list, removing=removing)

    def show(self, name: str) -> Volume:
        return self._call(AsyncVolumes.show, name)

    def resize(self, name: str, *, bytes_max: int | None = None, files_max: int | None = None) -> Volume:
        return self._call(AsyncVolumes.resize, name, bytes_max=bytes_max, files_max=files_max)

    def set(self, name: str, *, trash_s: int | None = None, access: str | None = None, bytes_max: int | None = None,
            files_max: int | None = None) -> Volume:
        return self._call(AsyncVolumes.set, name, trash_s=trash_s, access=access, bytes_max=bytes_max, files_max=files_max)

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
    """For the error, where the name can be one at all."""
    return path_of(name) if _is_name(name) else None


def _check_size(name: str, value: int) -> None:
    if not 0 <= integer(name, value) < 1 << 63:
        raise InvalidRequest(f"{value!r} can be no quota: a whole number of bytes or files from 0 (none) on")


def _check_trash(trash_s: int) -> None:
    if not 0 <= integer("trash_s", trash_s) < 1 << 32:
        raise InvalidRequest(f"nothing removed can be kept for {trash_s!r} s: a whole number of seconds from 0 (not at all) "
                             "on, and 136 years at most")


def _check_entry(inode: int, least: int) -> None:
    if not least <= integer("inode", inode) < 1 << 64:
        raise InvalidRequest(f"{inode!r} is no number of an inode; the trash, when listed, shows those that it has")


def _wish(name: str, bytes_max: int, files_max: int, replicas: int | None, chunk_bytes: int | None,
          trash_s: int, encrypted: bool) -> pb.VolumeWish:
    check_volume_name(name)
    _check_size("bytes_max", bytes_max)
    _check_size("files_max", files_max)
    _check_trash(trash_s)
    wish = pb.VolumeWish(bytes_max=bytes_max, files_max=files_max, trash_s=trash_s, encrypted=encrypted)
    if replicas is not None:
        if not 1 <= integer("replicas", replicas) <= 3:
            raise InvalidRequest(f"a volume has 1 to 3 replicas, not {replicas}")
        wish.table = replicas
    if chunk_bytes is not None:
        wish.chunk_bits = layout_of(integer("chunk_bytes", chunk_bytes)).chunk_bits
    return wish


def _check_same(found: Volume, wanted: pb.VolumeWish, mode: int | None, found_mode: int) -> None:
    """AlreadyExists where a volume that is there is not as it is wanted."""
    given = stat.S_IMODE(found_mode) if mode is None else mode
    rows: tuple[tuple[str, object, object, Callable[[Any], str]], ...] = (
        ("size", found.bytes_max, wanted.bytes_max, _exact_bytes), ("files", found.files_max, wanted.files_max, _count),
        ("encryption", found.encrypted, wanted.encrypted, lambda on: "on" if on else "off"),
        ("trash", found.trash_s, wanted.trash_s, _seconds),
        ("mode", f"{stat.S_IMODE(found_mode):o}", f"{given:o}", str),
        ("replicas", found.replicas, wanted.table or found.replicas, str),
        ("chunk size", found.chunk_bytes, 1 << wanted.chunk_bits if wanted.chunk_bits else found.chunk_bytes, _exact_bytes))
    differs = [f"{what} {show(is_)}, not {show(wish)}" for what, is_, wish, show in rows if is_ != wish]
    if differs:
        ways = _changing(found, wanted)
        remedy = f"change it with: {'   and: '.join(ways)}   or choose another name" if ways else "choose another name"
        raise AlreadyExists(f"volume {found.name} is there already, with {', '.join(differs)}; nothing was changed",
                            remedy=remedy)


def _changing(found: Volume, wanted: pb.VolumeWish) -> list[str]:
    """Commands that make the volume as it is wanted, as far as it can be changed."""
    sizes = (("size", found.bytes_max, wanted.bytes_max), ("files", found.files_max, wanted.files_max))
    quotas = [f"--{word} {wish}" for word, is_, wish in sizes if is_ != wish]
    ways = [f"nvpool volume resize POOL {found.name} {' '.join(quotas)}"] if quotas else []
    if found.trash_s != wanted.trash_s:
        ways.append(f"nvpool volume set POOL {found.name} --trash {wanted.trash_s}s")
    return ways


def _exact_bytes(count: int) -> str:
    """With a unit only where that loses nothing: two sizes that differ must not look alike."""
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
