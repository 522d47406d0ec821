"""SDK calls with wrong arguments: no data is lost, and the error names the wrong argument."""

from __future__ import annotations

import array
import asyncio
import errno
import os
import pathlib
import socket
import tempfile

import pytest

import nvpool
from nvpool.client.state.options import ClientOptions
from nvpool.core.errors import ChecksumMismatch, QuotaExceeded
from nvpool.sdk.async_filesystem import AsyncFileSystem
from nvpool.testing.fakes.unix_socket_pool import UnixSocketPool

OLD = b"what was there before"
GAPS = memoryview(bytes(16))[::2]


@pytest.fixture(scope="module")
def served():
    with tempfile.TemporaryDirectory(prefix="nvpool-sdk-") as where:
        found = UnixSocketPool(where)
        yield found
        found.close()


@pytest.fixture
def pool(served, request):
    with nvpool.connect(served.pool.pool_map, options=ClientOptions(deadline_s=10.0)) as found:
        found.top = "/" + request.node.name[:200].replace("/", " ")
        found.mkdir(found.top)
        found.write_bytes(f"{found.top}/file", OLD)
        found.file = f"{found.top}/file"
        yield found


def text_file(pool, **arguments):
    pool.open(pool.file, "w", **arguments)


WRONG_WRITES = {
    "write_bytes of text": (lambda pool: pool.write_bytes(pool.file, "text"), TypeError),
    "write_bytes of None": (lambda pool: pool.write_bytes(pool.file, None), TypeError),
    "write_bytes of a list": (lambda pool: pool.write_bytes(pool.file, [1, 2]), TypeError),
    "write_bytes of a buffer with gaps": (lambda pool: pool.write_bytes(pool.file, GAPS), TypeError),
    "open with no encoding": (lambda pool: text_file(pool, encoding="klingon"), LookupError),
    "open with an encoding that is none": (lambda pool: text_file(pool, encoding=8), TypeError),
    "open with no way of errors": (lambda pool: text_file(pool, errors="forgive"), LookupError),
    "open with no newline": (lambda pool: text_file(pool, newline="x"), ValueError),
    "open with a newline that is none": (lambda pool: text_file(pool, newline=3), TypeError),
    "open unbuffered text": (lambda pool: text_file(pool, buffering=0), ValueError),
    "open with no buffering": (lambda pool: text_file(pool, buffering="line"), TypeError),
    "open with no permissions": (lambda pool: text_file(pool, permissions="rw"), TypeError),
    "open binary with encoding": (lambda pool: pool.open(pool.file, "wb", encoding="utf-8"), ValueError),
    "open with both kinds": (lambda pool: pool.open(pool.file, "wbt"), ValueError),
    "open with no mode": (lambda pool: pool.open(pool.file, 2), TypeError),
    "truncate to no number": (lambda pool: pool.truncate(pool.file, "0"), TypeError),
    "truncate to None": (lambda pool: pool.truncate(pool.file, None), TypeError),
    "truncate below nothing": (lambda pool: pool.truncate(pool.file, -1), ValueError),
    "remove the tree of nothing": (lambda pool: pool.remove_tree(""), FileNotFoundError),
    "copy onto a directory": (lambda pool: pool.copy(pool.file, pool.top), IsADirectoryError),
    "mkdir below nothing with no mode": (
        lambda pool: pool.mkdir(f"{pool.top}/a/b", "x", parents=True),
        TypeError,
    ),
    "mkdir below nothing with a mode below 0": (
        lambda pool: pool.mkdir(f"{pool.top}/a/b", -1, parents=True),
        ValueError,
    ),
    "mkdir below nothing with a long name": (
        lambda pool: pool.mkdir(f"{pool.top}/a/{'b' * 256}", parents=True),
        OSError,
    ),
    "open a new file with permissions below 0": (
        lambda pool: pool.open(f"{pool.top}/new", "wb", permissions=-1),
        ValueError,
    ),
    "copy into nowhere": (lambda pool: pool.copy(pool.file, f"{pool.top}/none/copy"), FileNotFoundError),
}


@pytest.mark.parametrize("name", WRONG_WRITES)
def test_wrong_argument_leaves_the_file_as_it_was(pool, name):
    call, error = WRONG_WRITES[name]
    with pytest.raises(error):
        call(pool)
    assert pool.read_bytes(pool.file) == OLD
    assert pool.list(pool.top) == ["file"]


def test_write_bytes_takes_any_buffer(pool):
    for content in (bytearray(b"abcd"), memoryview(b"abcd"), array.array("H", [0x6261, 0x6463])):
        assert pool.write_bytes(pool.file, content) == 4 and pool.read_bytes(pool.file) == b"abcd"


def test_async_write_bytes_checks_before_it_truncates(served):
    async def main():
        async with await nvpool.connect_async(served.pool.pool_map) as pool:
            await pool.write_bytes("/async-old", OLD)
            for wrong in ("text", None, GAPS):
                with pytest.raises(TypeError):
                    await pool.write_bytes("/async-old", wrong)
            assert await pool.read_bytes("/async-old") == OLD
            with pytest.raises(ValueError):
                await pool.truncate("/async-old", -5)
            await pool.remove("/async-old")

    asyncio.run(asyncio.wait_for(main(), 60))


def test_two_copies_to_one_target_do_not_collide(pool):
    async def both():
        running = pool.runtime().pool
        await asyncio.gather(*[running.copy(pool.file, f"{pool.top}/copy") for _ in range(8)])

    pool.runtime().call(both())
    assert pool.read_bytes(f"{pool.top}/copy") == OLD and pool.list(pool.top) == ["copy", "file"]


def test_copy_to_the_longest_name_works(pool):
    pool.copy(pool.file, f"{pool.top}/{'n' * 255}")
    assert pool.read_bytes(f"{pool.top}/{'n' * 255}") == OLD


def with_file(call):
    """The call, with its own open file."""

    def opened(pool):
        with pool.open(pool.file, "r+b", 0) as file:
            call(file)

    return opened


WRONG_VALUES = {
    "chmod to None": (lambda pool: pool.chmod(pool.file, None), TypeError, "mode .* to 0o7777, not NoneType"),
    "chmod to text": (lambda pool: pool.chmod(pool.file, "644"), TypeError, r"mode .* not str \('644'\)"),
    "chmod below nothing": (lambda pool: pool.chmod(pool.file, -1), ValueError, "mode .* not -1"),
    "chmod beyond all modes": (lambda pool: pool.chmod(pool.file, 1 << 16), ValueError, "mode .* not 65536"),
    "chown to text": (lambda pool: pool.chown(pool.file, "x", 0), TypeError, "uid .* not str"),
    "chown to None": (lambda pool: pool.chown(pool.file, 0, None), TypeError, "gid .* not NoneType"),
    "chown below -1": (
        lambda pool: pool.chown(pool.file, -5, 0),
        ValueError,
        "uid .* -1 to keep what is there, not -5",
    ),
    "chown beyond all": (lambda pool: pool.chown(pool.file, 0, 1 << 32), ValueError, "gid .* not 4294967296"),
    "mkdir below nothing": (lambda pool: pool.mkdir(f"{pool.top}/d", -1), ValueError, "mode .* not -1"),
    "utime of a number": (
        lambda pool: pool.utime(pool.file, 5),
        TypeError,
        r"ns .* two integers .* not int \(5\)",
    ),
    "utime of one": (lambda pool: pool.utime(pool.file, (1,)), TypeError, "ns .* not tuple of 1"),
    "utime of texts": (lambda pool: pool.utime(pool.file, (1, "b")), TypeError, r"ns\[1\] .* not str"),
    "setxattr of a number": (
        lambda pool: pool.setxattr(pool.file, "user.x", 3),
        TypeError,
        "value .* not int",
    ),
    "setxattr of text": (
        lambda pool: pool.setxattr(pool.file, "user.x", "v"),
        TypeError,
        "value .* not str; encode it first",
    ),
    "setxattr of no name": (
        lambda pool: pool.setxattr(pool.file, 3, b""),
        TypeError,
        "name of an attribute .* not int",
    ),
    "setxattr with a null": (
        lambda pool: pool.setxattr(pool.file, "user.\0", b""),
        ValueError,
        "null character",
    ),
    "setxattr with flags": (
        lambda pool: pool.setxattr(pool.file, "user.x", b"", 9),
        ValueError,
        "os.XATTR_CREATE .* not 9",
    ),
    "setxattr with text as flags": (
        lambda pool: pool.setxattr(pool.file, "user.x", b"", "1"),
        TypeError,
        "flags .* not str",
    ),
    "getxattr of no name": (
        lambda pool: pool.getxattr(pool.file, None),
        TypeError,
        "name of an attribute .* not NoneType",
    ),
    "removexattr of no name": (
        lambda pool: pool.removexattr(pool.file, 3),
        TypeError,
        "name of an attribute .* not int",
    ),
    "set_layout of a text": (
        lambda pool: pool.set_layout(pool.top, chunk_bytes="1M"),
        TypeError,
        "chunk_bytes .* not str",
    ),
    "set_layout below nothing": (
        lambda pool: pool.set_layout(pool.top, chunk_bytes=-1),
        ValueError,
        "chunk_bytes .* not -1",
    ),
    "set_layout of replicas": (
        lambda pool: pool.set_layout(pool.top, replicas="2"),
        TypeError,
        "replicas .* not str",
    ),
    "set_layout of -1 replicas": (
        lambda pool: pool.set_layout(pool.top, replicas=-1),
        ValueError,
        "from 1 to 3, .* not -1",
    ),
    "create with replicas": (
        lambda pool: pool.volumes.create("w", replicas="x"),
        TypeError,
        "replicas .* not str",
    ),
    "create with chunks": (
        lambda pool: pool.volumes.create("w", chunk_bytes="x"),
        TypeError,
        "chunk_bytes .* not str",
    ),
    "create with a quota": (
        lambda pool: pool.volumes.create("w", bytes_max="1G"),
        TypeError,
        "bytes_max .* not str",
    ),
    "create with trash": (
        lambda pool: pool.volumes.create("w", trash_s="7d"),
        TypeError,
        "trash_s .* not str",
    ),
    "create with a mode": (lambda pool: pool.volumes.create("w", mode="7"), TypeError, "mode .* not str"),
    "resize to text": (
        lambda pool: pool.volumes.resize("w", files_max=""),
        TypeError,
        "files_max .* not str",
    ),
    "grant to a number": (lambda pool: pool.volumes.grant("w", 3, "rw"), TypeError, "client .* not int"),
    "grant of no right": (
        lambda pool: pool.volumes.grant("w", "one", ["rw"]),
        TypeError,
        "rights .* not list",
    ),
    "revoke of a number": (lambda pool: pool.volumes.revoke("w", 3), TypeError, "client .* not int"),
    "restore of text": (lambda pool: pool.volumes.restore("w", "7"), TypeError, "inode .* not str"),
    "restore to a number": (lambda pool: pool.volumes.restore("w", 7, 3), TypeError, "int"),
    "removing of text": (lambda pool: pool.volumes.removing("x"), TypeError, "inode .* not str"),
    "pread of text": (with_file(lambda file: file.pread("x", 0)), TypeError, "length .* not str"),
    "pread of None": (with_file(lambda file: file.pread(None, 0)), TypeError, "length .* not NoneType"),
    "pread at text": (with_file(lambda file: file.pread(3, "x")), TypeError, "offset .* not str"),
    "pread at a float": (with_file(lambda file: file.pread(3, 1.0)), TypeError, "offset .* not float"),
    "pwrite at text": (with_file(lambda file: file.pwrite(b"s", "x")), TypeError, "offset .* not str"),
    "pwrite of text": (
        with_file(lambda file: file.pwrite("s", 0)),
        TypeError,
        "bytes .* not str; encode it first",
    ),
    "punch at text": (with_file(lambda file: file.punch("x", 1)), TypeError, "offset .* not str"),
    "punch of None": (with_file(lambda file: file.punch(0, None)), TypeError, "length .* not NoneType"),
    "seek to text": (with_file(lambda file: file.seek("x")), TypeError, "offset .* not str"),
    "seek to None": (with_file(lambda file: file.seek(None)), TypeError, "offset .* not NoneType"),
    "seek from text": (with_file(lambda file: file.seek(0, "x")), TypeError, "whence .* not str"),
    "seek to no hole": (with_file(lambda file: file.seek("x", os.SEEK_HOLE)), TypeError, "offset .* not str"),
    "close in text": (lambda pool: pool.close("x"), TypeError, "timeout_s .* not str"),
    "connect with a name": (lambda pool: nvpool.connect("/tmp", name=3), TypeError, "name .* not int"),
    "connect with options": (
        lambda pool: nvpool.connect("/tmp", options={}),
        TypeError,
        "options .* not dict",
    ),
}


@pytest.mark.parametrize("name", WRONG_VALUES)
def test_wrong_value_is_named_and_changes_nothing(pool, name):
    call, error, said = WRONG_VALUES[name]
    before = pool.stat(pool.file)
    with pytest.raises(error, match=said):
        call(pool)
    assert pool.stat(pool.file) == before and pool.read_bytes(pool.file) == OLD
    assert pool.list(pool.top) == ["file"] and "w" not in [volume.name for volume in pool.volumes.list()]


WRONG_ASYNC_VALUES = {
    "read of text": lambda pool, file: file.read(0, "x"),
    "write at text": lambda pool, file: file.write("x", b""),
    "write of text": lambda pool, file: file.write(0, "x"),
    "punch at text": lambda pool, file: file.punch("x", 1),
    "open with text": lambda pool, file: pool.open("/async-new", "wb", "644"),
    "close in text": lambda pool, file: pool.close("x"),
}


@pytest.mark.parametrize("name", WRONG_ASYNC_VALUES)
def test_wrong_value_is_named_by_async_calls(served, name):
    async def main():
        async with (
            await nvpool.connect_async(served.pool.pool_map) as pool,
            await pool.open("/async-values", "w+b") as file,
        ):
            with pytest.raises(TypeError, match=r"has to be .* not str"):
                await WRONG_ASYNC_VALUES[name](pool, file)
            assert file.size == 0 and not await pool.exists("/async-new")

    asyncio.run(asyncio.wait_for(main(), 60))


def test_valid_values_are_accepted_as_by_os(pool):
    pool.chmod(pool.file, os.stat(__file__).st_mode & ~0o777 | 0o640)
    pool.utime(pool.file, (1, 2))
    pool.chown(pool.file, -1, -1)
    found = pool.stat(pool.file)
    assert found.st_mode == 0o100640 and (found.st_atime_ns, found.st_mtime_ns) == (1, 2)
    assert found.st_uid == os.getuid()
    for value in (b"abcd", bytearray(b"abcd"), memoryview(b"abcd"), array.array("H", [0x6261, 0x6463])):
        pool.setxattr(pool.file, "user.x", value)
        assert pool.getxattr(pool.file, "user.x") == b"abcd"


def test_path_that_is_no_valid_name_does_not_exist(pool):
    pool.symlink("loop", f"{pool.top}/loop")
    for path in ("/" + "x" * 300, "/a\0", f"{pool.top}/loop", "/\ud800", f"{pool.file}/x"):
        assert not pool.exists(path) and not pool.is_dir(path) and not pool.is_file(path)
    assert pool.exists(pool.file) and pool.is_file(pool.file) and pool.is_dir(pool.top)
    with pytest.raises(TypeError):
        pool.exists(None)


# -- read_many ---------------------------------------------------------------------------------------------------------

WRONG_READS = {
    "one path": ("/file", TypeError, r"read_many\(\['/file'\]\)"),
    "one path as bytes": (b"/file", TypeError, "not one path"),
    "one pathlib path": (pathlib.PurePosixPath("/file"), TypeError, "not one path"),
    "a number": (7, TypeError, "an iterable of reads, not int"),
    "a pair": ([("/file", 0, 1), ("/file", 0)], TypeError, "read 1: .* not tuple of 2"),
    "no path": (["/file", None], TypeError, "read 1: .* not NoneType"),
    "no path in a tuple": ([(None, 0, 1)], TypeError, "read 0: .* not NoneType"),
    "a text as offset": ([("/file", "0", 1)], TypeError, "read 0: the offset .* not str"),
    "no offset": ([("/file", None, 1)], TypeError, "read 0: the offset .* not NoneType"),
    "a float as length": ([("/file", 0, 1), ("/file", 0, 1.5)], TypeError, "read 1: the length .* not float"),
    "an offset below 0": ([("/file", -1, 1)], ValueError, "read 0: the offset .* not -1"),
    "a length below 0": ([("/file", 0, 4), ("/file", 0, -1)], ValueError, "read 1: the length .* not -1"),
    "an offset beyond all files": ([("/file", 1 << 63, 1)], ValueError, "read 0: .* beyond the largest file"),
    "a null character": (["/fi\0le"], ValueError, "null character"),
}


@pytest.mark.parametrize("name", WRONG_READS)
def test_wrong_read_is_named_by_its_index(pool, name):
    reads, error, text = WRONG_READS[name]
    for into in (None, bytearray(100)):
        with pytest.raises(error, match=text):
            pool.read_many(reads, into)
    async_pool = pool.runtime().pool
    with pytest.raises(error, match=text):
        pool.runtime().call(async_pool.read_many(reads))


@pytest.mark.parametrize(
    "into, error, text",
    [
        (b"read-only", TypeError, "read-only"),
        (bytearray(3), ValueError, "has 3 bytes, and the 2 reads need 42"),
        ("text", TypeError, "writable buffer, not str"),
        (memoryview(bytearray(100))[::2], TypeError, "contiguous"),
    ],
)
def test_wrong_buffer_is_refused(pool, into, error, text):
    with pytest.raises(error, match=text):
        pool.read_many([pool.file, pool.file], into)
    with pytest.raises(ValueError, match="no buffer holds"):
        pool.read_many([(pool.file, 0, 1 << 62)] * 4)
    with pytest.raises(MemoryError, match="bytes of memory together"):
        pool.read_many([(pool.file, 0, 1 << 62)])
    with pytest.raises(ValueError, match="'raise' or 'return'"):
        pool.read_many([pool.file], on_error="ignore")


def test_read_many_takes_paths_files_and_ranges_together(pool):
    path = pathlib.PurePosixPath(pool.file)
    with (
        pool.open(pool.file, "rb") as buffered,
        pool.open(pool.file) as text,
        pool.open(pool.file, "rb", 0) as raw,
    ):
        given = [
            pool.file,
            (pool.file, 5, 3),
            [pool.file.encode(), 0, 4],
            path,
            (path, 5, None),
            buffered,
            (text, 0, 2),
            raw,
            (raw, 17, 100),
            (pool.file, 100, 5),
            (pool.file, 100, None),
        ]
        wanted = [OLD, OLD[5:8], OLD[:4], OLD, OLD[5:], OLD, OLD[:2], OLD, OLD[17:], b"", b""]
        for reads in (given, tuple(given), (one for one in given), dict.fromkeys(range(0))):
            found = pool.read_many(reads)
            assert [bytes(one) for one in found] == (wanted if found else [])
        into = bytearray(1000)
        lengths = pool.read_many(iter(given), into)
        assert lengths == [len(one) for one in wanted]
        asked, place = [21, 3, 4, 21, 16, 21, 2, 21, 100, 5, 0], 0
        for span, one in zip(asked, wanted, strict=True):
            assert into[place : place + len(one)] == one
            place += span
    assert pool.read_many([]) == [] and pool.read_many([], bytearray()) == []


def test_whole_files_are_read_into_a_buffer(pool):
    contents = [os.urandom(size) for size in (0, 1, 70_000, 5)]
    paths = [f"{pool.top}/whole{number}" for number in range(len(contents))]
    for path, content in zip(paths, contents, strict=True):
        pool.write_bytes(path, content)
    into = bytearray(70_006)
    assert pool.read_many(paths, into) == [0, 1, 70_000, 5] and into == b"".join(contents)
    with pytest.raises(ValueError, match="has 70005 bytes, and the 4 reads need 70006"):
        pool.read_many(paths, bytearray(70_005))


def test_failed_reads_are_returned_on_request(pool):
    reads = [
        pool.file,
        f"{pool.top}/none",
        (f"{pool.top}/none", 0, 7),
        (pool.file, 0, 3),
        f"{pool.file}/below",
        pool.top,
    ]
    found = pool.read_many(reads, on_error="return")
    assert bytes(found[0]) == OLD and bytes(found[3]) == OLD[:3]
    kinds = [FileNotFoundError, FileNotFoundError, NotADirectoryError, IsADirectoryError]
    names = [f"{pool.top}/none", f"{pool.top}/none", f"{pool.file}/below", pool.top]
    failed = [found[number] for number in (1, 2, 4, 5)]
    assert [type(one) for one in failed] == kinds and [one.filename for one in failed] == names
    into = bytearray(100)
    lengths = pool.read_many(reads, into, on_error="return")
    assert lengths[0] == len(OLD) and lengths[3] == 3
    assert into[:31] == OLD + bytes(7) + OLD[:3], "a failed read keeps its part of the buffer"
    with pytest.raises(FileNotFoundError) as raised:
        pool.read_many(reads)
    assert (
        raised.value.filename == f"{pool.top}/none" and raised.value.strerror == "No such file or directory"
    )


def test_one_bad_file_is_named_and_leaves_the_others(pool):
    """A file that the stores cannot read, among others in one message."""
    paths = [f"{pool.top}/f{number}" for number in range(4)]
    for path in paths:
        pool.write_bytes(path, OLD)
    vfs, bad = pool.runtime().pool.vfs, pool.stat(paths[2]).st_ino
    plain = vfs.read_many

    async def read_many(reads, into):
        if any(handle.inode == bad for handle, _, _ in reads):
            raise ChecksumMismatch("block 0 is not as it was written")
        return await plain(reads, into)

    vfs.read_many = read_many
    with pytest.raises(OSError, match="not as it was written") as raised:
        pool.read_many([(path, 0, 4) for path in paths])
    assert raised.value.filename == paths[2] and isinstance(raised.value.__cause__, ChecksumMismatch)
    found = pool.read_many([(path, 0, 4) for path in paths], on_error="return")
    assert [bytes(one) for one in (found[0], found[1], found[3])] == [OLD[:4]] * 3
    assert isinstance(found[2], OSError) and found[2].filename == paths[2]


def test_file_of_another_connection_is_refused(pool, served):
    with nvpool.connect(served.pool.pool_map) as other, other.open(pool.file, "rb") as file:
        with pytest.raises(ValueError, match="read 1: .* another connection"):
            pool.read_many([pool.file, (file, 0, 1)])
    with pool.open(pool.file, "rb", 0) as file:
        pass
    with pytest.raises(ValueError, match="read 0: .*closed"):
        pool.read_many([file])
    with (
        pool.open(f"{pool.top}/new", "wb") as file,
        pytest.raises(ValueError, match="read 0: .* not open for reading"),
    ):
        pool.read_many([file])


# -- errors ------------------------------------------------------------------------------------------------------------

FAILING = {
    "open": lambda pool, path: pool.open(path),
    "open to write below nothing": lambda pool, path: pool.open(path + "/x", "w"),
    "read_bytes": lambda pool, path: pool.read_bytes(path),
    "stat": lambda pool, path: pool.stat(path),
    "list": lambda pool, path: pool.list(path),
    "scan": lambda pool, path: list(pool.scan(path)),
    "walk": lambda pool, path: list(pool.walk(path)),
    "remove": lambda pool, path: pool.remove(path),
    "rmdir": lambda pool, path: pool.rmdir(path),
    "remove_tree": lambda pool, path: pool.remove_tree(path),
    "rename": lambda pool, path: pool.rename(path, "/other"),
    "link": lambda pool, path: pool.link(path, "/other"),
    "copy": lambda pool, path: pool.copy(path, "/other"),
    "readlink": lambda pool, path: pool.readlink(path),
    "chmod": lambda pool, path: pool.chmod(path, 0o600),
    "chown": lambda pool, path: pool.chown(path, 1),
    "utime": lambda pool, path: pool.utime(path),
    "truncate": lambda pool, path: pool.truncate(path, 0),
    "getxattr": lambda pool, path: pool.getxattr(path, "user.x"),
    "layout": lambda pool, path: pool.layout(path),
    "setxattr": lambda pool, path: pool.setxattr(path, "user.x", b""),
    "statfs": lambda pool, path: pool.statfs(path),
    "listxattr": lambda pool, path: pool.listxattr(path),
    "set_layout": lambda pool, path: pool.set_layout(path, replicas=1),
    "mkdir": lambda pool, path: pool.mkdir(path + "/below"),
    "symlink": lambda pool, path: pool.symlink("x", path + "/below"),
    "read_many": lambda pool, path: pool.read_many([path]),
    "read_many a part": lambda pool, path: pool.read_many([(path, 0, 1)]),
}


@pytest.mark.parametrize("name", FAILING)
@pytest.mark.parametrize(
    "start, error", [("nope", FileNotFoundError), ("file/nope", NotADirectoryError), ("", FileNotFoundError)]
)
def test_error_names_the_path_of_the_caller(pool, name, start, error):
    path = f"{pool.top}/{start}" if start else ""
    if not path and name in ("mkdir", "symlink", "open to write below nothing"):
        path = f"{pool.top}/absent"
    with pytest.raises(error) as raised:
        FAILING[name](pool, path)
    assert raised.value.filename.startswith(path), raised.value.filename
    assert raised.value.strerror == os.strerror(raised.value.errno)
    assert "inode" not in str(raised.value) and "directory 1" not in str(raised.value)


@pytest.mark.parametrize(
    "call, number",
    [
        (lambda pool: pool.remove("/"), errno.EISDIR),
        (lambda pool: pool.rmdir("/"), errno.EBUSY),
        (lambda pool: pool.rename("/", "/x"), errno.EBUSY),
        (lambda pool: pool.rename(pool.file, "/"), errno.EBUSY),
        (lambda pool: pool.rmdir(f"{pool.top}/.."), errno.EBUSY),
        (lambda pool: pool.link(pool.file, "/"), errno.EEXIST),
        (lambda pool: pool.link(pool.file, pool.file), errno.EEXIST),
        (lambda pool: pool.symlink("x", "/"), errno.EEXIST),
        (lambda pool: pool.readlink(pool.file), errno.EINVAL),
        (lambda pool: pool.open("/", "wb"), errno.EISDIR),
    ],
)
def test_root_is_neither_removed_nor_replaced(pool, call, number):
    with pytest.raises(OSError) as raised:
        call(pool)
    assert raised.value.errno == number and "inode" not in str(raised.value)
    assert pool.read_bytes(pool.file) == OLD


def test_error_of_two_paths_names_both(pool):
    with pytest.raises(FileNotFoundError) as raised:
        pool.rename(pool.file, f"{pool.top}/none/x")
    assert (raised.value.filename, raised.value.filename2) == (pool.file, f"{pool.top}/none/x")


def test_error_with_details_keeps_its_text(pool):
    pool.volumes.create("small", bytes_max=4096)
    with pytest.raises(OSError, match="quota") as raised:
        pool.write_bytes("/volumes/small/file", bytes(1 << 20))
    assert raised.value.errno == errno.EDQUOT and isinstance(raised.value.__cause__, QuotaExceeded)
    with pytest.raises(
        FileExistsError, match="size 4 KiB, not 8 KiB.* nvpool volume resize POOL small --size 8KiB "
    ):
        pool.volumes.create("small", bytes_max=8192)
    with pytest.raises(FileNotFoundError, match="there is no volume nope"):
        pool.volumes.show("nope")


# -- connect -----------------------------------------------------------------------------------------------------------


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


def test_refused_connection_is_a_connection_error():
    where = f"127.0.0.1:{free_port()}"
    with pytest.raises(ConnectionRefusedError, match="port right") as raised:
        nvpool.connect(where)
    assert raised.value.filename == where
    with pytest.raises(ConnectionRefusedError):
        asyncio.run(nvpool.connect_async(where))


@pytest.mark.parametrize(
    "where, error, text",
    [
        ("", FileNotFoundError, "names no pool"),
        ("/no/such/place", FileNotFoundError, "does not exist"),
        ("nowhere", FileNotFoundError, "does not exist"),
        ("/etc/hostname", NotADirectoryError, "not a directory"),
        ("/usr", FileNotFoundError, "no pool is mounted there"),
        ("host:port", OSError, "from 1 to 65535"),
        ("host:99999", OSError, "from 1 to 65535"),
        (None, TypeError, "not NoneType"),
        (17512, TypeError, "not int"),
    ],
)
def test_connect_error_names_the_reason(where, error, text):
    with pytest.raises(error, match=text) as raised:
        nvpool.connect(where)
    assert "poolmap.json" not in str(raised.value)
    with pytest.raises(error, match=text):
        asyncio.run(AsyncFileSystem.connect(where))
