"""Input of the join token for `nvpool node join` and `nvpool client join`, and the command that carries it.

Every user of a machine can read the arguments of all processes (proc(5), cmdline), and the first user of a
token consumes the token. So the token comes from a file, standard input, the environment or a terminal. A
token on the command line is accepted with a warning, and overwritten in the memory of this process from
which /proc shows it.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from nvpool.cli.output import say
from nvpool.core.errors import from_os_error

if TYPE_CHECKING:
    from nvpool.core.config import Config

VARIABLE = "NVPOOL_TOKEN"
_TOKEN_BYTES_MAX = 4096
WAYS = """\b
The token works once. It comes from the first of these sources that is given:
  --token -            standard input, its first line
  --token-file PATH    the first line of a file
  NVPOOL_TOKEN         an environment variable
  a terminal           a prompt without echo
--token TOKEN works too, but other users of this machine can read it in the list of processes.
"""
"""Text for the epilog of a command with `token_options`."""


def join_command(join: dict[str, Any], config: Config, kind: str = "node") -> str:
    """Return the shell command to join. The token is in a variable, which other users cannot read."""
    where = "--drive PATH" if kind == "node" else "DIR"
    plain = " --plain-text" if config.network.plain_text else ""
    return f"{VARIABLE}={join['token']} nvpool {kind} join {join['address'].removeprefix('stream://')} {where}{plain}"


def token_options(kind: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Add --token and --token-file, and pass the token to the command as `token_text`; see `token_from`."""

    def decorated(command: Callable[..., Any]) -> Callable[..., Any]:
        def with_token(*arguments: Any, token_given: str | None, token_file: str | None, **named: Any) -> Any:
            return command(*arguments, token_text=token_from(token_given, token_file, kind), **named)

        with_token.__name__, with_token.__doc__ = command.__name__, command.__doc__
        with_token.__dict__.update(command.__dict__)
        file = click.option("--token-file", metavar="PATH", help="File whose first line is the token.")
        given = click.option(
            "--token", "token_given", metavar="-", help="Read the token from standard input."
        )
        return given(file(with_token))

    return decorated


def token_from(given: str | None, file: str | None, kind: str) -> str:
    """Return the token, from the first source of `WAYS` that has one.

    `kind` is that of the joining member, "node" or "client", for the remedy.

    UsageError: there is no token, or both options are given. NotFound, AccessDenied: of the file.
    """
    if given is not None and file is not None:
        raise click.UsageError("--token and --token-file exclude each other")
    if given == "-":
        return _first_line(sys.stdin.readline(_TOKEN_BYTES_MAX), "standard input")
    if given is not None:
        say(
            f"warning: a token on the command line can be read by every user of this machine in the list of processes; use "
            f"--token -, --token-file PATH or the variable {VARIABLE}"
        )
        return given
    if file is not None:
        try:
            with Path(file).open(encoding="utf-8", errors="replace") as opened:
                return _first_line(opened.readline(_TOKEN_BYTES_MAX), file)
        except OSError as error:
            raise from_os_error(error, f"read the token from {file}") from None
    if token := os.environ.pop(VARIABLE, "").strip():  # daemons started from here do not inherit the token
        return token
    if sys.stdin.isatty():
        return click.prompt("token", hide_input=True, err=True).strip()
    raise click.UsageError(
        f"there is no token: give it by --token - (standard input), --token-file PATH, or the variable "
        f"{VARIABLE}; `nvpool {kind} token POOL` on a node of the pool makes one"
    )


def _first_line(line: str, where: str) -> str:
    if not (token := line.strip()):
        raise click.UsageError(f"{where} has no token in its first line")
    return token


def hide_tokens(words: Sequence[str]) -> None:
    """Overwrite the values of --token in the arguments of this process that /proc shows."""
    for word, following in zip(words, [*words[1:], "-"], strict=True):
        given = (
            following if word == "--token" else word.partition("=")[2] if word.startswith("--token=") else "-"
        )
        if given != "-":
            hide_argument(given)


def hide_argument(text: str) -> None:
    """Overwrite `text` in the arguments that /proc/PID/cmdline shows, if they can be found."""
    wanted = os.fsencode(text)
    if not wanted:
        return
    with contextlib.suppress(OSError, ValueError, IndexError):
        # proc(5): after the name, which may contain blanks, comes field 3; arg_start is 48, arg_end 49.
        fields = Path("/proc/self/stat").read_bytes().rpartition(b")")[2].split()
        start, end = int(fields[45]), int(fields[46])
        if not 0 < start < end:
            return
        there = ctypes.string_at(start, end - start)
        at = there.find(wanted)
        while at >= 0:
            if there[at - 1 : at] in (b"\0", b"=") and there[at + len(wanted) :][:1] in (
                b"\0",
                b"",
            ):  # a whole argument or value
                ctypes.memset(start + at, ord("x"), len(wanted))
            at = there.find(wanted, at + 1)
