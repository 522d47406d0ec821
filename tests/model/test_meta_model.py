"""Name space against a dictionary: random histories with replayed requests, restarts and power losses.

The model is a tree of plain objects with POSIX's rules written a second time, naively. After every step the answers agree;
after every history the whole tree, link counts and entry counts agree, fsck finds nothing, and every orphan inode can be
collected. The same histories run on the engine in memory and on the stored one, with deaths at any place.
"""

import asyncio
import shutil
import stat
import tempfile
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from nvpool.core import errors
from nvpool.core.clock import ManualClock
from nvpool.core.ids import ROOT_INODE as ROOT
from nvpool.kv.engine import LmdbKv, LmdbOptions
from nvpool.kv.memory_engine import MemoryKv
from nvpool.meta.server.service import MetaOptions, MetaService
from nvpool.rpc.v1 import meta_pb2 as pb
from nvpool.testing.fakes.meta_shard import ShardClient, StoreRecorder, small_map

OPTIONS = MetaOptions(session_lease_s=1e6, grant_s=10, linger_s=0, tick_s=3600)
NAMES = st.sampled_from([b"a", b"b", b"\xff\xfe", b"n" * 255])
PICK = st.sampled_from(range(24))
"""Few names in few directories, so that they collide; evenly distributed, as integers would mostly be the smallest."""


class Node:
    """A file or directory of the model."""

    def __init__(self, kind, inode, parent=None):
        self.kind = kind
        self.inode = inode
        self.parent = parent
        self.links = 2 if kind == "dir" else 1
        self.size = 0
        self.names: dict[bytes, Node] = {}
        self.xattrs: dict[bytes, bytes] = {}

    def below(self, other):
        at = self
        while at is not None:
            if at is other:
                return True
            at = at.parent
        return False


class Refusal(Exception):
    def __init__(self, error):
        self.error = error


class NameSpace(RuleBasedStateMachine):
    def __init__(self):
        super().__init__()
        self.loop = asyncio.new_event_loop()
        self.clock = ManualClock()
        self.kv = None
        self.service = None

    def run(self, work):
        return self.loop.run_until_complete(asyncio.wait_for(work, 120))

    async def open_engine(self, power_lost):
        """A new engine, or the engine that is left after the death of the one before."""
        if self.kv is None:
            self.kv = MemoryKv()
        elif power_lost:
            self.kv.crash()

    async def start(self, power_lost=False):
        await self.open_engine(power_lost)
        self.service = MetaService(
            self.kv, grant_secret=b"s" * 32, dialer=StoreRecorder(), clock=self.clock, options=OPTIONS
        )
        self.service.update_map(small_map())
        await self.service.start()

    @initialize()
    def begin(self):
        self.run(self.start())
        self.client = ShardClient(self.service, 7, 8)
        self.run(self.client.begin())
        self.root = Node("dir", ROOT)
        self.alive: list[Node] = [self.root]
        for parent, name, kind in (
            (0, b"a", "dir"),
            (0, b"b", "wide"),
            (1, b"a", "dir"),
            (1, b"b", "file"),
            (3, b"a", "dir"),
        ):
            self.create(parent, name, kind)

    # -- model

    def directories(self):
        return [node for node in self.alive if node.kind == "dir"]

    def pick(self, nodes, number):
        return nodes[number % len(nodes)]

    def name_in(self, directory, number):
        """Mostly a name that exists."""
        return self.pick([*sorted(directory.names), b"absent"], number)

    def do(self, request, model):
        """Send a request to the service and the model; both succeed, or both refuse alike. Every third one is sent twice."""
        try:
            expected, error = model(), None
        except Refusal as refusal:
            expected, error = None, refusal.error
        try:
            got = self.run(request())
        except errors.Refused as refused:
            assert error is not None and isinstance(refused, error), (refused, error)
            return None, None
        assert error is None, f"the model refuses with {error}"
        if self.client.sequences[0] % 3 == 0:
            self.client.sequences[0] -= 1
            if hasattr(got, "parent"):
                got.ClearField("parent")  # only the first reply has it
            assert self.run(request()) == got
        return got, expected

    @staticmethod
    def refuse(condition, error):
        if condition:
            raise Refusal(error)

    # -- operations

    @rule(parent=PICK, name=NAMES)
    def mkdir(self, parent, name):
        self.create(parent, name, "dir")

    @rule(parent=PICK, name=NAMES, kind=st.sampled_from(["file", "file", "dir", "wide", "link"]))
    def create_any(self, parent, name, kind):
        self.create(parent, name, kind)

    def create(self, parent, name, kind):
        parent = self.pick(self.directories(), parent)
        mode = {"file": stat.S_IFREG, "link": stat.S_IFLNK}.get(kind, stat.S_IFDIR) | 0o755

        def model():
            self.refuse(name in parent.names, errors.AlreadyExists)
            node = Node({"wide": "dir"}.get(kind, kind), 0, parent)
            parent.names[name] = node
            parent.links += node.kind == "dir"
            self.alive.append(node)
            return node

        reply, node = self.do(
            lambda: self.client.create(
                parent.inode,
                name,
                mode,
                exclusive=True,
                wide=kind == "wide",
                target=b"t" if kind == "link" else b"",
            ),
            model,
        )
        if node is not None:
            node.inode = reply.entry.attr.inode
            assert node.inode not in {other.inode for other in self.alive if other is not node}

    @rule(parent=PICK, name=PICK)
    def unlink(self, parent, name):
        parent = self.pick(self.directories(), parent)
        name = self.name_in(parent, name)

        def model():
            node = parent.names.get(name)
            self.refuse(node is None, errors.NotFound)
            self.refuse(node.kind == "dir", errors.IsADirectory)
            del parent.names[name]
            self.lose(node)
            return node

        reply, node = self.do(lambda: self.client.unlink(parent.inode, name), model)
        assert node is None or (reply.inode, reply.links) == (node.inode, node.links)

    def lose(self, node):
        node.links = 0 if node.kind == "dir" else node.links - 1
        if not node.links:
            self.alive.remove(node)

    @rule(parent=PICK, name=PICK)
    def rmdir(self, parent, name):
        parent = self.pick(self.directories(), parent)
        name = self.name_in(parent, name)

        def model():
            node = parent.names.get(name)
            self.refuse(node is None, errors.NotFound)
            self.refuse(node.kind != "dir", errors.NotADirectory)
            self.refuse(node.names, errors.DirectoryNotEmpty)
            del parent.names[name]
            parent.links -= 1
            self.lose(node)
            return node

        self.do(lambda: self.client.rmdir(parent.inode, name), model)

    @rule(node=PICK, parent=PICK, name=NAMES)
    def link(self, node, parent, name):
        node, parent = self.pick(self.alive, node), self.pick(self.directories(), parent)

        def model():
            self.refuse(node.kind == "dir", errors.NotPermitted)
            self.refuse(name in parent.names, errors.AlreadyExists)
            parent.names[name] = node
            node.links += 1
            return node

        self.do(lambda: self.client.link(node.inode, parent.inode, name), model)

    @rule(parent=PICK, name=PICK, new_parent=PICK, new_name=NAMES, flags=st.sampled_from([0, 0, 0, 1]))
    def rename_to_any(self, parent, name, new_parent, new_name, flags):
        self.rename(parent, name, new_parent, new_name, flags)

    @rule(parent=PICK, name=PICK, new_parent=PICK, new_name=PICK, flags=st.sampled_from([0, 0, 2]))
    def rename_to_an_existing_name(self, parent, name, new_parent, new_name, flags):
        self.rename(
            parent, name, new_parent, self.name_in(self.pick(self.directories(), new_parent), new_name), flags
        )

    @rule(moved=PICK, onto=PICK, flags=st.sampled_from([0, 0, 2]))
    def rename_directory_onto_an_empty_one(self, moved, onto, flags):
        named = [
            (node.parent, name, node)
            for directory in self.directories()
            for name, node in directory.names.items()
            if node.kind == "dir"
        ]
        empty = [one for one in named if not one[2].names]
        if empty:
            old, new = self.pick(named, moved), self.pick(empty, onto)
            self.rename_from(old[0], old[1], new[0], new[1], flags)

    def rename(self, parent, name, new_parent, new_name, flags):
        parent, new_parent = self.pick(self.directories(), parent), self.pick(self.directories(), new_parent)
        self.rename_from(parent, self.name_in(parent, name), new_parent, new_name, flags)

    def rename_from(self, parent, name, new_parent, new_name, flags):
        def model():
            node, other = parent.names.get(name), new_parent.names.get(new_name)
            self.refuse(node is None, errors.NotFound)
            if other is None:
                self.refuse(flags == 2, errors.NotFound)
                self.refuse(node.kind == "dir" and new_parent.below(node), errors.WouldLoop)
            else:
                self.refuse(flags == 1, errors.AlreadyExists)
                if other is node:
                    return node
                self.refuse(node.kind == "dir" and new_parent.below(node), errors.WouldLoop)
                if flags == 2:
                    self.refuse(other.kind == "dir" and parent.below(other), errors.WouldLoop)
                    parent.names[name], new_parent.names[new_name] = other, node
                    for moved, old, new in ((node, parent, new_parent), (other, new_parent, parent)):
                        if moved.kind == "dir":
                            moved.parent = new
                            old.links -= 1
                            new.links += 1
                    return node
                if node.kind == "dir":
                    self.refuse(other.kind != "dir", errors.NotADirectory)
                    self.refuse(other.names, errors.DirectoryNotEmpty)
                    new_parent.links -= 1
                else:
                    self.refuse(other.kind == "dir", errors.IsADirectory)
                self.lose(other)
            del parent.names[name]
            new_parent.names[new_name] = node
            if node.kind == "dir":
                node.parent = new_parent
                parent.links -= 1
                new_parent.links += 1
            return node

        self.do(lambda: self.client.rename(parent.inode, name, new_parent.inode, new_name, flags), model)

    @rule(
        node=PICK,
        size=st.integers(0, 20_000),
        way=st.sampled_from(["set", "report", "append", "grow", "hole"]),
    )
    def resize(self, node, size, way):
        files = [node for node in self.alive if node.kind == "file"]
        if not files:
            return
        node = self.pick(files, node)
        cut = self.run(self.client.getattr(node.inode, rights=2)).attr.cut

        def model():
            self.refuse(way == "append" and not size, errors.InvalidRequest)
            self.refuse(way in ("grow", "hole") and not size, errors.InvalidRequest)
            node.size = {"set": size, "append": node.size + size, "hole": node.size}.get(
                way, max(size, node.size)
            )
            return node

        def request():
            if way == "set":
                return self.client.setattr(node.inode, 8, size=size)
            if way == "report":
                return self.client.report(node.inode, size, cut)
            if way != "append":
                return self.client.allocate(node.inode, 0, size, grow=way == "grow", punch=way == "hole")
            return self.client.ask(
                "RESERVE",
                pb.ReserveRequest(change=self.client.change(), inode=node.inode, length=size, cut=cut),
            )

        self.do(request, model)

    @rule(node=PICK, name=st.sampled_from([b"user.a", b"user.b"]), value=st.sampled_from([b"", b"x", None]))
    def xattr(self, node, name, value):
        node = self.pick(self.alive, node)

        def model():
            if value is None:
                self.refuse(name not in node.xattrs, errors.NoAttribute)
                del node.xattrs[name]
            else:
                node.xattrs[name] = value
            return node

        def request():
            if value is None:
                return self.client.ask(
                    "REMOVEXATTR",
                    pb.RemoveXattrRequest(change=self.client.change(), inode=node.inode, name=name),
                )
            return self.client.ask(
                "SETXATTR",
                pb.SetXattrRequest(change=self.client.change(), inode=node.inode, name=name, value=value),
            )

        self.do(request, model)

    # -- faults

    @rule(how=st.sampled_from(["killed", "killed", "power lost", "collected", "collected"]))
    def fault(self, how):
        """Restart after a kill, a sync and power loss, or a run of the collector."""
        if how == "collected":
            self.run(self.client.collect())
            return
        if how == "power lost":
            self.run(self.kv.sync())
        self.run(self.service.close())
        self.run(self.start(power_lost=how == "power lost"))
        self.client.service = self.service
        self.run(self.client.begin())

    # -- invariants

    @precondition(lambda self: self.service is not None)
    @rule()
    def whole_tree_agrees(self):
        waiting, seen = [self.root], set()
        while waiting:
            directory = waiting.pop()
            entries = {e.name: e for e in self.run(self.client.list(directory.inode, limit=3, attrs=True))}
            assert entries.keys() == directory.names.keys()
            attr = self.run(self.client.getattr(directory.inode)).attr
            assert (attr.links, attr.size) == (directory.links, len(directory.names))
            for name, node in directory.names.items():
                entry = entries[name]
                assert (entry.inode, entry.attr.links) == (node.inode, node.links)
                if node.kind == "file":
                    assert entry.attr.size == node.size
                if node.xattrs or (node.inode not in seen and entry.attr.flags & 1):
                    found = self.run(
                        self.client.ask(
                            "LISTXATTR", pb.ListXattrRequest(session=self.client.session, inode=node.inode)
                        )
                    )
                    assert set(found.names) == node.xattrs.keys()
                seen.add(node.inode)
                if node.kind == "dir":
                    assert entry.attr.parent == directory.inode
                    waiting.append(node)
        assert seen == {node.inode for node in self.alive if node is not self.root}

    def teardown(self):
        if self.service is not None:
            self.whole_tree_agrees()
            problems = self.run(self.client.fsck())
            assert not problems, problems
            self.run(self.client.ask("CLOSE_SESSION", pb.CloseSessionRequest(session=self.client.session)))
            self.clock.advance(2e6)
            assert self.run(self.client.collect()).left == 0
            assert self.run(self.client.status()).inodes == len(self.alive)
            self.run(self.service.close())
            self.run(self.kv.close())
        self.loop.close()


class StoredNameSpace(NameSpace):
    """On LMDB and journal, with a memtable so small that changes wait for space; its process dies without notice."""

    def __init__(self):
        super().__init__()
        self.path = Path(tempfile.mkdtemp(prefix="nvpool-meta-model-")) / "kv"

    async def open_engine(self, power_lost):
        if self.kv is not None:
            await self.kv.abandon()
        self.kv = await LmdbKv.open(self.path, LmdbOptions(layer_entries_max=30, checkpoint_interval_s=0.05))

    def teardown(self):
        super().teardown()
        shutil.rmtree(self.path.parent)


SLOW = [HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much]
TestNameSpace = NameSpace.TestCase
TestNameSpace.settings = settings(
    max_examples=15, stateful_step_count=50, deadline=None, suppress_health_check=SLOW
)
TestStoredNameSpace = StoredNameSpace.TestCase
TestStoredNameSpace.settings = settings(
    max_examples=4, stateful_step_count=40, deadline=None, suppress_health_check=SLOW
)


@pytest.mark.few(0)
class TestNameSpaceWide(NameSpace.TestCase):
    settings = settings(TestNameSpace.settings, max_examples=40)


@pytest.mark.few(0)
class TestStoredNameSpaceWide(StoredNameSpace.TestCase):
    settings = settings(TestStoredNameSpace.settings, max_examples=10)


@pytest.mark.soak
class TestNameSpaceLong(NameSpace.TestCase):
    settings = settings(max_examples=500, stateful_step_count=150, deadline=None, suppress_health_check=SLOW)


@pytest.mark.soak
class TestStoredNameSpaceLong(StoredNameSpace.TestCase):
    settings = settings(max_examples=200, stateful_step_count=150, deadline=None, suppress_health_check=SLOW)
