"""A pool of volumes in memory, as the SDK shows it to the bridge, with faults on purpose; binds that are only written down."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace

from nvpool.core.errors import AlreadyExists, InUse, NoAttribute, NotFound, ReadOnly


@dataclass(frozen=True)
class TwinVolume:
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
class TwinPool:
    """`fault` is raised, where set, by each question; `before` maps the name of a question to what is called first."""

    there: dict[str, TwinVolume] = field(default_factory=dict)
    attributes: dict[tuple[str, str], bytes] = field(default_factory=dict)
    fault: Exception | None = None
    faults: dict[str, Exception] = field(default_factory=dict)

    @property
    def volumes(self) -> TwinPool:
        return self

    def _ask(self, question: str, name: str = "") -> None:
        if (error := self.faults.get(question) or self.fault) is not None:
            raise OSError(error.errno, str(error)) from error  # as the SDK does
        if name and name not in self.there and question != "create":
            raise NotFound(f"there is no volume {name}")

    async def create(self, name, *, bytes_max=0, files_max=0, replicas=None, chunk_bytes=None, trash_s=0):
        self._ask("create", name)
        if name in self.there:
            raise AlreadyExists(f"the volume {name} is there")
        self.there[name] = TwinVolume(
            name, len(self.there) + 10, bytes_max, files_max, replicas=replicas or 1
        )
        return self.there[name]

    async def list(self):
        self._ask("list")
        return list(self.there.values())

    async def show(self, name):
        self._ask("show", name)
        return self.there[name]

    async def resize(self, name, *, bytes_max=None, files_max=None):
        self._ask("resize", name)
        self.there[name] = replace(self.there[name], bytes_max=bytes_max)
        return self.there[name]

    async def seal(self, name):
        self._ask("seal", name)
        self.there[name] = replace(self.there[name], sealed=True)

    async def remove(self, name, *, force=False):
        self._ask("remove", name)
        if self.there[name].attachments:
            raise InUse(f"the volume {name} is attached: {', '.join(self.there[name].attachments)}")
        del self.there[name]

    async def attach(self, name, holder):
        self._ask("attach", name)
        kept = self.there[name].attachments
        self.there[name] = replace(self.there[name], attachments=kept if holder in kept else (*kept, holder))

    async def detach(self, name, holder):
        self._ask("detach", name)
        kept = tuple(one for one in self.there[name].attachments if one != holder)
        self.there[name] = replace(self.there[name], attachments=kept)

    async def getxattr(self, path, name):
        self._ask("getxattr")
        if (path, name) not in self.attributes:
            raise OSError(NoAttribute.errno, "no such attribute") from NoAttribute()
        return self.attributes[path, name]

    async def setxattr(self, path, name, value):
        self._ask("setxattr")
        if self.there[Path(path).name].sealed:
            raise ReadOnly
        self.attributes[path, name] = value

    async def statfs(self):
        self._ask("statfs")
        return SimpleNamespace(blocks_available=1000, block_bytes=4096)


class WrittenBinds:
    """In place of bridge/bind_mounts: what is bound where."""

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
