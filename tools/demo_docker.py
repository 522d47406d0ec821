"""`make demo-docker`: a pool, its bridge and a Docker Engine of its own on this machine, and containers that use volumes.

Run by .venv's Python in the checkout, as root. Shows each command and what it says; what must be refused is refused, or the
demonstration fails. Touches no engine and no pool that is there already, and leaves nothing behind. Exit code 0 when all was
shown.
"""

from __future__ import annotations

import re
import sys
import tempfile
import time
from pathlib import Path

from nvpool.core.units import MIB
from nvpool.testing.env.bridge import HOLDING, RealBridge
from nvpool.testing.env.containers import IMAGE
from nvpool.testing.env.docker import RealDocker, why_no_docker
from nvpool.testing.env.pool import RealPool

KILLS = 3
WORK = (
    'n=0; while [ ! -e /data/stop ]; do n=$((n+1)); echo $n > /data/number && [ "$(cat /data/number)" = $n ] '
    "|| echo FAILED $n; done; echo $n rounds"
)


class Shown:
    """Runs docker and shows it as a terminal would."""

    def __init__(self, docker: RealDocker, driver: str) -> None:
        self._docker, self._driver = docker, driver

    def __call__(self, *words: str, refused: str = "") -> str:
        """Run it; return its output. `refused`: it must fail, with this text in its output."""
        arguments = " ".join(f"'{word}'" if re.search(r"[ ;$]", word) else word for word in words)
        print(
            f"  $ docker {arguments.replace(self._driver, 'nvpool').replace(' --network=none', '')}",
            flush=True,
        )
        done = self._docker.run(*words, check=False)
        said = "\n".join(filter(None, (done.stdout, done.stderr))).replace(self._driver, "nvpool")
        for line in said.splitlines():
            print(f"    {line[:150]}")
        if bool(done.returncode) != bool(refused) or refused not in said:
            raise SystemExit(f"that was not to be expected{f'; expected: {refused}' if refused else ''}")
        return done.stdout

    def run(
        self, volume: str, script: str, *, refused: str = "", options: tuple[str, ...] = ("--rm",)
    ) -> str:
        return self(
            "run",
            *options,
            "--network=none",
            "-v",
            f"{volume}:/data",
            IMAGE,
            "sh",
            "-c",
            script,
            refused=refused,
        )


def title(text: str) -> None:
    print(f"\n\033[1m{text}\033[0m" if sys.stdout.isatty() else f"\n{text}", flush=True)


def main() -> int:
    if why := why_no_docker():
        print(f"demo-docker: {why}", file=sys.stderr)
        return 1
    with tempfile.TemporaryDirectory(prefix="nvpool-demo-") as name:
        place = Path(name)
        title("A pool of one node, `nvpool bridge`, and a Docker Engine")
        with RealPool(place / "pool", sizes=(256 * MIB,)) as pool:
            pool.make()
            pool.start()
            with RealBridge(pool.path, place / "bridge", node="this-host") as bridge, RealDocker() as docker:
                show(bridge, docker)
        title("All of it has ended, and nothing is left")
    return 0


def show(bridge: RealBridge, docker: RealDocker) -> None:
    shown = Shown(docker, bridge.driver)
    shown("version", "--format", "Docker Engine {{.Server.Version}}")

    title("Two containers share a volume, a third one cannot see it")
    shown("volume", "create", "-d", bridge.driver, "-o", "size=32M", "shared")
    shown("volume", "create", "-d", bridge.driver, "other")
    first = shown.run(
        "shared",
        "echo hello from the first > /data/greeting; while true; do sleep 1; done",
        options=("--detach",),
    )
    docker.until(
        lambda: docker.inside(first, "cat /data/greeting", check=False).returncode == 0,
        "the first one has written",
    )
    shown.run("shared", "cat /data/greeting; df -h /data")
    shown.run("other", "ls -A /data; cat /data/greeting", refused="No such file")

    title("The quota is hit inside a container")
    shown.run("shared", "dd if=/dev/zero of=/data/large bs=64k count=1000", refused="quota")
    shown.run("shared", "rm /data/large; echo there is room again > /data/note; cat /data/note")

    title("A volume in use is not removed")
    shown("volume", "rm", "shared", refused="in use")
    shown("volume", "inspect", "--format", "{{json .Status}}", "shared")

    title("Bridge and mount are killed (-9) under a container that reads and writes")
    working = shown.run("shared", WORK, options=("--detach",))
    for number in range(KILLS):
        time.sleep(0.5)
        bridge.kill()
        serving = bridge.kill_mount()
        print(f"    killed: the bridge, and process {serving} that served the mount", flush=True)
        if number == KILLS - 1:
            print(f"    killed: process {bridge.kill_mount(HOLDING)} that held the mount", flush=True)
        time.sleep(0.5)
        bridge.start()
    shown.run("shared", "touch /data/stop; echo a new container is served too")
    docker.until(lambda: "rounds" in docker.run("logs", working).stdout, "it ends")
    if "FAILED" in shown("logs", working):
        raise SystemExit("a read or write in the container has failed")

    title("When nobody uses it, it goes")
    shown("rm", "--force", first, working)
    shown("volume", "rm", "shared", "other")
    shown("volume", "ls")


if __name__ == "__main__":
    sys.exit(main())
