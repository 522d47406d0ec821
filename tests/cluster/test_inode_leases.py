"""Inode leases between real processes: the client with leases is stopped or killed, or the shard that granted them is killed.

A change waits a few seconds for that, once, and a file opened afterwards shows no old content.
"""

import json
import os
import signal
import subprocess
import sys
import time

import pytest

from nvpool.testing.env.pool import RealPool, end_process

HOLDER = """
import json, sys, nvpool
pool = nvpool.connect(sys.argv[1])
for line in sys.stdin:
    paths = json.loads(line)
    print(json.dumps([pool.read_bytes(path).decode() for path in paths]), flush=True)
"""
NAMES = [f"/file {number}" for number in range(20)]
WATCH_S = 3.0
EACH_S = len(NAMES) * WATCH_S
"""Minimum time of all writes if each one waits for the silent client."""


class Holder:
    """A process that reads files on request, and has leases on them afterwards."""

    def __init__(self, pool: RealPool) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", HOLDER, str(pool.path)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def request(self, paths: list[str]) -> None:
        self.process.stdin.write(json.dumps(paths) + "\n")
        self.process.stdin.flush()

    def reply(self) -> list[str]:
        return json.loads(self.process.stdout.readline())

    def read(self, paths: list[str]) -> list[str]:
        self.request(paths)
        return self.reply()

    def end(self) -> None:
        end_process(self.process.pid)
        self.process.wait(120)
        self.process.stdin.close()
        self.process.stdout.close()


@pytest.fixture
def real(tmp_path):
    with RealPool(tmp_path / "p") as pool:
        pool.make()
        pool.start()
        holder = Holder(pool)
        try:
            yield pool, pool.connect(), holder
        finally:
            holder.end()


def write(pool, text: str) -> float:
    """Seconds that the writes took."""
    began = time.monotonic()
    for name in NAMES:
        pool.write_bytes(name, f"{text} {name}".encode())
    return time.monotonic() - began


def read(text: str) -> list[str]:
    return [f"{text} {name}" for name in NAMES]


def test_stopped_lease_holder_delays_a_writer_once(real):
    pool, writer, holder = real
    write(writer, "first")
    assert holder.read(NAMES) == read("first") == holder.read(NAMES)
    assert write(writer, "second") < EACH_S
    time.sleep(5.5)  # leases are granted again
    assert holder.read(NAMES) == read("second") == holder.read(NAMES)
    os.kill(holder.process.pid, signal.SIGSTOP)
    holder.request(
        NAMES
    )  # in the pipe before the process continues: it reads this before any message of the shard
    assert write(writer, "third") < EACH_S
    assert write(writer, "fourth") < EACH_S
    os.kill(holder.process.pid, signal.SIGCONT)
    assert holder.reply() == read("fourth")
    assert not pool.fsck()


@pytest.mark.smoke
def test_killed_lease_holder_delays_a_writer_once(real):
    pool, writer, holder = real
    write(writer, "first")
    assert holder.read(NAMES) == read("first")
    end_process(holder.process.pid)
    assert write(writer, "second") < EACH_S
    assert write(writer, "third") < EACH_S


@pytest.mark.parametrize("stopped", [False, True])
def test_killed_shard_honours_the_leases_it_granted(real, stopped):
    pool, writer, holder = real
    write(writer, "first")
    for text in ("second", "third"):
        before = holder.read(NAMES)
        assert before == holder.read(NAMES)
        if stopped:
            os.kill(holder.process.pid, signal.SIGSTOP)
            holder.request(NAMES)
        os.kill(pool.pid("meta-1"), signal.SIGKILL)
        write(writer, text)
        if stopped:
            os.kill(holder.process.pid, signal.SIGCONT)
            assert holder.reply() == read(text)
        assert holder.read(NAMES) == read(text)
    assert not pool.fsck()
