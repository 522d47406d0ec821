"""Results as tables, extrapolated to a billion files."""

from __future__ import annotations

import math

GIB = 1 << 30
PAGE_BYTES = 4096
BILLION = 1_000_000_000
GOAL_BYTES, GOAL_FALL = 150, 2.0
SHAPES = {"one": "one directory", "many": "many directories"}


def markdown(results: dict) -> str:
    cases = results["cases"]
    parts = [
        f"# Millions of files in one shard\n\n{results['date']}, {results['machine']}; nvpool {results['commit']}; "
        f"{results['seconds']:g} s a load; {results['took_s'] // 60} minutes"
        + (
            f"; processors were busy {results['busy_before']:.0%} before"
            if results["busy_before"] > 0.05
            else ""
        )
        + ".",
        _table(cases, results["empty"]),
        "## Goals",
        _goals(cases),
    ]
    checks = [case for case in cases if case["made"].get("by_service")]
    if checks:
        parts += ["## Offline and by the service", _checks(checks)]
    parts += ["## A billion files", _billion(cases)]
    return "\n\n".join(parts) + "\n"


def title(case: dict) -> str:
    return f"{short(case['files'])}, {SHAPES[case['shape']]}"


def short(count: int) -> str:
    for size, suffix in ((10**9, " G"), (10**6, " M"), (10**3, " k")):
        if count >= size:
            return f"{count / size:.3g}{suffix}"
    return str(count)


def mib(count: float) -> str:
    return f"{count / (1 << 20):,.0f} MiB"


def seconds(value: float) -> str:
    return f"{value:.2f} s" if value < 10 else f"{value:.0f} s"


def rate(found: dict) -> str:
    text = f"{found['per_s']:,.0f}/s"
    if "processor_us" not in found:
        return text
    pages = f", {found['pages_read']:.1f} pages" if found["pages_read"] >= 0.05 else ""
    return f"{text} ({found['processor_us']:.0f} µs{pages})"


def bytes_a_file(case: dict) -> float:
    """After the files that were made through the service."""
    return case["figures"]["after"]["used_bytes"] / case["figures"]["files_after"]


def _table(cases: list[dict], empty: dict) -> str:
    rows = [
        ("LMDB, bytes a file, laid without a gap", lambda c: _a_file(c["made"], "dense_bytes", c["files"])),
        ("… as the service leaves its pages", lambda c: _a_file(c["made"], "used_bytes", c["files"])),
        ("… after files were added through the service", lambda c: f"{bytes_a_file(c):.1f}"),
        ("files added", lambda c: f"{c['figures']['files_after'] - c['files']:,}"),
        ("LMDB, pages in use", lambda c: f"{c['made']['used_bytes'] / GIB:.2f} GiB"),
        ("of that inner pages; depth", lambda c: f"{mib(c['made']['inner_bytes'])}; {c['made']['depth']}"),
        ("look-ups, one a request", lambda c: rate(c["figures"]["look_ups"])),
        ("look-ups, 100 a request", lambda c: rate(c["figures"]["look_ups_together"])),
        ("creates", lambda c: rate(c["figures"]["creates"])),
        ("engine alone, look-ups", lambda c: rate(c["figures"]["engine_look_ups"])),
        ("engine alone, creates", lambda c: rate(c["figures"]["engine_creates"])),
        ("look-ups with nothing in memory", lambda c: rate(c["figures"]["cold_look_ups"])),
        ("start, clean", lambda c: seconds(c["figures"]["start_s"])),
        ("start with nothing in memory", lambda c: seconds(c["figures"]["start_cold_s"])),
        (
            "start after kill -9; changes replayed",
            lambda c: f"{seconds(c['figures']['start_after_kill_s'])}; {c['figures']['replayed']:,}",
        ),
        ("stop", lambda c: seconds(c["figures"]["stop_s"])),
        ("listing `data`, names", lambda c: _listed(c["figures"]["list"])),
        ("listing `data` with attributes", lambda c: _listed(c["figures"]["list_with_attributes"])),
        (
            "most that listing added to the shard's memory",
            lambda c: mib(max(c["figures"][name]["grew_bytes"] for name in ("list", "list_with_attributes"))),
        ),
    ]
    rows += [
        (
            f"memory of its own, {when}",
            lambda c, when=when: mib(c["figures"]["memory"][when]["anonymous_bytes"]),
        )
        for when in cases[0]["figures"]["memory"]
    ]
    rows.append(
        (
            "mapped pages, after look-ups",
            lambda c: mib(c["figures"]["memory"]["after look-ups"]["mapped_bytes"]),
        )
    )
    lines = ["| | " + " | ".join(title(case) for case in cases) + " |", "|---|" + "---:|" * len(cases)]
    lines += [f"| {name} | {' | '.join(value(case) for case in cases)} |" for name, value in rows]
    lines.append(
        f"\nIn brackets: the shard's processor time for one. An empty shard starts in {seconds(empty['start_s'])} "
        f"and has {mib(empty['memory']['started']['anonymous_bytes'])} of its own. A create is two requests, the "
        "creation with a write grant and the report of the size. Before each load the database was read into memory, "
        "but for what is said to have nothing in memory; pages: read from the drive for one, while it waits."
    )
    return "\n".join(lines)


def _a_file(made: dict, key: str, files: int) -> str:
    return f"{made[key] / files:.1f}" if key in made else "–"


def _listed(found: dict) -> str:
    took = found["count"] / found["per_s"]
    return f"{seconds(took)}, {rate(found)}" + (
        "" if found["whole"] else f", the first {short(found['count'])}"
    )


def _goals(cases: list[dict]) -> str:
    lines = ["| | goal | found |", "|---|---|---|"]

    def row(name: str, goal: str, found: float, text: str, reached: bool) -> None:
        lines.append(f"| {name} | {goal} | {text} {'✓' if reached else '✗'} |")

    for case in cases:
        found = bytes_a_file(case)
        row(
            f"bytes of LMDB a file, {title(case)}",
            f"≤ {GOAL_BYTES}",
            found,
            f"{found:.1f}",
            found <= GOAL_BYTES,
        )
    for shape in SHAPES:
        ours = sorted((case for case in cases if case["shape"] == shape), key=lambda case: case["files"])
        if len(ours) < 2:
            continue
        least, most = ours[0], ours[-1]
        sizes = f"{SHAPES[shape]}, from {short(least['files'])} to {short(most['files'])}"
        for name in ("look_ups", "look_ups_together", "creates"):
            fall = least["figures"][name]["per_s"] / most["figures"][name]["per_s"]
            row(
                f"fall of {name.replace('_', ' ').replace('look ups', 'look-ups')}, {sizes}",
                f"< {GOAL_FALL:g} times",
                fall,
                f"{fall:.2f} times",
                fall < GOAL_FALL,
            )
        grown = (
            most["figures"]["memory"]["after creates"]["anonymous_bytes"]
            - least["figures"]["memory"]["after creates"]["anonymous_bytes"]
        )
        row(
            f"memory of its own, {sizes}",
            "does not grow",
            grown,
            f"{grown / (1 << 20):+,.0f} MiB",
            grown < 32 << 20,
        )
    return "\n".join(lines)


def _checks(cases: list[dict]) -> str:
    lines = ["| | offline | by a running service | same records |", "|---|---:|---:|---|"]
    for case in cases:
        made, served = case["made"], case["made"]["by_service"]
        lines.append(
            f"| {title(case)}: bytes a file | {made['used_bytes'] / case['files']:.1f} | "
            f"{served['used_bytes'] / case['files']:.1f} | {'yes' if served['same'] else 'no'} |"
        )
    return "\n".join(lines)


def _billion(cases: list[dict]) -> str:
    lines = [
        "| from | pages in use | of that inner pages | depth | creating them, one shard | ten shards |",
        "|---|---:|---:|---:|---:|---:|",
    ]
    said = []
    for shape in SHAPES:
        case = max(
            (case for case in cases if case["shape"] == shape), key=lambda case: case["files"], default=None
        )
        if case is None:
            continue
        made, figures, times = case["made"], case["figures"], BILLION / case["files"]
        fan_out = made["used_bytes"] / max(made["inner_bytes"], 1)
        leaves = times * (made["used_bytes"] - made["inner_bytes"]) / PAGE_BYTES
        depth = 1 + math.ceil(math.log(leaves) / math.log(fan_out))
        hours = BILLION / figures["creates"]["per_s"] / 3600
        lines.append(
            f"| {title(case)}, × {times:g} | {made['used_bytes'] * times / GIB:,.0f} GiB | "
            f"{made['inner_bytes'] * times / GIB:.1f} GiB | {depth} | {hours:,.0f} h | {hours / 10:,.1f} h |"
        )
        cold = figures["cold_look_ups"]
        said.append(
            f"{SHAPES[shape]}: {figures['look_ups']['per_s']:,.0f} look-ups/s with all leaves in memory, "
            f"{cold['per_s']:,.0f}/s with none ({cold['pages_read']:.1f} pages read for each)"
        )
    lines.append(
        f"\nA look-up goes down the tree twice, for the entry and for the inode. Each level is {fan_out:.0f} times as "
        "wide as the one above it, so all but the leaves are a hundredth of the whole and stay in memory: what a "
        "look-up can wait for is two leaves, one after the other, and nobody else is served meanwhile. "
        + "; ".join(said)
        + ". In between, the share of the leaves that is in memory decides. So a billion files want "
        "as much memory as they have pages in use, on one machine or, as partitions spread over shards, on several, "
        "each with a processor of its own for creates. (One directory is in one partition, unless it was made wide.)"
    )
    return "\n".join(lines)
