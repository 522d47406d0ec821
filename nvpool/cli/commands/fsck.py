"""The command `nvpool fsck`: check and repair a pool."""

from __future__ import annotations

import asyncio

import click

from nvpool.cli.output import EXIT_DAMAGED, json_option, pool_argument, print_json, print_table, say


@click.command(
    epilog="""
exit codes: 0 no problem, or all are repaired; 4 problems remain; 3 a daemon did not answer

\b
examples:
  nvpool fsck /srv/pool
  nvpool fsck /srv/pool --repair
  nvpool fsck 10.0.0.1:17512 --no-scrub --json
"""
)
@pool_argument
@click.option("--repair", is_flag=True, help="Repair what can be repaired.")
@click.option(
    "--scrub/--no-scrub", default=True, show_default=True, help="Read every block and compare its checksum."
)
@json_option
def fsck(pool: str, repair: bool, scrub: bool, as_json: bool) -> int:
    """Check a pool while it serves: the metadata, the chunks that belong to it, and the checksum of every block.

    With --repair and the directory of a node as POOL, chunks that belong to no file are removed too, and copies of a chunk
    that differ are made equal to the newest. Both need the pool's key, which that directory has. A bad block of the only
    replica cannot be repaired: the command names the file; restore it from a backup.
    """
    from nvpool.cli.pool_connection import directory_of
    from nvpool.cli.pool_path import session
    from nvpool.cli.progress import ProgressSample, shown
    from nvpool.sdk.fsck.check import check
    from nvpool.sdk.fsck.report import FsckReport

    directory = directory_of(pool)
    secret = directory.grant_key.read_bytes() if repair and directory is not None else None
    checkup = FsckReport()

    def look() -> ProgressSample:
        if checkup.stage == "blocks":
            return ProgressSample(checkup.blocks << 12, checkup.blocks_total << 12, "blocks")
        return ProgressSample((checkup.records + checkup.chunks) << 12, None, checkup.stage)

    async def run() -> None:
        async with session(pool, "fsck") as client:
            await shown(
                "fsck",
                check(client, checkup, repair=repair, scrub=scrub, grant_secret=secret),
                look,
                quiet=as_json,
            )

    asyncio.run(run())
    if as_json:
        print_json(checkup.summary())
    else:
        for reason in checkup.restarts:
            say(
                f"note: a shard got another primary, or left the pool ({reason}); its metadata was checked from the beginning"
            )
        if checkup.problems:
            print_table(("kind", "where", "what", "repaired"), [problem[:4] for problem in checkup.problems])
        click.echo(
            f"{checkup.records:,} records, {checkup.chunks:,} chunks, {checkup.blocks:,} blocks checked: "
            + (
                f"{checkup.found:,} problems, {checkup.unrepaired:,} of them left"
                if checkup.found
                else "no problem"
            )
        )
        if checkup.unrepaired and not repair:
            say("--repair mends what can be mended")
    return EXIT_DAMAGED if checkup.unrepaired else 0
