"""Entry point of the command `nvpool`, whose commands are nouns with verbs: `nvpool drive add`.

`main` imports the module of a noun only when the command line names that noun, so `nvpool` starts fast.
People and scripts call it. Every command has the exit codes of EXIT_CODES. An error is one line on stderr,
with the remedy if there is one; only a bug prints a traceback. Ctrl-C ends a command immediately. To add a
command, write nvpool/cli/commands/NOUN.py with a click command or group, and name it in COMMANDS.
"""

from __future__ import annotations

import os
import sys
from importlib import import_module
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from click.shell_completion import CompletionItem

COMMANDS: dict[str, tuple[str, str]] = {
    "pool": ("nvpool.cli.commands.pool:pool", "Make and destroy pools, and have their chunks moved."),
    "status": ("nvpool.cli.commands.status:status", "Show a pool: its processes, drives and problems."),
    "top": ("nvpool.cli.commands.top:top", "Show, live, who reads and writes what at which latency."),
    "metrics": ("nvpool.cli.commands.metrics:metrics", "Print what Prometheus is told of a node."),
    "serve": ("nvpool.cli.commands.serve:serve", "Serve the part of a pool that is on this node, in the foreground."),
    "mount": ("nvpool.cli.mount.command:mount", "Mount a pool."),
    "umount": ("nvpool.cli.mount.command:umount", "Unmount a pool."),
    "bridge": ("nvpool.cli.commands.bridge:bridge", "Give containers volumes of a pool: Docker's plugin."),
    "node": ("nvpool.cli.commands.node:node", "List the nodes of a pool, let them in, drain and remove them."),
    "client": ("nvpool.cli.commands.client:client", "Let clients that are no nodes into a pool."),
    "cert": ("nvpool.cli.commands.cert:cert", "List, renew and revoke the certificates of a pool."),
    "drive": ("nvpool.cli.commands.drive:drive", "List, add, drain, replace and remove drives of a running pool."),
    "shard": ("nvpool.cli.commands.shard:shard", "List, add and remove metadata shards, and say how many standbys they have."),
    "dir": (
        "nvpool.cli.commands.dir:directory",
        "Say how many replicas new files of a directory have, and how large their chunks are.",
    ),
    "volume": ("nvpool.cli.commands.volume:volume", "Make volumes: directories with quotas, rights and other policies."),
    "encryption": (
        "nvpool.cli.commands.encryption:encryption",
        "Make the pool key, which protects encrypted volumes, and replace it.",
    ),
    "trash": ("nvpool.cli.commands.trash:trash", "See what was removed in a volume, put it back, or remove it for good."),
    "file": ("nvpool.cli.commands.file:file", "Show where the bytes of a file lie."),
    "import": ("nvpool.cli.commands.import_tree:import_tree", "Copy a tree into a pool: parallel, resumable, verified."),
    "export": ("nvpool.cli.commands.export_tree:export_tree", "Copy a tree out of a pool: parallel, resumable, verified."),
    "fsck": ("nvpool.cli.commands.fsck:fsck", "Check a pool, and repair it."),
    "scrub": ("nvpool.cli.commands.scrub:scrub", "Have everything that is stored read and compared."),
    "dump": ("nvpool.cli.commands.dump:dump", "Write all metadata of one moment to a file."),
    "load": ("nvpool.cli.commands.load:load", "Load dumped metadata into an empty pool."),
    "doctor": ("nvpool.cli.doctor.command:doctor", "Say what makes a pool slow or unsafe here, and the remedy."),
    "audit": ("nvpool.cli.commands.audit:audit", "Show who changed a pool, and who was refused."),
    "bench": ("nvpool.cli.commands.bench:bench", "Measure a pool."),
    "config": ("nvpool.cli.commands.config:config", "Show, check and explain the configuration of a node."),
    "dev": ("nvpool.cli.commands.dev:dev", "A throw-away pool on this machine, all of it under one directory."),
    "completion": ("nvpool.cli.commands.completion:completion", "Print the completion script of a shell."),
    "version": ("nvpool.cli.commands.version:version", "Print the version."),
    "help": ("nvpool.cli.commands.help:help_", "Show the help of a command."),
}
"""Name of each command -> the module and object that define it, and its line in `nvpool --help`."""

EXIT_CODES = """\b
exit codes:
  0    done
  1    refused or failed, with the reason on stderr
  2    the command line or a configuration is wrong
  3    the pool, or a part of it that is needed, is not available
  4    something stored is damaged (fsck: problems were found)
  70   a bug of nvpool
  130  interrupted

\b
With --json an error is an object on stdout, beside its line on stderr:
  {"error": {"message": ..., "code": "NotFound", "exit_code": 1, "remedy": ...}}
code is "usage" for a wrong command line, "interrupted" for Ctrl-C, else the kind of error; remedy may be missing.
"""


class Nouns(click.Group):
    """Click group that imports a command only when the command line names it."""

    def list_commands(self, context: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, context: click.Context, name: str) -> click.Command | None:
        if name not in COMMANDS:
            return None
        module, _, attribute = COMMANDS[name][0].partition(":")
        command: click.Command = getattr(import_module(module), attribute)
        return command

    def resolve_command(self, context: click.Context, arguments: list[str]
                        ) -> tuple[str | None, click.Command | None, list[str]]:
        if arguments and arguments[0] not in COMMANDS and not arguments[0].startswith("-") and not context.resilient_parsing:
            from difflib import get_close_matches
            near = get_close_matches(arguments[0], COMMANDS, 1)
            hint = f"; did you mean {near[0]}?" if near else ""
            raise click.UsageError(f"there is no command {arguments[0]!r}{hint}", context)
        return super().resolve_command(context, arguments)

    def format_commands(self, context: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, text) for name, (_, text) in COMMANDS.items()])

    def shell_complete(self, context: click.Context, incomplete: str) -> list[CompletionItem]:
        from click.shell_completion import CompletionItem
        return [CompletionItem(name, help=text) for name, (_, text) in COMMANDS.items() if name.startswith(incomplete)]


def _print_version(context: click.Context, _: click.Parameter, asked_for: bool) -> None:
    if asked_for and not context.resilient_parsing:
        from nvpool.core.version import VERSION
        click.echo(f"nvpool {VERSION}")
        context.exit()


@click.command(cls=Nouns, epilog=EXIT_CODES, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 120})
@click.option("--version", is_flag=True, expose_value=False, is_eager=True, callback=_print_version,
              help="Print the version and exit.")
def cli() -> None:
    """One fast, shared file system from the NVMe drives of ordinary servers.

    POOL is the pool's directory on this node, or the address HOST:PORT of any of its nodes; where it may be left out, the
    environment variable NVPOOL_POOL names it. All that prints has --json.

    \b
    examples:
      nvpool dev up /tmp/pool --drives 2 --mount /mnt/pool    try it on this machine
      nvpool status /tmp/pool                                 what runs, and what is wrong
      nvpool dev down /tmp/pool                               and nothing is left
    """


def main(arguments: list[str] | None = None) -> int:
    """Run one command and return its exit code. `arguments` defaults to those of the process."""
    words = sys.argv[1:] if arguments is None else arguments
    if any(word.startswith("--token") for word in words):
        from nvpool.cli.token_input import hide_tokens
        hide_tokens(words)  # before any other import: other users can read the arguments until then
    as_json = "--json" in words[:words.index("--")] if "--" in words else "--json" in words
    called: dict[str, str] = {}
    try:
        result = cli.main(arguments, prog_name="nvpool", standalone_mode=False, obj=called)
        return result if isinstance(result, int) else 0
    except (click.Abort, KeyboardInterrupt):
        if as_json:
            _print_error("interrupted", "interrupted", 130)
        click.echo("interrupted", err=True)
        return 130
    except click.exceptions.Exit as wish:
        return wish.exit_code
    except click.ClickException as error:
        if as_json:
            context = getattr(error, "ctx", None)
            _print_error(error.format_message(), "usage", error.exit_code, f"{context.command_path} --help" if context else "")
        error.show()
        return error.exit_code
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # else the flush of stdout at exit would fail once more
        return 1
    except Exception as error:
        from nvpool.cli.output import show_error
        return show_error(error, as_json, called.get("pool", ""))


def _print_error(message: str, code: str, exit_code: int, remedy: str = "") -> None:
    from nvpool.cli.output import error_object, print_json
    print_json(error_object(message, code, exit_code, remedy))


if __name__ == "__main__":
    sys.exit(main())
