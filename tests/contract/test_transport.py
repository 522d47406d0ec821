"""The contract of transports, on the loop that daemons use; sockets also on asyncio's own loop."""

import asyncio
import itertools

import pytest
import uvloop

from nvpool.rpc import transport_registry
from nvpool.testing.contracts.transport import CHECKS, TransportSubject

_number = itertools.count(1)
ENDPOINTS = {
    "inproc": "inproc://contract-{number}",
    "stream+unix": "stream+unix://{directory}/s",
    "stream": "stream://127.0.0.1:0",
    "grpc": "grpc://127.0.0.1:0",
}
ENDING_S = 5.0
"""For ending tasks: grpc.aio learns of the end of a stream from its own thread, and offers nothing to await it by."""

LOOPS = {"uvloop": uvloop.new_event_loop, "asyncio": asyncio.new_event_loop}


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
@pytest.mark.parametrize(
    ("scheme", "loop"),
    [
        ("inproc", "asyncio"),
        ("stream+unix", "uvloop"),
        ("stream+unix", "asyncio"),
        ("stream", "uvloop"),
        ("grpc", "uvloop"),
    ],
)
def test_transport_meets_the_contract(scheme, loop, check, tmp_path):
    endpoint = ENDPOINTS[scheme].format(number=next(_number), directory=tmp_path)

    async def run():
        async with asyncio.timeout(60):
            await check(TransportSubject(transport_registry.transport(scheme), endpoint))
        if left := asyncio.all_tasks() - {asyncio.current_task()}:
            _, left = await asyncio.wait(left, timeout=ENDING_S)
        assert not left, f"left behind: {left}"

    with asyncio.Runner(loop_factory=LOOPS[loop]) as runner:
        runner.run(run())
