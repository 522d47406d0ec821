"""The command `nvpool help`: show the help of a command."""

from __future__ import annotations

import click


@click.command(
    "help",
    epilog="""\b
examples:
  nvpool help
  nvpool help volume
  nvpool help volume create
""",
)
@click.argument("words", nargs=-1, metavar="[COMMAND]...")
@click.pass_context
def help_(context: click.Context, words: tuple[str, ...]) -> None:
    """Show the help of nvpool or of a command, as --help does."""
    command: click.Command = context.find_root().command
    shown = context.find_root()
    for word in words:
        found = command.get_command(shown, word) if isinstance(command, click.Group) else None
        if found is None:
            from difflib import get_close_matches

            names = command.list_commands(shown) if isinstance(command, click.Group) else []
            near = get_close_matches(word, names, 1)
            hint = (
                f"; did you mean {near[0]}?" if near else f"; there are {', '.join(names)}" if names else ""
            )
            raise click.UsageError(f"there is no command {word!r} in {shown.command_path!r}{hint}", shown)
        shown, command = click.Context(found, info_name=word, parent=shown), found
    click.echo(command.get_help(shown))
