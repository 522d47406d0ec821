"""Metric samples at one point in time, and their Prometheus text format (0.0.4).

A `Page` collects samples from the objects that own them, travels between processes, merges with other pages,
and becomes text. All samples of a name are adjacent, each with the labels of its declaration, in a stable
order. A page is created only when a scrape requests it, never on a hot path. Used by runtime/metrics,
metrics/http and `nvpool metrics`.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import msgspec

from nvpool.core.errors import CorruptFrame
from nvpool.metrics.registry import BOUNDS_S, FIRST_SLOT, LAST_SLOT, METRICS, SLOTS, Metric, Times

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
PAGE_BYTES_MAX = 4 << 20
"""Size limit for the page of one process: several hundred times the usual size."""

Value = float | tuple[float, list[int]]
Labels = tuple[tuple[str, str], ...]


class _Packed(msgspec.Struct, array_like=True):
    samples: list[tuple[str, list[tuple[str, str]], float | tuple[float, list[int]]]]


class Page:
    def __init__(self) -> None:
        self._samples: dict[str, dict[Labels, Value]] = {}

    def set(self, metric: Metric, value: float, **labels: object) -> None:
        """Add a sample; two values with the same labels are summed."""
        self._put(metric.name, self._labels(metric, labels), float(value))

    def times(self, metric: Metric, times: Times, **labels: object) -> None:
        self._put(metric.name, self._labels(metric, labels), (times.sum_s, list(times.counts)))

    @staticmethod
    def _labels(metric: Metric, labels: Mapping[str, object]) -> Labels:
        if tuple(labels) != metric.labels and set(labels) != set(metric.labels):
            raise KeyError(f"{metric.name} has the labels {metric.labels}, not {tuple(labels)}")
        return tuple((name, str(labels[name])) for name in metric.labels)

    def _put(self, name: str, labels: Labels, value: Value) -> None:
        of_name = self._samples.setdefault(name, {})
        known = of_name.get(labels)
        if known is None:
            of_name[labels] = value
        elif isinstance(known, tuple):
            assert isinstance(value, tuple)
            of_name[labels] = known[0] + value[0], [a + b for a, b in zip(known[1], value[1], strict=True)]
        else:
            assert not isinstance(value, tuple)
            of_name[labels] = known + value

    def add(self, other: Page, *, without: Collection[Metric] = (), **labels: str) -> None:
        """Add all samples of `other` except those of `without`, with `labels` before their own labels.

        Samples with the same labels are summed.
        """
        more = tuple(labels.items())
        left_out = {metric.name for metric in without}
        for name, of_name in other._samples.items():
            if name in left_out:
                continue
            for its, value in of_name.items():
                self._put(name, more + its, value)

    def value(self, metric: Metric, **labels: object) -> float:
        """Return the value of a sample, or the count of a histogram; 0 if the page has no such sample."""
        found = self._samples.get(metric.name, {}).get(self._labels(metric, labels), 0.0)
        return float(sum(found[1])) if isinstance(found, tuple) else found

    # -- between processes -------------------------------------------------------------------------------------------------

    def pack(self) -> bytes:
        return msgspec.msgpack.encode(
            _Packed(
                [
                    (name, list(labels), value)
                    for name, of_name in self._samples.items()
                    for labels, value in of_name.items()
                ]
            )
        )

    @classmethod
    def unpack(cls, raw: bytes) -> Page:
        """Decode a page; drop metrics that are not declared here, such as those of a newer version.

        CorruptFrame: `raw` cannot be decoded.
        """
        page = cls()
        try:
            samples = msgspec.msgpack.decode(raw, type=_Packed).samples
        except msgspec.MsgspecError as error:
            raise CorruptFrame(f"a page of metrics cannot be read: {error}") from None
        for name, labels, value in samples:
            metric = METRICS.get(name)
            if metric is None or isinstance(value, tuple) != (metric.kind == "histogram"):
                continue
            if isinstance(value, tuple) and len(value[1]) != SLOTS:
                continue
            page._put(name, tuple((label, text) for label, text in labels), value)
        return page

    def json_samples(self) -> list[dict[str, Any]]:
        """Return the samples for JSON: name, labels, and the value, or count and sum of a histogram."""
        return [
            {"name": name, "labels": dict(labels)}
            | ({"count": sum(value[1]), "sum": value[0]} if isinstance(value, tuple) else {"value": value})
            for name, of_name in self._samples.items()
            for labels, value in of_name.items()
        ]

    # -- for Prometheus ----------------------------------------------------------------------------------------------------

    def text(self) -> str:
        lines: list[str] = []
        for metric in METRICS.values():  # in the order of their declaration
            of_name = self._samples.get(metric.name)
            if not of_name:
                continue
            lines += (
                f"# HELP {metric.name} {_escaped(metric.help, quote=False)}",
                f"# TYPE {metric.name} {metric.kind}",
            )
            for labels, value in sorted(of_name.items(), key=lambda item: item[0]):
                if isinstance(value, tuple):
                    _histogram(lines, metric.name, labels, *value)
                else:
                    lines.append(f"{metric.name}{_written(labels)} {_number(value)}")
        return "\n".join(lines) + "\n" if lines else ""


def _histogram(lines: list[str], name: str, labels: Labels, sum_s: float, counts: Sequence[int]) -> None:
    total = sum(counts[:FIRST_SLOT])
    for slot, bound in zip(range(FIRST_SLOT, LAST_SLOT + 1), BOUNDS_S, strict=True):
        total += counts[slot]
        lines.append(f"{name}_bucket{_written((*labels, ('le', repr(bound))))} {total}")
    total += sum(counts[LAST_SLOT + 1 :])
    lines.append(f"{name}_bucket{_written((*labels, ('le', '+Inf')))} {total}")
    lines.append(f"{name}_sum{_written(labels)} {_number(sum_s)}")
    lines.append(f"{name}_count{_written(labels)} {total}")


def _written(labels: Labels) -> str:
    return "{" + ",".join(f'{name}="{_escaped(text)}"' for name, text in labels) + "}" if labels else ""


def _escaped(text: str, *, quote: bool = True) -> str:
    text = text.replace("\\", "\\\\").replace("\n", "\\n")
    return text.replace('"', '\\"') if quote else text


def _number(value: float) -> str:
    if math.isinf(value) or math.isnan(value):
        return "NaN" if math.isnan(value) else "+Inf" if value > 0 else "-Inf"
    return str(int(value)) if value == int(value) and abs(value) < 1 << 53 else repr(value)


def table() -> str:
    """Return all metrics as a Markdown table, as in docs/reference/metrics.md."""
    rows = ["| name | kind | labels | meaning |", "|---|---|---|---|"]
    rows += [
        f"| `{metric.name}` | {metric.kind} | {', '.join(metric.labels) or '–'} | {metric.help} |"
        for metric in METRICS.values()
    ]
    return "\n".join(rows)
