"""Thread that waits for work on the SDK's loop: its result, and cancellation of the work when the thread is interrupted."""

import asyncio
import concurrent.futures
import gc
import signal
import threading

import pytest

import nvpool
from nvpool.sdk.loop_thread import LoopCall
from nvpool.testing.fakes.unix_socket_pool import UnixSocketPool


@pytest.fixture
def loop():
    made = asyncio.new_event_loop()
    thread = threading.Thread(target=made.run_forever)
    thread.start()
    yield made
    made.call_soon_threadsafe(made.stop)
    thread.join(10)
    made.close()


async def given(value):
    await asyncio.sleep(0)
    if isinstance(value, BaseException):
        raise value
    return value


def test_thread_gets_the_result_or_error_of_its_work(loop):
    assert LoopCall(loop, given(7)).wait() == 7
    with pytest.raises(FileNotFoundError, match="gone"):
        LoopCall(loop, given(FileNotFoundError("gone"))).wait()
    with pytest.raises(concurrent.futures.CancelledError):
        LoopCall(loop, given(asyncio.CancelledError())).wait()


def test_concurrent_threads_get_their_own_results(loop):
    with concurrent.futures.ThreadPoolExecutor(16) as threads:
        found = list(threads.map(lambda number: LoopCall(loop, given(number)).wait(), range(500)))
    assert found == list(range(500))


def test_work_whose_thread_is_interrupted_is_cancelled(loop):
    begun, ended = threading.Event(), threading.Event()

    async def work():
        begun.set()
        try:
            await asyncio.sleep(60)
        finally:
            ended.set()

    def interrupt():
        begun.wait(10)
        signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)

    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        threading.Thread(target=interrupt).start()
        with pytest.raises(KeyboardInterrupt):
            LoopCall(loop, work()).wait()
        assert ended.wait(10)
    finally:
        signal.signal(signal.SIGINT, before)


def test_file_collected_in_the_loop_thread_is_stored_and_closed(tmp_path):
    """The garbage collector runs in any thread; a file that it closed in the loop's thread made the loop wait for itself."""
    served = UnixSocketPool(str(tmp_path))
    try:
        with nvpool.connect(served.pool.pool_map) as pool:
            runtime = pool.runtime()
            for mode, buffering in (("wb", 0), ("wb", -1), ("w", -1)):
                cycle = [pool.open("/file", mode, buffering)]
                cycle.append(cycle)
                cycle[0].write("left open" if mode == "w" else b"left open")
                del cycle
                collected = threading.Event()
                runtime.loop.call_soon_threadsafe(lambda seen=collected: (gc.collect(), seen.set()))
                assert collected.wait(30), "the loop is blocked"
                runtime.call(runtime.done())
                if (
                    not buffering
                ):  # in a cycle Python may close the raw file before the buffered one, which loses the buffer
                    assert pool.read_bytes("/file") == b"left open"
                pool.remove("/file")
    finally:
        served.close()


def test_work_for_a_closed_loop_is_refused():
    ended = asyncio.new_event_loop()
    ended.close()
    with pytest.raises(RuntimeError, match="closed"):
        LoopCall(ended, given(1)).wait()
