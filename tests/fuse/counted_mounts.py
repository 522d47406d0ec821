"""Real mounts of a pool in this process, with every request counted: of the kernel, and to shard and stores.

Pool, clients and engines share one event loop in its own thread; the tests make system calls from theirs.
"""

import asyncio
import threading
from collections import Counter
from contextlib import contextmanager
from functools import partial

from nvpool.client.state.options import ClientOptions
from nvpool.fuse.kernel.connection import KernelEngine
from nvpool.fuse.mount_point import MountOptions, unmount
from nvpool.fuse.ops.operations import FuseOps, FuseOptions
from nvpool.fuse.protocol.constants import Op
from nvpool.meta.server.service import MetaOptions
from nvpool.rpc.v1.wire_pb2 import Method
from nvpool.testing.fakes.in_process_pool import InProcessPool
from nvpool.testing.fakes.store import PlainStore

BESIDE = {"META_WATCH", "META_OPEN_SESSION", "META_RENEW_SESSION", "META_RELEASE"}
"""Messages without a waiting caller that are not sent for each file."""
DONE_S = 120.0
WATCH_S = 30.0
"""Time limit for late answers, as the machine may pause."""


class CountingPool(InProcessPool):
    """`sent`: messages that arrived at the shard and at the stores. `delay(name)`: called before each, may wait."""

    def __init__(self, **options):
        super().__init__(make_store=self._plain, **options)
        self.sent = Counter()
        self._chunks = {}

    async def _plain(self, _pool, target):
        return PlainStore(target, self.grant_secret, chunks=self._chunks.setdefault(target, {}))

    async def listen(self, role, number, handler):
        def count(call):
            self.sent[Method.Name(call.method)] += 1
            handler(call)

        await super().listen(role, number, count)


class CountedMount:
    """`all_asked`: the kernel's requests, by name, that were answered or are under way."""

    def __init__(self, place, client, options, settings):
        self.place = place
        self.client = client
        self.vfs = client.vfs
        self.asked = Counter()
        self.ops = FuseOps(client.vfs, options)
        self.engine = KernelEngine(self.ops, place, settings)
        for opcode in Op:
            self.engine.table[opcode] = partial(self._count, opcode.name, self.engine.table[opcode])

    def _count(self, name, handler, count):
        self.asked[name] += 1
        handler(count)

    @property
    def all_asked(self):
        """Also those that the fast path answered without a handler."""
        known = self.engine.fast_paths.cached_replies.replies
        fast = {} if known is None else known.all_taken
        return self.asked + Counter({Op(opcode).name: count for opcode, count in fast.items()})


class CountedMounts:
    """See the module. `mount` creates the `mounts`."""

    def __init__(self, directory, meta_options=None):
        self._directory = directory
        self._meta_options = meta_options or MetaOptions(watch_s=WATCH_S)
        self.mounts = []
        self.pool = None

    def __enter__(self):
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever)
        self._thread.start()
        self._serving = []
        try:
            self.pool = CountingPool(meta_options=self._meta_options)
            self.run(self.pool.__aenter__())
        except BaseException:
            self._end_loop()
            raise
        return self

    def __exit__(self, *_):
        try:
            for mount, serving in self._serving:
                unmount(mount.place, lazy=True)
                self.loop.call_soon_threadsafe(mount.engine.stop)
                serving.result(DONE_S)
                mount.engine.close()
            self.run(self.pool.__aexit__(None, None, None))
        finally:
            self._end_loop()

    def _end_loop(self):
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join(DONE_S)
        self.loop.close()

    def run(self, work):
        """The result of a coroutine on the pool's loop."""
        return asyncio.run_coroutine_threadsafe(work, self.loop).result(DONE_S)

    def mount(self, options=None, client_options=None, settings=None):
        place = self._directory / f"m{len(self.mounts)}"
        place.mkdir()

        async def make():
            client = await self.pool.client(f"mount {place}", client_options or ClientOptions())
            made = CountedMount(place, client, options or FuseOptions(), settings or MountOptions("counted"))
            made.engine.mount()
            return made

        made = self.run(make())
        self.mounts.append(made)
        self._serving.append((made, asyncio.run_coroutine_threadsafe(made.engine.serve(), self.loop)))
        return made

    @contextmanager
    def counted(self, mount):
        """(requests of the kernel to this mount, messages of all clients) while the block runs; filled at its end."""
        asked, sent = Counter(), Counter()
        before = self.run(self._counts(mount))
        yield asked, sent
        after = self.run(self._counts(mount))
        asked.update(after[0] - before[0])
        sent.update({name: count for name, count in (after[1] - before[1]).items() if name not in BESIDE})

    async def _counts(self, mount):
        return mount.all_asked, Counter(self.pool.sent)
