"""Floor of the kernel's part: one file of constant bytes over FUSE, served by a loop of two system calls.

    python bench/fuse_bare.py MOUNTPOINT        shows `large` until unmounted or ended by a signal

A read costs the time of the kernel for request and reply, and about 1 µs of Python. Like nvpool's engine, the loop
polls for the next request for some 20 µs before it sleeps. Other requests get the replies that opening the file needs.
"""

from __future__ import annotations

import errno
import os
import select
import stat
import sys
from pathlib import Path

from nvpool.fuse.kernel.connection import SPIN_LOOKS
from nvpool.fuse.kernel.mount import attach
from nvpool.fuse.mount_point import MountOptions
from nvpool.fuse.protocol import replies, requests
from nvpool.fuse.protocol.constants import MINOR, PAGE, UNANSWERED, Init, Op
from nvpool.rpc.v1.meta_pb2 import Attr

NAME, FILE_BYTES, REQUEST_BYTES = b"large", 1 << 30, 1 << 20
NODES = {
    1: Attr(inode=1, mode=stat.S_IFDIR | 0o755, links=2),
    2: Attr(inode=2, mode=stat.S_IFREG | 0o644, links=1, size=FILE_BYTES),
}
KEEP = (3600, 0)


def answer(request: requests.FuseRequest) -> bytes:
    unique = request.unique
    if request.opcode == Op.INIT:
        flags = Init(requests.flags_of(request)) & (
            Init.ASYNC_READ | Init.ASYNC_DIO | Init.MAX_PAGES | Init.PARALLEL_DIROPS
        )
        return replies.init(
            unique,
            minor=min(request.body.minor, MINOR),
            max_readahead=REQUEST_BYTES,
            flags=flags,
            max_background=128,
            congestion_threshold=96,
            max_write=REQUEST_BYTES,
            max_pages=REQUEST_BYTES // PAGE,
        )
    if request.opcode == Op.LOOKUP:
        return (
            replies.entry(unique, NODES[2], KEEP, KEEP)
            if request.names[0] == NAME
            else replies.failed(unique, errno.ENOENT)
        )
    if request.opcode == Op.GETATTR:
        return replies.attributes(unique, NODES[request.node], KEEP)
    if request.opcode in (Op.OPEN, Op.OPENDIR):
        return replies.opened(unique, 1, 0)
    if request.opcode == Op.STATFS:
        return replies.space(unique, 1, 1, 1, 1, 1, PAGE, 255)
    if request.opcode in (Op.RELEASE, Op.RELEASEDIR, Op.FLUSH):
        return replies.done(unique)
    return replies.failed(unique, errno.ENOSYS)


def serve(descriptor: int) -> None:
    poll = select.poll()
    poll.register(descriptor, select.POLLIN)
    look, readv, writev = poll.poll, os.readv, os.writev
    buffer, content = bytearray(REQUEST_BYTES + PAGE), memoryview(bytes(REQUEST_BYTES))
    into = (buffer,)
    unpack, read_body = requests.HEADER.unpack_from, requests.FORMS[Op.READ].struct.unpack_from
    while True:
        try:
            count = readv(descriptor, into)
        except BlockingIOError:
            for _ in range(SPIN_LOOKS):
                if look(0):
                    break
            else:
                look()
            continue
        except OSError as error:
            if error.errno == errno.ENODEV:  # unmounted
                return
            if error.errno not in (errno.ENOENT, errno.EINTR):
                raise
            continue
        _, opcode, unique, *_ = unpack(buffer)
        if opcode == Op.READ:
            size = read_body(buffer, requests.HEADER_BYTES)[2]
            writev(descriptor, (replies.data(unique, size), content[:size]))
        elif opcode not in UNANSWERED:
            os.write(descriptor, answer(requests.decode(buffer, count)))


if __name__ == "__main__":
    mounted = attach(Path(sys.argv[1]).resolve(), MountOptions("bare"))
    print("ready", flush=True)
    serve(mounted)
