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
    "pool": ("nvpool.cli.commands.pool:pool", "Create, rebalance and destroy pools."),
    "status": ("nvpool.cli.commands.status:status", "Show a pool: its processes, drives and problems."),
    "top": ("nvpool.cli.commands.top:top", "Show live I/O rates and latencies by client, volume or target."),
    "metrics": (
        "nvpool.cli.commands.metrics:metrics",
        "Print the metrics of a node in the Prometheus format.",
    ),
    "serve": ("nvpool.cli.commands.serve:serve", "Run the daemons of this node in the foreground."),
    "mount": ("nvpool.cli.mount.command:mount", "Mount a pool."),
    "umount": ("nvpool.cli.mount.command:umount", "Unmount a pool."),
    "bridge": (
        "nvpool.cli.commands.bridge:bridge",
        "Provide volumes to containers: Docker plugin and Kubernetes CSI.",
    ),
    "node": ("nvpool.cli.commands.node:node", "List, admit, drain and remove the nodes of a pool."),
    "client": ("nvpool.cli.commands.client:client", "Admit, list and remove clients, which are no nodes."),
    "cert": ("nvpool.cli.commands.cert:cert", "List, renew and revoke the certificates of a pool."),
    "drive": (
        "nvpool.cli.commands.drive:drive",
        "List, add, drain, replace and remove drives of a running pool.",
    ),
    "shard": (
        "nvpool.cli.commands.shard:shard",
        "List, add and remove metadata shards, and set their number of standbys.",
    ),
    "dir": (
        "nvpool.cli.commands.dir:directory",
        "Show and set replicas and chunk size of new files in a directory.",
    ),
    "volume": (
        "nvpool.cli.commands.volume:volume",
        "Manage volumes: directories with quotas, rights and other policies.",
    ),
    "encryption": (
        "nvpool.cli.commands.encryption:encryption",
        "Create and replace the pool key, which protects encrypted volumes.",
    ),
    "trash": ("nvpool.cli.commands.trash:trash", "List, restore or purge removed files of a volume."),
    "file": ("nvpool.cli.commands.file:file", "Show where the data of a file is stored."),
    "import": (
        "nvpool.cli.commands.import_tree:import_tree",
        "Copy a tree into a pool: parallel, resumable, verified.",
    ),
    "export": (
        "nvpool.cli.commands.export_tree:export_tree",
        "Copy a tree out of a pool: parallel, resumable, verified.",
    ),
    "fsck": ("nvpool.cli.commands.fsck:fsck", "Check and repair a pool."),
    "scrub": ("nvpool.cli.commands.scrub:scrub", "Read all stored data and verify its checksums."),
    "dump": ("nvpool.cli.commands.dump:dump", "Write a snapshot of all metadata to a file."),
    "load": ("nvpool.cli.commands.load_dump:load", "Load dumped metadata into an empty pool."),
    "doctor": (
        "nvpool.cli.doctor.command:doctor",
        "Find what makes a pool slow or unsafe on this machine, with the remedy.",
    ),
    "audit": ("nvpool.cli.commands.audit:audit", "Show who changed a pool, and which requests were refused."),
    "bench": ("nvpool.cli.commands.bench:bench", "Measure the speed of a pool."),
    "config": ("nvpool.cli.commands.config:config", "Show, check and explain the configuration of a node."),
    "dev": (
        "nvpool.cli.commands.dev:dev",
        "Create and remove a throw-away pool on this machine, under one directory.",
    ),
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


class CommandGroup(click.Group):
    """Click group that imports a command only when the command line names it."""

    def list_commands(self, context: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, context: click.Context, name: str) -> click.Command | None:
        if name not in COMMANDS:
            return None
        module, _, attribute = COMMANDS[name][0].partition(":")
        command: click.Command = getattr(import_module(module), attribute)
        return command

    def resolve_command(
        self, context: click.Context, arguments: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if (
            arguments
            and arguments[0] not in COMMANDS
            and not arguments[0].startswith("-")
            and not context.resilient_parsing
        ):
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

        return [
            CompletionItem(name, help=text)
            for name, (_, text) in COMMANDS.items()
            if name.startswith(incomplete)
        ]


def _print_version(context: click.Context, _: click.Parameter, asked_for: bool) -> None:
    if asked_for and not context.resilient_parsing:
        from nvpool.core.version import VERSION

        click.echo(f"nvpool {VERSION}")
        context.exit()


@click.command(
    cls=CommandGroup,
    epilog=EXIT_CODES,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 120},
)
@click.option(
    "--version",
    is_flag=True,
    expose_value=False,
    is_eager=True,
    callback=_print_version,
    help="Print the version and exit.",
)
def cli() -> None:
    """One fast, shared file system from the NVMe drives of ordinary servers.

    POOL is the directory of the pool on this node, or the address HOST:PORT of any of its nodes. If you leave POOL out, the
    environment variable NVPOOL_POOL names the pool. Every command that prints a result has --json.

    \b
    examples:
      nvpool dev up /tmp/pool --drives 2 --mount /mnt/pool    try it on this machine
      nvpool status /tmp/pool                                 what runs, and what is wrong
      nvpool dev down /tmp/pool                               remove all of it
    """


def main(arguments: list[str] | None = None) -> int:
    """Run one command and return its exit code. `arguments` defaults to those of the process."""
    words = sys.argv[1:] if arguments is None else arguments
    if any(word.startswith("--token") for word in words):
        from nvpool.cli.token_input import hide_tokens

        hide_tokens(words)  # before any other import: other users can read the arguments until then
    as_json = "--json" in words[: words.index("--")] if "--" in words else "--json" in words
    called: dict[str, str] = {}
    try:
        result = cli.main(arguments, prog_name="nvpool", standalone_mode=False, obj=called)
        return result if isinstance(result, int) else 0
    except (click.Abort, KeyboardInterrupt):
        if as_json:
            _print_error("interrupted", "interrupted", 130)
        click.echo("interrupted", err=True)
        return 130
    except click.exceptions.Exit as requested:
        return requested.exit_code
    except click.ClickException as error:
        if as_json:
            context = getattr(error, "ctx", None)
            _print_error(
                error.format_message(),
                "usage",
                error.exit_code,
                f"{context.command_path} --help" if context else "",
            )
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
