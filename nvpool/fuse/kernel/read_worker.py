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
from nvpool.fuse.protocol import requests
from nvpool.fuse.protocol.constants import Op


class ReadWorkerEngine(KernelEngine):
    def __init__(self, ops: ReadWorkerOps, channel: Channel, on_burst: Callable[[], None]) -> None:
        super().__init__(ops, Path("/"), MountOptions(""), on_burst=on_burst)
        self._channel = channel
        self._asked: dict[int, bytes] = {}  # pending requests, to be forwarded if they fail
        self._blocked = False
        self.page: Callable[[], bytes] = bytes
        """This process' metrics, encoded, for the serving process."""
        self._begun = asyncio.Event()
        self.alone = asyncio.Event()
        """Set when the serving process is gone, or does not need this worker any more."""
        self.answered = self.passed = 0
        """Number of requests."""

    async def serve(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._channel.fileno(), self._hear)
        self._channel.send(word(UP))
        await self._begun.wait()
        await super().serve()
        self._channel.send(word(END))

    def _handlers(self) -> list[Callable[[int], None]]:
        table: list[Callable[[int], None]] = [self._pass_on] * 256
        table[Op.READ] = self._on_read
        table[Op.INTERRUPT] = self._on_interrupt
        return table

    def _hear(self) -> None:
        is_open = self._channel.fill()
        for request in self._channel.requests():
            _, opcode, *_ = requests.HEADER.unpack_from(request)
            if opcode == GO:
                self._begun.set()
            elif opcode == ASK:
                self._send_on(word(METRICS, self.page()))
            elif opcode == Op.INTERRUPT:
                self._interrupt(requests.decode(request, len(request)).body.unique)
        if not is_open:
            self._loop.remove_reader(self._channel.fileno())
            self.alone.set()

    # -- forwarding ----------------------------------------------------------------------------------------------------

    def _pass_on(self, count: int) -> None:
        self._pass(self._view[:count])

    def _pass(self, request) -> None:
        self.passed += 1
        self._kept += 1  # the process that replies counts it
        self._send_on(request)

    def _send_on(self, request) -> None:
        self._channel.send(request)
        if self._channel.is_full and not self._blocked:
            self._blocked = True
            self._stop_reading()
            self._loop.add_writer(self._channel.fileno(), self._unblock)

    def _unblock(self) -> None:
        self._channel.flush()
        if not self._channel.is_full:
            self._blocked = False
            self._loop.remove_writer(self._channel.fileno())
            self._read_on()

    def _read_on(self) -> None:
        if not self._blocked:
            super()._read_on()

    def _look_out(self) -> bool:
        """Do not poll: only the serving process does."""
        return False

    # -- reads in this process -----------------------------------------------------------------------------------------

    def _begin_plain_reads(self) -> None:
        """Start no compiled reads: each read must first be permitted by the serving process."""

    def _on_read(self, count: int) -> None:
        fields = requests.decode_read(self._buffer, count)
        if not self._ops.may_read(fields[9], fields[10] + fields[11]):
            self._pass_on(count)
            return
        self._count = count
        super()._on_read(count)

    def _data(self, unique: int, payload) -> None:
        self.answered += 1
        super()._data(unique, payload)

    def _keep_in_work(self, step, unique: int, name: str, answer: Callable) -> None:
        self._asked[unique] = bytes(self._view[: self._count])
        super()._keep_in_work(step, unique, name, answer)

    def _step_ended(
        self, unique: int, name: str, answer: Callable, result, error: BaseException | None
    ) -> None:
        super()._step_ended(unique, name, answer, result, error)
        self._asked.pop(unique, None)

    def _fail(self, unique: int, error: BaseException, name: str) -> None:
        if isinstance(error, (asyncio.CancelledError, Unavailable)):
            # The caller dies, the mount has ended, or the deadline is over: no process should wait once more.
            super()._fail(unique, error, name)
        else:
            self._pass(self._asked.get(unique) or self._view[: self._count])

    def _on_interrupt(self, count: int) -> None:
        if not self._interrupt(requests.decode(self._buffer, count).body.unique):
            self._pass_on(count)
