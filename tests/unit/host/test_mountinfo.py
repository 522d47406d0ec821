"""Mount table of the kernel, and paths that lead to a mount."""

from pathlib import Path

from nvpool.host import mountinfo
from nvpool.host.mountinfo import mount_at, mount_of, mounts_below, place_of

LINE = rb"36 35 98:0 / %s rw,noatime master:1 - %s %s rw,errors=continue" + b"\n"


def test_mount_line_is_decoded_with_escapes_and_odd_bytes():
    found = mount_of(LINE % (rb"/a\040b\011c\134d\012e" + b"\xff", b"fuse.nvpool", rb"nvpool:my\040pool"))
    assert found == (
        "98:0",
        Path("/a b\tc\\d\ne\udcff"),
        "fuse.nvpool",
        "nvpool:my pool",
        "rw,noatime",
        Path("/"),
    )
    assert found.ours


def test_only_mounts_of_nvpool_are_ours():
    for kind, source, ours in (
        (b"fuse.nvpool", b"x", True),
        (b"fuse", b"nvpool:x", True),
        (b"ext4", b"nvpool", False),
        (b"fuse.sshfs", b"host:", False),
    ):
        assert mount_of(LINE % (b"/m", kind, source)).ours is ours


def test_mount_point_is_found_through_links_without_access(tmp_path, monkeypatch):
    table = [
        mount_of(LINE % (str(tmp_path / name).encode(), b"fuse.nvpool", b"nvpool:x"))
        for name in ("m", "m", "m/below")
    ]
    monkeypatch.setattr(mountinfo, "mounts", lambda: table)
    (tmp_path / "real").mkdir()
    (tmp_path / "real" / "link").symlink_to("../m")  # nothing exists at m: an access would raise an error
    (tmp_path / "way").symlink_to("real")
    assert place_of(tmp_path / "way" / "link") == tmp_path / "m"
    assert mount_at(tmp_path / "way" / "link") is table[1]
    assert mounts_below(tmp_path / "way" / "link") == [table[2], table[1], table[0]]
    assert place_of(tmp_path / "way") == tmp_path / "real" and mount_at(tmp_path / "way") is None
    (tmp_path / "round").symlink_to("round")
    assert place_of(tmp_path / "round") == tmp_path / "round"
