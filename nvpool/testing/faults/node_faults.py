"""Faults of a pool of three nodes in network namespaces: processes to kill, and broken links or stopped
processes.

`VICTIMS` names the processes that a round kills, `CONDITIONS` the conditions during it: a link that is cut,
slow or loses packets in one direction, or a stopped process. A condition is a context manager and is undone
on exit. Used by bench/failure_soak.py and its test.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterator

from nvpool.host.process_identity import identity_of
from nvpool.poolmap.model import PoolMap, Shard
from nvpool.poolmap.shards.members import process_name
from nvpool.testing.env.multi_node_pool import NodeMachine
from nvpool.testing.env.pool import end_process
from nvpool.testing.loads.mounted_nodes import PoolInUse

NODES = (1, 2, 3)
CLIENT = 4
SLOW_MIB_S = 1.0
LATE_S = 0.05
"""One-way latency of a long link."""
SOCKET_AWAY_S = 30.0


class NotNow(Exception):
    """The fault has no victim at this moment: a process that is to be killed does not run."""


class NodeFaults:
    """Chooses victims by the current state of a pool. `leads` is the node whose supervisor leads."""

    def __init__(self, pool: PoolInUse, chance: random.Random, leads: int) -> None:
        self.pool, self.chance, self.leads = pool, chance, leads
        self.map: PoolMap = newest_map(pool)
        self.shard: Shard = self.map.shards[0]
        self.primary = self.shard.node
        self.standby = self.shard.standbys[0].node if self.shard.standbys else 0
        self.touched: set[int] = set()
        """Nodes that the faults of this round affect. Status is requested from another node if there is one.
        """
        self.notes: list[str] = []
        self.supervisors_killed: Counter[int] = Counter()

    def node(self, number: int) -> NodeMachine:
        return self.pool.nodes[number - 1]

    # -- processes ---------------------------------------------------------------------------------------------------------

    def pid(self, number: int, name: str) -> int:
        """Return the process of that name on a node. NotNow if none runs."""
        state = self.node(number).directory.state_of(name)
        if state is None or identity_of(state.pid) is None:
            raise NotNow(f"{name} of node {number} does not run")
        self._note(number, name)
        return state.pid

    def supervisor(self, number: int) -> int:
        found = self.node(number).directory.supervisor()
        if found is None:
            raise NotNow(f"no supervisor runs on node {number}")
        self._note(number, "supervisor")
        return found.pid

    def member(self, primary: bool) -> int:
        """Return the process of the shard's primary or standby."""
        if primary:
            return self.pid(self.primary, process_name(self.shard.id, self.shard.member))
        if not self.standby:
            raise NotNow("the shard has no standby")
        return self.pid(self.standby, process_name(self.shard.id, self.shard.standbys[0].member))

    def store(self) -> int:
        target = self.chance.choice([target for target in self.map.targets if not target.is_over])
        return self.pid(target.node, f"target-{target.id}")

    def etcd(self, number: int) -> int:
        return self.pid(number, f"etcd-{self.node(number).directory.node}")

    def whole_node(self, number: int) -> list[int]:
        """Return all processes of the pool on that node, its supervisor first."""
        supervisor = self.supervisor(number)
        self._note(number, "all other processes")
        return [supervisor, *(pid for pid in self.node(number).processes() if pid != supervisor)]

    def any_node(self, *but: int) -> int:
        return self.chance.choice([number for number in NODES if number not in but])

    def kill(self, victim: str) -> None:
        """Kill the processes of one of VICTIMS. NotNow if one of them does not run; then nothing is killed."""
        pids = VICTIMS[victim](self)
        supervisors = {
            found.pid: number
            for number in NODES
            if (found := self.node(number).directory.supervisor()) is not None
        }
        for pid in pids:
            end_process(pid)
        self.supervisors_killed.update(supervisors[pid] for pid in pids if pid in supervisors)

    def _note(self, number: int, what: str) -> None:
        self.touched.add(number)
        self.notes.append(f"{what} of node {number}")

    # -- conditions --------------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def stopped(self, *pids: int) -> Iterator[None]:
        """Stop the processes. Process descriptors identify them, so no other process is ever continued."""
        descriptors = []
        try:
            for pid in pids:
                with contextlib.suppress(ProcessLookupError):
                    descriptors.append(os.pidfd_open(pid))
                    signal.pidfd_send_signal(descriptors[-1], signal.SIGSTOP)
            yield
        finally:
            for descriptor in descriptors:
                with contextlib.suppress(ProcessLookupError):
                    signal.pidfd_send_signal(descriptor, signal.SIGCONT)
                os.close(descriptor)

    @contextlib.contextmanager
    def cut(self, number: int) -> Iterator[None]:
        self._note(number, "cable")
        self.pool.switch.cut(number)
        try:
            yield
        finally:
            self.pool.switch.cut(number, restore=True)

    @contextlib.contextmanager
    def slow(self, number: int) -> Iterator[None]:
        self._note(number, "cable")
        self.pool.switch.limit(number, SLOW_MIB_S)
        try:
            yield
        finally:
            self.pool.switch.limit(number, 0)

    @contextlib.contextmanager
    def late(self, number: int) -> Iterator[None]:
        self._note(number, "cable")
        self.pool.switch.delay(number, LATE_S, LATE_S)
        try:
            yield
        finally:
            self.pool.switch.delay(number, 0, 0)

    @contextlib.contextmanager
    def lost(self, *ways: tuple[int, int]) -> Iterator[None]:
        """Drop all packets that the first machine of each pair sends to the second."""
        self.notes += [f"lost from {sender} to {to}" for sender, to in ways]
        with contextlib.ExitStack() as undo:
            for sender, to in ways:
                self.pool.switch.lose(sender, to)
                undo.callback(self.pool.switch.lose, sender, to, restore=True)
            yield

    def deaf(self, number: int):
        self.touched.add(number)
        return self.lost(*((other, number) for other in (*NODES, CLIENT) if other != number))

    def mute(self, number: int):
        self.touched.add(number)
        return self.lost(*((number, other) for other in (*NODES, CLIENT) if other != number))

    def pair(self):
        one, other = self.chance.sample(NODES, 2)
        self.touched.update((one, other))
        return self.lost((one, other), (other, one))

    def one_way(self):
        one, other = self.chance.sample(NODES, 2)
        self.touched.update((one, other))
        return self.lost((one, other))

    def client_from_primary(self):
        """Cut the link between the client's node and the primary's node only.

        Changes wait until the link is back: this is no reason for a failover.
        """
        return self.lost((CLIENT, self.primary), (self.primary, CLIENT))

    @contextlib.contextmanager
    def over_tcp(self, victim: str) -> Iterator[None]:
        """Kill a daemon while its supervisor's unix socket is away, so that its successor connects over TCP.

        The socket is back when the block is entered.
        """
        if victim == "standby":
            number, pid = self.standby, self.member(primary=False)
        else:
            target = self.chance.choice([one for one in self.map.targets if not one.is_over])
            number, pid = target.node, self.pid(target.node, f"target-{target.id}")
        directory = self.node(number).directory
        (socket,) = directory.socket_directory().glob("node*.sock")
        away = socket.with_suffix(".away")
        socket.rename(away)
        try:
            before = {one.pid for one in directory.states().values()}
            end_process(pid)
            end = time.monotonic() + SOCKET_AWAY_S
            while time.monotonic() < end:
                now = directory.states()
                if pid not in {one.pid for one in now.values()} and any(
                    one.pid not in before for one in now.values()
                ):
                    break
                time.sleep(0.05)
            time.sleep(0.3)
        finally:
            with contextlib.suppress(
                FileNotFoundError
            ):  # a supervisor that was started in between has its own
                if socket.exists():
                    away.unlink()
                else:
                    away.rename(socket)
        yield


VICTIMS: dict[str, Callable[[NodeFaults], list[int]]] = {
    "primary": lambda on: [on.member(primary=True)],
    "leader": lambda on: [on.supervisor(on.leads)],
    "primary and leader": lambda on: [on.member(primary=True), on.supervisor(on.leads)],
    "primary and its supervisor": lambda on: [on.member(primary=True), on.supervisor(on.primary)],
    "supervisor": lambda on: [on.supervisor(on.any_node(on.leads))],
    "all supervisors": lambda on: [on.supervisor(number) for number in NODES],
    "standby": lambda on: [on.member(primary=False)],
    "standby and its supervisor": lambda on: [on.member(primary=False), on.supervisor(on.standby)],
    "store": lambda on: [on.store()],
    "etcd": lambda on: [on.etcd(on.any_node())],
    "leader and its etcd": lambda on: [on.supervisor(on.leads), on.etcd(on.leads)],
    "node of the primary": lambda on: on.whole_node(on.primary),
}

CONDITIONS: dict[str, Callable[[NodeFaults], contextlib.AbstractContextManager]] = {
    "nothing else": lambda on: contextlib.nullcontext(),
    "primary's node cut": lambda on: on.cut(on.primary),
    "leader's node cut": lambda on: on.cut(on.leads),
    "standby's node cut": lambda on: on.cut(on.standby),
    "primary's node deaf": lambda on: on.deaf(on.primary),
    "primary's node mute": lambda on: on.mute(on.primary),
    "leader's node mute": lambda on: on.mute(on.leads),
    "two nodes cut": lambda on: on.pair(),
    "two nodes one way": lambda on: on.one_way(),
    "client cut from primary": lambda on: on.client_from_primary(),
    "primary's cable slow": lambda on: on.slow(on.primary),
    "leader's cable slow": lambda on: on.slow(on.leads),
    "standby's cable late": lambda on: on.late(on.standby),
    "primary stopped": lambda on: on.stopped(on.member(primary=True)),
    "standby stopped": lambda on: on.stopped(on.member(primary=False)),
    "leader stopped": lambda on: on.stopped(on.supervisor(on.leads)),
    "store stopped": lambda on: on.stopped(on.store()),
    "etcd stopped": lambda on: on.stopped(on.etcd(on.any_node())),
    "standby over TCP": lambda on: on.over_tcp("standby"),
    "store over TCP": lambda on: on.over_tcp("store"),
}


def newest_map(pool: PoolInUse) -> PoolMap:
    """Return the map with the highest epoch that a node has on disk."""
    return max((node.map() for node in pool.nodes[:3]), key=lambda one: one.epoch)


def missing_copies(pool_map: PoolMap) -> str:
    """Return the parts of the map with too few copies; empty if there are none."""
    short = sum(
        len(chain.targets) - len(chain.leaving) < table.id
        for table in pool_map.tables
        for chain in table.chains
    )
    found = [f"{short} chains"] if short else []
    found += [
        f"shard {shard.id} has no standby"
        for shard in pool_map.shards
        if shard.state != "up" or not any(standby.state == "up" for standby in shard.standbys)
    ]
    return ", ".join(found)


def is_settled(pool_map: PoolMap) -> bool:
    """Whether no copy is missing, and nothing is being moved or filled."""
    return not missing_copies(pool_map) and not any(
        chain.joining or chain.leaving for table in pool_map.tables for chain in table.chains
    )
