"""Latency against concurrency: 4 KiB random reads with 1 to 256 in flight, and where the knee is.

A closed loop: each of N readers sends its next request after the reply, so N = rate × mean latency (Little's law). The
knee is the smallest N with nine tenths of the largest rate: beyond it, more readers add latency and hardly any reads.
(Kleinrock's power, rate ÷ mean latency, is largest at one reader wherever the second one has to wait for the first, so
it does not help here.)
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

LEVELS = (1, 2, 4, 8, 16, 32, 64, 128, 256)
KNEE_SHARE = 0.9


class Point(NamedTuple):
    in_flight: int
    rate: float
    p50_us: float
    p99_us: float


def measure(
    ways: dict[str, Callable[[int], dict]], levels: Iterable[int], rounds: int, say: Callable[[str], None]
) -> dict:
    """Measure each of `ways` in turns; return medians of the rounds.

    A way reads with so many requests in flight and returns rate, p50_us and p99_us.
    """
    found: dict[str, dict[int, list[dict]]] = {name: {} for name in ways}
    for turn in range(rounds):
        for level in levels:
            for name, read in ways.items():
                one = read(level)
                found[name].setdefault(level, []).append(one)
                say(
                    f"round {turn + 1}: {name}, {level} in flight: {one['rate']:,.0f} reads/s, p50 {one['p50_us']:,.0f} µs, "
                    f"p99 {one['p99_us']:,.0f} µs"
                )
    results = {}
    for name, by_level in found.items():
        points = [
            Point(
                level, *(statistics.median(one[key] for one in ones) for key in ("rate", "p50_us", "p99_us"))
            )
            for level, ones in sorted(by_level.items())
        ]
        results[name] = {"points": [point._asdict() for point in points], "knee": knee(points)}
    return results


def knee(points: Sequence[Point]) -> int:
    """Smallest number in flight that reaches KNEE_SHARE of the largest rate."""
    wanted = KNEE_SHARE * max(point.rate for point in points)
    return min(point.in_flight for point in points if point.rate >= wanted)


def table(results: dict) -> str:
    names = list(results)
    rows = [
        "| in flight | " + " | ".join(f"{name}: reads/s | p50 µs | p99 µs" for name in names) + " |",
        "|---:|" + "---:|" * 3 * len(names),
    ]
    for at, point in enumerate(results[names[0]]["points"]):
        row = []
        for name in names:
            this = results[name]["points"][at]
            mark = " **knee**" if this["in_flight"] == results[name]["knee"] else ""
            row.append(f"{this['rate']:,.0f}{mark} | {this['p50_us']:,.0f} | {this['p99_us']:,.0f}")
        rows.append(f"| {point['in_flight']} | {' | '.join(row)} |")
    return "\n".join(rows)
