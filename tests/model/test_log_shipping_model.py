"""Random histories of changes, deaths, cut links, promotions and returns of three members of a shard.

Every acknowledged change is in the promoted member, no refused change is, a replaced primary acknowledges nothing, and
after a quiet time all members are equal.
"""

import asyncio
import contextlib
import itertools
import random
import shutil
import tempfile
from pathlib import Path

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule

from nvpool.core.errors import Busy, Fenced, Unavailable
from nvpool.testing.contracts.kv import everything
from nvpool.testing.fakes.shard_replication import Members

COUNT = 3
NUMBERS = st.integers(0, COUNT - 1)


class ShippingMachine(RuleBasedStateMachine):
    @initialize(seed=st.integers(0, 1 << 16), retain=st.sampled_from([500, 5000, 1 << 20]))
    def begin(self, seed, retain):
        self.runner = asyncio.Runner()
        self.directory = Path(tempfile.mkdtemp(prefix="kv-"))
        self.members = self.run(self.make(seed, retain))
        self.numbers = itertools.count(1)
        self.acknowledged, self.refused = set(), set()

    async def make(self, seed, retain):
        members = Members(self.directory, COUNT, random=random.Random(seed), retain_bytes=retain)
        await members.start_all()
        return members

    def run(self, work):
        async def bounded():
            async with asyncio.timeout(120):
                return await work

        return self.runner.run(bounded())

    @property
    def serving(self):
        return self.members.primary.kv is not None

    def change(self, member):
        number = next(self.numbers)

        def on_known(known):
            if known:
                self.acknowledged.add(number)

        try:
            sequence = member.kv.apply(
                [
                    (b"change %06d" % number, b"x" * (number % 50)),
                    (b"last", b"%d" % number),
                    (b"change %06d" % (number - 7), None if number % 3 == 0 else b"again"),
                ]
            )
        except (Busy, Fenced):
            self.refused.add(number)
            return
        member.kv.history.when(sequence, on_known)

    @rule(count=st.integers(1, 60), between=st.integers(0, 3))
    def make_changes(self, count, between):
        async def make():
            for _ in range(
                count if self.serving else 0
            ):  # no precondition: time decides the content of the map
                self.change(self.members.primary)
                for _ in range(between):
                    await asyncio.sleep(0)

        self.run(make())

    @rule()
    def read_nothing_that_could_be_lost(self):
        """A checkpoint begins, and runs beside the steps that follow."""
        if self.serving:
            self.members.primary.kv.start_checkpoint()
            self.run(asyncio.sleep(0))

    @rule(milliseconds=st.sampled_from([0, 1, 5, 20, 100]))
    def wait(self, milliseconds):
        self.run(asyncio.sleep(milliseconds / 1000))

    @rule()
    def wait_until_quiet(self):
        if self.serving and not self.members.cuts and not self.members.manager_away:
            self.run(self.members.quiet())

    @rule(one=NUMBERS, other=NUMBERS, both=st.booleans())
    def cut(self, one, other, both):
        self.members.cuts |= {(one, other), (other, one)} if both else {(one, other)}

    @rule()
    def heal(self):
        self.members.cuts.clear()

    @rule(number=NUMBERS)
    def kill(self, number):
        self.run(self.members.kill(number))

    @rule(number=NUMBERS)
    def start(self, number):
        if not self.members.members[number].alive and not self.members.manager_away:
            self.run(self.members.start(number))
            self.check()

    @rule(number=NUMBERS)
    def start_alone(self, number):
        """While no other member can be reached: a primary continues only where it has all acknowledged changes."""
        if not self.members.members[number].alive and not self.members.manager_away:
            with contextlib.suppress(Unavailable):
                self.run(self.members.start(number, alone=True))
                self.check()

    @rule()
    def fail_over(self):
        """Also while the primary lives: it was silent for its lease, and returns."""
        if not self.members.manager_away:
            self.run(self.members.fail_over())
            self.check()

    @rule()
    def former_primaries_make_changes(self):
        for member in self.members.members:
            if member.kv is not None and member is not self.members.primary:
                for _ in range(3):
                    self.change(member)

    @rule(away=st.booleans())
    def set_manager_away(self, away):
        self.members.manager_away = away

    def check(self):
        kv = self.members.primary.kv
        if kv is None:
            return
        found = everything(kv)
        there = {int(key[7:]) for key in found if key.startswith(b"change")}
        # a change is present as long as the change that removes or overwrites its key is absent
        for number in self.acknowledged - there:
            assert (number + 7) % 3 == 0 and int(found.get(b"last", b"0")) >= number + 7, f"{number} is lost"
        assert int(found.get(b"last", b"0")) >= max(self.acknowledged, default=0), (
            "the last one acknowledged is lost"
        )
        for number in self.refused & there:
            assert found[b"change %06d" % number] == b"again", f"{number} was refused and is present"

    def teardown(self):
        if not hasattr(self, "members"):
            return
        try:
            self.run(self.end())
        finally:
            self.run(self.members.close())
            self.runner.close()
            shutil.rmtree(self.directory)

    async def end(self):
        members = self.members
        members.manager_away = False
        members.cuts.clear()
        for member in members.members:
            if member.kv is not None and member is not members.primary:
                await members.kill(
                    member.number
                )  # as a daemon does that learns that it is no longer the primary
        for member in sorted(members.members, key=lambda member: member is not members.primary):
            if not member.alive:
                await members.start(member.number)
        await members.follow_map()
        await members.quiet()
        self.check()
        await members.acknowledged([(b"after", b"all")])
        await members.quiet()
        expected = everything(members.primary.kv)
        for member in members.members:
            if member.standby is not None:
                assert everything(member.standby.kv) == expected
        assert members.shard.term >= 2


def machine(examples, steps):
    class Machine(ShippingMachine):
        pass

    Machine.TestCase.settings = settings(
        max_examples=examples,
        stateful_step_count=steps,
        deadline=None,
        suppress_health_check=list(HealthCheck),
        phases=(Phase.reuse, Phase.generate),
    )
    return Machine.TestCase


TestShipping = machine(15, 30)


@pytest.mark.soak
class TestShippingLong(machine(400, 60)):
    pass
