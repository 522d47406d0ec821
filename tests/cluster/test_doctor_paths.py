"""`nvpool doctor` between machines whose interfaces and switch have different MTUs."""

import json
import sys

import pytest

from nvpool.cli.doctor.check_results import BAD, OK, WARN
from nvpool.testing.env.namespaces import Machines, missing

WHY_NOT = missing()
pytestmark = pytest.mark.skipif(WHY_NOT is not None, reason=WHY_NOT or "")

PORT = 7000
SERVE = """
import signal, socket, sys
there = socket.create_server(("10.77.0.2", int(sys.argv[1])))
silent = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
silent.bind(("10.77.0.2", int(sys.argv[1]) + 1))
other = socket.create_server(("10.77.0.2", int(sys.argv[1]) + 1))
print("up", flush=True)
signal.pause()
"""
LOOK = """
import json, sys
from nvpool.cli.doctor.network_mtu import paths
print(json.dumps(list(paths(sys.argv[1:]))))
"""


@pytest.fixture(scope="module")
def cable(tmp_path_factory):
    made = Machines(2, tmp_path_factory.mktemp("paths"))
    with made as (one, other):
        serving = other.popen(sys.executable, "-P", "-c", SERVE, str(PORT), stdout=-1, text=True)
        try:
            assert serving.stdout.readline() == "up\n"
            yield made, one
        finally:
            serving.kill()
            serving.wait()
            serving.stdout.close()


def check_path(cable, port=PORT):
    _, one = cable
    printed = one.run(
        sys.executable, "-P", "-c", LOOK, f"stream://10.77.0.2:{port}", "stream://10.77.0.2:9"
    ).stdout
    ((name, state, seen, _remedy),) = json.loads(printed)
    assert name == "path to 10.77.0.2"
    return state, seen


def sizes(cable, ours, theirs, switch):
    machines, _ = cable
    machines.packets(1, ours, switch)
    machines.packets(2, theirs, switch)


@pytest.mark.smoke
def test_large_packets_arrive(cable):
    for size in (1500, 9000):
        sizes(cable, size, size, size)
        assert check_path(cable) == (OK, f"packets of {size} bytes arrive")


def test_silently_dropped_large_packets_are_bad(cable):
    sizes(cable, 9000, 9000, 1500)
    assert check_path(cable) == (BAD, "packets of 9000 bytes do not arrive, and small ones do")


def test_different_mtus_are_a_warning(cable):
    sizes(cable, 9000, 1500, 9000)
    assert check_path(cable) == (
        WARN,
        "this machine would send packets of 9000 bytes, and TCP agrees on 1500 at most",
    )


def test_host_without_a_datagram_reply_is_not_judged(cable):
    sizes(cable, 9000, 9000, 1500)
    state, seen = check_path(cable, PORT + 1)
    assert state == OK and "not known" in seen
