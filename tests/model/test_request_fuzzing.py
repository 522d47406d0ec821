"""Thousands of invalid requests to each service on every run (`make soak`: ten million), and proof that the fuzzer finds
faults.
"""

from __future__ import annotations

import random
import subprocess
import sys
import time
from pathlib import Path

import pytest

from nvpool.core.compiled_loader import IS_PURE, PURE_VARIABLE
from nvpool.meta.requests import dispatch_table as meta_dispatch
from nvpool.meta.requests import local_user_permissions
from nvpool.meta.requests.query_handlers import QueryHandlers
from nvpool.meta.sessions.table import Sessions
from nvpool.meta.state.volume_access import VolumeAccess
from nvpool.rpc.api import MESSAGE_BYTES_MAX
from nvpool.rpc.peer_roles import BELIEVED_GROUPS, Credentials
from nvpool.rpc.v1 import wire_pb2 as wire
from nvpool.testing.fuzz.messages import REQUESTS, Generator, KnownValues
from nvpool.testing.fuzz.runner import PLACES, fuzz

ROOT = Path(__file__).resolve().parents[2]
CASES, CASES_WIDE, LARGE_CASES = 500, 1500, 60
KINDS = list(dict.fromkeys(f"{place.name}-{kind}" for place, kind in PLACES))


@pytest.mark.parametrize("kind", KINDS)
def test_invalid_requests_do_no_harm(kind, capsys):
    assert fuzz(kind, CASES) == 0, capsys.readouterr().out


@pytest.mark.few(0)
@pytest.mark.parametrize("kind", KINDS)
def test_more_invalid_requests_do_no_harm(kind, capsys):
    assert fuzz(kind, CASES_WIDE) == 0, capsys.readouterr().out


@pytest.mark.few(0)
@pytest.mark.parametrize("kind", KINDS)
def test_large_requests_do_no_harm(kind, capsys):
    assert fuzz(kind, LARGE_CASES, large=0.25) == 0, capsys.readouterr().out


def test_large_messages_are_valid_and_within_the_limit():
    generator, sizes = Generator(random.Random(1), KnownValues()), []
    for request in REQUESTS.values():
        raw = generator.enlarged(request.DESCRIPTOR, request().SerializeToString())
        request.FromString(raw)
        sizes.append(len(raw))
    assert max(sizes) <= MESSAGE_BYTES_MAX
    assert sum(size > 900_000 for size in sizes) > len(sizes) // 3


def report_of(capsys, kind, only="", cases=10_000):
    """The report of the fault that a test has injected."""
    assert fuzz(kind, cases, only=only) == 1
    out = capsys.readouterr().out
    assert "TROUBLE at case" in out and "again with: --seed 1" in out
    return out


def test_fuzzer_finds_a_missing_permission_check(capsys, monkeypatch):
    monkeypatch.setattr(local_user_permissions.permissions, "check", lambda *_: None)
    assert "without a right to" in report_of(capsys, "shard-user")


def test_fuzzer_finds_an_unsquashed_root(capsys, monkeypatch):
    monkeypatch.setattr(
        local_user_permissions, "believed", lambda change: Credentials(change.uid, BELIEVED_GROUPS, 0)
    )
    assert "without a right to" in report_of(capsys, "shard-squash")


def test_fuzzer_finds_a_volume_open_to_all(capsys, monkeypatch):
    monkeypatch.setattr(VolumeAccess, "check_change", lambda *_: None)
    assert "without a right to" in report_of(capsys, "shard-client")


def test_fuzzer_finds_a_session_open_to_others(capsys, monkeypatch):
    monkeypatch.setattr(Sessions, "of", lambda self, number, owner: self.get(number))
    report_of(capsys, "shard-client")


def test_fuzzer_finds_an_unexpected_exception(capsys, monkeypatch):
    monkeypatch.setitem(
        meta_dispatch.QUERIES,
        wire.META_READLINK,
        (meta_dispatch.QUERIES[wire.META_READLINK][0], lambda *_: {}["x"]),
    )
    assert "KeyError" in report_of(capsys, "shard-client", "META_READLINK")


def test_fuzzer_finds_a_request_without_a_reply(capsys, monkeypatch):
    monkeypatch.setattr(QueryHandlers, "statfs", lambda self, call: None)
    assert "not answered within" in report_of(capsys, "shard-client", "META_STATFS")


def test_fuzzer_finds_a_request_that_keeps_the_loop(capsys, monkeypatch):
    def compute(self, call):
        until_s = time.thread_time() + 1.1
        while time.thread_time() < until_s:
            pass
        call.reply()

    monkeypatch.setattr(QueryHandlers, "statfs", compute)
    assert "in META_STATFS" in report_of(capsys, "shard-client", "META_STATFS")


def test_fuzzer_finds_a_session_that_retains_a_message(capsys, monkeypatch):
    def retain(self, call):
        for session in self._sessions.by_number.values():
            session.client = "x" * (2 << 20)
        call.reply()

    monkeypatch.setattr(QueryHandlers, "statfs", retain)
    assert "retains" in report_of(capsys, "shard-client", "META_STATFS")


def test_fuzzer_finds_a_damaged_tree(capsys, monkeypatch):
    kind, decide = meta_dispatch.CHANGES[wire.META_LINK]

    def miscounted(view, request, now_ns):
        draft = decide(view, request, now_ns)
        draft.inodes[request.inode].links -= 1
        return draft

    monkeypatch.setitem(meta_dispatch.CHANGES, wire.META_LINK, (kind, miscounted))
    assert "fsck finds" in report_of(capsys, "shard-client", "META_LINK")


@pytest.mark.few(0)
def test_same_seed_sends_the_same_requests(capsys):
    script = (
        "from nvpool.testing.fuzz import runner as run\nhistory=[]\nclass Heard(run.FuzzRun):\n"
        "    def _one(self, place, number, count):\n        super()._one(place, number, count)\n"
        "        print(hash(tuple(self._recent)))\nrun.FuzzRun = Heard\nrun.fuzz('shard-bound', 2500, '7')"
    )
    said = [
        subprocess.run(
            [sys.executable, "-c", script],
            capture_output=True,
            text=True,
            check=True,
            timeout=120,
            cwd=ROOT,
            env={"PYTHONHASHSEED": "0", PURE_VARIABLE: str(int(IS_PURE))},
        ).stdout
        for _ in range(2)
    ]
    lines = [[line for line in out.splitlines() if not line.startswith("done")] for out in said]
    assert lines[0] == lines[1] and len(lines[0]) == 2


@pytest.mark.soak
def test_ten_million_invalid_requests_do_no_harm():
    done = subprocess.run(
        [sys.executable, ROOT / "tools" / "fuzz.py", "--cases", "10000000"],
        capture_output=True,
        text=True,
        check=False,
        timeout=6 * 3600,
    )
    assert done.returncode == 0, done.stdout[-20_000:]
