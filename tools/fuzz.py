"""Millions of wrong requests to the services of a pool, over several processes: `make fuzz CASES=10000000`.

Each service (metadata shard, standby, chunk store, supervisor) is asked in memory by each kind of caller, over the frames of
the stream transport and without: messages from their descriptors with numbers at their bounds, valid ones that were changed,
bytes that are no messages, and now and then a list or bytes that fill a message of 4 MiB. Failures are: a reply or a log that
names a bug, a request without a reply, one that keeps the loop for more than a second of processor time, a session that retains
more than its slots need, a process that grows or hangs, and any change without the right to it. Then the case is printed with
its seed, and the exit code is 1. The last line names the request that kept the loop for longest.
"""

from __future__ import annotations

import argparse
import re
import signal
import subprocess
import sys
import threading
import time

CASES = 2000
"""Of one place: nvpool/testing/fuzz/runner."""
LARGE = 1 / 5000
"""Share of large messages: LARGE_SHARE in nvpool/testing/fuzz/harness."""
DONE = re.compile(r"done (\d+) (\d+) (\d+) (\S+)")


class Worker:
    def __init__(self, number: int, options: argparse.Namespace) -> None:
        share = -(-options.cases // options.workers)
        words = [
            "--seed",
            options.seed,
            "--first",
            str(options.first + number * CASES),
            "--step",
            str(options.workers),
            "--cases",
            str(share),
            "--seconds",
            str(options.seconds),
            "--only",
            options.only,
            "--kind",
            options.kind,
            "--large",
            str(options.large),
        ]
        self.done = self.bytes = 0
        self.longest = 0, "nothing"
        self.said: list[str] = []
        self.process = subprocess.Popen(
            [
                sys.executable,
                "-m",
                "nvpool.testing.fuzz.runner",
                *words,
                *(["--stats"] if options.stats else []),
            ],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        for line in self.process.stdout:
            if (found := DONE.fullmatch(line.strip())) is not None:
                self.done, self.bytes = int(found[1]), int(found[2])
                self.longest = int(found[3]), found[4]
            else:
                self.said.append(line)
                del self.said[2000:]

    def end(self) -> None:
        if self.process.poll() is None:
            self.process.terminate()
        try:
            self.process.wait(10)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self._reader.join(5)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--cases", type=int, default=200_000)
    parser.add_argument("--seed", default="1")
    parser.add_argument("--first", type=int, default=0, help="the first case, to have trouble again")
    parser.add_argument(
        "--seconds", type=float, default=0.0, help="no longer than this; 0: until all cases are done"
    )
    parser.add_argument(
        "--only", default="", metavar="METHOD", help="META_CREATE, DATA_READ, …: this method alone"
    )
    parser.add_argument(
        "--kind", default="", help="only this service, kind of caller, or both: shard, user, store-client, …"
    )
    parser.add_argument(
        "--large",
        type=float,
        default=LARGE,
        help="share of messages with a field of up to 4 MiB [1 of 5,000]",
    )
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument(
        "--stats", action="store_true", help="at the end, how often each method did what it was asked for"
    )
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    began_s = time.monotonic()
    workers = [Worker(number, options) for number in range(max(1, options.workers))]
    status = 0
    try:
        while any(worker.process.poll() is None for worker in workers):
            time.sleep(1.0 if sys.stderr.isatty() else 0.2)
            if any(worker.process.poll() not in (None, 0) for worker in workers):
                break  # the others end, too
            done, took_s = sum(worker.done for worker in workers), time.monotonic() - began_s
            if sys.stderr.isatty() and done:
                print(
                    f"{done:,} of {options.cases:,} cases, {done / took_s:,.0f} a second, "
                    f"{(options.cases - done) * took_s / done:,.0f} s left, "
                    f"{max(worker.bytes for worker in workers) >> 20} MiB   ",
                    end="\r",
                    file=sys.stderr,
                )
    except KeyboardInterrupt:
        status = 130
    finally:
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_IGN)  # it ends already
        failed = [worker for worker in workers if worker.process.poll() not in (None, 0)]
        for worker in workers:
            worker.end()
    done, took_s = sum(worker.done for worker in workers), time.monotonic() - began_s
    for worker in failed if not status else ():
        print("".join(worker.said))
        status = 1
    if options.stats:
        for worker in workers:
            print("".join(worker.said))
    longest_us, where = max(worker.longest for worker in workers)
    print(
        f"{done:,} cases from seed {options.seed}, {'nothing wrong' if not status else 'ended early'}, {took_s:.0f} s, "
        f"{done / max(took_s, 0.001):,.0f} a second; longest the loop was kept: {longest_us / 1000:,.0f} ms of processor "
        f"time, {where.replace('-', ' ')}"
    )
    return status


if __name__ == "__main__":
    sys.exit(main())
