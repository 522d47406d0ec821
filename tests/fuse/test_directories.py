"""Directories through the mount: odd names, thousands of entries, listings while they change."""

import os
import subprocess
import sys
import threading

import pytest

pytestmark = pytest.mark.mount
ENGINES = ("kernel", "pyfuse3")


def test_names_are_any_255_bytes(here):
    place = os.fsencode(here)
    names = [
        b"x" * 255,
        b"\xff" * 255,
        b"\x01\x02\x7f",
        b"new\nline",
        b" ",
        b"...",
        b"-rf",
        "日本語".encode(),
        b"\xc3",
    ]
    for name in names:
        with open(os.path.join(place, name), "wb") as file:
            file.write(name)
    assert sorted(os.listdir(place)) == sorted(names)
    for name in names:
        with open(os.path.join(place, name), "rb") as file:
            assert file.read() == name


def test_directory_lists_its_entries_and_the_two_dots(here):
    (here / "a").mkdir()
    said = subprocess.run(["ls", "-aif", here], check=True, capture_output=True, text=True).stdout.split()
    listed = dict(zip(said[1::2], map(int, said[::2]), strict=True))
    assert listed == {
        ".": os.stat(here).st_ino,
        "..": os.stat(here.parent).st_ino,
        "a": os.stat(here / "a").st_ino,
    }


def fill(place, count):
    for number in range(count):
        os.close(os.open(place / f"stays{number:06}", os.O_CREAT | os.O_WRONLY, 0o644))


def listed(place):
    with os.scandir(place) as entries:
        return [entry.name for entry in entries]


def test_listing_is_complete_under_concurrent_changes(here, count=3000):
    fill(here, count)
    stop = threading.Event()
    program = (
        "import os, sys\nn = 0\nwhile True:\n    p = f'{sys.argv[1]}/comes{n % 500}'\n"
        "    open(p, 'w').close()\n    os.unlink(p) if n % 3 else os.rename(p, p + 'r')\n    n += 1\n"
    )
    changing = subprocess.Popen([sys.executable, "-c", program, here])
    try:
        for _ in range(3):
            names = listed(here)
            assert len(names) == len(set(names)), "a name was listed twice"
            assert sum(name.startswith("stays") for name in names) == count
            assert changing.poll() is None
    finally:
        stop.set()
        changing.kill()
        changing.wait()


@pytest.mark.soak
def test_hundred_thousand_names_are_listed(here):
    test_listing_is_complete_under_concurrent_changes(here, 100_000)


def test_files_removed_during_a_listing_are_all_removed(here):
    fill(here, 700)
    with os.scandir(here) as entries:
        for entry in entries:
            os.unlink(entry.path)
    assert os.listdir(here) == []


def test_seekdir_continues_the_listing(here):
    """telldir and seekdir, also with another descriptor: a cursor does not belong to a descriptor."""
    import ctypes

    libc = ctypes.CDLL(None, use_errno=True)
    libc.opendir.restype = libc.readdir.restype = ctypes.c_void_p
    libc.telldir.restype = ctypes.c_long
    for function in (libc.readdir, libc.telldir, libc.closedir, libc.rewinddir):
        function.argtypes = [ctypes.c_void_p]
    libc.seekdir.argtypes = [ctypes.c_void_p, ctypes.c_long]
    fill(here, 300)

    def read(stream):
        entry = libc.readdir(stream)
        return ctypes.string_at(entry + 19) if entry else None

    first = libc.opendir(os.fsencode(here))
    names, places = [], []
    while (name := read(first)) is not None:
        names.append(name)
        places.append(libc.telldir(first))
    assert len(names) == len(set(names)) == 302
    second = libc.opendir(os.fsencode(here))
    for index in (0, 1, 2, 150, 250, 17):
        libc.seekdir(second, places[index])
        assert read(second) == names[index + 1]
    libc.rewinddir(second)
    assert read(second) == names[0]
    libc.closedir(first)
    libc.closedir(second)


def test_listing_has_types_and_attributes(here):
    (here / "d").mkdir()
    (here / "f").write_bytes(b"123")
    (here / "l").symlink_to("f")
    with os.scandir(here) as entries:
        found = {
            entry.name: (
                entry.is_dir(follow_symlinks=False),
                entry.is_symlink(),
                entry.stat(follow_symlinks=False).st_size,
            )
            for entry in entries
        }
    assert found == {"d": (True, False, found["d"][2]), "f": (False, False, 3), "l": (False, True, 1)}


def test_deep_trees_are_created_walked_and_removed(here):
    place = here
    for number in range(40):
        place = place / f"level{number}"
        place.mkdir()
        (place / "file").write_text(str(number))
    assert sum(len(files) for _, _, files in os.walk(here)) == 40
    subprocess.run(["rm", "-r", here / "level0"], check=True)
    assert os.listdir(here) == []
