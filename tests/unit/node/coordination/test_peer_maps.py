"""The newest map that other nodes have, requested over real connections in one process."""

import asyncio
from types import SimpleNamespace

import msgspec
import pytest

from nvpool.core.errors import StaleIdentity
from nvpool.node.coordination import peer_maps
from nvpool.poolmap.model import encode_map
from nvpool.rpc.api import Greeting
from nvpool.rpc.connection_pool import Dialer
from nvpool.rpc.transport_registry import listen
from nvpool.rpc.v1 import pool_pb2
from nvpool.testing.contracts.coordinator import first_map

OWN = 1


@pytest.fixture
def ask(monkeypatch, request):
    """Result of `newest_elsewhere` for replies of the other nodes: a map, None (not newer), an error, or "silent"."""
    monkeypatch.setattr(peer_maps, "ASK_S", 3600.0)
    monkeypatch.setattr(peer_maps, "MORE_S", 0.01)

    async def asked(answers):
        kept = []

        def handler(answer):
            def handle(call):
                if answer == "silent":
                    kept.append(call)
                elif isinstance(answer, Exception):
                    call.fail(answer)
                else:
                    call.reply(
                        pool_pb2.MapReply(map=encode_map(answer) if answer else b"").SerializeToString()
                    )

            return handle

        names = [f"inproc://{request.node.name}-{number}" for number in range(len(answers))]
        listeners = [
            await listen(name, Greeting("node"), handler(answer))
            for name, answer in zip(names, answers, strict=True)
        ]
        dialer = Dialer(Greeting("node 1"))
        first = first_map()
        nodes = tuple(
            msgspec.structs.replace(first.nodes[0], id=number + 2, endpoints=(name,))
            for number, name in enumerate(names)
        )
        try:
            async with asyncio.timeout(30):
                return await peer_maps.newest_elsewhere(
                    SimpleNamespace(etcd=(), nodes=nodes, epoch=first.epoch), OWN, dialer
                )
        finally:
            await dialer.close()
            for listener in listeners:
                await listener.close()

    return lambda *answers: asyncio.run(asked(answers))


def newer(epochs):
    return msgspec.structs.replace(first_map(), epoch=first_map().epoch + epochs)


def test_newest_map_is_found_despite_a_silent_node(ask):
    assert ask("silent", newer(2)) == newer(2)


def test_nothing_newer_is_a_result_despite_a_silent_node(ask):
    assert ask(None, "silent") is None


def test_newest_map_of_several_nodes_is_taken(ask):
    assert ask(newer(1), newer(3)) == newer(3)


def test_refusal_is_raised_if_no_node_has_a_newer_map(ask):
    with pytest.raises(StaleIdentity):
        ask(StaleIdentity("node 1 is not in the pool"))


def test_refusal_of_one_node_is_ignored_with_a_newer_map(ask):
    assert ask(StaleIdentity("node 1 is not in the pool"), newer(1)) == newer(1)
