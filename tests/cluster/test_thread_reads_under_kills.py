"""Threads that read directly, over their own connections and by short-circuit reads, while their stores are killed."""

import random
import signal
import threading

import pytest

import nvpool
from nvpool.client.state.options import ClientOptions
from nvpool.core.units import MIB
from nvpool.testing.env.pool import PLAIN_TCP, RealPool, end_process

KILLS = 4
STREAM = {"transport": "stream", "short_circuit": False}


@pytest.mark.smoke
def test_reading_threads_see_no_error_when_a_store_is_killed(tmp_path):
    read_under_kills(tmp_path, STREAM, 1)


@pytest.mark.parametrize("options", [STREAM, {}], ids=["stream", "short-circuit"])
def test_reading_threads_see_no_error_when_stores_are_killed(tmp_path, options):
    read_under_kills(tmp_path, options, KILLS)


def read_under_kills(tmp_path, options, kills):
    with RealPool(tmp_path / "pool", sizes=(96 * MIB,), config=PLAIN_TCP) as pool:
        pool.make()
        pool.start()
        content = random.Random(1).randbytes(8 * MIB)
        stop, problems, reads = threading.Event(), [], [0] * 6
        with nvpool.connect(str(pool.path), options=ClientOptions(deadline_s=60.0, **options)) as client:
            with client.open("/file", "wb") as file:
                file.write(content)

            def reader(number):
                chance = random.Random(number)
                try:
                    with client.open("/file", "rb", buffering=0) as file:
                        while not stop.is_set():
                            offset, length = (
                                chance.randrange(len(content)),
                                chance.choice((1, 4096, 5000, 100_000)),
                            )
                            found = file.pread(length, offset)
                            if found != content[offset : offset + length]:
                                problems.append(f"{length} bytes at {offset} are not what was written")
                                return
                            reads[number] += 1
                except BaseException as error:
                    problems.append(error)

            threads = [threading.Thread(target=reader, args=(number,)) for number in range(len(reads))]
            for thread in threads:
                thread.start()
            counters = client.runtime().reads.counters
            for _ in range(kills):
                way = "lanes" if options else "short_circuit"
                before = counters[way]
                pool.until(lambda: problems or counters[way] > before + 100, "threads read directly")  # noqa: B023
                end_process(killed := pool.pid("target-1"), signal.SIGKILL)
                pool.until(lambda: pool.pid("target-1") != killed, "another process serves the target")
                pool.wait()
            before = sum(reads)
            pool.until(lambda: problems or sum(reads) > before + 100, "reads go on")
            stop.set()
            for thread in threads:
                thread.join(120)
            assert not any(thread.is_alive() for thread in threads)
        assert not problems, problems
        assert pool.restarts() == kills
