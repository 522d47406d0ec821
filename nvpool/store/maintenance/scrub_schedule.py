"""Scrub schedule: from time to time reads every block of the target and checks it.

A round begins when it is due (`interval_s` after the last one ended) or when an administrator starts it. The
round goes through the whole target slowly, in small steps, and yields the drive to waiting requests. Bad
blocks are fetched from other targets immediately. The store keeps the position, the paused state and the
result of the last round: after a crash the round continues from a position some seconds earlier. The round
checks the free map but never changes it: `fsck --repair` does that.

`store/maintenance/background` creates the schedule; its task calls `step`, and tests call it directly.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

import msgspec

from nvpool.core.clock import Clock
from nvpool.core.errors import CorruptRecord, Fenced, InvalidRequest, NvpoolError
from nvpool.core.units import BLOCK_BYTES, MIB
from nvpool.rpc.v1 import data_pb2 as pb
from nvpool.store.chunks.api import ChunkStore
from nvpool.store.disk.bad_blocks import BadBlock
from nvpool.store.maintenance.repair import Repair
from nvpool.store.throttle import Throttle

log = logging.getLogger(__name__)

SCRUB_BYTES_PER_S = 32 * MIB
INTERVAL_S = 7 * 86400.0
STEP_BLOCKS = 256
"""1 MiB: less than a hundredth of a second of a drive's time."""
_SAVE_S = 5.0
RETRY_S = 30.0
_MEND_TRIES, _MEND_AGAIN_S = 3, 0.2
_SLEEP_S_MAX = 3600.0
"""Longest sleep, since the wall clock may be set in the meantime."""
ORDERS = ("start", "pause", "resume", "stop")


class ScrubRound(msgspec.Struct):
    began_ms: int
    ended_ms: int = 0
    blocks: int = 0
    blocks_total: int = 0
    bad: int = 0
    mended: int = 0


class ScrubState(msgspec.Struct):
    """Stored state of the schedule.

    `since_ms` is the time when this target was first seen; the first round is due from there.
    """

    since_ms: int
    cursor: str = ""
    paused: bool = False
    now: ScrubRound | None = None
    last: ScrubRound | None = None


class ScrubSchedule:
    """Scrub schedule of one target. `interval_s` 0: rounds start only on an admin command."""

    def __init__(
        self,
        store: ChunkStore,
        target: int,
        repair: Repair,
        clock: Clock,
        busy: Callable[[], bool],
        *,
        interval_s: float = INTERVAL_S,
        bytes_per_s: float = SCRUB_BYTES_PER_S,
        on_fail: Callable[[str], None] = lambda reason: None,
    ) -> None:
        self._store = store
        self._target = target
        self._repair = repair
        self._clock = clock
        self._interval_ms = int(interval_s * 1000)
        self.throttle = Throttle(bytes_per_s, clock, busy)
        self._on_fail = on_fail
        self._kept: ScrubState | None = None
        self._wake = asyncio.Event()
        self._task: asyncio.Task | None = None
        self._saved_s = 0.0
        self._speed: tuple[float, int] | None = None
        """Start time of this process's part of the round, and blocks done before."""

    def start(self) -> None:
        if self._task is None:
            self._task = asyncio.get_running_loop().create_task(self._run())
            self._task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task) -> None:
        if not task.cancelled() and task.exception() is not None:
            log.critical("target %d: scrubbing failed", self._target, exc_info=task.exception())
            self._on_fail(f"scrubbing failed: {task.exception()!r}")

    # -- stored state ------------------------------------------------------------------------------------------------------

    def _now_ms(self) -> int:
        return self._clock.wall_ns() // 1_000_000

    @property
    def kept(self) -> ScrubState:
        if self._kept is None:
            try:
                self._kept = msgspec.json.decode(self._store.note(), type=ScrubState)
            except msgspec.MsgspecError:  # nothing stored yet
                self._kept = ScrubState(self._now_ms())
        return self._kept

    def _save(self) -> None:
        self._saved_s = self._clock.boottime_s()
        self._store.keep_note(msgspec.json.encode(self.kept))

    def _next_ms(self) -> int:
        """Return when the next round begins by itself; 0: never.

        The time is up to a tenth of the interval earlier, by target, so that targets that began together
        spread out.
        """
        if not self._interval_ms:
            return 0
        since_ms = self.kept.last.ended_ms if self.kept.last is not None else self.kept.since_ms
        return since_ms + self._interval_ms - self._interval_ms // 10 * (self._target * 7 % 11) // 10

    # -- admin commands ----------------------------------------------------------------------------------------------------

    def order(self, order: str) -> None:
        """Carry out an admin command. May be repeated. InvalidRequest: unknown command.

        start   begin a round, unless one is running, and end a pause
        pause   read nothing until resume or start, also after a restart
        resume  end a pause
        stop    abandon the round
        """
        kept = self.kept
        if order not in ORDERS:
            raise InvalidRequest(f"no order of a scrub is called {order!r}; there are: {', '.join(ORDERS)}")
        if order == "start" and kept.now is None:
            self._begin()
        elif order == "stop":
            kept.now, kept.cursor, self._speed = None, "", None
        if order != "stop":
            kept.paused = order == "pause"
            self._speed = None
        self._save()
        self._wake.set()

    def _begin(self) -> None:
        self.kept.cursor, self._speed = "", None
        self.kept.now = ScrubRound(
            self._now_ms(), blocks_total=self._store.status()["used_bytes"] // BLOCK_BYTES
        )
        log.info("target %d: a round of scrubbing begins", self._target)

    # -- the work ----------------------------------------------------------------------------------------------------------

    async def _run(self) -> None:
        while True:
            self._wake.clear()
            wait_s: float | None = None
            kept = self.kept
            try:
                if not self._store.note():  # the first time here
                    self._save()
                if kept.now is None and not kept.paused and self._is_due():
                    self._begin()
                    self._save()
                if kept.now is not None and not kept.paused:
                    await self.step()
                    continue
                if not kept.paused and self._interval_ms:
                    wait_s = min(_SLEEP_S_MAX, max(1.0, (self._next_ms() - self._now_ms()) / 1000))
            except Fenced:
                return
            except NvpoolError as error:
                log.warning("target %d: scrubbing waits: %s", self._target, error)
                wait_s = RETRY_S
            try:
                async with asyncio.timeout(wait_s):
                    await self._wake.wait()
            except TimeoutError:
                pass

    def _is_due(self) -> bool:
        return bool(self._interval_ms) and self._next_ms() <= self._now_ms()

    async def step(self) -> None:
        """Check the next blocks of the running round. Errors are those of this store."""
        now = self.kept.now
        if self._speed is None:
            self._speed = self._clock.boottime_s(), now.blocks
        await self.throttle.take(STEP_BLOCKS * BLOCK_BYTES)
        if self.kept.now is not now or self.kept.paused:
            return
        began_s = self._clock.boottime_s()
        found = await self._store.scrub(bytes.fromhex(self.kept.cursor), STEP_BLOCKS)
        if self.kept.now is not now:
            return  # stopped
        now.blocks += found.blocks
        now.bad += len(found.bad) + len(found.problems)
        self.kept.cursor = found.cursor.hex()
        if found.bad:
            now.mended += await self._mend(found.bad)
        if found.done and self.kept.now is now:
            now.ended_ms = self._now_ms()
            self.kept.now, self.kept.last, self.kept.cursor, self._speed = None, now, "", None
            log.log(
                logging.WARNING if now.bad else logging.INFO,
                "target %d: a round of scrubbing has ended: %d blocks, %d bad, %d of them rewritten",
                self._target,
                now.blocks,
                now.bad,
                now.mended,
            )
        if found.done or found.bad or began_s - self._saved_s > _SAVE_S:
            self._save()
        await self.throttle.leave(self._clock.boottime_s() - began_s)

    async def _mend(self, bad: list[BadBlock]) -> int:
        """Repair these blocks; return how many are good now.

        A block is good if it was repaired from another replica, or if it was overwritten or removed with its
        file since the scrub found it. A client's write to a block during its repair makes the repair fail:
        the remaining blocks are retried a few times.
        """
        left = list(bad)
        for again in range(_MEND_TRIES):
            if again:
                await asyncio.sleep(_MEND_AGAIN_S * again)
            good = {one[:3] for one in await self._repair.repaired(left)}
            left = [one for one in left if one[:3] not in good and await self._is_bad(one)]
            if not left:
                break
        return len(bad) - len(left)

    async def _is_bad(self, one: BadBlock) -> bool:
        try:
            return one.block in (await self._store.fetch(one.inode, one.index, one.block, 1)).bad
        except CorruptRecord:
            return True

    # -- status ------------------------------------------------------------------------------------------------------------

    def status(self) -> pb.Scrubbing:
        kept = self.kept
        now, last = kept.now or ScrubRound(0), kept.last or ScrubRound(0)
        left_s = -1.0
        if self._speed is not None and now.blocks > self._speed[1]:
            left_s = max(
                0.0,
                (now.blocks_total - now.blocks)
                * (self._clock.boottime_s() - self._speed[0])
                / (now.blocks - self._speed[1]),
            )
        return pb.Scrubbing(
            state="paused" if kept.paused else "running" if kept.now is not None else "idle",
            began_ms=now.began_ms,
            blocks=now.blocks,
            blocks_total=max(now.blocks_total, now.blocks),
            bad=now.bad,
            mended=now.mended,
            seconds_left=left_s,
            next_ms=0 if kept.now is not None or kept.paused else self._next_ms(),
            last_began_ms=last.began_ms,
            last_ended_ms=last.ended_ms,
            last_blocks=last.blocks,
            last_bad=last.bad,
            last_mended=last.mended,
        )

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        try:
            if self._kept is not None and self._kept.now is not None:
                self._save()
        except NvpoolError:
            pass  # some blocks are read again
