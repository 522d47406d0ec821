"""The command `nvpool bridge`: start the bridge daemon, which provides volumes to containers."""

from __future__ import annotations

import os
import sys
from typing import Any

import click

from nvpool.cli.output import json_option, log_options, pool_argument, print_json


@click.command(epilog="""\b
examples:
  nvpool bridge /var/lib/nvpool/pool
  nvpool bridge 10.0.0.1:17512 --mountpoint /mnt/pool       use the mount that is there
  nvpool bridge POOL --docker-socket= --csi unix:///csi/csi.sock      for Kubernetes: see deploy/kubernetes
  nvpool bridge /srv/pool --check                           does it answer, and who uses what?
\b
then:
  docker volume create -d nvpool -o size=10G scratch
  docker run -v scratch:/data …
\b
options of a volume: size=10G files=1000000 replicas=2 sealed=true subpath=train/2024
Docker passes them on only for a volume that is not there yet; see and change one that is with nvpool volume show, resize, seal
""")
@pool_argument
@click.option("--mountpoint", type=click.Path(file_okay=False), help="Where the whole pool is mounted; where nothing is, the "
              "bridge mounts it. [pool in the state directory]")
@click.option("--state", type=click.Path(file_okay=False), help="A directory of the bridge's own. [/var/lib/nvpool-bridge]")
@click.option("--docker-socket", metavar="PATH", help="Its name without .sock is the name of the driver. "
              "[/run/docker/plugins/nvpool.sock]")
@click.option("--no-mount", is_flag=True, help="Use the mount at --mountpoint, and make none where there is none: in a "
              "container, with which it would end.")
@click.option("--csi", metavar="ADDRESS", help="Serve Kubernetes' CSI at this unix socket too, as unix:///csi/csi.sock.")
@click.option("--csi-controller", is_flag=True, help="Of CSI the Controller service, and not Node: needs no mount.")
@click.option("--csi-node", is_flag=True, help="Of CSI the Node service, and not Controller.")
@click.option("--csi-pool", metavar="NAME", help="How nodes are labeled (nvpool.io/pool) that have the pool. [its name]")
@click.option("--metrics", metavar="PORT|unix:PATH", help="Tell Prometheus of the bridge at "
              "http://127.0.0.1:PORT/metrics; HOST:PORT opens it to whoever reaches HOST.")
@click.option("--node", metavar="NAME", help="Under which this host uses volumes, the same after a reboot. [its host name]")
@click.option("--log", type=click.Path(dir_okay=False), help="Where to write the log. [stderr]")
@log_options
@click.option("--check", is_flag=True, help="Do not start one: ask the one that runs, and show what it says.")
@json_option
def bridge(pool: str, mountpoint: str | None, state: str | None, docker_socket: str | None, no_mount: bool, csi: str | None,
           csi_controller: bool, csi_node: bool, csi_pool: str | None, metrics: str | None, node: str | None, log: str | None,
           log_level: str | None, log_format: str | None, check: bool, as_json: bool) -> None:
    """Give containers volumes of a pool, in the foreground: Docker's (and Podman's) volume plugin, and Kubernetes' CSI.

    Ends on Ctrl-C or SIGTERM; containers go on meanwhile, and the next one takes over. Two with one state directory are
    refused. --json is for --check.
    """
    if check:
        _check(docker_socket, as_json)
        return
    from nvpool.cli.pool_connection import directory_of
    from nvpool.core.programs import Program, command
    directory = directory_of(pool)
    words = [str(directory.path) if directory is not None else pool]
    given = {"mountpoint": mountpoint, "state": state, "node": node, "log": log, "docker-socket": docker_socket, "csi": csi,
             "csi-pool": csi_pool, "metrics": metrics, "log-level": log_level, "log-format": log_format}
    words += [f"--{name}={value}" for name, value in given.items() if value is not None]
    words += [f"--{name}" for name, asked_for in (("no-mount", no_mount), ("csi-controller", csi_controller),
                                                  ("csi-node", csi_node)) if asked_for]
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
