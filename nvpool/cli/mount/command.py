"""The commands `nvpool mount` and `nvpool umount`."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import click

from nvpool.cli.output import ByteSize, Number, json_option, log_options, print_json, remember_pool, say
from nvpool.core import config as configuration


@click.command(
    epilog="""\b
examples:
  nvpool mount /srv/pool /mnt/pool
  nvpool mount 10.0.0.1:17512 /mnt/pool
  nvpool mount /srv/pool:/data/train /mnt/train --read-only    only this directory of the pool
  nvpool mount /srv/pool /mnt/pool --foreground      for systemd, or to see its messages
  nvpool mount /srv/pool /mnt/pool --engine pyfuse3  through libfuse, as on kernels before 5.4
  nvpool mount /srv/pool /mnt/build --writeback      no other mount changes these files: small writes are combined
  nvpool mount /srv/pool /mnt/pool --max-background 512 --congestion-threshold 400   many readers of large files
  nvpool mount /srv/pool /mnt/data --workers 4       many readers of large files, and cores to spare
  nvpool mount /srv/pool /mnt/pool --attr-timeout-s 0 --entry-timeout-s 0   several nodes change the same names
  nvpool mount /srv/pool /mnt/pool --metrics 127.0.0.1:9478
  nvpool mount upgrade /mnt/pool                     change to the installed software; users see a pause
"""
)
@click.argument("pool", metavar="POOL[:/PATH]")
@click.argument("mountpoint", metavar="MOUNTPOINT")
@click.option("--foreground", is_flag=True, help="Stay in the foreground until the pool is unmounted.")
@click.option(
    "--log",
    type=click.Path(dir_okay=False),
    help="Log file of the daemon; default: in log/ of a local pool directory, else in /var/log/nvpool.",
)
@log_options
@click.option(
    "--wait",
    "wait_s",
    type=Number(1, 3600),
    default=60.0,
    show_default=True,
    help="Seconds to wait until the mount works.",
)
@click.option("--read-only", is_flag=True, help="Refuse every change.")
@click.option("--force", is_flag=True, help="First remove a dead mount at MOUNTPOINT.")
@click.option(
    "--deadline-s",
    type=Number(1, 86400),
    help="How long a system call waits for a daemon of the pool that is down. [60]",
)
@click.option(
    "--engine",
    type=click.Choice(["auto", "kernel", "pyfuse3"]),
    help="kernel: speak to /dev/fuse directly; pyfuse3: through libfuse; auto: kernel on Linux 5.4 and newer. "
    "[engine under [client] in node.toml, else auto]",
)
@click.option(
    "--writeback",
    is_flag=True,
    help="Let the kernel cache writes and send them later. Only if no other mount or program changes these files; "
    "others see the data after the file is closed or fsynced. Needs engine kernel.",
)
@click.option(
    "--max-read",
    type=ByteSize(),
    help="Maximum size of a read request, engine kernel. [what the kernel allows, 1M]",
)
@click.option(
    "--read-ahead",
    type=ByteSize(),
    help="How far the kernel reads ahead of a sequential reader; 0: not at all. Root only. [1M]",
)
@click.option(
    "--max-background",
    type=click.IntRange(1, 65535),
    help="Maximum of background requests (read-ahead, writeback), engine kernel. [128]",
)
@click.option(
    "--congestion-threshold",
    type=click.IntRange(1, 65535),
    help="Number of background requests from which the kernel slows down, engine kernel. [three quarters]",
)
@click.option(
    "--attr-timeout-s",
    type=Number(0, 3600),
    help="How long the kernel may cache attributes. 0 here and for names: it asks each time. "
    "[attr_timeout_s under [client] in node.toml, else 1]",
)
@click.option(
    "--entry-timeout-s",
    type=Number(0, 3600),
    help="How long the kernel may cache names. [entry_timeout_s under [client] in node.toml, else 1]",
)
@click.option(
    "--negative-timeout-s",
    type=Number(0, 3600),
    help="How long the kernel may cache that a name does not exist. [0]",
)
@click.option(
    "--holder/--no-holder",
    default=None,
    help="Whether the mount survives a crash or upgrade of its process, for some 20 MiB of memory; needs engine "
    "kernel and Linux 5.4. [if possible]",
)
@click.option(
    "--workers",
    type=click.IntRange(1, configuration.WORKERS_MAX),
    help="Processes of this mount, if one core is not enough: all but one only read files of more than 64 KiB. "
    "Needs a holder and Linux 6.9. [workers under [client] in node.toml, else 1]",
)
@click.option(
    "--metrics",
    metavar="PORT|unix:PATH",
    help="Serve metrics of this mount, with all its processes, at http://127.0.0.1:PORT/metrics; HOST:PORT serves "
    "every host of the network, without a password.",
)
@click.option(
    "--transport",
    metavar="SCHEME",
    help="Use only this transport: stream+unix, stream, grpc, or an installed one. [transport under [client] in "
    "node.toml, else the best that both ends have]",
)
@click.option(
    "--no-short-circuit",
    is_flag=True,
    help="No short-circuit reads: read through the stores even if their drives are in this node.",
)
@click.option(
    "--no-short-cut",
    is_flag=True,
    hidden=True,
    help="Old name of --no-short-circuit, accepted for one release.",
)
@click.option(
    "--no-late-closes",
    is_flag=True,
    help="A close of a new file waits until the stores have its data. [late_closes under [client] in node.toml]",
)
@click.option("--no-acl", is_flag=True, help="Ignore access control lists on this mount.")
@click.option(
    "-o",
    "options",
    multiple=True,
    metavar="OPTION",
    help="Option of mount(8): noexec, suid, dev, …; may be repeated.",
)
@json_option
def mount(
    pool: str,
    mountpoint: str,
    foreground: bool,
    log: str | None,
    log_level: str | None,
    log_format: str | None,
    wait_s: float,
    read_only: bool,
    force: bool,
    deadline_s: float | None,
    engine: str | None,
    writeback: bool,
    max_read: int | None,
    read_ahead: int | None,
    max_background: int | None,
    congestion_threshold: int | None,
    attr_timeout_s: float | None,
    entry_timeout_s: float | None,
    negative_timeout_s: float | None,
    holder: bool | None,
    workers: int | None,
    metrics: str | None,
    transport: str | None,
    no_short_circuit: bool,
    no_short_cut: bool,
    no_late_closes: bool,
    no_acl: bool,
    options: tuple[str, ...],
    as_json: bool,
) -> None:
    """Mount a pool, or the directory at PATH of it, at the empty directory MOUNTPOINT.

    With PATH, only that directory is visible in the mount. Symbolic links in PATH are not followed.

    Returns when the mount can be used. The mount recovers automatically when daemons of the pool die and come back, and with a
    holder also when its own process dies.

    With the word upgrade in place of POOL (write ./upgrade for a pool of that name), the command replaces the process that
    serves MOUNTPOINT by one of the software that is installed now. Open files, locks and written data are kept.
    """
    if pool == "upgrade":
        _upgrade(mountpoint, wait_s, as_json)
        return
    from nvpool.cli.mount.control import mount_command, mount_pool
    from nvpool.cli.pool_connection import directory_of
    from nvpool.cli.pool_path import divided
    from nvpool.host.mountinfo import place_of

    if no_short_cut:
        say("--no-short-cut is now named --no-short-circuit; the next release refuses the old name")
    shown = pool
    pool, subtree = divided(pool)
    remember_pool(click.get_current_context(), None, pool)
    directory = directory_of(pool)
    if directory is not None:
        pool = str(directory.path)
        configuration.load(directory.node_toml)  # its errors are reported here and not in a log
    place = str(place_of(mountpoint))
    words = tuple(
        word
        for wanted, word in (
            (read_only, "--read-only"),
            (force, "--force"),
            (writeback, "--writeback"),
            (no_short_circuit or no_short_cut, "--no-short-circuit"),
            (no_late_closes, "--no-late-closes"),
            (no_acl, "--no-acl"),
            (holder, "--holder"),
            (holder is False, "--no-holder"),
        )
        if wanted
    )
    words += tuple(
        f"{word}={value}"
        for word, value in (
            ("--deadline-s", deadline_s),
            ("--engine", engine),
            ("--max-read", max_read),
            ("--read-ahead", read_ahead),
            ("--max-background", max_background),
            ("--congestion-threshold", congestion_threshold),
            ("--attr-timeout-s", attr_timeout_s),
            ("--entry-timeout-s", entry_timeout_s),
            ("--negative-timeout-s", negative_timeout_s),
            ("--transport", transport),
            ("--workers", workers),
            ("--metrics", metrics),
            ("--log-level", log_level),
            ("--log-format", log_format),
        )
        if value is not None
    )
    if metrics:
        configuration.parse_address(metrics)
    words += tuple(f"-o{option}" for option in options)
    if subtree.strip("/"):
        words += (f"--subtree={subtree}",)
    if foreground:
        sys.stdout.flush()
        os.execv(sys.executable, mount_command(pool, place, (*words, *([f"--log={log}"] if log else []))))
    pid = mount_pool(pool, place, Path(log) if log else log_of(pool, place), words, wait_s)
    if as_json:
        print_json({"pool": pool, "subtree": "/" + subtree.strip("/"), "mountpoint": place, "pid": pid})
    else:
        click.echo(f"{shown} is mounted at {place} (process {pid})")


def _upgrade(mountpoint: str, wait_s: float, as_json: bool) -> None:
    from nvpool.cli.mount.control import upgrade
    from nvpool.host.mountinfo import place_of

    done = upgrade(mountpoint, wait_s)
    if as_json:
        print_json({"mountpoint": str(place_of(mountpoint)), "pid": done.pid, "pause_ms": done.pause_ms})
    else:
        pause_text = f", after a pause of {done.pause_ms} ms" if done.pause_ms is not None else ""
        click.echo(f"process {done.pid} serves {mountpoint} now{pause_text}")


def log_of(pool: str, place: str) -> Path:
    """Return the log file of the mount daemon at `place`, and create its directory."""
    from nvpool.cli.pool_connection import directory_of

    directory = directory_of(pool)
    if directory is not None and os.access(directory.log, os.W_OK):
        kept = directory.log
    elif os.geteuid() == 0:
        kept = Path("/var/log/nvpool")
    else:
        kept = Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state") / "nvpool"
    kept.mkdir(parents=True, exist_ok=True)
    return kept / f"mount{place.replace('/', '-')[-100:]}.log"


@click.command(
    epilog="""\b
examples:
  nvpool umount /mnt/pool
  nvpool umount --lazy /mnt/pool      even if it is in use: MOUNTPOINT is free immediately
"""
)
@click.argument("mountpoint", metavar="MOUNTPOINT")
@click.option("--lazy", is_flag=True, help="Detach the mount even while files are open in it.")
@click.option(
    "--wait",
    "wait_s",
    type=Number(0, 3600),
    default=60.0,
    show_default=True,
    help="Seconds to wait until the daemon has stored all writes.",
)
@json_option
def umount(mountpoint: str, lazy: bool, wait_s: float, as_json: bool) -> None:
    """Unmount the pool at MOUNTPOINT. Returns when all writes are stored.

    If the daemon of the mount is dead or does not answer, the mount is detached as with --lazy.
    """
    from nvpool.cli.mount.control import unmount

    was_lazy = unmount(mountpoint, lazy, wait_s)
    if as_json:
        print_json({"mountpoint": mountpoint, "lazy": was_lazy})
    elif was_lazy and not lazy:
        say(f"{mountpoint}: its daemon did not answer; unmounted lazily")
