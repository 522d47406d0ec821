"""Command line and configuration of a mount.

The command line is shared: every process of a mount starts with the same arguments. They are combined with
the configuration in the pool's directory. Used by the programs in this package.
"""

from __future__ import annotations

import argparse
import logging
from pathlib import Path

from nvpool.client.state.options import ClientOptions, configured
from nvpool.core.config import WORKERS_MAX, ClientSection, Config, load
from nvpool.core.errors import NvpoolError
from nvpool.core.programs import Program
from nvpool.core.units import parse_bytes
from nvpool.fuse.engines import ENGINES, RESEND_MIN, kernel_version
from nvpool.host.mountinfo import options_in
from nvpool.host.pool_directory import PoolDirectory
from nvpool.runtime.logging_setup import start_log

log = logging.getLogger("nvpool.mountd.arguments")

DESCRIPTION = "Show a pool at a mount point."


def _worker_count(text: str) -> int:
    count = int(text)
    if not 1 <= count <= WORKERS_MAX:
        raise ValueError
    return count


def parse_words(words: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog=f"python -m {Program.MOUNT.module}", description=DESCRIPTION)
    parser.add_argument("pool", help="directory of a pool on this machine, or HOST:PORT of any of its nodes")
    parser.add_argument("mountpoint", type=Path, help="an empty directory")
    parser.add_argument(
        "--engine",
        choices=ENGINES,
        help="kernel: /dev/fuse itself; pyfuse3: libfuse; auto: kernel on Linux 5.4 and newer (auto)",
    )
    parser.add_argument(
        "--subtree", default="/", metavar="PATH", help="the directory of the pool that is shown (/)"
    )
    parser.add_argument(
        "--source",
        default="",
        metavar="TEXT",
        help="what /proc/mounts names as mounted (nvpool:NAME, and the subtree)",
    )
    parser.add_argument(
        "--stay-in-group",
        action="store_true",
        help="all processes of the mount stay in the process group "
        "of who starts it: autofs keeps out others until it is mounted",
    )
    parser.add_argument("--read-only", action="store_true")
    parser.add_argument("--no-allow-other", action="store_true", help="only for the user who mounts")
    parser.add_argument("--force", action="store_true", help="clean a mount whose process is gone first")
    parser.add_argument("--attr-timeout-s", type=float, help="how long the kernel may keep attributes (1)")
    parser.add_argument("--entry-timeout-s", type=float, help="how long the kernel may keep names (1)")
    parser.add_argument(
        "--negative-timeout-s",
        type=float,
        help="how long the kernel may remember that a name is not there (0)",
    )
    parser.add_argument(
        "--deadline-s", type=float, help="how long a call waits for a daemon that is gone (60)"
    )
    parser.add_argument(
        "--transport", metavar="SCHEME", help="the only one to use: stream+unix, stream, grpc, … (auto)"
    )
    parser.add_argument(
        "--no-short-circuit", action="store_true", help="read through the stores also on their own node"
    )
    parser.add_argument(
        "--no-late-closes",
        action="store_true",
        help="a close of a new file waits until the stores have its data",
    )
    # the old name, for one release: an upgrade passes on the arguments with which the mount was started
    parser.add_argument("--no-short-cut", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument(
        "--no-acl", action="store_true", help="without access control lists: the kernel does not ask for them"
    )
    parser.add_argument(
        "--read-ahead",
        type=parse_bytes,
        default=1 << 20,
        metavar="BYTES",
        help="how far the kernel reads ahead of a sequential reader (1M)",
    )
    parser.add_argument(
        "--max-read",
        type=parse_bytes,
        default=0,
        metavar="BYTES",
        help="of one request, engine kernel (what the kernel allows: 1M, or fs.fuse.max_pages_limit pages)",
    )
    parser.add_argument(
        "--max-background",
        type=int,
        default=128,
        metavar="N",
        help="requests in work that no call waits for, as read-ahead; engine kernel (128)",
    )
    parser.add_argument(
        "--congestion-threshold",
        type=int,
        default=0,
        metavar="N",
        help="of those, when the kernel begins to hold back; engine kernel (three quarters)",
    )
    parser.add_argument(
        "--writeback",
        action="store_true",
        help="the kernel keeps written pages and writes them later, engine kernel: only where no other mount "
        "or program changes these files",
    )
    parser.add_argument(
        "--holder",
        action=argparse.BooleanOptionalAction,
        default=None,
        help="the mount outlives this process: needs engine kernel and Linux 5.4 (where it can be)",
    )
    # behave as on Linux before 6.9; for tests
    parser.add_argument("--no-resend", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument(
        "--workers",
        type=_worker_count,
        metavar="N",
        help="processes for this mount; all but one only read larger files. Needs a holder (1)",
    )
    parser.add_argument(
        "--metrics", metavar="HOST:PORT", help="serve metrics for Prometheus at http://HOST:PORT/metrics"
    )
    parser.add_argument(
        "--drain-s",
        type=float,
        default=10.0,
        help="what open files get on SIGTERM before the mount ends (10)",
    )
    parser.add_argument(
        "-o",
        dest="extra",
        action="append",
        default=[],
        metavar="OPTION",
        help="of mount(8): noexec, suid, dev, …",
    )
    parser.add_argument("--log", type=Path, help="file to log to (stderr)")
    parser.add_argument(
        "--log-level",
        choices=["debug", "info", "warning", "error"],
        help="least important messages that are kept (as node.toml says, info)",
    )
    parser.add_argument("--log-format", choices=["text", "json"], help="as node.toml says, text")
    return parser.parse_args(words)


def is_read_only(arguments: argparse.Namespace) -> bool:
    """Whether the mount is read-only: by --read-only, or by `-o ro`; the last `-o ro` or `-o rw` counts."""
    words = [word for extra in arguments.extra for word in options_in(extra) if word in ("ro", "rw")]
    return words[-1] == "ro" if words else arguments.read_only


def configured_pool(arguments: argparse.Namespace) -> tuple[PoolDirectory | None, Config]:
    """The pool's directory and this node's configuration.

    If `pool` is not a directory on this machine, these are None and the default configuration.
    """
    if "://" in arguments.pool or not Path(arguments.pool).is_dir():
        return None, Config()
    directory = PoolDirectory(arguments.pool)
    directory.check()
    return directory, load(directory.node_toml)


def start_mount_log(name: str, arguments: argparse.Namespace) -> None:
    """Start the log as the arguments say, else as the pool's directory says.

    An error in that configuration is ignored here; other code reports it.
    """
    try:
        directory, config = configured_pool(arguments)
    except NvpoolError:
        directory, config = None, Config()
    start_log(
        name,
        arguments.log_level or config.log.level,
        arguments.log,
        form=arguments.log_format or config.log.format,
        node_toml=directory.node_toml if directory is not None and arguments.log_level is None else None,
    )
    if arguments.no_short_cut:
        log.warning("--no-short-cut is now named --no-short-circuit; the next release refuses the old name")


def keeps_requests(arguments: argparse.Namespace) -> bool:
    """Whether a mount with a holder must record unanswered requests itself.

    It must where the kernel does not resend them (before Linux 6.9).
    """
    return arguments.no_resend or kernel_version() < RESEND_MIN


def given(value: float | None, otherwise: float) -> float:
    return otherwise if value is None else value


def client_options(arguments: argparse.Namespace, section: ClientSection) -> ClientOptions:
    options = configured(section)
    # If the kernel must not cache, the client must not return old attributes either.
    kept_s = min(
        given(arguments.attr_timeout_s, section.attr_timeout_s),
        given(arguments.entry_timeout_s, section.entry_timeout_s),
    )
    return options._replace(
        deadline_s=given(arguments.deadline_s, section.deadline_s),
        transport=arguments.transport or section.transport,
        direct_reads=True,
        short_circuit=section.short_circuit and not (arguments.no_short_circuit or arguments.no_short_cut),
        late_closes=section.late_closes and not arguments.no_late_closes,
        attr_s=min(options.attr_s, kept_s),
        fresh_s=min(options.fresh_s, kept_s),
    )
