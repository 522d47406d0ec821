"""The contract of transports on the simulated network, which splits and joins what is sent."""

import asyncio

import pytest

from nvpool.testing.contracts import transport as contract
from nvpool.testing.contracts.transport import CHECKS, TransportSubject
from nvpool.testing.sim.network import SimulatedNetwork
from nvpool.testing.sim.stream_transport import SimulatedTransport
from nvpool.testing.sim.virtual_time_loop import VirtualClock, VirtualLoop


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
@pytest.mark.parametrize("scheme", ["stream", "stream+unix"])
def test_simulated_transport_meets_the_contract(scheme, check, tmp_path, monkeypatch):
    endpoint = {"stream": "stream://localhost:1", "stream+unix": f"stream+unix://{tmp_path}/s"}[scheme]
    loop = VirtualLoop()
    clock = VirtualClock(loop, "contract")
    monkeypatch.setattr(contract, "SYSTEM_CLOCK", clock)
    network = SimulatedNetwork(loop, check.__name__)
    network.places["both"] = "node-1"

    async def run():
        await check(TransportSubject(SimulatedTransport(network, "both", clock, scheme), endpoint))
        await asyncio.sleep(1.0)
        return asyncio.all_tasks() - {asyncio.current_task()}

    asyncio.set_event_loop(loop)
    try:
        assert not loop.run_until_complete(run())
        assert not network.servers
    finally:
        asyncio.set_event_loop(None)
        loop.close()
