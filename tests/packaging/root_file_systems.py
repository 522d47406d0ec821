"""Bare root file systems of distributions, made by debootstrap, and commands in them.

Each command runs in a mount and process namespace of its own, on an overlay above the base: nothing is left mounted or running
when it returns, however it ends. The network is this machine's.
"""

import os
import shutil
import subprocess
from pathlib import Path
from typing import NamedTuple

SCRIPT_S = 1200.0

# Arguments: base, layer, script, then pairs of a source and its place in the root.
INSIDE = r"""
set -eu
base=$1 layer=$2 script=$3
shift 3
mkdir -p "$layer/upper" "$layer/work" "$layer/root"
root=$layer/root
mount -t overlay -o "lowerdir=$base,upperdir=$layer/upper,workdir=$layer/work" overlay "$root"
mount -t proc proc "$root/proc"
mount --rbind /dev "$root/dev"
mount -t tmpfs -o mode=1777 tmpfs "$root/tmp"
mkdir -p "$root/etc/ssl/certs"
cp -L /etc/resolv.conf "$root/etc/resolv.conf" 2>/dev/null || true
while [ $# -gt 0 ]; do
    mkdir -p "$root$2"
    mount --rbind "$1" "$root$2"
    shift 2
done
exec chroot "$root" /bin/sh -euc "$script"
"""


class Distribution(NamedTuple):
    """What debootstrap needs to know."""

    suite: str
    mirror: str
    components: str
    script: str
    """Suite whose script debootstrap uses: one that does not know a newer suite has the same steps for it."""
    python: str


DEBIAN = Distribution("bookworm", "http://deb.debian.org/debian", "main", "bookworm", "3.11")
UBUNTU = Distribution("noble", "http://archive.ubuntu.com/ubuntu", "main,universe", "jammy", "3.12")


def missing() -> str | None:
    """Why no root file system can be made here."""
    if os.geteuid():
        return "debootstrap needs root"
    for program in ("debootstrap", "unshare", "chroot"):
        if shutil.which(program) is None:
            return f"{program} is not installed"
    return None


def make_base(distribution: Distribution, place: Path) -> None:
    """A minimal system with Python and its venv module at `place`; no compiler, no headers."""
    subprocess.run(
        [
            "debootstrap",
            "--variant=minbase",
            f"--components={distribution.components}",
            "--include=python3,python3-venv,ca-certificates",
            distribution.suite,
            place,
            distribution.mirror,
            f"/usr/share/debootstrap/scripts/{distribution.script}",
        ],
        check=True,
        stdout=subprocess.DEVNULL,
        timeout=SCRIPT_S,
    )


def run(base: Path, layer: Path, script: str, binds: dict[Path, str] | None = None) -> str:
    """Run `script` by the shell of `base`, changes going to `layer`; what it printed. AssertionError: it failed."""
    pairs = [word for source, to in (binds or {}).items() for word in (str(source), to)]
    pip = {name: value for name, value in os.environ.items() if name.startswith(("PIP_", "SSL_"))}
    done = subprocess.run(
        [
            "unshare",
            "--mount",
            "--pid",
            "--fork",
            "--kill-child",
            "sh",
            "-c",
            INSIDE,
            "sh",
            base,
            layer,
            script,
            *pairs,
        ],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=SCRIPT_S,
        env=pip
        | {
            "PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
            "HOME": "/root",
            "DEBIAN_FRONTEND": "noninteractive",
            "LANG": "C.UTF-8",
        },
    )
    assert done.returncode == 0, done.stdout[-4000:]
    return done.stdout
