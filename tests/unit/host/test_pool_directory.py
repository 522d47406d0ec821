"""Pool directory: its lock, its format and the announcements of processes; process identity."""

import os
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
from msgspec.structs import replace

from nvpool.core.errors import InUse, InvalidRequest, NotFound, WrongFormat
from nvpool.daemons.nvpoold import check_formats
from nvpool.host.mountinfo import Mount
from nvpool.host.pool_directory import (
    FORMAT_TEXT,
    Flock,
    PoolDirectory,
    announcement,
    check_name,
    holder_of,
    write_whole,
)
from nvpool.host.process_identity import ProcessIdentity, boot_id, host_id, identity_of, own_identity, runs
from nvpool.poolmap.model import (
    MAP_FORMAT,
    Drive,
    Node,
    PoolMap,
    PoolSettings,
    Shard,
    StandbyMember,
    Target,
    encode_map,
)
from nvpool.store.chunks.api import FORMAT_TEXT as STORE_FORMAT


@pytest.fixture
def directory(tmp_path):
    found = PoolDirectory(tmp_path / "pool")
    found.run.mkdir(parents=True)
    return found


def test_second_lock_is_refused_with_the_pid_of_the_first(directory):
    lock = Flock.take(directory.lock, "the pool")
    with pytest.raises(InUse, match=f"the pool is in use by process {os.getpid()}"):
        Flock.take(directory.lock, "the pool")
    assert holder_of(directory.lock) == own_identity()
    lock.release()
    Flock.take(directory.lock, "the pool").release()


def test_started_program_does_not_inherit_the_lock(directory):
    lock = Flock.take(directory.lock, "the pool")
    sleeper = subprocess.Popen(
        [sys.executable, "-c", "print(1, flush=True); input()"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        close_fds=False,
    )
    try:
        sleeper.stdout.readline()  # exec closes descriptors one by one, and Popen returns before exec ends
        lock.release()
        Flock.take(directory.lock, "the pool").release()
    finally:
        sleeper.communicate(b"\n", timeout=30)


def test_inherited_lock_is_never_free_in_between(directory):
    lock = Flock.take(directory.lock, "the pool")
    heir = subprocess.Popen(
        [
            sys.executable,
            "-c",
            f"""if True:
        from pathlib import Path
        from nvpool.host.pool_directory import Flock
        lock = Flock.inherited({lock.descriptor}, Path({str(directory.lock)!r}))
        print("mine", flush=True)
        input()
        """,
        ],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        pass_fds=(lock.descriptor,),
    )
    try:
        lock.release()  # the child has its own descriptor since it was started
        with pytest.raises(InUse):
            Flock.take(directory.lock, "the pool")
        assert heir.stdout.readline() == b"mine\n"
        assert holder_of(directory.lock).pid == heir.pid
        with pytest.raises(InUse, match=f"process {heir.pid}"):
            Flock.take(directory.lock, "the pool")
    finally:
        heir.communicate(b"\n", timeout=30)
    Flock.take(directory.lock, "the pool").release()


def test_descriptor_of_another_file_is_refused_as_the_lock(directory, tmp_path):
    with open(tmp_path / "other", "wb") as other:
        Flock.take(directory.lock, "the pool").release()
        with pytest.raises(InUse):
            Flock.inherited(os.dup(other.fileno()), directory.lock)


def test_lock_record_of_an_ended_process_is_ignored(directory):
    directory.lock.write_text(
        f"{os.getpid()} 1 {boot_id()}\n"
    )  # our PID with another start time: a reused PID
    assert holder_of(directory.lock) is None
    directory.lock.write_text("nonsense")
    assert holder_of(directory.lock) is None


def test_process_identity_includes_its_start_time():
    sleeper = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    identity = identity_of(sleeper.pid)
    assert identity is not None and runs(identity)
    assert not runs(identity._replace(start=identity.start + 1))
    sleeper.stdin.close()
    os.waitid(os.P_PID, sleeper.pid, os.WEXITED | os.WNOWAIT)
    assert not runs(identity), "a zombie does not run"
    sleeper.wait()
    assert identity_of(sleeper.pid) is None


def test_host_has_one_name():
    assert host_id() == host_id() and len(host_id()) == 16


@pytest.mark.parametrize(
    "text, error, remedy",
    [
        (None, NotFound, "it has no file FORMAT"),
        ("nvpool pool 2\n", WrongFormat, "version of nvpool that made it"),
        ("nvpool pool being made\n", WrongFormat, "again"),
        ("", WrongFormat, "nvpool pool 1"),
    ],
)
def test_unknown_pool_format_is_refused_with_the_remedy(directory, text, error, remedy):
    if text is not None:
        directory.format.write_text(text)
    with pytest.raises(error, match=remedy):
        directory.check()


def test_pool_of_this_version_is_accepted(directory):
    directory.format.write_text(FORMAT_TEXT)
    directory.check()


def test_missing_directory_is_refused(tmp_path):
    with pytest.raises(NotFound, match="does not exist"):
        PoolDirectory(tmp_path / "nowhere").check()


def test_long_directory_name_uses_a_short_socket_path(tmp_path):
    near = PoolDirectory("/srv/pool")
    assert near.socket_directory() == near.run
    far = PoolDirectory(tmp_path / ("x" * 90))
    assert len(os.fsencode(far.socket_directory() / "target-99999.sock")) <= 107
    assert far.socket_directory() != PoolDirectory(tmp_path / ("y" * 90)).socket_directory()
    made = far.make_socket_directory()
    try:
        assert far.make_socket_directory() == made
    finally:
        made.rmdir()


def test_file_is_replaced_atomically(tmp_path):
    write_whole(tmp_path / "file", b"old")
    with pytest.raises(TypeError):
        write_whole(tmp_path / "file", None)
    write_whole(tmp_path / "file", b"new", 0o600)
    assert (tmp_path / "file").read_bytes() == b"new"
    assert (tmp_path / "file").stat().st_mode & 0o777 == 0o600


def test_announced_processes_are_listed_while_they_run(directory):
    directory.announce("mount-1", announcement("mount", now_ms=5, mountpoint="/mnt/pool"))
    directory.announce("meta-1", announcement("meta", now_ms=5, number=1))
    gone = ProcessIdentity(os.getpid(), 1, boot_id())
    state = announcement("mount", now_ms=5)
    dead = type(state)(
        **{field: getattr(state, field) for field in state.__struct_fields__} | {"start": gone.start}
    )
    directory.announce("mount-2", dead)
    (directory.run / "half.json").write_text("{")
    assert set(directory.states()) == {"mount-1", "meta-1"}
    assert set(directory.states("mount-")) == {"mount-1"}
    assert not (directory.run / "mount-2.json").exists()
    directory.withdraw("mount-1")
    assert set(directory.states()) == {"meta-1"}


def test_last_dead_process_of_a_mount_is_reported(directory, monkeypatch):
    place = Mount("0:99", Path("/mnt/pool"), "fuse.nvpool", "nvpool:p", "rw")
    monkeypatch.setattr("nvpool.host.pool_directory.mounts", lambda: [place])
    state = announcement(
        "mount", now_ms=0, mountpoint="/mnt/pool", identity=ProcessIdentity(os.getpid(), 1, boot_id())
    )
    for number, since_ms in ((3, 300), (1, 500), (2, 400)):
        directory.announce(f"mount-{number}", msgspec.structs.replace(state, since_ms=since_ms))
    assert set(directory.dead_mounts()) == {"mount-1"}
    assert sorted(path.name for path in directory.run.iterdir()) == ["mount-1.json"]


@pytest.mark.parametrize("name", ["", "a b", "../x", "ü", "x" * 64])
def test_invalid_names_are_refused(name):
    with pytest.raises(InvalidRequest):
        check_name(name)
    check_name("training-1")


def test_check_formats_skips_a_missing_standby(tmp_path):
    directory = PoolDirectory(tmp_path / "pool")
    directory.path.mkdir()
    drive = tmp_path / "drive"
    drive.mkdir()
    (drive / "FORMAT").write_text(STORE_FORMAT)
    planned = StandbyMember(member=2, node=1, endpoints=(), path=str(drive))
    pool_map = PoolMap(
        format=MAP_FORMAT,
        pool_id="p",
        name="p",
        epoch=1,
        settings=PoolSettings(),
        nodes=(Node(1, "a", "1", ()), Node(2, "b", "2", ())),
        drives=(Drive(1, 1, str(drive), 1 << 30),),
        targets=(Target(1, 1, 1, 1 << 30, ()),),
        shards=(Shard(id=1, node=2, endpoints=("stream://10.0.0.2:1",), standbys=(planned,)),),
    )
    directory.poolmap.write_bytes(encode_map(pool_map))
    check_formats(
        directory
    )  # a standby will be created beside the store, whose format is not that of a shard
    made = replace(planned, endpoints=("stream://10.0.0.1:1",))
    directory.poolmap.write_bytes(
        encode_map(replace(pool_map, shards=(replace(pool_map.shards[0], standbys=(made,)),)))
    )
    with pytest.raises(WrongFormat, match="Nothing was started"):
        check_formats(directory)


def test_supervisor_socket_is_listed_only_with_its_owner(directory, monkeypatch):
    assert directory.shown_sockets() == []
    (directory.run / "node-ab12.sock").touch()
    for _ in range(2):
        directory.show_socket([str(directory.run / "node-ab12.sock"), "/another"])
    assert directory.shown_sockets() == [str(directory.run / "supervisor.sock")]
    assert os.readlink(directory.run / "supervisor.sock") == "node-ab12.sock"
    found = os.lstat(directory.run)
    planted = os.stat_result((*found[:4], found.st_uid + 1000, *found[5:10]))
    monkeypatch.setattr(os, "lstat", lambda path: planted)
    assert directory.shown_sockets() == [], "another user made it"
