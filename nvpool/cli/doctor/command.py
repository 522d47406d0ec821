"""The command `nvpool doctor`: what makes a pool slow or unsafe on this machine, and the remedy."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import click
from click.core import ParameterSource

from nvpool.cli.doctor.check_results import BAD, OK, WARN, Check
from nvpool.cli.output import json_option, print_json, print_table, remember_pool, say
from nvpool.core.errors import with_pool


def show(checks: Iterable[Check], as_json: bool, quiet: bool = False) -> int:
    """Print the results and return the exit code: 1 if a result is bad, else 0."""
    found = [one for one in checks if not quiet or one.state != OK]
    if as_json:
        print_json([one._asdict() for one in found])
    else:
        print_table(
            ("state", "check", "seen", "remedy"),
            [(one.state, one.name, one.seen, one.remedy) for one in found],
        )
        counts = {state: sum(one.state == state for one in found) for state in (WARN, BAD)}
        say(
            f"{counts[BAD]} bad, {counts[WARN]} to look at"
            if any(counts.values())
            else "nothing to complain of"
        )
    return int(any(one.state == BAD for one in found))


class _Checks(click.Group):
    """Group of `nvpool doctor`; if a pool stands in place of a command, the error names the option --pool."""

    def resolve_command(
        self, context: click.Context, arguments: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if arguments and arguments[0] not in self.commands and not context.resilient_parsing:
            raise click.UsageError(
                f"there is no command {arguments[0]!r}, only {', '.join(self.commands)}; to check a pool or "
                f"a drive: nvpool doctor --pool POOL, or --drive PATH",
                context,
            )
        return super().resolve_command(context, arguments)


@click.group(
    cls=_Checks,
    invoke_without_command=True,
    epilog="""\b
examples:
  nvpool doctor                                      this machine, before it becomes a node
  nvpool doctor --pool /srv/pool                     a node: its drives, ports, clock, and what the pool says
  nvpool doctor --pool 10.0.0.1:17512 --json         from anywhere
  nvpool doctor --drive /mnt/nvme0 --drive /dev/nvme1n1    future drives

\b
The command changes nothing. Each check is ok, warn (slower or less safe than possible) or bad (does not work, or is not
safe). The exit code is 1 if a check is bad.
""",
)
@click.option(
    "--pool",
    envvar="NVPOOL_POOL",
    metavar="POOL",
    callback=remember_pool,
    help="A pool directory, or HOST:PORT of a node.",
)
@click.option(
    "--drive",
    "drives",
    multiple=True,
    metavar="PATH",
    type=click.Path(),
    help="A directory or device; may be repeated.",
)
@click.option("--quiet", "-q", is_flag=True, help="Only what is not ok.")
@json_option
@click.pass_context
def doctor(
    context: click.Context, pool: str | None, drives: tuple[str, ...], quiet: bool, as_json: bool
) -> None:
    """Find what makes a pool slow or unsafe on this machine, and say what to do."""
    if "" in drives:
        raise click.BadParameter("'' is not a directory or a device", param_hint="--drive")
    if context.invoked_subcommand is not None:  # the subcommand takes --quiet and --json, and no other option
        for name, option in (("pool", "--pool"), ("drives", "--drive")):
            if context.get_parameter_source(name) is ParameterSource.COMMANDLINE:
                raise click.UsageError(
                    f"nvpool doctor {context.invoked_subcommand} does not look at {option}; leave it out"
                )
        return
    from nvpool.cli.doctor.drive import drives as look_at_drives
    from nvpool.cli.doctor.machine import KERNEL_MIN, machine
    from nvpool.cli.doctor.pool import pool_checks
    from nvpool.fuse.engines import kernel_version

    found = list(machine())
    if drives:
        found += look_at_drives([Path(drive) for drive in drives])
    if pool:
        found += pool_checks(pool, kernel_version() >= KERNEL_MIN)
    found = [
        one._replace(seen=with_pool(one.seen, pool or ""), remedy=with_pool(one.remedy, pool or ""))
        for one in found
    ]
    context.exit(show(found, as_json, quiet))


@doctor.command(
    epilog="""\b
--json prints one object for each check: state (ok, warn, bad), name, seen, remedy

\b
examples:
  nvpool doctor rdma
  nvpool doctor rdma --json
"""
)
@click.option("--quiet", "-q", is_flag=True, help="Only what is not ok.")
@json_option
@click.pass_context
def rdma(context: click.Context, quiet: bool, as_json: bool) -> None:
    """Check the RDMA set-up of this machine: devices, links, limits, UCX. A machine without RDMA is ok."""
    from nvpool.cli.doctor.rdma import checks

    assert context.parent is not None  # a subcommand always has its group as parent
    before = context.parent.params  # options before `rdma` have the same effect
    context.exit(show(checks(), as_json or before["as_json"], quiet or before["quiet"]))
