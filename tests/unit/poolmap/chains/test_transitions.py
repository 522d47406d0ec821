"""Chain transitions: crashes, returns and moves in any order never leave an acknowledged write only on unused targets."""

from functools import cache

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from msgspec.structs import replace

from nvpool.core.errors import InvalidRequest
from nvpool.poolmap.chains import transitions
from nvpool.poolmap.chains.data_loss import births_of, ownerless, with_reset_chains
from nvpool.poolmap.chains.rebalance import next_steps, with_goals
from nvpool.poolmap.model import Chain, check_map
from tests.unit.poolmap.chains.test_chain_placement import a_pool, with_target


@cache
def new_pool():
    """The map that each history begins with."""
    return with_goals(a_pool((4, 4, 4, 4), 2))


class Pool(RuleBasedStateMachine):
    """Targets that hold sets of writes, beside the real map. A write is acknowledged when every member of its chain has it.
    Deaths and reports of equality arrive late, and the map changes as the manager changes it."""

    WATCHED = range(0, 1024, 93)

    def __init__(self):
        super().__init__()
        self.map = new_pool()
        self.alive = {t.id for t in self.map.targets}
        self.unknown_deaths = set()
        self.lost = set()
        self.has = {}
        self.acknowledged = {}
        self.reports = []
        self.writes = 0

    def publish(self, new):
        before = self.map
        sealed = transitions.sealed(before, new)
        if sealed is None:
            return
        assert sealed.epoch == before.epoch + 1
        for old_table, table in zip(before.tables, sealed.tables, strict=True):
            for old, chain in zip(old_table.chains, table.chains, strict=True):
                same = (old.targets, old.joining, old.leaving) == (
                    chain.targets,
                    chain.joining,
                    chain.leaving,
                )
                assert chain.epoch >= old.epoch + (not same)
                stay = [t for t in old.targets if t in chain.targets]
                assert [t for t in chain.targets if t in stay] == stay, "remaining members keep their order"
        self.map = sealed

    def chains(self):
        for table in self.map.tables:
            for number in self.WATCHED:
                yield (table.id, number), table.chains[number]

    @rule(number=st.sampled_from(WATCHED), table=st.sampled_from((1, 2)))
    def write(self, number, table):
        chain = self.map.chain(table, number)
        members = (*chain.targets, *chain.joining)
        if set(members) <= self.alive:
            self.writes += 1
            for target in members:
                self.has.setdefault((table, number, target), set()).add(self.writes)
            self.acknowledged.setdefault((table, number), set()).add(self.writes)

    @rule(data=st.data())
    def die(self, data):
        if self.alive:
            target = data.draw(st.sampled_from(sorted(self.alive)))
            self.alive.discard(target)
            self.unknown_deaths.add(target)

    @rule()
    def deaths_become_known(self):
        self.publish(transitions.died(self.map, self.unknown_deaths))
        self.unknown_deaths.clear()

    @rule(data=st.data())
    def come_back(self, data):
        dead = {t.id for t in transitions.remaining(self.map)} - self.alive - self.lost
        if dead:
            target = data.draw(st.sampled_from(sorted(dead)))
            self.publish(transitions.restarted(self.map, target))
            self.unknown_deaths.discard(target)
            self.alive.add(target)
            self.publish(transitions.returned(self.map, {target}))

    @rule()
    def resync(self):
        """Every member that joins a chain with a live tail gets the tail's writes, and will report it."""
        for (table, number), chain in self.chains():
            for target in chain.joining:
                if target in self.alive and chain.targets[-1] in self.alive:
                    self.has[table, number, target] = set(
                        self.has.get((table, number, chain.targets[-1]), ())
                    )
                    self.reports.append((target, table, number, chain.epoch))

    @rule(count=st.integers(1, 40))
    def reports_arrive(self, count):
        arrived, self.reports = self.reports[:count], self.reports[count:]
        new = self.map
        for target, table, number, epoch in arrived:
            if target in self.alive:
                new = transitions.joined(new, target, [(table, number, epoch)])
        self.publish(new)

    @rule()
    def leaving_targets_learn_the_map(self):
        self.publish(transitions.departed(self.map, lambda name, target: target in self.alive))

    @rule(bound=st.integers(1, 2000))
    def begin_some(self, bound):
        self.publish(next_steps(self.map, joining_max=bound, of_target_max=bound))

    @precondition(lambda self: len(self.map.targets) < 7)
    @rule(capacity=st.integers(1, 8))
    def add(self, capacity):
        new = with_goals(with_target(self.map, capacity))
        self.alive.add(new.targets[-1].id)
        self.publish(new)

    @rule(data=st.data(), request=st.sampled_from(("drain", "remove", "share", "lost")))
    def request_change(self, data, request):
        target = data.draw(
            st.sampled_from([t.id for t in transitions.remaining(self.map) if t.desired_state != "lost"])
        )
        new = transitions.with_desired_state(self.map, target, request)
        if request == "lost":
            new = transitions.died(new, {target})
            if transitions.only_copies(new, target) and not data.draw(st.booleans()):
                return  # refused; the operator does not insist
        try:
            new = with_goals(new)
        except InvalidRequest:
            return
        if request == "lost":
            self.alive.discard(target)
            self.unknown_deaths.discard(target)
            self.lost.add(target)
        self.publish(transitions.retired(new))

    @rule()
    def reset_lost_chains(self):
        """Reset chains without a copy: acknowledged writes are lost, and earlier data of a new member does not count."""
        before = self.map
        above = max(chain.epoch for table in before.tables for chain in table.chains)
        self.publish(with_reset_chains(before, ownerless(before), births_of(before, {}), self.alive))
        for (table, number), chain in self.chains():
            old = before.chain(table, number)
            if chain.begun != old.begun:
                assert chain.begun == chain.epoch == chain.intact == above + 1 and chain.loss == len(
                    self.map.losses
                )
                assert (
                    not set(chain.targets) & {*old.targets, *self.lost} and set(chain.targets) <= self.alive
                )
                self.acknowledged.pop((table, number), None)
                self.has = {who: what for who, what in self.has.items() if who[:2] != (table, number)}

    @invariant()
    def removed_targets_are_in_no_served_chain(self):
        nobody = ownerless(self.map)
        for name, chain in self.chains():
            assert name in nobody or not self.lost & {*chain.joining, *chain.goal}
            assert name in nobody or not self.lost.issuperset(chain.targets)

    @invariant()
    def each_target_of_a_chain_has_all_acknowledged_writes(self):
        assert not check_map(self.map)
        for (table, number), chain in self.chains():
            assert chain.targets and chain.readable
            for target in chain.targets:
                assert self.acknowledged.get((table, number), set()) <= self.has.get(
                    (table, number, target), set()
                ), chain

    def teardown(self):
        """Once all targets are back, every goal is reached, and no work is left."""
        self.deaths_become_known()
        for target in {t.id for t in transitions.remaining(self.map)} - self.alive - self.lost:
            self.publish(transitions.restarted(self.map, target))
            self.alive.add(target)
            self.publish(transitions.returned(self.map, {target}))
        self.reset_lost_chains()
        for _ in range(30):
            before = self.map
            self.publish(next_steps(self.map, joining_max=2000, of_target_max=2000))
            new = self.map
            for table in new.tables:
                for number, chain in enumerate(table.chains):
                    for target in chain.joining:
                        if number in self.WATCHED:
                            self.has[table.id, number, target] = set(
                                self.has.get((table.id, number, chain.targets[-1]), ())
                            )
            for target in sorted(self.alive):
                new = transitions.joined(
                    new, target, [(t.id, n, c.epoch) for t in new.tables for n, c in enumerate(t.chains)]
                )
            self.publish(new)
            self.publish(transitions.departed(self.map, lambda name, target: True))
            self.publish(transitions.retired(self.map))
            if self.map is before:
                break
        self.each_target_of_a_chain_has_all_acknowledged_writes()
        for table in self.map.tables:
            for chain in table.chains:
                assert (
                    not chain.goal
                    and not chain.joining
                    and not chain.leaving
                    and len(chain.targets) == table.id
                ), chain
        assert all(t.state != "down" or t.desired_state == "lost" for t in self.map.targets)
        assert not any(t.desired_state in ("remove", "lost") for t in transitions.remaining(self.map))


TestPool = Pool.TestCase
TestPool.settings = settings(max_examples=10, stateful_step_count=40, deadline=None)


@pytest.mark.few(0)
class TestPoolWide(Pool.TestCase):
    settings = settings(TestPool.settings, max_examples=25)


def the_chain(*fields, pool=(4, 4, 4), replicas=3):
    """A map whose chain 0 of the widest table is this one."""
    pool_map = a_pool(pool, replicas)
    return replace(
        pool_map,
        tables=tuple(
            replace(t, chains=(Chain(*fields), *t.chains[1:])) if t.id == replicas else t
            for t in pool_map.tables
        ),
    )


def first(pool_map, replicas=3):
    return pool_map.chain(replicas, 0)


def test_dead_target_leaves_its_chain_unless_it_is_the_last():
    one = transitions.died(the_chain(5, (1, 2, 3)), {1})
    assert first(one) == Chain(6, (2, 3), (), (1, 2, 3)) and one.target_by_id[1].state == "down"
    alone = transitions.died(transitions.died(one, {3}), {2})
    assert first(alone) == Chain(7, (2,), (), (1, 2, 3)), "the last member stays, with its epoch"
    back = transitions.returned(alone, {1})
    assert first(back) == Chain(8, (2,), (1,), (1, 2, 3)) and back.target_by_id[1].state == "up"


def test_tail_stays_when_all_targets_die():
    assert first(transitions.died(the_chain(5, (3, 1, 2)), {1, 2, 3})) == Chain(6, (2,), (), (3, 1, 2))


def test_only_copy_of_a_chain_stays_up():
    pool_map = a_pool((4, 4), 1)
    assert transitions.died(pool_map, {1}) is pool_map
    again = transitions.restarted(pool_map, 1)
    assert all(
        new.epoch == old.epoch + (old.targets == (1,))
        for old, new in zip(pool_map.tables[0].chains, again.tables[0].chains, strict=True)
    )


def test_report_of_an_older_epoch_is_ignored():
    pool_map = the_chain(5, (1, 2), (3,), (1, 2, 3))
    assert transitions.joined(pool_map, 3, [(3, 0, 4)]) is pool_map
    assert first(transitions.joined(pool_map, 3, [(3, 0, 5)])) == Chain(6, (1, 2, 3))
    assert transitions.joined(pool_map, 2, [(3, 0, 5)]) is pool_map, (
        "a target that is not joining cannot have joined"
    )


def test_replaced_target_is_not_readable_while_it_leaves():
    pool_map = the_chain(5, (1, 2), (3,), (2, 3), pool=(4, 4, 4), replicas=2)
    pool_map = transitions.joined(pool_map, 3, [(2, 0, 5)])
    assert first(pool_map, 2) == Chain(6, (1, 2, 3), (), (2, 3), (1,)) and first(pool_map, 2).readable == (
        2,
        3,
    )
    assert transitions.departed(pool_map, lambda name, target: False) is pool_map
    assert first(transitions.departed(pool_map, lambda name, target: True), 2) == Chain(7, (2, 3))
    assert first(transitions.died(transitions.died(pool_map, {2}), {3}), 2).readable == (1,), (
        "a target that is needed again is readable again"
    )


def test_lost_target_joins_no_chain_again():
    lost = transitions.died(transitions.with_desired_state(a_pool((4, 4, 4), 2), 1, "lost"), {1})
    assert transitions.returned(lost, {1}) is lost and not any(
        1 in c.targets for c in lost.table_by_id[2].chains
    )
    assert transitions.retired(lost) is lost, "not retired while it has the only copies of a chain"
    only = replace(
        lost,
        tables=tuple(
            replace(
                t,
                chains=tuple(
                    replace(c, targets=tuple(x for x in c.targets if x != 1) or (2,), goal=())
                    for c in t.chains
                ),
            )
            for t in lost.tables
        ),
    )
    assert transitions.retired(only).target_by_id[1].state == "gone"


def test_unchanged_or_invalid_map_is_not_published():
    pool_map = a_pool((4, 4), 2)
    assert (
        transitions.sealed(pool_map, pool_map) is None
        and transitions.sealed(pool_map, replace(pool_map)) is None
    )
    assert transitions.sealed(pool_map, replace(pool_map, name="other")).epoch == 2
    with pytest.raises(InvalidRequest):
        transitions.sealed(pool_map, replace(pool_map, targets=()))
