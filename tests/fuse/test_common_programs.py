"""Common programs on a real mount: git, sqlite3, tar, rsync, fio, a Python environment, a compiler, mv and cp."""

import hashlib
import json
import os
import shutil
import sqlite3
import stat
import subprocess
import sys
import sysconfig
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.fuse.conftest import needs

ENGINES = ("kernel", "pyfuse3")

pytestmark = pytest.mark.mount


def run(*words, **options):
    done = subprocess.run(
        [str(word) for word in words], capture_output=True, text=True, timeout=240, check=False, **options
    )
    assert done.returncode == 0, f"{words}: {done.stdout}{done.stderr}"
    return done.stdout


def digests(tree):
    """Content of a tree: path -> (mode, content or link target)."""
    found = {}
    for place, folders, files in os.walk(tree):
        for name in folders + files:
            path = Path(place, name)
            mode = path.lstat().st_mode
            content = os.readlink(path) if path.is_symlink() else ""
            if stat.S_ISREG(mode):
                content = hashlib.sha256(path.read_bytes()).hexdigest()
            found[str(path.relative_to(tree))] = mode, content
    return found


@pytest.fixture(scope="session")
def source(tmp_path_factory):
    """A small real tree: some packages of the standard library, links, odd modes, an empty directory."""
    tree = tmp_path_factory.mktemp("source") / "tree"
    library = Path(sysconfig.get_path("stdlib"))
    for name in ("json", "asyncio", "email", "sqlite3"):
        shutil.copytree(library / name, tree / name, ignore=shutil.ignore_patterns("__pycache__"))
    (tree / "link").symlink_to("json/decoder.py")
    os.link(tree / "json" / "scanner.py", tree / "hard")
    (tree / "empty").mkdir()
    (tree / "script").write_text("#!/bin/sh\necho ran\n")
    (tree / "script").chmod(0o755)
    (tree / "odd \n name").write_bytes(os.urandom(70_000))
    return tree


@needs("git")
def test_git_clones_and_commits(here, source, tmp_path):
    environment = {
        **os.environ,
        "HOME": str(tmp_path),
        "GIT_CONFIG_NOSYSTEM": "1",
        "GIT_AUTHOR_NAME": "a",
        "GIT_AUTHOR_EMAIL": "a@b",
        "GIT_COMMITTER_NAME": "a",
        "GIT_COMMITTER_EMAIL": "a@b",
    }

    def git(*words, at=here):
        return run("git", "-C", at, *words, env=environment)

    shutil.copytree(source, here / "origin", symlinks=True)
    git("init", "-q", "-b", "main", at=here / "origin")
    git("add", "-A", at=here / "origin")
    git("commit", "-q", "-m", "first", at=here / "origin")
    git("clone", "-q", "--no-local", here / "origin", here / "clone")
    assert git("status", "--porcelain", at=here / "clone") == ""
    (here / "clone" / "new").write_text("new\n")
    git("add", "new", at=here / "clone")
    git("commit", "-q", "-m", "second", at=here / "clone")
    git("gc", "-q", at=here / "clone")
    git("fsck", "--full", "--strict", at=here / "clone")
    git("pull", "-q", here / "clone", "main", at=here / "origin")
    assert (here / "origin" / "new").read_text() == "new\n"
    git("fsck", "--full", at=here / "origin")


def test_sqlite_uses_a_write_ahead_log(here):
    def connect():
        made = sqlite3.connect(here / "db", timeout=30, isolation_level=None)
        made.execute("pragma synchronous=normal")
        return made

    with connect() as first:
        assert first.execute("pragma journal_mode=wal").fetchone() == ("wal",)
        first.execute("create table t (who int, number int, text)")

    def work(who):
        mine = connect()
        for number in range(25):
            mine.execute("begin immediate")
            mine.execute("insert into t values (?, ?, ?)", (who, number, "x" * 500))
            mine.execute("commit")
        mine.close()

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(work, range(4)))
    with connect() as last:
        assert last.execute("select count(*), count(distinct who) from t").fetchone() == (100, 4)
        assert last.execute("pragma integrity_check").fetchone() == ("ok",)
        last.execute("pragma wal_checkpoint(truncate)")
        last.execute("vacuum")
        assert last.execute("pragma integrity_check").fetchone() == ("ok",)
    last.close()


@needs("sqlite3")
def test_sqlite_processes_share_a_write_ahead_log(here):
    """The log's index is a shared writable mapping of several processes."""
    run("sqlite3", here / "db", "pragma journal_mode=wal; create table t (n int);")
    running = [
        subprocess.Popen(["sqlite3", here / "db"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        for _ in range(3)
    ]
    for process in running:
        process.stdin.write(".timeout 30000\n" + "insert into t values (1);\n" * 20)
        process.stdin.close()
    assert [process.wait(120) for process in running] == [0, 0, 0]
    for process in running:
        process.stdout.close()
    assert run("sqlite3", here / "db", "select count(*) from t; pragma integrity_check;") == "60\nok\n"


def test_sqlite_rolls_back_with_its_journal(here):
    made = sqlite3.connect(here / "db", isolation_level=None)
    made.execute("pragma journal_mode=delete")
    made.execute("create table t (n int)")
    made.execute("begin")
    made.executemany("insert into t values (?)", [(n,) for n in range(1000)])
    made.execute("rollback")
    made.executemany("insert into t values (?)", [(n,) for n in range(10)])
    made.close()
    again = sqlite3.connect(here / "db")
    assert again.execute("select count(*) from t").fetchone() == (10,)
    again.close()


@needs("tar")
def test_tar_round_trip(here, source, tmp_path):
    run("tar", "-C", source.parent, "-cf", here / "a.tar", source.name)
    run("tar", "-C", here, "-xpf", here / "a.tar")
    assert digests(here / "tree") == digests(source)
    run("tar", "-C", here, "-df", here / "a.tar")
    assert os.stat(here / "tree" / "hard").st_nlink == 2
    run("tar", "-C", here, "-czf", tmp_path / "back.tgz", "tree")
    run("tar", "-C", tmp_path, "-xzf", tmp_path / "back.tgz")
    assert digests(tmp_path / "tree") == digests(source)


@needs("rsync")
def test_second_rsync_transfers_nothing(here, source):
    words = ("rsync", "-aHX", "--itemize-changes", f"{source}/", f"{here}/copy/")
    assert run(*words)
    assert digests(here / "copy") == digests(source)
    assert run(*words) == ""
    assert run("rsync", "-aHX", "--checksum", "--itemize-changes", f"{source}/", f"{here}/copy/") == ""


@needs("fio")
@pytest.mark.few(2)
@pytest.mark.parametrize(
    "words",
    [
        ("--rw=randrw", "--bssplit=512/20:4k/40:64k/30:300k/10", "--direct=0"),
        ("--rw=randwrite", "--bs=8k", "--ioengine=mmap"),
        ("--rw=randwrite", "--bs=4k", "--direct=1", "--numjobs=2"),
        ("--rw=write", "--bs=1m", "--direct=1", "--end_fsync=1"),
    ],
    ids=["mixed-sizes", "mapped", "direct", "sequential"],
)
def test_fio_verifies_its_writes(here, words):
    said = run(
        "fio",
        "--name=check",
        f"--directory={here}",
        "--size=12m",
        "--verify=crc32c",
        "--verify_fatal=1",
        "--do_verify=1",
        "--fallocate=none",
        "--output-format=json",
        *words,
        cwd=here,
    )
    assert all(job["error"] == 0 for job in json.loads(said)["jobs"])


def test_python_environment_works_on_the_mount(here):
    run(sys.executable, "-m", "venv", "--without-pip", here / "env")
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    package = here / "env" / "lib" / version / "site-packages" / "greeting"
    package.mkdir()
    (package / "__init__.py").write_text("from greeting.words import WORDS\n")
    (package / "words.py").write_text("WORDS = 'hello from the pool'\n")
    program = "import greeting, json, sys; print(greeting.WORDS, sys.prefix)"
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    for _ in range(2):
        assert (
            run(here / "env" / "bin" / "python", "-c", program, env=environment)
            == f"hello from the pool {here / 'env'}\n"
        )
    assert list(package.glob("__pycache__/*.pyc"))


@needs("gcc", "make")
def test_program_is_built_and_run_on_the_mount(here):
    (here / "Makefile").write_text("hello: hello.o\n\tgcc -o $@ $^\n%.o: %.c\n\tgcc -c -o $@ $<\n")
    (here / "hello.c").write_text('#include <stdio.h>\nint main(void) { puts("built"); return 0; }\n')
    run("make", "-C", here)
    assert run(here / "hello") == "built\n"
    assert "up to date" in run("make", "-C", here)


def test_cp_and_mv_preserve_a_tree(here, source, tmp_path):
    run("cp", "-a", source, here / "copied")
    assert digests(here / "copied") == digests(source)
    run("mv", here / "copied", here / "moved")
    run("mv", here / "moved", tmp_path / "back")
    assert digests(tmp_path / "back") == digests(source) and os.listdir(here) == []


def test_scripts_run_from_the_mount(here, source):
    shutil.copy2(source / "script", here / "script")
    assert run(here / "script") == "ran\n"


def test_du_and_find_report_the_real_sizes(here):
    (here / "f").write_bytes(b"x" * 100_000)
    assert run("find", here, "-type", "f", "-size", "+90k").strip() == str(here / "f")
    assert int(run("du", "--apparent-size", "-B1", here / "f").split()[0]) == 100_000
