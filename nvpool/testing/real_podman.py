"""RealPodman: Podman with storage, state and configuration of its own, beside any that is there.

All is in a directory of its own below /tmp; containers have no network and need none. Podman has no daemon: what lives on is
a monitor (conmon) for each container. Leaving the `with` block ends containers and monitors, each by its pid, and takes its
mounts away. Needs root, podman, conmon and runc or crun (Debian: podman). Called by tests; never by the product.
"""

from __future__ import annotations

import ctypes
import os
import select
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path

from nvpool.base.clock import SYSTEM_CLOCK
from nvpool.base.mounts import mounts_below
from nvpool.testing.real_docker import IMAGE, root_file_system, why_no_image
from nvpool.testing.real_pool import end_process

_PATH = "/usr/sbin:/usr/bin:/sbin:/bin:/usr/local/sbin:/usr/local/bin"
_POLICY = '{"default": [{"type": "insecureAcceptAnything"}]}\n'
_CONFIGURATION = """
[containers]
netns = "none"
log_driver = "k8s-file"
default_ulimits = ["nofile=1024:1024", "nproc=4096:4096"]

[engine]
runtime = "{runtime}"
cgroup_manager = "cgroupfs"
events_logger = "file"
lock_type = "file"
image_copy_tmp_dir = "{place}/tmp"

[engine.volume_plugins]
{driver} = "{socket}"
"""
"""default_ulimits: what Podman asks for by itself is more than some machines grant. lock_type: the other is in shared memory
that all of the machine's Podman have."""


def why_no_podman() -> str:
    """Empty where it can be used here."""
    if os.geteuid():
        return "only root can have a Podman that mounts volumes of plugins"
    for name in ("podman", "conmon"):
        if shutil.which(name, path=_PATH) is None:
            return f"{name} is not installed (Debian: podman; make setup installs it)"
    if _runtime() is None:
        return "neither runc nor crun is installed (Debian: podman; make setup installs it)"
    return why_no_image()


def _runtime() -> str | None:
    return next((name for name in ("runc", "crun") if shutil.which(name, path=_PATH)), None)


class RealPodman:
    """`driver` is what it calls the volume plugin that listens at `socket`."""

    def __init__(self, driver: str, socket: Path) -> None:
        self.place = Path(tempfile.mkdtemp(prefix="nvp-", dir="/tmp"))
        for name in ("root", "run", "state", "tmp"):
            (self.place / name).mkdir()
        (self.place / "containers.conf").write_text(
            _CONFIGURATION.format(runtime=_runtime(), place=self.place, driver=driver, socket=socket))
        (self.place / "storage.conf").write_text(
            f'[storage]\ndriver = "vfs"\ngraphroot = "{self.place}/root"\nrunroot = "{self.place}/run"\n')
        (self.place / "policy.json").write_text(_POLICY)
        (self.place / "registries.conf").write_text("unqualified-search-registries = []\n")

    def __enter__(self) -> RealPodman:
        try:
            self.run("import", "--signature-policy", f"{self.place}/policy.json", "-", IMAGE, stdin=root_file_system())
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_exc: object) -> None:
        try:
            self.run("rm", "--all", "--force", "--time=0", check=False)
        finally:
            for pid in self._processes():  # monitors; what is in a container ends with its first process
                for child in _children(pid):
                    end_process(child, 9)
                end_process(pid, 9)
            for mount in mounts_below(self.place):
                ctypes.CDLL(None).umount2(os.fsencode(mount.point), 2)  # MNT_DETACH
            shutil.rmtree(self.place, ignore_errors=True)

    def _processes(self) -> list[int]:
        """Those of ours: our place is in their command line."""
        found = []
        for entry in os.listdir("/proc"):
            try:
                words = Path("/proc", entry, "cmdline").read_bytes().split(b"\0") if entry.isdigit() else []
            except OSError:
                continue
            if words and os.path.basename(words[0]) in (b"conmon", b"podman", b"runc", b"crun") and any(
                    os.fsencode(str(self.place)) in word for word in words):
                found.append(int(entry))
        return found

    # -- use -------------------------------------------------------------------------------------------------------------

    def run(self, *words: str, check: bool = True, stdin: bytes | None = None, timeout_s: float = 150.0
            ) -> subprocess.CompletedProcess[str]:
        """`podman WORDS`; AssertionError with what it said where it fails and `check` is set."""
        command = [shutil.which("podman", path=_PATH) or "podman", f"--root={self.place}/root", f"--runroot={self.place}/run",
                   f"--tmpdir={self.place}/state", "--storage-driver=vfs", "--cgroup-manager=cgroupfs",
                   "--events-backend=file", *words]
        # to files: monitors keep them open, and a pipe would be waited for as long as they live
        with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
            done = subprocess.run(command, input=stdin, stdout=out, stderr=err, timeout=timeout_s, env=self._environment(),
                                  check=False, **({} if stdin is not None else {"stdin": subprocess.DEVNULL}))
            texts = []
            for file in (out, err):
                file.seek(0)
                texts.append(file.read().decode(errors="replace").strip())
        assert not check or not done.returncode, f"podman {' '.join(words)}: {texts[0]} {texts[1]}"
        return subprocess.CompletedProcess(command, done.returncode, *texts)

    def sh(self, script: str, *options: str, check: bool = True) -> subprocess.CompletedProcess[str]:
        """A container that runs the script, and is gone on return."""
        return self.run("run", "--rm", "--network=none", *options, IMAGE, "/bin/sh", "-c", script, check=check)

    def begin(self, script: str, *options: str) -> str:
        """A container that goes on; its id."""
        return self.run("run", "--detach", "--network=none", *options, IMAGE, "/bin/sh", "-c", script).stdout

    def inside(self, container: str, script: str, check: bool = True) -> subprocess.CompletedProcess[str]:
        return self.run("exec", container, "/bin/sh", "-c", script, check=check)

    def until(self, holds: Callable[[], object], what: str, wait_s: float = 60.0) -> None:
        deadline_s = SYSTEM_CLOCK.boottime_s() + wait_s
        while not holds():
            assert SYSTEM_CLOCK.boottime_s() < deadline_s, f"not within {wait_s:.0f} s: {what}"
            select.select([], [], [], 0.1)

    def _environment(self) -> dict[str, str]:
        dropped = ("DOCKER_", "NOTIFY_", "CONTAINER", "XDG_", "REGISTRY_", "LISTEN_")
        kept = {key: value for key, value in os.environ.items() if not key.startswith(dropped)}
        return kept | {"CONTAINERS_CONF": f"{self.place}/containers.conf",
                       "CONTAINERS_STORAGE_CONF": f"{self.place}/storage.conf",
                       "CONTAINERS_REGISTRIES_CONF": f"{self.place}/registries.conf", "TMPDIR": f"{self.place}/tmp"}


def _children(pid: int) -> list[int]:
    try:
        return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except OSError:
        return []
