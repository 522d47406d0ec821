"""Import and export: trees are equal, interrupted runs continue, and wrong bytes are detected."""

import asyncio
import os
import stat
import threading
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest

from nvpool.core.errors import AlreadyExists, ChecksumMismatch, NotFound, Unreachable, from_os_error
from nvpool.core.units import clamp_time_ns
from nvpool.sdk.transfer import import_tree as tree_import
from nvpool.sdk.transfer.export_tree import export_tree
from nvpool.sdk.transfer.import_tree import import_tree
from nvpool.sdk.transfer.progress import TransferOptions, TransferProgress

MIB = 1 << 20


class DirectoryVfs:
    """The part of client/vfs that transfers use, over a plain directory: inode numbers stand for paths."""

    def __init__(self, root):
        self.paths = {1: os.fsencode(root)}
        self.numbers = {}
        self.writes = 0
        self.fail_after = None
        self.flip_at_write = None

    def attr(self, path):
        found = os.lstat(path)
        number = (
            1
            if path == self.paths[1]
            else self.numbers.setdefault((found.st_dev, found.st_ino), len(self.numbers) + 2)
        )
        self.paths[number] = path
        return SimpleNamespace(
            inode=number,
            mode=found.st_mode,
            links=found.st_nlink,
            uid=found.st_uid,
            gid=found.st_gid,
            size=found.st_size,
            atime_ns=found.st_atime_ns,
            mtime_ns=found.st_mtime_ns,
            rdev=found.st_rdev,
            flags=1,
        )

    def at(self, parent, name):
        return os.path.join(self.paths[parent], name)

    async def lookup(self, parent, name):
        await asyncio.sleep(0)
        try:
            return self.attr(self.at(parent, name))
        except OSError as error:
            raise from_os_error(error, "lookup") from None

    async def getattr(self, inode):
        return self.attr(self.paths[inode])

    async def mkdir(self, parent, name, mode, caller):
        try:
            os.mkdir(self.at(parent, name), mode)
        except FileExistsError:
            raise AlreadyExists() from None
        return self.attr(self.at(parent, name))

    async def mknod(self, parent, name, mode, rdev, caller):
        os.mknod(self.at(parent, name), mode, rdev)
        return self.attr(self.at(parent, name))

    async def symlink(self, parent, name, target, caller):
        os.symlink(target, self.at(parent, name))
        return self.attr(self.at(parent, name))

    async def readlink(self, inode):
        return os.readlink(self.paths[inode])

    async def link(self, inode, parent, name, caller):
        os.link(self.paths[inode], self.at(parent, name), follow_symlinks=False)

    async def unlink(self, parent, name, caller):
        os.unlink(self.at(parent, name))

    async def create(self, parent, name, mode, flags, caller):
        handle = os.open(self.at(parent, name), flags | os.O_CREAT, mode)
        return self.attr(self.at(parent, name)), handle

    async def open(self, inode, flags, caller):
        return os.open(self.paths[inode], flags)

    async def read(self, handle, offset, size):
        await asyncio.sleep(0)
        return memoryview(os.pread(handle, size, offset))

    async def write(self, handle, offset, buffer):
        self.writes += 1
        if self.fail_after is not None and self.writes > self.fail_after:
            raise Unreachable("the pool is away")
        if self.writes == self.flip_at_write:
            buffer = bytes([buffer[0] ^ 1]) + bytes(buffer[1:])
        return os.pwrite(handle, buffer, offset)

    async def setattr(
        self,
        inode,
        *,
        mode=None,
        uid=None,
        gid=None,
        size=None,
        atime_ns=None,
        mtime_ns=None,
        caller,
        handle=None,
    ):
        path = self.paths[inode]
        if size is not None:
            os.truncate(path, size)
        if uid is not None:
            os.lchown(path, uid, gid)
        if mode is not None:
            os.chmod(path, mode)
        if mtime_ns is not None:
            os.utime(path, ns=(clamp_time_ns(atime_ns), clamp_time_ns(mtime_ns)), follow_symlinks=False)

    async def flush(self, handle):
        pass

    async def fsync(self, handle, datasync):
        pass

    async def fsyncdir(self, inode):
        pass

    async def release(self, handle):
        os.close(handle)

    async def opendir(self, inode):
        return self.paths[inode]

    async def readdir(self, handle, cursor, limit):
        names = sorted(os.listdir(handle))[cursor : cursor + 2]
        entries = []
        for at, name in enumerate(names):
            attr = self.attr(os.path.join(handle, name))
            entries.append(SimpleNamespace(name=name, cursor=cursor + at + 1, inode=attr.inode, attr=attr))
        return entries, len(names) == 2

    async def releasedir(self, handle):
        pass

    async def setxattr(self, inode, name, value, flags, caller):
        os.setxattr(self.paths[inode], name, value)

    async def getxattr(self, inode, name):
        return os.getxattr(self.paths[inode], name)

    async def listxattr(self, inode):
        return [os.fsencode(name) for name in os.listxattr(self.paths[inode])]


@pytest.fixture
def source(tmp_path):
    root = tmp_path / "source"
    (root / "deep" / "deeper").mkdir(parents=True)
    (root / "empty").mkdir(mode=0o555)
    (root / "small").write_bytes(b"hello")
    (root / "none").write_bytes(b"")
    (root / "large").write_bytes(os.urandom(3 * MIB + 777))
    with open(root / "sparse", "wb") as file:
        file.write(b"begin")
        file.seek(5 * MIB)
        file.write(b"middle")
        file.truncate(9 * MIB)
    (root / "deep" / "again").hardlink_to(root / "small")
    (root / "deep" / "deeper" / "link").symlink_to("../../nowhere")
    os.mkfifo(root / "fifo", 0o640)
    os.mkdir(os.fsencode(root) + b"/odd \xff\n")
    (root / "program").write_bytes(b"#!")
    (root / "program").chmod(0o4755)
    os.setxattr(root / "small", "user.colour", b"red")
    os.setxattr(root / "deep", "user.colour", b"blue")
    for at, path in enumerate(sorted(root.rglob("*"), reverse=True)):
        os.utime(path, ns=(10**18 + at, 15 * 10**17 + 7 * at), follow_symlinks=False)
    return root


def picture(root):
    """All attributes and contents that must be equal in two trees."""
    root, found, firsts = os.fsencode(root), {}, {}
    for folder, folders, files in os.walk(root):
        for name in [*folders, *files, b"."]:
            path = os.path.join(folder, name)
            state = os.lstat(path)
            content = None
            if stat.S_ISREG(state.st_mode):
                with open(path, "rb") as file:
                    content = file.read()
            elif stat.S_ISLNK(state.st_mode):
                content = os.readlink(path)
            xattrs = {
                x: os.getxattr(path, x, follow_symlinks=False)
                for x in os.listxattr(path, follow_symlinks=False)
            }
            where = os.path.relpath(path, root)
            same = firsts.setdefault(state.st_ino, where) if not stat.S_ISDIR(state.st_mode) else None
            found[where] = (state.st_mode, state.st_uid, state.st_mtime_ns, content, xattrs, same)
    return found


def bring_in(root, source, destination=b"/a/b", **more):
    vfs, counts = more.pop("vfs", None) or DirectoryVfs(root), TransferProgress()
    asyncio.run(
        import_tree(vfs, source, destination, progress=counts, options=TransferOptions(parallel=4, **more))
    )
    return counts


def take_out(root, destination, source=b"/a/b"):
    counts = TransferProgress()
    asyncio.run(
        export_tree(
            DirectoryVfs(root), source, destination, progress=counts, options=TransferOptions(parallel=4)
        )
    )
    return counts


def test_import_and_export_give_the_same_tree(source, tmp_path):
    (tmp_path / "root").mkdir()
    counts = bring_in(tmp_path / "root", source)
    assert not counts.failures and picture(tmp_path / "root/a/b") == picture(source)
    assert (counts.files, counts.symlinks, counts.hard_links, counts.special) == (6, 1, 1, 1)
    assert (
        counts.bytes == counts.bytes_total == sum(p.lstat().st_size for p in source.rglob("*") if p.is_file())
    )
    assert counts.counted and counts.files_total == counts.files and counts.directories == 5
    counts = take_out(tmp_path / "root", tmp_path / "out")
    assert not counts.failures and picture(tmp_path / "out") == picture(source)
    assert counts.bytes == counts.bytes_total and counts.files == counts.files_total


def test_excluded_files_are_skipped_both_ways(source, tmp_path):
    (tmp_path / "root").mkdir()
    counts = bring_in(tmp_path / "root", source, exclude=("deep*", "*arge"))
    assert not (tmp_path / "root/a/b/deep").exists() and not (tmp_path / "root/a/b/large").exists()
    assert counts.bytes == counts.bytes_total and counts.files == counts.files_total == 4


def test_holes_are_kept_both_ways(source, tmp_path):
    (tmp_path / "root").mkdir()
    bring_in(tmp_path / "root", source)
    take_out(tmp_path / "root", tmp_path / "out")
    for tree in (tmp_path / "root/a/b", tmp_path / "out"):
        assert (tree / "sparse").stat().st_blocks * 512 < MIB


def test_second_run_copies_no_file(source, tmp_path):
    (tmp_path / "root").mkdir()
    bring_in(tmp_path / "root", source)
    vfs = DirectoryVfs(tmp_path / "root")
    counts = bring_in(None, source, vfs=vfs)
    assert vfs.writes == 0 and counts.skipped_files >= 5 and counts.bytes == counts.bytes_total
    before = picture(tmp_path / "root")
    take_out(tmp_path / "root", tmp_path / "out")
    counts = take_out(tmp_path / "root", tmp_path / "out")
    assert counts.skipped_files >= 5 and not counts.failures and picture(tmp_path / "root") == before


def test_import_skips_a_file_whose_time_was_clamped(tmp_path):
    (tmp_path / "source").write_bytes(b"bytes")
    os.utime(tmp_path / "source", ns=(10_413_792_000 * 10**9,) * 2)
    if os.stat(tmp_path / "source").st_mtime_ns != 10_413_792_000 * 10**9:
        pytest.skip("this file system does not keep the year 2300")
    (tmp_path / "root").mkdir()
    vfs = DirectoryVfs(tmp_path / "root")
    bring_in(None, tmp_path / "source", b"/there", vfs=vfs)
    assert bring_in(None, tmp_path / "source", b"/there", vfs=vfs).skipped_files == 1


@pytest.mark.parametrize("writes", [0, 1, 2, 3, 5])
def test_interrupted_import_continues_with_the_same_result(source, tmp_path, writes):
    (tmp_path / "root").mkdir()
    vfs = DirectoryVfs(tmp_path / "root")
    vfs.fail_after = writes
    with pytest.raises(Unreachable):
        bring_in(None, source, vfs=vfs)
    assert not bring_in(tmp_path / "root", source).failures
    assert picture(tmp_path / "root/a/b") == picture(source)


def test_resumed_import_writes_only_different_bytes(tmp_path):
    (tmp_path / "root").mkdir()
    content = os.urandom(4 * MIB)
    (tmp_path / "file").write_bytes(content)
    (tmp_path / "root" / "file").write_bytes(
        content[:MIB] + b"X" * MIB + content[2 * MIB : 3 * MIB] + b"tail"
    )
    vfs = DirectoryVfs(tmp_path / "root")
    bring_in(None, tmp_path / "file", b"/", vfs=vfs)
    assert vfs.writes == 2 and (tmp_path / "root" / "file").read_bytes() == content


def test_unchanged_file_is_compared_only_on_request(tmp_path):
    (tmp_path / "root").mkdir()
    content = os.urandom(3 * MIB)
    there = tmp_path / "root" / "file"
    (tmp_path / "file").write_bytes(content)
    there.write_bytes(content[:MIB] + bytes(MIB) + content[2 * MIB :])
    found = os.stat(tmp_path / "file")
    os.utime(there, ns=(found.st_atime_ns, found.st_mtime_ns))
    assert bring_in(tmp_path / "root", tmp_path / "file", b"/").skipped_files == 1
    assert there.read_bytes() != content
    vfs = DirectoryVfs(tmp_path / "root")
    assert bring_in(None, tmp_path / "file", b"/", vfs=vfs, compare=True).skipped_files == 0
    assert vfs.writes == 1 and there.read_bytes() == content


def test_holes_of_the_source_replace_old_bytes(source, tmp_path):
    (tmp_path / "root/a/b").mkdir(parents=True)
    (tmp_path / "root/a/b/sparse").write_bytes(b"\xff" * 12 * MIB)
    bring_in(tmp_path / "root", source)
    assert (tmp_path / "root/a/b/sparse").read_bytes() == (source / "sparse").read_bytes()


def test_wrong_byte_fails_only_its_file(source, tmp_path):
    (tmp_path / "root").mkdir()
    vfs = DirectoryVfs(tmp_path / "root")
    vfs.flip_at_write = 2
    counts = bring_in(None, source, vfs=vfs)
    wrong, *its_other_names = counts.failures  # the directory order decides which file is written second
    assert counts.failed == len(counts.failures) and "as they were written" in wrong.text
    assert all("another name of" in failure.text for failure in its_other_names)
    assert not bring_in(tmp_path / "root", source).failures
    assert picture(tmp_path / "root/a/b") == picture(source)


def test_existing_entry_of_another_kind_is_refused_and_kept(source, tmp_path):
    (tmp_path / "root/a/b/small").mkdir(parents=True)
    (tmp_path / "root/a/b/deep").write_bytes(b"mine")
    counts = bring_in(tmp_path / "root", source)
    assert {os.path.basename(failure.path) for failure in counts.failures} == {"small", "deep", "again"} - (
        {"again"} if not any(f.path.endswith("again") for f in counts.failures) else set()
    )
    assert (tmp_path / "root/a/b/deep").read_bytes() == b"mine"


def test_single_file_keeps_its_name_or_gets_a_new_one(tmp_path):
    (tmp_path / "root").mkdir()
    (tmp_path / "file").write_bytes(b"content")
    bring_in(tmp_path / "root", tmp_path / "file", b"/")
    bring_in(tmp_path / "root", tmp_path / "file", b"/x/other")
    take_out(tmp_path / "root", tmp_path / "back", b"/x/other")
    assert (tmp_path / "root/file").read_bytes() == (tmp_path / "root/x/other").read_bytes() == b"content"
    assert (tmp_path / "back").read_bytes() == b"content"


def test_missing_source_is_an_error(tmp_path):
    (tmp_path / "root").mkdir()
    with pytest.raises(NotFound):
        bring_in(tmp_path / "root", tmp_path / "nowhere")
    with pytest.raises(NotFound):
        take_out(tmp_path / "root", tmp_path / "out", b"/nowhere")


def test_link_at_the_destination_is_not_followed(source, tmp_path):
    (tmp_path / "root").mkdir()
    bring_in(tmp_path / "root", source)
    (tmp_path / "out").mkdir()
    (tmp_path / "victim").write_bytes(b"precious")
    (tmp_path / "out" / "large").symlink_to(tmp_path / "victim")
    (tmp_path / "out" / "deep").symlink_to(tmp_path)
    counts = take_out(tmp_path / "root", tmp_path / "out")
    assert (
        counts.failed == 2
        and (tmp_path / "victim").read_bytes() == b"precious"
        and not (tmp_path / "again").exists()
    )


def test_wrong_bytes_on_the_drive_are_detected_on_export(source, tmp_path, monkeypatch):
    (tmp_path / "root").mkdir()
    bring_in(tmp_path / "root", source)
    real = os.ftruncate

    def flips(descriptor, size):
        if size:
            os.pwrite(descriptor, bytes([os.pread(descriptor, 1, 0)[0] ^ 1]), 0)
        real(descriptor, size)

    monkeypatch.setattr(os, "ftruncate", flips)
    counts = take_out(tmp_path / "root", tmp_path / "out", b"/a/b/large")
    assert counts.failed == 1 and "on the drive" in counts.failures[0].text


def test_directory_is_not_closed_while_a_thread_reads_it(tmp_path):
    (tmp_path / "folder").mkdir()
    for number in range(50):
        (tmp_path / "folder" / str(number)).touch()
    entries = tree_import.DirectoryEntries(os.fsencode(tmp_path / "folder"))
    reading, go_on = threading.Event(), threading.Event()

    class Slow:
        """Entries that are read only when the test says so."""

        def __init__(self, entries):
            self.entries, self.closed = entries, False

        def __iter__(self):
            for entry in self.entries:
                reading.set()
                assert go_on.wait(10) and not self.closed
                yield entry

        def close(self):
            self.closed = True
            self.entries.close()

    slow = entries.entries = Slow(entries.entries)
    with ThreadPoolExecutor(2) as threads:
        read = threads.submit(entries.read)
        assert reading.wait(10)
        closed = threads.submit(entries.close)
        go_on.set()
        assert len(read.result(10)) == 50
        closed.result(10)
    assert slow.closed


@pytest.mark.parametrize("failing", ["open", "read"])
def test_export_of_an_unreadable_file_keeps_the_old_one(source, tmp_path, failing):
    vfs, out = DirectoryVfs(source), tmp_path / "out"
    out.mkdir()
    (out / "1").write_bytes(b"what was here before")

    async def fail(*arguments):
        raise ChecksumMismatch("block 0 is not as it was written")

    setattr(vfs, failing, fail)
    counts = TransferProgress()
    asyncio.run(export_tree(vfs, b"/", out, progress=counts))
    assert counts.failed and (out / "1").read_bytes() == b"what was here before"


def test_export_replaces_a_link_in_one_step(tmp_path, monkeypatch):
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "link").symlink_to("new")
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "link").symlink_to("old")
    with monkeypatch.context() as patch:
        patch.setattr(os, "symlink", lambda *_: (_ for _ in ()).throw(OSError(1, "no links here")))
        counts = TransferProgress()
        asyncio.run(export_tree(DirectoryVfs(tmp_path / "in"), b"/", tmp_path / "out", progress=counts))
        assert counts.failed == 1 and os.readlink(tmp_path / "out" / "link") == "old"
    asyncio.run(
        export_tree(DirectoryVfs(tmp_path / "in"), b"/", tmp_path / "out", progress=TransferProgress())
    )
    assert os.readlink(tmp_path / "out" / "link") == "new" and os.listdir(tmp_path / "out") == ["link"]
