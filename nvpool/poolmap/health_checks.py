"""Health checks of a pool, for `nvpool status`: problems with location, reason and remedy.

Pure functions of the pool map and the status reports of nodes, shard members and stores. Every problem
identifies the component it concerns, so that people, scripts and alerts refer to the same thing.
node/health_history collects the reports and calls this module. The texts are for operators. Figures come from
poolmap/chains/rebalance.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal, NotRequired, TypedDict

import msgspec

from nvpool.core.errors import with_pool
from nvpool.core.units import format_seconds
from nvpool.poolmap.chains.placement import usable
from nvpool.poolmap.chains.transitions import named
from nvpool.poolmap.model import PoolMap, Shard, Target
from nvpool.poolmap.nodes.link_failures import BROKEN
from nvpool.poolmap.shards.placement import beside, good_places, place_of, wanted

FULL_SHARE = 0.95
"""Share of a drive's capacity above which the drive is a problem. The alert fires earlier."""

Severity = Literal["unavailable", "degraded", "damaged", "notice"]
"""unavailable: some data cannot be read or written. degraded: one more failure may cause that, or an operator
must act. damaged: stored data is lost or wrong. notice: the pool itself is healthy."""
EXIT_CODES: dict[str, int] = {"unavailable": 3, "degraded": 3, "damaged": 4, "notice": 0}
WELL = frozenset(("serving", "starting"))
Said = Mapping[str, Any]
"""Status report of one process or node: an entry of `nvpool status --json`."""
ProblemKey = tuple[str, int | None, int | None, int | None, int | None, int | None, str]
"""Identity of a problem: kind, node, target, drive, shard, member and name of the process."""


class _TargetFields(TypedDict):
    """Fields of a HealthProblem that name its target."""

    node: int
    name: NotRequired[str]
    target: int
    drive: int


class HealthProblem(msgspec.Struct, frozen=True):
    kind: str
    reason: str
    """A sentence without its final period: the fault, the affected component, and the cause."""
    remedy: str = ""
    """A command, or the first step to take; empty if no action is needed."""
    severity: Severity = "degraded"
    node: int | None = None
    name: str = ""
    """Name of the process."""
    target: int | None = None
    drive: int | None = None
    shard: int | None = None
    member: int | None = None
    count: int = 0
    """Number of affected chains, standbys or similar."""
    since_ms: int = 0
    """Time at which this node first noticed the problem."""

    @property
    def key(self) -> ProblemKey:
        """Identity of the problem, independent of its current figures."""
        return self.kind, self.node, self.target, self.drive, self.shard, self.member, self.name

    @property
    def text(self) -> str:
        return f"{self.reason}; {self.remedy}" if self.remedy else self.reason


def exit_code(problems: Iterable[HealthProblem]) -> int:
    """Return the exit code of `nvpool status`: 0 healthy, 3 something is or may soon be unavailable, 4 only
    damage."""
    codes = {EXIT_CODES[problem.severity] for problem in problems} - {0}
    return min(codes, default=0)


class Health:
    """One evaluation of a pool. `pool` is its name in commands; `replace_after_s` as configured, 0: never."""

    def __init__(
        self,
        pool_map: PoolMap,
        nodes: Sequence[Said],
        metas: Sequence[Said],
        stores: Sequence[Said],
        *,
        pool: str = "POOL",
        replace_after_s: float = 0.0,
        stalled_s: Mapping[int, float] | None = None,
        can_change: bool = True,
    ) -> None:
        """Store the inputs of the evaluation.

        `stalled_s` maps a drive to the time for which its drain has made no progress; other drives are
        absent. `can_change` says whether the pool map can be changed; if not, no remedy suggests a command
        that would change the map.
        """
        self._can_change = can_change
        self._map = pool_map
        self._pool = pool
        self._replace_after_s = replace_after_s
        self._stalled_s = stalled_s or {}
        self._nodes = nodes
        self._metas = {(meta["shard"], meta["member"]): meta for meta in metas}
        self._stores = {store["target"]: store for store in stores}
        self._several = len(pool_map.nodes) > 1
        unreached = {node["node"]: node["desired_state"] for node in nodes if node.get("reason")}
        self._silent = {node for node, state in unreached.items() if state in ("", "draining")}
        # Nothing is left on these, and their processes may have ended as requested.
        self._stopped = {node for node, state in unreached.items() if state == "drained"}

    def problems(self) -> list[HealthProblem]:
        """Return all problems that follow from the map and the reports, the most severe first."""
        found = [
            *self._silent_nodes(),
            *self._processes(),
            *self._chains(),
            *self._shards(),
            *self._drains(),
            *self._drives(),
        ]
        order = list(EXIT_CODES)
        return sorted(found, key=lambda problem: order.index(problem.severity))

    # -- texts -----------------------------------------------------------------------------------------------

    def _on(self, node: int) -> str:
        return f" on node {node}" if self._several else ""

    def _name(self, target: Target) -> str:
        return f"target {target.id} (drive {target.drive}){self._on(target.node)}"

    def _log(self, name: str, node: int) -> str:
        """Return a pointer to the log. The directories of other nodes are unknown here."""
        return f"see its log, log/{name}.log in the pool's directory{self._on(node)}"

    def _start_node(self, node: int) -> str:
        start = f"start node {node} (systemctl start nvpoold, or nvpool serve DIRECTORY, there)"
        return start + self._change(
            f"; if it is lost for good: nvpool node remove {self._pool} {node} --lost"
        )

    def _change(self, text: str, otherwise: str = "") -> str:
        """Return `text`, which suggests a command that changes the pool map; `otherwise` if the map cannot be
        changed."""
        return text if self._can_change else otherwise

    def _change_later(self, text: str) -> str:
        """Return `text` as in `_change`, or the first step towards a pool map that can be changed."""
        silent = " and ".join(f"node {node}" for node in sorted(self._silent))
        return self._change(
            text,
            "this needs a change of the pool map, which is not possible now; first "
            + (f"start {silent}" if silent else "bring back what keeps the map"),
        )

    def _restart(self, process: Said) -> str:
        """Return the remedy for a process that does not serve.

        The supervisor restarts a process that has ended, but not a hung one.
        """
        if process["state"] == "silent" and process.get("hangs"):
            return f"kill -9 {process.get('pid') or 'its process'}{self._on(process['node'])} (its supervisor restarts it)"
        return f"{self._log(process['name'], process['node'])}; the supervisor restarts it"

    def _new_drive(self, target: Target) -> str:
        return f"nvpool drive replace {self._pool} {target.drive} NEW_PATH --lost"

    def _lost_drive(self, target: Target) -> str:
        return f"nvpool drive remove {self._pool} {target.drive} --lost"

    # -- nodes and processes -----------------------------------------------------------------------------------------------

    def _silent_nodes(self) -> Iterable[HealthProblem]:
        for node in self._nodes:
            if node["node"] not in self._silent:
                continue
            others = [
                one for one in (*self._metas.values(), *self._stores.values()) if one["node"] == node["node"]
            ]
            names = [one["name"] for one in others if one["state"] not in WELL]
            with_it = ""
            if names:
                several = len(names) > 1
                with_it = (
                    f", and its process{'es' if several else ''} {', '.join(names)} "
                    f"do{'' if several else 'es'} not answer either"
                )
            elif others:
                with_it = ", but its other processes do"
            yield HealthProblem(
                "node-silent",
                f"node {node['node']} ({node['name']}) does not answer{with_it}: {node['reason']}",
                self._start_node(node["node"]),
                node=node["node"],
                name="supervisor",
            )

    def _processes(self) -> Iterable[HealthProblem]:
        """Yield the problems of stores; those of shard members are reported with their shards."""
        for store in self._stores.values():
            target = self._map.target_by_id[store["target"]]
            about: _TargetFields = {
                "node": target.node,
                "name": store["name"],
                "target": target.id,
                "drive": target.drive,
            }
            name = f"{store['name']}{self._on(target.node)} (drive {target.drive}, {store['path']})"
            if store["state"] not in WELL or (store.get("reason") and store["state"] != "serving"):
                if target.node not in self._silent | self._stopped:
                    yield HealthProblem(
                        "process-down",
                        f"{name} {_what_is(store)}",
                        self._restart(store)
                        + self._change(f"; if the drive is broken: {self._new_drive(target)}"),
                        **about,
                    )
            elif store["state"] == "serving" and target.state == "down" and target.desired_state != "lost":
                how = f"refused: {store['refused']}" if store.get("refused") else "accepted again just now"
                remedy = (
                    f"if this lasts for more than 10 s: kill {store.get('serving_pid') or 'its process'}"
                    f"{self._on(target.node)} (its supervisor restarts it)"
                )
                if store.get("refused") == BROKEN:
                    how = BROKEN
                    remedy = (
                        f"repair the network between them (on each: nvpool doctor --pool {self._pool}); "
                        "the target then returns by itself"
                    )
                else:
                    how = f"its heartbeats are {how}"
                yield HealthProblem(
                    "target-left-out",
                    f"{name} serves, but the pool map excludes it: {how}",
                    remedy,
                    **about,
                )

    # -- data --------------------------------------------------------------------------------------------------------------

    def _serves(self, target: int) -> bool:
        store = self._stores.get(target)
        return store is not None and store["state"] in ("serving", "draining")

    def _chains(self) -> Iterable[HealthProblem]:
        without: Counter[int] = Counter()
        missing: dict[int, Counter[str]] = defaultdict(Counter)
        short: Counter[tuple[int, int]] = Counter()
        counts: Counter[str] = Counter()
        for table in self._map.tables:
            for chain in table.chains:
                live = [target for target in chain.targets if self._serves(target)]
                if not live:
                    counts["without"] += 1
                    without.update(chain.targets)
                elif len(live) < table.id:
                    counts["fewer"] += 1
                    counts["filling"] += bool(chain.joining)
                    short[len(live), table.id] += 1
                    holders = chain.goal or chain.targets
                    for target in holders:
                        if target not in live:
                            missing[target]["filled" if target in chain.joining else "waits"] += 1
                    counts["nowhere"] += len(holders) < table.id
        if without:
            yield self._unavailable(counts["without"], without)
        for target_id, how in sorted(missing.items(), key=lambda item: -item[1].total()):
            yield self._missing(self._map.target_by_id[target_id], how, counts["fewer"], short)
        if counts["nowhere"]:
            here, most = len(usable(self._map.targets)), max(table.id for table in self._map.tables)
            yield HealthProblem(
                "copies-missing",
                f"{counts['nowhere']} chains have too few copies: {here} "
                f"drive{'' if here == 1 else 's'} can be used, and {most} copies of each chunk are configured",
                self._change_later(f"nvpool drive add {self._pool} PATH"),
                count=counts["nowhere"],
            )

    def _unavailable(self, count: int, holders: Counter[int]) -> HealthProblem:
        targets = [self._map.target_by_id[target] for target in holders if target in self._map.target_by_id]
        whose = ", ".join(self._name(target) for target in targets[:4]) + (", …" if len(targets) > 4 else "")
        one = targets[0] if targets else None
        only = one if len(targets) == 1 else None
        node = one.node if one is not None and one.node in self._silent else None
        back = (
            self._start_node(node)
            if node is not None
            else f"bring {'it' if len(targets) == 1 else 'one of them'} back"
        )
        until = (
            f"{whose} is back"
            if only is not None
            else f"one of these is back: {whose or 'the targets that were given up'}"
        )
        remedy = back
        if one is not None:
            remedy += self._change(
                f"; or give up the data of these chains for ever: {self._lost_drive(one)} --give-up"
            )
        return HealthProblem(
            "data-unavailable",
            f"{count} chains have no serving target: their data cannot be read or written until {until}",
            remedy,
            "unavailable",
            node=only.node if only is not None else None,
            target=only.id if only is not None else None,
            drive=only.drive if only is not None else None,
            count=count,
        )

    def _missing(
        self, target: Target, how: Counter[str], fewer: int, short: Mapping[tuple[int, int], int]
    ) -> HealthProblem:
        """Return the problem of chains that lack the copy of one target."""
        count, store = how.total(), self._stores.get(target.id, {})
        have = ", ".join(f"{live} of {shall}" for live, shall in sorted(short))
        head = (
            f"{count} chains have too few copies ({have}): their copies on {self._name(target)} are missing; "
        )
        most = max((table.id for table in self._map.tables), default=1)
        others = [one for one in usable(self._map.targets) if one.id != target.id]
        if len(others) < most:
            replaced, lost = "no other drive can take them", self._new_drive(target)
        elif self._replace_after_s:
            replaced = (
                f"they are copied to other drives {format_seconds(self._replace_after_s)} after the failure"
            )
            lost = self._lost_drive(target)
        else:
            replaced, lost = (
                "they are not copied automatically (supervisor.replace_after_s is 0)",
                self._lost_drive(target),
            )
        if target.desired_state in ("lost", "away", "remove") or target.state == "gone":
            why, remedy = f"the drive is {_leaving(target)}, and its data is copied to other drives", ""
        elif target.node in self._silent and not self._serves(target.id):
            why = f"its node does not answer; {replaced}"
            remedy = self._start_node(target.node)
        elif store.get("lacks_room"):
            why = "the drive has no space for them"
            remedy = self._change_later(f"nvpool drive add {self._pool} PATH")
        elif not self._serves(target.id):
            why = f"its process {_what_is(store) if store else 'is not known'}; {replaced}"
            remedy = (
                self._restart(store) + self._change(f"; if the drive is lost for good: {lost}")
                if store
                else self._change_later(lost)
            )
        elif target.state == "down":
            why = "the process serves but the pool map excludes it; see that problem"
            remedy = ""
        elif how["filled"] or target.state == "up":
            why = f"{how['filled']} are being copied, {how['waits']} are queued"
            remedy = f"wait; nvpool pool rebalance {self._pool} --status shows how far it is"
        else:
            why, remedy = "copying has not started", ""
        return HealthProblem(
            "copies-missing",
            head + why,
            remedy,
            node=target.node,
            name=f"target-{target.id}",
            target=target.id,
            drive=target.drive,
            count=count,
        )

    # -- metadata ----------------------------------------------------------------------------------------------------------

    def _shards(self) -> Iterable[HealthProblem]:
        for shard in self._map.shards:
            primary = self._metas.get((shard.id, shard.member))
            serves = primary is not None and primary["state"] == "serving"
            if primary is not None and not serves:
                yield self._no_primary(shard, primary)
            elif primary is not None and primary.get("reason"):
                yield HealthProblem(
                    "shard-at-risk",
                    f"shard {shard.id}: {primary['name']}{self._on(primary['node'])} serves, and "
                    f"{primary['reason']}",
                    self._change(
                        f"create a standby now: nvpool shard standbys {self._pool} "
                        f"{shard.id} {max(1, len(shard.standbys))}, or "
                    )
                    + f"write a dump: nvpool dump {self._pool} FILE",
                    node=primary["node"],
                    name=primary["name"],
                    shard=shard.id,
                    member=shard.member,
                )
            shall = wanted(shard)
            if shall:
                yield from self._standbys(shard, shall)

    def _no_primary(self, shard: Shard, primary: Said) -> HealthProblem:
        why = primary.get("reason", "")
        away = (
            [meta for meta in self._members(shard) if meta["in_map"] == "up" and meta["state"] != "serving"]
            if primary["state"] != "waiting"
            else []
        )  # a waiting primary only lacks its lease
        text = (
            f"shard {shard.id} has no serving primary, so nothing in it can be looked up or changed: "
            f"{primary['name']}{self._on(primary['node'])} {_what_is(primary)}"
        )
        if away:
            whom = " and ".join(f"{meta['name']}{self._on(meta['node'])} ({meta['state']})" for meta in away)
            text += f"; it waits for {whom}, which may have newer changes"
        if primary["node"] in self._silent:
            remedy = self._start_node(primary["node"])
        elif away:
            meta = away[0]
            remedy = (
                self._start_node(meta["node"])
                if meta["node"] in self._silent
                else self._log(meta["name"], meta["node"])
            )
            remedy += self._change(
                f"; to continue without those changes: nvpool shard standbys {self._pool} {shard.id} "
                f"{len(shard.standbys) - len(away)}"
            )
        elif primary["state"] == "waiting" and not self._can_change:
            remedy = "it serves as soon as the pool map can be changed again"
        elif "missing" in why or "no whole records" in why:
            remedy = (
                "mount the file system that holds its records, or put the directory back; if it is lost for good, "
                "load a dump into a new pool (nvpool load NEW_POOL FILE)"
            )
        else:
            remedy = f"if this lasts for more than a few seconds: {self._restart(primary)}"
        return HealthProblem(
            "shard-no-primary",
            text,
            remedy,
            "unavailable",
            node=primary["node"],
            name=primary["name"],
            shard=shard.id,
            member=shard.member,
        )

    def _members(self, shard: Shard) -> list[Said]:
        names = [(shard.id, standby.member) for standby in shard.standbys]
        return [self._metas[name] for name in names if name in self._metas]

    def _standbys(self, shard: Shard, shall: int) -> Iterable[HealthProblem]:
        metas = self._members(shard)
        able = [meta for meta in metas if meta["in_map"] == "up" and meta["state"] == "serving"]
        if len(able) >= shall:
            return
        unable = [meta for meta in metas if meta not in able]
        reasons, remedies = [], []
        for meta in unable:
            what, remedy = self._standby(shard, meta)
            reasons.append(f"standby {meta['name']}{self._on(meta['node'])} {what}")
            remedies += [remedy] if remedy and remedy not in remedies else []
        if len(shard.standbys) < shall:
            places = {place.drive for place in good_places(self._map)}
            reasons.append(
                f"{shall - len(shard.standbys)} more will be created"
                if len(places) > shall
                else f"there are {len(places)} drives for {shall + 1} members"
            )
            if len(places) <= shall:
                remedies.append(
                    self._change_later(
                        f"nvpool drive add {self._pool} PATH, or ask for fewer: nvpool shard standbys "
                        f"{self._pool} {shard.id} {max(0, len(places) - 1)}"
                    )
                )
        one = unable[0] if len(unable) == 1 else None
        yield HealthProblem(
            "standby-missing" if able else "shard-no-standby",
            f"shard {shard.id} has {len(able)} of {shall} standbys that can take over: " + "; ".join(reasons),
            "; ".join(remedies),
            node=one["node"] if one else None,
            name=one["name"] if one else "",
            shard=shard.id,
            member=one["member"] if one else None,
            count=shall - len(able),
        )

    def _standby(self, shard: Shard, meta: Said) -> tuple[str, str]:
        """Return the reason why a standby cannot be promoted, and the remedy."""
        why = f": {meta['reason']}" if meta.get("reason") else ""
        again = f"nvpool shard standbys {self._pool} {shard.id} {wanted(shard) - 1}, and then {wanted(shard)}"
        drive = place_of(self._map, shard, meta["member"]).drive
        if meta["node"] in self._silent:
            return "does not answer, and neither does its node", self._start_node(meta["node"])
        if meta["state"] == "lost":
            return (
                f"has lost its records{why}",
                self._change(
                    f"it is created again within a minute; otherwise: {again}",
                    "it is created again once the pool map can be changed again",
                ),
            )
        if meta["state"] == "away":
            lost = (
                f"; if it is lost for good: nvpool drive remove {self._pool} {drive} --lost" if drive else ""
            )
            return (
                f"has its records on a drive that is away{why}",
                "mount the drive" + self._change(f"{lost}; or create another one: {again}"),
            )
        if meta["state"] in WELL and not why:
            return (
                "has not received all records yet",
                "wait" + self._change(f"; if it does not finish: {again}"),
            )
        return _what_is(meta), self._restart(meta) + self._change(f"; or create another one: {again}")

    # -- drains and drives -------------------------------------------------------------------------------------------------

    def _drains(self) -> Iterable[HealthProblem]:
        going: Counter[int] = Counter()
        coming: Counter[int] = Counter()
        held = named(self._map)
        for table in self._map.tables:
            for chain in table.chains:
                going.update(target for target in chain.targets if chain.goal and target not in chain.goal)
                coming.update(target for target in chain.goal if target not in chain.targets)
        for target in self._map.targets:
            if (
                target.desired_state not in ("drain", "remove")
                or target.state == "gone"
                or target.drive not in self._stalled_s
            ):
                continue
            left, shards = going[target.id], beside(self._map, target.drive)
            still = format_seconds(self._stalled_s[target.drive])
            about: _TargetFields = {"node": target.node, "target": target.id, "drive": target.drive}
            if not shards and target.id not in held:
                why, remedy = self._why_not_empty(target)
                yield HealthProblem(
                    "drain-stalled",
                    f"drive {target.drive}{self._on(target.node)} has no chains left but is not empty; "
                    f"nothing was removed for {still}: {why}",
                    remedy,
                    **about,
                )
                continue
            why, remedy = self._why_stalled(target, coming)
            what = " and ".join(
                ([f"{left} chains"] if left else [])
                + ([f"metadata of shard {', '.join(map(str, shards))}"] if shards else [])
            )
            yield HealthProblem(
                "drain-stalled",
                f"the drain of drive {target.drive}{self._on(target.node)} has made no progress for {still}; "
                f"{what} left: {why}",
                remedy,
                count=left,
                **about,
            )

    def _why_not_empty(self, target: Target) -> tuple[str, str]:
        wait = self._stores.get(target.id, {}).get("strays_wait") or "the reason is not known"
        why, _, remedy = wait.partition("; give them back with: ")
        return why, with_pool(remedy, self._pool) or self._log(f"target-{target.id}", target.node)

    def _why_stalled(self, target: Target, coming: Counter[int]) -> tuple[str, str]:
        destinations = [one for one in self._map.targets if coming[one.id]]
        down = [one for one in destinations if one.state == "down" or not self._serves(one.id)]
        full = [one for one in destinations if self._stores.get(one.id, {}).get("lacks_room")]
        cancel = f"nvpool drive drain {self._pool} {target.drive} --cancel"
        if self._map.moving.paused:
            return "moving is paused", self._change_later(f"nvpool pool rebalance {self._pool} --resume")
        if down:
            nodes = [one.node for one in down if one.node in self._silent]
            back = self._start_node(nodes[0]) if nodes else self._log(f"target-{down[0].id}", down[0].node)
            s, verb = ("s", "do") if len(down) > 1 else ("", "does")
            return f"the destination{s} {', '.join(map(self._name, down[:4]))} {verb} not serve", back
        if full:
            return (
                f"{', '.join(map(self._name, full[:4]))} {'have' if len(full) > 1 else 'has'} no space for them",
                self._change_later(f"nvpool drive add {self._pool} PATH, or {cancel}"),
            )
        if not self._serves(target.id):
            return (
                "its own process does not serve",
                self._log(f"target-{target.id}", target.node)
                + self._change(f"; if it is lost for good: {self._lost_drive(target)}"),
            )
        for one in destinations:
            if wait := self._stores.get(one.id, {}).get("resync_wait"):
                return (
                    f"the destination {self._name(one)} waits for {wait}",
                    self._log(f"target-{one.id}", one.node) + self._change(f"; or {cancel}"),
                )
        log = self._log(f"target-{target.id}", target.node)
        return "the reason is not known", log + self._change(f"; or {cancel}")

    def _drives(self) -> Iterable[HealthProblem]:
        coming = Counter(
            target
            for table in self._map.tables
            for chain in table.chains
            for target in chain.goal
            if target not in chain.targets
        )
        for target in self._map.targets:
            store = self._stores.get(target.id, {})
            about: _TargetFields = {
                "node": target.node,
                "name": f"target-{target.id}",
                "target": target.id,
                "drive": target.drive,
            }
            if target.desired_state == "away" and target.state != "gone":
                yield HealthProblem(
                    "drive-away",
                    f"drive {target.drive}{self._on(target.node)} has been away for long: its data "
                    "is copied to other drives; it gets its share when it returns",
                    self._change_later(f"if it is lost for good: {self._lost_drive(target)}"),
                    **about,
                )
            if coming[target.id] and store.get("lacks_room"):
                yield HealthProblem(
                    "drive-no-room",
                    f"drive {target.drive} has no space for the {coming[target.id]} chains that it is to receive",
                    self._change_later(f"add a drive: nvpool drive add {self._pool} PATH"),
                    count=coming[target.id],
                    **about,
                )
            used, room = store.get("used_bytes") or 0, store.get("capacity_bytes") or 0
            if room and used >= FULL_SHARE * room:
                yield HealthProblem(
                    "drive-full",
                    f"drive {target.drive}{self._on(target.node)} is {used / room:.0%} full: writes "
                    "to it fail when no space is left",
                    self._change(f"add one: nvpool drive add {self._pool} PATH; or ")
                    + "remove files, or empty the trash",
                    **about,
                )
            if store.get("host_full"):
                yield HealthProblem("host-full", f"{store['name']}: {store['host_full']}", **about)


def _leaving(target: Target) -> str:
    """Return why a target is to hold nothing any more."""
    if target.state == "gone":
        return "removed from the pool"
    return "being removed" if target.desired_state == "remove" else target.desired_state


def _what_is(process: Said) -> str:
    """Return state and reason of a process that does not serve; the text is stable over repeated starts."""
    why = f": {process['reason']}" if process.get("reason") else ""
    return (
        f"does not start{why}"
        if why and process["state"] in ("starting", "restarting")
        else f"is {process['state']}{why}"
    )


def with_since(
    problems: Iterable[HealthProblem], known: Mapping[ProblemKey, int], now_ms: int
) -> list[HealthProblem]:
    """Return the problems with the time since which each is known: from `known`, or now."""
    return [msgspec.structs.replace(problem, since_ms=known.get(problem.key, now_ms)) for problem in problems]
