"""Kernel engine: the FUSE protocol on /dev/fuse, from one event loop, without libfuse.

This module mounts, negotiates the protocol, reads requests and keeps the pending ones; `fuse/dispatch`
decodes and answers them. The engine never decides what a request means, and no request ends it. Used by
mountd/server and bench/fuse_floor.

A request costs one readv and one writev. Its coroutine runs without a task (`fuse/ops/eager_coroutine`): a
request that the caches can answer is answered before the next one is read; one that has to wait continues
when its future is done. Requests are read until there is none, so that reads which wait in the kernel
together are sent together (client/data/chunk_client batches the reads of one loop iteration).

Signals: as with a local drive, a call completes before a signal is handled, except when its caller is dying
anyway. So no application gets an EINTR that ext4 would not give, but a process that waits for a lost store
can be killed. Any signal interrupts a process that waits for a lock.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import select
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from nvpool.core.clock import stopwatch_s
from nvpool.core.errors import NvpoolError, Unavailable
from nvpool.core.futures import BlocksFuture
from nvpool.fuse.dispatch import FIRST
from nvpool.fuse.fast_path.cached_replies import CachedReplyPath
from nvpool.fuse.fast_path.creates import CreateFastPath
from nvpool.fuse.fast_path.local_reads import BURST_MAX
from nvpool.fuse.fast_path.small_writes import WriteFastPath
from nvpool.fuse.kernel.mount import attach
from nvpool.fuse.kernel.read_worker_channel import ForwardedReads
from nvpool.fuse.mount_point import OUR_TYPE, Mount, MountOptions, mount_at, unmount
from nvpool.fuse.ops.eager_coroutine import EagerCoroutine
from nvpool.fuse.ops.operations import FuseOps
from nvpool.fuse.protocol import replies, requests
from nvpool.fuse.protocol.constants import (
    MAJOR,
    MINOR,
    MINOR_MIN,
    PAGE,
    READ_BUFFER_MIN,
    UNANSWERED,
    Init,
    Notice,
    Op,
)
from nvpool.fuse.protocol.requests import Malformed
from nvpool.metrics import registry as metrics
from nvpool.metrics.exposition import Page
from nvpool.shm.mount_state import Word

log = logging.getLogger(__name__)

IN_WORK_MAX = 1024
"""Pending requests at a time; others wait in the kernel. Background requests are fewer: max_background."""

SPIN_LOOKS = 48
"""Polls before sleeping, about 20 µs. A process that sleeps in a virtual machine needs 25 µs to wake up."""

SPIN_CREDIT_MAX = 16
"""Most credit for polling. A poll that finds a request earns two credits, one without success costs one.

Without credit only every 32nd time is tried. So a machine whose cores are all busy does not pay for polling.
"""

REQUEST_PAGES_MAX = 4096
"""16 MiB. The kernel allows 256 pages (1 MiB) unless fs.fuse.max_pages_limit allows more."""

READ_AHEAD_BYTES_MAX = 64 << 20
"""Upper bound of read-ahead. The kernel uses the smaller of this and the value in /sys/class/bdi."""

DYING_LOOK_S = 0.5
"""Interval of the check on callers of interrupted requests: the kernel reports the first signal only."""

EXIT_S = 3.0
"""How long a killed process may store its written data while it exits.

The kernel interrupts those requests immediately. Then the thread has already taken the signal that kills it,
and only the death of the process is pending.
"""

ONLY_LOOKS = frozenset(
    (
        Op.LOOKUP,
        Op.GETATTR,
        Op.READLINK,
        Op.READ,
        Op.READDIR,
        Op.READDIRPLUS,
        Op.GETXATTR,
        Op.LISTXATTR,
        Op.STATFS,
        Op.ACCESS,
    )
)
"""Requests that change nothing. When the mount is gone, they are not waited for."""

_OPCODE_AT = 4 if sys.byteorder == "little" else 7
_OPCODE_MAX = 255
_TRAVEL_TOGETHER = frozenset((Op.READ.value, Op.LOOKUP.value))
_SIGKILL_BIT = 1 << 8

FLAGS = (
    Init.ASYNC_READ
    | Init.ATOMIC_O_TRUNC
    | Init.BIG_WRITES
    | Init.DO_READDIRPLUS
    | Init.READDIRPLUS_AUTO
    | Init.ASYNC_DIO
    | Init.PARALLEL_DIROPS
    | Init.ABORT_ERROR
    | Init.MAX_PAGES
    | Init.POSIX_LOCKS
    | Init.FLOCK_LOCKS
    | Init.CACHE_SYMLINKS
    | Init.HANDLE_KILLPRIV_V2
    | Init.INIT_EXT
    | Init.HAS_EXPIRE_ONLY
    | Init.HAS_RESEND
    | Init.POSIX_ACL
    | Init.DONT_MASK
    | Init.SETXATTR_EXT
)
"""Features that are agreed on if the kernel offers them.

Symbolic links never change and inode numbers are never used twice, so the kernel may cache links. Not
EXPLICIT_INVAL_DATA: a file that another node made longer would show zeros behind its old end. AUTO_INVAL_DATA
only if attributes are not cached: it would drop data written here, at the first look at its time; see
fuse/ops/kernel_cache.
"""


def max_pages_limit() -> int:
    """Pages that the kernel allows in one request."""
    try:
        return max(1, min(REQUEST_PAGES_MAX, int(Path("/proc/sys/fs/fuse/max_pages_limit").read_text())))
    except (OSError, ValueError):
        return 256


def is_dying(pid: int, *, exiting: bool = False) -> bool:
    """Whether the thread `pid` is gone, or has a pending signal that kills it; signal(7), proc(5).

    `exiting`: also if it is already exiting because of that signal.
    """
    try:
        with open(f"/proc/{pid}/status", "rb") as file:
            for line in file:
                if (
                    line.startswith((b"SigPnd:", b"ShdPnd:")[: 1 + exiting])
                    and int(line[7:], 16) & _SIGKILL_BIT
                ):
                    return True
                if line.startswith(b"ShdPnd:"):
                    return False
    except (OSError, ValueError):
        return True
    return False


class KernelEngine(CreateFastPath, WriteFastPath, CachedReplyPath):
    """See engines.Engine and the module."""

    name = "kernel"
    flags = FLAGS
    in_work_max = IN_WORK_MAX

    def __init__(
        self,
        ops: FuseOps,
        mount_point: Path,
        options: MountOptions,
        on_ready: Callable[[], None] = lambda: None,
        on_burst: Callable[[], None] = lambda: None,
    ):
        memory = ops.kept
        self._pages = (
            memory.word(Word.PAGES) if memory is not None and memory.word(Word.GREETED) else max_pages_limit()
        )
        super().__init__(ops, max(READ_BUFFER_MIN, self._pages * PAGE + PAGE))
        self._mount_point = mount_point
        self._options = options
        self._on_ready = on_ready
        self._on_burst = on_burst
        self._mount: Mount | None = None
        self._buffers = (self._buffer,)
        self._table = self._handlers()
        self._work: dict[int, tuple[EagerCoroutine | BlocksFuture, int, int, float]] = {}
        """Pending requests: unique -> (step, pid of the caller, operation, start time)."""
        # Pending lock requests. The limit excludes them: they may wait forever, and must not keep out the
        # requests that they wait for.
        self._lock_waits = 0
        # unique -> pid, while it must be checked whether the caller dies
        self._interrupted: dict[int, int] = {}
        self._reading = False
        self._taking = False
        self._took = 0  # requests in the last `_take`
        self._looking = False
        self._stopped = False
        self._leaving = False
        self._asked_again = False  # the kernel is resending requests of the predecessor
        self._passings: list[ForwardedReads] = []
        self._waiting: list[Callable[[], None]] = []  # admissions of read workers that are ready
        # Interrupts of requests that are not here yet: a worker may be forwarding them.
        self._early: dict[int, None] = {}
        self._failed: NvpoolError | None = None
        self._credit = SPIN_CREDIT_MAX
        self._turn = 0
        self._poll: Callable = lambda wait_ms: []
        self._loop: asyncio.AbstractEventLoop
        self._ended: asyncio.Future

    # -- life cycle of a mount -----------------------------------------------------------------------------------------

    def mount(self) -> Mount:
        self._fd = attach(self._mount_point, self._options)
        self._mount = mount_at(self._mount_point)
        if self._mount is None:
            os.close(self._fd)
            raise Unavailable(f"{self._mount_point} was unmounted by another process")
        if self._ops.kept is not None:
            self._ops.kept.device = self._mount.device
        return self._mount

    @property
    def descriptor(self) -> int:
        return self._fd

    def go_on(self, descriptor: int) -> Mount:
        """Continue the mount of a predecessor that was killed or has left. Call this instead of `mount`.

        `serve` makes the kernel resend the unanswered requests. Returns the mount as it was made; it may be
        gone.
        """
        self._fd = descriptor
        self._asked_again = True
        self._mount = Mount(self._ops.kept.device, self._mount_point, OUR_TYPE, "", "")
        return self._mount

    def adopt(self, descriptor: int) -> None:
        """Serve a mount that another process made; call this instead of `mount`.

        The descriptor is non-blocking and still belongs to the caller.
        """
        self._fd = descriptor

    async def serve(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._spare = EagerCoroutine(self._loop)
        self._ended = self._loop.create_future()
        poll = select.poll()
        poll.register(self._fd, select.POLLIN)
        self._poll = poll.poll
        if not self._stopped:
            self._begin_plain_reads()
            if self._asked_again:
                self._ask_again()
            self._read_on()
            try:
                await self._ended
            finally:
                self._stop_reading()
                # no request is read once some of these have ended
                self._stopped = self._stopped or not self._leaving
                for step, _, _, _ in list(self._work.values()) if not self._leaving else ():
                    step.cancel()
                await self._end_plain_reads()
        if self._failed is not None:
            raise self._failed

    def stop(self) -> None:
        self._stopped = True
        self._end_lock_waits()
        self._end()

    def close(self) -> None:
        """Close the descriptor, then unmount.

        In this order: the kernel may write pages back while it unmounts, and no process would answer.
        """
        self.notices.close()
        if self._mount is None:
            return
        os.close(self._fd)
        there = mount_at(self._mount.point)
        if there is not None and there.device == self._mount.device:
            try:
                unmount(there.point, lazy=True)
            except NvpoolError as error:
                log.warning("the mount is left behind: %s", error)
        self._mount = None

    def _ask_again(self) -> None:
        """Make the kernel resend unanswered requests; it queues them before all others.

        Before INIT was answered the queue contains nothing else.
        """
        try:
            os.write(self._fd, replies.HEADER.pack(replies.HEADER_BYTES, Notice.RESEND, 0))
        except OSError as error:
            if error.errno not in (errno.ENODEV, errno.ECONNABORTED):
                log.error(
                    "this kernel does not resend requests that the previous process left unanswered: %s",
                    error,
                )
        if self._ops.kept.word(Word.GREETED):
            if not self._ops.kept.word(Word.INIT_FLAGS) & Init.HAS_RESEND:
                log.error("this kernel did not agree to resend requests: calls may hang")
            self._agreed(Init(self._ops.kept.word(Word.INIT_FLAGS)))
            self._ops.invalidate_inherited()
            self._on_ready()

    async def leave(self, wait_s: float) -> None:
        """Stop reading requests, and return when the pending ones are answered, or after `wait_s`.

        Requests that wait for locks are not waited for. Then this process has to end immediately: its
        successor gets the rest.
        """
        self._leaving = True
        self._stop_reading()
        if len(self._work) > self._lock_waits:
            await asyncio.wait([self._ended], timeout=wait_s)

    def _read_on(self) -> None:
        if not self._reading and not self._stopped and not self._leaving:
            self._reading = True
            self._loop.add_reader(self._fd, self._take)
            for passing in self._passings:
                passing.read_on()

    def _stop_reading(self) -> None:
        if self._reading:
            self._reading = False
            self._loop.remove_reader(self._fd)
            for passing in self._passings:
                passing.stop_reading()

    def _end(self) -> None:
        """Stop; `serve` returns when no request is pending any more."""
        self._stopped = True
        if hasattr(self, "_ended"):
            self._stop_reading()
            if not self._work and not self._ended.done():
                self._ended.set_result(None)

    # -- requests and replies ------------------------------------------------------------------------------------------

    def _take(self) -> None:
        """Read and answer waiting requests; poll for the next one while nothing is pending."""
        if self._taking:
            return
        self._taking = True
        self._on_burst()
        held = False  # reads and look-ups are being collected, to be sent together
        following, buffer, table = self._following, self._buffer, self._table
        opcode = -1
        run = took = 0  # requests of this operation in a row; requests in total
        self._begin_run()
        try:
            for _ in range(BURST_MAX):
                try:
                    count, begun = following(BURST_MAX - took)
                except OSError as error:
                    if not self._may_read_on(error):
                        return
                    continue
                if begun:
                    took += begun
                    if run:
                        self._end_run(opcode, run)
                        run = 0
                    self._begin_run()
                if count < 0:
                    if self._asked_again:
                        self._asked_again = False
                        self._ops.all_came_again({unique & FIRST for unique in self._work})
                        self._let_in()
                    if run:
                        self._end_run(opcode, run)
                        run = 0
                    if len(self._work) > self._lock_waits or not self._look_out():
                        return  # reads are pending: send them now
                    self._begin_run()
                    continue
                if not count:
                    return
                code = buffer[_OPCODE_AT]
                if code != opcode:
                    if run:
                        self._end_run(opcode, run)
                        run = 0
                    opcode = code
                    if code in _TRAVEL_TOGETHER and not held:
                        held = True
                        self._ops.burst()
                try:
                    table[code](count)
                except Exception as error:
                    self._broken(error)
                run += 1
                took += 1
                if not self._reading:
                    return
        finally:
            try:
                if run:
                    self._end_run(opcode, run)
                if held:
                    self._ops.burst_over()
                self._submit_plain_reads()
                if self._late:
                    self._release_late()
            finally:  # otherwise no request would ever be read again
                self._taking, self._took = False, took
                self._answer_put_off()  # if one of these failed

    def _begin_run(self) -> None:
        self._since_s, self._kept = stopwatch_s(), 0

    def _end_run(self, opcode: int, count: int) -> None:
        """Record the time of the requests answered since `_begin_run`; pending ones do not count."""
        now_s = stopwatch_s()
        count -= self._kept
        if count > 0:
            self.spent.add(opcode, now_s - self._since_s, count)
        self._since_s, self._kept = now_s, 0

    def _broken(self, error: Exception) -> None:
        if isinstance(error, Malformed):
            self._refuse(error)
        else:
            _, opcode, unique, *_ = requests.HEADER.unpack_from(self._buffer)
            self._fail(unique, error, _name_of(opcode))

    def _look_out(self) -> bool:
        """Poll for about the time that a wake-up would cost. Returns whether a request has arrived."""
        self._turn += 1
        if self._credit or not self._turn & 31:
            look = self._poll
            for _ in range(SPIN_LOOKS):
                if look(0):
                    self._credit = min(self._credit + 2, SPIN_CREDIT_MAX)
                    return True
            self._credit = max(self._credit - 1, 0)
        return False

    def _may_read_on(self, error: OSError) -> bool:
        if error.errno in (errno.ENOENT, errno.EINTR):  # the request was withdrawn while it was read
            return True
        if error.errno not in (errno.ENODEV, errno.ECONNABORTED):
            self._failed = Unavailable(f"/dev/fuse failed: {error}")
        for step, _, opcode, _ in list(self._work.values()):
            if opcode in ONLY_LOOKS:
                step.cancel()
        self._end_lock_waits()
        self._end()
        return False

    def _refuse(self, error: Malformed) -> None:
        log.error("malformed request from the kernel: %s", error)
        opcode = self._buffer[_OPCODE_AT]
        if error.unique and opcode not in UNANSWERED:
            self._send(replies.failed(error.unique, errno.EINVAL))

    def _keep_in_work(self, step, unique: int, name: str, answer: Callable) -> None:
        step.on_end = partial(self._step_ended, unique, name, answer)
        header = requests.HEADER.unpack_from(self._buffer)
        self._work[unique] = step, header[6], header[1], self._since_s
        self._kept += 1
        if header[1] == Op.SETLKW:
            self._lock_waits += 1
        elif len(self._work) - self._lock_waits >= IN_WORK_MAX:
            self._stop_reading()

    def _step_ended(
        self, unique: int, name: str, answer: Callable, result: Any, error: BaseException | None
    ) -> None:
        work = self._work
        _, _, opcode, since_s = work.pop(unique)
        if opcode == Op.SETLKW:
            self._lock_waits -= 1
            if self._stopped and isinstance(error, asyncio.CancelledError):
                error = Unavailable("the mount ends")  # EINTR is for a caller with a signal to handle
        if error is None:
            try:
                answer(unique, result)
            except Exception as bug:
                self._fail(unique, bug, name)
        else:
            self._fail(unique, error, name)
        self.spent.add(opcode, stopwatch_s() - since_s)
        if self._interrupted:
            self._interrupted.pop(unique, None)
        if self._from:
            self._from.pop(unique, None)
        if self._held:
            self._ops.answered(unique & FIRST)
        self._some_ended()

    def _some_ended(self) -> None:
        """React to the end of pending requests: stop, leave, read on or poll."""
        if self._stopped:
            self._end()
        elif self._leaving:
            if len(self._work) <= self._lock_waits and not self._ended.done():
                self._ended.set_result(None)
        elif not self._reading:
            self._read_on()
        elif len(self._work) == self._lock_waits and not self._looking:
            self._looking = True
            # not from here: replies of other requests may still be being delivered
            self._loop.call_soon(self._look)

    def _look(self) -> None:
        self._looking = False
        if self._reading and len(self._work) == self._lock_waits and self._look_out():
            self._take()

    # -- requests that read workers have forwarded ---------------------------------------------------------------------

    @property
    def request_bytes_max(self) -> int:
        return len(self._buffer)

    def let_read(self, passing: ForwardedReads, come_in: Callable[[ForwardedReads], None]) -> None:
        """Accept requests that a read worker forwards.

        `come_in` is called when the worker is ready and the kernel has resent all its requests to this
        process: only this process knows those.
        """
        self._passings.append(passing)
        passing.begin(self._take_passed, partial(self._is_up, come_in))
        if self._reading:
            passing.read_on()

    def _is_up(self, come_in: Callable[[ForwardedReads], None], passing: ForwardedReads) -> None:
        self._waiting.append(partial(come_in, passing))
        if self._asked_again and self._reading:
            self._take()  # maybe no request has arrived yet; then the queue was never found empty
        else:
            self._let_in()

    def _let_in(self) -> None:
        if not self._asked_again:
            waiting, self._waiting = self._waiting, []
            for come_in in waiting:
                come_in()

    def _take_passed(self, passing: ForwardedReads) -> None:
        self._on_burst()
        self._ops.burst()
        try:
            for request in passing.channel.requests():
                _, opcode, unique, *_ = requests.HEADER.unpack_from(request)
                if opcode > _OPCODE_MAX:
                    passing.said(opcode, bytes(request[requests.HEADER_BYTES :]))
                    continue
                count = len(request)
                self._view[:count] = request
                self._begin_run()
                self._from[unique] = passing.clone
                try:
                    self._table[opcode](count)
                except Exception as error:
                    self._broken(error)
                self._end_run(opcode, 1)
                if self._late:
                    self._release_late()
                if unique not in self._work:
                    del self._from[unique]
                elif unique in self._early:
                    del self._early[unique]
                    self._interrupt(unique)
                if not self._reading:
                    return  # the rest when reading continues
        finally:
            self._ops.burst_over()

    def measure(self, page: Page) -> None:
        self.spent.measure(page)
        page.set(metrics.FUSE_READ_BYTES, self.read_bytes + self._plain_bytes)
        page.set(metrics.FUSE_WRITTEN_BYTES, self.written_bytes)
        page.set(metrics.FUSE_IN_WORK, len(self._work))

    # -- interrupts ----------------------------------------------------------------------------------------------------

    def _on_interrupt(self, count: int) -> None:
        unique = requests.decode(self._buffer, count).body.unique
        # with workers: the request may still be forwarded; without, it was answered
        if not self._interrupt(unique) and self._passings:
            self._early[unique] = None
            if len(self._early) > IN_WORK_MAX:
                del self._early[next(iter(self._early))]
            for passing in self._passings:
                passing.channel.send(self._view[:count])

    def _interrupt(self, unique: int) -> bool:
        """Handle an interrupt. False: the request is not pending here."""
        found = self._work.get(unique)
        if found is None:
            return False
        if found[2] == Op.SETLKW:
            found[0].cancel()
            return True
        if not self._interrupted:
            self._loop.call_later(DYING_LOOK_S, self._look_for_dying)
        self._interrupted[unique] = found[1]
        self._cancel_if_dying(unique, found[1])
        return True

    def _end_lock_waits(self) -> None:
        for step, _, opcode, _ in list(self._work.values()):
            if opcode == Op.SETLKW:
                step.cancel()

    def _look_for_dying(self) -> None:
        for unique, pid in list(self._interrupted.items()):
            self._cancel_if_dying(unique, pid)
        if self._interrupted and not self._stopped:
            self._loop.call_later(DYING_LOOK_S, self._look_for_dying)

    def _cancel_if_dying(self, unique: int, pid: int) -> None:
        found = self._work.get(unique)
        if found is not None and is_dying(pid, exiting=stopwatch_s() - found[3] > EXIT_S):
            found[0].cancel()

    # -- the first request ---------------------------------------------------------------------------------------------

    def _on_init(self, count: int) -> None:
        request = requests.decode(self._buffer, count)
        body = request.body
        if body.major != MAJOR or body.minor < MINOR_MIN:
            if body.major > MAJOR:  # the kernel repeats INIT with our version
                self._send(self._init_answer(request.unique, Init(0), 0))
                return
            self._failed = Unavailable(
                f"this kernel speaks version {body.major}.{body.minor} of FUSE, engine kernel needs "
                f"{MAJOR}.{MINOR_MIN} or newer; mount with --engine pyfuse3"
            )
            self._send(replies.failed(request.unique, errno.EPROTO))
            self._end()
            return
        offered = Init(requests.flags_of(request))
        wanted = self.flags if self._options.acl else self.flags & ~Init.POSIX_ACL
        if self._options.writeback:
            wanted |= Init.WRITEBACK_CACHE
        elif not self._ops.options.attr_timeout_s:
            wanted |= Init.AUTO_INVAL_DATA
        self._agreed(wanted & offered)
        if (memory := self._ops.kept) is not None:
            memory.set_word(Word.INIT_FLAGS, wanted & offered)
            memory.set_word(Word.PAGES, self._pages)
            memory.set_word(Word.GREETED, 1)
        self._send(self._init_answer(request.unique, wanted & offered, body.minor))
        log.info("FUSE %d.%d, requests of up to %d KiB", body.major, body.minor, self._pages * PAGE >> 10)
        self._on_ready()

    def _agreed(self, flags: int) -> None:
        """Apply the features agreed on at INIT, by this process or its predecessor."""
        self._setxattr_extended = bool(flags & Init.SETXATTR_EXT)
        self._ops.set_kernel_features(
            guards_pages=not flags & (Init.WRITEBACK_CACHE | Init.AUTO_INVAL_DATA),
            keeps_acls=bool(flags & Init.POSIX_ACL),
        )

    def _init_answer(self, unique: int, flags: Init, minor: int) -> bytes:
        background = max(1, min(self._options.max_background, 0xFFFF))
        return replies.init(
            unique,
            minor=min(minor, MINOR),
            max_readahead=READ_AHEAD_BYTES_MAX,
            flags=flags,
            max_background=background,
            congestion_threshold=min(self._options.congestion_threshold or background * 3 // 4, 0xFFFF),
            max_write=self._pages * PAGE,
            max_pages=self._pages,
        )


def _name_of(opcode: int) -> str:
    try:
        return Op(opcode).name.lower()
    except ValueError:
        return f"operation {opcode}"
