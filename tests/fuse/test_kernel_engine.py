"""The direct engine with a socket for /dev/fuse: negotiation, replies, refusals and interrupted callers."""

import asyncio
import errno
import fcntl
import os
import signal
import socket
import struct
import subprocess
import sys
from types import SimpleNamespace

import pytest

from nvpool.client.rpc.slot_journal import asking
from nvpool.core import errors
from nvpool.core.clock import SYSTEM_CLOCK
from nvpool.fuse.engines import kernel_version, make_engine
from nvpool.fuse.kernel import connection as kernel_connection
from nvpool.fuse.kernel.connection import FLAGS, KernelEngine
from nvpool.fuse.mount_point import MountOptions
from nvpool.fuse.ops.operations import FuseOps, FuseOptions
from nvpool.fuse.pending_requests import IN_WORK_MAX, SIGKILL_BIT, is_dying
from nvpool.fuse.protocol import replies, requests
from nvpool.fuse.protocol.constants import Init, Op, Opening
from nvpool.fuse.protocol.requests import FORMS, FuseRequest
from nvpool.testing.fakes.vfs import MemoryVfs

ALL = (1 << 43) - 1


class SlowVfs(MemoryVfs):
    """Reads wait until `go` is set."""

    def __init__(self):
        super().__init__()
        self.go = asyncio.Event()
        self.waiting = 0

    async def read(self, handle, offset, size):
        self.waiting += 1
        try:
            await self.go.wait()
            return await super().read(handle, offset, size)
        finally:
            self.waiting -= 1


class Kernel:
    """Plays the kernel: sends requests through a socket that preserves message boundaries, and receives the replies."""

    def __init__(self, vfs, options=None, settings=None, clock=SYSTEM_CLOCK):
        self.ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.theirs = theirs
        for end in (self.ours, theirs):
            end.setblocking(False)
            end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4 << 20)
        self.ready = []
        self.engine = KernelEngine(
            FuseOps(vfs, options, clock), None, settings or MountOptions("p"), lambda: self.ready.append(1)
        )
        self.engine.adopt(theirs.fileno())
        self.last = 0

    async def __aenter__(self):
        self.serving = asyncio.ensure_future(self.engine.serve())
        return self

    async def __aexit__(self, *_):
        self.engine.stop()
        await asyncio.wait_for(asyncio.gather(self.serving, return_exceptions=True), 120)
        self.ours.close()
        self.theirs.close()

    def send(self, opcode, body=(), *, node=1, names=(), payload=b"", uid=0, pid=0, unique=None):
        self.last += 2
        form = (
            requests.SETXATTR_EXTENDED
            if opcode == Op.SETXATTR and self.engine.requests.setxattr_extended
            else FORMS.get(opcode)
        )
        if opcode == Op.SETXATTR:
            body = (*body, 0, 0, 0)[: len(form.body._fields)]
        made = form.body(*body) if form is not None and form.body else None
        unique = self.last if unique is None else unique
        self.ours.send(
            requests.encode(
                FuseRequest(opcode, unique, node, uid, 0, pid, made, names, payload),
                setxattr_extended=form is requests.SETXATTR_EXTENDED,
            )
        )
        return unique

    async def receive(self):
        raw = await asyncio.wait_for(asyncio.get_running_loop().sock_recv(self.ours, 2 << 20), 120)
        return replies.parse(raw)

    async def request(self, opcode, body=(), **more):
        unique = self.send(opcode, body, **more)
        heard, error, answer = await self.receive()
        assert heard == unique
        if error:
            raise OSError(-error, os.strerror(-error))
        return answer

    async def init(self, minor=45, flags=ALL, major=7):
        raw = struct.pack("=I11I", flags >> 32, *([0] * 11)) if flags & Init.INIT_EXT else b""
        answer = await self.request(Op.INIT, (major, minor, 131072, flags & 0xFFFFFFFF), payload=raw)
        return replies.read("init", answer)

    async def create(self, name, node=1):
        answer = replies.read(
            "create",
            await self.request(
                Op.CREATE, (os.O_RDWR | os.O_CREAT, 0o100644, 0o22, 0), node=node, names=(name,)
            ),
        )
        return answer.nodeid, answer.fh

    async def expect_no_reply(self):
        """Check that no other reply was sent: the reply to the request sent now is the next one."""
        await self.request(Op.STATFS)


def on_kernel(make_vfs=MemoryVfs, **options):
    """Run an async test against the engine on its own loop."""

    def runner(test):
        def run():
            async def all_of_it():
                async with Kernel(make_vfs(), **options) as kernel:
                    await test(kernel)

            asyncio.run(all_of_it())

        run.__name__ = test.__name__
        run.__doc__ = test.__doc__
        return run

    return runner


@on_kernel()
async def test_negotiation_accepts_only_what_the_kernel_offers(kernel):
    said = await kernel.init(45, ALL & ~int(Init.PARALLEL_DIROPS))
    assert (said.major, said.minor, said.flags | said.flags2 << 32) == (
        7,
        45,
        int(FLAGS & ~Init.PARALLEL_DIROPS),
    )
    assert (
        said.max_write == said.max_pages * 4096 >= 1 << 17
        and said.max_background == 128
        and said.congestion_threshold == 96
    )
    assert not (said.flags & (Init.EXPORT_SUPPORT | Init.WRITEBACK_CACHE | Init.EXPLICIT_INVAL_DATA))
    assert kernel.ready == [1]


@on_kernel(settings=MountOptions("p", max_background=20, congestion_threshold=7, writeback=True))
async def test_settings_are_negotiated_with_an_older_kernel(kernel):
    said = await kernel.init(31, (1 << 30) - 1)
    assert (said.minor, said.max_background, said.congestion_threshold, said.flags2) == (31, 20, 7, 0)
    assert said.flags & Init.WRITEBACK_CACHE and not said.flags & Init.INIT_EXT


@on_kernel()
async def test_newer_major_version_is_negotiated_down(kernel):
    assert (await kernel.init(0, 0, major=8)).major == 7
    assert not kernel.ready
    assert (await kernel.init()).minor == 45


@on_kernel()
async def test_old_kernel_ends_the_mount_with_a_remedy(kernel):
    with pytest.raises(OSError) as refused:
        await kernel.init(27)
    assert refused.value.errno == errno.EPROTO
    with pytest.raises(errors.Unavailable, match="--engine pyfuse3"):
        await asyncio.wait_for(kernel.serving, 120)


@on_kernel(options=FuseOptions(attr_timeout_s=2.5, entry_timeout_s=1.25, negative_timeout_s=0.5))
async def test_file_is_created_written_and_read(kernel):
    await kernel.init()
    absent = replies.read("entry", await kernel.request(Op.LOOKUP, names=(b"f",)))
    assert (absent.nodeid, absent.entry_valid, absent.entry_valid_nsec) == (0, 0, 500_000_000)
    inode, handle = await kernel.create(b"f")
    content = os.urandom(5000)
    assert (
        replies.read(
            "count",
            await kernel.request(Op.WRITE, (handle, 0, len(content), 0, 0, 0), node=inode, payload=content),
        ).size
        == 5000
    )
    assert await kernel.request(Op.READ, (handle, 1000, 4096, 0, 0, 0), node=inode) == content[1000:5000]
    assert await kernel.request(Op.READ, (handle, 5000, 4096, 0, 0, 0), node=inode) == b""
    attr = replies.read("attr", await kernel.request(Op.GETATTR, (0, 0), node=inode))
    assert (attr.size, attr.mode, attr.attr_valid, attr.attr_valid_nsec) == (5000, 0o100644, 2, 500_000_000)
    assert await kernel.request(Op.FLUSH, (handle, 0, 0), node=inode) == b""
    assert await kernel.request(Op.RELEASE, (handle, 0, 0, 0), node=inode) == b""
    found = replies.read("entry", await kernel.request(Op.LOOKUP, names=(b"f",)))
    assert (found.nodeid, found.size, found.entry_valid, found.entry_valid_nsec) == (
        inode,
        5000,
        1,
        250_000_000,
    )


@on_kernel()
async def test_read_only_file_needs_no_flush_at_close(kernel):
    await kernel.init()
    inode, _ = await kernel.create(b"f")
    for flags, quiet in ((os.O_RDONLY, True), (os.O_RDWR, False), (os.O_WRONLY, False)):
        opened = replies.read("open", await kernel.request(Op.OPEN, (flags, 0), node=inode))
        assert bool(opened.open_flags & Opening.NOFLUSH) == quiet
    await kernel.request(Op.SETLK, (opened.fh, 7, 0, 9, fcntl.F_WRLCK, 1, 0), node=inode)
    opened = replies.read("open", await kernel.request(Op.OPEN, (os.O_RDONLY, 0), node=inode))
    assert not opened.open_flags & Opening.NOFLUSH, "its close ends the locks of the process"
    opened = replies.read("open", await kernel.request(Op.OPEN, (os.O_WRONLY | os.O_APPEND, 0), node=inode))
    assert opened.open_flags & Opening.DIRECT_IO


@on_kernel()
async def test_listings_have_entries_and_an_end(kernel):
    await kernel.init()
    for name in (b"a", b"b"):
        await kernel.create(name)
    handle = replies.read("open", await kernel.request(Op.OPENDIR, (0, 0))).fh
    for opcode, plus in ((Op.READDIR, False), (Op.READDIRPLUS, True)):
        found = replies.read_listing(await kernel.request(opcode, (handle, 0, 4096, 0, 0, 0)), plus)
        assert [name for name, *_ in found] == [b".", b"..", b"a", b"b"]
        assert await kernel.request(opcode, (handle, found[-1][2], 4096, 0, 0, 0)) == b""
    one = replies.read_listing(
        await kernel.request(Op.READDIRPLUS, (handle, found[2][2], 200, 0, 0, 0)), True
    )
    assert [name for name, *_ in one] == [b"b"]


@on_kernel()
async def test_extended_attributes_are_set_and_sized(kernel):
    await kernel.init()
    inode, _ = await kernel.create(b"f")
    name = b"user.x"
    await kernel.request(Op.SETXATTR, (5, 1), node=inode, names=(name,), payload=b"value")  # XATTR_CREATE
    for flags, number, which in ((1, errno.EEXIST, name), (2, errno.ENODATA, b"user.y")):
        with pytest.raises(OSError) as refused:
            await kernel.request(Op.SETXATTR, (5, flags), node=inode, names=(which,), payload=b"other")
        assert refused.value.errno == number
    assert replies.read("count", await kernel.request(Op.GETXATTR, (0,), node=inode, names=(name,))).size == 5
    assert await kernel.request(Op.GETXATTR, (5,), node=inode, names=(name,)) == b"value"
    assert await kernel.request(Op.LISTXATTR, (100,), node=inode) == b"user.x\0"
    with pytest.raises(OSError) as short:
        await kernel.request(Op.GETXATTR, (4,), node=inode, names=(name,))
    assert short.value.errno == errno.ERANGE
    await kernel.request(Op.REMOVEXATTR, node=inode, names=(name,))
    assert await kernel.request(Op.LISTXATTR, (100,), node=inode) == b""


@on_kernel()
async def test_write_clears_set_ids_on_the_kernels_request(kernel):
    await kernel.init()
    inode, handle = await kernel.create(b"f")

    async def mode():
        return replies.read("attr", await kernel.request(Op.GETATTR, (0, 0), node=inode)).mode & 0o7777

    async def chmod(bits):
        await kernel.request(Op.SETATTR, (1, *([0] * 9), bits, 0, 0), node=inode)

    for before, after in ((0o6755, 0o755), (0o6745, 0o2745), (0o755, 0o755)):
        await chmod(before)
        await kernel.request(Op.WRITE, (handle, 0, 1, 0, 0, 0), node=inode, payload=b"x")
        assert await mode() == before
        unique = kernel.send(Op.WRITE, (handle, 0, 1, 4, 0, 0), node=inode, payload=b"x")
        heard = await kernel.receive()
        if before != after:
            assert heard[:2] == (0, 2) and heard[2] == struct.pack(
                "=Qqq", inode, -1, 0
            )  # the mode in the kernel's cache is stale
            heard = await kernel.receive()
        assert heard[:2] == (unique, 0) and await mode() == after
        await chmod(before)
        await kernel.request(Op.SETATTR, (1 << 3 | 1 << 11, 0, 1, *([0] * 7), 0, 0, 0), node=inode)
        assert await mode() == after


@on_kernel()
async def test_ranges_are_punched_found_and_copied(kernel):
    await kernel.init()
    inode, handle = await kernel.create(b"f")
    other_inode, other = await kernel.create(b"g")
    await kernel.request(Op.WRITE, (handle, 0, 12288, 0, 0, 0), node=inode, payload=b"x" * 12288)
    assert await kernel.request(Op.FALLOCATE, (handle, 4096, 4096, 3), node=inode) == b""
    places = [
        replies.read("number", await kernel.request(Op.LSEEK, (handle, offset, whence), node=inode)).value
        for offset, whence in ((0, os.SEEK_HOLE), (4096, os.SEEK_DATA), (8192, os.SEEK_HOLE))
    ]
    assert places == [4096, 8192, 12288]
    copy = (handle, 0, other_inode, other, 100, 5000, 0)
    assert replies.read("count", await kernel.request(Op.COPY_FILE_RANGE, copy, node=inode)).size == 5000
    assert replies.read("number", await kernel.request(Op.COPY_FILE_RANGE_64, copy, node=inode)).value == 5000
    assert await kernel.request(Op.READ, (other, 0, 8192, 0, 0, 0), node=other_inode) == bytes(
        100
    ) + b"x" * 4096 + bytes(904)
    for opcode, body, number in (
        (Op.LSEEK, (handle, 12288, os.SEEK_DATA), errno.ENXIO),
        (Op.FALLOCATE, (handle, 0, 4096, 8), errno.EOPNOTSUPP),
        (Op.COPY_FILE_RANGE, (*copy[:-1], 1), errno.EINVAL),
    ):
        with pytest.raises(OSError) as refused:
            await kernel.request(opcode, body, node=inode)
        assert refused.value.errno == number


@on_kernel(options=FuseOptions(writeback=True), settings=MountOptions("p", writeback=True))
async def test_seek_data_is_unsupported_with_writeback(kernel):
    await kernel.init()
    inode, handle = await kernel.create(b"f")
    with pytest.raises(OSError) as refused:
        await kernel.request(Op.LSEEK, (handle, 0, os.SEEK_DATA), node=inode)
    assert refused.value.errno == errno.ENOSYS


@on_kernel()
async def test_ioctl_is_enotty(kernel):
    await kernel.init()
    inode, handle = await kernel.create(b"f")
    for node, command in ((inode, 0x80086601), (1, 0x801C581F)):  # FS_IOC_GETFLAGS, FS_IOC_FSGETXATTR
        with pytest.raises(OSError) as refused:
            await kernel.request(Op.IOCTL, (handle, 0, command, 0, 0, 8), node=node)
        assert refused.value.errno == errno.ENOTTY


@on_kernel()
async def test_umask_is_applied_by_the_memory_fake(kernel):
    await kernel.init()
    inode, _ = await kernel.create(b"f")
    made = replies.read("entry", await kernel.request(Op.MKDIR, (0o777, 0o027), names=(b"d",)))
    node = replies.read("entry", await kernel.request(Op.MKNOD, (0o100666, 0, 0o077), names=(b"n",)))
    assert (made.mode & 0o777, node.mode & 0o777) == (0o750, 0o600)
    assert replies.read("attr", await kernel.request(Op.GETATTR, (0, 0), node=inode)).mode & 0o777 == 0o644


@on_kernel()
async def test_statx_without_birth_time_says_so(kernel):
    await kernel.init()
    inode, _ = await kernel.create(b"f")
    found = replies.read("statx", await kernel.request(Op.STATX, (0, 0, 0, 0xFFF), node=inode))
    assert found.mask == replies.STATX_BASIC and found.ino == inode and found.btime == 0
    reply = replies.statx(2, kernel.engine.ops.vfs.nodes[inode].attr, (1, 0), 5 * 10**9 + 7)
    found = replies.read("statx", replies.parse(reply)[2])
    assert (found.mask, found.btime, found.btimensec) == (replies.STATX_BASIC | replies.STATX_BTIME, 5, 7)


@pytest.mark.parametrize("offered", [ALL, ALL & ~Init.SETXATTR_EXT, ALL & ~Init.POSIX_ACL])
def test_acls_need_a_kernel_that_enforces_them(offered):
    @on_kernel()
    async def test(kernel):
        asked = []

        async def setxattr(inode, name, value, flags, caller):
            asked.append((name, value, flags))

        kernel.engine.ops.vfs.setxattr = setxattr
        said = await kernel.init(flags=offered)
        assert bool(said.flags & Init.POSIX_ACL) == bool(offered & Init.POSIX_ACL)
        inode, _ = await kernel.create(b"f")
        name = b"system.posix_acl_access"
        for mark in (0, 1):
            words = (4, 0, mark, 0) if offered & Init.SETXATTR_EXT else (4, 0)
            asking = kernel.request(Op.SETXATTR, words, node=inode, names=(name,), payload=b"list")
            if offered & Init.POSIX_ACL:
                await asking
            else:
                with pytest.raises(OSError) as refused:
                    await asking
                assert refused.value.errno == errno.EOPNOTSUPP
        # the caller is root: without the mark no bit is cleared
        killed = 4 if offered & Init.SETXATTR_EXT else 0
        assert asked == ([(name, b"list", 0), (name, b"list", killed)] if offered & Init.POSIX_ACL else [])
        with pytest.raises(OSError) as absent:
            await kernel.request(Op.GETXATTR, (100,), node=inode, names=(name,))
        assert absent.value.errno == (errno.ENODATA if offered & Init.POSIX_ACL else errno.EOPNOTSUPP)

    test()


@on_kernel(settings=MountOptions("p", acl=False))
async def test_mount_without_acls_does_not_negotiate_them(kernel):
    assert not (await kernel.init()).flags & Init.POSIX_ACL
    inode, _ = await kernel.create(b"f")
    for opcode, words in ((Op.GETXATTR, (100,)), (Op.REMOVEXATTR, ())):
        with pytest.raises(OSError) as refused:
            await kernel.request(opcode, words, node=inode, names=(b"system.posix_acl_access",))
        assert refused.value.errno == errno.EOPNOTSUPP


@on_kernel()
async def test_unknown_requests_are_enosys_and_forgets_get_no_reply(kernel):
    await kernel.init()
    for opcode in (Op.BMAP, Op.POLL, Op.SETUPMAPPING, 63, 99, 4096):
        with pytest.raises(OSError) as refused:
            body = tuple([0] * len(FORMS[opcode].body._fields)) if opcode in FORMS else ()
            await kernel.request(opcode, body, names=(b"n",) * FORMS[opcode].names if opcode in FORMS else ())
        assert refused.value.errno == errno.ENOSYS
    kernel.send(Op.FORGET, (3,), node=9)
    kernel.send(Op.BATCH_FORGET, (2,), payload=[(9, 1), (10, 1)])
    kernel.send(Op.INTERRUPT, (12345,))
    await kernel.expect_no_reply()
    assert await kernel.request(Op.DESTROY) == b""


@on_kernel()
async def test_malformed_request_is_refused(kernel):
    await kernel.init()
    for opcode in (Op.READ, Op.LOOKUP, Op.WRITE, Op.RENAME2, Op.CREATE):
        kernel.ours.send(requests.HEADER.pack(44, opcode, 777, 1, 0, 0, 0, 0, 0) + b"xxxx")
        assert await kernel.receive() == (777, -errno.EINVAL, b"")
    for raw in (b"", b"x", b"\xff" * 39, requests.HEADER.pack(44, Op.FORGET, 0, 1, 0, 0, 0, 0, 0) + b"xxxx"):
        if raw:
            kernel.ours.send(raw)
    await kernel.expect_no_reply()


@on_kernel()
async def test_unknown_handle_is_an_error(kernel):
    await kernel.init()
    for opcode, body in (
        (Op.READ, (99, 0, 10, 0, 0, 0)),
        (Op.RELEASE, (99, 0, 0, 0)),
        (Op.READDIR, (99, 0, 4096, 0, 0, 0)),
    ):
        with pytest.raises(OSError) as refused:
            await kernel.request(opcode, body)
        assert refused.value.errno == errno.EIO
    await kernel.expect_no_reply()


@on_kernel(SlowVfs)
async def test_waiting_requests_do_not_block_others(kernel):
    await kernel.init()
    vfs = kernel.engine.ops.vfs
    inode, handle = await kernel.create(b"f")
    asked = [kernel.send(Op.READ, (handle, 0, 10, 0, 0, 0), node=inode) for _ in range(20)]
    await kernel.expect_no_reply()
    assert vfs.waiting == 20
    vfs.go.set()
    assert sorted([(await kernel.receive())[0] for _ in asked]) == asked
    assert not kernel.engine.requests.work


class GatheringVfs(SlowVfs):
    """Counts the reads that were pending when they were sent."""

    def __init__(self):
        super().__init__()
        self.sent = []
        self.held = 0

    def send_reads(self):
        if self.waiting > self.held:
            self.sent.append(self.waiting - self.held)
        self.held = self.waiting


@on_kernel(GatheringVfs)
async def test_queued_reads_are_sent_together(kernel):
    await kernel.init()
    vfs = kernel.engine.ops.vfs
    inode, handle = await kernel.create(b"f")
    for _ in range(16):
        kernel.send(Op.READ, (handle, 0, 10, 0, 0, 0), node=inode)
    await kernel.expect_no_reply()
    assert vfs.sent == [16]
    vfs.go.set()
    for _ in range(16):
        await kernel.receive()


@on_kernel(SlowVfs)
async def test_number_of_requests_under_way_is_limited(kernel):
    await kernel.init()
    vfs = kernel.engine.ops.vfs
    inode, handle = await kernel.create(b"f")
    sent = 0
    for _ in range(IN_WORK_MAX + 50):
        while True:
            try:
                kernel.send(Op.READ, (handle, 0, 10, 0, 0, 0), node=inode)
                sent += 1
                break
            except BlockingIOError:
                if vfs.waiting >= IN_WORK_MAX:
                    break
                await asyncio.sleep(0)
    for _ in range(50):
        await asyncio.sleep(0)
    assert vfs.waiting == IN_WORK_MAX
    vfs.go.set()
    for _ in range(sent):
        await kernel.receive()
    await kernel.expect_no_reply()


def sleeping_process():
    return subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])


@on_kernel(SlowVfs)
async def test_interrupted_call_ends_only_for_a_dying_caller(kernel):
    await kernel.init()
    inode, handle = await kernel.create(b"f")
    child = sleeping_process()
    asked = kernel.send(Op.READ, (handle, 0, 10, 0, 0, 0), node=inode, pid=child.pid)
    kernel.send(Op.INTERRUPT, (asked,))
    await kernel.expect_no_reply()
    child.kill()
    child.wait()
    assert (await kernel.receive())[:2] == (
        asked,
        -errno.EINTR,
    )  # the kernel notifies once; the engine must check again
    assert not kernel.engine.requests.work and not kernel.engine.requests.interrupted
    await kernel.expect_no_reply()


def test_process_with_a_fatal_signal_is_dying():
    assert not is_dying(os.getpid())
    child = sleeping_process()
    assert not is_dying(child.pid)
    child.kill()
    child.wait()
    assert is_dying(child.pid)


@on_kernel(SlowVfs)
async def test_stop_waits_for_requests_under_way(kernel):
    await kernel.init()
    inode, handle = await kernel.create(b"f")
    asked = kernel.send(Op.READ, (handle, 0, 10, 0, 0, 0), node=inode)
    await kernel.expect_no_reply()
    kernel.engine.stop()
    await asyncio.sleep(0.01)
    assert not kernel.serving.done()
    kernel.engine.ops.vfs.go.set()
    assert (await kernel.receive())[0] == asked
    await asyncio.wait_for(kernel.serving, 120)


class SubmittingVfs(MemoryVfs):
    """Submits operations as client/vfs does: each waits until the test completes it."""

    def __init__(self):
        super().__init__()
        self.begun = []

    def _begin(self, unique, done, given_up):
        one = SimpleNamespace(
            unique=unique, done=done, cancel=lambda: given_up(asyncio.CancelledError()) or True
        )
        self.begun.append(one)
        return one

    def begin_create(self, parent, name, mode, flags, caller, unique, making):
        def done():
            try:
                self.create(parent, name, mode, flags, caller).send(None)
            except StopIteration as end:
                attr, handle = end.value
                making.made(attr)
                assert not is_updated_before_reply(making)
                making.opened(handle)
            except errors.NvpoolError as error:
                making.failed(error)

        return self._begin(unique, done, making.failed)

    def begin_unlink(self, parent, name, caller, unique, on_end):
        return self._begin(unique, lambda: on_end(None, None), lambda error: on_end(None, error))

    def begin_flush(self, handle, on_end):
        if not handle.flags & os.O_ACCMODE:
            return True
        return self._begin(0, lambda: on_end(None, None), lambda error: on_end(None, error))


def is_updated_before_reply(making) -> bool:
    """Whether the state was updated before the kernel got the reply."""
    return making.handle in making.files.by_handle


@on_kernel(SubmittingVfs)
async def test_submitted_create_replies_before_bookkeeping(kernel):
    await kernel.init()
    vfs, ops = kernel.engine.ops.vfs, kernel.engine.ops
    asked = kernel.send(Op.CREATE, (os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o100644, 0o22, 0), names=(b"f",))
    await kernel.expect_no_reply()
    assert vfs.begun[0].unique == asked and len(kernel.engine.requests.work) == 1
    vfs.begun.pop().done()
    heard, error, answer = await kernel.receive()
    made = replies.read("create", answer)
    assert (
        (heard, error) == (asked, 0)
        and made.open_flags == 0
        and ops.files.by_handle[made.fh].inode == made.nodeid
    )
    assert (
        not kernel.engine.requests.work
        and made.nodeid in ops.cached_names.sent_changes
        and ops.cached_pages.seen[made.nodeid][1]
    )
    with pytest.raises(OSError) as refused:
        await kernel.request(Op.GETXATTR, (0,), node=made.nodeid, names=(b"security.capability",))
    assert refused.value.errno == errno.ENODATA
    assert ops.published.is_barred(made.nodeid)

    again = kernel.send(Op.CREATE, (os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o100644, 0o22, 0), names=(b"f",))
    await kernel.expect_no_reply()
    vfs.begun.pop().done()
    assert (await kernel.receive())[:2] == (again, -errno.EEXIST)

    for opcode, body, names in ((Op.UNLINK, (), (b"f",)), (Op.FLUSH, (made.fh, 0, 0), ())):
        asked = kernel.send(opcode, body, names=names)
        await kernel.expect_no_reply()
        vfs.begun.pop().done()
        assert (await kernel.receive())[:2] == (asked, 0)
    await kernel.request(Op.RELEASE, (made.fh, 0, 0, 0))
    assert (
        not ops.files.by_handle
        and not ops.published.is_barred(made.nodeid)
        and not kernel.engine.requests.work
    )


class TwoStepVfs(SubmittingVfs):
    """The file needs one further request before it can be opened."""

    asked = 0

    def begin_create(self, parent, name, mode, flags, caller, unique, making):
        begun = self._begin(
            unique, lambda: making.go_on(self._open(parent, name, mode, flags, caller)), making.failed
        )
        begun.leave = lambda: None
        return begun

    async def _open(self, *arguments):
        await asyncio.sleep(0)
        self.asked = asking()
        return await self.create(*arguments)


@on_kernel(TwoStepVfs)
async def test_second_step_of_a_create_belongs_to_its_request(kernel):
    await kernel.init()
    vfs = kernel.engine.ops.vfs
    asked = kernel.send(Op.CREATE, (os.O_WRONLY | os.O_CREAT, 0o100644, 0o22, 0), names=(b"f",))
    await kernel.expect_no_reply()
    vfs.begun.pop().done()
    assert (await kernel.receive())[:2] == (asked, 0)
    assert vfs.asked == asked and not kernel.engine.requests.work


@on_kernel(SubmittingVfs)
async def test_dying_caller_of_a_submitted_request_is_answered(kernel):
    await kernel.init()
    vfs = kernel.engine.ops.vfs
    flags = os.O_RDONLY | os.O_CREAT | os.O_EXCL
    asked = kernel.send(Op.CREATE, (flags, 0o100644, 0o22, 0), names=(b"f",))
    await kernel.expect_no_reply()
    vfs.begun.pop().done()
    made = replies.read("create", (await kernel.receive())[2])
    assert made.open_flags == Opening.NOFLUSH
    child = sleeping_process()
    asked = kernel.send(Op.UNLINK, names=(b"f",), pid=child.pid)
    kernel.send(Op.INTERRUPT, (asked,))
    await kernel.expect_no_reply()
    child.kill()
    child.wait()
    assert (await kernel.receive())[:2] == (asked, -errno.EINTR)
    assert not kernel.engine.requests.work
    await kernel.request(Op.RELEASE, (made.fh, 0, 0, 0))
    await kernel.expect_no_reply()


@on_kernel()
async def test_releases_wait_behind_other_requests(kernel):
    await kernel.init()
    handles = [(await kernel.create(b"%d" % number)) for number in range(4)]
    inode, handle = handles.pop()
    asked = [kernel.send(Op.RELEASE, (handle, 0, 0, 0)) for _, handle in handles]
    waited_for = kernel.send(Op.STATFS)
    assert [(await kernel.receive())[:2] for _ in range(4)] == [
        (unique, 0) for unique in (waited_for, *asked)
    ]
    assert list(kernel.engine.ops.files.by_handle) == [handle]
    await kernel.request(Op.SETLK, (handle, 1, 0, (1 << 63) - 1, fcntl.F_WRLCK, os.getpid(), 1), node=inode)
    again = replies.read("open", await kernel.request(Op.OPEN, (os.O_RDWR, 0), node=inode)).fh
    released = kernel.send(Op.RELEASE, (handle, 0, 0, 0))
    lock = (again, 2, 0, (1 << 63) - 1, fcntl.F_WRLCK, os.getpid(), 1)
    locked = kernel.send(Op.SETLK, lock, node=inode)  # after the reply to the close its locks are gone
    assert [(await kernel.receive())[:2] for _ in range(2)] == [(released, 0), (locked, 0)]
    await kernel.request(Op.RELEASE, (again, 0, 0, 0))
    assert not kernel.engine.ops.files.by_handle and not kernel.engine.requests.late
    assert sum(kernel.engine.requests.spent.times[Op.RELEASE].counts) == 5


class BrokenVfs(MemoryVfs):
    async def statfs(self, node):
        return None

    async def readlink(self, inode):
        await asyncio.sleep(0)
        raise RuntimeError("a bug")


@on_kernel(BrokenVfs)
async def test_bug_in_the_vfs_is_eio_for_one_caller(kernel):
    await kernel.init()
    for opcode in (Op.STATFS, Op.READLINK):
        with pytest.raises(OSError) as refused:
            await kernel.request(opcode)
        assert refused.value.errno == errno.EIO
    assert await kernel.request(Op.GETATTR, (0, 0))


class TimedVfs(MemoryVfs):
    """Uses calls that need a current task."""

    async def readlink(self, inode):
        try:
            async with asyncio.timeout(0.01):
                await asyncio.Event().wait()
        except TimeoutError:
            async with asyncio.TaskGroup() as group:
                task = group.create_task(asyncio.sleep(0, b"in time"))
            return task.result()


@on_kernel(TimedVfs)
async def test_request_may_use_deadlines_and_tasks(kernel):
    await kernel.init()
    assert [await kernel.request(Op.READLINK) for _ in range(3)] == [b"in time"] * 3


@pytest.mark.parametrize(
    ("release", "name"),
    [("5.4.0-1", "kernel"), ("6.18.44", "kernel"), ("4.19.0", "pyfuse3"), ("odd", "pyfuse3")],
)
def test_auto_selects_the_direct_engine_on_new_kernels(monkeypatch, tmp_path, release, name):
    monkeypatch.setattr(os, "uname", lambda: os.uname_result(("Linux", "n", release, "v", "m")))
    assert make_engine("auto", FuseOps(MemoryVfs()), tmp_path, MountOptions("p")).name == name
    assert kernel_version() == (
        (0, 0) if release == "odd" else tuple(int(word) for word in release.split(".")[:2])
    )
    assert make_engine("pyfuse3", FuseOps(MemoryVfs()), tmp_path, MountOptions("p")).name == "pyfuse3"


def test_request_pages_are_those_of_the_running_kernel():
    assert 1 <= kernel_connection.max_pages_limit() <= kernel_connection.REQUEST_PAGES_MAX


def test_sigkill_is_the_signal_that_is_checked():
    assert 1 << signal.SIGKILL - 1 == SIGKILL_BIT
