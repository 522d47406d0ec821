"""Run `mypy --strict` over the package and compare its errors with the list of modules that are not clean yet.

    python tools/check_types.py             fail for an error in any other module, and for a listed module without errors
    python tools/check_types.py --update    remove from the list what is clean or gone; modules are never added
    python tools/check_types.py PATH ...    print the errors of these files and folders, listed or not

The list is tools/types_baseline.txt, one path a line; it only shrinks. mypy's settings are in pyproject.toml. Exit code 0:
nothing to report; 1: something is, and was printed; 2: mypy itself did not run.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
BASELINE = ROOT / "tools" / "types_baseline.txt"


def errors_by_file() -> dict[str, list[str]]:
    """Path below the root -> lines of mypy, for each file with errors. RuntimeError: mypy did not finish."""
    run = subprocess.run(
        [sys.executable, "-m", "mypy", "--no-error-summary", "--hide-error-context", "--no-pretty"],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    if run.returncode not in (0, 1):
        raise RuntimeError(run.stdout + run.stderr)
    found: dict[str, list[str]] = {}
    for line in run.stdout.splitlines():
        if ": error: " in line:
            found.setdefault(line.split(":", 1)[0], []).append(line)
    return found


def problems(found: dict[str, list[str]], listed: list[str]) -> list[str]:
    """Violations of the rule: errors outside of the list, then entries of the list that have none."""
    new = [line for path, lines in sorted(found.items()) if path not in listed for line in lines]
    return new + [
        f"{path}: listed in {BASELINE.name} but clean or gone; run tools/check_types.py --update"
        for path in listed
        if path not in found
    ]


def main(arguments: list[str]) -> int:
    """See the module's description for arguments and exit codes."""
    try:
        found = errors_by_file()
    except RuntimeError as error:
        print(error, file=sys.stderr)
        return 2
    listed = BASELINE.read_text().split()
    if arguments == ["--update"]:
        kept = [path for path in listed if path in found]
        BASELINE.write_text("".join(f"{path}\n" for path in kept))
        print(f"{len(kept)} modules are listed, {len(listed) - len(kept)} were removed")
        listed = kept
    elif arguments:
        wanted = tuple(argument.rstrip("/") for argument in arguments)
        chosen = [
            line
            for path, lines in sorted(found.items())
            for line in lines
            if path in wanted or path.startswith(tuple(f"{one}/" for one in wanted))
        ]
        print("\n".join([*chosen, f"{len(chosen)} errors"]))
        return int(bool(chosen))
    bad = problems(found, listed)
    if bad:
        print("\n".join(bad))
    return int(bool(bad))


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
