"""Members of shards in a simulated pool: the real member (meta/server/shard_member) on the real engine of kv/.

The engine's files are in a directory in memory, and its threads run on the loop. A member can be killed
between any two steps on its drive. A power loss removes unsynced parts of its journal, some or all; what LMDB
has committed stays. Used by `sim/pool`.
"""

from __future__ import annotations

import contextlib
import os
import random
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nvpool.core.errors import Refused
from nvpool.kv.journal import Journal
from nvpool.kv.lmdb_env import LmdbTree, Mark
from nvpool.kv.options import EngineRuntime, LmdbOptions
from nvpool.kv.replication.member_engine import MemberKv
from nvpool.meta.server.shard_member import ShardMember
from nvpool.rpc.api import Buffer, Call
from nvpool.rpc.v1 import wire_pb2
from nvpool.testing.sim.invariants import Invariants
from nvpool.testing.sim.simulated_process import Killed, Process
from nvpool.testing.sim.virtual_time_loop import VirtualLoop, VirtualThread

if TYPE_CHECKING:
    from nvpool.rpc.multiplexer import InboundCall
    from nvpool.rpc.stats import ReplyStats

SECTOR = 512
_SPEAKS_OF_NOTHING = frozenset((wire_pb2.META_SHIP, wire_pb2.META_FOLLOW, wire_pb2.META_STATUS))


def engine_options(*, journal_bytes: int = 1 << 17, **named) -> LmdbOptions:
    return LmdbOptions(
        journal_bytes=journal_bytes,
        map_bytes=1 << 20,
        checkpoint_interval_s=0.7,
        layer_entries_max=300,
        **named,
    )


class MemberDrive:
    """Directory of the engine of one member or store, and the durable part of its journal."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.mark = path.with_name(f"{path.name}.mark")
        """In the host's memory, so a power loss removes it."""
        self.synced_sequence = 0
        """Last change that the former process knew to be synced."""
        self._has: dict[str, tuple[int, bytes]] = {}  # file -> its inode number, synced content

    def opened(self, name: str, descriptor: int) -> None:
        """Record that a journal file is open: a new one was synced when it was made."""
        number, size = os.fstat(descriptor).st_ino, os.fstat(descriptor).st_size
        if self._has.get(name, (0, b""))[0] != number:
            self._has[name] = number, os.pread(descriptor, size, 0)

    def synced(self, name: str, descriptor: int) -> None:
        found = os.fstat(descriptor)
        self._has[name] = found.st_ino, os.pread(descriptor, found.st_size, 0)

    def lose_power(self, chance: random.Random) -> None:
        """Lose all writes since the last sync, or each sector of them with some probability."""
        self.mark.unlink(missing_ok=True)
        share = chance.choice((0.0, 0.5, 0.9))
        for name, (number, old) in self._has.items():
            path = self.path / name
            if not path.exists() or path.stat().st_ino != number:
                continue
            new = path.read_bytes()
            if new == old:
                continue
            left = [
                new[at : at + SECTOR]
                if new[at : at + SECTOR] == old[at : at + SECTOR] or chance.random() < share
                else old[at : at + SECTOR]
                for at in range(0, len(new), SECTOR)
            ]
            path.write_bytes(b"".join(left))
            self._has[name] = number, b"".join(left)


class SimulatedEngineRuntime(EngineRuntime):
    """Engine runtime of one simulated process."""

    def __init__(
        self, loop: VirtualLoop, process: Process, drive: MemberDrive, waits_s: Callable[[], float]
    ) -> None:
        self._loop = loop
        self._process = process
        self._drive = drive
        self._waits_s = waits_s

    def thread(self, name: str) -> VirtualThread:
        return VirtualThread(self._loop, self._waits_s, lambda: self._process.alive)

    def journal(self, directory: Path, capacity_bytes: int) -> Journal:
        return _Journal(directory, capacity_bytes, self._process, self._drive)

    def tree(self, directory: Path, map_bytes: int) -> LmdbTree:
        return _Tree(directory, map_bytes, self._process)


class _Journal(Journal):
    def __init__(self, directory: Path, capacity_bytes: int, process: Process, drive: MemberDrive) -> None:
        process.step()
        super().__init__(directory, capacity_bytes)
        self._process = process
        self._drive = drive
        for half, descriptor in enumerate(self.files):
            drive.opened(f"journal-{half}", descriptor)

    def append(self, record: bytes) -> None:
        self._process.step()
        super().append(record)
        self._process.step()

    def sync_file(self, descriptor: int) -> None:
        self._process.step()
        self._drive.synced(f"journal-{self.files.index(descriptor)}", descriptor)
        self._process.step()


class _Tree(LmdbTree):
    def __init__(self, directory: Path, map_bytes: int, process: Process) -> None:
        super().__init__(directory, map_bytes)
        self._process = process

    def write(self, values: dict[bytes, bytes | None], mark: Mark, step: Callable[[str], None]) -> bool:
        def stepped(name: str) -> None:
            step(name)
            self._process.step()

        return super().write(values, mark, stepped)


class OverheardMember:
    """Requests to a member, whose replies as a primary are reported to the invariants."""

    def __init__(self, member: ShardMember, number: int, shard: int, invariants: Invariants) -> None:
        self._member = member
        self._number = number
        self._shard = shard
        self._invariants = invariants

    def handle(self, call: Call) -> None:
        self._member.handle(_OverheardCall(call, self))

    def answer_fast(
        self,
        buffer: bytearray,
        end: int,
        in_work: dict[int, InboundCall],
        reply_stats: ReplyStats,
        out: list[Buffer],
        side: Any,
    ) -> int:
        """Handle frames as ShardMember.fast_path does."""
        return self._member.fast_path.answer(buffer, end, in_work, reply_stats, out, side, self._watched)

    def _watched(self, call: Call) -> _OverheardCall:
        self._invariants.fast_requests += 1
        return _OverheardCall(call, self)

    def note(self) -> None:
        """Report a reply, if the member is a primary."""
        kv = self._member.kv
        if kv is not None:
            committed = kv.history.committed if kv.history is not None else kv.sequence
            self._invariants.answered(self._shard, self._number, self._member.term, committed)


class _OverheardCall:
    def __init__(self, call: Call, overheard: OverheardMember) -> None:
        self._call = call
        self._overheard = overheard

    def __getattr__(self, name: str):
        return getattr(self._call, name)

    def _note(self) -> None:
        if self._call.method not in _SPEAKS_OF_NOTHING:
            self._overheard.note()

    def reply(self, message: Buffer = b"", payload=()) -> None:
        self._note()
        self._call.reply(message, payload)

    def fail(self, error: BaseException) -> None:
        if isinstance(error, Refused):
            self._note()
        self._call.fail(error)


async def bury(member: ShardMember) -> None:
    """Dismantle a dead member as the kernel does: nothing is written any more, its files are closed."""
    for end in member.begin_abandon():
        with contextlib.suppress(Killed):
            await end()


def make_first(path: Path) -> None:
    """Make the directory for a standby's records."""
    path.mkdir(parents=True)


async def make_primary(path: Path, options: LmdbOptions) -> None:
    """Make an empty shard, as provisioning of a pool does."""
    kv = await MemberKv.open_member(path, options)
    await kv.close()
