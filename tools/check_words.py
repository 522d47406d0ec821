"""Count private words of older code, for which the field has a word, and compare with the counts of the baseline.

    python tools/check_words.py             fail for more uses in a file than the baseline allows, and for fewer
    python tools/check_words.py --update    lower the baseline to the counts of today; it is never raised
    python tools/check_words.py PATH ...    print each use in these files and folders, with line and replacement

A reader who knows other storage systems should meet words he knows. tools/words_baseline.txt has a line for each file with old
words: count and path. It only shrinks: a new use fails, and with fewer uses the baseline must be lowered in the same change;
a file that moves takes its line along.
Words are found in identifiers too (`is_told`), not inside other words. A file of the history may name the old words freely, see
SKIPPED. Exit code 0: nothing to report; 1: something is, and was printed.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
BASELINE = ROOT / "tools" / "words_baseline.txt"
SUFFIXES = (
    ".py",
    ".pyx",
    ".pxd",
    ".pyi",
    ".h",
    ".c",
    ".md",
    ".toml",
    ".proto",
    ".sh",
    ".service",
    ".yml",
    ".yaml",
)
SKIPPED = ("CHANGELOG.md", "docs/experiments/", "tools/check_words.py")

WORDS = {
    r"told|tells?|telling": "report, notify, status, callback",
    r"whoever": "name the role: the caller, the client, the primary",
    r"at[ _]once|atonce": "immediately; fast path",
    r"plain sailing|the ordinary way": "fast path, slow path",
    r"lends?|lent|lender|lending": "location lease; short-circuit read",
    r"wish(?:es)?": "operator request, admin command, desired state",
    r"doors?": "adapter, the only importer; service",
    r"tenure|reigns?": "serving lease, primary lease, leadership lease",
    r"signs? of life": "heartbeat",
    r"begun anew|anew": "reset; again",
    r"strays?": "orphan chunks",
    r"strangers?": "peer that is not authenticated",
    r"twins?": "fake, reference implementation",
    r"truths": "invariants",
    r"giver": "source (of a migration)",
    r"taker": "destination (of a migration)",
    r"foresight": "lock prediction",
    r"hostroom": "space reserve",
    r"siblings": "look-up prefetch",
    r"wholes": "complete directories",
    r"unflushed": "unstable (writes)",
    r"tall(?:y|ies)": "statistics",
    r"spanning": "cross-shard transaction",
    r"succession": "election",
    r"zygotes?": "fork server",
    r"untold": "not reported",
    r"askers?": "caller, client",
    r"answerers?": "server side",
}
"""Old word (a regular expression) -> the field's words."""

_ANY = re.compile("(?:" + "|".join(WORDS) + ")(?![a-z])")
"""Without a look at what is before: so the search skips fast to letters with which an old word begins."""


def _field_word(word: str) -> str:
    return next(field for old, field in WORDS.items() if re.fullmatch(old, word))


def uses_in(text: str) -> list[tuple[int, str, str]]:
    """(line, old word, the field's words) of each use in `text`."""
    return [
        (number, match[0], _field_word(match[0]))
        for number, line in enumerate(text.lower().splitlines(), 1)
        for match in _ANY.finditer(line)
        if not line[max(0, match.start() - 1) : match.start()].isalpha()
    ]


def files() -> list[str]:
    """Paths, below the root, of the text files that Git tracks or would."""
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    ).stdout.splitlines()
    return sorted(
        {
            path
            for path in listed
            if path.endswith(SUFFIXES) and not path.startswith(SKIPPED) and (ROOT / path).is_file()
        }
    )


def read_baseline() -> dict[str, int]:
    """Path -> allowed count."""
    return {
        path: int(count) for count, path in (line.split(" ", 1) for line in BASELINE.read_text().splitlines())
    }


def problems(found: dict[str, list[tuple[int, str, str]]], allowed: dict[str, int]) -> list[str]:
    """Violations of the rule, a line each."""
    bad = []
    for path in sorted(found.keys() | allowed.keys()):
        uses, limit = found.get(path, []), allowed.get(path, 0)
        if len(uses) > limit:
            bad.append(f"{path}: {len(uses)} old words, {limit} are allowed; one of these is new:")
            bad += [f"  {path}:{line}: {word!r}: write {field}" for line, word, field in uses]
        elif len(uses) < limit:
            bad.append(
                f"{path}: {len(uses)} old words, the baseline has {limit}; run tools/check_words.py --update"
            )
    return bad


def main(arguments: list[str]) -> int:
    """See the module's description for arguments and exit codes."""
    found = {path: uses for path in files() if (uses := uses_in((ROOT / path).read_text(errors="replace")))}
    if arguments and arguments != ["--update"]:
        wanted = tuple(argument.rstrip("/") for argument in arguments)
        for path, uses in sorted(found.items()):
            if path in wanted or path.startswith(tuple(f"{one}/" for one in wanted)):
                print("\n".join(f"{path}:{line}: {word!r}: write {field}" for line, word, field in uses))
        return 0
    allowed = read_baseline()
    if arguments:
        allowed = {path: min(limit, len(found[path])) for path, limit in allowed.items() if path in found}
        BASELINE.write_text("".join(f"{limit} {path}\n" for path, limit in sorted(allowed.items())))
    bad = problems(found, allowed)
    if bad:
        print("\n".join(bad))
    return int(bool(bad))


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
