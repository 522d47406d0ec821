"""Floor of every mount: FUSE requests answered from memory by the same adapter and engine, without a pool.

python bench/fuse_floor.py [--engine kernel|pyfuse3] MOUNTPOINT        serves until unmounted or interrupted
"""

from __future__ import annotations

import argparse
import asyncio
import signal
from pathlib import Path

import uvloop

from nvpool.fuse.engines import ENGINES, make_engine
from nvpool.fuse.mount_point import MountOptions
from nvpool.fuse.ops.operations import FuseOps
from nvpool.runtime.cpu_latency import CpuLatencyRequest
from nvpool.testing.fakes.vfs import MemoryVfs


async def serve(name: str, mount_point: Path) -> None:
    awake = CpuLatencyRequest(True)
    engine = make_engine(
        name,
        FuseOps(MemoryVfs()),
        mount_point,
        MountOptions("floor"),
        lambda: print("ready", flush=True),
        awake.touch,
    )
    engine.mount()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, engine.stop)
    try:
        await engine.serve()
    finally:
        engine.close()
        awake.close()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--engine", choices=ENGINES, default="auto")
    parser.add_argument("mount_point", type=Path)
    given = parser.parse_args()
    uvloop.run(serve(given.engine, given.mount_point.resolve()))
