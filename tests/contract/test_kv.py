"""Both implementations of Kv meet its contract and behave as a dict, over any history of changes and deaths."""

import asyncio
import errno
import shutil
import tempfile
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from nvpool.kv.api import KEY_END
from nvpool.kv.engine import LmdbKv, LmdbOptions
from nvpool.kv.memory_engine import MemoryKv
from nvpool.testing.contracts.kv import CHECKS, everything

OPTIONS = LmdbOptions(journal_bytes=32 << 20, map_bytes=1 << 20, sync_interval_s=30, checkpoint_interval_s=30)


class LmdbSubject:
    def __init__(self, options=OPTIONS):
        self.directory = Path(tempfile.mkdtemp(prefix="kv-"))
        self.options = options

    async def open(self):
        self.kv = await LmdbKv.open(self.directory / "kv", self.options)

    async def restart(self):
        await self.kv.abandon()
        await self.open()

    async def fail_next_sync(self):
        def fail(_descriptor):
            raise OSError(errno.EIO, "asked for by the test")

        self.kv.journal.sync_file = fail

    async def close(self):
        await self.kv.abandon()
        shutil.rmtree(self.directory)


class MemorySubject:
    async def open(self):
        self.kv = MemoryKv()

    async def restart(self):
        self.kv.crash(keep=self.kv.sequence)

    async def fail_next_sync(self):
        self.kv.fail_next_sync()

    async def close(self):
        await self.kv.close()


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
@pytest.mark.parametrize("subject", [MemorySubject, LmdbSubject])
def test_kv_meets_the_contract(subject, check):
    async def run():
        made = subject()
        await made.open()
        try:
            async with asyncio.timeout(120):
                await check(made)
        finally:
            await made.close()

    asyncio.run(run())


KEYS = st.binary(min_size=1, max_size=3) | st.sampled_from([b"\0", KEY_END[:-1], b"a" * 511])
EFFECTS = st.dictionaries(KEYS, st.none() | st.binary(max_size=5), max_size=6)
BOUNDS = st.binary(max_size=3)


class KvMachine(RuleBasedStateMachine):
    """Histories of one Kv beside a dict; `states[n]` is the dict after change n."""

    subject: type

    @initialize()
    def begin(self):
        self.runner = asyncio.Runner()
        self.made = self.subject()
        self.runner.run(self.made.open())
        self.states = [{}]
        self.snapshot = None

    @property
    def kv(self):
        return self.made.kv

    @rule(effects=EFFECTS)
    def apply(self, effects):
        state = self.states[-1] | {key: value for key, value in effects.items() if value is not None}
        for key in (key for key, value in effects.items() if value is None):
            state.pop(key, None)
        if self.kv.full:
            self.runner.run(self.kv.room())
        assert self.kv.apply(list(effects.items())) == len(self.states) == self.kv.sequence
        self.states.append(state)

    @rule(first=BOUNDS, end=BOUNDS, limit=st.integers(0, 9))
    def scan(self, first, end, limit):
        pairs = sorted((key, value) for key, value in self.states[-1].items() if first <= key < end)
        assert self.kv.scan(first, end, limit) == pairs[:limit]
        assert self.kv.scan_back(first, end, limit) == pairs[::-1][:limit]

    @rule(key=KEYS)
    def get(self, key):
        assert self.kv.get(key) == self.states[-1].get(key)

    @rule(keys=st.lists(KEYS, max_size=5))
    def get_many(self, keys):
        assert self.kv.get_many(keys) == [self.states[-1].get(key) for key in keys]

    @rule()
    def sync(self):
        self.runner.run(self.kv.sync())
        assert self.kv.synced_sequence == self.kv.sequence

    @rule()
    def checkpoint(self):
        self.runner.run(self.kv.checkpoint())

    @rule()
    def begin_a_checkpoint(self):
        """Leave a checkpoint half-way: later steps run against a frozen memtable."""
        if isinstance(self.kv, LmdbKv):
            self.kv.start_checkpoint()
            self.runner.run(asyncio.sleep(0))

    @precondition(lambda self: self.snapshot is None)
    @rule()
    def begin_a_snapshot(self):
        self.snapshot, self.seen, self.then = self.kv.snapshot(), [], self.states[-1]

    @precondition(lambda self: self.snapshot is not None)
    @rule(limit=st.integers(1, 4))
    def step_the_snapshot(self, limit):
        self.seen += self.snapshot.step(limit)
        if self.snapshot.done:
            assert self.seen == sorted(self.then.items())
            self.snapshot = None

    @rule()
    def die(self):
        self.snapshot = None
        self.runner.run(self.made.restart())
        self.check_all()

    @precondition(lambda self: isinstance(self.kv, MemoryKv))
    @rule(data=st.data())
    def lose_power(self, data):
        self.snapshot = None
        keep = data.draw(st.integers(self.kv.synced_sequence, self.kv.sequence))
        self.kv.crash(keep)
        del self.states[keep + 1 :]
        self.check_all()

    def check_all(self):
        assert everything(self.kv) == self.states[-1] and self.kv.sequence == len(self.states) - 1

    def teardown(self):
        if hasattr(self, "made"):
            self.check_all()
            self.runner.run(self.made.close())
            self.runner.close()


def machine(subject_type, examples, steps):
    class Machine(KvMachine):
        subject = subject_type

    limits = settings(
        max_examples=examples,
        stateful_step_count=steps,
        deadline=None,
        database=None,
        suppress_health_check=list(HealthCheck),
    )
    case = Machine.TestCase
    case.settings = limits
    return case


class SmallLmdb(LmdbSubject):
    """A memtable of a few entries and a journal of a few pages, so that every history meets checkpoints and waiting."""

    def __init__(self):
        super().__init__(
            LmdbOptions(
                journal_bytes=1 << 16,
                map_bytes=1 << 16,
                layer_entries_max=8,
                sync_interval_s=30,
                checkpoint_interval_s=30,
            )
        )


TestMemoryKv = machine(MemorySubject, 60, 40)
TestLmdbKv = machine(LmdbSubject, 25, 30)
TestSmallLmdbKv = machine(SmallLmdb, 25, 50)


@pytest.mark.soak
class TestSmallLmdbKvLong(machine(SmallLmdb, 2000, 100)):
    pass
