"""Check of words: no new use of a private word for which the field has a term, and the baseline only shrinks."""

import importlib.util
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def check_words():
    spec = importlib.util.spec_from_file_location("check_words", ROOT / "tools" / "check_words.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_word_baseline_is_kept():
    check = subprocess.run(
        [sys.executable, "tools/check_words.py"], cwd=ROOT, capture_output=True, text=True, timeout=120
    )
    assert check.returncode == 0, check.stdout + check.stderr


def test_word_check_suggests_the_field_term():
    words = check_words()
    ((line, word, field),) = words.uses_in("nothing here\nthe Wish of a user, fulltold, distell")
    assert (line, word) == (2, "wish") and "operator request" in field


def test_word_check_reports_more_and_fewer():
    words = check_words()
    use = words.uses_in("is_told")
    assert words.problems({"a": use}, {"a": 1}) == []
    assert "new" in words.problems({"a": use}, {})[0]
    assert "--update" in words.problems({}, {"a": 1})[0]
