"""Decisions and replies of the supervisor, with an in-memory coordinator and programs of three lines."""

import asyncio
import gc
import json
import os
import resource
import signal
import sys
import warnings
import weakref
from functools import partial

import msgspec
import pytest

from nvpool.cluster.embedded_coordinator import EmbeddedCoordinator
from nvpool.core.clock import SYSTEM_CLOCK
from nvpool.core.config import Config
from nvpool.core.errors import Bug, Busy, Draining, Fenced, InvalidRequest, NvpoolError, Refused, Unavailable
from nvpool.host.pool_directory import PoolDirectory
from nvpool.host.process_identity import identity_of
from nvpool.kv.memory_engine import MemoryKv
from nvpool.node import supervisor as room
from nvpool.poolmap.model import Drive, Node, Target, decode_map
from nvpool.provision.create import CAPACITY_BYTES_MIN
from nvpool.rpc.peer_roles import Peer
from nvpool.rpc.v1 import data_pb2, pool_pb2, wire_pb2
from nvpool.runtime.daemon_process import Stop
from nvpool.testing.contracts.coordinator import first_map

SERVES = """if True:
    import signal, sys
    from nvpool.host.pool_directory import Flock, PoolDirectory, announcement
    directory, role, number = PoolDirectory(sys.argv[2]), sys.argv[1].split("_")[0], int(sys.argv[3])
    name = f"{'target' if role == 'store' else role}-{number}"
    lock = Flock.take(directory.run / f"{name}.lock", name)
    directory.announce(name, announcement(role, now_ms=7, number=number))
    signal.pause()
"""


class Asked:
    """A request and its reply."""

    peer = Peer("test", "here", True)

    def __init__(self, method: int, message: bytes):
        self.method, self.message = method, message
        self.deadline_s = SYSTEM_CLOCK.boottime_s() + 30
        self.answer: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()

    def reply(self, message=b"", payload=()):
        self.answer.set_result(bytes(message))

    def fail(self, error):
        if not self.answer.done():
            self.answer.set_exception(error)

    def on_cancel(self, callback):
        self.cancel = callback


def scenario(tmp_path, monkeypatch, run):
    """Run `run(supervisor, stop, failed, directory)` beside a running supervisor; stop all programs afterwards."""
    monkeypatch.setattr(
        room, "command", lambda program, *words: [sys.executable, "-c", SERVES, program.name.lower(), *words]
    )
    directory = PoolDirectory(tmp_path)
    directory.run.mkdir(parents=True)

    async def whole():
        stop, failed = Stop(), asyncio.get_running_loop().create_future()
        coordinator = await EmbeddedCoordinator.found(MemoryKv(), first_map())
        supervisor = room.Supervisor(directory, Config(), coordinator, stop, failed)
        running = asyncio.ensure_future(supervisor.run())
        try:
            async with asyncio.timeout(60):
                await until(lambda: all(directory.state_of(n) for n in ("meta-1", "target-1", "target-2")))
                await run(supervisor, stop, failed, directory, running)
        finally:
            stop.asked.set()
            await asyncio.wait([running], timeout=30)
            await supervisor.close()
            await coordinator.close()
            for state in directory.states().values():
                os.kill(state.pid, signal.SIGKILL)

    asyncio.run(whole())


async def until(holds) -> None:
    async with asyncio.timeout(120):
        while not holds():  # noqa: ASYNC110  (no event for files and processes)
            await asyncio.sleep(0.02)


async def ask(supervisor, method, request) -> bytes:
    asked = Asked(method, request if isinstance(request, bytes) else request.SerializeToString())
    supervisor.handle(asked)
    return await asyncio.wait_for(asked.answer, 120)


async def change(supervisor, verb, **arguments) -> dict:
    request = pool_pb2.PoolChangeRequest(verb=verb, arguments=json.dumps(arguments).encode())
    return json.loads(
        pool_pb2.PoolChangeReply.FromString(await ask(supervisor, wire_pb2.POOL_CHANGE, request)).result
    )


def test_drives_at_equal_paths_of_nodes_are_distinguished(tmp_path, monkeypatch):
    here, there, both = (tmp_path / name for name in ("here", "there", "both"))
    here.mkdir()

    async def run(supervisor, stop, failed, directory, running):
        def others(now):
            places = ((3, 2, here), (4, 3, here), (5, 2, there), (6, 2, both), (7, 3, both))
            unknown = partial(msgspec.structs.replace, endpoints=())
            return msgspec.structs.replace(
                now,
                nodes=(*map(unknown, now.nodes), *(Node(n, f"n{n}", f"host-{n}", ()) for n in (2, 3))),
                shards=tuple(map(unknown, now.shards)),
                drives=(
                    *now.drives,
                    *(Drive(n, node, f"{place}/nvpool-x-target-{n}", 1 << 30) for n, node, place in places),
                ),
                targets=(
                    *map(unknown, now.targets),
                    *(Target(n, n, node, 1 << 30, ()) for n, node, _ in places),
                ),
            )

        await supervisor.leading.change(others)
        added = await change(supervisor, "drive-add", path=str(here), capacity_bytes=CAPACITY_BYTES_MIN)
        assert added["drive"] == 8, "drives of other nodes at this path do not matter"
        again = await change(supervisor, "drive-add", path=str(here), capacity_bytes=CAPACITY_BYTES_MIN)
        assert (added["was_there"], again) == (False, added | {"was_there": True, "epoch": again["epoch"]})
        assert (await change(supervisor, "drive-drain", drive=str(here)))["drive"] == 8
        with pytest.raises(Refused, match="in the pool already.*nvpool drive drain POOL 8 --cancel"):
            await change(supervisor, "drive-add", path=str(here), capacity_bytes=CAPACITY_BYTES_MIN)
        assert (await change(supervisor, "drive-drain", drive=added["path"]))["drive"] == 8
        assert (await change(supervisor, "drive-drain", drive=str(there)))["drive"] == 5
        with pytest.raises(InvalidRequest, match="on several nodes"):
            await change(supervisor, "drive-drain", drive=str(both))
        assert {
            target.id for target in supervisor.coordinator.pool_map.targets if target.desired_state == "drain"
        } == {5, 8}

    scenario(tmp_path / "pool", monkeypatch, run)


def test_drained_node_accepts_no_new_drive(tmp_path, monkeypatch):
    async def run(supervisor, stop, failed, directory, running):
        def draining(now):
            first = msgspec.structs.replace(now.nodes[0], desired_state="drain")
            targets = (msgspec.structs.replace(now.targets[0], desired_state="drain"), *now.targets[1:])
            return msgspec.structs.replace(now, nodes=(first, *now.nodes[1:]), targets=targets)

        before = await supervisor.leading.change(draining)
        for verb, arguments in (
            ("drive-add", {"path": str(tmp_path), "capacity_bytes": CAPACITY_BYTES_MIN}),
            ("drive-drain", {"drive": str(before.targets[0].drive), "cancel": True}),
        ):
            with pytest.raises(InvalidRequest, match="nvpool node drain POOL 1 --cancel"):
                await change(supervisor, verb, **arguments)
        assert supervisor.coordinator.pool_map == before

    scenario(tmp_path / "pool", monkeypatch, run)


def test_unreasonable_limit_is_refused(tmp_path, monkeypatch):
    async def run(supervisor, stop, failed, directory, running):
        for limit in (-1, 1 << 50):
            with pytest.raises(InvalidRequest, match=r"at most 1.00 TiB a second; 0 takes it away"):
                await change(supervisor, "rebalance", limit_bytes_s=limit)
        assert (await change(supervisor, "rebalance", limit_bytes_s=1 << 20))["limit_bytes_s"] == 1 << 20

    scenario(tmp_path / "pool", monkeypatch, run)


def test_request_without_file_descriptors_is_refused(tmp_path, monkeypatch):
    async def run(supervisor, stop, failed, directory, running):
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        one = os.open("/", os.O_RDONLY)
        os.close(one)
        resource.setrlimit(resource.RLIMIT_NOFILE, (one, hard))
        try:
            for method, request in (
                (wire_pb2.POOL_STATUS, pool_pb2.PoolStatusRequest()),
                (
                    wire_pb2.POOL_CHANGE,
                    pool_pb2.PoolChangeRequest(verb="drive-add", arguments=b'{"path": "/x"}'),
                ),
            ):
                with pytest.raises(Busy, match="LimitNOFILE"):
                    await ask(supervisor, method, request)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        await ask(supervisor, wire_pb2.POOL_STATUS, pool_pb2.PoolStatusRequest())

    scenario(tmp_path, monkeypatch, run)


def test_disconnected_caller_leaves_no_coroutine_behind(tmp_path, monkeypatch):
    """The caller ended in the same iteration of the loop in which its request arrived."""

    class Gone(Asked):
        def on_cancel(self, callback):
            callback()

    async def run(supervisor, stop, failed, directory, running):
        gone = Gone(wire_pb2.META_ALIVE, b"")
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            supervisor.handle(gone)
            await until(lambda: not supervisor.answers)
            gc.collect()
        assert not [str(warning.message) for warning in said if "never awaited" in str(warning.message)]

    scenario(tmp_path, monkeypatch, run)


def test_closed_supervisor_leaves_no_answers_behind(tmp_path, monkeypatch):
    async def run(supervisor, stop, failed, directory, running):
        waits = Asked(
            wire_pb2.POOL_MAP, pool_pb2.MapRequest(newer_than=1 << 40, wait_s=60.0).SerializeToString()
        )
        supervisor.handle(waits)
        await asyncio.sleep(0)
        await supervisor.close()
        assert not supervisor.answers and isinstance(waits.answer.exception(), Unavailable)
        with pytest.raises(Draining):
            await ask(supervisor, wire_pb2.POOL_MAP, b"")

    scenario(tmp_path, monkeypatch, run)


def test_stop_ends_processes_and_failure_keeps_them(tmp_path, monkeypatch):
    async def run(supervisor, stop, failed, directory, running):
        pids = [state.pid for state in directory.states().values()]
        failed.set_exception(Fenced("the journal of the map could not be synced"))
        with pytest.raises(Fenced):
            await running
        assert all(identity_of(pid) for pid in pids), "they continue for the next supervisor"

        next_one = room.Supervisor(
            directory, Config(), supervisor.coordinator, stop, asyncio.get_running_loop().create_future()
        )
        again = asyncio.ensure_future(next_one.run())
        await until(
            lambda: (
                next_one.children and all(child.state == "serving" for child in next_one.children.values())
            )
        )
        assert [child.pid for child in next_one.children.values()] == [
            directory.state_of(name).pid for name in next_one.children
        ]
        stop.ask("test")
        await again
        assert not any(identity_of(pid) for pid in pids)
        await next_one.close()

    scenario(tmp_path, monkeypatch, run)


def test_started_target_gets_new_chain_epochs(tmp_path, monkeypatch):
    async def run(supervisor, stop, failed, directory, running):
        started = supervisor.coordinator.pool_map
        assert {chain.epoch for table in started.tables for chain in table.chains} == {2}
        victim = directory.state_of("target-1").pid
        os.kill(victim, signal.SIGKILL)
        await until(lambda: directory.state_of("target-1").pid != victim)
        chains = [chain for table in supervisor.coordinator.pool_map.tables for chain in table.chains]
        assert {(chain.targets, chain.epoch) for chain in chains} == {((1,), 3), ((2,), 2)}

    scenario(tmp_path, monkeypatch, run)


def test_map_request_waits_for_a_newer_map(tmp_path, monkeypatch):
    async def run(supervisor, stop, failed, directory, running):
        now = supervisor.coordinator.pool_map
        reply = pool_pb2.MapReply.FromString(
            await ask(supervisor, wire_pb2.POOL_MAP, pool_pb2.MapRequest(newer_than=0))
        )
        assert decode_map(reply.map) == now
        request = pool_pb2.MapRequest(newer_than=now.epoch, wait_s=0.05)
        assert pool_pb2.MapReply.FromString(await ask(supervisor, wire_pb2.POOL_MAP, request)).map == b""
        asked = Asked(
            wire_pb2.POOL_MAP, pool_pb2.MapRequest(newer_than=now.epoch, wait_s=30).SerializeToString()
        )
        supervisor.handle(asked)
        await supervisor.before_start(1)
        newer = decode_map(pool_pb2.MapReply.FromString(await asyncio.wait_for(asked.answer, 120)).map)
        assert newer.epoch == now.epoch + 1
        gone = Asked(
            wire_pb2.POOL_MAP, pool_pb2.MapRequest(newer_than=newer.epoch, wait_s=30).SerializeToString()
        )
        supervisor.handle(gone)
        await asyncio.sleep(0)
        gone.cancel()
        with pytest.raises(NvpoolError):
            await asyncio.wait_for(gone.answer, 10)
        assert not supervisor.answers, "a caller that left costs nothing"

    scenario(tmp_path, monkeypatch, run)


def test_status_names_files_with_bad_blocks(tmp_path, monkeypatch):
    async def run(supervisor, stop, failed, directory, running):
        asked = supervisor.status.ask

        async def ask_daemon(seen, method, request, reply_type):
            if method != wire_pb2.DATA_STATUS:
                return await asked(seen, method, request, reply_type)
            bad = [data_pb2.BadBlock(inode=inode, index=2, block=3, text="is bad") for inode in (5, 6, 7)]
            return data_pb2.DataStatusReply(target=request.target, bad=bad if request.target == 1 else [])

        async def find(inodes, within_s):
            looked.append((sorted(inodes), within_s <= 2))
            return {5: b"/a\xff", 6: b""}

        looked = []
        supervisor.status.ask, supervisor.status.paths.finder.find = ask_daemon, find
        for _ in range(2):
            reply = await ask(supervisor, wire_pb2.POOL_STATUS, pool_pb2.PoolStatusRequest())
            seen = json.loads(pool_pb2.PoolStatusReply.FromString(reply).status)
            bad_files = [
                line.partition("): ")[2]
                for line in seen["problems"]
                if line.startswith("bad block on target 1 (")
            ]
            assert bad_files == [
                "file /a\\xff, inode 5 chunk 2 block 3 is bad",
                "a file without a name, inode 6 chunk 2 block 3 is bad",
                f"inode 7 chunk 2 block 3 is bad; `nvpool fsck {directory.path}` names the file",
            ]
            store = next(process for process in seen["processes"] if process.get("target") == 1)
            assert [bad["path"] for bad in store["bad_blocks"]] == [os.fsdecode(b"/a\xff"), "", None]
        assert looked == [([5, 6, 7], True)], "status queries of every second make no work for the shard"

    scenario(tmp_path, monkeypatch, run)


@pytest.mark.parametrize(
    "method, request_",
    [
        (wire_pb2.META_LOOKUP, b""),
        (wire_pb2.POOL_CHANGE, pool_pb2.PoolChangeRequest(verb="explode")),
        (wire_pb2.POOL_CHANGE, pool_pb2.PoolChangeRequest(verb="drive-add", arguments=b"{")),
        (wire_pb2.POOL_CHANGE, pool_pb2.PoolChangeRequest(verb="drive-add", arguments=b"[]")),
        (
            wire_pb2.POOL_CHANGE,
            pool_pb2.PoolChangeRequest(
                verb="drive-add", arguments=json.dumps({"path": "/x", "capacity_bytes": "much"}).encode()
            ),
        ),
        (wire_pb2.POOL_CHANGE, pool_pb2.PoolChangeRequest(verb="drive-add", arguments=b'{"path": "x"}')),
        (wire_pb2.POOL_MAP, b"\xff\xff\xff"),
    ],
    ids=["method", "verb", "json", "list", "size", "path", "message"],
)
def test_invalid_request_is_refused_without_changes(tmp_path, monkeypatch, method, request_):
    async def run(supervisor, stop, failed, directory, running):
        before = supervisor.coordinator.pool_map
        with pytest.raises(InvalidRequest) as caught:
            await ask(supervisor, method, request_)
        assert (
            not isinstance(caught.value, Bug)
            and supervisor.coordinator.pool_map == before
            and not running.done()
        )

    scenario(tmp_path, monkeypatch, run)


def test_poll_ends_when_its_caller_stops_waiting(tmp_path):
    async def main() -> None:
        coordinator = await EmbeddedCoordinator.found(MemoryKv(), first_map())
        supervisor = room.Supervisor(PoolDirectory(tmp_path), Config(), coordinator, Stop(), asyncio.Future())
        try:
            asked = Asked(
                wire_pb2.POOL_MAP, pool_pb2.MapRequest(newer_than=1 << 40, wait_s=1e300).SerializeToString()
            )
            asked.deadline_s = SYSTEM_CLOCK.boottime_s() + 0.5
            supervisor.handle(asked)
            async with asyncio.timeout(20):
                assert pool_pb2.MapReply.FromString(await asked.answer).map == b""
        finally:
            await supervisor.close()

    asyncio.run(main())


def test_open_polls_of_a_peer_are_bounded(tmp_path, monkeypatch):
    monkeypatch.setattr(room, "ANSWERS_PER_PEER", 3)

    async def main() -> None:
        coordinator = await EmbeddedCoordinator.found(MemoryKv(), first_map())
        supervisor = room.Supervisor(PoolDirectory(tmp_path), Config(), coordinator, Stop(), asyncio.Future())
        here = Peer("m", "192.0.2.1:1", False, "client/mallory.0a1b2c3d")
        others = Peer("a", "192.0.2.2:1", False, "client/alice.0a1b2c3d")

        def poll(peer, wait_s=60.0):
            asked = Asked(
                wire_pb2.POOL_MAP, pool_pb2.MapRequest(newer_than=1 << 40, wait_s=wait_s).SerializeToString()
            )
            asked.peer = peer
            supervisor.handle(asked)
            return asked

        try:
            waits = [poll(here) for _ in range(3)]
            with pytest.raises(Unavailable, match="client/mallory"):
                await poll(here).answer
            assert [await poll(peer, 0.0).answer for peer in (others, Asked.peer)]
            waits[0].cancel()
            await asyncio.wait([waits[0].answer], timeout=20)
            await poll(here, 0.0).answer
        finally:
            await supervisor.close()

    asyncio.run(main())


def test_change_goes_on_when_its_caller_disconnects(tmp_path, monkeypatch):
    """The event loop alone does not keep a task alive: a garbage collection would end the change in the middle."""

    async def run(supervisor, stop, failed, directory, running):
        waited_for, finished = [], []

        async def order(arguments):
            future = asyncio.get_running_loop().create_future()
            waited_for.append(weakref.ref(future))
            await future
            finished.append(arguments)
            return {}

        monkeypatch.setattr(supervisor.scrub_commands, "order", order)
        request = pool_pb2.PoolChangeRequest(verb="scrub", arguments=b'{"n": 1}')
        asked = Asked(wire_pb2.POOL_CHANGE, request.SerializeToString())
        supervisor.handle(asked)
        await until(lambda: waited_for)
        asked.cancel()
        del asked
        for _ in range(5):
            await asyncio.sleep(0)
            gc.collect()
        waited_for[0]().set_result(None)
        await until(lambda: finished)

    scenario(tmp_path / "pool", monkeypatch, run)
