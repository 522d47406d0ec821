"""`nvpool top` on real processes: clients, targets and volumes with their actual rates."""

from __future__ import annotations

import asyncio
import json
import os
import pty
import select
import signal
import subprocess
import sys
import threading

import pytest

import nvpool
from nvpool.client.pool_client import Client
from nvpool.client.state.options import ClientOptions
from nvpool.core.clock import SYSTEM_CLOCK
from nvpool.core.units import KIB, MIB
from nvpool.host.process_identity import host_name
from nvpool.sdk.admin.io_stats import UseWatch
from nvpool.testing.env.pool import RealPool

NVPOOL = os.path.join(os.path.dirname(sys.executable), "nvpool")
READ_BYTES, WRITE_BYTES = 64 * KIB, 128 * KIB


@pytest.fixture(scope="module")
def pool(tmp_path_factory):
    with RealPool(tmp_path_factory.mktemp("top") / "pool", sizes=(128 * MIB,) * 2) as pool:
        pool.make()
        pool.start()
        yield pool


class Load:
    """A thread that reads one file and writes another one of a volume until it is stopped, and counts both."""

    def __init__(self, pool: RealPool, name: str) -> None:
        options = ClientOptions(deadline_s=60.0, short_circuit=False, read_ahead_bytes=0)
        self._client = nvpool.connect(str(pool.path), name=name, options=options)
        self._client.write_bytes(
            f"/{name}", os.urandom(16 * MIB)
        )  # with so many chunks both targets have some
        self.reads = self.writes = 0
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._run, args=(f"/{name}",))

    def _run(self, path: str) -> None:
        with self._client.open(path, "r+b", buffering=0) as file:
            while not self._end.wait(0.01):
                file.seek((self.reads * 7 % 250) * READ_BYTES)
                assert len(file.read(READ_BYTES)) == READ_BYTES
                self.reads += 1
                if self.reads % 4 == 0:
                    file.seek(0)
                    file.write(bytes(WRITE_BYTES))
                    file.fsync()
                    self.writes += 1

    def __enter__(self) -> Load:
        self._thread.start()
        return self

    def __exit__(self, *_exc) -> None:
        self._end.set()
        self._thread.join()
        self._client.close()


async def rates(pool: RealPool, by: str, load: Load, interval_s: float = 3.0):
    """The rates between two samples, and the actual operations per second between them."""
    client = await Client.open(str(pool.path), "watcher")
    try:
        watch = UseWatch(client, by)
        assert (await watch.look(interval_s)).rates == [], "there is no rate before the second look"
        began_s, reads, writes = SYSTEM_CLOCK.boottime_s(), load.reads, load.writes
        await asyncio.sleep(interval_s)
        seen = await watch.look(interval_s)
        took_s = SYSTEM_CLOCK.boottime_s() - began_s
        return seen, (load.reads - reads) / took_s, (load.writes - writes) / took_s
    finally:
        await client.close()


@pytest.mark.smoke
def test_top_shows_a_client_with_its_rates(pool):
    with Load(pool, "trainer") as load, Load(pool, "idler-of-a-kind"):
        seen, reads_s, writes_s = asyncio.run(rates(pool, "client", load))
    assert seen.silent == [] and 2.5 < seen.interval_s < 6.0
    found = {row.name: row for row in seen.rates}
    assert found.keys() == {f"trainer on {host_name()}", f"idler-of-a-kind on {host_name()}"}
    row = found[f"trainer on {host_name()}"]
    assert row.read_bytes == pytest.approx(reads_s * READ_BYTES, rel=0.25)
    assert row.write_bytes == pytest.approx(writes_s * WRITE_BYTES, rel=0.35)
    assert row.reads == pytest.approx(reads_s, rel=0.25) and row.direct_reads == 0
    assert 0 < row.read_s < 1.0 and 0 < row.write_s < 5.0


def test_top_shows_targets_and_volumes(pool):
    said = subprocess.run(
        [NVPOOL, "volume", "create", str(pool.path), "busy"], capture_output=True, text=True, timeout=120
    )
    assert said.returncode == 0, said
    with Load(pool, "volumes/busy/file") as load:
        seen, reads_s, _ = asyncio.run(rates(pool, "volume", load))
        assert seen.rates[0].name == "busy" and len(seen.rates) == 1
        assert seen.rates[0].reads == pytest.approx(reads_s, rel=0.25)
        seen, reads_s, _ = asyncio.run(rates(pool, "target", load))
    assert len(seen.rates) == 2 and all(
        row.name.startswith(("target 1 (", "target 2 (")) for row in seen.rates
    )
    assert sum(row.reads for row in seen.rates) == pytest.approx(reads_s, rel=0.25)


def test_top_shows_short_circuit_reads_and_stopped_targets(pool):
    client = pool.connect(60.0)
    client.write_bytes("/direct", os.urandom(2 * MIB))

    async def watch() -> None:
        watcher = await Client.open(str(pool.path), "watcher")
        try:
            watch = UseWatch(watcher, "client")
            await watch.look(1.0)
            direct = 0.0
            for _ in range(20):
                await asyncio.to_thread(read_some)
                direct += sum(row.direct_reads for row in (await watch.look(1.0)).rates)
                if direct:
                    break
            assert direct > 0, "short-circuit reads are reported"
            os.kill(pool.pid("target-2"), signal.SIGSTOP)
            try:
                assert (await watch.look(1.0)).silent == [2]
            finally:
                os.kill(pool.pid("target-2"), signal.SIGCONT)
        finally:
            await watcher.close()

    def read_some() -> None:
        until_s = SYSTEM_CLOCK.boottime_s() + 1.0
        with client.open("/direct", "rb", buffering=0) as file:
            number = 0
            while SYSTEM_CLOCK.boottime_s() < until_s:
                number += 1
                file.seek(number * 7919 % 500 * 4 * KIB)
                file.read(4 * KIB)

    asyncio.run(watch())


def test_top_prints_once_or_until_ctrl_c(pool):
    with Load(pool, "seen") as load:
        said = subprocess.run(
            [NVPOOL, "top", str(pool.path), "--once", "--json", "--interval", "1"],
            capture_output=True,
            text=True,
            timeout=120,
        )
        assert said.returncode == 0, said
        output = json.loads(said.stdout)
        assert output["by"] == "client" and output["silent"] == []
        assert output["rows"][0]["name"] == f"seen on {host_name()}" and output["rows"][0]["reads_s"] > 0
        plain = subprocess.run(
            [NVPOOL, "top", str(pool.path), "--once", "--sort", "ops"],
            capture_output=True,
            text=True,
            timeout=120,
        )
        assert plain.stdout.startswith("CLIENT\tREADS/S\t") and f"seen on {host_name()}" in plain.stdout
        main, terminal = pty.openpty()
        live = subprocess.Popen(
            [NVPOOL, "top", str(pool.path), "--interval", "0.5"],
            stdin=terminal,
            stdout=terminal,
            stderr=terminal,
            start_new_session=True,
            env=os.environ | {"TERM": "xterm", "COLUMNS": "160", "LINES": "30"},
        )
        os.close(terminal)
        shown = b""
        deadline_s = SYSTEM_CLOCK.boottime_s() + 60
        try:
            while b"seen on" not in shown and SYSTEM_CLOCK.boottime_s() < deadline_s:
                if select.select([main], [], [], 1.0)[0]:
                    shown += os.read(main, 65536)
            assert b"seen on" in shown and b"Ctrl-C ends this" in shown
            live.send_signal(signal.SIGINT)
            while select.select([main], [], [], 5.0)[0]:
                try:
                    if not os.read(main, 65536):
                        break
                except OSError:  # the other end of the terminal is closed
                    break
            assert live.wait(30) == 0
        finally:
            live.kill()
            live.wait()
            os.close(main)
        assert load.reads > 0
    wrong = subprocess.run(
        [NVPOOL, "top", str(pool.path), "--by", "colour"], capture_output=True, text=True, timeout=60
    )
    assert wrong.returncode == 2
