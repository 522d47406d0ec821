"""SDK used from threads, forks and asyncio. The pool runs on an event loop in another thread."""

from __future__ import annotations

import asyncio
import errno
import io
import json
import multiprocessing
import os
import pickle
import subprocess
import sys
import tempfile
import threading

import pytest

import nvpool
from nvpool.client.state.options import ClientOptions
from nvpool.core.units import KIB
from nvpool.testing.fakes.unix_socket_pool import UnixSocketPool


@pytest.fixture(scope="module")
def served():
    with tempfile.TemporaryDirectory(prefix="nvpool-sdk-") as where:
        found = UnixSocketPool(where)
        yield found
        found.close()


@pytest.fixture
def pool(served, request):
    with nvpool.connect(served.pool.pool_map, options=ClientOptions(deadline_s=10.0)) as found:
        top = f"/{request.node.name[:200]}"
        found.mkdir(top)
        found.top = top
        yield found


def test_import_of_nvpool_loads_no_client():
    program = (
        "import sys, nvpool; "
        "print([m for m in sys.modules if m.startswith(('nvpool.client', 'google', 'uvloop', 'grpc'))])"
    )
    assert (
        subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout
        == "[]\n"
    )


def test_files_are_written_and_read_as_with_open(pool):
    path = f"{pool.top}/file"
    with pool.open(path, "wb") as file:
        file.write(b"line one\nline two\n")
        file.write(b"x" * 300 * KIB)
    with pool.open(path, "rb") as file:
        assert file.readline() == b"line one\n"
        assert file.tell() == 9 and file.seek(-3, os.SEEK_END) == 300 * KIB + 15
        assert file.read() == b"xxx"
    with pool.open(path, "r+b", buffering=0) as file:
        assert isinstance(file, io.RawIOBase)
        assert file.pwrite(b"LINE", 0) == 4 and file.pread(8, 0) == b"LINE one"
        assert file.truncate(8) == 8 and file.size() == 8
        with pytest.raises(io.UnsupportedOperation):
            file.fileno()
    with pool.open(path, "a", encoding="utf-8") as file:
        file.write(" – grüße\n")
    with pool.open(path, encoding="utf-8") as file:
        assert file.read() == "LINE one – grüße\n"
    with pool.open(path, "wb") as file:
        pickle.dump({"a": list(range(1000))}, file)
    with pool.open(path, "rb") as file:
        assert pickle.load(file)["a"][-1] == 999
    with pytest.raises(ValueError):
        file.read()


def test_errors_match_those_of_python(pool):
    top = pool.top
    with pytest.raises(FileNotFoundError) as found:
        pool.open(f"{top}/missing", "rb")
    assert found.value.filename == f"{top}/missing" and found.value.__cause__ is not None
    pool.write_bytes(f"{top}/file", b"x")
    with pytest.raises(FileExistsError):
        pool.open(f"{top}/file", "xb")
    with pytest.raises(NotADirectoryError):
        pool.open(f"{top}/file/below", "rb")
    with pytest.raises(IsADirectoryError):
        pool.open(top, "rb")
    with pytest.raises(OSError, match="not empty"):
        pool.rmdir(top)
    with pytest.raises(FileNotFoundError):
        nvpool.connect("/no/such/place:1")
    with pytest.raises(ValueError):
        pool.open(f"{top}/file", "rw")


def test_holes_are_made_found_and_copied(pool):
    top = pool.top
    with pool.open(f"{top}/holes", "w+b", buffering=0) as file:
        file.write(b"x" * 40_000)
        file.punch(4096, 8192)
        assert (file.seek(0, os.SEEK_HOLE), file.seek(5000, os.SEEK_DATA), file.tell()) == (
            4096,
            12288,
            12288,
        )
        with pytest.raises(OSError, match="end of the data") as beyond:
            file.seek(40_000, os.SEEK_DATA)
        assert beyond.value.errno == errno.ENXIO
        assert file.pread(50_000, 0) == b"x" * 4096 + bytes(8192) + b"x" * (40_000 - 12288)
    assert pool.copy(f"{top}/holes", f"{top}/too") == 40_000
    assert pool.read_bytes(f"{top}/too") == pool.read_bytes(f"{top}/holes")


def test_names_are_made_listed_moved_and_removed(pool):
    top = pool.top
    pool.mkdir(f"{top}/a/b/c", parents=True)
    pool.mkdir(f"{top}/a/b/c", parents=True, exist_ok=True)
    with pytest.raises(FileExistsError):
        pool.mkdir(f"{top}/a/b/c")
    for number in range(30):
        pool.write_bytes(f"{top}/a/f{number}", b"%d" % number)
    assert pool.list(f"{top}/a") == sorted(["b", *[f"f{number}" for number in range(30)]])
    assert {entry.name for entry in pool.scan(f"{top}/a") if entry.is_dir()} == {"b"}
    assert [
        (place.removeprefix(top), directories, len(files)) for place, directories, files in pool.walk(top)
    ] == [("", ["a"], 0), ("/a", ["b"], 30), ("/a/b", ["c"], 0), ("/a/b/c", [], 0)]
    pool.rename(f"{top}/a/f1", f"{top}/a/f2")
    assert pool.read_bytes(f"{top}/a/f2") == b"1" and not pool.exists(f"{top}/a/f1")
    pool.link(f"{top}/a/f2", f"{top}/hard")
    assert pool.stat(f"{top}/hard").st_nlink == 2
    assert pool.copy(f"{top}/hard", f"{top}/copy") == 1 and pool.read_bytes(f"{top}/copy") == b"1"
    assert pool.is_file(f"{top}/copy") and pool.is_dir(f"{top}/a") and not pool.is_dir(f"{top}/nothing")
    pool.remove_tree(f"{top}/a")
    assert pool.list(top) == ["copy", "hard"]


def test_symbolic_links_are_followed_as_a_kernel_does(pool):
    top = pool.top
    pool.mkdir(f"{top}/d/e", parents=True)
    pool.write_bytes(f"{top}/d/file", b"found")
    pool.symlink("../d", f"{top}/d/again")
    pool.symlink(f"{top}/d/file", f"{top}/absolute")
    pool.symlink("self", f"{top}/self")
    assert pool.read_bytes(f"{top}/d/again/again/e/../file") == b"found"
    assert pool.read_bytes(f"{top}/absolute") == b"found"
    assert pool.readlink(f"{top}/absolute") == f"{top}/d/file"
    assert pool.stat(f"{top}/absolute", follow_symlinks=False).st_size == len(f"{top}/d/file")
    pool.write_bytes(f"{top}/absolute", b"through")
    assert pool.read_bytes(f"{top}/d/file") == b"through"
    with pytest.raises(OSError) as found:
        pool.read_bytes(f"{top}/self")
    assert found.value.errno == 40
    assert pool.stat("/../..").st_ino == 1


def test_attributes_are_set_and_shown(pool):
    path = f"{pool.top}/file"
    pool.write_bytes(path, b"12345")
    pool.chmod(path, 0o640)
    pool.utime(path, ns=(1_500_000_000_123_456_789, 1_600_000_000_987_654_321))
    found = pool.stat(path)
    assert found.st_mode & 0o7777 == 0o640 and found.st_size == 5
    assert (found.st_atime_ns, found.st_mtime_ns) == (1_500_000_000_123_456_789, 1_600_000_000_987_654_321)
    pool.truncate(path, 2)
    assert pool.read_bytes(path) == b"12"
    pool.setxattr(path, "user.note", b"n")
    assert pool.listxattr(path) == ["user.note"] and pool.getxattr(path, "user.note") == b"n"
    pool.removexattr(path, "user.note")
    assert pool.listxattr(path) == []
    pool.utime(path)
    assert pool.stat(path).st_mtime_ns > 1_600_000_000_987_654_321
    pool.utime(path, ns=(-11_644_473_600 * 10**9, 253_402_300_799 * 10**9))
    assert (pool.stat(path).st_atime_ns, pool.stat(path).st_mtime_ns) == (-1 << 63, (1 << 63) - 1)
    assert pool.statfs().blocks_available > 0


def test_read_many_takes_paths_and_files_in_order(pool):
    contents = {f"{pool.top}/f{number}": os.urandom(100_000) for number in range(5)}
    for path, content in contents.items():
        pool.write_bytes(path, content)
    last = f"{pool.top}/f4"
    with pool.open(f"{pool.top}/f0", "rb") as buffered, pool.open(f"{pool.top}/f1", "rb", buffering=0) as raw:
        reads = [
            (f"{pool.top}/f{number}", offset, 4096)
            for number in range(2, 5)
            for offset in range(0, 96_000, 8192)
        ]
        reads += [(buffered, 4096, 4096), (raw, 123, 456), (last, 99_990, 100), (last, 200_000, 5)]
        names = [
            {id(buffered): f"{pool.top}/f0", id(raw): f"{pool.top}/f1"}.get(id(what), what)
            for what, _, _ in reads
        ]
        into = bytearray(sum(length for _, _, length in reads))
        lengths = pool.read_many(reads, into)
        place = 0
        for name, (_, offset, asked), length in zip(names, reads, lengths, strict=True):
            assert into[place : place + length] == contents[name][offset : offset + asked]
            place += asked
        assert lengths[-2:] == [10, 0]
        assert [bytes(part) for part in pool.read_many(reads[:3])] == [
            contents[n][o : o + c] for n, o, c in reads[:3]
        ]
    with pytest.raises(FileNotFoundError):
        pool.read_many([(f"{pool.top}/missing", 0, 1)], bytearray(1))
    with pytest.raises(TypeError):
        pool.read_many([(last, 0, 1)], b"read-only")
    with pytest.raises(ValueError, match="has 10 bytes, and the 1 reads need 100"):
        pool.read_many([(last, 0, 100)], bytearray(10))


def test_next_batch_reads_a_replaced_file(pool):
    path = f"{pool.top}/file"
    pool.write_bytes(path, b"old")
    assert bytes(pool.read_many([(path, 0, 3)])[0]) == b"old"
    pool.write_bytes(f"{pool.top}/beside", b"new")
    pool.rename(f"{pool.top}/beside", path)
    assert bytes(pool.read_many([(path, 0, 3)])[0]) == b"new"


def test_many_threads_share_one_connection(pool):
    pool.write_bytes(f"{pool.top}/file", bytes(range(256)) * 4096)
    wrong = []

    def work(seed: int) -> None:
        with pool.open(f"{pool.top}/file", "rb", buffering=0) as file:
            for step in range(40):
                offset = (seed * 7919 + step * 104_729) % 1_000_000
                if file.pread(300, offset) != bytes((offset + n) % 256 for n in range(300)):
                    wrong.append(offset)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert not wrong


def _in_child(pool, file, path: str, sender) -> None:
    try:
        content = file.pread(5, 0)
        many = bytes(pool.read_many([(path, 0, 5), (file, 1, 3)])[1])
        pool.write_bytes(path + "-child", b"from the child")
        sender.send((content, many, pool.runtime().pid == os.getpid()))
    except BaseException as error:
        sender.send(repr(error))
    pool.close()


def test_forked_worker_opens_its_own_connection(pool):
    path = f"{pool.top}/file"
    pool.write_bytes(path, b"hello")
    with pool.open(path, "rb", buffering=0) as file:
        fork = multiprocessing.get_context("fork")
        receiver, sender = fork.Pipe(False)
        children = [fork.Process(target=_in_child, args=(pool, file, f"{path}", sender)) for _ in range(2)]
        for child in children:
            child.start()
        for _ in children:
            assert receiver.poll(20)
            assert receiver.recv() == (b"hello", b"ell", True)
        for child in children:
            child.join(20)
            assert child.exitcode == 0
        assert file.pread(5, 0) == b"hello"
    assert pool.read_bytes(f"{path}-child") == b"from the child"


def test_writes_are_stored_when_the_program_ends(pool, served):
    program = f"""
import nvpool
from nvpool.poolmap.model import decode_map
pool = nvpool.connect(decode_map({json.dumps(_map_text(served))}.encode()))
file = pool.open({pool.top!r} + "/left", "wb", buffering=0)
file.write(b"not closed")
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=240)
    assert pool.read_bytes(f"{pool.top}/left") == b"not closed"


def _map_text(served) -> str:
    from nvpool.poolmap.model import encode_map

    return encode_map(served.pool.pool_map).decode()


def test_asyncio_programs_need_no_thread(served):
    async def main() -> None:
        async with await nvpool.connect_async(served.pool.pool_map) as pool:
            await pool.mkdir("/async")
            async with await pool.open("/async/file", "wb") as file:
                await file.write(0, b"0123456789")
                await file.fsync()
            async with await pool.open("/async/file", "r+b") as file:
                assert bytes(await file.read(3, 4)) == b"3456"
                await file.truncate(5)
                assert (await file.stat()).st_size == 5 == file.size
                assert [
                    bytes(part) for part in await pool.read_many([(file, 0, 2), ("/async/file", 4, 9)])
                ] == [b"01", b"4"]
            assert await pool.list("/async") == ["file"]
            await asyncio.gather(*[pool.write_bytes(f"/async/f{n}", b"%d" % n) for n in range(20)])
            assert await pool.read_bytes("/async/f7") == b"7"
            await pool.remove_tree("/async")
            assert not await pool.exists("/async")

    asyncio.run(asyncio.wait_for(main(), 120))


def test_closed_pool_refuses_further_calls(served):
    pool = nvpool.connect(served.pool.pool_map)
    pool.close()
    pool.close()
    with pytest.raises(ValueError):
        pool.list("/")


def test_close_ends_calls_of_other_threads(served):
    with nvpool.connect(served.pool.pool_map, options=ClientOptions(deadline_s=60.0)) as found:
        runtime = found.runtime()
        ended = []

        def call() -> None:
            try:
                runtime.call(asyncio.sleep(3600))
            except BaseException as error:
                ended.append(error)

        thread = threading.Thread(target=call, daemon=True)
        thread.start()
    thread.join(5)
    assert not thread.is_alive() and ended
