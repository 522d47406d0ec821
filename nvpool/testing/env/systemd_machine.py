"""Machine for tests that systemd boots: a real systemd as process 1 of its own namespaces.

nvpool is installed by tools/install.sh, with all units. Files are those of this host below a temporary
overlay; services that are enabled on this host are not there. Drives and the pool's directory are real
directories below `place`. The machine cannot change this host: kernel settings and /sys are read-only for it,
and it may not set the clock or load modules. A guard process ends it and removes everything when the process
that started it has gone, for any reason. Used by tests; needs root.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

from nvpool.core.clock import SYSTEM_CLOCK

SYSTEMD = "/lib/systemd/systemd"
PROGRAMS = {
    "systemctl": "systemd",
    "journalctl": "systemd",
    "unshare": "util-linux",
    "nsenter": "util-linux",
    "pivot_root": "util-linux",
    "setpriv": "util-linux",
    "ip": "iproute2",
}
PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
BOOT_S = 480
"""Limit for installing nvpool and booting. Compiling takes a minute and a half alone, five beside other tests."""
NOT_ALLOWED = "-sys_module,-sys_time,-syslog,-sys_rawio,-wake_alarm,-mac_admin,-mac_override"

# Script of process 1 before it becomes systemd. Arguments: place, checkout, Python, its packages,
# capabilities to drop, PATH, systemd.
BEFORE = r"""
set -eu
place=$1 source=$2
mount -t tmpfs -o mode=0755 tmpfs "$place/layer"
mkdir "$place/layer/upper" "$place/layer/work" "$place/layer/source" "$place/layer/source-work" "$place/layer/root"
root=$place/layer/root
mount -t overlay -o "lowerdir=/,upperdir=$place/layer/upper,workdir=$place/layer/work" nvpool-boot "$root"
cd "$root"

# Nothing of what this machine has enabled, mounts or has of nvpool.
rm -rf opt/nvpool etc/nvpool usr/local/bin/nvpool* sbin/mount.nvpool sbin/mount.fuse.nvpool \
    usr/local/lib/systemd/system/nvpool* usr/src/nvpool var/lib/nvpool var/log/nvpool var/log/journal
sed -i /^nvpool:/d etc/passwd etc/group etc/shadow etc/gshadow 2>/dev/null || true
mkdir -p proc sys dev run tmp mnt srv/nvme0 var/lib/nvpool usr/src/nvpool etc/systemd/system
mount -t tmpfs -o mode=0755 tmpfs etc/systemd/system
mount -t tmpfs -o mode=0755 tmpfs run
mount -t tmpfs -o mode=1777 tmpfs tmp
mount -t tmpfs -o mode=0755 tmpfs mnt
mount -t proc proc proc
mount --bind "$place/drive" srv/nvme0
mount --bind "$place/pool" var/lib/nvpool
mount -t overlay -o "lowerdir=$source,upperdir=$place/layer/source,workdir=$place/layer/source-work" nvpool-source \
    usr/src/nvpool
: > etc/fstab
tr -d - < /proc/sys/kernel/random/uuid > "$place/machine-id"
cp "$place/machine-id" etc/machine-id
echo nvpool-booted > etc/hostname

mount -t tmpfs -o mode=0755 tmpfs dev
mkdir dev/pts dev/shm dev/net
mount -t devpts -o newinstance,ptmxmode=0666,mode=0620 devpts dev/pts
mount -t tmpfs -o mode=1777 tmpfs dev/shm
for node in null:1:3 zero:1:5 full:1:7 random:1:8 urandom:1:9 tty:5:0 fuse:10:229 autofs:10:235; do
    (IFS=:; set -- $node; mknod -m 0666 "dev/$1" c "$2" "$3")
done
ln -s pts/ptmx dev/ptmx; ln -s /proc/self/fd dev/fd
ln -s /proc/self/fd/0 dev/stdin; ln -s /proc/self/fd/1 dev/stdout; ln -s /proc/self/fd/2 dev/stderr

# As an administrator does; what it needs from PyPI is this checkout's environment's already.
"$3" -m venv opt/nvpool
ln -sfn "$3" opt/nvpool/bin/python3
for packages in opt/nvpool/lib/python3*/site-packages; do
    echo "/usr/src/nvpool/${4#"$source"/}" > "$packages/of-the-checkout.pth"
done
chroot . env HOME=/root CFLAGS=-O0 PYTHON="$3" sh /usr/src/nvpool/tools/install.sh

exec unshare --net sh -euc '
ip link set lo up
mount -t sysfs -o ro sysfs sys
mount -t cgroup2 cgroup2 sys/fs/cgroup
mount --bind proc/sys proc/sys
mount -o remount,bind,ro proc/sys
mkdir run/old
pivot_root . run/old
umount -l /run/old
rmdir /run/old
exec setpriv --bounding-set "$1" --inh-caps "$1" env -i container=nvpool-boot PATH="$2" TERM=dumb "$3" \
    --unit=multi-user.target --show-status=no --log-target=journal
' sh "$5" "$6" "$7" < /dev/null
"""


def unified() -> Path | None:
    """Return the path of the writable unified cgroup hierarchy of this host, or None."""
    for line in Path("/proc/self/mounts").read_text().splitlines():
        _, where, kind, options = line.split()[:4]
        if kind == "cgroup2" and "rw" in options.split(","):
            return Path(where)
    return None


def missing() -> str | None:
    """Reason why no machine can be booted here; None if it can."""
    if os.geteuid():
        return "booting a machine needs root"
    if not os.path.exists(SYSTEMD):
        return f"there is no {SYSTEMD} (Debian: systemd)"
    for program, package in PROGRAMS.items():
        if shutil.which(program, path=PATH) is None:
            return f"{program} is not installed (Debian: {package})"
    if not os.path.exists("/dev/fuse"):
        return "there is no /dev/fuse"
    if unified() is None:
        return "no control groups of version 2 are mounted here, or read-only: systemd needs some of its own"
    spaces = ["unshare", "--mount", "--pid", "--fork", "--kill-child", "--uts", "--ipc", "--cgroup", "--net"]
    done = subprocess.run(
        [
            *spaces,
            "sh",
            "-c",
            "d=$(mktemp -d) && mount -t tmpfs x $d && mkdir $d/u $d/w $d/r && "
            "mount -t overlay -o lowerdir=/,upperdir=$d/u,workdir=$d/w x $d/r; r=$?; umount -R $d; "
            "rmdir $d; exit $r",
        ],
        capture_output=True,
        text=True,
        timeout=120,
    )
    return (
        f"no name spaces with a layer above / can be made: {done.stderr.strip()}" if done.returncode else None
    )


class BootedMachine:
    """Context manager: the machine is installed and booted inside, and off and removed after it."""

    def __init__(self, place: Path, checkout: Path, python: str, packages: Path) -> None:
        """Prepare a machine whose drives are in `place`, an empty directory that is removed with it.

        It installs `checkout` with the interpreter `python` of this host and with `packages`, a path below
        the checkout.
        """
        self.place = place
        self._arguments = [str(place), str(checkout), python, str(packages)]
        self.pid = 0

    def __enter__(self) -> BootedMachine:
        self._guard = subprocess.Popen(
            [sys.executable, "-P", "-m", "nvpool.testing.env.systemd_machine", *self._arguments],
            text=True,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,
        )
        line = self._guard.stdout.readline()
        if not line:
            self.__exit__()
            raise RuntimeError("the machine's guard could not begin; it says why above")
        starter, deadline_s = int(line), SYSTEM_CLOCK.boottime_s() + BOOT_S
        while not self._is_up(starter):
            if SYSTEM_CLOCK.boottime_s() > deadline_s or self._guard.poll() is not None:
                said = self.console()
                self.__exit__()
                raise RuntimeError(f"the machine did not boot; its console said: {said[-3000:]}")
            time.sleep(0.2)
        return self

    def _is_up(self, starter: int) -> bool:
        try:
            self.pid = int(Path(f"/proc/{starter}/task/{starter}/children").read_text().split()[0])
            if Path(f"/proc/{self.pid}/comm").read_text().strip() != "systemd":
                return False
        except (OSError, IndexError):
            return False
        return self.run("systemctl", "is-system-running", check=False).stdout.strip() in (
            "running",
            "degraded",
        )

    def console(self) -> str:
        """Return the output of the installation and of process 1."""
        try:
            return (self.place / "console").read_text(errors="replace")
        except FileNotFoundError:
            return ""

    def command(self, *words: object) -> list[str]:
        return [
            "nsenter",
            "--target",
            str(self.pid),
            "--mount",
            "--uts",
            "--ipc",
            "--net",
            "--pid",
            "--cgroup",
            "--",
            "env",
            "-i",
            f"PATH={PATH}",
            "HOME=/root",
            "LANG=C.UTF-8",
            "COLUMNS=200",
            *map(str, words),
        ]

    def run(
        self, *words: object, check: bool = True, timeout_s: float = 120.0, **more
    ) -> subprocess.CompletedProcess:
        """Run a command on the machine as root."""
        done = subprocess.run(
            self.command(*words),
            capture_output=True,
            text=True,
            timeout=timeout_s,
            **{"stdin": subprocess.DEVNULL, **more},
        )
        assert not check or done.returncode == 0, f"{' '.join(map(str, words))}: {done.stdout}{done.stderr}"
        return done

    def popen(self, *words: object, **more) -> subprocess.Popen:
        return subprocess.Popen(self.command(*words), text=True, **more)

    def show(self, unit: str, word: str) -> str:
        """Return a property of a unit."""
        return self.run("systemctl", "show", "--value", "--property", word, unit).stdout.strip()

    def power_off(self, within_s: float = 120.0) -> bool:
        """Power off. Return whether the machine was off within that time. The guard keeps the files until it
        is ended."""
        self.run("systemctl", "poweroff", "--no-block")
        deadline_s = SYSTEM_CLOCK.boottime_s() + within_s
        while SYSTEM_CLOCK.boottime_s() < deadline_s:
            if (
                not os.path.exists(f"/proc/{self.pid}")
                or Path(f"/proc/{self.pid}/stat").read_text().split()[2] == "Z"
            ):
                return True
            time.sleep(0.1)
        return False

    def __exit__(self, *failed: object) -> None:
        self._guard.stdin.close()
        self._guard.wait()
        self._guard.stdout.close()


def guard(place: Path, arguments: list[str]) -> int:
    """Boot the machine, print the pid of its first process's parent, and wait for the end of stdin.

    Then remove everything of the machine and return.
    """
    above = unified()
    if above is None:
        return 1
    group = above / f"nvpool-boot-{os.getpid()}"
    group.mkdir()
    for name in ("layer", "drive", "pool"):
        (place / name).mkdir(parents=True)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # the process that started this one ends first
    joined = f'echo $$ > "{group}/cgroup.procs"; exec "$@"'
    spaces = [
        "setpriv",
        "--pdeathsig",
        "KILL",
        "unshare",
        "--mount",
        "--propagation",
        "private",
        "--pid",
        "--fork",
        "--kill-child",
        "--uts",
        "--ipc",
        "--cgroup",
    ]
    with open(place / "console", "wb") as console:
        machine = subprocess.Popen(
            [
                "sh",
                "-c",
                joined,
                "sh",
                *spaces,
                "sh",
                "-c",
                BEFORE,
                "sh",
                *arguments,
                NOT_ALLOWED,
                PATH,
                SYSTEMD,
            ],
            stdin=subprocess.DEVNULL,
            stdout=console,
            stderr=console,
        )
    try:
        print(machine.pid, flush=True)
        sys.stdin.read()
    finally:
        machine.kill()  # ends the first process of the namespace, and with it all others
        machine.wait()
        remove_group(group)
        shutil.rmtree(place, ignore_errors=True)
    return 0


def remove_group(group: Path) -> None:
    """Remove a control group and those below it, once the killed last process in them has ended."""
    deadline_s = SYSTEM_CLOCK.boottime_s() + 30
    for directory, _, _ in os.walk(group, topdown=False):
        while os.path.exists(directory):
            try:
                os.rmdir(directory)
            except OSError:
                if SYSTEM_CLOCK.boottime_s() > deadline_s:
                    raise
                time.sleep(0.05)


if __name__ == "__main__":
    sys.exit(guard(Path(sys.argv[1]), sys.argv[1:]))
