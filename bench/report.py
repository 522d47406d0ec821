"""Results of the comparison as JSON, tables and a chart. Reads only the comparison and this machine's name."""

from __future__ import annotations

import json
import os
import platform
import re
import statistics
import subprocess
import time
from html import escape
from pathlib import Path
from typing import NamedTuple

from subjects.pool import VARIANTS
from workloads import value_of

COLUMNS = ("same host", "tcp")
"""Columns of the goals: the best path between processes of one host, and TCP on loopback as the peers use it."""
DRIVE, PASSTHROUGH, SOCKET = "plain", "c-passthrough", "c-socket"


class Floor(NamedTuple):
    """A load of nvpool against a load of another subject (`under`), or against a figure. `goals` by column. `cost`: of one
    operation, at most so many times; else the rate, at least."""

    title: str
    key: str
    under: tuple[str, str] | float
    goals: dict[str, float]
    cost: bool = False


FLOORS = (
    Floor("warm re-read, × the plain directory", "reread", (DRIVE, "reread"), dict.fromkeys(COLUMNS, 0.9)),
    Floor(
        "read_many of 4 KiB by one process, thousands a second",
        "sdk-many",
        1000.0,
        dict.fromkeys(COLUMNS, 150.0),
    ),
    Floor(
        "cost of one 4 KiB read by the SDK, × a blocking C socket's round trip",
        "sdk-one",
        (SOCKET, "socket"),
        {"tcp": 3.0},
        True,
    ),
    Floor("the same from a thread (File.pread)", "sdk-thread", (SOCKET, "socket"), {"tcp": 3.0}, True),
    Floor(
        "cost of a 4 KiB read through the mount, one at a time, × C passthrough",
        "read4k-1",
        (PASSTHROUGH, "read4k-1"),
        {"same host": 2.0, "tcp": 3.0},
        True,
    ),
)
"""The goals beside those of the peers."""


def machine() -> str:
    with open("/proc/cpuinfo") as file:
        model = re.search(r"model name\s*:\s*(.*)", file.read())
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / (1 << 30)
    return (
        f"{os.cpu_count()} cores ({model.group(1) if model else platform.machine()}), {memory:.0f} GiB, Linux "
        f"{platform.release()}, Python {platform.python_version()}"
    )


def put_into_readme(name: str, text: str) -> None:
    """Replace the text between the markers of that name in bench/README.md."""
    readme = Path(__file__).parent / "README.md"
    begin, end = f"<!-- {name}: begin -->", f"<!-- {name}: end -->"
    before, rest = readme.read_text().split(begin)
    readme.write_text(f"{before}{begin}\n{text}{end}{rest.partition(end)[2]}")


def publish(name: str, results: dict, table: str, copy: Path | None, write: bool) -> None:
    """Print the table and write the results to the file `copy`; with `write` also to results/NAME.json, and the table into
    bench/README.md."""
    print(table)
    kept = Path(__file__).parent / "results" / f"{name}.json"
    for place in (copy, kept if write else None):
        if place is not None:
            place.write_text(json.dumps(results, indent=1) + "\n")
    if write:
        put_into_readme(name, table)


def commit() -> str:
    here = str(Path(__file__).parent)
    done = subprocess.run(
        ["git", "-C", here, "describe", "--always", "--dirty"], capture_output=True, text=True
    )
    return done.stdout.strip()


def summary(comparison, loads, options, took_s: float) -> dict:
    """All results, in the form of the JSON file.

    `best` of a cell is the larger of its medians, with and without the processors kept awake. The goals are for one copy
    of each byte: with more copies there are none.
    """
    judged_too = options.copies == 1
    subjects = {}
    for subject in comparison.subjects:
        subjects[subject.name] = {
            "kind": subject.kind,
            "version": comparison.versions.get(subject.name, ""),
            "notes": subject.notes,
            "cold": subject.cold,
            "missing": comparison.missing.get(subject.name),
        }
    found = []
    for load in loads:
        cells = {}
        for name in subjects:
            ways = {
                "awake" if awake else "asleep": rounds_summary(load, rounds)
                for awake, rounds in comparison.figures.get((name, load.key), {}).items()
            }
            if ways:
                cells[name] = ways | {"best": max(way["median"] for way in ways.values())}
            if (name, load.key) in comparison.failures:
                cells.setdefault(name, {})["failed"] = comparison.failures[name, load.key]
        peers = {
            name: cell["best"]
            for name, cell in cells.items()
            if subjects[name]["kind"] == "peer" and "best" in cell
        }
        found.append(
            {
                "key": load.key,
                "name": load.name,
                "unit": load.unit,
                "cold": load.cold,
                "durable": load.durable,
                "by": load.by,
                "cells": cells,
                "goals": dict(zip(COLUMNS, load.goals, strict=True)) if load.goals and judged_too else None,
                "best_peer": max(peers, key=peers.get, default=None),
            }
        )
    columns = {variant.column: variant.name for variant in VARIANTS if variant.column}
    floors = FLOORS if judged_too else [floor._replace(goals={}) for floor in FLOORS]
    return {
        "date": time.strftime("%Y-%m-%d"),
        "machine": machine(),
        "commit": commit(),
        "took_s": round(took_s),
        "floors": [against(floor, found, columns) for floor in floors],
        "copies": options.copies,
        "rounds": options.rounds,
        "seconds": options.seconds,
        "file_mib": options.file_mib,
        "files": options.files,
        "busy_before": comparison.busy_before,
        "busy_idle": comparison.busy_idle,
        "columns": columns,
        "subjects": subjects,
        "loads": found,
    }


def rounds_summary(load, rounds: list[dict]) -> dict:
    values = [value_of(load, found) for found in rounds]
    return {
        "median": statistics.median(values),
        "least": min(values),
        "most": max(values),
        "rounds": values,
        "p50_us": statistics.median(found["p50_us"] for found in rounds),
        "p99_us": statistics.median(found["p99_us"] for found in rounds),
    }


def against(floor: Floor, loads: list[dict], columns: dict[str, str]) -> dict:
    """The floor for the JSON file: in each column the figure, its goal or None, and whether it is reached or None."""
    by_key = {load["key"]: load for load in loads}

    def rate(key: str, name: str | None) -> float | None:
        return best(by_key[key], name) if key in by_key else None

    cells = {}
    for column in COLUMNS:
        mine = rate(floor.key, columns.get(column))
        under = floor.under if isinstance(floor.under, float) else rate(floor.under[1], floor.under[0])
        value, goal = ratio(under, mine) if floor.cost else ratio(mine, under), floor.goals.get(column)
        reached = None if value is None or goal is None else value <= goal if floor.cost else value >= goal
        cells[column] = {"value": value, "goal": goal, "reached": reached}
    return {"title": floor.title, "at_most": floor.cost, "columns": cells}


def best(load: dict, name: str | None) -> float | None:
    return load["cells"].get(name, {}).get("best")


def number(value: float | None) -> str:
    if value is None:
        return "–"
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def ratio(one: float | None, other: float | None) -> float | None:
    return one / other if one is not None and other else None


def times(value: float | None) -> str:
    return "–" if value is None else f"{value:.2f}" if value < 10 else f"{value:.0f}"


def judged(value: float | None, goal: float | None, at_most: bool = False) -> str:
    """The ratio, its goal, and whether it is reached."""
    if value is None or goal is None:
        return times(value)
    reached = value <= goal if at_most else value >= goal
    return f"{times(value)} of {goal:g} {'✓' if reached else '✗'}"


def markdown(results: dict) -> str:
    subjects, loads = results["subjects"], results["loads"]
    copies = "one copy" if results["copies"] == 1 else f"{results['copies']} copies"
    parts = [
        f"# Beside the peers\n\n{results['date']}, {results['machine']}; nvpool {results['commit']}; {copies} of each byte; "
        f"medians of {results['rounds']} rounds; {results['took_s'] // 60} minutes. Large file of {results['file_mib']} MiB, "
        f"directory of {results['files']:,} files; at most {results['seconds']:g} s a load. Processors were busy "
        f"{results['busy_before']:.1%} before anything was started, {results['busy_idle']:.1%} with all of it idle.",
        "## nvpool, times the best peer",
        goals_table(results),
        "## Against the floors",
        _floors(results),
        "## Everything",
        "Drive and floors: with the processors kept awake (/dev/cpu_dma_latency held at 0), as nvpool's "
        "daemons do it by themselves. Where there are two figures, the first is without that; the better one counts. "
        "SDK: one process, in the memory of the store.",
        _everything(results),
    ]
    missing = [
        f"* **{name}**: {subject['missing']}" for name, subject in subjects.items() if subject["missing"]
    ]
    missing += [
        f"* **{name}**, {load['name']}: {cell['failed']}"
        for load in loads
        for name, cell in load["cells"].items()
        if "failed" in cell
    ]
    if missing:
        parts += ["## Missing", "\n".join(missing)]
    parts += [
        "## What they are",
        "\n".join(
            f"* **{name}**"
            + (f" ({subject['version']})" if subject["version"] else "")
            + ": "
            + "; ".join(filter(None, (subject["notes"], subject["cold"] and f"cold: {subject['cold']}")))
            for name, subject in subjects.items()
            if not subject["missing"]
        ),
        "Random reads use O_DIRECT, each block at most once, and are cold as well; so are whole files. Sequential reads do not "
        "use O_DIRECT.",
    ]
    return "\n\n".join(parts) + "\n"


def goals_table(results: dict) -> str:
    rows = [
        "| work | plain directory | best peer | nvpool | × best peer | × drive | nvpool, TCP | × best peer | × drive |",
        "|---|---:|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for load in (load for load in results["loads"] if load["by"] == "mount"):
        peer, drive = best(load, load["best_peer"]), best(load, DRIVE)
        row = [
            f"{load['name']} ({load['unit']})",
            number(drive),
            f"{number(peer)} {load['best_peer'] or ''}".strip(),
        ]
        for column in COLUMNS:
            mine = best(load, results["columns"].get(column))
            row += [
                number(mine),
                judged(ratio(mine, peer), load["goals"] and load["goals"][column]),
                times(ratio(mine, drive)),
            ]
        rows.append(f"| {' | '.join(row)} |")
    return "\n".join(rows)


def _floors(results: dict) -> str:
    rows = ["| floor | nvpool | nvpool, TCP |", "|---|---:|---:|"]
    for floor in results["floors"]:
        cells = [
            judged(floor["columns"][column]["value"], floor["columns"][column]["goal"], floor["at_most"])
            for column in COLUMNS
        ]
        rows.append(f"| {floor['title']} | {' | '.join(cells)} |")
    return "\n".join(rows)


def _everything(results: dict) -> str:
    names = [name for name in results["subjects"] if any(best(load, name) for load in results["loads"])]
    rows = ["| work | " + " | ".join(names) + " |", "|---|" + "---:|" * len(names)]
    marked = [name for name in names if "does not reach the drive" in results["subjects"][name]["notes"]]
    for load in results["loads"]:
        row = []
        for name in names:
            cell = load["cells"].get(name, {})
            ways = " · ".join(_rounds(cell[way]) for way in ("asleep", "awake") if way in cell)
            row.append((ways or "–") + (" *" if load["durable"] and name in marked and ways else ""))
        rows.append(f"| {load['name']} ({load['unit']}) | {' | '.join(row)} |")
    rows.append("\nIn brackets: least and most of the rounds, where one is more than twice the other.")
    if marked and any(load["durable"] for load in results["loads"]):
        rows.append("\n\\* what was written is in the kernel's memory when fsync returns, not on the drive")
    return "\n".join(rows)


def _rounds(way: dict) -> str:
    median = number(way["median"])
    return (
        f"{median} ({number(way['least'])}–{number(way['most'])})"
        if way["most"] > 2 * way["least"]
        else median
    )


# -- the chart ---------------------------------------------------------------------------------------------------------------

COLOURS = {"same host": "#1b7f5a", "tcp": "#7cc4a4"}
VARIANT_COLOURS = ("#a8d5c2", "#c8e6d9", "#dfece6")
PEER_COLOURS = ("#c0504d", "#e39a3b", "#8064a2", "#4f81bd")
FLOOR_COLOUR = "#b9c4d0"
WIDTH, LEFT, RIGHT, BAR, GAP, TOP = 900, 300, 70, 11, 16, 64
TIMES_MAX = 6.0
"""Length at which bars are cut; a cut bar shows its figure."""


def chart(results: dict) -> str:
    """A group of bars for each load: times the best peer, which is the line at 1; black marks are the goals. SVG."""
    bars, groups, y, scale = _bars(results), [], TOP, (WIDTH - LEFT - RIGHT) / TIMES_MAX
    for load in results["loads"]:
        peer, begin = best(load, load["best_peer"]), y
        if not peer:
            continue
        for name, colour, column in bars:
            value = ratio(best(load, name), peer)
            if value is None:
                continue
            length = min(value, TIMES_MAX) * scale
            groups.append(
                f'<rect x="{LEFT}" y="{y}" width="{length:.1f}" height="{BAR - 1}" fill="{colour}"/>'
            )
            cut = " →" if value > TIMES_MAX else ""
            groups.append(
                f'<text x="{LEFT + length + 4:.1f}" y="{y + BAR - 2}" font-size="9">{times(value)}{cut}</text>'
            )
            if column and load["goals"]:
                x = LEFT + load["goals"][column] * scale
                groups.append(
                    f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{y - 1}" y2="{y + BAR}" stroke="#000" stroke-width="2"/>'
                )
            y += BAR
        groups.append(
            f'<text x="{LEFT - 8}" y="{(begin + y) / 2 + 4:.0f}" text-anchor="end">{escape(load["name"])}</text>'
        )
        y += GAP
    legend, x = [], 16
    for name, colour, _ in bars:
        legend.append(
            f'<rect x="{x}" y="34" width="10" height="10" fill="{colour}"/>'
            f'<text x="{x + 14}" y="43">{escape(name)}</text>'
        )
        x += 30 + 7 * len(name)
    axis = LEFT + scale
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{y + 8}" viewBox="0 0 {WIDTH} {y + 8}" '
        f'font-family="sans-serif" font-size="12"><rect width="{WIDTH}" height="{y + 8}" fill="#fff"/>'
        f'<text x="16" y="20" font-size="14">Times the best peer, {escape(results["date"])}; black marks: goals</text>'
        + "".join(legend)
        + "".join(groups)
        + f'<line x1="{axis:.1f}" x2="{axis:.1f}" y1="{TOP - 8}" y2="{y - GAP + 4}" stroke="#444" stroke-dasharray="3 3"/>'
        "</svg>\n"
    )


def _bars(results: dict) -> list[tuple[str, str, str | None]]:
    """(name, colour, column of the goals) of the bars of the chart, in order; the drive would not fit into it."""
    column_of = {name: column for column, name in results["columns"].items()}
    kinds = {name: subject["kind"] for name, subject in results["subjects"].items() if not subject["missing"]}
    colours, shades = iter(PEER_COLOURS), iter(VARIANT_COLOURS)
    bars = [
        (
            name,
            COLOURS[column_of[name]] if name in column_of else next(shades, "#e6efe9"),
            column_of.get(name),
        )
        for name, kind in kinds.items()
        if kind == "nvpool"
    ]
    bars += [(name, next(colours, "#9c9c9c"), None) for name, kind in kinds.items() if kind == "peer"]
    return bars + [(PASSTHROUGH, FLOOR_COLOUR, None)] * (PASSTHROUGH in kinds)
