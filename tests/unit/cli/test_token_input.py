"""Sources of the token for `node join` and `client join`, and what other users can see of it."""

import subprocess
import sys

import click
import pytest
from click.testing import CliRunner

from nvpool.cli.commands import client, node
from nvpool.cli.token_input import VARIABLE, join_command, token_from
from nvpool.core.config import Config
from nvpool.core.errors import NotFound

TOKEN = "nvp1." + "A" * 64
HIDES = """
import sys
from pathlib import Path
from nvpool.cli.commands import client; from nvpool.cli import main
seen = []
client.entered = lambda *arguments: seen.append((arguments[3], Path("/proc/self/cmdline").read_bytes())) or sys.exit(0)
try:
    main.main()
except SystemExit:
    pass
print(seen[0][0])
print(seen[0][1].split(b"\\0")[-3:])
"""


@pytest.fixture
def joined(monkeypatch):
    """Tokens that `client join` received; nothing joins."""
    tokens = []

    def entered(kind, address, directory, token, config, name):
        tokens.append(token)
        return {"member": "client/x", "name": "p", "pool_id": "0" * 32, "directory": directory}

    monkeypatch.setattr(client, "entered", entered)
    monkeypatch.delenv(VARIABLE, raising=False)
    return tokens


def join(*words, **how):
    return CliRunner().invoke(client.join, ["10.0.0.1:17512", "there", *words], **how)


@pytest.mark.parametrize("text", [TOKEN, TOKEN + "\n", f"  {TOKEN}\nmore\n"])
def test_token_is_read_from_standard_input(joined, text):
    assert join("--token", "-", input=text).exit_code == 0
    assert joined == [TOKEN]


def test_token_is_read_from_a_file(joined, tmp_path):
    (tmp_path / "token").write_text(TOKEN + "\n")
    assert join("--token-file", str(tmp_path / "token")).exit_code == 0
    assert joined == [TOKEN]


def test_token_is_read_from_the_environment(joined):
    assert join(env={VARIABLE: TOKEN}).exit_code == 0
    assert joined == [TOKEN]


def test_token_prompt_has_no_echo(joined, monkeypatch):
    prompts = []
    monkeypatch.setattr(
        "nvpool.cli.token_input.sys.stdin", type("Terminal", (), {"isatty": staticmethod(lambda: True)})
    )
    monkeypatch.setattr(click, "prompt", lambda text, **how: prompts.append((text, how)) or TOKEN)
    assert token_from(None, None, "node") == TOKEN
    assert prompts == [("token", {"hide_input": True, "err": True})]


@pytest.mark.parametrize(
    "words, how, said",
    [
        ((), {}, "there is no token"),
        (("--token", "-"), {"input": "\n"}, "has no token in its first line"),
        (("--token", "-", "--token-file", "x"), {"input": TOKEN}, "exclude each other"),
    ],
)
def test_missing_token_is_a_usage_error(joined, words, how, said):
    done = join(*words, **how)
    assert done.exit_code == 2 and said in done.output and joined == []


@pytest.mark.parametrize(("command", "kind"), [(node.join, "node"), (client.join, "client")])
def test_missing_token_names_the_command_of_its_kind(joined, command, kind):
    """A client's user must not ask for a token that would make this machine a node."""
    words = ["10.0.0.1:17512", *(["there"] if kind == "client" else [])]
    done = CliRunner().invoke(command, words)
    assert done.exit_code == 2 and f"`nvpool {kind} token POOL`" in done.output
    other = {"node": "client", "client": "node"}[kind]
    assert f"nvpool {other} token" not in done.output


def test_missing_token_file_is_named(joined, tmp_path):
    with pytest.raises(NotFound, match="nowhere"):
        token_from(None, str(tmp_path / "nowhere"), "node")


def test_token_as_an_argument_warns(joined):
    done = CliRunner().invoke(client.join, ["10.0.0.1:17512", "there", "--token", TOKEN])
    assert joined == [TOKEN]
    assert "warning: a token on the command line can be read by every user" in done.stderr


@pytest.mark.parametrize(
    "words, shown",
    [
        (["--token", TOKEN], [b"--token", b"x" * len(TOKEN), b""]),
        (["--token", "e"], [b"--token", b"x", b""]),
        ([f"--token={TOKEN}"], [b"there", b"--token=" + b"x" * len(TOKEN), b""]),
    ],
)
def test_token_argument_is_hidden_in_the_process_list(words, shown):
    done = subprocess.run(
        [sys.executable, "-c", HIDES, "client", "join", "10.0.0.1:17512", "there", *words],
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.splitlines() == [words[-1].removeprefix("--token="), str(shown)]


def test_token_is_removed_from_the_environment(joined):
    done = subprocess.run(
        [
            sys.executable,
            "-c",
            "import os; from nvpool.cli.token_input import token_from; token_from(None, None, 'node'); "
            f"print({VARIABLE!r} in os.environ)",
        ],
        env={VARIABLE: TOKEN},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout == "False\n"


@pytest.mark.parametrize("kind", ["node", "client"])
def test_join_command_has_no_token_among_its_arguments(kind):
    line = join_command({"address": "stream://10.0.0.1:17512", "token": TOKEN}, Config(), kind)
    variable, *words = line.split()
    assert variable == f"{VARIABLE}={TOKEN}" and words[:4] == ["nvpool", kind, "join", "10.0.0.1:17512"]
    assert TOKEN not in " ".join(words)
