"""Kernel engine: the FUSE protocol on /dev/fuse, from one event loop, without libfuse.

This module mounts, negotiates the protocol and reads requests. The engine is made of parts with one state
(`fuse/request_state`): `fuse/dispatch` decodes requests, `fuse/reply_sender` answers them,
`fuse/pending_requests` keeps those that wait, `fuse/cache_notices` notifies the kernel, and `fuse/fast_path`
has the compiled fast paths. The engine never decides what a request means, and no request ends it. Used by
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

from nvpool.core.clock import stopwatch_s
from nvpool.core.errors import NvpoolError, Unavailable
from nvpool.fuse.cache_notices import CacheNotices
from nvpool.fuse.dispatch import KernelRequests
from nvpool.fuse.fast_path.local_reads import BURST_MAX
from nvpool.fuse.fast_path.paths import FastPaths
from nvpool.fuse.kernel.mount import attach
from nvpool.fuse.kernel.read_worker_channel import ForwardedReads
from nvpool.fuse.mount_point import OUR_TYPE, Mount, MountOptions, mount_at, unmount
from nvpool.fuse.ops.operations import FuseOps
from nvpool.fuse.pending_requests import IN_WORK_MAX, PendingRequests
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
from nvpool.fuse.reply_sender import ReplySender
from nvpool.fuse.request_state import FIRST, RequestState
from nvpool.metrics import registry as metrics
from nvpool.metrics.exposition import Page
from nvpool.shm.memfd import fault_in
from nvpool.shm.mount_state import Word

log = logging.getLogger(__name__)

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

_OPCODE_AT = 4 if sys.byteorder == "little" else 7
_OPCODE_MAX = 255
_TRAVEL_TOGETHER = frozenset((Op.READ.value, Op.LOOKUP.value))

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


class KernelEngine:
    """See engines.Engine and the module."""

    name = "kernel"
    flags = FLAGS
    uses_fast_paths = True
    """Whether compiled modules may read and answer requests; False: each takes the slow path."""

    def __init__(
        self,
        ops: FuseOps,
        mount_point: Path,
        options: MountOptions,
        on_ready: Callable[[], None] = lambda: None,
        on_burst: Callable[[], None] = lambda: None,
    ) -> None:
        memory = ops.kept
        self._pages = (
            memory.word(Word.PAGES) if memory is not None and memory.word(Word.GREETED) else max_pages_limit()
        )
        self.ops = ops
        self._mount_point = mount_point
        self.options = options
        self._on_ready = on_ready
        self._on_burst = on_burst
        self._mount: Mount | None = None
        self.asked_again = False  # the kernel is resending requests of the predecessor
        self._passings: list[ForwardedReads] = []
        self._waiting: list[Callable[[], None]] = []  # admissions of read workers that are ready
        # Interrupts of requests that are not here yet: a worker may be forwarding them.
        self._early: dict[int, None] = {}
        self._failed: NvpoolError | None = None
        self._looking = False
        self._credit = SPIN_CREDIT_MAX
        self._turn = 0
        self._poll: Callable = lambda wait_ms: []
        self.ended: asyncio.Future
        """Done when the engine serves no more; `serve` makes it."""

        self.requests = RequestState(
            ops, fault_in(self._make_buffer(max(READ_BUFFER_MIN, self._pages * PAGE + PAGE)))
        )
        self._buffers = (self.requests.buffer,)
        self.replies = self._make_replies()
        self.pending = self._make_pending()
        self._handlers = KernelRequests(ops, self.requests, self.replies, self.pending.keep)
        self.fast_paths = FastPaths(
            self.requests, ops, self.replies, self.pending, self._handlers, self.take_requests, self._broken
        )
        self.table = self._make_table()
        self.notices = CacheNotices(self.requests, self.replies)
        ops.notices.connect(
            invalidate_attributes=self.notices.invalidate_attributes,
            invalidate=self.notices.invalidate,
            drop=self.notices.drop_pages,
            store=self.notices.store_pages,
            forget=self.notices.forget_names,
        )

    # The parts that differ in other engines. Each is called once, by the constructor, in this order.

    def _make_buffer(self, byte_count: int) -> bytearray | memoryview:
        """Allocate the buffer into which requests are read."""
        return bytearray(byte_count)

    def _make_replies(self) -> ReplySender:
        return ReplySender(self.requests, self.ops)

    def _make_pending(self) -> PendingRequests:
        return PendingRequests(self.requests, self.ops, self.replies, self._stop_reading, self._some_ended)

    def _make_table(self) -> list[Callable[[int], None]]:
        """Table of handlers by operation; each is called with the length of the request."""
        table = self._handlers.table()
        self.fast_paths.put_in(table)
        table[Op.INIT] = self._on_init
        table[Op.INTERRUPT] = self._on_interrupt
        return table

    # -- life cycle of a mount -----------------------------------------------------------------------------------------

    def mount(self) -> Mount:
        self.requests.fd = attach(self._mount_point, self.options)
        self._mount = mount_at(self._mount_point)
        if self._mount is None:
            os.close(self.requests.fd)
            raise Unavailable(f"{self._mount_point} was unmounted by another process")
        if self.ops.kept is not None:
            self.ops.kept.device = self._mount.device
        return self._mount

    @property
    def descriptor(self) -> int:
        return self.requests.fd

    def go_on(self, descriptor: int) -> Mount:
        """Continue the mount of a predecessor that was killed or has left. Call this instead of `mount`.

        `serve` makes the kernel resend the unanswered requests. Returns the mount as it was made; it may be
        gone.
        """
        self.requests.fd = descriptor
        self.asked_again = True
        self._mount = Mount(self.ops.kept.device, self._mount_point, OUR_TYPE, "", "")
        return self._mount

    def adopt(self, descriptor: int) -> None:
        """Serve a mount that another process made; call this instead of `mount`.

        The descriptor is non-blocking and still belongs to the caller.
        """
        self.requests.fd = descriptor

    async def serve(self) -> None:
        state = self.requests
        state.loop = asyncio.get_running_loop()
        self._handlers.begin()
        self.ended = state.loop.create_future()
        poll = select.poll()
        poll.register(state.fd, select.POLLIN)
        self._poll = poll.poll
        if not state.stopped:
            if self.uses_fast_paths:
                self.fast_paths.start()
            if self.asked_again:
                self._ask_again()
            self._read_on()
            try:
                await self.ended
            finally:
                self._stop_reading()
                # no request is read once some of these have ended
                state.stopped = state.stopped or not state.leaving
                if not state.leaving:
                    self.pending.cancel_all()
                await self.fast_paths.stop()
        if self._failed is not None:
            raise self._failed

    def stop(self) -> None:
        self.requests.stopped = True
        self.pending.cancel_lock_waits()
        self._end()

    def close(self) -> None:
        """Close the descriptor, then unmount.

        In this order: the kernel may write pages back while it unmounts, and no process would answer.
        """
        self.notices.close()
        if self._mount is None:
            return
        os.close(self.requests.fd)
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
            os.write(self.requests.fd, replies.HEADER.pack(replies.HEADER_BYTES, Notice.RESEND, 0))
        except OSError as error:
            if error.errno not in (errno.ENODEV, errno.ECONNABORTED):
                log.error(
                    "this kernel does not resend requests that the previous process left unanswered: %s",
                    error,
                )
        if self.ops.kept.word(Word.GREETED):
            if not self.ops.kept.word(Word.INIT_FLAGS) & Init.HAS_RESEND:
                log.error("this kernel did not agree to resend requests: calls may hang")
            self._agreed(Init(self.ops.kept.word(Word.INIT_FLAGS)))
            self.ops.invalidate_inherited()
            self._on_ready()

    async def leave(self, wait_s: float) -> None:
        """Stop reading requests, and return when the pending ones are answered, or after `wait_s`.

        Requests that wait for locks are not waited for. Then this process has to end immediately: its
        successor gets the rest.
        """
        self.requests.leaving = True
        self._stop_reading()
        if len(self.requests.work) > self.pending.lock_waits:
            await asyncio.wait([self.ended], timeout=wait_s)

    def _read_on(self) -> None:
        if not self.requests.reading and not self.requests.stopped and not self.requests.leaving:
            self.requests.reading = True
            self.requests.loop.add_reader(self.requests.fd, self.take_requests)
            for passing in self._passings:
                passing.read_on()

    def _stop_reading(self) -> None:
        if self.requests.reading:
            self.requests.reading = False
            self.requests.loop.remove_reader(self.requests.fd)
            for passing in self._passings:
                passing.stop_reading()

    def _end(self) -> None:
        """Stop; `serve` returns when no request is pending any more."""
        self.requests.stopped = True
        if hasattr(self, "ended"):
            self._stop_reading()
            if not self.requests.work and not self.ended.done():
                self.ended.set_result(None)

    # -- requests and replies ------------------------------------------------------------------------------------------

    def take_requests(self) -> None:
        """Read and answer waiting requests; poll for the next one while nothing is pending."""
        if self.requests.taking:
            return
        self.requests.taking = True
        self._on_burst()
        held = False  # reads and look-ups are being collected, to be sent together
        state, following, table = self.requests, self._following, self.table
        buffer = state.buffer
        opcode = -1
        run = took = 0  # requests of this operation in a row; requests in total
        self._begin_run()
        try:
            for _ in range(BURST_MAX):
                try:
                    count, begun = following(BURST_MAX - took)
                except OSError as error:
                    if not self.can_read_on(error):
                        return
                    continue
                if begun:
                    took += begun
                    if run:
                        self._end_run(opcode, run)
                        run = 0
                    self._begin_run()
                if count < 0:
                    if self.asked_again:
                        self.asked_again = False
                        self.ops.all_came_again({unique & FIRST for unique in state.work})
                        self._let_in()
                    if run:
                        self._end_run(opcode, run)
                        run = 0
                    if len(state.work) > self.pending.lock_waits or not self._look_out():
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
                        self.ops.burst()
                try:
                    table[code](count)
                except Exception as error:
                    self._broken(error)
                run += 1
                took += 1
                if not state.reading:
                    return
        finally:
            try:
                if run:
                    self._end_run(opcode, run)
                if held:
                    self.ops.burst_over()
                self.fast_paths.submit()
                if state.late:
                    self._release_late()
            finally:  # otherwise no request would ever be read again
                state.taking, state.took = False, took
                self.fast_paths.cached_replies.answer_deferred()  # if one of these failed

    def _following(self, most: int) -> tuple[int, int]:
        """Read the next request into the buffer.

        Returns its length, -1 if none waits; and how many requests before it were handled where they were
        read, at most `most`. If the length is 0, there may be more. Raises OSError.
        """
        known = self.fast_paths.cached_replies.replies
        if known is not None:
            count = known.next_request(most)
            return count, known.taken
        try:
            return os.readv(self.requests.fd, self._buffers), 0
        except BlockingIOError:
            return -1, 0

    def _release_late(self) -> None:
        """Release closed files. The buffer must not contain a request that is being handled."""
        late, self.requests.late = self.requests.late, []
        self._handlers.release_all(self.fast_paths.cached_replies.release_all(late))

    def _begin_run(self) -> None:
        state = self.requests
        state.since_s, state.deferred = stopwatch_s(), 0

    def _end_run(self, opcode: int, count: int) -> None:
        """Record the time of the requests answered since `_begin_run`; pending ones do not count."""
        state = self.requests
        now_s = stopwatch_s()
        count -= state.deferred
        if count > 0:
            state.spent.add(opcode, now_s - state.since_s, count)
        state.since_s, state.deferred = now_s, 0

    def _broken(self, error: Exception) -> None:
        if isinstance(error, Malformed):
            self._refuse(error)
        else:
            _, opcode, unique, *_ = requests.HEADER.unpack_from(self.requests.buffer)
            self.replies.fail(unique, error, _name_of(opcode))

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

    def can_read_on(self, error: OSError) -> bool:
        """Return whether to read on after an error of a read; otherwise the engine ends."""
        if error.errno in (errno.ENOENT, errno.EINTR):  # the request was withdrawn while it was read
            return True
        if error.errno not in (errno.ENODEV, errno.ECONNABORTED):
            self._failed = Unavailable(f"/dev/fuse failed: {error}")
        self.pending.cancel_looks()
        self.pending.cancel_lock_waits()
        self._end()
        return False

    def _refuse(self, error: Malformed) -> None:
        log.error("malformed request from the kernel: %s", error)
        opcode = self.requests.buffer[_OPCODE_AT]
        if error.unique and opcode not in UNANSWERED:
            self.replies.send(replies.failed(error.unique, errno.EINVAL))

    def _some_ended(self) -> None:
        """React to the end of pending requests: stop, leave, read on or poll."""
        if self.requests.stopped:
            self._end()
        elif self.requests.leaving:
            if len(self.requests.work) <= self.pending.lock_waits and not self.ended.done():
                self.ended.set_result(None)
        elif not self.requests.reading:
            self._read_on()
        elif len(self.requests.work) == self.pending.lock_waits and not self._looking:
            self._looking = True
            # not from here: replies of other requests may still be being delivered
            self.requests.loop.call_soon(self._look)

    def _look(self) -> None:
        self._looking = False
        if self.requests.reading and len(self.requests.work) == self.pending.lock_waits and self._look_out():
            self.take_requests()

    # -- requests that read workers have forwarded ---------------------------------------------------------------------

    @property
    def request_bytes_max(self) -> int:
        return len(self.requests.buffer)

    def let_read(self, passing: ForwardedReads, come_in: Callable[[ForwardedReads], None]) -> None:
        """Accept requests that a read worker forwards.

        `come_in` is called when the worker is ready and the kernel has resent all its requests to this
        process: only this process knows those.
        """
        self._passings.append(passing)
        passing.begin(self._take_passed, partial(self._is_up, come_in))
        if self.requests.reading:
            passing.read_on()

    def _is_up(self, come_in: Callable[[ForwardedReads], None], passing: ForwardedReads) -> None:
        self._waiting.append(partial(come_in, passing))
        if self.asked_again and self.requests.reading:
            self.take_requests()  # maybe no request has arrived yet; then the queue was never found empty
        else:
            self._let_in()

    def _let_in(self) -> None:
        if not self.asked_again:
            waiting, self._waiting = self._waiting, []
            for come_in in waiting:
                come_in()

    def _take_passed(self, passing: ForwardedReads) -> None:
        self._on_burst()
        self.ops.burst()
        try:
            for request in passing.channel.requests():
                _, opcode, unique, *_ = requests.HEADER.unpack_from(request)
                if opcode > _OPCODE_MAX:
                    passing.said(opcode, bytes(request[requests.HEADER_BYTES :]))
                    continue
                count = len(request)
                self.requests.view[:count] = request
                self._begin_run()
                self.requests.forwarded[unique] = passing.clone
                try:
                    self.table[opcode](count)
                except Exception as error:
                    self._broken(error)
                self._end_run(opcode, 1)
                if self.requests.late:
                    self._release_late()
                if unique not in self.requests.work:
                    del self.requests.forwarded[unique]
                elif unique in self._early:
                    del self._early[unique]
                    self.pending.interrupt(unique)
                if not self.requests.reading:
                    return  # the rest when reading continues
        finally:
            self.ops.burst_over()

    def measure(self, page: Page) -> None:
        self.requests.spent.measure(page)
        page.set(metrics.FUSE_READ_BYTES, self.requests.read_bytes + self.fast_paths.read_bytes)
        page.set(metrics.FUSE_WRITTEN_BYTES, self.requests.written_bytes)
        page.set(metrics.FUSE_IN_WORK, len(self.requests.work))

    # -- interrupts ----------------------------------------------------------------------------------------------------

    def _on_interrupt(self, count: int) -> None:
        unique = requests.decode(self.requests.buffer, count).body.unique
        # with workers: the request may still be forwarded; without, it was answered
        if not self.pending.interrupt(unique) and self._passings:
            self._early[unique] = None
            if len(self._early) > IN_WORK_MAX:
                del self._early[next(iter(self._early))]
            for passing in self._passings:
                passing.channel.send(self.requests.view[:count])

    # -- the first request ---------------------------------------------------------------------------------------------

    def _on_init(self, count: int) -> None:
        request = requests.decode(self.requests.buffer, count)
        body = request.body
        if body.major != MAJOR or body.minor < MINOR_MIN:
            if body.major > MAJOR:  # the kernel repeats INIT with our version
                self.replies.send(self._init_answer(request.unique, Init(0), 0))
                return
            self._failed = Unavailable(
                f"this kernel speaks version {body.major}.{body.minor} of FUSE, engine kernel needs "
                f"{MAJOR}.{MINOR_MIN} or newer; mount with --engine pyfuse3"
            )
            self.replies.send(replies.failed(request.unique, errno.EPROTO))
            self._end()
            return
        offered = Init(requests.flags_of(request))
        wanted = self.flags if self.options.acl else self.flags & ~Init.POSIX_ACL
        if self.options.writeback:
            wanted |= Init.WRITEBACK_CACHE
        elif not self.ops.options.attr_timeout_s:
            wanted |= Init.AUTO_INVAL_DATA
        self._agreed(wanted & offered)
        if (memory := self.ops.kept) is not None:
            memory.set_word(Word.INIT_FLAGS, wanted & offered)
            memory.set_word(Word.PAGES, self._pages)
            memory.set_word(Word.GREETED, 1)
        self.replies.send(self._init_answer(request.unique, wanted & offered, body.minor))
        log.info("FUSE %d.%d, requests of up to %d KiB", body.major, body.minor, self._pages * PAGE >> 10)
        self._on_ready()

    def _agreed(self, flags: int) -> None:
        """Apply the features agreed on at INIT, by this process or its predecessor."""
        self.requests.setxattr_extended = bool(flags & Init.SETXATTR_EXT)
        self.ops.set_kernel_features(
            guards_pages=not flags & (Init.WRITEBACK_CACHE | Init.AUTO_INVAL_DATA),
            keeps_acls=bool(flags & Init.POSIX_ACL),
        )

    def _init_answer(self, unique: int, flags: Init, minor: int) -> bytes:
        background = max(1, min(self.options.max_background, 0xFFFF))
        return replies.init(
            unique,
            minor=min(minor, MINOR),
            max_readahead=READ_AHEAD_BYTES_MAX,
            flags=flags,
            max_background=background,
            congestion_threshold=min(self.options.congestion_threshold or background * 3 // 4, 0xFFFF),
            max_write=self._pages * PAGE,
            max_pages=self._pages,
        )


def _name_of(opcode: int) -> str:
    try:
        return Op(opcode).name.lower()
    except ValueError:
        return f"operation {opcode}"
