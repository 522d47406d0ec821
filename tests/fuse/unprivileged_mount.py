"""Mounts memory as `nobody` through fusermount3, uses it, unmounts.

test_mounting.py runs this program as root, in its own mount namespace.

    python as_another_user.py DIRECTORY      an empty one that `nobody` may write
"""

import asyncio
import json
import os
import subprocess
import sys
from pathlib import Path

ANONYMOUS_ID = 65534


def device_for_all(place):
    """Provide a /dev/fuse that every user may open, as distributions do; visible in this mount namespace only."""
    subprocess.run(["mount", "-t", "tmpfs", "none", place], check=True)
    os.mknod(place / "fuse", 0o020666, os.makedev(10, 229))
    os.chmod(place / "fuse", 0o666)
    subprocess.run(["mount", "--bind", place / "fuse", "/dev/fuse"], check=True)


def use(place):
    (place / "f").write_bytes(b"written by nobody")
    assert (place / "f").read_bytes() == b"written by nobody"
    assert os.stat(place / "f").st_uid == ANONYMOUS_ID
    assert os.listdir(place) == ["f"]


async def main(place):
    from nvpool.core.errors import AccessDenied
    from nvpool.fuse.kernel.connection import KernelEngine
    from nvpool.fuse.mount_point import MountOptions, mount_at
    from nvpool.fuse.ops.operations import FuseOps
    from nvpool.testing.fakes.vfs import MemoryVfs

    vfs = MemoryVfs()
    vfs.nodes[1].attr.mode |= 0o777

    def engine(**options):
        return KernelEngine(FuseOps(vfs), place, MountOptions("p", **options))

    os.setgroups([])
    os.setresgid(ANONYMOUS_ID, ANONYMOUS_ID, ANONYMOUS_ID)
    os.setresuid(ANONYMOUS_ID, ANONYMOUS_ID, ANONYMOUS_ID)
    try:
        engine(allow_other=True).mount()
        refused = ""
    except AccessDenied as error:
        refused = str(error)
    mounted = engine(allow_other=False)
    found = mounted.mount()
    serving = asyncio.ensure_future(mounted.serve())
    try:
        await asyncio.to_thread(use, place)
        mounted.stop()
        await serving
    finally:
        mounted.close()
    print(
        json.dumps(
            {
                "type": found.type,
                "source": found.source,
                "refused": refused,
                "left": mount_at(place) is not None,
            }
        )
    )


if __name__ == "__main__":
    directory = Path(sys.argv[1])
    (directory / "dev").mkdir()
    (directory / "m").mkdir()
    os.chown(directory / "m", ANONYMOUS_ID, ANONYMOUS_ID)
    device_for_all(directory / "dev")
    import array  # noqa: F401 later imports may lie where `nobody` may not read
    import concurrent.futures.thread  # noqa: F401

    import nvpool.fuse.kernel.connection
    import nvpool.testing.fakes.vfs  # noqa: F401

    asyncio.run(main(directory / "m"))
