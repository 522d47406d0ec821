"""Record how long each file of tests takes, from pytest's JUnit reports, in tests/durations.json.

    make test-all                             writes build/junit-*.xml
    python tools/record_durations.py build/junit-all.xml

Files run in the order of this list, the longest first (tests/conftest.py). Files that a report does not name keep their time,
files that are gone are removed. A time is what the tests of a file took one after the other, set-up included, in seconds.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from xml.etree import ElementTree

ROOT = Path(__file__).resolve().parents[1]
DURATIONS = ROOT / "tests/durations.json"


def seconds_of(report: Path) -> dict[str, float]:
    """File -> seconds of its tests. JUnit's class name of a test is its module, and its class if it is in one."""
    found: dict[str, float] = {}
    for case in ElementTree.parse(report).iter("testcase"):
        parts = case.get("classname", "").split(".")
        while parts and not (ROOT / Path(*parts)).with_suffix(".py").is_file():
            parts.pop()
        if parts:
            name = Path(*parts).with_suffix(".py").as_posix()
            found[name] = found.get(name, 0.0) + float(case.get("time", 0.0))
    return found


def main() -> int:
    """Merge the reports into the list and write it."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "report", nargs="+", type=Path, help="JUnit report of a run with -o junit_duration_report=total"
    )
    known = json.loads(DURATIONS.read_text()) if DURATIONS.exists() else {}
    for report in parser.parse_args().report:
        known |= {name: round(seconds, 1) for name, seconds in seconds_of(report).items()}
    kept = {name: known[name] for name in sorted(known) if (ROOT / name).is_file()}
    DURATIONS.write_text(json.dumps(kept, indent=0) + "\n")
    print(f"{len(kept)} files, {sum(kept.values()):.0f} s of work")
    return 0


if __name__ == "__main__":
    sys.exit(main())
