"""One fuzzing process: runs targets one after the other, each with some cases, until all are done or one
fails.

    python -m nvpool.testing.fuzz.runner --seed 1 --first 0 --cases 20000

The seed and the number of its first case determine a target and all its requests, so both reproduce a
failure. `tools/fuzz.py` runs several of these processes and reads the lines that they print.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import faulthandler
import gc
import logging
import resource
import signal
import sys
import time
import traceback
from collections import deque
from pathlib import Path

from nvpool.rpc.v1 import wire_pb2
from nvpool.testing.fuzz.connections import RECENT, FuzzFailure, Witness
from nvpool.testing.fuzz.daemons import StandbyPlace, SupervisorPlace, kinds_of
from nvpool.testing.fuzz.harness import LARGE_SHARE, FuzzTarget, method_name
from nvpool.testing.fuzz.shard import KINDS, ShardPlace
from nvpool.testing.fuzz.store import PEERS, StorePlace

CASES = 2000
"""Cases of one target. It is created again after them, so that what privileged callers have stored does not grow
without bound."""
CHECK_EVERY = 250
STALL_S = 120.0
"""Real time within which each case, and the end of a target, must be over.

Otherwise all stacks are written and the process ends.
"""
GROWTH_BYTES = 400 << 20
"""How much the process may grow after its first targets."""
WARM = 6
_PAGE = resource.getpagesize()

PLACES = [
    (place, kind)
    for place, kinds in (
        (ShardPlace, tuple(KINDS)),
        (StorePlace, tuple(PEERS)),
        (ShardPlace, tuple(KINDS)),
        (SupervisorPlace, kinds_of(SupervisorPlace)),
        (ShardPlace, tuple(KINDS)),
        (StandbyPlace, kinds_of(StandbyPlace)),
    )
    for kind in kinds
]
"""Order of the targets; a shard is the most frequent because most can go wrong there."""


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * _PAGE


class FuzzRun:
    def __init__(self, options: argparse.Namespace) -> None:
        self._options = options
        self._witness = Witness()
        self._recent: deque[tuple[int, int, bytes]] = deque(maxlen=RECENT)
        self.done = 0
        self.answered: dict[str, int] = {}
        self._grown_from = 0
        self._places = 0
        self._longest: tuple[float, str] = (0.0, "nothing")

    def all(self) -> int:
        """Run all cases and return the exit code."""
        logging.getLogger().addHandler(self._witness)
        try:
            return self._all()
        finally:
            logging.getLogger().removeHandler(self._witness)
            if self._options.watched:
                faulthandler.cancel_dump_traceback_later()

    def _all(self) -> int:
        options, began_s, reported_s = self._options, time.monotonic(), time.monotonic()
        first = options.first // CASES * CASES
        kinds = [
            one for one in PLACES if options.kind in ("", one[1], one[0].name, f"{one[0].name}-{one[1]}")
        ]
        if not kinds:
            raise SystemExit(f"no service or kind of caller is called {options.kind!r}")
        while self.done < options.cases and (
            not options.seconds or time.monotonic() - began_s < options.seconds
        ):
            number = first + self.done * options.step
            make, kind = kinds[number // CASES % len(kinds)]
            place = make(kind, f"{options.seed}/{number}", self._witness)
            place.large_share = options.large
            try:
                self._one(place, number, min(CASES, options.cases - self.done))
            except Exception as error:
                self._report_failure(place, number, error)
                return 1
            self._longest = max(self._longest, place.longest)
            for method, times in place.answered.items():
                name = method_name(method)
                self.answered[name] = self.answered.get(name, 0) + times
            self._places += 1
            self._check_memory()
            if time.monotonic() - reported_s > 0.5:
                reported_s = time.monotonic()
                self._progress()
        self._progress()
        if options.stats:
            print(
                "answered:",
                " ".join(f"{name}={count}" for name, count in sorted(self.answered.items())),
                flush=True,
            )
        return 0

    def _watch(self) -> None:
        if self._options.watched:
            faulthandler.dump_traceback_later(STALL_S, exit=True)

    def _progress(self) -> None:
        spent_s, where = self._longest
        print(f"done {self.done} {resident_bytes()} {int(spent_s * 1e6)} {where}", flush=True)

    def _one(self, place: FuzzTarget, number: int, count: int) -> None:
        loop = place.loop()
        asyncio.set_event_loop(loop)
        loop.set_exception_handler(self._witness.unhandled)
        only = getattr(wire_pb2, self._options.only) if self._options.only else None

        async def cases() -> None:
            self._watch()
            await place.begin(loop)
            for case in range(count):
                if not case % 50:
                    self._watch()
                asked = await place.case(only)
                self._recent.append((number + case, *asked))
                if self._witness.said or not (case + 1) % CHECK_EVERY:
                    place.check()
            await place.end()

        try:
            loop.run_until_complete(cases())
        finally:
            place.clean_up()
            with contextlib.suppress(Exception):
                loop.close()
        self.done += count

    def _check_memory(self) -> None:
        if self._places < WARM:
            return
        now = resident_bytes()
        if not self._grown_from:
            self._grown_from = now
        elif now - self._grown_from > GROWTH_BYTES:
            gc.collect()
            if resident_bytes() - self._grown_from > GROWTH_BYTES:
                raise SystemExit(
                    f"TROUBLE: the process has grown from {self._grown_from >> 20} to {now >> 20} MiB in {self.done} cases"
                )

    def _report_failure(self, place: FuzzTarget, number: int, error: Exception) -> None:
        last = self._recent[-1][0] if self._recent else number
        print(
            f"TROUBLE at case {last} ({place.name}, {place.kind}); again with: --seed {self._options.seed} --first {number} "
            f"--cases {CASES} --kind {place.name}-{place.kind} --large {self._options.large:g}"
        )
        for case, method, message in self._recent:
            print(f"  {case} {method_name(method)} {message[:400].hex()}")
        print(
            error
            if isinstance(error, FuzzFailure) and error.__cause__ is None
            else "".join(traceback.format_exception(error))
        )
        print("\n".join(self._witness.said), flush=True)


def fuzz(kind: str, cases: int, seed: str = "1", only: str = "", large: float = LARGE_SHARE) -> int:
    """Run cases in this process and return the exit code; failures are printed to stdout.

    `large` is the share of messages with a field of up to the message limit.

    The caller must watch for a standstill.
    """
    return FuzzRun(
        argparse.Namespace(
            seed=seed,
            first=0,
            step=1,
            cases=cases,
            seconds=0.0,
            only=only,
            kind=kind,
            large=large,
            stats=False,
            watched=False,
        )
    ).all()


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seed", default="1")
    parser.add_argument("--first", type=int, default=0, help="the first case; a place begins at each 2,000th")
    parser.add_argument(
        "--step",
        type=int,
        default=1,
        help="of so many processes this is one: it leaves the others' places out",
    )
    parser.add_argument("--cases", type=int, default=20_000)
    parser.add_argument(
        "--seconds", type=float, default=0.0, help="no longer than this; 0: until all cases are done"
    )
    parser.add_argument(
        "--only", default="", metavar="METHOD", help="META_CREATE, DATA_READ, …: this method alone"
    )
    parser.add_argument(
        "--kind",
        default="",
        help="only this service, kind of caller, or both: "
        + ", ".join(dict.fromkeys(f"{place.name}-{kind}" for place, kind in PLACES)),
    )
    parser.add_argument("--large", type=float, default=LARGE_SHARE, help="share of messages of up to 4 MiB")
    parser.add_argument(
        "--stats", action="store_true", help="at the end, how often each method did what it was asked for"
    )
    logging.lastResort = None  # messages below ERROR are ignored
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        return FuzzRun(parser.parse_args(namespace=argparse.Namespace(watched=True))).all()
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main())
