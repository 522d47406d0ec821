"""Leases between real processes: who holds them is stopped or killed, the shard that gave them is killed. A change waits a few
seconds for that, once, and nobody who opens a file afterwards sees what was there before."""

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
"""What writing them all takes at least when each write waits for who does not answer."""


class Holder:
    """Another process that reads files when it is told to, and has leases on them after it."""

    def __init__(self, pool: RealPool) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", HOLDER, str(pool.path)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def ask(self, paths: list[str]) -> None:
        self.process.stdin.write(json.dumps(paths) + "\n")
        self.process.stdin.flush()

    def answer(self) -> list[str]:
        return json.loads(self.process.stdout.readline())

    def read(self, paths: list[str]) -> list[str]:
        self.ask(paths)
        return self.answer()

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
    """Seconds that it took."""
    began = time.monotonic()
    for name in NAMES:
        pool.write_bytes(name, f"{text} {name}".encode())
    return time.monotonic() - began


def read(text: str) -> list[str]:
    return [f"{text} {name}" for name in NAMES]


def test_a_stopped_holder_holds_a_writer_up_once_and_sees_the_new_bytes_when_it_goes_on(real):
    pool, writer, holder = real
    write(writer, "first")
    assert holder.read(NAMES) == read("first") == holder.read(NAMES)
    assert write(writer, "second") < EACH_S
    time.sleep(5.5)  # lent again
    assert holder.read(NAMES) == read("second") == holder.read(NAMES)
    os.kill(holder.process.pid, signal.SIGSTOP)
    holder.ask(NAMES)  # in its pipe when it goes on: before anything that the shard has to say
    assert write(writer, "third") < EACH_S
    assert write(writer, "fourth") < EACH_S
    os.kill(holder.process.pid, signal.SIGCONT)
    assert holder.answer() == read("fourth")
    assert not pool.fsck()


@pytest.mark.smoke
def test_a_killed_holder_holds_a_writer_up_once(real):
    pool, writer, holder = real
    write(writer, "first")
    assert holder.read(NAMES) == read("first")
    end_process(holder.process.pid)
    assert write(writer, "second") < EACH_S
    assert write(writer, "third") < EACH_S


@pytest.mark.parametrize("stopped", [False, True])
def test_a_killed_shard_gives_up_no_lease_that_somebody_relies_on(real, stopped):
    pool, writer, holder = real
    write(writer, "first")
    for text in ("second", "third"):
        before = holder.read(NAMES)
        assert before == holder.read(NAMES)
        if stopped:
            os.kill(holder.process.pid, signal.SIGSTOP)
            holder.ask(NAMES)
        os.kill(pool.pid("meta-1"), signal.SIGKILL)
        write(writer, text)
        if stopped:
            os.kill(holder.process.pid, signal.SIGCONT)
            assert holder.answer() == read(text)
        assert holder.read(NAMES) == read(text)
    assert not pool.fsck()
