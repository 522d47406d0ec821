"""Engine of a read worker, on a cloned descriptor of /dev/fuse.

It answers READ of open files that are published to it, and forwards all other requests to the serving
process, which replies on the descriptor where the request was read. It also forwards a READ that has failed
here, unless it failed for lack of time. The engine starts on a message of the serving process, and ends when
that process or the mount ends. Used by mountd/read_worker.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

from nvpool.core.errors import Unavailable
from nvpool.fuse.kernel.connection import KernelEngine
from nvpool.fuse.kernel.read_worker_channel import ASK, END, GO, METRICS, UP, Channel, word
from nvpool.fuse.mount_point import MountOptions
from nvpool.fuse.ops.read_worker import ReadWorkerOps
from nvpool.fuse.pending_requests import PendingRequests
from nvpool.fuse.protocol import requests
from nvpool.fuse.protocol.constants import Op
from nvpool.fuse.reply_sender import ReplySender
from nvpool.fuse.request_state import RequestState


class RequestForwarder:
    """Forwards requests to the serving process, and counts them.

    `on_full` is called when the channel takes no more, `on_room` when it does again.
    """

    def __init__(
        self,
        state: RequestState,
        channel: Channel,
        on_full: Callable[[], None],
        on_room: Callable[[], None],
    ) -> None:
        self._requests = state
        self._channel = channel
        self._on_full = on_full
        self._on_room = on_room
        self.is_blocked = False
        self.passed = 0
        """Number of forwarded requests."""
        self.asked: dict[int, bytes] = {}
        """Pending requests, to be forwarded if they fail."""
        self.count = 0
        """Length of the last READ that was not forwarded immediately."""

    def forward(self, request) -> None:
        self.passed += 1
        self._requests.deferred += 1  # the process that replies counts it
        self.send(request)

    def send(self, request) -> None:
        self._channel.send(request)
        if self._channel.is_full and not self.is_blocked:
            self.is_blocked = True
            self._on_full()
            asyncio.get_running_loop().add_writer(self._channel.fileno(), self._unblock)

    def _unblock(self) -> None:
        self._channel.flush()
        if not self._channel.is_full:
            self.is_blocked = False
            asyncio.get_running_loop().remove_writer(self._channel.fileno())
            self._on_room()


class ForwardingReplies(ReplySender):
    """Replies to reads; a read that has failed is forwarded instead."""

    def __init__(self, requests: RequestState, ops: ReadWorkerOps, forwarder: RequestForwarder) -> None:
        super().__init__(requests, ops)
        self._forwarder = forwarder
        self.answered = 0
        """Number of requests."""

    def data(self, unique: int, payload) -> None:
        self.answered += 1
        super().data(unique, payload)

    def fail(self, unique: int, error: BaseException, name: str) -> None:
        if isinstance(error, (asyncio.CancelledError, Unavailable)):
            # The caller dies, the mount has ended, or the deadline is over: no process should wait once more.
            super().fail(unique, error, name)
        else:
            forwarder = self._forwarder
            forwarder.forward(forwarder.asked.get(unique) or self._requests.view[: forwarder.count])


class ForwardableRequests(PendingRequests):
    """Pending reads, with a copy of each request."""

    def __init__(
        self,
        requests: RequestState,
        ops: ReadWorkerOps,
        replies: ReplySender,
        on_full: Callable[[], None],
        some_ended: Callable[[], None],
        forwarder: RequestForwarder,
    ) -> None:
        super().__init__(requests, ops, replies, on_full, some_ended)
        self._view = requests.view
        self._forwarder = forwarder

    def keep(self, step, unique: int, name: str, answer: Callable) -> None:
        self._forwarder.asked[unique] = bytes(self._view[: self._forwarder.count])
        super().keep(step, unique, name, answer)

    def ended(self, unique: int, name: str, answer: Callable, result, error: BaseException | None) -> None:
        super().ended(unique, name, answer, result, error)
        self._forwarder.asked.pop(unique, None)


class ReadWorkerEngine(KernelEngine):
    uses_fast_paths = False  # each read must first be permitted by the serving process

    def __init__(
        self,
        ops: ReadWorkerOps,
        channel: Channel,
        on_burst: Callable[[], None],
        page: Callable[[], bytes],
    ) -> None:
        """`page()`: this process' metrics, encoded, for the serving process."""
        self._channel = channel
        self._page = page
        self._begun = asyncio.Event()
        self.alone = asyncio.Event()
        """Set when the serving process is gone, or does not need this worker any more."""
        super().__init__(ops, Path("/"), MountOptions(""), on_burst=on_burst)

    @property
    def answered(self) -> int:
        """Number of requests answered here."""
        return self._answering.answered

    @property
    def passed(self) -> int:
        """Number of requests forwarded."""
        return self._forwarder.passed

    def _make_replies(self) -> ReplySender:
        self._forwarder = RequestForwarder(self.requests, self._channel, self._stop_reading, self._read_on)
        self._answering = ForwardingReplies(self.requests, self.ops, self._forwarder)
        return self._answering

    def _make_pending(self) -> PendingRequests:
        return ForwardableRequests(
            self.requests,
            self.ops,
            self.replies,
            self._stop_reading,
            self._some_ended,
            self._forwarder,
        )

    def _make_table(self) -> list[Callable[[int], None]]:
        table: list[Callable[[int], None]] = [self._pass_on] * 256
        table[Op.READ] = self._on_read
        table[Op.INTERRUPT] = self._on_interrupt
        return table

    async def serve(self) -> None:
        loop = self.requests.loop = asyncio.get_running_loop()
        loop.add_reader(self._channel.fileno(), self._hear)
        self._channel.send(word(UP))
        await self._begun.wait()
        await super().serve()
        self._channel.send(word(END))

    def _hear(self) -> None:
        is_open = self._channel.fill()
        for request in self._channel.requests():
            _, opcode, *_ = requests.HEADER.unpack_from(request)
            if opcode == GO:
                self._begun.set()
            elif opcode == ASK:
                self._forwarder.send(word(METRICS, self._page()))
            elif opcode == Op.INTERRUPT:
                self.pending.interrupt(requests.decode(request, len(request)).body.unique)
        if not is_open:
            self.requests.loop.remove_reader(self._channel.fileno())
            self.alone.set()

    def _read_on(self) -> None:
        if not self._forwarder.is_blocked:
            super()._read_on()

    def _look_out(self) -> bool:
        """Do not poll: only the serving process does."""
        return False

    # -- requests ------------------------------------------------------------------------------------------------------

    def _pass_on(self, count: int) -> None:
        self._forwarder.forward(self.requests.view[:count])

    def _on_read(self, count: int) -> None:
        fields = requests.decode_read(self.requests.buffer, count)
        if not self.ops.may_read(fields[9], fields[10] + fields[11]):
            self._pass_on(count)
            return
        self._forwarder.count = count
        self._handlers.on_read(count)

    def _on_interrupt(self, count: int) -> None:
        if not self.pending.interrupt(requests.decode(self.requests.buffer, count).body.unique):
            self._pass_on(count)
