"""The command `nvpool bench`: measure a pool beside a mount of it and a local drive."""

from __future__ import annotations

import asyncio
import os
from typing import TYPE_CHECKING

import click

from nvpool.cli.output import ByteSize, Number, json_option, pool_argument, print_json, print_table, say

if TYPE_CHECKING:
    from nvpool.sdk.bench.random_reads import Measured


@click.command(
    epilog="""
Each load runs in up to three places: through the SDK, through a mount of the pool on this machine if it has
one, and in a directory of a local drive. Compare the three figures. One process does all the work, so
several clients together reach more. Reads return data that was just written, from memory, except where a
line says O_DIRECT: these read from the drive itself on the local drive, and bypass the kernel's cache on a
mount. "In parallel" means 16 threads; through the SDK, two calls of read_many with 64 reads each, whose
latency is that of the call.

\b
examples:
  nvpool bench /srv/pool
  nvpool bench 10.0.0.1:17512 --local /mnt/nvme0 --size 1G --seconds 5 --json
"""
)
@pool_argument
@click.option(
    "--local",
    "local_directory",
    type=click.Path(exists=True, file_okay=False),
    help="Directory on the local drive to compare with; default: the pool's directory, else the current one.",
)
@click.option(
    "--mount",
    "mountpoint",
    type=click.Path(exists=True, file_okay=False),
    help="Mount point of the pool; default: the first in its status.",
)
@click.option("--size", type=ByteSize(), default="128M", show_default=True, help="Size of the test file.")
@click.option(
    "--seconds", type=Number(0.1, 600), default=2.0, show_default=True, help="Duration of each random load."
)
@json_option
def bench(
    pool: str, local_directory: str | None, mountpoint: str | None, size: int, seconds: float, as_json: bool
) -> None:
    """Measure a pool and compare it with the local drive: throughput, median and 99th percentile latency.

    Creates directories .nvpool-bench-… and removes them again. Takes about half a minute.
    """
    from nvpool.cli.pool_connection import directory_of, status_of
    from nvpool.core.errors import Unavailable
    from nvpool.core.units import MIB
    from nvpool.sdk.bench import workload as bench_workload

    if mountpoint is None:
        try:
            seen = asyncio.run(status_of(pool))
            mountpoint = next(
                (
                    process["mountpoint"]
                    for process in seen["processes"]
                    if process["pid"] and process.get("mountpoint")
                ),
                None,
            )
        except Unavailable as error:
            say(f"note: no status, so no mount is measured: {error}")
    directory = directory_of(pool)
    local_directory = local_directory or (str(directory.path) if directory is not None else ".")
    size = max(16 * MIB, size // MIB * MIB)
    results: dict[str, dict[str, Measured]] = {load: {} for load in bench_workload.LOADS}

    def note(where: str, load: str, found: Measured) -> None:
        results[load][where] = found
        if not as_json:
            say(f"{where}: {load}: {_cell(load, found)}")

    async def through_sdk() -> None:
        from nvpool.cli.pool_path import session

        async with session(pool, "bench") as client:
            async for load, found in bench_workload.pool(client.vfs, size, seconds):
                note("sdk", load, found)

    asyncio.run(through_sdk())
    for where, place in (("mount", mountpoint), ("local", local_directory)):
        if place is not None and os.path.isdir(place):
            bench_workload.check_room(place, size)
            for load, found in bench_workload.local(place, size, seconds):
                note(where, load, found)
    places = [
        where for where in ("sdk", "mount", "local") if any(where in found for found in results.values())
    ]
    if as_json:
        print_json(
            [
                {
                    "load": load,
                    **{where: found[where]._asdict() | {"rate": found[where].rate} for where in found},
                }
                for load, found in results.items()
            ]
        )
        return
    print_table(
        ("load", *places),
        [(load, *(_cell(load, found.get(where)) for where in places)) for load, found in results.items()],
    )


def _cell(load: str, found: Measured | None) -> str:
    from nvpool.core.units import format_bytes

    if found is None:
        return ""
    rate = (
        f"{format_bytes(found.bytes_rate)}/s"
        if "1 MiB" in load or "128 KiB" in load
        else f"{found.rate:,.0f}/s"
    )
    return f"{rate}  {_time(found.p50_us)} / {_time(found.p99_us)}"


def _time(microseconds: float) -> str:
    return f"{microseconds:.3g} µs" if microseconds < 1000 else f"{microseconds / 1000:.3g} ms"
