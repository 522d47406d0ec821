"""The command `nvpool completion`: print the completion script of a shell."""

from __future__ import annotations

import click


@click.command(
    epilog="""\b
examples:
  nvpool completion bash > /etc/bash_completion.d/nvpool
  nvpool completion zsh > "${fpath[1]}/_nvpool"
  nvpool completion fish > ~/.config/fish/completions/nvpool.fish
"""
)
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
def completion(shell: str) -> None:
    """Print the completion script of a shell."""
    from click.shell_completion import get_completion_class

    from nvpool.cli.main import cli

    completer = get_completion_class(shell)
    assert completer is not None
    complete = completer(cli, {}, "nvpool", "_NVPOOL_COMPLETE")
    # not source(), which would start the shell for its version; the script is the same
    click.echo(complete.source_template % complete.source_vars())
