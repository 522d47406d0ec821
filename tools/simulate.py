"""Many seeds of the simulation over several processes: `make sim SEEDS=1000`. Ends at the first that violates something."""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait

SHARE = 10
"""Seeds of one process: enough that its start does not count."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--first", type=int, default=1)
    parser.add_argument("--seeds", type=int, default=100)
    parser.add_argument("--workers", type=int, default=2)
    options = parser.parse_args()
    began, end = time.monotonic(), options.first + options.seeds

    def run(seed: int) -> subprocess.CompletedProcess:
        count = min(SHARE, end - seed)
        return subprocess.run(
            [sys.executable, "-m", "nvpool.testing.sim.scenario", str(seed), "--seeds", str(count)],
            capture_output=True,
            text=True,
            timeout=3600,
        )

    with ThreadPoolExecutor(options.workers) as threads:
        shares = iter(range(options.first, end, SHARE))
        running = {threads.submit(run, seed) for _, seed in zip(range(options.workers), shares, strict=False)}
        count = 0
        while running:
            done, running = wait(running, return_when=FIRST_COMPLETED)
            for one in done:
                if one.result().returncode:
                    print(one.result().stdout + one.result().stderr)
                    return 1
                count += SHARE
                seed = next(shares, None)
                if seed is not None:
                    running.add(threads.submit(run, seed))
            if sys.stderr.isatty():
                left_s = (time.monotonic() - began) / count * max(0, options.seeds - count)
                print(f"{count} of {options.seeds} seeds, {left_s:.0f} s left   ", end="\r", file=sys.stderr)
    print(
        f"{options.seeds} seeds from {options.first} on, nothing violated, {time.monotonic() - began:.0f} s"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
