"""Commands named in messages exist and are given with all their arguments."""

import ast
import re
from itertools import takewhile
from pathlib import Path

import click
import pytest

from nvpool.cli.main import cli

PACKAGE = Path(__file__).resolve().parents[2] / "nvpool"
MODULES = [path for path in sorted(PACKAGE.rglob("*.py")) if not {"v1", "testing"} & set(path.parts)]
HELP = {"help", "epilog", "short_help"}
COMMAND = re.compile(r"\bnvpool ([a-z]+)(?: ([a-z-]+))?(?=[ `,;:.)]|$)")
NO_COMMANDS = {("shm/mount_state.py", "nvpool mount")}
"""Text that is no command: the name of the shared memory of a mount."""
PROSE = re.compile(r"(?!(?:ro|rw)$)[a-z]+")
"""Arguments in messages are values, or words in capitals."""
MAYBE = re.compile(r"\bnvpool(?![./\w])")
"""The program's name in a source; a module without it is not parsed."""
END = re.compile(r"[`;,)]|: |\. |   |$")


def texts(tree):
    """(line, text) of each string that is neither a docstring nor a help text; an expression in braces is one word."""
    passed = set()
    for node in ast.walk(tree):
        if node in passed:
            passed.update(ast.iter_child_nodes(node))
        elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            passed.add(node.value)
        elif isinstance(node, ast.keyword) and node.arg in HELP:
            passed.update(ast.walk(node.value))
        elif isinstance(node, ast.JoinedStr):
            passed.update(ast.walk(node))
            yield (
                node.lineno,
                "".join(part.value if isinstance(part, ast.Constant) else "{}" for part in node.values),
            )
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.lineno, node.value


def missing(text):
    """Commands in `text` that lack arguments, each with the arguments that it needs."""
    for found in COMMAND.finditer(text):
        context = click.Context(cli)
        command, end = cli.get_command(context, found[1]), found.end(1)
        if isinstance(command, click.Group) and found[2]:
            command, end = command.get_command(context, found[2]), found.end(2)
        if command is None or isinstance(command, click.Group):
            continue  # the name of a pool, or of the program
        given = [
            word
            for word in text[end : end + END.search(text[end:]).start()].split()
            if not word.startswith("-")
        ]
        words = list(takewhile(lambda word: not PROSE.fullmatch(word), given))
        needed = [
            one.make_metavar(context)
            for one in command.params
            if isinstance(one, click.Argument) and one.required
        ]
        if len(words) < len(needed):
            yield found[0], " ".join(needed)


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_commands_in_messages_are_complete(path):
    name, source = str(path.relative_to(PACKAGE)), path.read_text()
    lacking = [
        (line, *one)
        for line, text in (texts(ast.parse(source)) if MAYBE.search(source) else ())
        for one in missing(text)
        if (name, one[0]) not in NO_COMMANDS
    ]
    assert not lacking, lacking
