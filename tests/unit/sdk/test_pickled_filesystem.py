"""Pickled file systems connect again where they are unpickled, for each start method of processes."""

from __future__ import annotations

import asyncio
import copy
import pickle
import subprocess
import sys
import tempfile

import pytest

import nvpool
from nvpool.client.state.options import ClientOptions
from nvpool.poolmap.model import encode_map
from nvpool.sdk.async_filesystem import AsyncFileSystem
from nvpool.sdk.connect_argument import origin_of
from nvpool.testing.fakes.unix_socket_pool import UnixSocketPool


@pytest.fixture(scope="module")
def served():
    with tempfile.TemporaryDirectory(prefix="nvpool-sdk-") as where:
        found = UnixSocketPool(where)
        yield found
        found.close()


@pytest.fixture
def pool(served):
    with nvpool.connect(served.pool.pool_map, options=ClientOptions(deadline_s=11.0)) as found:
        yield found


PROGRAM = """
import multiprocessing, os, sys
import nvpool
from nvpool.client.state.options import ClientOptions
from nvpool.poolmap.model import decode_map

def work(pool, path, answers):
    with pool:
        pool.write_bytes(f"{path}-{os.getpid()}", b"from the worker")
        answers.put((os.getpid(), bytes(pool.read_many([path])[0]), pool.runtime().pool.vfs.options.deadline_s))

if __name__ == "__main__":
    method, pool_map = sys.argv[1:]
    context = multiprocessing.get_context(method)
    with nvpool.connect(decode_map(pool_map.encode()), options=ClientOptions(deadline_s=11.0)) as pool:
        path = f"/{method}"
        pool.write_bytes(path, b"content")
        answers = context.SimpleQueue()
        workers = [context.Process(target=work, args=(pool, path, answers)) for _ in range(2)]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
            assert worker.exitcode == 0, worker.exitcode
        for pid, content, deadline_s in (answers.get() for _ in workers):
            assert content == b"content" and deadline_s == 11.0
            assert pool.read_bytes(f"{path}-{pid}") == b"from the worker"
"""


@pytest.mark.parametrize("method", ["spawn", "forkserver", "fork"])
def test_file_system_is_pickled_to_another_process(served, method, tmp_path):
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    subprocess.run(
        [sys.executable, program, method, encode_map(served.pool.pool_map).decode()], check=True, timeout=120
    )


def test_pickle_connects_at_its_first_call(pool):
    pool.write_bytes("/file", b"content")
    for again in (pickle.loads(pickle.dumps(pool)), copy.copy(pool), copy.deepcopy(pool)):
        assert again.is_served_by(None), "it has no client yet"
        with again:
            assert again.read_bytes("/file") == b"content"
            assert again.volumes.list() == []
        with pytest.raises(ValueError, match="closed"):
            pickle.dumps(again)
    assert pool.read_bytes("/file") == b"content"


def test_relative_directory_is_pickled_as_absolute(tmp_path, monkeypatch):
    (tmp_path / "pool").mkdir()
    (tmp_path / "pool" / "poolmap.json").write_text("{}")
    monkeypatch.chdir(tmp_path)
    assert origin_of("pool", "", None).where == str(tmp_path / "pool")


@pytest.mark.parametrize("arguments", [("rb", 0), ("rb",), ("r",), ("wb",), ("w",)])
def test_open_file_is_not_pickled(pool, arguments):
    pool.write_bytes("/file", b"content")
    with pool.open("/file", *arguments) as file, pytest.raises(TypeError, match="cannot pickle"):
        pickle.dumps(file)


def test_async_file_system_connects_after_unpickling(served):
    async def main():
        async with await nvpool.connect_async(served.pool.pool_map) as pool:
            await pool.write_bytes("/async", b"content")
            async with await pool.open("/async") as file:
                with pytest.raises(TypeError, match="open it again"):
                    pickle.dumps(file)
            pickled = pickle.dumps(pool)
        again = pickle.loads(pickled)
        with pytest.raises(RuntimeError, match="not connected yet"):
            print(again.client)
        volumes = again.volumes
        found = await asyncio.gather(again.read_bytes("/async"), again.exists("/async"), volumes.list())
        assert found == [b"content", True, []] and type(again) is AsyncFileSystem
        await volumes.list()
        await again.close()
        async with pickle.loads(pickled) as third:
            assert "async" in await third.list("/")
        fourth = pickle.loads(pickled)
        assert "async" in [entry.name async for entry in fourth.scan("/")]
        await fourth.close()
        await pickle.loads(pickled).close()
        with pytest.raises(TypeError, match="made of a client"):
            pickle.dumps(AsyncFileSystem(third.client, third.caller))

    asyncio.run(asyncio.wait_for(main(), 60))
