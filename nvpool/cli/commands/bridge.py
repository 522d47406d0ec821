"""The command `nvpool bridge`: start the bridge daemon, which provides volumes to containers."""

from __future__ import annotations

import os
import sys
from typing import Any

import click

from nvpool.cli.output import json_option, log_options, pool_argument, print_json


@click.command(
    epilog="""\b
examples:
  nvpool bridge /var/lib/nvpool/pool
  nvpool bridge 10.0.0.1:17512 --mountpoint /mnt/pool       use the existing mount
  nvpool bridge POOL --docker-socket= --csi unix:///csi/csi.sock      for Kubernetes: see deploy/kubernetes
  nvpool bridge /srv/pool --check                           does it answer, and which volumes are mounted?
\b
then:
  docker volume create -d nvpool -o size=10G scratch
  docker run -v scratch:/data …
\b
options of a volume: size=10G files=1000000 replicas=2 sealed=true subpath=train/2024
Docker passes options only when it creates a volume. For an existing one use nvpool volume show, resize and seal.
"""
)
@pool_argument
@click.option(
    "--mountpoint",
    type=click.Path(file_okay=False),
    help="Mount point of the whole pool; if nothing is mounted "
    "there, the bridge mounts it. [pool in the state directory]",
)
@click.option(
    "--state",
    type=click.Path(file_okay=False),
    help="State directory, for this bridge only. [/var/lib/nvpool-bridge]",
)
@click.option(
    "--docker-socket",
    metavar="PATH",
    help="Socket of the Docker plugin; its name without .sock is the driver's. "
    "[/run/docker/plugins/nvpool.sock]",
)
@click.option(
    "--no-mount",
    is_flag=True,
    help="Only use an existing mount at --mountpoint. For a bridge in a "
    "container, whose own mount would end with the container.",
)
@click.option(
    "--csi",
    metavar="ADDRESS",
    help="Also serve Kubernetes' CSI at this unix socket, as unix:///csi/csi.sock.",
)
@click.option(
    "--csi-controller", is_flag=True, help="Serve only the CSI Controller service, which needs no mount."
)
@click.option("--csi-node", is_flag=True, help="Serve only the CSI Node service.")
@click.option(
    "--csi-pool",
    metavar="NAME",
    help="Value of the label nvpool.io/pool of nodes that have the pool. [its name]",
)
@click.option(
    "--metrics",
    metavar="PORT|unix:PATH",
    help="Serve metrics for Prometheus at "
    "http://127.0.0.1:PORT/metrics; HOST:PORT serves every host of the network, without a password.",
)
@click.option(
    "--node",
    metavar="NAME",
    help="Name of this host in the list of users of a volume; the same after a reboot. [host name]",
)
@click.option("--log", type=click.Path(dir_okay=False), help="Log file. [stderr]")
@log_options
@click.option(
    "--check", is_flag=True, help="Start nothing; show the volumes that the running bridge reports."
)
@json_option
def bridge(
    pool: str,
    mountpoint: str | None,
    state: str | None,
    docker_socket: str | None,
    no_mount: bool,
    csi: str | None,
    csi_controller: bool,
    csi_node: bool,
    csi_pool: str | None,
    metrics: str | None,
    node: str | None,
    log: str | None,
    log_level: str | None,
    log_format: str | None,
    check: bool,
    as_json: bool,
) -> None:
    """Provide volumes of a pool to containers: volume plugin for Docker and Podman, CSI driver for Kubernetes.

    Runs in the foreground until Ctrl-C or SIGTERM. Containers keep running without the bridge, and the next bridge takes
    over. A second bridge with the same state directory is refused. --json applies to --check.
    """
    if check:
        _check(docker_socket, as_json)
        return
    from nvpool.cli.pool_connection import directory_of
    from nvpool.core.programs import Program, command

    directory = directory_of(pool)
    words = [str(directory.path) if directory is not None else pool]
    given = {
        "mountpoint": mountpoint,
        "state": state,
        "node": node,
        "log": log,
        "docker-socket": docker_socket,
        "csi": csi,
        "csi-pool": csi_pool,
        "metrics": metrics,
        "log-level": log_level,
        "log-format": log_format,
    }
    words += [f"--{name}={value}" for name, value in given.items() if value is not None]
    words += [
        f"--{name}"
        for name, asked_for in (
            ("no-mount", no_mount),
            ("csi-controller", csi_controller),
            ("csi-node", csi_node),
        )
        if asked_for
    ]
    sys.stdout.flush()
    os.execv(sys.executable, command(Program.BRIDGE, *words))


def _check(docker_socket: str | None, as_json: bool) -> None:
    from nvpool.cli.output import print_table
    from nvpool.core.errors import Unreachable

    place = docker_socket or "/run/docker/plugins/nvpool.sock"
    try:
        found = asked(place, "/VolumeDriver.List")["Volumes"]
    except (OSError, ValueError, KeyError):
        raise Unreachable(f"no bridge answers at {place}; start it with: nvpool bridge POOL") from None
    shown = [(volume["Name"], volume["Mountpoint"]) for volume in found]
    if as_json:
        print_json([{"name": name, "mounted": mounted or None} for name, mounted in shown])
    else:
        print_table(("volume", "mounted"), shown)


def asked(place: str, verb: str) -> dict[str, Any]:
    """Send `verb` to the plugin at the socket `place` and return its reply.

    OSError: the plugin does not answer. ValueError: the reply is not JSON.
    """
    import http.client
    import json
    import socket

    connection = http.client.HTTPConnection("localhost", timeout=60.0)
    connection.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        connection.sock.settimeout(60.0)
        connection.sock.connect(place)
        connection.request("POST", verb, body=b"{}")
        answer: dict[str, Any] = json.loads(connection.getresponse().read())
        return answer
    except http.client.HTTPException as error:
        raise OSError(str(error)) from error
    finally:
        connection.close()
