"""etcd daemon: a member of the pool's own etcd. `python -m nvpool.daemons.etcd DIR NODE` becomes etcd by
exec.

Started by the supervisor (node/coordination/map_backend). It takes run/etcd-NODE.lock as every daemon does
and passes the lock on through exec, so that the kernel frees the lock exactly when etcd ends. Its arguments
come from coordinator.json.
"""

from __future__ import annotations

import logging
import os
import shutil
import sys

from nvpool.core.clock import SYSTEM_CLOCK
from nvpool.core.config import load
from nvpool.core.errors import BadConfiguration, InUse, NvpoolError
from nvpool.core.programs import Program
from nvpool.host.pool_directory import Flock, PoolDirectory, announcement
from nvpool.node.coordination.etcd_crl import REVOKED_FILE
from nvpool.provision.map_location import OwnMember, read_map_location
from nvpool.runtime.daemon_process import EXIT_IN_USE, exit_code
from nvpool.runtime.logging_setup import start_log
from nvpool.runtime.scheduling import schedule
from nvpool.security.tls import AUTHORITY_FILE, CERTIFICATE_FILE, ETCD_SECRET, KEY_FILE

log = logging.getLogger("nvpool.daemons.etcd")

_QUOTA_BYTES = 2 << 30
_HEARTBEAT_MS, _ELECTION_MS = 100, 600
"""etcd's heartbeat interval and election timeout.

After the loss of its leader etcd has a new one within once or twice the timeout. That is less than the lease
of the pool's leader, which therefore survives the election. With a shorter timeout a leader would count as
lost while a drive syncs slowly. A member that was cut off asks the others before it stands for election
(--pre-vote), so that its return causes no election."""


def arguments_of(directory: PoolDirectory, own: OwnMember, plain_text: bool) -> list[str]:
    """Command line of etcd."""
    scheme = "http" if plain_text else "https"
    client, peer = f"{scheme}://{own.client}", f"{scheme}://{own.peer}"
    cluster, state, more = own.cluster, own.state, []
    if own.alone:  # starts with its data, or empty
        cluster, state = ((own.node, own.peer),), "new"
        more = ["--force-new-cluster"] if (own.data(directory) / "member").exists() else []
    arguments = [
        "etcd",
        "--name",
        f"node-{own.node}",
        "--data-dir",
        str(own.data(directory)),
        "--listen-client-urls",
        client,
        "--advertise-client-urls",
        client,
        "--listen-peer-urls",
        peer,
        "--initial-advertise-peer-urls",
        peer,
        "--initial-cluster",
        ",".join(f"node-{node}={scheme}://{at}" for node, at in cluster),
        "--initial-cluster-state",
        state,
        *more,
        "--initial-cluster-token",
        own.token,
        "--heartbeat-interval",
        str(_HEARTBEAT_MS),
        "--election-timeout",
        str(_ELECTION_MS),
        "--pre-vote",
        "--auto-compaction-mode",
        "revision",
        "--auto-compaction-retention",
        "1000",
        "--quota-backend-bytes",
        str(_QUOTA_BYTES),
        "--logger",
        "zap",
        "--log-outputs",
        "stderr",
    ]
    if not plain_text:
        secret = directory.secret / ETCD_SECRET
        for kind in ("", "peer-"):
            arguments += [
                f"--{kind}client-cert-auth",
                f"--{kind}trusted-ca-file",
                str(secret / AUTHORITY_FILE),
                f"--{kind}cert-file",
                str(secret / CERTIFICATE_FILE),
                f"--{kind}key-file",
                str(secret / KEY_FILE),
            ]
        arguments += [
            "--client-crl-file",
            str(secret / REVOKED_FILE),
            "--peer-crl-file",
            str(secret / REVOKED_FILE),
        ]
    return arguments


def main(path: str, node: int) -> int:
    name = f"etcd-{node}"
    directory = PoolDirectory(path)
    start_log(name, "info", None)
    try:
        directory.check()
        config = load(directory.node_toml)
        if config.log.to == "file":
            start_log(name, config.log.level, directory.log / f"{name}.log")
        own = read_map_location(directory).own
        program = shutil.which("etcd")
        if own is None or program is None:
            raise BadConfiguration(
                "etcd is not installed (Debian: etcd-server)" if own else f"{path} has no member of etcd"
            )
        lock = Flock.take(directory.run / f"{name}.lock", name)
    except InUse as error:
        log.warning("%s", error)
        return EXIT_IN_USE
    except NvpoolError as error:
        log.error("%s", error)
        return exit_code(error)
    schedule(config.processors.scheduling)  # etcd inherits it
    arguments = arguments_of(directory, own, config.network.plain_text)
    os.makedirs(own.data(directory), mode=0o700, exist_ok=True)
    directory.announce(
        name,
        announcement(
            "etcd", number=node, endpoints=(own.client,), now_ms=SYSTEM_CLOCK.wall_ns() // 1_000_000
        ),
    )
    os.set_inheritable(lock.descriptor, True)
    os.execve(
        program, arguments, os.environ | {"ETCD_UNSUPPORTED_ARCH": os.uname().machine, "GOMAXPROCS": "2"}
    )


if __name__ == "__main__":
    if len(sys.argv) != 3 or not sys.argv[2].isdigit():
        sys.exit(f"usage: python -m {Program.ETCD.module} DIR NODE")
    sys.exit(main(sys.argv[1], int(sys.argv[2])))
