"""Throughput against the number of targets and of client processes: random reads of 4 and 128 KiB from the stores' memory.

Each client process is one of the SDK with IN_FLIGHT reads at any time; all of them begin together, and their rates are added
up. The targets share one drive and the processors with the clients, so this shows how one machine scales with more processes.
"""

from __future__ import annotations

import json
import statistics
import subprocess

from subjects.contract import Failed

IN_FLIGHT = 16
TARGETS = PROCESSES = (1, 2, 4)
BLOCKS = {"4 KiB": 4 << 10, "128 KiB": 128 << 10}
WAIT_S = 120.0


def together(commands: list[list[str]], environment: dict[str, str], seconds: float) -> dict:
    """Run a process of each command at the same time; return the sum of their rates. Failed: one of them failed."""
    running = [
        subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=environment,
        )
        for command in commands
    ]
    try:
        for process in running:
            if process.stdout.readline().strip() != "ready":
                raise Failed(f"a client did not begin: {process.communicate(timeout=WAIT_S)[1][-300:]}")
        for process in running:
            process.stdin.write("\n")
            process.stdin.flush()
        said = [process.communicate(timeout=seconds + WAIT_S) for process in running]
        if any(process.returncode for process in running):
            raise Failed(f"a client failed: {' '.join(errors for _, errors in said)[-300:]}")
    except (subprocess.TimeoutExpired, OSError) as error:
        raise Failed(f"clients do not end: {error}") from None
    finally:
        for process in running:
            if process.poll() is None:
                process.kill()
                process.communicate()
    found = [json.loads(text) for text, _ in said]
    return {
        "rate": sum(one["rate"] for one in found),
        "bytes_rate": sum(one["bytes_rate"] for one in found),
        "p50_us": statistics.median(one["p50_us"] for one in found),
        "p99_us": max(one["p99_us"] for one in found),
    }


def medians(rounds: list[dict]) -> dict:
    return {key: statistics.median(one[key] for one in rounds) for key in rounds[0]}


def table(rows: list[dict]) -> str:
    """rows: {"way", "block", "targets", "processes", "rate", …}; one line for each way, block and number of targets."""
    counts = sorted({row["processes"] for row in rows})
    text = [
        "| reads | targets | "
        + " | ".join(f"{count} client process{'es' * (count > 1)}" for count in counts)
        + " |",
        "|---|---:|" + "---:|" * len(counts),
    ]
    lines: dict[tuple, dict[int, str]] = {}
    for row in rows:
        mib_s = row["rate"] * BLOCKS[row["block"]] / (1 << 20)
        figure = f"{row['rate']:,.0f} reads/s" if row["block"] == "4 KiB" else f"{mib_s:,.0f} MiB/s"
        lines.setdefault((f"{row['block']}, {row['way']}", row["targets"]), {})[row["processes"]] = figure
    for (name, targets), cells in sorted(lines.items(), key=lambda line: line[0]):
        text.append(f"| {name} | {targets} | " + " | ".join(cells.get(count, "–") for count in counts) + " |")
    return "\n".join(text)
