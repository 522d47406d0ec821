"""A client of a real pool whose root is squashed: operations that its root is refused, by the SDK and by a mount, as over
NFS.
"""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
from pathlib import Path

import pytest

import nvpool as nvpool_sdk
from nvpool.client.state.options import ClientOptions
from tests.cluster.test_supervisor import clean_up, nvpool

ALICE = 1234
pytestmark = pytest.mark.skipif(bool(os.geteuid()), reason="only root is squashed")


@pytest.fixture(scope="module")
def pool(tmp_path_factory):
    """Over TLS on loopback: over a unix socket root would be known as root. Directories of the pool, and of the client."""
    base = tmp_path_factory.mktemp("squash")
    own, client = base / "pool", base / "client"
    (base / "node.toml").write_text('[network]\nhost = "127.0.0.1"\n')
    try:
        nvpool("dev", "up", own, "--size", "128M", "--config", base / "node.toml")
        with nvpool_sdk.connect(own) as fs:
            for name, mode in (("tmp", 0o1777), ("alice", 0o700), ("etc", 0o755)):
                fs.mkdir(f"/{name}")
                fs.chmod(f"/{name}", mode)
            for path, mode, owner in (
                ("/etc/shadow", 0o600, 0),
                ("/etc/passwd", 0o644, 0),
                ("/etc/su", 0o4755, 0),
                ("/alice/f", 0o644, ALICE),
                ("/tmp/private", 0o600, ALICE),
                ("/tmp/shared", 0o666, ALICE),
            ):
                fs.write_bytes(path, b"bytes")
                fs.chown(path, owner, owner)
                fs.chmod(path, mode)
            fs.chown("/alice", ALICE, ALICE)
        token = json.loads(nvpool("client", "token", own, "--squash-root", "--json").stdout)
        nvpool(
            "client", "join", token["address"].removeprefix("stream://"), client, "--token", token["token"]
        )
        yield own, client
    finally:
        clean_up(own)


@pytest.mark.smoke
def test_squashed_client_is_listed_as_such(pool):
    own, _ = pool
    (member,) = json.loads(nvpool("client", "ls", own, "--json").stdout)
    assert member.endswith(".squash-root")
    assert (
        "root squashed" in nvpool("client", "ls", own).stdout
        and "root squashed" in nvpool("cert", "ls", own).stdout
    )
    found = {one["member"]: one["acts_as"] for one in json.loads(nvpool("cert", "ls", own, "--json").stdout)}
    assert found[member] == "any user, root squashed" and found[None] is None
    assert (
        "--uid or --squash-root"
        in nvpool("client", "token", own, "--squash-root", "--uid", "5", code=2).stderr
    )


def test_sdk_root_acts_as_nobody(pool):
    _, client = pool
    with nvpool_sdk.connect(client, options=ClientOptions(transport="stream")) as fs:
        for path in ("/etc/shadow", "/alice/f", "/tmp/private"):
            with pytest.raises(PermissionError):
                fs.read_bytes(path)
        assert fs.read_bytes("/etc/passwd") == fs.read_bytes("/tmp/shared") == b"bytes"
        fs.write_bytes("/tmp/mine", b"mine")
        assert fs.read_bytes("/tmp/mine") == b"mine"
        assert (fs.stat("/tmp/mine").st_uid, fs.stat("/tmp/mine").st_gid) == (65534, 65534)
        for change in (
            lambda: fs.chown("/tmp/mine", 0, 0),
            lambda: fs.remove("/tmp/shared"),
            lambda: fs.mkdir("/etc/new"),
            lambda: fs.chmod("/tmp/shared", 0o777),
            lambda: fs.rename("/tmp/mine", "/etc/mine"),
        ):
            with pytest.raises(PermissionError):
                change()


def as_user(uid):
    return ["setpriv", "--reuid", str(uid), "--regid", str(uid), "--clear-groups"]


def outcome(program, path, *, uid=0):
    """Outcome of a call by a process of that user: "done", or the name of an error."""
    script = (
        f"import errno, os, sys\np = sys.argv[1]\ntry:\n    {program}\n    print('done')\n"
        "except OSError as error:\n    print(errno.errorcode[error.errno])"
    )
    words = as_user(uid) if uid else []
    done = subprocess.run(
        [*words, "/usr/bin/python3", "-c", script, path],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    return done.stdout.strip()


@pytest.mark.mount
@pytest.mark.skipif(not os.path.exists("/dev/fuse"), reason="there is no /dev/fuse")
def test_mount_root_acts_as_nobody(pool):
    _, client = pool
    place = Path(tempfile.mkdtemp(prefix="nvpool-squash-"))  # reachable by other users
    place.chmod(0o755)
    nvpool("mount", client, place, "--transport", "stream")
    try:
        read, write = "open(p).read()", "os.close(os.open(p, os.O_WRONLY))"
        assert outcome(read, place / "etc/passwd") == outcome(read, place / "tmp/shared") == "done"
        assert (
            outcome(write, place / "tmp/shared") == outcome(read, place / "tmp/private", uid=ALICE) == "done"
        )
        assert (
            outcome(read, place / "alice/f", uid=ALICE)
            == outcome(write, place / "tmp/private", uid=ALICE)
            == "done"
        )
        with open(place / "tmp/shared"):
            for _ in range(2):  # also from the cache of the mount
                for path in ("etc/shadow", "alice/f", "tmp/private"):
                    assert outcome(read, place / path) == "EACCES", path
                for path in ("etc/passwd", "etc/su", "alice/f", "tmp/private"):
                    assert outcome(write, place / path) == "EACCES", path
        script = f"import time; f = open({str(place / 'tmp/private')!r}); print(f.read(), flush=True); time.sleep(60)"
        reader = subprocess.Popen(
            [*as_user(ALICE), "/usr/bin/python3", "-c", script], stdout=subprocess.PIPE, text=True
        )
        try:
            assert reader.stdout.readline() == "bytes\n"
            assert outcome(read, place / "tmp/private") == "EACCES", (
                "its owner has the file open on this mount"
            )
        finally:
            reader.kill()
            reader.wait()
        new = place / "tmp/new"
        assert outcome("open(p, 'w').write('x')", new) == "done"
        assert (new.stat().st_uid, new.stat().st_gid) == (65534, 65534)
        assert (
            outcome("os.chown(p, 0, 0)", new)
            == outcome("os.chown(p, 1, -1)", place / "tmp/shared")
            == "EPERM"
        )
        assert (
            outcome("os.chmod(p, 0o777)", place / "tmp/shared") == "EPERM"
            and outcome("os.chmod(p, 0o4755)", new) == "done"
        )
        assert (
            outcome("os.unlink(p)", place / "tmp/shared") == "EPERM"
            and outcome("os.unlink(p)", place / "etc/passwd") == "EACCES"
        )
        assert (
            outcome("os.mkdir(p)", place / "etc/d")
            == outcome("os.rename(p, p + 'x')", place / "etc/passwd")
            == "EACCES"
        )
        assert outcome("os.truncate(p, 0)", place / "tmp/private") == "EACCES"
        assert outcome("os.mknod(p, 0o20666, os.makedev(1, 3))", place / "tmp/null") == "EPERM"
        assert outcome("os.mkdir(p); os.rmdir(p)", place / "tmp/d") == "done"
        assert outcome("open(p, 'w').write('x'); os.unlink(p)", place / "alice/g", uid=ALICE) == "done"
        assert outcome("os.setxattr(p, 'trusted.a', b'x')", new) == "EPERM"
        assert outcome("os.unlink(p)", new) == "done"
    finally:
        nvpool("umount", place)
        place.rmdir()
