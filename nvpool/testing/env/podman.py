"""RealPodman: Podman with its own storage, state and configuration, next to any other on the machine.

All is in its own directory below /tmp. Containers have no network and need none. Podman has no daemon: a
monitor (conmon) runs for each container. Leaving the `with` block ends containers and monitors, each by its
pid, and removes its mounts. It needs root, podman, conmon and runc or crun (Debian: podman). Used by tests;
never by the product.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from pathlib import Path

from nvpool.testing.env.containers import IMAGE, PATH, Containers, root_file_system, why_no_image

PROGRAMS = ("conmon", "podman", "runc", "crun")
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
"""default_ulimits: Podman's own request is more than some machines grant. lock_type: the other type is in
shared memory of all Podman instances of the machine."""


def why_no_podman() -> str:
    """Reason why Podman cannot be used here; empty if it can."""
    if os.geteuid():
        return "only root can have a Podman that mounts volumes of plugins"
    for name in ("podman", "conmon"):
        if shutil.which(name, path=PATH) is None:
            return f"{name} is not installed (Debian: podman; make setup installs it)"
    if _runtime() is None:
        return "neither runc nor crun is installed (Debian: podman; make setup installs it)"
    return why_no_image()


def _runtime() -> str | None:
    return next((name for name in ("runc", "crun") if shutil.which(name, path=PATH)), None)


class RealPodman(Containers):
    """`driver` is its name for the volume plugin that listens at `socket`."""

    def __init__(self, driver: str, socket: Path) -> None:
        super().__init__("nvp-")
        for name in ("root", "run", "state", "tmp"):
            (self.place / name).mkdir()
        (self.place / "containers.conf").write_text(
            _CONFIGURATION.format(runtime=_runtime(), place=self.place, driver=driver, socket=socket)
        )
        (self.place / "storage.conf").write_text(
            f'[storage]\ndriver = "vfs"\ngraphroot = "{self.place}/root"\nrunroot = "{self.place}/run"\n'
        )
        (self.place / "policy.json").write_text(_POLICY)
        (self.place / "registries.conf").write_text("unqualified-search-registries = []\n")

    def __enter__(self) -> RealPodman:
        try:
            self.run(
                "import",
                "--signature-policy",
                f"{self.place}/policy.json",
                "-",
                IMAGE,
                stdin=root_file_system(),
            )
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_exc: object) -> None:
        try:
            self.run("rm", "--all", "--force", "--time=0", check=False)
        finally:
            self.end_with_children(PROGRAMS)
            self.remove_place()

    # -- commands --------------------------------------------------------------------------------------------------------

    def run(
        self, *words: str, check: bool = True, stdin: bytes | None = None, timeout_s: float = 150.0
    ) -> subprocess.CompletedProcess[str]:
        """Run `podman WORDS`. AssertionError with the output if it fails and `check` is set."""
        command = [
            shutil.which("podman", path=PATH) or "podman",
            f"--root={self.place}/root",
            f"--runroot={self.place}/run",
            f"--tmpdir={self.place}/state",
            "--storage-driver=vfs",
            "--cgroup-manager=cgroupfs",
            "--events-backend=file",
            *words,
        ]
        # Output goes to files: monitors keep it open, so reading from a pipe would wait until they end.
        with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
            done = subprocess.run(
                command,
                input=stdin,
                stdout=out,
                stderr=err,
                timeout=timeout_s,
                env=self._environment(),
                check=False,
                **({} if stdin is not None else {"stdin": subprocess.DEVNULL}),
            )
            texts = []
            for file in (out, err):
                file.seek(0)
                texts.append(file.read().decode(errors="replace").strip())
        assert not check or not done.returncode, f"podman {' '.join(words)}: {texts[0]} {texts[1]}"
        return subprocess.CompletedProcess(command, done.returncode, *texts)

    def _environment(self) -> dict[str, str]:
        dropped = ("DOCKER_", "NOTIFY_", "CONTAINER", "XDG_", "REGISTRY_", "LISTEN_")
        kept = {key: value for key, value in os.environ.items() if not key.startswith(dropped)}
        return kept | {
            "CONTAINERS_CONF": f"{self.place}/containers.conf",
            "CONTAINERS_STORAGE_CONF": f"{self.place}/storage.conf",
            "CONTAINERS_REGISTRIES_CONF": f"{self.place}/registries.conf",
            "TMPDIR": f"{self.place}/tmp",
        }
