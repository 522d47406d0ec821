"""How the CLI shows things: rich tables on a terminal, plain lines in a pipe, JSON on request; errors and exit codes.

Called by every file of nvpool/cli. Guarantees that stdout holds the result and nothing else, and stderr everything that is
said on the way; rich is imported for a terminal only. The one place where our errors become exit codes.
"""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

import click

from nvpool.core.errors import BadConfiguration, Bug, Damaged, NvpoolError, Refused, Stale, Unavailable
from nvpool.core.remedies import with_pool

EXIT_REFUSED, EXIT_USAGE, EXIT_UNAVAILABLE, EXIT_DAMAGED, EXIT_BUG, EXIT_INTERRUPTED = 1, 2, 3, 4, 70, 130

CommandFunction = TypeVar("CommandFunction", bound=Callable[..., Any])
"""A function on its way to become a click command: a decorator of options returns what it was given."""

_REMEDY = re.compile(r"; ([^;]*\bnvpool [a-z].*)", re.DOTALL)

json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON.")


class Number(click.FloatRange):
    """A number within bounds; click takes nan for one within any."""

    def convert(self, value: Any, parameter: click.Parameter | None, context: click.Context | None) -> float:
        number = super().convert(value, parameter, context)
        if number != number:
            self.fail(f"{value!r} is not a number", parameter, context)
        return number


def log_options(function: CommandFunction) -> CommandFunction:
    """How a daemon that a command starts writes its log."""
    function = click.option("--log-level", type=click.Choice(["debug", "info", "warning", "error"]),
                            help="The least that is logged. [level under [log] in node.toml, else info]")(function)
    return click.option("--log-format", type=click.Choice(["text", "json"]),
                        help="json: an object a line. [format under [log] in node.toml, else text]")(function)


def pool_argument(function: CommandFunction) -> CommandFunction:
    """The argument POOL, which NVPOOL_POOL stands in for."""
    return click.argument("pool", envvar="NVPOOL_POOL", metavar="POOL", callback=remember_pool)(function)


def remember_pool(context: click.Context, parameter: click.Parameter | None, pool: str | None) -> str | None:
    """Callback of what names the pool of a call: messages name it in their commands from then on. An argument that may be left
    out stands for the current directory then."""
    called = context.find_root().obj
    if isinstance(called, dict) and (pool or isinstance(parameter, click.Argument)):
        called["pool"] = pool or "."
    return pool


def completed(text: str) -> str:
    """`text` with the pool of this call in its commands, in place of POOL."""
    context = click.get_current_context(silent=True)
    called = context.find_root().obj if context is not None else None
    return with_pool(text, called.get("pool", "")) if isinstance(called, dict) else text


def exit_code(error: BaseException) -> int:
    """By the family; the SDK's errors are OSError, and their cause says which that is."""
    if isinstance(error, OSError) and isinstance(error.__cause__, NvpoolError):
        error = error.__cause__
    if isinstance(error, BadConfiguration):
        return EXIT_USAGE
    for families, code in (((Unavailable, Stale), EXIT_UNAVAILABLE), (Damaged, EXIT_DAMAGED), (Bug, EXIT_BUG),
                           (Refused, EXIT_REFUSED), (OSError, EXIT_REFUSED), (KeyboardInterrupt, EXIT_INTERRUPTED)):
        if isinstance(error, families):
            return code
    return EXIT_BUG


def error_object(message: str, code: str, exit_code: int, remedy: str = "") -> dict[str, Any]:
    """An error as --json prints it."""
    return {"error": {"message": message, "code": code, "exit_code": exit_code} | ({"remedy": remedy} if remedy else {})}


def show_error(error: BaseException, as_json: bool = False, pool: str = "") -> int:
    """Say on stderr what went wrong, and with --json on stdout too, as an object; the exit code for it. Only a bug shows a
    traceback. `pool` is the call's, for the commands of the remedy."""
    code = exit_code(error)
    text = with_pool(_text_of(error), pool)
    if as_json:
        known = error.__cause__ if isinstance(error, OSError) and isinstance(error.__cause__, NvpoolError) else error
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
    """Reason and remedy of an error. One from another process has them in one text: there a remedy is what names a command."""
    if not remedy and (found := _REMEDY.search(text)) is not None:
        remedy = found[1]
    return text.removesuffix(f"; {remedy}") if remedy else text, remedy


def _text_of(error: BaseException) -> str:
    if isinstance(error, OSError) and not isinstance(error, NvpoolError):
        return f"{os.fsdecode(error.filename)}: {error.strerror}" if error.filename else str(error.strerror or error)
    return str(error) or type(error).__name__


def on_terminal() -> bool:
    return sys.stdout.isatty()


def say(text: str) -> None:
    """Tell the user what happens; on stderr, so that a pipe gets results only."""
    click.echo(completed(text), err=True)


def print_json(value: Any) -> None:
    click.echo(json.dumps(value, indent=2, default=str))


def print_table(columns: Sequence[str], rows: Iterable[Sequence[Any]], title: str = "") -> None:
    """A table on a terminal; in a pipe one line a row, columns divided by tabs, headed by their names."""
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


_STYLES = {"serving": "green", "starting": "yellow", "restarting": "yellow", "draining": "yellow", "silent": "red",
           "fenced": "red", "stopped": "red", "degraded": "red"}


def _cell(value: Any) -> str:
    if value is None or value == "":
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    return str(value)


def ago(milliseconds: int, now_ms: int) -> str:
    """How long ago a wall-clock time was, in two units at most: '3d 4h'."""
    seconds = max(0, (now_ms - milliseconds) // 1000)
    for size, name, below, smaller in ((86400, "d", 3600, "h"), (3600, "h", 60, "m"), (60, "m", 1, "s")):
        if seconds >= size:
            return f"{seconds // size}{name} {seconds % size // below}{smaller}"
    return f"{seconds}s"
