"""The commands `nvpool scrub`: start, pause and stop the scrub of drives, and show its progress."""

from __future__ import annotations

import asyncio
from typing import Any

import click

from nvpool.cli.output import (
    EXIT_DAMAGED,
    EXIT_UNAVAILABLE,
    ago,
    json_option,
    pool_argument,
    print_json,
    print_table,
    say,
)
from nvpool.core.units import BLOCK_BYTES, format_bytes


@click.group(
    epilog="""\b
examples:
  nvpool scrub status /srv/pool
  nvpool scrub start /srv/pool --wait
  nvpool scrub start /srv/pool --drive 2
  nvpool scrub pause /srv/pool
"""
)
def scrub() -> None:
    """Read all stored data and verify its checksums.

    Each drive does this automatically once a week, slowly, while the pool is in use ([store] scrub_interval_s and
    scrub_bytes_s in node.toml). Bad blocks are repaired from another replica; `nvpool status` lists those without one.
    """


drive_option = click.option(
    "--drive", metavar="DRIVE", help="Only this drive, by number or path; default: all."
)
target_option = click.option("--target", type=click.IntRange(1), help="Only this target.")


@scrub.command(
    epilog="""\b
--json prints one object for each target: target, drive, node, path, state (idle, running, paused; null: it does not answer),
began_ms, blocks, blocks_total, bad, mended (of the round under way), seconds_left (-1: not known), next_ms (0: not by itself),
last_began_ms, last_ended_ms (0: never), last_blocks, last_bad, last_mended

\b
example: nvpool scrub status /srv/pool
"""
)
@pool_argument
@json_option
def status(pool: str, as_json: bool) -> None:
    """Show for each drive the progress of the current scrub, and the result of the last one."""
    found = _seen(pool)
    if as_json:
        print_json(found)
    else:
        _show(found)


def _seen(pool: str) -> list[dict[str, Any]]:
    from nvpool.cli.pool_connection import status_of

    return _of(asyncio.run(status_of(pool)))


def _of(seen: dict[str, Any]) -> list[dict[str, Any]]:
    return [
        {name: one[name] for name in ("target", "drive", "node", "path")}
        | (one.get("scrub") or {"state": None})
        for one in seen["processes"]
        if one["role"] == "store"
    ]


def _show(found: list[dict[str, Any]]) -> None:
    from nvpool.core.clock import SYSTEM_CLOCK

    now_ms = SYSTEM_CLOCK.wall_ns() // 1_000_000
    columns = (
        "drive",
        "node",
        "target",
        "state",
        "done",
        "bad",
        "mended",
        "left",
        "last ended",
        "last bad",
        "mended",
        "next",
    )
    print_table(
        columns,
        [
            (one["drive"], one["node"], one["target"], one["state"] or "does not answer", *_line(one, now_ms))
            for one in found
        ],
    )


def _line(one: dict[str, Any], now_ms: int) -> tuple[str | int | None, ...]:
    if one["state"] is None:
        return (None,) * 8
    under_way = one["began_ms"] > 0
    done = f"{format_bytes(one['blocks'] * BLOCK_BYTES)} of {format_bytes(one['blocks_total'] * BLOCK_BYTES)}"
    left = f"{one['seconds_left']:.0f} s" if one["seconds_left"] >= 0 and one["state"] == "running" else None
    ended = one["last_ended_ms"]
    return (
        done if under_way else None,
        one["bad"] if under_way else None,
        one["mended"] if under_way else None,
        left,
        f"{ago(ended, now_ms)} ago" if ended else None,
        one["last_bad"] if ended else None,
        one["last_mended"] if ended else None,
        f"in {ago(now_ms, one['next_ms'])}" if one["next_ms"] > now_ms else None,
    )


@scrub.command(
    epilog="""\b
exit codes: 3 if a target did not receive the command; with --wait 4 if bad blocks were found that are not repaired
--json prints targets (that received it) and silent (number: reason); with --wait also scrub, as nvpool scrub status --json

\b
examples:
  nvpool scrub start /srv/pool
  nvpool scrub start /srv/pool --drive /mnt/nvme2 --wait
"""
)
@pool_argument
@drive_option
@target_option
@click.option("--wait", is_flag=True, help="Wait until the scrub has ended, and show the progress.")
@json_option
def start(pool: str, drive: str | None, target: int | None, wait: bool, as_json: bool) -> int:
    """Start a scrub now, unless one is running; resume a paused one."""
    from nvpool.cli.commands.drive import note_on_interrupt

    result = _order(pool, "start", drive, target, as_json, quiet=wait)
    if not wait:
        return _exit_code(result)
    found: list[dict[str, Any]] = []
    if result["targets"]:
        which = f" --drive {drive}" if drive else f" --target {target}" if target else ""
        with note_on_interrupt(
            "scrubbing", f"nvpool scrub status {pool}", f"nvpool scrub stop {pool}{which}"
        ):
            found = asyncio.run(wait_for_scrub(pool, frozenset(result["targets"]), as_json))
    if as_json:
        print_json(result | {"scrub": found})
    elif found:
        _show(found)
    else:
        click.echo(_NO_TARGET)
    is_damaged = any(one["last_bad"] > one["last_mended"] for one in found)
    return _exit_code(result) or (EXIT_DAMAGED if is_damaged else 0)


_ORDER_TEXT = {
    "start": "scrubbing started on",
    "pause": "scrubbing is paused on",
    "resume": "scrubbing continues on",
    "stop": "scrubbing is stopped on",
}
_NO_TARGET = "no target received the command"


def _order(
    pool: str, order: str, drive: str | None, target: int | None, as_json: bool, quiet: bool = False
) -> dict[str, Any]:
    """Send the order to the targets, and return the reply, which is printed unless `quiet`."""
    from nvpool.cli.commands.drive import drive_name
    from nvpool.cli.pool_connection import change

    arguments = {"order": order, "drive": drive_name(drive) if drive else "", "target": target or 0}
    result = asyncio.run(change(pool, "scrub", arguments))
    if not quiet and as_json:
        print_json(result)
    elif not quiet and result["targets"]:
        targets = sorted(result["targets"])
        click.echo(
            f"{_ORDER_TEXT[order]} target{'' if len(targets) == 1 else 's'} {', '.join(map(str, targets))}"
        )
        say(f"look with: nvpool scrub status {pool}")
    elif not quiet:
        click.echo(_NO_TARGET)
    for number, reason in result["silent"].items():
        say(f"target {number} did not receive the command: {reason}")
    if result["silent"]:
        say(f"see why with: nvpool status {pool}   and repeat the command when these targets answer")
    return result


def _exit_code(result: dict[str, Any]) -> int:
    return EXIT_UNAVAILABLE if result["silent"] else 0


async def wait_for_scrub(pool: str, targets: frozenset[int], quiet: bool) -> list[dict[str, Any]]:
    """Wait until none of the targets scrubs any more; return their states. The pool may be away meanwhile."""
    from nvpool.cli.pool_connection import statuses
    from nvpool.cli.progress import ProgressSample, shown

    found: list[dict[str, Any]] = []

    async def watch() -> list[dict[str, Any]]:  # type: ignore[return]  # statuses() does not end by itself
        nonlocal found
        async for seen in statuses(pool):
            found = [one for one in _of(seen) if one["target"] in targets]
            if all(one["state"] == "idle" for one in found):
                return found

    def look() -> ProgressSample:
        under_way = [one for one in found if one["state"] in ("running", "paused")]
        left = max((one["seconds_left"] for one in under_way), default=-1.0)
        return ProgressSample(
            sum(one["blocks"] for one in under_way) * BLOCK_BYTES,
            sum(one["blocks_total"] for one in under_way) * BLOCK_BYTES,
            f"{left:.0f} s to go" if left >= 0 else "",
        )

    return await shown("scrubbing", watch(), look, quiet=quiet)


def _simple(order: str, text: str, example: str) -> None:
    @scrub.command(
        order,
        help=text,
        epilog=f"\b\nexit codes: 3 if a target did not receive the command\n\n\b\nexample: {example}",
    )
    @pool_argument
    @drive_option
    @target_option
    @json_option
    def command(pool: str, drive: str | None, target: int | None, as_json: bool) -> int:
        return _exit_code(_order(pool, order, drive, target, as_json))


_simple(
    "pause",
    "Pause scrubbing until resume or start. The pause survives restarts.",
    "nvpool scrub pause /srv/pool",
)
_simple("resume", "Resume scrubbing after a pause.", "nvpool scrub resume /srv/pool --drive 2")
_simple("stop", "Abort running scrubs. The next scrub starts when it is due.", "nvpool scrub stop /srv/pool")
