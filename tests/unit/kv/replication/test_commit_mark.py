"""The commit mark: what it proves to the next process of a primary, and when it proves nothing."""

import os

import pytest

from nvpool.kv.replication.commit_mark import CommitMark, Marked, read_mark, remove_mark
from nvpool.kv.replication_log import Position, ReplicationHistory


@pytest.fixture
def records(tmp_path):
    place = tmp_path / "records"
    place.mkdir()
    return place


@pytest.fixture
def path(tmp_path):
    return tmp_path / "mark"


def test_commit_mark_never_decreases(path, records):
    mark = CommitMark.begin(path, records, 7, 40)
    mark.raise_to(39)
    assert read_mark(path, records) == Marked(7, 40)
    mark.raise_to(41)
    assert read_mark(path, records) == Marked(7, 41)
    CommitMark.begin(path, records, 8, 12).raise_to(13)
    mark.raise_to(99)  # of an old term
    assert read_mark(path, records) == Marked(8, 13)
    remove_mark(path)
    remove_mark(path)
    assert read_mark(path, records) is None


def test_commit_mark_is_raised_before_the_commit(path, records):
    history, seen = ReplicationHistory(Position(3, 1)), []
    history.mark_commits(CommitMark.begin(path, records, 1, 3))
    history.note(4, 1, b"x")
    assert history.committed == 4 and read_mark(path, records).sequence == 4, "without standbys"
    history.alone = False
    history.note(5, 1, b"x")
    history.note(6, 1, b"x")
    history.when(5, lambda _known: seen.append(read_mark(path, records).sequence))
    assert seen == [] and read_mark(path, records).sequence == 4
    history.advance(5)
    assert seen == [5]


def test_commit_mark_of_other_records_proves_nothing(tmp_path, path, records):
    CommitMark.begin(path, records, 7, 40)
    other = tmp_path / "other"
    other.mkdir()
    assert read_mark(path, other) is None and read_mark(path, tmp_path / "none") is None


def as_symlink(path):
    path.rename(path.with_name("other"))
    path.symlink_to("other")


def as_pipe(path):
    path.unlink()
    os.mkfifo(path, 0o600)


@pytest.mark.parametrize(
    "spoil",
    [
        lambda path: path.chmod(0o622),
        lambda path: os.truncate(path, 16),
        lambda path: path.write_bytes(b"x" * 40),
        lambda path: os.link(path, path.with_name("second")),
        as_symlink,
        as_pipe,
    ],
    ids=["writable", "short", "invalid", "linked", "symlink", "pipe"],
)
def test_doubtful_commit_mark_proves_nothing(path, records, spoil):
    CommitMark.begin(path, records, 7, 40)
    spoil(path)
    assert read_mark(path, records) is None


def test_commit_mark_that_cannot_be_made_is_none(path, records, caplog):
    path.mkdir()
    assert CommitMark.begin(path, records, 7, 40) is None and "no commit mark" in caplog.text
    assert read_mark(path, records) is None
