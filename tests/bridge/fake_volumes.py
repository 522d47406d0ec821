"""A pool of volumes in memory with the SDK's interface for the bridge and injected faults; binds that are only recorded."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace

from nvpool.core.errors import AlreadyExists, InUse, NoAttribute, NotFound, ReadOnly


@dataclass(frozen=True)
class FakeVolume:
    name: str
    inode: int
    bytes_max: int = 0
    files_max: int = 0
    bytes_used: int = 0
    files_used: int = 0
    replicas: int = 1
    chunk_bytes: int = 1 << 20
    sealed: bool = False
    trash_s: int = 0
    attachments: tuple[str, ...] = ()
    created_ns: int = 1_577_836_800_000_000_000


@dataclass
class FakePool:
    """`fault` is the error of every operation, `faults` the error by operation, `before` maps an operation to a callback
    that runs first.
    """

    there: dict[str, FakeVolume] = field(default_factory=dict)
    attributes: dict[tuple[str, str], bytes] = field(default_factory=dict)
    fault: Exception | None = None
    faults: dict[str, Exception] = field(default_factory=dict)

    @property
    def volumes(self) -> FakePool:
        return self

    def _call(self, operation: str, name: str = "") -> None:
        if (error := self.faults.get(operation) or self.fault) is not None:
            raise OSError(error.errno, str(error)) from error  # as the SDK does
        if name and name not in self.there and operation != "create":
            raise NotFound(f"there is no volume {name}")

    async def create(self, name, *, bytes_max=0, files_max=0, replicas=None, chunk_bytes=None, trash_s=0):
        self._call("create", name)
        if name in self.there:
            raise AlreadyExists(f"the volume {name} is there")
        self.there[name] = FakeVolume(
            name, len(self.there) + 10, bytes_max, files_max, replicas=replicas or 1
        )
        return self.there[name]

    async def list(self):
        self._call("list")
        return list(self.there.values())

    async def show(self, name):
        self._call("show", name)
        return self.there[name]

    async def resize(self, name, *, bytes_max=None, files_max=None):
        self._call("resize", name)
        self.there[name] = replace(self.there[name], bytes_max=bytes_max)
        return self.there[name]

    async def seal(self, name):
        self._call("seal", name)
        self.there[name] = replace(self.there[name], sealed=True)

    async def remove(self, name, *, force=False):
        self._call("remove", name)
        if self.there[name].attachments:
            raise InUse(f"the volume {name} is attached: {', '.join(self.there[name].attachments)}")
        del self.there[name]

    async def attach(self, name, holder):
        self._call("attach", name)
        kept = self.there[name].attachments
        self.there[name] = replace(self.there[name], attachments=kept if holder in kept else (*kept, holder))

    async def detach(self, name, holder):
        self._call("detach", name)
        kept = tuple(one for one in self.there[name].attachments if one != holder)
        self.there[name] = replace(self.there[name], attachments=kept)

    async def getxattr(self, path, name):
        self._call("getxattr")
        if (path, name) not in self.attributes:
            raise OSError(NoAttribute.errno, "no such attribute") from NoAttribute()
        return self.attributes[path, name]

    async def setxattr(self, path, name, value):
        self._call("setxattr")
        if self.there[Path(path).name].sealed:
            raise ReadOnly
        self.attributes[path, name] = value

    async def statfs(self):
        self._call("statfs")
        return SimpleNamespace(blocks_available=1000, block_bytes=4096)


class WrittenBinds:
    """A fake of bridge/bind_mounts: records what is bound at which target."""

    def __init__(self, binds) -> None:
        self.places, self.place = binds.places, binds.place
        self.bound: dict[Path, tuple[str, bool, str]] = {}
        self.fault: BaseException | None = None

    async def bind(self, name, read_only, subpath, target):
        if self.fault is not None:
            raise self.fault
        self.bound[target] = name, read_only, subpath

    async def unbind(self, target, *, remove=True):
        return self.bound.pop(target, None) is not None

    async def keep_only(self, name, wanted):
        for target in [
            one for one in self.bound if one.is_relative_to(self.places / name) and one not in wanted
        ]:
            del self.bound[target]
