"""One pool, two mounts, one set of names: an open uses the present name, and a removed one is missing, not stale."""

import contextlib
import ctypes
import os
import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.fuse.conftest import wait_until

pytestmark = pytest.mark.mount

RENAME_EXCHANGE = 2


@pytest.fixture
def there(here, second, mounted):
    """The same directory through the other mount."""
    place = second.place / here.relative_to(mounted.place)
    wait_until(place.exists, "the directory at the other mount")
    return place


def renameat2(source, target, flags):
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.renameat2(-100, os.fsencode(source), -100, os.fsencode(target), flags):
        raise OSError(ctypes.get_errno(), "renameat2")


def replace_by_rename(name, new):
    os.rename(new, name)


def replace_by_exchange(name, new):
    renameat2(new, name, RENAME_EXCHANGE)


def replace_by_link(name, new):
    os.unlink(name)
    os.link(new, name)


@pytest.mark.parametrize("replace", [replace_by_rename, replace_by_exchange, replace_by_link])
@pytest.mark.parametrize("known_by", ["link", "rename", "open", "listing"])
def test_replaced_linked_name_opens_the_new_file(here, there, replace, known_by):
    """The old file has another name, so only the name shows that it is the wrong one."""
    for number in range(6):
        name, kept = f"name{number}", f"kept{number}"
        (here / kept).write_bytes(b"first")
        (here / f"new{number}").write_bytes(b"second")
        os.rename(
            there / f"new{number}", there / kept
        )  # both mounts know it, and no lease is granted for some seconds
        assert (here / kept).read_bytes() == b"second"
        (here / f"new{number}").write_bytes(b"third")
        if known_by == "rename":
            os.link(here / kept, here / "before")
            assert (here / "before").read_bytes() == b"second"
            os.rename(here / "before", here / name)
        else:
            os.link(here / kept, here / name)
        if known_by == "open":
            assert (here / name).read_bytes() == b"second"
        if known_by == "listing":
            assert {entry.name for entry in os.scandir(here) if entry.stat().st_nlink == 2} == {name, kept}
        replace(there / name, there / f"new{number}")
        assert (here / name).read_bytes() == b"third" and (here / kept).read_bytes() == b"second"
        for left in here.iterdir():
            left.unlink()


def test_replaced_name_of_a_leased_file_opens_the_new_file(here, there):
    for number in range(20):
        (here / "one").write_bytes(b"old")
        os.link(here / "one", here / "other")
        assert (here / "other").read_bytes() == b"old"
        os.rename(here / "other", here / "moved")  # the kernel caches the name that it got under another one
        (there / "new").write_bytes(b"%d" % number)
        os.rename(there / "new", there / "moved")
        assert (here / "moved").read_bytes() == b"%d" % number
        for left in here.iterdir():
            left.unlink()


def test_replaced_symlink_and_directory_lead_to_the_new_ones(here, there):
    for _ in range(10):
        (here / "a").mkdir()
        (here / "b").mkdir()
        (here / "a" / "f").write_bytes(b"a")
        (here / "b" / "f").write_bytes(b"b")
        os.symlink("a", here / "link")
        assert (here / "link" / "f").read_bytes() == b"a"
        os.symlink("b", there / "new")
        os.rename(there / "new", there / "link")
        assert (here / "link" / "f").read_bytes() == b"b"
        renameat2(there / "a", there / "b", RENAME_EXCHANGE)
        assert (here / "a" / "f").read_bytes() == b"b" and (here / "link" / "f").read_bytes() == b"a"
        shutil.rmtree(here / "a")
        shutil.rmtree(here / "b")
        os.unlink(here / "link")


def test_two_nodes_remove_one_tree(here, there):
    for _ in range(3):
        for directory in range(8):
            (here / "tree" / str(directory % 3) / str(directory)).mkdir(parents=True)
            for name in range(8):
                (here / "tree" / str(directory % 3) / str(directory) / str(name)).touch()
        running = [
            subprocess.Popen(["rm", "-rf", place / "tree"], stderr=subprocess.PIPE, text=True)
            for place in (here, there)
        ]
        assert [(process.communicate()[1], process.returncode) for process in running] == [("", 0)] * 2
        assert not (here / "tree").exists() and not (there / "tree").exists()


def changes_in(gone, here):
    """Operations on a directory by its descriptor."""
    return (
        lambda: os.open("x", os.O_CREAT | os.O_WRONLY, dir_fd=gone),
        lambda: os.mkdir("x", dir_fd=gone),
        lambda: os.symlink("x", "y", dir_fd=gone),
        lambda: os.mknod("x", dir_fd=gone),
        lambda: os.link(here / "f", "x", dst_dir_fd=gone),
        lambda: os.unlink("x", dir_fd=gone),
        lambda: os.rename(here / "f", "x", dst_dir_fd=gone),
        lambda: os.rmdir("x", dir_fd=gone),
        lambda: os.rename("x", here / "y", src_dir_fd=gone),
        lambda: os.stat("sub", dir_fd=gone),
        lambda: os.open("sub", os.O_RDONLY, dir_fd=gone),
    )


def test_removed_directory_has_no_names(here, there):
    (here / "d" / "sub").mkdir(parents=True)
    (here / "f").touch()
    fd = os.open(here / "d", os.O_RDONLY | os.O_DIRECTORY)
    sub = os.open(here / "d" / "sub", os.O_RDONLY | os.O_DIRECTORY)
    try:
        assert os.listdir(fd) == ["sub"]
        (there / "d" / "sub").rmdir()
        (there / "d").rmdir()
        for gone in (fd, sub):
            for change in changes_in(gone, here):
                with pytest.raises(FileNotFoundError):
                    change()
            assert os.fstat(gone).st_nlink == 0
            try:
                assert os.listdir(gone) == []
            except FileNotFoundError:
                pass  # as on a local file system
        assert (here / "f").exists() and not (here / "d").exists()
    finally:
        os.close(fd)
        os.close(sub)


def test_mount_inside_stays_while_names_change(here, there):
    (here / "below" / "point").mkdir(parents=True)
    (here / "work").mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "nvpool-test", here / "below" / "point"], check=True)
    try:
        (here / "below" / "point" / "f").write_bytes(b"mounted")

        def change(place):
            for _ in range(60):
                with contextlib.suppress(FileNotFoundError):
                    (place / "work" / "x").touch()
                with contextlib.suppress(FileNotFoundError):
                    os.rename(place / "work" / "x", place / "work" / "y")

        with ThreadPoolExecutor(2) as pool:
            list(pool.map(change, (here, there)))
        assert (here / "below" / "point" / "f").read_bytes() == b"mounted"
    finally:
        subprocess.run(["umount", here / "below" / "point"], check=True)
