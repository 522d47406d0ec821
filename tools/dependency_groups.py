"""Print the requirements of dependency groups of pyproject.toml (PEP 735), one a line, for `pip install -r`.

    python tools/dependency_groups.py test lint

pip reads dependency groups itself (`--group`) from version 25.1 on; a new environment of Python 3.11 brings an older one, and
`tools/setup.sh` must not depend on an upgrade. Groups that include others are resolved; an unknown group is an error.
"""

from __future__ import annotations

import sys
import tomllib
from pathlib import Path

PYPROJECT = Path(__file__).resolve().parents[1] / "pyproject.toml"


def requirements(groups: dict[str, list[str | dict[str, str]]], name: str) -> list[str]:
    """The requirements of one group with those of the groups it includes, in the order of the file."""
    found: list[str] = []
    for entry in groups[name]:
        found += [entry] if isinstance(entry, str) else requirements(groups, entry["include-group"])
    return found


def main(names: list[str]) -> int:
    """Print each requirement of the named groups once. Exit code 2: a group does not exist."""
    groups = tomllib.loads(PYPROJECT.read_text())["dependency-groups"]
    unknown = [name for name in names if name not in groups]
    if unknown:
        print(
            f"no dependency group {', '.join(unknown)} in pyproject.toml; there are: {', '.join(groups)}",
            file=sys.stderr,
        )
        return 2
    print("\n".join(dict.fromkeys(line for name in names for line in requirements(groups, name))))
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
