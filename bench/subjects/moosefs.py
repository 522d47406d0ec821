"""MooseFS from Debian: a master, and a chunk server for each copy."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

from subjects.contract import Subject, free_port, mounts, own_address, unmount, wait_for_port, wait_until
from subjects.local import end, no_fuse

EMPTY = Path("/var/lib/mfs/metadata.mfs.empty")
USER = "WORKING_USER = root\nWORKING_GROUP = root\n"


class MooseFS(Subject):
    name, kind = "moosefs", "peer"
    _master: subprocess.Popen | None = None
    _stores: tuple[subprocess.Popen, ...] = ()
    _client: subprocess.Popen | None = None

    def __init__(self, copies: int = 1) -> None:
        super().__init__(copies)
        self.notes = (
            f"goal {copies}{f', {copies} chunk servers on the one drive' if copies > 1 else ''}, daemons at the priority of "
            "-19 that they take by themselves; its fsync does not reach the drive (HDD_FSYNC_BEFORE_CLOSE = 0, the "
            "default); its one master keeps all names in memory"
        )

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
        (self.directory / "master").mkdir()
        host, self._ports = own_address(), [free_port(own_address()) for _ in range(3)]
        loggers, stores, clients = self._ports
        self._write("exports.cfg", "* / rw,alldirs,maproot=0")
        self._write("topology.cfg", "")
        self._write(
            "master.cfg",
            USER
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
        shutil.copy(EMPTY, self.directory / "master" / "metadata.mfs")
        self._master = self.daemon("mfsmaster", "-f", "-n", "-c", self.directory / "master.cfg", "start")
        wait_for_port(host, clients, "mfsmaster", self._master)
        self._mount()
        for number in range(1, self.copies + 1):
            self._start_store(number, host, stores)
        self.run("mfssetgoal", "-r", self.copies, self.mount)

    def _start_store(self, number: int, host: str, stores: int) -> None:
        """Start a chunk server with a drive of its own; on return the master has it."""
        port = free_port(host)
        for name in (f"store-{number}", f"drive-{number}"):
            (self.directory / name).mkdir()
        self._write(f"drives-{number}.cfg", f"{self.directory / f'drive-{number}'}")
        self._write(
            f"store-{number}.cfg",
            USER
            + f"""DATA_PATH = {self.directory / f"store-{number}"}
HDD_CONF_FILENAME = {self.directory / f"drives-{number}.cfg"}
MASTER_HOST = {host}
MASTER_PORT = {stores}
CSSERV_LISTEN_HOST = {host}
CSSERV_LISTEN_PORT = {port}
""",
        )
        blocks = self._blocks()
        config = self.directory / f"store-{number}.cfg"
        store = self.daemon("mfschunkserver", "-f", "-n", "-c", config, "start")
        self._stores += (store,)
        wait_for_port(host, port, "mfschunkserver", store)
        # Until the store has registered, the first write waits for minutes, or has fewer copies. A drive that is counted once
        # more gives more than half as much again, whatever else fills it meanwhile.
        wait_until(lambda: self._blocks() > blocks + blocks // 2, "mfschunkserver does not register", store)

    def _blocks(self) -> int:
        return int(self.run("stat", "-f", "-c", "%b", self.mount))

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
        for server in filter(None, (*self._stores, self._master)):
            server.terminate()
            end(server)
        self._stores = ()
