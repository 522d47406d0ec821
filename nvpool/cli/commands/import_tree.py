"""The command `nvpool import`: copy a local tree into a pool. `nvpool export` shares its options."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import click

from nvpool.cli.output import json_option
from nvpool.cli.pool_path import PlaceType, PoolPath

parallel_option = click.option(
    "--parallel", type=click.IntRange(1, 512), default=32, show_default=True, help="Files copied at a time."
)
verify_option = click.option(
    "--verify/--no-verify",
    default=True,
    show_default=True,
    help="Read back what was written and compare checksums.",
)
exclude_option = click.option(
    "--exclude",
    multiple=True,
    metavar="PATTERN",
    help="Skip files and directories with this name, like '*.tmp'; may be repeated.",
)


@click.command(
    "import",
    epilog="""
Files that exist already with the size and modification time of their source are skipped. A file gets its time last, after
its data is synced and compared. So after an interruption the same command continues. --compare does not trust times: use it
for files whose contents are missing after `nvpool load`.

exit codes: 0 all files are copied; 1 some files failed (they are named); 3 the pool did not answer: repeat later

\b
examples:
  nvpool import /data/imagenet /srv/pool:/imagenet
  nvpool import ./model.safetensors 10.0.0.1:17512:/models/ --json
""",
)
@click.argument("source", metavar="SRC", type=click.Path(exists=True))
@click.argument("place", metavar="POOL:/path", type=PlaceType())
@parallel_option
@verify_option
@click.option(
    "--compare",
    is_flag=True,
    help="Also read files with the size and time of their source, and rewrite those that differ.",
)
@exclude_option
@json_option
def import_tree(source: str, place: PoolPath, as_json: bool, **options: Any) -> int:
    """Copy the tree or file SRC into a pool.

    The contents of the directory SRC become the contents of /path, which is created if it is missing. Preserves modes, owners
    (as root), times, symbolic and hard links, holes, extended attributes and special files.
    """
    from nvpool.sdk.transfer.import_tree import import_tree

    return transfer(
        "import", place, as_json, options, lambda vfs, **more: import_tree(vfs, source, place.path, **more)
    )


def transfer(
    verb: str, place: PoolPath, as_json: bool, options: dict[str, Any], move: Callable[..., Awaitable[None]]
) -> int:
    """Run `move` in a session of the pool, show its progress and result, and return the exit code."""
    from nvpool.cli.output import print_json, say
    from nvpool.cli.pool_path import session
    from nvpool.cli.progress import ProgressSample, shown
    from nvpool.core.clock import SYSTEM_CLOCK
    from nvpool.core.units import format_bytes
    from nvpool.sdk.transfer.progress import TransferOptions, TransferProgress

    progress = TransferProgress()
    transfer_options = TransferOptions()._replace(**options)

    def look() -> ProgressSample:
        return ProgressSample(
            progress.bytes, progress.bytes_total if progress.counted else None, f"{progress.files:,} files"
        )

    async def run() -> None:
        async with session(place.pool, verb) as client:
            await shown(
                verb, move(client.vfs, progress=progress, options=transfer_options), look, quiet=as_json
            )

    began_s = SYSTEM_CLOCK.boottime_s()
    try:
        asyncio.run(run())
    except (KeyboardInterrupt, Exception):
        if progress.files and not as_json:
            say(
                f"stopped after {progress.files:,} files ({format_bytes(progress.bytes)}); "
                "the same command goes on from there"
            )
        raise
    seconds = SYSTEM_CLOCK.boottime_s() - began_s
    if as_json:
        print_json(progress.summary() | {"seconds": seconds})
    else:
        moved = progress.bytes - progress.skipped_bytes
        click.echo(
            f"{progress.files:,} files ({format_bytes(progress.bytes)}), {progress.directories:,} directories, "
            f"{progress.symlinks:,} symbolic and {progress.hard_links:,} hard links in {seconds:.1f} s"
            + (f" ({format_bytes(moved / seconds)}/s)" if moved else "")
        )
        if progress.skipped_files:
            say(
                f"{progress.skipped_files:,} of the files ({format_bytes(progress.skipped_bytes)}) were there already"
            )
        if progress.attributes_not_kept:
            say(f"note: {progress.attributes_not_kept:,} extended attributes could not be kept")
        for failure in progress.failures[:20]:
            say(f"failed: {failure.path}: {failure.text}")
        if progress.failed > 20:
            say(f"failed: and {progress.failed - 20:,} more; --json lists them")
    return 1 if progress.failed else 0
