"""MooseFS from Debian: a master and one chunk server, goal 1."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

from subjects.contract import Subject, free_port, mounts, own_address, unmount, wait_for_port, wait_until
from subjects.local import end, no_fuse

EMPTY = Path("/var/lib/mfs/metadata.mfs.empty")


class MooseFS(Subject):
    name, kind = "moosefs", "peer"
    notes = (
        "goal 1, daemons at the priority of -19 that they take by themselves; its fsync does not reach the drive "
        "(HDD_FSYNC_BEFORE_CLOSE = 0, the default); its master keeps all names in memory"
    )
    _master: subprocess.Popen | None = None
    _store: subprocess.Popen | None = None
    _client: subprocess.Popen | None = None

    def missing(self) -> str | None:
        for program in ("mfsmaster", "mfschunkserver", "mfsmount", "mfssetgoal"):
            if shutil.which(program) is None:
                return f"{program} is not installed (make bench-peers)"
        if own_address() is None:
            return "needs an address of this machine that is not 127.x"
        if not EMPTY.exists():
            return f"{EMPTY} of the package is not there"
        return no_fuse()

    def version(self) -> str:
        said = subprocess.run(["mfsmaster", "-v"], capture_output=True, text=True, timeout=10)
        return "MooseFS " + (said.stdout + said.stderr).removeprefix("version: ").split(" ")[0]

    def start_servers(self) -> None:
        for name in ("master", "store", "drive"):
            (self.directory / name).mkdir()
        host, self._ports = own_address(), [free_port(own_address()) for _ in range(4)]
        loggers, stores, clients, store = self._ports
        self._write("exports.cfg", "* / rw,alldirs,maproot=0")
        self._write("topology.cfg", "")
        self._write("drives.cfg", f"{self.directory / 'drive'}")
        user = "WORKING_USER = root\nWORKING_GROUP = root\n"
        self._write(
            "master.cfg",
            user
            + f"""DATA_PATH = {self.directory / "master"}
EXPORTS_FILENAME = {self.directory / "exports.cfg"}
TOPOLOGY_FILENAME = {self.directory / "topology.cfg"}
MATOML_LISTEN_HOST = {host}
MATOML_LISTEN_PORT = {loggers}
MATOCS_LISTEN_HOST = {host}
MATOCS_LISTEN_PORT = {stores}
MATOCL_LISTEN_HOST = {host}
MATOCL_LISTEN_PORT = {clients}
""",
        )
        self._write(
            "store.cfg",
            user
            + f"""DATA_PATH = {self.directory / "store"}
HDD_CONF_FILENAME = {self.directory / "drives.cfg"}
MASTER_HOST = {host}
MASTER_PORT = {stores}
CSSERV_LISTEN_HOST = {host}
CSSERV_LISTEN_PORT = {store}
""",
        )
        shutil.copy(EMPTY, self.directory / "master" / "metadata.mfs")
        self._master = self.daemon("mfsmaster", "-f", "-n", "-c", self.directory / "master.cfg", "start")
        wait_for_port(host, clients, "mfsmaster", self._master)
        self._store = self.daemon("mfschunkserver", "-f", "-n", "-c", self.directory / "store.cfg", "start")
        wait_for_port(host, store, "mfschunkserver", self._store)
        self._mount()
        # Until the store has registered, the first write waits for minutes.
        wait_until(
            lambda: self.run("stat", "-f", "-c", "%b", self.mount).strip() != "0",
            "mfschunkserver does not register",
            self._store,
        )
        self.run("mfssetgoal", "-r", "1", self.mount)

    def _write(self, name: str, text: str) -> None:
        (self.directory / name).write_text(text + "\n")

    def _mount(self) -> None:
        self._client = self.daemon("mfsmount", self.mount, "-f", "-H", own_address(), "-P", self._ports[2])
        self.wait_for_mount(self._client)

    def attach(self) -> None:
        if str(self.mount) not in mounts():
            self._mount()

    def detach(self) -> None:
        unmount(self.mount)
        end(self._client)

    def stop_servers(self) -> None:
        for server in filter(None, (self._store, self._master)):
            server.terminate()
            end(server)
