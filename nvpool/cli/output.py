"""Output of the command line: tables, JSON, messages, errors and exit codes.

Every module of nvpool/cli uses this one. Results go to stdout and nothing else does; messages go to stderr.
A result is a rich table on a terminal, plain lines in a pipe, and JSON with --json. The library rich is
imported only for a terminal. This is the only place that translates nvpool's errors into exit codes.
"""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

import click

from nvpool.core.errors import (
    BadConfiguration,
    Bug,
    Damaged,
    NvpoolError,
    Refused,
    Stale,
    Unavailable,
    with_pool,
)
from nvpool.core.renamed_fields import with_old_fields
from nvpool.core.units import parse_bytes

EXIT_REFUSED, EXIT_USAGE, EXIT_UNAVAILABLE, EXIT_DAMAGED, EXIT_BUG, EXIT_INTERRUPTED = 1, 2, 3, 4, 70, 130

CommandFunction = TypeVar("CommandFunction", bound=Callable[..., Any])
"""Type of a function that becomes a click command; a decorator of options returns the type it receives."""

_REMEDY = re.compile(r"; ([^;]*\bnvpool [a-z].*)", re.DOTALL)

json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON.")


class Number(click.FloatRange):
    """Number within bounds. Refuses nan, which click accepts as within any bounds."""

    def convert(self, value: Any, parameter: click.Parameter | None, context: click.Context | None) -> float:
        number = super().convert(value, parameter, context)
        if number != number:
            self.fail(f"{value!r} is not a number", parameter, context)
        return number


class ByteSize(click.ParamType):  # type: ignore[type-arg]  # generic only in newer click; 8.1 is supported
    """Click type of a size in bytes, as in 500G."""

    name = "size"

    def convert(
        self, value: str | int, parameter: click.Parameter | None, context: click.Context | None
    ) -> int:
        if isinstance(value, int):
            return value
        try:
            return parse_bytes(value)
        except ValueError as error:
            self.fail(str(error), parameter, context)


def log_options(function: CommandFunction) -> CommandFunction:
    """Add --log-level and --log-format: how the daemon that the command starts writes its log."""
    function = click.option(
        "--log-level",
        type=click.Choice(["debug", "info", "warning", "error"]),
        help="Lowest level that is logged. [level under [log] in node.toml, else info]",
    )(function)
    return click.option(
        "--log-format",
        type=click.Choice(["text", "json"]),
        help="json: one object per line. [format under [log] in node.toml, else text]",
    )(function)


def pool_argument(function: CommandFunction) -> CommandFunction:
    """Add the argument POOL, whose default is the environment variable NVPOOL_POOL."""
    return click.argument("pool", envvar="NVPOOL_POOL", metavar="POOL", callback=remember_pool)(function)


def remember_pool(context: click.Context, parameter: click.Parameter | None, pool: str | None) -> str | None:
    """Remember the pool of this command line, so that commands in messages name that pool.

    Callback of the arguments and options that name a pool. An optional argument that is missing means the
    current directory.
    """
    called = context.find_root().obj
    if isinstance(called, dict) and (pool or isinstance(parameter, click.Argument)):
        called["pool"] = pool or "."
    return pool


def completed(text: str) -> str:
    """Return `text` with the pool of this command line in place of POOL in the commands that `text` names."""
    context = click.get_current_context(silent=True)
    called = context.find_root().obj if context is not None else None
    return with_pool(text, called.get("pool", "")) if isinstance(called, dict) else text


def exit_code(error: BaseException) -> int:
    """Return the exit code of an error, by its family; that of an OSError of the SDK is in its cause."""
    if isinstance(error, OSError) and isinstance(error.__cause__, NvpoolError):
        error = error.__cause__
    if isinstance(error, BadConfiguration):
        return EXIT_USAGE
    for families, code in (
        ((Unavailable, Stale), EXIT_UNAVAILABLE),
        (Damaged, EXIT_DAMAGED),
        (Bug, EXIT_BUG),
        (Refused, EXIT_REFUSED),
        (OSError, EXIT_REFUSED),
        (KeyboardInterrupt, EXIT_INTERRUPTED),
    ):
        if isinstance(error, families):
            return code
    return EXIT_BUG


def error_object(message: str, code: str, exit_code: int, remedy: str = "") -> dict[str, Any]:
    """Return an error as the object that --json prints."""
    return {
        "error": {"message": message, "code": code, "exit_code": exit_code}
        | ({"remedy": remedy} if remedy else {})
    }


def show_error(error: BaseException, as_json: bool = False, pool: str = "") -> int:
    """Print an error to stderr and return its exit code.

    With `as_json` the error also goes to stdout, as an object. Only a bug prints a traceback. `pool` is the
    pool of this command line, for the commands in the remedy.
    """
    code = exit_code(error)
    text = with_pool(_text_of(error), pool)
    if as_json:
        known = (
            error.__cause__
            if isinstance(error, OSError) and isinstance(error.__cause__, NvpoolError)
            else error
        )
        reason, remedy = _parted(text, with_pool(getattr(known, "remedy", ""), pool))
        print_json(error_object(reason, type(known).__name__, code, remedy))
    if code == EXIT_BUG:
        import traceback

        traceback.print_exception(error)
        click.echo("nvpool: this is a bug of nvpool; please report it with the lines above", err=True)
        return code
    click.echo(f"nvpool: {text}", err=True)
    return code


def _parted(text: str, remedy: str) -> tuple[str, str]:
    """Split the text of an error into reason and remedy.

    An error of another process has both in one text; there the part that names a command is the remedy.
    """
    if not remedy and (found := _REMEDY.search(text)) is not None:
        remedy = found[1]
    return text.removesuffix(f"; {remedy}") if remedy else text, remedy


def _text_of(error: BaseException) -> str:
    if isinstance(error, OSError) and not isinstance(error, NvpoolError):
        return (
            f"{os.fsdecode(error.filename)}: {error.strerror}"
            if error.filename
            else str(error.strerror or error)
        )
    return str(error) or type(error).__name__


def on_terminal() -> bool:
    return sys.stdout.isatty()


def say(text: str) -> None:
    """Print a message for the user to stderr, so that a pipe receives results only."""
    click.echo(completed(text), err=True)


def print_json(value: Any) -> None:
    """Print the result of --json, with the old names of renamed fields beside the present ones."""
    click.echo(json.dumps(with_old_fields(value), indent=2, default=str))


def print_table(columns: Sequence[str], rows: Iterable[Sequence[Any]], title: str = "") -> None:
    """Print a table. In a pipe: a line of column names, then a line for each row, separated by tabs."""
    shown = [[_cell(value) for value in row] for row in rows]
    if not on_terminal():
        for row in ([column.upper() for column in columns], *shown):
            click.echo("\t".join(cell.replace("\t", " ").replace("\n", " ") for cell in row))
        return
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(title=title or None, title_justify="left", box=None, header_style="bold", pad_edge=False)
    for column in columns:
        table.add_column(column, overflow="fold")
    for row in shown:
        table.add_row(*[Text(cell, style=_STYLES.get(cell, "")) for cell in row])
    Console().print(table)


_STYLES = {
    "serving": "green",
    "starting": "yellow",
    "restarting": "yellow",
    "draining": "yellow",
    "silent": "red",
    "fenced": "red",
    "stopped": "red",
    "degraded": "red",
}


def _cell(value: Any) -> str:
    if value is None or value == "":
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    return str(value)


def ago(milliseconds: int, now_ms: int) -> str:
    """Return how long ago a wall-clock time was, in at most two units: '3d 4h'."""
    seconds = max(0, (now_ms - milliseconds) // 1000)
    for size, name, below, smaller in ((86400, "d", 3600, "h"), (3600, "h", 60, "m"), (60, "m", 1, "s")):
        if seconds >= size:
            return f"{seconds // size}{name} {seconds % size // below}{smaller}"
    return f"{seconds}s"
