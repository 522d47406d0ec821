"""Bare root file systems of distributions, made by debootstrap, and commands in them.

Each command runs in a mount and process namespace of its own, on an overlay above the base: nothing is left mounted or running
when it returns, however it ends. The network, the name resolution and the certificates of authorities are this machine's.
DEBIAN_MIRROR and UBUNTU_MIRROR in the environment name other mirrors.
"""

import os
import shutil
import subprocess
import urllib.request
from http.client import HTTPException
from pathlib import Path
from typing import NamedTuple

SCRIPT_S = 1200.0
ANSWER_S = 30.0
"""Longest wait for the answer of a mirror."""

# This machine's files are copied and not mounted: what a script changes stays in its layer. An older file is removed first: a
# symbolic link would lead out of the root. Shared memory is the root's own.
# Arguments: base, layer, script, then pairs of a source and its place in the root.
INSIDE = r"""
set -eu
base=$1 layer=$2 script=$3
shift 3
mkdir -p "$layer/upper" "$layer/work" "$layer/root"
root=$layer/root
mount -t overlay -o "lowerdir=$base,upperdir=$layer/upper,workdir=$layer/work" overlay "$root"
mount -t proc proc "$root/proc"
mount --rbind /sys "$root/sys"
mount --rbind /dev "$root/dev"
mount -t tmpfs -o mode=1777 tmpfs "$root/dev/shm"
mount -t tmpfs -o mode=1777 tmpfs "$root/tmp"
mkdir -p "$root/etc/ssl/certs"
for file in resolv.conf hosts ssl/certs/ca-certificates.crt; do
    [ ! -e "/etc/$file" ] || cp -L --remove-destination "/etc/$file" "$root/etc/$file"
done
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


DEBIAN = Distribution(
    "bookworm", os.environ.get("DEBIAN_MIRROR", "http://deb.debian.org/debian"), "main", "bookworm", "3.11"
)
UBUNTU = Distribution(
    "noble",
    os.environ.get("UBUNTU_MIRROR", "http://archive.ubuntu.com/ubuntu"),
    "main,universe",
    "jammy",
    "3.12",
)


def missing() -> str | None:
    """Why no root file system can be made here."""
    if os.geteuid():
        return "debootstrap needs root"
    for program in ("debootstrap", "unshare", "chroot"):
        if shutil.which(program) is None:
            return f"{program} is not installed"
    return None


def unreachable(distribution: Distribution) -> str | None:
    """Why the mirror of `distribution` cannot be used from here."""
    release = f"{distribution.mirror}/dists/{distribution.suite}/Release"
    try:
        with urllib.request.urlopen(release, timeout=ANSWER_S) as answer:
            answer.read(1)
    except (OSError, HTTPException) as error:
        return f"no answer from the mirror: {release}: {error}"
    return None


def make_base(distribution: Distribution, place: Path) -> None:
    """A minimal system with Python and its venv module at `place`; no compiler, no headers. AssertionError: it failed."""
    done = subprocess.run(
        [
            "unshare",
            "--mount",
            "debootstrap",
            "--variant=minbase",
            f"--components={distribution.components}",
            "--include=python3,python3-venv,ca-certificates",
            distribution.suite,
            place,
            distribution.mirror,
            f"/usr/share/debootstrap/scripts/{distribution.script}",
        ],
        check=False,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        timeout=SCRIPT_S,
    )
    if done.returncode != 0:
        log = place / "debootstrap/debootstrap.log"
        raise AssertionError(done.stdout[-2000:] + (log.read_text()[-4000:] if log.exists() else ""))


def run(base: Path, layer: Path, script: str, binds: dict[Path, str] | None = None) -> str:
    """Run `script` by the shell of `base`, changes going to `layer`; what it printed. AssertionError: it failed."""
    pairs = [word for source, to in (binds or {}).items() for word in (str(source), to)]
    network = {
        name: value
        for name, value in os.environ.items()
        if name.startswith(("PIP_", "SSL_")) or name.lower().endswith("_proxy")
    }
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
        errors="replace",
        timeout=SCRIPT_S,
        env=network
        | {
            "PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
            "HOME": "/root",
            "DEBIAN_FRONTEND": "noninteractive",
            "LANG": "C.UTF-8",
        },
    )
    assert done.returncode == 0, done.stdout[-4000:]
    return done.stdout
