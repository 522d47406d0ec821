"""What a daemon does with the pool maps that its supervisor gives it, or does not."""

import asyncio
from types import SimpleNamespace

from msgspec.structs import replace

from nvpool.base.errors import AccessDenied
from nvpool.logic.poolmap import encode_map
from nvpool.run import served
from nvpool.wire.v1.pool_pb2 import MapReply
from tests.unit.test_placement import a_pool


class Supervisor:
    def __init__(self, *answers):
        self.answers = list(answers)

    async def call(self, endpoints, method, message, *, deadline_s):
        answer = self.answers.pop(0) if self.answers else await asyncio.Future()
        if isinstance(answer, Exception):
            raise answer
        return SimpleNamespace(message=answer)


def test_refused_and_broken_maps_do_not_end_a_daemon(monkeypatch, tmp_path, caplog):
    monkeypatch.setattr(served, "_MAP_RETRY_S", 0.01)
    first = a_pool((4, 4), 1)
    second = replace(first, epoch=2)
    supervisor = Supervisor(AccessDenied("who are you?"), AccessDenied("who are you?"), b"\xff", MapReply(
        map=b"no map").SerializeToString(), MapReply(map=encode_map(second)).SerializeToString())
    directory = SimpleNamespace(node=1, poolmap=tmp_path / "poolmap.json")
    directory.poolmap.write_bytes(b"neither")
    taken = []

    async def run():
        watching = asyncio.ensure_future(served._watch_map(directory, supervisor, first, SimpleNamespace(
            update_map=taken.append), None))
        async with asyncio.timeout(20):
            while not taken:
                assert not watching.done()
                await asyncio.sleep(0.01)
        watching.cancel()

    asyncio.run(run())
    assert [one.epoch for one in taken] == [2] and len(caplog.messages) == len(set(caplog.messages))
