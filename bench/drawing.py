"""Charts as SVG: lines over a logarithmic axis, stacked bars and groups of bars, one below the other."""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape
from typing import NamedTuple

WIDTH, LEFT, RIGHT = 900, 230, 60
COLOURS = ("#1b7f5a", "#c0504d", "#3b6fb6", "#e39a3b", "#8064a2", "#7a7a7a", "#54b3a0")


class Line(NamedTuple):
    """A line through `points` (x, y); `marked` is the x of the point with a ring."""

    name: str
    points: Sequence[tuple[float, float]]
    marked: float | None = None
    dashed: bool = False
    colour: int = 0


def _round_step(least: float) -> float:
    """The next 1, 2 or 5 times a power of ten."""
    power = 10.0 ** math.floor(math.log10(least))
    return next(times * power for times in (1, 2, 5, 10) if times * power >= least)


class Sheet:
    """Sheet of charts, which are added from top to bottom; `svg` returns all of it."""

    def __init__(self, title: str) -> None:
        self._parts = [f'<text x="16" y="22" font-size="15">{escape(title)}</text>']
        self._y = 40

    def svg(self) -> str:
        height = self._y + 10
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{height}" viewBox="0 0 {WIDTH} {height}" '
            f'font-family="sans-serif" font-size="12"><rect width="{WIDTH}" height="{height}" fill="#fff"/>'
            + "".join(self._parts)
            + "</svg>\n"
        )

    def lines(self, title: str, lines: Sequence[Line], *, log_y: bool = False, height: int = 230) -> None:
        """Add lines; x doubles from tick to tick, y starts at 0 or is logarithmic."""
        self._title(title)
        top, bottom, left = self._y, self._y + height, 70
        xs = sorted({x for line in lines for x, _ in line.points})
        ys = [y for line in lines for _, y in line.points if y > 0]
        if not ys:
            return
        step = _round_step(max(ys) / 4)
        low, high = 0.0, math.ceil(max(ys) / step) * step
        if log_y:
            low, high = 10.0 ** math.floor(math.log10(min(ys))), 10.0 ** math.ceil(math.log10(max(ys)))

        def across(x: float) -> float:
            share = math.log2(x / xs[0]) / max(math.log2(xs[-1] / xs[0]), 1e-9)
            return left + share * (WIDTH - LEFT - left)

        def down(y: float) -> float:
            share = math.log10(max(y, low) / low) / max(math.log10(high / low), 1e-9) if log_y else y / high
            return bottom - share * (bottom - top)

        steps = (
            [10.0**power for power in range(round(math.log10(low)), round(math.log10(high)) + 1)]
            if log_y
            else [step * part for part in range(round(high / step) + 1)]
        )
        for y in steps:
            self._add(
                f'<line x1="{left}" x2="{WIDTH - LEFT}" y1="{down(y):.1f}" y2="{down(y):.1f}" stroke="#ddd"/>'
                f'<text x="{left - 6}" y="{down(y) + 4:.1f}" text-anchor="end">{y:,.0f}</text>'
            )
        for x in xs:
            self._add(f'<text x="{across(x):.1f}" y="{bottom + 16}" text-anchor="middle">{x:g}</text>')
        for at, line in enumerate(lines):
            colour = COLOURS[line.colour % len(COLOURS)]
            path = " ".join(f"{across(x):.1f},{down(y):.1f}" for x, y in line.points)
            dash = ' stroke-dasharray="5 4"' if line.dashed else ""
            self._add(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"{dash}/>')
            for x, y in line.points:
                if x == line.marked:
                    self._add(
                        f'<circle cx="{across(x):.1f}" cy="{down(y):.1f}" r="6" fill="none" stroke="{colour}" '
                        'stroke-width="2"/>'
                    )
            x, y = WIDTH - LEFT + 16, top + 12 + 16 * at
            self._add(
                f'<line x1="{x}" x2="{x + 18}" y1="{y - 4}" y2="{y - 4}" stroke="{colour}" stroke-width="2"{dash}/>'
                f'<text x="{x + 24}" y="{y}">{escape(line.name)}</text>'
            )
        self._y = bottom + 34

    def stacked(
        self, title: str, bars: Sequence[tuple[str, Sequence[float]]], parts: Sequence[str], unit: str
    ) -> None:
        """Add a bar for each (name, length for each of `parts`); negative lengths are left out."""
        self._title(title)
        self._legend(parts)
        longest = (
            max((sum(max(0.0, length) for length in lengths) for _, lengths in bars), default=0.0) or 1.0
        )
        scale = (WIDTH - LEFT - RIGHT) / longest
        for name, lengths in bars:
            x = float(LEFT)
            for at, length in enumerate(lengths):
                if length > 0:
                    self._add(
                        f'<rect x="{x:.1f}" y="{self._y}" width="{length * scale:.1f}" height="18" '
                        f'fill="{COLOURS[at % len(COLOURS)]}"/>'
                    )
                    x += length * scale
            self._label(name, x, f"{sum(lengths):,.0f} {unit}", 18)
            self._y += 24
        self._y += 12

    def bars(
        self, title: str, groups: Sequence[tuple[str, Sequence[float]]], names: Sequence[str], unit: str
    ) -> None:
        """Add a group of bars for each (name, length for each of `names`)."""
        self._title(title)
        self._legend(names)
        longest = max((length for _, lengths in groups for length in lengths), default=0.0) or 1.0
        scale = (WIDTH - LEFT - RIGHT - 40) / longest
        for name, lengths in groups:
            for at, length in enumerate(lengths):
                self._add(
                    f'<rect x="{LEFT}" y="{self._y}" width="{length * scale:.1f}" height="12" '
                    f'fill="{COLOURS[at % len(COLOURS)]}"/>'
                )
                self._label(name if at == 0 else "", LEFT + length * scale, f"{length:,.0f} {unit}", 12)
                self._y += 13
            self._y += 7
        self._y += 8

    def _label(self, name: str, x: float, said: str, height: int) -> None:
        self._add(
            f'<text x="{LEFT - 8}" y="{self._y + height - 3}" text-anchor="end">{escape(name)}</text>'
            f'<text x="{x + 5:.1f}" y="{self._y + height - 3}" font-size="10">{escape(said)}</text>'
        )

    def _title(self, title: str) -> None:
        self._add(f'<text x="16" y="{self._y + 14}" font-size="13" font-weight="bold">{escape(title)}</text>')
        self._y += 28

    def _legend(self, names: Sequence[str]) -> None:
        x = LEFT
        for at, name in enumerate(names):
            self._add(
                f'<rect x="{x}" y="{self._y}" width="10" height="10" fill="{COLOURS[at % len(COLOURS)]}"/>'
                f'<text x="{x + 14}" y="{self._y + 9}">{escape(name)}</text>'
            )
            x += 30 + 7 * len(name)
        self._y += 20

    def _add(self, text: str) -> None:
        self._parts.append(text)
