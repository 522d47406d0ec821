"""RealDocker: a temporary Docker Engine next to any other on the machine.

Data, state, socket and pid file are in its own directory below /tmp. Containers have no network and need
none. Of the machine only two empty directories below /run are changed. Leaving the `with` block ends its
containers, shims and daemons, each by its pid, and removes mounts, however the test ended. It needs root,
dockerd and runc (Debian: docker.io). Used by tests, the demonstration and benchmarks; never by the product.
"""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
from pathlib import Path

from nvpool.testing.env.containers import IMAGE, PATH, Containers, root_file_system, why_no_image
from nvpool.testing.env.pool import end_process

PLUGINS = Path("/run/docker/plugins")
"""Directory in which every engine looks for plugins."""
_SHIMS = Path("/run/containerd/s")
"""Directory of the sockets of every containerd's shims."""
_START_S = 60.0
_DRIVERS = ("overlay2", "vfs")
"""Storage drivers for images; the second one works on any file system."""


def why_no_docker() -> str:
    """Reason why no engine can be started here; empty if one can."""
    if os.geteuid():
        return "only root can start a Docker Engine"
    for program in ("dockerd", "containerd", "runc", "docker"):
        if _program(program) is None:
            return f"{program} is not installed (Debian: docker.io; make setup installs it)"
    return why_no_image()


def _program(name: str) -> str | None:
    return shutil.which(name, path=PATH)


class RealDocker(Containers):
    def __init__(self) -> None:
        super().__init__("nvd-")
        self.log = self.place / "dockerd.log"
        self._daemon: subprocess.Popen | None = None
        self._made: list[Path] = []
        self._driver = ""

    def __enter__(self) -> RealDocker:
        try:
            self.start()
            self.run("import", "-", IMAGE, stdin=root_file_system())
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_exc: object) -> None:
        try:
            if self._daemon is not None and self._daemon.poll() is None:
                found = self.run("ps", "--all", "--quiet", check=False).stdout.split()
                if found:
                    self.run("rm", "--force", *found, check=False)
            self.stop()
        finally:
            self._end_all()
            self.remove_place()
            for path in _SHIMS.glob("*") if _SHIMS.exists() else ():
                if not _listens(path):  # left by a shim that was killed
                    path.unlink(missing_ok=True)
            for path in reversed(self._made):
                try:
                    path.rmdir()
                except OSError:
                    pass  # somebody else uses it now

    # -- start and stop --------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Start the engine with the first storage driver that works here. On return it answers."""
        for path in (PLUGINS.parent, PLUGINS, _SHIMS.parent, _SHIMS):
            if not path.exists():
                path.mkdir()
                self._made.append(path)
        for driver in (self._driver,) if self._driver else _DRIVERS:
            self._launch(driver)
            try:
                self.until(lambda: self._answers() or self._ended(), "the engine answers", _START_S)
            except AssertionError:
                self.stop()
                raise
            if not self._ended():
                self._driver = driver
                return
            self._daemon = None
        raise AssertionError(f"dockerd does not start\n{self.said()}")

    def _launch(self, driver: str) -> None:
        (self.place / "pid").unlink(missing_ok=True)
        words = [
            str(_program("dockerd")),
            f"--data-root={self.place}/data",
            f"--exec-root={self.place}/x",
            f"--pidfile={self.place}/pid",
            f"--host=unix://{self.place}/s",
            "--bridge=none",
            "--iptables=false",
            "--ip6tables=false",
            f"--storage-driver={driver}",
            "--group=root",
            "--log-level=warn",
            "--shutdown-timeout=5",
        ]
        with open(self.log, "ab") as said:
            self._daemon = subprocess.Popen(
                words,
                stdin=subprocess.DEVNULL,
                stdout=said,
                stderr=said,
                start_new_session=True,
                cwd="/",
                env=self._environment(),
            )

    def stop(self) -> None:
        """Stop the engine in order: its containers end."""
        if self._daemon is None:
            return
        self._daemon.terminate()
        try:
            self._daemon.wait(60)
        except subprocess.TimeoutExpired:
            self._daemon.kill()
            self._daemon.wait(60)
        self._daemon = None

    def kill(self) -> None:
        """Kill the engine and its containerd (kill -9); containers and their shims survive."""
        assert self._daemon is not None
        self._daemon.kill()
        self._daemon.wait(60)
        self._daemon = None
        for pid in self.processes(("containerd",)):  # not earlier: the engine would start it again
            end_process(pid)
        for name in ("containerd.pid", "containerd.sock"):  # a process that nobody has reaped looks alive
            (self.place / "x/containerd" / name).unlink(missing_ok=True)

    def _ended(self) -> bool:
        return self._daemon is None or self._daemon.poll() is not None

    def _answers(self) -> bool:
        return self.run("version", check=False).returncode == 0

    def _end_all(self) -> None:
        """End the processes that a killed engine has left."""
        for programs in (("dockerd",), ("containerd-shim-runc-v2", "containerd-shim"), ("containerd",)):
            self.end_with_children(programs)

    # -- commands --------------------------------------------------------------------------------------------------------

    def run(
        self, *words: str, check: bool = True, stdin: bytes | None = None, timeout_s: float = 150.0
    ) -> subprocess.CompletedProcess[str]:
        """Run `docker WORDS`. AssertionError with the output if it fails and `check` is set."""
        done = subprocess.run(
            [str(_program("docker")), *words],
            input=stdin,
            capture_output=True,
            timeout=timeout_s,
            env=self._environment(),
            check=False,
            **({} if stdin is not None else {"stdin": subprocess.DEVNULL}),
        )
        result = subprocess.CompletedProcess(
            done.args,
            done.returncode,
            done.stdout.decode(errors="replace").strip(),
            done.stderr.decode(errors="replace").strip(),
        )
        assert not check or not result.returncode, (
            f"docker {' '.join(words)}: {result.stdout} {result.stderr}\n{self.said()}"
        )
        return result

    def said(self, lines: int = 15) -> str:
        try:
            return "\n".join(self.log.read_text(errors="replace").splitlines()[-lines:])
        except OSError:
            return ""

    def _environment(self) -> dict[str, str]:
        kept = {key: value for key, value in os.environ.items() if not key.startswith(("DOCKER_", "NOTIFY_"))}
        return kept | {"DOCKER_HOST": f"unix://{self.place}/s", "DOCKER_CONFIG": f"{self.place}/config"}


def _listens(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as channel:
        channel.settimeout(1.0)
        try:
            channel.connect(os.fspath(path))
        except ConnectionRefusedError:
            return False
        except OSError:
            pass
    return True
