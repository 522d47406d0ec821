"""Modes of a pool's files and directories: which other users of the machine may read, list and lock."""

import fcntl
import logging
import os
import stat

import pytest

from nvpool.core.errors import BadConfiguration
from nvpool.daemons import nvpoold
from nvpool.host.log_files import open_log
from nvpool.host.pool_directory import FORMAT_TEXT, Flock, PoolDirectory, announcement, make_passed_through
from nvpool.host.pool_directory_modes import group_number, protect
from nvpool.runtime import logging_setup


@pytest.fixture
def old_umask():
    """The umask of most logins, which lets others read new files."""
    before = os.umask(0o022)
    yield
    os.umask(before)


@pytest.fixture
def directory(tmp_path, old_umask):
    """A pool directory with the modes of an earlier version."""
    found = PoolDirectory(tmp_path / "pool")
    for path in (found.run, found.log, found.map, found.path / "meta", found.path / "targets"):
        path.mkdir(parents=True)
    for path in (
        found.lock,
        found.run / "target-1.lock",
        found.run / "target-1.json",
        found.log / "target-1.log",
        found.poolmap,
        found.reserve,
        found.node_toml,
        found.format,
    ):
        path.write_text("x")
        path.chmod(0o644)
    return found


@pytest.fixture
def unchanged_log():
    """Restore this process's log, stdout and stderr when the test ends."""
    kept = [os.dup(number) for number in (1, 2)]
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    for handler in root.handlers[:]:
        if handler not in handlers:
            handler.close()
    root.handlers[:] = handlers
    root.setLevel(level)
    for number, copy in zip((1, 2), kept, strict=True):
        os.dup2(copy, number)
        os.close(copy)


def mode(path):
    return stat.S_IMODE(path.lstat().st_mode)


def modes_below(directory):
    return {str(path.relative_to(directory.path)): mode(path) for path in sorted(directory.path.rglob("*"))}


def test_pool_of_an_earlier_version_is_corrected(directory):
    protect(directory)
    assert mode(directory.path) == 0o751
    assert modes_below(directory) == {
        "FORMAT": 0o644,
        "lock": 0o600,
        "log": 0o750,
        "log/target-1.log": 0o640,
        "map": 0o750,
        "meta": 0o750,
        "node.toml": 0o644,
        "poolmap.json": 0o640,
        "reserve": 0o600,
        "run": 0o751,
        "run/target-1.json": 0o640,
        "run/target-1.lock": 0o600,
        "targets": 0o750,
    }
    before = modes_below(directory)
    protect(directory)
    assert modes_below(directory) == before


def test_supervisor_corrects_the_pool_when_it_starts(directory, monkeypatch, unchanged_log):
    directory.format.write_text(FORMAT_TEXT)
    directory.node_toml.write_text("")
    directory.lock.unlink()
    monkeypatch.setattr("nvpool.runtime.daemon_process.run", lambda main: 0)
    assert nvpoold.main([str(directory.path), "--log", "stderr"]) == 0
    assert mode(directory.path) == 0o751 and mode(directory.log) == 0o750
    assert mode(directory.run / "target-1.lock") == mode(directory.lock) == 0o600


def test_protection_gives_no_rights(directory):
    directory.path.chmod(0o700)
    directory.log.chmod(0o700)
    directory.poolmap.chmod(0o600)
    protect(directory)
    assert (mode(directory.path), mode(directory.log), mode(directory.poolmap)) == (0o700, 0o700, 0o600)


def test_operators_may_read_logs_and_the_map(directory):
    group = next((one for one in os.getgroups() if one != os.getegid()), 12345 if os.geteuid() == 0 else None)
    if group is None:
        pytest.skip("needs a second group, or root")
    directory.log.chmod(0o700)
    protect(directory, group)
    new = directory.log / "new.log"
    open_log(new).close()
    for path in (directory.log, directory.log / "target-1.log", directory.poolmap, new):
        assert path.lstat().st_gid == group and mode(path) & 0o040, path
    assert mode(directory.log) == 0o2750
    assert mode(directory.lock) == 0o600


def test_protection_follows_no_links(directory, tmp_path):
    for number, other in enumerate((tmp_path / "other", tmp_path / "linked")):
        other.write_text("x")
        other.chmod(0o644)
        place = directory.log / f"link-{number}.log"
        place.symlink_to(other) if number == 0 else os.link(other, place)
    protect(directory)
    assert mode(tmp_path / "other") == mode(tmp_path / "linked") == 0o644


def test_new_directory_is_searchable_with_any_umask(tmp_path, old_umask):
    os.umask(0o077)
    make_passed_through(tmp_path / "above" / "run")
    assert mode(tmp_path / "above" / "run") == 0o751
    (tmp_path / "there").mkdir(mode=0o700)
    make_passed_through(tmp_path / "there")
    assert mode(tmp_path / "there") == 0o700


def test_lock_can_not_be_opened_by_others(directory):
    directory.lock.unlink()
    lock = Flock.take(directory.lock, "the pool")
    assert mode(directory.lock) == 0o600
    lock.release()


def test_lock_of_an_earlier_version_is_corrected_when_taken(directory):
    Flock.take(directory.lock, "the pool").release()
    assert mode(directory.lock) == 0o600


@pytest.mark.skipif(os.geteuid() != 0, reason="becomes another user")
def test_other_user_can_not_hold_a_lock(directory, tmp_path):
    for path in (tmp_path, *tmp_path.parents):
        if path.stat().st_uid == 0 and not mode(path) & 0o001:
            path.chmod(mode(path) | 0o001)
    protect(directory)
    if (child := os.fork()) == 0:
        os.setgroups([])
        os.setgid(65534)
        os.setuid(65534)
        try:
            fcntl.flock(os.open(directory.run / "target-1.lock", os.O_RDONLY), fcntl.LOCK_EX | fcntl.LOCK_NB)
        except PermissionError:
            os._exit(0)
        os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_map_and_announcements_are_not_for_others(directory):
    directory.poolmap.unlink()
    directory.publish(b"{}")
    directory.announce("mount-1", announcement("mount", now_ms=1))
    assert mode(directory.poolmap) == mode(directory.run / "mount-1.json") == 0o640


def test_log_is_private_also_when_reopened(directory, unchanged_log):
    path = directory.log / "target-2.log"
    logging_setup.start_log("target-2", "info", path)
    assert mode(path) == 0o640
    path.rename(directory.log / "moved.log")
    logging.getLogger("nvpool.x").warning("again")
    assert mode(path) == 0o640 and "again" in path.read_text()


def test_group_that_does_not_exist_is_named():
    assert group_number("", "access.operators") is None
    assert group_number("7", "access.operators") == 7
    assert group_number("root", "access.operators") == 0
    with pytest.raises(BadConfiguration, match="access.operators: this system has no group no-such-group"):
        group_number("no-such-group", "access.operators")
