"""Volume operations for containers: create, remove, stage, publish and expand; each may be repeated.

Two services call this module in one process and on one event loop: bridge/docker (Docker, Podman) and
bridge/csi (Kubernetes). The module keeps three things consistent: the pool's record of attachments, the
references of this host (bridge/volume_references), and the bind mounts that containers see (bridge/bind_mounts).
The order of the steps guarantees that a crash between two steps leaves one reference too many, never one too
few; `settle` and `reconcile` remove the surplus. Containers see a volume through a bind mount of its own
directory, so they can reach nothing outside it. Names, holders and paths are validated here (bridge/request_validation)
and nowhere else. Errors are those of nvpool.

The pool is mounted once on this host, by a process other than the bridge. So bind mounts survive the end of
the bridge, and if the mount process is killed, its holder keeps the mount.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple
from weakref import WeakValueDictionary

from nvpool.bridge.bind_mounts import Binds
from nvpool.bridge.container_mount_scan import volumes_in_containers
from nvpool.bridge.request_validation import (
    Options,
    checked_holder,
    checked_name,
    checked_subpath,
    parse_options,
    shown,
)
from nvpool.bridge.volume_references import Publication, Reference, References
from nvpool.core.clock import SYSTEM_CLOCK, Clock
from nvpool.core.errors import (
    AlreadyExists,
    InUse,
    InvalidRequest,
    NoAttribute,
    NotFound,
    NvpoolError,
    Refused,
    from_os_error,
)
from nvpool.core.names import VOLUMES, path_of
from nvpool.core.units import format_bytes, size_argument
from nvpool.host.mountinfo import look_at, mount_at
from nvpool.host.process_identity import boot_id

if TYPE_CHECKING:
    from nvpool.sdk.async_filesystem import AsyncFileSystem
    from nvpool.sdk.volumes import Volume

SUBPATH_ATTRIBUTE = "trusted.nvpool.subpath"
"""Extended attribute of a volume's directory: the subpath that containers see, but cannot read or set."""
SETTLED_S = 60.0
"""Age at which a reference must have a container; a reference of this age without a container is stale."""
CLOSED_S = 10.0
"""Time within which the metadata service learns that files of ended containers are closed."""
_AGAIN_S = 0.25

log = logging.getLogger("nvpool.bridge.volumes")


class Stats(NamedTuple):
    bytes_total: int
    bytes_used: int
    bytes_available: int
    files_total: int
    """0: no limit."""
    files_used: int
    files_available: int


class Condition(NamedTuple):
    abnormal: bool
    text: str
    """The problem and its remedy, or a message that there is none."""


@contextlib.contextmanager
def our_errors() -> Iterator[None]:
    """Translate errors of the SDK, which are OSError, into nvpool's errors: the cause, if it is one."""
    try:
        yield
    except OSError as error:
        if isinstance(error.__cause__, NvpoolError):
            raise error.__cause__ from None
        raise from_os_error(error, "use the pool") from error


class BridgeVolumes:
    """Volumes of one pool on this host.

    The caller owns `pool` and closes it. `mountpoint`: mount of the whole pool on this host; `mounted` is
    awaited before each use and ensures the mount. `state`: a directory for the state file and the bind
    mounts, for this object only. `node`: the name of this host in attachments, the same after a reboot.

    Requests for one volume run one after another. Any request may be cancelled and repeated.
    """

    def __init__(
        self,
        pool: AsyncFileSystem,
        mountpoint: Path,
        state: Path,
        *,
        node: str = "",
        mounted: Callable[[], Awaitable[object]] | None = None,
        settled_s: float = SETTLED_S,
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        state = Path(os.path.realpath(state))
        self._pool, self._mountpoint, self._state, self._clock = pool, mountpoint, state, clock
        self.node = checked_holder(node or socket.gethostname())
        self.mounted, self.settled_s = mounted, settled_s
        self.binds = Binds(mountpoint, state / "mounts")
        self._turns: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        self._references: References

    # -- life ------------------------------------------------------------------------------------------------------------

    async def begin(self) -> None:
        """Load the state of an earlier bridge. Call this once, before any other method.

        Refused, Damaged: the state file cannot be used, and the text says why.
        """
        with our_errors():
            self.binds.places.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._references = References(self._state / "references.json", boot_id())
        for name in self._references.volumes():
            for holder in self._references.of(name):
                try:
                    with our_errors():
                        await self._pool.volumes.attach(name, self._attachment(holder))
                except NvpoolError as error:
                    log.warning("volume %s is used here and the pool does not know: %s", name, error)
        await self.settle()

    async def settle(self) -> int:
        """Report ended references to the pool; return how many remain. The daemon calls this periodically."""
        for name, holder in self._references.ended():
            try:
                async with self._turn(name):
                    if holder not in self._references.of(name):
                        await self._end(name, holder)
            except NvpoolError as error:
                log.warning(
                    "the end of the use of volume %s by %s could not be reported to the pool yet: %s",
                    name,
                    holder,
                    error,
                )
        return len(self._references.ended())

    async def reconcile(self, face: str) -> list[tuple[str, str]]:
        """End references of one service that have no container; return them as (name, holder).

        Call this after the engine of the service has restarted. `face` is the prefix of the service's holder
        ids, as "docker/". A reference stays if a container sees the volume, or if the reference is younger than
        `settled_s`. An attachment that the pool knows but this host has lost becomes a reference again, or ends.
        """
        in_use = await asyncio.to_thread(volumes_in_containers, f"/{VOLUMES.decode()}", self.binds.places)
        own, now_s, ended = self._attachment(face), self._clock.boottime_s(), []
        with our_errors():
            attached = {volume.name: volume.attachments for volume in await self._pool.volumes.list()}
        for name in sorted({*attached, *self._references.volumes()}):
            async with self._turn(name):
                known = self._references.of(name)
                for holder in await self._lost(name, attached.get(name, ()), own, known):
                    if name in in_use:
                        log.warning(
                            "volume %s is used by %s: the reference was lost, and is here again", name, holder
                        )
                        self._references.put(name, holder, Reference(since_s=now_s))
                    else:
                        await self._end(name, holder)
                        ended.append((name, holder))
                for holder, reference in known.items():
                    if (
                        holder.startswith(face)
                        and name not in in_use
                        and reference.since_s + self.settled_s <= now_s
                    ):
                        log.warning(
                            "no container uses volume %s for %s any more: the reference ends", name, holder
                        )
                        await self._end(name, holder)
                        ended.append((name, holder))
        return ended

    async def _lost(
        self, name: str, attached: Iterable[str], own: str, known: Mapping[str, Reference]
    ) -> list[str]:
        """Return the holders that the pool knows and this host does not.

        `attached` may be old, because it was read before this request held the lock; so it is read again.
        """
        begin = len(self._attachment(""))
        if all(held[begin:] in known for held in attached if held.startswith(own)):
            return []
        try:
            attached = (await self._show(name)).attachments
        except NotFound:
            return []
        return [held[begin:] for held in attached if held.startswith(own) and held[begin:] not in known]

    def uses(self) -> tuple[int, int]:
        """Return (holders that use volumes on this host, ended holders not yet reported to the pool)."""
        return (
            sum(len(self._references.of(name)) for name in self._references.volumes()),
            len(self._references.ended()),
        )

    # -- volumes ---------------------------------------------------------------------------------------------------------

    async def create(self, name: str, options: Options | Mapping[str, Any] | None = None) -> Volume:
        """Ensure that the volume exists as `options` say, and return it.

        An existing volume is accepted if it agrees with the options that were given. An existing empty volume
        still gets the seal and the subpath, because an earlier call may have been interrupted before these.
        AlreadyExists, with the remedy: the volume differs. InvalidRequest, NameTooLong: of name or options.
        """
        name = checked_name(name)
        wanted = options if isinstance(options, Options) else parse_options(options)
        async with self._turn(name):
            with our_errors():
                try:
                    volume = await self._pool.volumes.create(
                        name, bytes_max=wanted.bytes_max, files_max=wanted.files_max, replicas=wanted.replicas
                    )
                except AlreadyExists:
                    volume = await self._pool.volumes.show(name)
                except OSError as error:
                    if not isinstance(error.__cause__, AlreadyExists):
                        raise
                    volume = await self._pool.volumes.show(name)
            _check_agrees(volume, wanted)
            if wanted.subpath:
                stored = await self._subpath_of(name)
                if stored != wanted.subpath and (stored or volume.files_used):
                    has = f"subpath {shown(stored)}" if stored else "files and no subpath"
                    raise AlreadyExists(
                        f"the volume {name} is there, with {has}; leave the option out, or take another name"
                    )
                if not stored:
                    with our_errors():
                        await self._pool.setxattr(path_of(name), SUBPATH_ATTRIBUTE, wanted.subpath.encode())
            if wanted.sealed and not volume.sealed:
                with our_errors():
                    await self._pool.volumes.seal(name)
                volume = await self._show(name)
        return volume

    async def remove(self, name: str) -> None:
        """Remove the volume if it exists. InUse: the volume is in use on this or another host."""
        name = checked_name(name)
        async with self._turn(name):
            if held := self._references.of(name):
                raise InUse(
                    f"the volume {name} is in use on this host, by {', '.join(sorted(held)[:3])} ({len(held)} in all); "
                    "stop the containers that use it first"
                )
            for left, holder in self._references.ended():
                if left == name:
                    await self._end(name, holder)
            closed_s = self._clock.boottime_s() + CLOSED_S
            while True:
                try:
                    with our_errors():
                        await self._pool.volumes.remove(name)
                    break
                except NotFound:
                    break
                except InUse as error:
                    if self._clock.boottime_s() >= closed_s or await self._is_attached(name):
                        raise InUse(f"{error}; stop the containers that use it first") from None
                await asyncio.sleep(_AGAIN_S)  # a container that has just ended may still have had files open
            await self.binds.keep_only(name, set())

    async def get(self, name: str) -> Volume:
        """Return the volume. NotFound: there is none."""
        return await self._show(checked_name(name))

    async def list(self) -> list[Volume]:
        """Return the volumes of the pool whose names containers may use, sorted by name."""
        with our_errors():
            found = await self._pool.volumes.list()
        kept = []
        for volume in found:
            with contextlib.suppress(Refused):
                checked_name(volume.name)
                kept.append(volume)
        return sorted(kept, key=lambda volume: volume.name)

    async def expand(self, name: str, bytes_max: int) -> Volume:
        """Raise the quota of the volume to at least `bytes_max`; a larger or unlimited quota stays."""
        name = checked_name(name)
        async with self._turn(name):
            volume = await self._show(name)
            if volume.bytes_max and volume.bytes_max < bytes_max:
                with our_errors():
                    await self._pool.volumes.resize(name, bytes_max=bytes_max)
                volume = await self._show(name)
            return volume

    async def capacity(self) -> int:
        """Return the bytes that can still be written to the pool."""
        with our_errors():
            found = await self._pool.statfs()
        return found.blocks_available * found.block_bytes

    async def stats(self, name: str) -> Stats:
        """Return size and use of the volume. NotFound: there is none."""
        volume, left = await self.get(name), await self.capacity()
        total = volume.bytes_max or volume.bytes_used + left
        files_left = max(0, volume.files_max - volume.files_used)
        return Stats(
            total,
            volume.bytes_used,
            max(0, min(total - volume.bytes_used, left)),
            volume.files_max,
            volume.files_used,
            files_left,
        )

    async def condition(self, name: str) -> Condition:
        """Return whether containers of this host can use the volume now. NotFound: there is none.

        A hung mount delays the result by LOOK_S at most.
        """
        volume = await self.get(name)
        there = mount_at(self._mountpoint)
        if there is None or not there.ours:
            return Condition(
                True, f"the pool is not mounted at {self._mountpoint}; the next use of a volume mounts it"
            )
        if (state := await asyncio.to_thread(look_at, self._mountpoint)) != "alive":
            return Condition(
                True,
                f"the pool's mount at {self._mountpoint} is {state}; see nvpool status, and: nvpool mount "
                f"--force POOL {self._mountpoint}",
            )
        for reference in self._references.of(volume.name).values():
            bound = mount_at(self.binds.place(volume.name, reference.read_only, reference.subpath))
            if bound is None or bound.device != there.device:
                return Condition(
                    True, f"containers see a mount of {volume.name} that has ended; start them again"
                )
        return Condition(False, "the volume can be used")

    # -- use of them -----------------------------------------------------------------------------------------------------

    async def stage(self, name: str, holder: str, *, read_only: bool = False, subpath: str = "") -> Path:
        """Bind the volume (or its directory `subpath`, which is created) on this host, and return where.

        The bind stays until `unstage`. `holder` is the id of the user of the volume; a repeated call with the
        same holder changes nothing. From now on the pool records that this host uses the volume, so the volume
        cannot be removed. A sealed volume is bound read-only. After an error the holder has no reference.

        NotFound, InvalidRequest, NameTooLong, NotADirectory, TooManySymlinks   the request is not possible
        AlreadyExists    the holder uses the volume already, in another way
        Unavailable      the pool or its mount does not answer: repeat
        """
        name, holder, subpath = checked_name(name), checked_holder(holder), checked_subpath(subpath)
        async with self._turn(name):
            volume = await self._show(name)
            there = self._references.of(name).get(holder)
            if there is not None and (read_only > there.read_only or subpath not in ("", there.subpath)):
                raise AlreadyExists(
                    f"{holder} uses the volume {name} already, in another way; give it back first"
                )
            wanted = there or Reference(
                read_only=read_only or volume.sealed,
                subpath=subpath or await self._subpath_of(name),
                since_s=self._clock.boottime_s(),
            )
            place = self.binds.place(name, wanted.read_only, wanted.subpath)
            if there is None:
                self._references.put(name, holder, wanted)
            try:
                with our_errors():
                    await self._pool.volumes.attach(name, self._attachment(holder))
                await self._bind(name, wanted, place)
            except BaseException as error:
                if there is None:
                    self._references.end(name, holder)  # `settle` does the rest where there is no time
                    if isinstance(error, NvpoolError):
                        with contextlib.suppress(NvpoolError):
                            await self._end(name, holder)
                raise
            return place

    async def unstage(self, name: str, holder: str) -> None:
        """End the holder's use of the volume; without effect if there was none.

        InUse: the volume is still published for the holder. Unavailable: the pool does not know of the end
        yet; `settle` reports it later, even if this call is not repeated.
        """
        name, holder = checked_name(name), checked_holder(holder)
        async with self._turn(name):
            if published := [
                target
                for target, found in self._references.publications_of(name).items()
                if found.holder == holder
            ]:
                raise InUse(f"the volume {name} is published at {published[0]}; unpublish it there first")
            await self._end(name, holder)

    async def path(self, name: str) -> Path | None:
        """Return where the volume is bound on this host; None if it has no user here."""
        name = checked_name(name)
        for reference in self._references.of(name).values():
            return self.binds.place(name, reference.read_only, reference.subpath)
        return None

    async def holders(self, name: str) -> list[str]:
        """Return the holders of the volume on this host."""
        return sorted(self._references.of(checked_name(name)))

    async def publications(self, name: str) -> dict[str, tuple[str, bool]]:
        """Return where the volume is published on this host: place -> (holder, read-only)."""
        return {
            target: (found.holder, found.read_only)
            for target, found in self._references.publications_of(checked_name(name)).items()
        }

    async def publication(self, target: Path) -> str | None:
        """Return the name of the volume that is published at `target`; None if there is none."""
        there = self._references.publication(str(self._checked_target(target)))
        return there.name if there is not None else None

    async def publish(self, name: str, holder: str, target: Path, read_only: bool = False) -> None:
        """Bind the volume that the holder has staged at `target` too.

        `target` is created if it is missing; its parent must exist. NotFound: the holder has not staged the
        volume. AlreadyExists: another volume is published there, or the same one in another way.
        """
        name, holder, target = checked_name(name), checked_holder(holder), self._checked_target(target)
        async with self._turn(name):
            staged = self._references.of(name).get(holder)
            if staged is None:
                raise NotFound(f"{holder} has not staged the volume {name} on this host; stage it first")
            wanted = Publication(
                name=name, holder=holder, read_only=read_only or staged.read_only, subpath=staged.subpath
            )
            there = self._references.publication(str(target))
            if there is not None and there != wanted:
                raise AlreadyExists(
                    f"the volume {there.name} is published at {target}"
                    f"{', read-only' if there.read_only else ''}; unpublish it there first"
                )
            if there is None:
                for other in map(Path, self._references.published()):
                    if other.is_relative_to(target) or target.is_relative_to(other):
                        raise AlreadyExists(
                            f"a volume is published at {other}, and {target} would lie "
                            f"{'over' if other.is_relative_to(target) else 'in'} it; unpublish it there first"
                        )
                self._references.publish(str(target), wanted)
            try:
                await self._bind(name, Reference(read_only=wanted.read_only, subpath=wanted.subpath), target)
            except Refused:
                if there is None:
                    self._references.unpublish(str(target))
                raise

    async def unpublish(self, target: Path) -> None:
        """Remove the bind at `target`, and the directory if it is empty; without effect if there is none.

        InUse: the mount at `target` is not a bind of a volume.
        """
        target = self._checked_target(target)
        there = self._references.publication(str(target))
        async with self._turn(there.name if there is not None else ""):
            await self.binds.unbind(target)
            self._references.unpublish(str(target))

    # -- steps -----------------------------------------------------------------------------------------------------------

    @contextlib.asynccontextmanager
    async def _turn(self, name: str) -> AsyncIterator[None]:
        lock = self._turns.get(name)
        if lock is None:
            self._turns[name] = lock = asyncio.Lock()
        async with lock:
            yield

    def _checked_target(self, target: Path) -> Path:
        text = os.fspath(target)
        if not text.startswith("/") or "\0" in text or ".." in Path(text).parts or len(text) >= 4096:
            raise InvalidRequest(
                f"{shown(text)} is not a place to publish a volume at; it takes an absolute path without .."
            )
        target = Path(os.path.normpath(text))
        for own in (self._mountpoint, self._state):
            if target.is_relative_to(own) or own.is_relative_to(target):
                raise InvalidRequest(
                    f"{shown(text)} is not a place to publish a volume at; {own} is the bridge's own"
                )
        return target

    def _attachment(self, holder: str) -> str:
        return f"{self.node}/{holder}"

    async def _show(self, name: str) -> Volume:
        with our_errors():
            return await self._pool.volumes.show(name)

    async def _is_attached(self, name: str) -> bool:
        try:
            return bool((await self._show(name)).attachments)
        except NotFound:
            return False

    async def _subpath_of(self, name: str) -> str:
        try:
            with our_errors():
                stored = await self._pool.getxattr(path_of(name), SUBPATH_ATTRIBUTE)
        except NoAttribute:
            return ""
        return checked_subpath(bytes(stored).decode(errors="replace"))

    async def _bind(self, name: str, wanted: Reference, target: Path) -> None:
        if self.mounted is not None:
            await self.mounted()
        await self.binds.bind(name, wanted.read_only, wanted.subpath, target)

    async def _end(self, name: str, holder: str) -> None:
        """End a reference, in three steps: mark it as ended, remove the bind, report to the pool.

        The caller holds the volume's lock. The pool comes last, so the volume cannot be removed earlier.
        """
        self._references.end(name, holder)
        wanted = {
            self.binds.place(name, held.read_only, held.subpath)
            for held in self._references.of(name).values()
        }
        await self.binds.keep_only(name, wanted)
        with contextlib.suppress(NotFound), our_errors():
            await self._pool.volumes.detach(name, self._attachment(holder))
        self._references.drop(name, holder)


def _check_agrees(volume: Volume, wanted: Options) -> None:
    """Raise AlreadyExists if the volume differs from the options that were given."""
    for word, asked, has in (
        ("size", wanted.bytes_max, volume.bytes_max),
        ("files", wanted.files_max, volume.files_max),
    ):
        if asked and asked != has:
            actual = (format_bytes(has) if word == "size" else str(has)) if has else "no bound"
            raise AlreadyExists(
                f"the volume {volume.name} is there, with another {word} ({actual}); leave the option out, or "
                f"change it with: nvpool volume resize POOL {volume.name} --{word} "
                f"{size_argument(asked) if word == 'size' else asked}"
            )
    if wanted.replicas and wanted.replicas != volume.replicas:
        raise AlreadyExists(
            f"the volume {volume.name} is there, with {volume.replicas} replicas; leave the option out, or "
            "take another name"
        )
    if wanted.sealed and not volume.sealed and volume.files_used:
        raise AlreadyExists(
            f"the volume {volume.name} is there, with files and not sealed; leave the option out, or seal "
            f"it with: nvpool volume seal POOL {volume.name}"
        )
    if wanted.sealed is False and volume.sealed:
        raise AlreadyExists(
            f"the volume {volume.name} is there, and sealed for ever; leave the option out, or take "
            "another name"
        )
