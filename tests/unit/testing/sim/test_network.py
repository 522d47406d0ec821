"""Byte streams of the simulated network: order, splits, stops, cut networks, deaths and flow control."""

from __future__ import annotations

import asyncio
import errno
import hashlib
import socket
import struct

import pytest

from nvpool.testing.sim.network import KEEPALIVE_S, SILENT_S, WINDOW_BYTES, Server, SimulatedNetwork
from nvpool.testing.sim.simulated_process import Process
from nvpool.testing.sim.virtual_time_loop import VirtualLoop

NAMES = ("asks", "serves")


class Ends(asyncio.BufferedProtocol):
    """Protocol that records what happens to it."""

    def __init__(self, buffer_bytes: int = 1 << 16) -> None:
        self.buffer = bytearray(buffer_bytes)
        self.content = bytearray()
        self.counts: list[int] = []
        self.events: list[str] = []
        self.transport = None

    def connection_made(self, transport):
        self.transport = transport

    def get_buffer(self, sizehint):
        return memoryview(self.buffer)

    def buffer_updated(self, nbytes):
        self.counts.append(nbytes)
        self.content += self.buffer[:nbytes]

    def eof_received(self):
        self.events.append("end")

    def pause_writing(self):
        self.events.append("pause")

    def resume_writing(self):
        self.events.append("resume")

    def connection_lost(self, exc):
        self.events.append("lost" if exc is None else errno.errorcode[exc.errno])


class Pair:
    """Two processes on two nodes with a connection."""

    def __init__(self, loop: VirtualLoop, seed: str = "seed") -> None:
        self.loop = loop
        self.network = SimulatedNetwork(loop, seed)
        self.processes = {}
        for number, name in enumerate(NAMES):
            process = Process(
                loop, name, f"node-{number}", lambda process: self.network.hang_up(process.name)
            )
            self.network.places[name], self.network.contexts[name] = process.node, process.context
            self.processes[name] = process
        self.asking, self.serving = Ends(), Ends()

    async def connect(self) -> Pair:
        self.network.listen("address", Server("serves", lambda end: self.serving))
        await self.network.connect("asks", "address", lambda: self.asking)
        await asyncio.sleep(0.01)
        return self

    def resets_at_close(self) -> None:
        self.asking.transport.get_extra_info("socket").setsockopt(
            socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0)
        )


def run(main) -> None:
    loop = VirtualLoop()
    errors = []
    loop.set_exception_handler(lambda loop, context: errors.append(context))
    try:
        loop.run_until_complete(main(loop))
    finally:
        loop.close()
    assert not errors


@pytest.mark.parametrize("seed", range(5))
def test_bytes_keep_their_order_over_cuts(seed):
    async def main(loop):
        pair = await Pair(loop, str(seed)).connect()
        network, content = pair.network, hashlib.shake_128(b"x").digest(400_000)
        for at in range(0, len(content), 1000):
            pair.asking.transport.write(content[at : at + 1000])
            if at % 100_000 == 50_000:
                network.cut("node-0", "node-1")
                loop.call_later(0.002, network.heal)
            await asyncio.sleep(0.0001)
        await asyncio.sleep(5.0)
        assert pair.serving.content == content
        counts = pair.serving.counts
        assert any(count < 1000 for count in counts) and any(count > 1000 for count in counts)

    run(main)


def test_stopped_process_reads_nothing_but_its_kernel_does():
    async def main(loop):
        pair = Pair(loop)
        pair.processes["serves"].stop()
        await pair.connect()
        pair.asking.transport.write(b"one")
        pair.asking.transport.write(b"two")
        await asyncio.sleep(20.0)
        assert pair.serving.transport is None and not pair.asking.events
        pair.processes["serves"].go_on()
        await asyncio.sleep(1.0)
        assert pair.serving.content == b"onetwo"

    run(main)


def test_write_buffer_is_full_while_the_peer_reads_nothing():
    async def main(loop):
        pair = await Pair(loop).connect()
        transport = pair.asking.transport
        transport.set_write_buffer_limits(1000, 500)
        pair.serving.transport.pause_reading()
        transport.write(bytes(WINDOW_BYTES + 900))
        assert transport.get_write_buffer_size() == 900 and not pair.asking.events
        transport.write(bytes(101))
        assert pair.asking.events == ["pause"]
        await asyncio.sleep(1.0)
        assert pair.asking.events == ["pause"] and not pair.serving.content
        pair.serving.transport.resume_reading()
        await asyncio.sleep(1.0)
        assert pair.asking.events == ["pause", "resume"] and len(pair.serving.content) == WINDOW_BYTES + 1001

    run(main)


def test_closed_end_sends_what_is_unsent():
    async def main(loop):
        pair = await Pair(loop).connect()
        pair.serving.transport.pause_reading()
        pair.asking.transport.write(bytes(WINDOW_BYTES + 5))
        pair.asking.transport.close()
        await asyncio.sleep(1.0)
        assert not pair.asking.events
        pair.serving.transport.resume_reading()
        await asyncio.sleep(1.0)
        assert len(pair.serving.content) == WINDOW_BYTES + 5
        assert pair.asking.events == ["lost"] and pair.serving.events == ["end", "lost"]

    run(main)


def test_death_ends_connections_of_a_process():
    async def main(loop):
        pair = await Pair(loop).connect()
        pair.processes["serves"].kill()
        await asyncio.sleep(1.0)
        assert pair.asking.events == ["end", "lost"] and pair.serving.events == ["lost"]
        with pytest.raises(ConnectionRefusedError):
            await pair.network.connect("asks", "address", Ends)

    run(main)


def test_death_behind_a_cut_is_noticed_by_keepalive():
    async def main(loop):
        pair = await Pair(loop).connect()
        pair.network.cut("node-0", "node-1")
        pair.processes["serves"].kill()
        await asyncio.sleep(KEEPALIVE_S - 1.0)
        assert not pair.asking.events
        await asyncio.sleep(2.0)
        assert pair.asking.events == ["ETIMEDOUT"]

    run(main)


@pytest.mark.parametrize(("resets", "arrives"), [(False, b"late"), (True, b"")])
def test_lost_bytes_of_a_dead_process_arrive_unless_it_resets(resets, arrives):
    async def main(loop):
        pair = await Pair(loop).connect()
        if resets:
            pair.resets_at_close()
        pair.network.cut("node-0", "node-1")
        pair.asking.transport.write(b"late")
        await asyncio.sleep(1.0)
        pair.processes["asks"].kill()
        await asyncio.sleep(1.0)
        pair.network.heal()
        await asyncio.sleep(1.0)
        assert pair.serving.content == arrives
        assert pair.serving.events == (["ECONNRESET"] if resets else ["end", "lost"])

    run(main)


def test_loss_of_power_is_noticed_late():
    async def main(loop):
        pair = await Pair(loop).connect()
        pair.serving.transport.write(b"x")
        pair.network.lose_power("serves")
        pair.processes["serves"].kill()
        await asyncio.sleep(0.01)
        assert not pair.asking.content and not pair.asking.events and pair.serving.events == ["lost"]
        await asyncio.sleep(SILENT_S)
        assert pair.asking.events == ["ECONNRESET"] and not pair.network.open_ends

    run(main)


def test_connect_waits_for_a_node_that_is_cut_off():
    async def main(loop):
        pair = Pair(loop)
        pair.network.listen("address", Server("serves", lambda end: pair.serving))
        pair.network.lose("node-1", "node-0")
        loop.call_later(2.5, pair.network.heal)
        await pair.network.connect("asks", "address", lambda: pair.asking)
        assert 2.5 < loop.time() < 4.0

    run(main)


def test_bytes_for_a_closed_end_reset_the_sender():
    async def main(loop):
        pair = await Pair(loop).connect()
        pair.network.lose("node-1", "node-0")  # the end of the stream does not arrive
        pair.serving.transport.close()
        pair.asking.transport.write(b"x")
        await asyncio.sleep(1.0)
        assert pair.asking.events == ["ECONNRESET"]

    run(main)


def test_network_forgets_connections_that_have_ended():
    async def main(loop):
        pair = await Pair(loop).connect()
        for end in (pair.asking, pair.serving):
            end.transport.write(b"x")
        pair.asking.transport.abort()
        await asyncio.sleep(1.0)
        assert pair.serving.events == ["ECONNRESET"]
        assert not pair.network.open_ends

    run(main)
