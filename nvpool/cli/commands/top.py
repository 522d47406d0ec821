"""The command `nvpool top`: show live I/O rates and latencies by client, volume or target."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import click

from nvpool.cli.output import Number, json_option, on_terminal, print_json, print_table, remember_pool, say
from nvpool.core.units import format_bytes

if TYPE_CHECKING:
    from nvpool.sdk.admin.io_stats import IoRates, Rates

COLUMNS = ("reads/s", "bytes/s", "latency", "direct/s", "bytes/s", "writes/s", "bytes/s", "latency")


@click.command(
    epilog="""\b
Rates are those of the last interval. Latency is the mean time from the arrival of a request at a store to its reply, without
the time in the network and the client (`nvpool mount --metrics` has that). "direct" are short-circuit reads: clients on the
target's own node read the drive without the store. Their number arrives some seconds late; their latency is not known. Stores
count only while `nvpool top` runs. A write counts at the first target of its chain, not at the replicas.

\b
--json prints an object for each look (with --once: one), a line each:
  interval_s, by, silent (targets that did not answer: their I/O is missing), rows: name, reads_s, read_bytes_s,
  read_latency_s, direct_reads_s, direct_bytes_s, writes_s, write_bytes_s, write_latency_s

\b
examples:
  nvpool top /srv/pool
  nvpool top /srv/pool --by volume --sort ops
  nvpool top 10.0.0.1:17512 --by target --interval 5
  nvpool top /srv/pool --once --json | jq -r '.rows[0].name'      the busiest client now
"""
)
@click.argument("pool", envvar="NVPOOL_POOL", required=False, callback=remember_pool)
@click.option(
    "--by",
    type=click.Choice(["client", "volume", "target"]),
    default="client",
    show_default=True,
    help="Group rows by this.",
)
@click.option(
    "--sort",
    type=click.Choice(["bytes", "ops"]),
    default="bytes",
    show_default=True,
    help="Sort order of rows.",
)
@click.option(
    "--interval",
    "interval_s",
    type=Number(0.2, 60),
    default=2.0,
    show_default=True,
    help="Seconds between two updates.",
)
@click.option("--limit", type=click.IntRange(1, 10_000), default=20, show_default=True, help="Rows shown.")
@click.option("--once", is_flag=True, help="Measure one interval, print it once, and exit.")
@json_option
def top(
    pool: str | None, by: str, sort: str, interval_s: float, limit: int, once: bool, as_json: bool
) -> None:
    """Show live read and write rates of a pool: by client, volume or target. Ctrl-C ends the display.

    POOL is the pool's directory, or HOST:PORT of a node; default: NVPOOL_POOL, else the current directory.
    """
    try:
        asyncio.run(_watch(pool or ".", by, sort, interval_s, limit, once, as_json))
    except KeyboardInterrupt:
        if once:
            raise  # without --once, Ctrl-C is the normal end


async def _watch(
    pool: str, by: Any, sort: str, interval_s: float, limit: int, once: bool, as_json: bool
) -> None:
    from nvpool.cli.pool_path import session
    from nvpool.sdk.admin.io_stats import UseWatch

    async with session(pool, "top") as client:
        watch = UseWatch(client, by)
        await watch.look(interval_s)
        shown = _Screen(by) if on_terminal() and not once and not as_json else None
        try:
            while True:
                await asyncio.sleep(interval_s)
                seen = await watch.look(interval_s)
                rows = (
                    sorted(seen.rates, key=lambda one: one.operations, reverse=True)
                    if sort == "ops"
                    else seen.rates
                )
                if as_json:
                    _print_object(seen, rows[:limit], by, once)
                elif shown is not None:
                    shown.show(seen, rows, limit)
                else:
                    for target in seen.silent:
                        say(f"target {target} does not answer: what goes on there is missing")
                    print_table((by, *COLUMNS), [_cells(row) for row in rows[:limit]])
                if once:
                    return
        finally:
            if shown is not None:
                shown.close()


def _print_object(seen: IoRates, rows: list[Rates], by: str, once: bool) -> None:
    import json

    snapshot = {
        "interval_s": round(seen.interval_s, 3),
        "by": by,
        "silent": seen.silent,
        "rows": [
            {
                "name": row.name,
                "reads_s": row.reads,
                "read_bytes_s": row.read_bytes,
                "read_latency_s": row.read_s,
                "direct_reads_s": row.direct_reads,
                "direct_bytes_s": row.direct_bytes,
                "writes_s": row.writes,
                "write_bytes_s": row.write_bytes,
                "write_latency_s": row.write_s,
            }
            for row in rows
        ],
    }
    if once:
        print_json(snapshot)
    else:
        click.echo(json.dumps(snapshot))


def _cells(row: Rates) -> tuple[str | None, ...]:
    return (
        row.name,
        _rate(row.reads),
        _bytes(row.read_bytes),
        _latency(row.read_s),
        _rate(row.direct_reads),
        _bytes(row.direct_bytes),
        _rate(row.writes),
        _bytes(row.write_bytes),
        _latency(row.write_s),
    )


def _rate(value: float) -> str | None:
    return None if not value else f"{value:,.0f}" if value >= 10 else f"{value:.1f}"


def _bytes(value: float) -> str | None:
    return format_bytes(round(value)) if value else None


def _latency(seconds: float) -> str | None:
    return (
        None
        if not seconds
        else f"{seconds * 1e6:.0f} µs"
        if seconds < 0.001
        else f"{seconds * 1e3:.2g} ms"
        if seconds < 1
        else f"{seconds:.1f} s"
    )


class _Screen:
    """Table on a terminal that updates in place."""

    def __init__(self, by: str) -> None:
        from rich.live import Live

        self._by = by
        self._live = Live(auto_refresh=False, screen=True)
        self._live.start()

    def show(self, seen: IoRates, rows: list[Rates], limit: int) -> None:
        from rich.table import Table
        from rich.text import Text

        title = f"{len(rows)} {self._by}s, the last {seen.interval_s:.1f} s; Ctrl-C ends this"
        if seen.silent:
            title += f"; no answer from target {', '.join(map(str, seen.silent))}"
        table = Table(title=Text(title), title_justify="left", box=None, header_style="bold", pad_edge=False)
        table.add_column(self._by, overflow="ellipsis", ratio=1, no_wrap=True)
        for column in COLUMNS:
            table.add_column(column, justify="right", no_wrap=True)
        height = max(1, self._live.console.height - 3)
        for row in rows[: min(limit, height)]:
            table.add_row(*[Text(cell or "-") for cell in _cells(row)])
        self._live.update(table, refresh=True)

    def close(self) -> None:
        self._live.stop()
