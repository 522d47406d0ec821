"""The program `mount.nvpool`, the helper of mount(8) for file systems of type nvpool.

mount(8) runs it for `mount -t nvpool SOURCE PLACE -o …` and for lines of /etc/fstab with that type:

    mount.nvpool SOURCE PLACE [-sfnv] [-t TYPE] [-o OPTION,…]

SOURCE is HOST[:PORT]:/PATH, /DIRECTORY:/PATH or a pool directory. With -o pool=DIR that directory (of a node,
or of `nvpool client join`) is the pool, and the part of SOURCE before the colon is only a name. /proc/mounts
shows SOURCE as given, so that `mount -a` recognizes the mount. Exit codes are those of mount(8): 1 for wrong
arguments, 32 if the mount failed; the reason is on stderr. The program does not mount by itself: it passes
the options, which have the same names, to the mount daemon as `nvpool mount` does.
"""

from __future__ import annotations

import ctypes
import errno
import getopt
import math
import os
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from nvpool.cli.pool_path import divided
from nvpool.core import config as configuration
from nvpool.core.errors import InUse, InvalidRequest, NvpoolError, Refused
from nvpool.core.units import parse_bytes
from nvpool.host.mountinfo import mount_at, options_in, place_of

EXIT_USAGE, EXIT_FAILURE = 1, 32
DEFAULT_PORT = 17512
"""Port of a HOST without a port."""
WAIT_S = 60.0


def _one_of(*known: str) -> Callable[[str], str]:
    def checked(value: str) -> str:
        if value not in known:
            raise ValueError(f"it is one of {', '.join(known)}")
        return value

    return checked


def _between(kind: Callable[[str], float], least: int, most: int) -> Callable[[str], float]:
    def checked(value: str) -> float:
        try:
            number = kind(value)
        except ValueError:
            number = math.nan
        if not least <= number <= most:
            raise ValueError(f"it is {'a whole number' if kind is int else 'seconds'} from {least} to {most}")
        return number

    return checked


def _address(value: str) -> str:
    configuration.parse_address(value)
    return value


WORDS = ("force", "writeback", "holder", "no-holder", "no-short-circuit", "no-late-closes", "no-acl")
RENAMED_WORDS = {"no-short-cut": "no-short-circuit"}
"""Old word -> present word. Old words are accepted for one release, with a warning."""
VALUES: dict[str, Callable[[str], str | float]] = {
    "engine": _one_of("auto", "kernel", "pyfuse3"),
    "transport": str,
    "max-read": parse_bytes,
    "read-ahead": parse_bytes,
    "max-background": _between(int, 1, 65535),
    "congestion-threshold": _between(int, 1, 65535),
    "attr-timeout-s": _between(float, 0, 3600),
    "entry-timeout-s": _between(float, 0, 3600),
    "negative-timeout-s": _between(float, 0, 3600),
    "deadline-s": _between(float, 1, 86400),
    "workers": _between(int, 1, configuration.WORKERS_MAX),
    "metrics": _address,
    "log-level": _one_of("debug", "info", "warning", "error"),
    "log-format": _one_of("text", "json"),
}
HERE: dict[str, Callable[[str], str | float]] = {"pool": str, "log": str, "wait": _between(float, 1, 3600)}
"""Options that this program uses itself; `VALUES` and `WORDS` go to the mount daemon."""
FLAGS = {
    "ro": (1, True),
    "rw": (1, False),
    "nosuid": (2, True),
    "suid": (2, False),
    "nodev": (4, True),
    "dev": (4, False),
    "noexec": (8, True),
    "exec": (8, False),
    "sync": (16, True),
    "async": (16, False),
    "dirsync": (128, True),
    "noatime": (1024, True),
    "atime": (1024, False),
    "nodiratime": (2048, True),
    "diratime": (2048, False),
}
"""Flag bits of mount(2), as in fuse/kernel/mount; that module is not imported only to parse options."""
PASSED = ("allow_other", "default_permissions")
PASSED_VALUES = ("context=", "fscontext=", "defcontext=", "rootcontext=")
NOTHING = frozenset(
    (
        "defaults",
        "auto",
        "noauto",
        "nofail",
        "user",
        "nouser",
        "users",
        "owner",
        "group",
        "_netdev",
        "relatime",
        "silent",
        "loud",
        "norelatime",
    )
)
"""Options without effect here: they are for mount(8), systemd and people. Access times are relatime."""
NOTHING_VALUES = ("comment=", "x-", "X-", "user=", "uhelper=", "helper=")
OF_KERNEL = ("user_id=", "group_id=", "rootmode=", "fd=", "blksize=", "subtype=", "fsname=", "max_read=")
"""Options that mount(8) adds from /proc/mounts when it remounts."""
_REMOUNT, _NOSUID, _NODEV, _RDONLY = 32, 2, 4, 1


class MountRequest(NamedTuple):
    source: str
    place: str
    pool: str
    subtree: str
    words: tuple[str, ...]
    """Arguments of the mount daemon."""
    flags: int
    """Flags of mount(2) for a remount."""
    log: str
    wait_s: float
    remount: bool
    fake: bool
    verbose: bool
    warnings: tuple[str, ...]
    """Warnings for the user: options with old names."""


def known() -> str:
    """Return the options that -o accepts, for a message."""
    return ", ".join([*(f"{name}=" for name in (*HERE, *VALUES)), *WORDS, *FLAGS, *PASSED, "remount"])


def parse(arguments: list[str]) -> MountRequest:
    """Parse the arguments. InvalidRequest: names the wrong argument and the possible ones."""
    try:
        given, rest = getopt.gnu_getopt(arguments, "sfnvho:t:N:")
    except getopt.GetoptError as error:
        raise InvalidRequest(f"{error}; usage: mount.nvpool SOURCE PLACE [-sfnv] [-o OPTION,…]") from None
    letters = [letter for letter, _ in given]
    if len(rest) != 2:
        raise InvalidRequest("a source and a place are needed: mount -t nvpool HOST:/PATH PLACE")
    for letter, value in given:
        if letter == "-t" and value not in ("nvpool", "fuse.nvpool"):
            raise InvalidRequest(f"this mounts file systems of type nvpool, not {value}")
        if letter == "-N":
            raise InvalidRequest(
                "mount --namespace is not for nvpool; enter it: nsenter --mount=FILE mount -t nvpool …"
            )
    source, place = rest
    options = [word for letter, value in given if letter == "-o" for word in options_in(value)]
    remount = "remount" in options
    words: list[str] = []
    warnings: list[str] = []
    here: dict[str, Any] = {}
    flags = _NOSUID | _NODEV
    for option in options:
        name, is_valued, value = option.partition("=")
        name = name if option.startswith(PASSED_VALUES) or name in PASSED else name.replace("_", "-")
        if name in RENAMED_WORDS and not is_valued:
            warnings.append(
                f"the option {name} is now named {RENAMED_WORDS[name]}; the next release refuses the old name"
            )
            name = RENAMED_WORDS[name]
        if option in FLAGS:
            bit, on = FLAGS[option]
            flags = flags | bit if on else flags & ~bit
            words.append(f"-o{option}")
        elif option in NOTHING or option.startswith(NOTHING_VALUES) or option == "remount":
            pass
        elif option in PASSED or option.startswith(PASSED_VALUES):
            words.append(f"-o{option}")
        elif remount and option.startswith(OF_KERNEL):
            pass
        elif name in WORDS and not is_valued:
            words.append(f"--{name}")
        elif name in VALUES and value:
            words.append(f"--{name}={_checked(name, value, VALUES[name])}")
        elif name in HERE and value:
            here[name] = _checked(name, value, HERE[name])
        elif "-s" not in letters:
            more = (
                " needs a value: write it as"
                if name in VALUES or name in HERE
                else " is not an option of nvpool; there are"
            )
            raise InvalidRequest(f"{option!r}{more} {f'{name}=…' if more.startswith(' needs') else known()}")
    pool, subtree = (
        ("", "/") if remount else _where(source, here.get("pool", ""))
    )  # it may be what `nvpool mount` shows
    return MountRequest(
        source,
        str(place_of(place)),
        pool,
        subtree,
        tuple(words),
        flags,
        here.get("log", ""),
        here.get("wait", WAIT_S),
        remount,
        "-f" in letters,
        "-v" in letters,
        tuple(warnings),
    )


def _checked(name: str, value: str, kind: Callable[[str], str | float]) -> str | float:
    try:
        return kind(value)
    except (ValueError, NvpoolError) as error:
        raise InvalidRequest(f"{name}={value}: {value!r} is not a value for it: {error}") from None


def _where(source: str, directory: str) -> tuple[str, str]:
    """Return the pool that `source` names, and the path in the pool."""
    pool, subtree = divided(source)
    if directory:
        if pool == source:
            subtree = "/"
        return directory, subtree
    if pool.startswith("/") or "://" in pool:
        return pool, subtree
    if pool == source and not re.fullmatch(r".+:\d+", pool):
        raise InvalidRequest(
            f"{source!r} is not a source of nvpool; write HOST:/PATH, HOST:PORT:/PATH or DIRECTORY:/PATH (all of "
            "a pool: HOST:/)"
        )
    if not re.fullmatch(r"(\[[0-9a-fA-F:.%]+\]|[^:\[\]]+)(:\d{1,5})?", pool):
        raise InvalidRequest(f"{pool!r} is not HOST or HOST:PORT; an address of IPv6 stands in brackets")
    return pool if re.search(r"[^:\[]:\d+$", pool) and not pool.endswith(
        "]"
    ) else f"{pool}:{DEFAULT_PORT}", subtree


def remount(wanted: MountRequest) -> None:
    """Change the mount flags that the kernel enforces: read-only, noexec and the like.

    All other options stay as they were. Refused: nothing of nvpool is mounted there, the mount was made
    read-only, or the kernel refuses. InUse: files are open for writing.
    """
    from nvpool.cli.mount.control import words_of

    there = mount_at(wanted.place)
    if there is None or not there.ours:
        raise Refused(f"nothing of nvpool is mounted at {wanted.place}, so it cannot be remounted")
    if not wanted.flags & _RDONLY and was_read_only(words_of(wanted.place)):
        raise Refused(
            f"{wanted.place} was mounted read-only, and its process has no right to write; unmount it, and mount it "
            "with rw"
        )
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.mount(None, os.fsencode(wanted.place), None, ctypes.c_ulong(_REMOUNT | wanted.flags), None):
        number = ctypes.get_errno()
        if number == errno.EBUSY:
            raise InUse(
                f"{wanted.place} has files open for writing; close them (fuser -vm {wanted.place} lists who has)"
            )
        raise Refused(f"{wanted.place} could not be remounted: {os.strerror(number)}")


def was_read_only(words: list[str]) -> bool:
    """Whether the mount daemon with these command-line words was started for a read-only mount."""
    given = [
        word
        for text in words
        if text.startswith("-o")
        for word in options_in(text[2:])
        if word in ("ro", "rw")
    ]
    return given[-1] == "ro" if given else "--read-only" in words


def run(wanted: MountRequest) -> None:
    """Mount the pool; on return the mount answers. With `fake` only check the arguments and configuration.

    Refused, Unavailable: as `mount_pool` in cli/mount/control. InvalidRequest: the path in the pool is not
    valid. After an error nothing is mounted.
    """
    from nvpool.cli.mount.command import log_of
    from nvpool.cli.mount.control import mount_pool
    from nvpool.cli.pool_connection import directory_of
    from nvpool.fuse.ops.mount_views import parts_of

    parts_of(wanted.subtree)
    directory = directory_of(wanted.pool)
    pool = wanted.pool
    if directory is not None:
        pool = str(directory.path)
        configuration.load(directory.node_toml)
    if wanted.fake:
        return
    words = (*wanted.words, f"--source={wanted.source}")
    if wanted.subtree.strip("/"):
        words += (f"--subtree={wanted.subtree}",)
    pid = mount_pool(
        pool,
        wanted.place,
        Path(wanted.log) if wanted.log else log_of(pool, wanted.place),
        words,
        wanted.wait_s,
    )
    if wanted.verbose:
        print(f"mount.nvpool: {wanted.source} mounted on {wanted.place} (process {pid})")


def main(arguments: list[str] | None = None) -> int:
    """Run the program and return the exit code for mount(8)."""
    try:
        wanted = parse(sys.argv[1:] if arguments is None else arguments)
    except NvpoolError as error:
        print(f"mount.nvpool: {error}", file=sys.stderr)
        return EXIT_USAGE
    for warning in wanted.warnings:
        print(f"mount.nvpool: {warning}", file=sys.stderr)
    try:
        if not wanted.remount:
            run(wanted)
        elif not wanted.fake:
            remount(wanted)
    except InvalidRequest as error:
        print(f"mount.nvpool: {error}", file=sys.stderr)
        return EXIT_USAGE
    except (NvpoolError, OSError) as error:
        print(f"mount.nvpool: {error}", file=sys.stderr)
        return EXIT_FAILURE
    return 0


if __name__ == "__main__":
    sys.exit(main())
