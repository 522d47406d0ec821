"""The floor under every mount: FUSE requests answered from memory by the same adapter and engine, without a pool.

    python bench/fuse_floor.py MOUNTPOINT        serves until unmounted or interrupted
"""

from __future__ import annotations

import asyncio
import signal
import sys
from pathlib import Path

import uvloop

from nvpool.fuse.ops import FuseOps
from nvpool.fuse.pyfuse3_engine import MountOptions, Pyfuse3Engine
from nvpool.testing.memory_vfs import MemoryVfs


async def serve(mount_point: Path) -> None:
    engine = Pyfuse3Engine(FuseOps(MemoryVfs()), mount_point, MountOptions("floor"), lambda: print("ready", flush=True))
    engine.mount()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, engine.stop)
    try:
        await engine.serve()
    finally:
        engine.close()


if __name__ == "__main__":
    uvloop.run(serve(Path(sys.argv[1]).resolve()))
