"""Supervisor of one node: runs its processes, follows the pool map and answers the POOL_* requests.

Used by daemons/nvpoold, which holds DIR/lock. Guarantees: a process that died is restarted with a growing
delay. Processes that already run are adopted, never duplicated. A map change is durable before anybody learns
of it. On a stop the metadata daemons end before the stores that they need. The supervisor never touches
chunks or metadata records.
"""

from __future__ import annotations

import asyncio
import errno
import json
import logging
import math
import signal
from collections import Counter
from collections.abc import Awaitable, Callable
from functools import partial

import msgspec
from google.protobuf.message import DecodeError

from nvpool.cluster.coordinator_api import WATCH_S_MAX, MapCoordinator
from nvpool.core.clock import SYSTEM_CLOCK
from nvpool.core.config import Config
from nvpool.core.errors import (
    AccessDenied,
    Bug,
    Busy,
    Draining,
    InvalidRequest,
    TooManyOpen,
    Unavailable,
)
from nvpool.core.programs import Program, command
from nvpool.core.renamed_fields import with_old_fields
from nvpool.core.version import VERSION
from nvpool.host.pool_directory import PoolDirectory, holder_of
from nvpool.host.process_identity import host_id
from nvpool.metrics.exposition import Page
from nvpool.metrics.http import serve_metrics
from nvpool.node import metrics as node_metrics
from nvpool.node.admin.certificate_renewal import keep_renewed, renew_once
from nvpool.node.admin.certificate_store import CertificateStore
from nvpool.node.admin.drives import Drives
from nvpool.node.admin.join_server import JoinServer
from nvpool.node.admin.nodes import Nodes, look_after
from nvpool.node.admin.scrub import ScrubCommands
from nvpool.node.admin.shards import MetaShards
from nvpool.node.child_process import Child
from nvpool.node.coordination.chain_reset import ChainReset
from nvpool.node.coordination.etcd_members import EtcdMembers
from nvpool.node.coordination.leadership import Leading
from nvpool.node.coordination.map_backend import MapBackend
from nvpool.node.coordination.shard_failover import ShardFailover
from nvpool.node.coordination.shard_members import ShardPlaces
from nvpool.node.coordination.standby_checks import StuckStandbys, has_records
from nvpool.node.status import PoolStatus
from nvpool.poolmap.chains.transitions import begun, died, remaining, restarted
from nvpool.poolmap.model import PoolMap, encode_map
from nvpool.poolmap.nodes.lifecycle import listening_at, on_host
from nvpool.poolmap.shards.members import endpoints_of, members, node_and_path, process_name
from nvpool.rpc.access_control import Callers
from nvpool.rpc.api import Call, Greeting
from nvpool.rpc.connection_pool import Dialer
from nvpool.rpc.peer_limits import identify
from nvpool.rpc.v1 import pool_pb2, wire_pb2
from nvpool.runtime import metrics as runtime_metrics
from nvpool.runtime.audit_events import actor_of, audit_log, audited, ourselves, settings_of
from nvpool.runtime.daemon_lifecycle import follow_members, is_wanted, operators_of, read_grant_key
from nvpool.runtime.daemon_process import Stop, keep_alive, notify_ready

_STATUS_DEADLINE_S = 2.0
_ANSWER_S = 0.3
"""Part of the caller's time that is reserved for making and sending the response."""
_ANSWERS_MAX = 4096
"""Most long polls and status requests in progress; further ones are refused."""
ANSWERS_PER_PEER = 512
"""Most of them for one peer that is not trusted (rpc/peer_limits).

Enough for one poll for each mount of a host, with space left for other peers."""
_LOOK_S = 5.0
_NOTIFY_S = 10.0
"""Interval of messages to systemd that the start continues."""
_START_S = 15.0
"""Time for a store to appear when all processes start. Only then it counts as missing."""
_DRAIN_S_MAX = 3600.0

log = logging.getLogger("nvpool.node.supervisor")


class Supervisor:
    def __init__(
        self,
        directory: PoolDirectory,
        config: Config,
        coordinator: MapCoordinator,
        stop: Stop,
        failed: asyncio.Future[None],
        node: int = 1,
        greeting: Greeting | None = None,
        keeper: MapBackend | None = None,
    ):
        """`failed` receives an error when this process cannot continue; `run` then raises it."""
        self._operators = operators = operators_of(config)
        self._callers, self._secured_callers = (
            Callers(operators),
            Callers(operators, admit_unauthenticated=True),
        )
        self._directory = directory
        self._config = config
        self.coordinator = coordinator
        self._stop = stop
        self._node = node
        self.children: dict[str, Child] = {}
        self._keepers: dict[str, asyncio.Task[None]] = {}
        self.answers: set[asyncio.Task[None]] = set()
        self._changes: set[asyncio.Task[dict]] = set()
        """Changes that go on although their caller has disconnected."""
        self._answers_of: Counter[str] = Counter()
        self._failed = failed
        self._drain_s = config.supervisor.drain_s
        self._closed = False
        self._begun: set[int] = set()
        greeting = greeting or Greeting("supervisor", coordinator.pool_map.fingerprint)
        self._identity = greeting.identity
        self._dialer = Dialer(greeting, host_id=host_id())
        self.leading = Leading(
            coordinator, node, self._dialer, self._pid_of, config.supervisor.replace_after_s
        )
        self._audit = audit_log(directory, "nvpoold")
        self._certificates = CertificateStore(directory)
        self._reception = (
            JoinServer(directory, keeper, self.leading.change, self._audit, self._certificates)
            if keeper is not None
            else None
        )
        self._etcd = (
            EtcdMembers(directory, config, keeper, self.leading, self._dialer) if keeper is not None else None
        )
        self.status = PoolStatus(
            directory,
            node,
            coordinator,
            self.leading,
            self._dialer,
            self._etcd,
            self.children,
            self._certificates,
            is_stopping=stop.asked.is_set,
            replace_after_s=config.supervisor.replace_after_s,
            plain_text=config.network.plain_text,
        )
        self._keeper_of_shards = ShardFailover(
            lambda: coordinator.pool_map,
            self.leading.change_as_leader,
            SYSTEM_CLOCK,
            lambda: read_grant_key(directory),
            lambda: self.leading.leadership,
            change_anywhere=self.leading.change,
            has_records=partial(has_records, self._dialer, SYSTEM_CLOCK),
            unaware=self.leading.unaware,
        )
        self._nodes = Nodes(
            node,
            self.leading,
            self._reception,
            self._etcd,
            used=self.status.used_bytes,
            answers=self.status.node_answers,
            stop=stop.ask,
        )
        self._places = ShardPlaces(
            directory,
            config,
            node,
            self.leading,
            start=partial(self._start_missing, targets=False),
            end=self._end_child,
            again=self._begin_again,
            stuck=StuckStandbys(self._dialer, config.supervisor.replace_after_s),
        )
        self._drives = Drives(
            directory,
            config,
            node,
            self.leading,
            used=self.status.used_bytes,
            start=self._start_missing,
            end=self._end_target,
        )
        self.scrub_commands = ScrubCommands(
            node, lambda: coordinator.pool_map, self._dialer, lambda: read_grant_key(directory)
        )
        self._shards = MetaShards(
            directory, config, node, self.leading, self._dialer, start=self._start_missing
        )
        self._new_chains = ChainReset(
            self.leading, self._dialer, rights_s=config.meta.grant_s, has_ended=self._has_ended
        )

    async def run(self) -> None:
        """Keep the processes of this node running until the stop. On return all of them have ended.

        If this raises, they continue to run: one of them starts another supervisor, which adopts them.
        """
        for number in (signal.SIGHUP, signal.SIGUSR1):
            self._stop.on_signal[number] = lambda number=number: self._pass_on(number)
        self._audit.note("start", ourselves(), {"software": VERSION, "settings": settings_of(self._config)})
        await self._know_this_host()
        await self._note_the_dead()
        await self._know_endpoints()
        self._start_missing()
        managing = asyncio.ensure_future(self.leading.run())
        asked = asyncio.ensure_future(self._stop.asked.wait())
        following = asyncio.ensure_future(self._follow_map())
        ready = asyncio.ensure_future(self._notify_when_ready())
        alive = asyncio.ensure_future(keep_alive())
        lastings = [
            following,
            asyncio.ensure_future(self._keeper_of_shards.run()),
            asyncio.ensure_future(self._shards.run()),
            asyncio.ensure_future(self._new_chains.run()),
            asyncio.ensure_future(look_after(self._places.run_once, self._nodes.run_once)),
            asyncio.ensure_future(self.status.watch.run()),
        ]
        if self._etcd is not None:
            lastings.append(asyncio.ensure_future(self._etcd.run()))
        if self._config.metrics.listen:
            lastings.append(
                asyncio.ensure_future(
                    serve_metrics(self._config.metrics.listen, self.metrics, self._operators)
                )
            )
        if self._identity is not None and self._identity.secured:
            lastings.append(
                asyncio.ensure_future(
                    keep_renewed(
                        self._directory,
                        self._identity,
                        lambda: self.coordinator.pool_map,
                        self._dialer,
                        self._audit,
                        self._certificates,
                    )
                )
            )
        try:
            while not asked.done():
                # The keeper of a drive that was added meanwhile is included from the next round on.
                await asyncio.wait(
                    [asked, managing, self._failed, *lastings, *self._keepers.values()],
                    timeout=_LOOK_S,
                    return_when=asyncio.FIRST_COMPLETED,
                )
                for lasting in lastings:
                    if lasting.done():
                        lasting.result()
                        raise Bug("a background task of the supervisor has stopped")
                for name, keeper in self._keepers.items():
                    if keeper.done() and not self._stop.asked.is_set():
                        keeper.result()
                        raise Bug(f"background task {name} has stopped")
                if self._failed.done():
                    self._failed.result()
                if managing.done():
                    managing.result()
            notify_ready("STOPPING=1")
            self._audit.note("stop", ourselves(), {"because": self._stop.why})
            await self._end_children()
        finally:
            for task in (asked, ready, alive, managing, *lastings, *self._keepers.values()):
                task.cancel()

    async def _follow_map(self) -> None:
        """Act on each new map."""
        epoch = -1
        while True:
            newest = await self.coordinator.watch(epoch, WATCH_S_MAX)
            if newest is not None:
                epoch = newest.epoch
                follow_members(self._identity, newest)
                for target in newest.targets:
                    if target.node == self._node and target.is_over:
                        await self._end_child(f"target-{target.id}")
                for name in [
                    name
                    for name, child in self.children.items()
                    if child.role == "meta" and child.number not in newest.shard_by_id
                ]:
                    await self._end_child(name)
                await self._shards.remove_left(newest)

    async def close(self) -> None:
        """Refuse all requests. On return no reply task is left: closing the loop would destroy it in the
        middle."""
        self._closed = True
        if self._changes:  # they are finished as a whole, if they can be
            await asyncio.wait(self._changes, timeout=_ANSWER_S)
        for tasks in (list(self.answers), list(self._changes)):
            for task in tasks:
                task.cancel()
            if tasks:
                await asyncio.wait(tasks, timeout=_ANSWER_S)
        await self.leading.close()
        await self._dialer.close()
        await asyncio.to_thread(self._audit.close)

    # -- processes -------------------------------------------------------------------------------------------------

    def _start_missing(self, *, targets: bool = True) -> None:
        pool_map = self.coordinator.pool_map
        path, timing = str(self._directory.path), self._config.supervisor
        wanted = [
            Child(
                self._directory,
                "meta",
                shard.id,
                command(Program.META, path, str(shard.id), str(member)),
                timing,
                SYSTEM_CLOCK,
                None,
                partial(self._member_has_died, shard.id, member),
                process_name(shard.id, member),
            )
            for shard in pool_map.shards
            for member in members(shard)
            if node_and_path(shard, member)[0] == self._node and endpoints_of(shard, member)
        ]
        wanted += [
            Child(
                self._directory,
                "store",
                target.id,
                command(Program.STORE, path, str(target.id)),
                timing,
                SYSTEM_CLOCK,
                partial(self.before_start, target.id),
                partial(self._has_died, target.id),
                keeps_memory=True,
            )
            for target in pool_map.targets
            if targets and target.node == self._node and not target.is_over
        ]
        for child in wanted:
            if child.name not in self.children:
                self.children[child.name] = child
                self._keepers[child.name] = asyncio.ensure_future(child.keep(self._stop.asked))

    async def _end_children(self) -> None:
        await asyncio.gather(*self._keepers.values(), return_exceptions=True)
        primaries = {process_name(shard.id, shard.member) for shard in self.coordinator.pool_map.shards}
        children = self.children.values()
        # Primaries end first, because their last replies wait for standbys.
        for ending in (
            [child for child in children if child.name in primaries],
            [child for child in children if child.role == "meta" and child.name not in primaries],
            [child for child in children if child.role == "store"],
        ):
            await asyncio.gather(*(child.end(self._drain_s + 5.0, self._stop.hurry) for child in ending))

    async def _end_target(self, target: int) -> None:
        await self._end_child(f"target-{target}")

    async def _end_child(self, name: str) -> None:
        """Stop this process for good: on return it does not run, and nothing restarts it."""
        child, keeper = self.children.pop(name, None), self._keepers.pop(name, None)
        if keeper is not None:
            keeper.cancel()
            await asyncio.gather(keeper, return_exceptions=True)
        if child is not None:
            await child.end(self._drain_s, self._stop.hurry)

    def _begin_again(self, name: str) -> None:
        if name in self.children:
            self.children[name].signal(signal.SIGTERM)

    async def before_start(self, target: int) -> None:
        """Raise the epochs of the target's chains in the map, before its process starts again."""
        if target in self._begun:  # `_note_the_dead` has raised its epochs
            self._begun.discard(target)
            return
        await self.leading.change(lambda pool_map: restarted(pool_map, target))

    def _member_has_died(self, shard: int, member: int, _pid: int) -> None:
        # Not if that process found another one at work and therefore ended: the other one may be the primary.
        if holder_of(self._directory.run / f"{process_name(shard, member)}.lock") is None:
            self._keeper_of_shards.member_ended(shard, member)

    def _has_died(self, target: int, pid: int) -> None:
        self.leading.died(target, pid)

    def _has_ended(self, target: int) -> bool:
        """Whether the target is on this node and no process serves it."""
        return (
            self.coordinator.pool_map.target_by_id[target].node == self._node
            and holder_of(self._directory.run / f"target-{target}.lock") is None
        )

    def _pid_of(self, target: int) -> int | None:
        known = self.coordinator.pool_map.target_by_id.get(target)
        if known is None or known.node != self._node:
            return None
        child = self.children.get(f"target-{target}")
        return child.pid if child is not None else 0

    async def _note_the_dead(self) -> None:
        """Record in the map, before any start, that this node's stopped targets have died together.

        Then the tail of each chain continues the chain, and not the target that is started last. If all
        targets of the pool have ended cleanly, no target has missed a write, and no death is recorded.
        """
        pool_map = self.coordinator.pool_map
        targets = remaining(pool_map)
        dead = {
            target.id
            for target in targets
            if target.node == self._node
            and holder_of(self._directory.run / f"target-{target.id}.lock") is None
        }
        if not dead:
            return  # a killed supervisor's successor then becomes leader without a request to etcd first
        if len(dead) == len(targets) and all(self._ended_at(target) == pool_map.epoch for target in dead):
            looked_at = []

            def decide(newest: PoolMap) -> PoolMap:
                looked_at.append(newest.epoch)
                return begun(newest) if newest.epoch == pool_map.epoch else newest

            await self.leading.change(decide)
            # If the epochs differ, another change came first: the targets ended at an older epoch.
            if looked_at[-1] == pool_map.epoch:
                self._begun = dead
                self.leading.grace_s = _START_S
                return
        try:
            await self.leading.change(lambda newest: died(newest, dead))
        except Unavailable as error:  # no target starts before the map could be changed
            log.warning("the stop of this node's targets is not in the pool map yet: %s", error)

    def _ended_at(self, target: int) -> int:
        try:
            return int(self._directory.ended(target).read_bytes())
        except (OSError, ValueError):
            return -1

    def _pass_on(self, number: int) -> None:
        log.info("%s is passed on", signal.Signals(number).name)
        for name, child in self.children.items():
            if not name.startswith("etcd-"):  # etcd ends on a SIGHUP
                child.signal(number)

    async def _notify_when_ready(self) -> None:
        notified_s = -math.inf
        while waiting := [name for name, child in self.children.items() if child.state != "serving"]:
            if SYSTEM_CLOCK.boottime_s() > notified_s + _NOTIFY_S:
                notified_s = SYSTEM_CLOCK.boottime_s()
                notify_ready(
                    f"EXTEND_TIMEOUT_USEC={round(6 * _NOTIFY_S * 1e6)}\nSTATUS=waiting for {', '.join(waiting)}"
                )
            await asyncio.sleep(0.05)
        log.info("all %d processes serve", len(self.children))
        notify_ready(f"READY=1\nSTATUS=serving, {len(self.children)} processes")

    async def _know_this_host(self) -> None:
        """Record this host in the map.

        After a move to another machine no process then looks for this node's unix sockets on the old one."""
        pool_map = self.coordinator.pool_map
        if any(node.id == self._node and node.host_id != host_id() for node in pool_map.nodes):
            try:
                await self.leading.change(lambda newest: on_host(newest, self._node, host_id()))
            except Unavailable as error:
                log.warning("the map does not know yet that this node is on another host now: %s", error)

    async def _know_endpoints(self) -> None:
        """Remove addresses from the map at which the processes of this node no longer listen."""

        def decide(newest: PoolMap) -> PoolMap:
            return listening_at(newest, self._node, partial(is_wanted, network=self._config.network))

        pool_map = self.coordinator.pool_map
        if decide(pool_map) is not pool_map:
            try:
                await self.leading.change(decide)
            except Unavailable as error:
                log.warning(
                    "the map does not know yet that the processes of this node leave some addresses: %s",
                    error,
                )
            else:
                log.info(
                    "the processes of this node do not listen on loopback any more: node.toml names no such network.host"
                )

    # -- requests --------------------------------------------------------------------------------------------------

    def handle(self, call: Call) -> None:
        """Answer a request now or later. Raises the error of a caller without the right."""
        self._check(self._callers, call)
        self._answer(call)

    def handle_secured(self, call: Call) -> None:
        """Answer a request over TLS: as `handle`, but a peer without a certificate may only join."""
        self._check(self._secured_callers, call)
        self._answer(call)

    def _check(self, callers: Callers, call: Call) -> None:
        try:
            callers.check(call)
        except AccessDenied as error:
            if call.method in (wire_pb2.POOL_CHANGE, wire_pb2.POOL_STOP):
                self._audit.note(
                    "change" if call.method == wire_pb2.POOL_CHANGE else "stop",
                    actor_of(call.peer),
                    {},
                    error,
                    refused=True,
                )
            raise

    def _answer(self, call: Call) -> None:
        if call.method == wire_pb2.POOL_ALIVE:  # answered synchronously: leases depend on it
            self.leading.alive(call)
            return
        answers = {
            wire_pb2.POOL_MAP: self._answer_map,
            wire_pb2.POOL_STATUS: self._answer_status,
            wire_pb2.POOL_CHANGE: self._answer_change,
            wire_pb2.POOL_STOP: self._answer_stop,
            wire_pb2.PROCESS_METRICS: self._answer_metrics,
        }
        answers |= dict.fromkeys(ShardFailover.METHODS, self._answer_member)
        answer = answers.get(call.method) or (self._reception and self._reception.answers.get(call.method))
        if answer is None:
            call.fail(InvalidRequest(f"a supervisor does not know method {call.method}"))
            return
        if len(self.answers) >= _ANSWERS_MAX:
            call.fail(Unavailable("too many requests wait here", retry_after_s=1.0))
            return
        if self._closed:
            call.fail(Draining("the supervisor stops"))
            return
        peer, trusted = identify(call.peer, self._operators, self._config.network.plain_text)
        if not trusted and self._answers_of[peer] >= ANSWERS_PER_PEER:
            call.fail(
                Unavailable(f"{ANSWERS_PER_PEER} requests of {peer} wait here already", retry_after_s=1.0)
            )
            return
        task = asyncio.ensure_future(self._finish(call, answer))
        self.answers.add(task)
        self._answers_of[peer] += 1
        task.add_done_callback(partial(self._answered, peer))
        call.on_cancel(task.cancel)

    def _answered(self, peer: str, task: asyncio.Task[None]) -> None:
        self.answers.discard(task)
        self._answers_of[peer] -= 1
        if not self._answers_of[peer]:
            del self._answers_of[peer]

    @staticmethod
    async def _finish(call: Call, answer: Callable[[Call], Awaitable[bytes]]) -> None:
        """Run `answer` and send its result.

        `answer` is called in here: a caller that disconnects cancels this task before its first step, and a
        coroutine that was created before would never be awaited.
        """
        try:
            call.reply(await answer(call))
        except asyncio.CancelledError:
            call.fail(Unavailable("the supervisor stops", may_be_applied=True))
        except (OSError, TooManyOpen) as error:
            call.fail(_without_descriptors() if error.errno in (errno.EMFILE, errno.ENFILE) else error)
        except Exception as error:
            call.fail(error)

    async def _answer_map(self, call: Call) -> bytes:
        request = _read(pool_pb2.MapRequest, call)
        left_s = call.deadline_s - SYSTEM_CLOCK.boottime_s() - _ANSWER_S  # the caller does not wait longer
        newest = await self.coordinator.watch(request.newer_than, max(0.0, min(request.wait_s, left_s)))
        return pool_pb2.MapReply(map=encode_map(newest) if newest is not None else b"").SerializeToString()

    async def _answer_status(self, call: Call) -> bytes:
        issued = _read(pool_pb2.PoolStatusRequest, call).issued
        report = await self.status.report(call.deadline_s - _ANSWER_S, issued)
        status = json.dumps(with_old_fields(report))  # msgspec does not accept names that are not UTF-8
        return pool_pb2.PoolStatusReply(status=status.encode()).SerializeToString()

    async def _answer_metrics(self, call: Call) -> bytes:
        request = runtime_metrics.read_request(call)
        if request.node:
            page = await self.metrics(request.wait_s or node_metrics.ANSWER_S)
        else:
            page = runtime_metrics.own_page(self._measure)
        return pool_pb2.MetricsReply(page=page.pack()).SerializeToString()

    def _measure(self, page: Page) -> None:
        node_metrics.measure_pool(
            page,
            self.coordinator.pool_map,
            self._node,
            self.leading.manager is not None,
            self.children.values(),
            self.status.watch.stalled_s(),
        )
        node_metrics.measure_certificates(page, self._certificates.own(), SYSTEM_CLOCK.wall_ns() / 1e9)

    async def metrics(self, wait_s: float) -> Page:
        """Metrics of this process and all others of its node, within `wait_s`."""
        return await node_metrics.node_page(
            runtime_metrics.own_page(self._measure),
            node_metrics.asked(self.coordinator.pool_map, self.children.values()),
            self._dialer,
            wait_s,
        )

    async def _answer_member(self, call: Call) -> bytes:
        answer = await self.leading.ask_leader(call)
        if answer is not None:
            return answer
        try:
            return await self._keeper_of_shards.answer(call.method, bytes(call.message))
        except DecodeError:
            raise InvalidRequest(f"the message of method {call.method} cannot be read") from None

    async def _answer_stop(self, call: Call) -> bytes:
        request = _read(pool_pb2.PoolStopRequest, call)
        if request.drain_s > 0:
            self._drain_s = min(request.drain_s, _DRAIN_S_MAX)
        self._audit.note("stop", actor_of(call.peer), {"drain_s": request.drain_s})
        asyncio.get_running_loop().call_later(
            0.05, self._stop.ask, f"asked by {call.peer.name or call.peer.address}"
        )
        return pool_pb2.PoolStopReply().SerializeToString()

    async def _answer_change(self, call: Call) -> bytes:
        request = _read(pool_pb2.PoolChangeRequest, call)
        verbs = self._drives.verbs | self._places.verbs | self._nodes.verbs | self._shards.verbs
        verbs |= {"scrub": self.scrub_commands.order, "certificate-rotate": self._rotate}
        verbs |= self._etcd.verbs if self._etcd is not None else {}
        if request.verb not in verbs:
            raise InvalidRequest(f"no change is called {request.verb!r}; there are: {', '.join(verbs)}")
        try:
            arguments = json.loads(request.arguments)
        except ValueError:
            arguments = None
        if not isinstance(arguments, dict):
            raise InvalidRequest(f"{request.verb} wants a JSON object")
        # Shielded from a caller that disconnects: a change that has begun is finished or refused as a whole. The
        # event loop does not keep a task alive on its own.
        changing = asyncio.ensure_future(
            audited(self._audit, request.verb, actor_of(call.peer), arguments, verbs[request.verb](arguments))
        )
        self._changes.add(changing)
        changing.add_done_callback(self._change_ended)
        result = await asyncio.shield(changing)
        return pool_pb2.PoolChangeReply(
            result=msgspec.json.encode(with_old_fields(result))
        ).SerializeToString()

    def _change_ended(self, changing: asyncio.Task[dict]) -> None:
        self._changes.discard(changing)
        if not changing.cancelled():
            changing.exception()  # audited; a caller that has gone does not ask for it

    async def _rotate(self, arguments: dict) -> dict:
        """Issue a new certificate for this node, with `new_key` under another key.

        Its daemons present the new certificate within half a minute, without a restart.
        """
        if self._identity is None or not self._identity.secured:
            raise InvalidRequest(
                "this node has no certificate: the pool speaks plain text (network.plain_text)"
            )
        async with self._certificates.renewing:
            await renew_once(
                self._directory,
                self._identity,
                self.coordinator.pool_map,
                self._dialer,
                left_s=math.inf,
                new_key=bool(arguments.get("new_key", False)),
            )
        self._certificates.trouble = ""
        return {"certificates": self._certificates.status()}


def _without_descriptors() -> Busy:
    return Busy(
        "the supervisor has no file descriptor left: end some of its clients, or raise its limit (LimitNOFILE=, "
        "ulimit -Hn) and start it again",
        retry_after_s=1.0,
    )


def _read(kind, call: Call):
    try:
        return kind.FromString(bytes(call.message))
    except DecodeError:
        raise InvalidRequest(f"not a {kind.DESCRIPTOR.name}") from None
