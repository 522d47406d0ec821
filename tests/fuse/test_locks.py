"""Locks of fcntl(2) and flock(2) on two mounts of one pool, as real programs use them. Only the direct engine forwards them."""

import errno
import fcntl
import json
import mmap
import os
import select
import signal
import sqlite3
import struct
import subprocess
import sys
import threading
import time

import pytest

from nvpool.fuse.engines import KERNEL_MIN, kernel_version
from nvpool.host.pool_directory import PoolDirectory
from nvpool.host.process_identity import identity_of
from nvpool.poolmap.shards.members import process_name
from tests.fuse.conftest import FLOOR, Mounted, needs, nvpool, wait_until

pytestmark = [
    pytest.mark.mount,
    pytest.mark.skipif(kernel_version() < KERNEL_MIN, reason="this kernel is too old for the direct engine"),
    pytest.mark.skipif(FLOOR, reason="the floor has one mount"),
]

FLOCK = struct.Struct("hhqqi4x")  # struct flock on 64-bit Linux
F_OFD_GETLK, F_OFD_SETLK, F_OFD_SETLKW = 36, 37, 38


@pytest.fixture
def there(here, second, mounted):
    """The same directory through the other mount."""
    place = second.place / here.relative_to(mounted.place)
    wait_until(place.exists, "the directory at the other mount")
    return place


@pytest.fixture
def both(here, there):
    """One file, open through both mounts."""
    (here / "f").write_bytes(b"0123456789" * 10)
    with open(here / "f", "r+b", buffering=0) as one, open(there / "f", "r+b", buffering=0) as other:
        yield one, other


def lock(file, kind=fcntl.LOCK_EX, length=0, start=0):
    fcntl.lockf(file, kind if kind == fcntl.LOCK_UN else kind | fcntl.LOCK_NB, length, start)


def refused(call, *arguments):
    with pytest.raises(OSError) as error:
        call(*arguments)
    return error.value.errno


def lock_conflict(file, kind=fcntl.F_WRLCK, start=0, length=0):
    """The result of F_GETLK: (kind, start, length, pid)."""
    asked = FLOCK.pack(kind, os.SEEK_SET, start, length, 0)
    kind, _, start, length, pid = FLOCK.unpack(fcntl.fcntl(file, fcntl.F_GETLK, asked))
    return kind, start, length, pid


class Child:
    """A Python program in its own process: it prints a line at `ready()` and continues after `go`."""

    HEAD = """
import fcntl, mmap, os, signal, sqlite3, struct, sys, time
def ready(word="ready"):
    print(word, flush=True)
def pause():
    sys.stdin.readline()
"""

    def __init__(self, program, *arguments):
        self.process = subprocess.Popen(
            [sys.executable, "-c", self.HEAD + program, *map(str, arguments)],
            text=True,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        self.said = b""

    def __enter__(self):
        return self

    def __exit__(self, *_):
        if self.process.poll() is None:
            self.process.kill()
        self.process.communicate()

    def read_line(self, wait_s=120.0):
        """Its next line; None when it prints nothing for that time."""
        while b"\n" not in self.said:
            if not select.select([self.process.stdout], [], [], wait_s)[0]:
                return None
            more = os.read(self.process.stdout.fileno(), 4096)
            if not more:
                raise AssertionError(f"it ended: {self.process.communicate()[1]}")
            self.said += more
        line, _, self.said = self.said.partition(b"\n")
        return line.decode()

    def go(self):
        self.process.stdin.write("\n")
        self.process.stdin.flush()

    def end(self, wait_s=240):
        said, errors = self.process.communicate(timeout=wait_s)
        assert self.process.returncode == 0, errors
        return said


def test_record_lock_excludes_the_other_mount(both):
    one, other = both
    lock(one, fcntl.LOCK_EX, 10, 20)
    assert refused(lock, other) == errno.EAGAIN
    assert refused(lock, other, fcntl.LOCK_SH, 1, 29) == errno.EAGAIN
    lock(other, fcntl.LOCK_EX, 20, 0)
    lock(other, fcntl.LOCK_EX, 0, 30)
    lock(one, fcntl.LOCK_UN, 5, 22)
    lock(other, fcntl.LOCK_EX, 5, 22)
    assert refused(lock, one, fcntl.LOCK_EX, 1, 24) == errno.EAGAIN
    lock(one, fcntl.LOCK_UN)
    lock(other)


def test_getlk_shows_the_conflict_and_its_local_process(here, both):
    one, other = both
    lock(one, fcntl.LOCK_EX, 10, 20)
    lock(one, fcntl.LOCK_SH, 0, 50)
    assert lock_conflict(other, fcntl.F_RDLCK) == (fcntl.F_WRLCK, 20, 10, 0)
    assert lock_conflict(other, fcntl.F_WRLCK, 40) == (fcntl.F_RDLCK, 50, 0, 0)
    assert lock_conflict(other, fcntl.F_RDLCK, 40)[0] == fcntl.F_UNLCK
    with Child(
        """
with open(sys.argv[1], "r+b") as file:
    got = fcntl.fcntl(file, fcntl.F_GETLK, struct.pack("hhqqi4x", fcntl.F_WRLCK, 0, 0, 0, 0))
    print(struct.unpack("hhqqi4x", got)[4])
""",
        here / "f",
    ) as child:
        assert int(child.end()) == os.getpid()


def test_shared_locks_of_both_mounts_exclude_writers(both):
    one, other = both
    lock(one, fcntl.LOCK_SH)
    lock(other, fcntl.LOCK_SH)
    assert refused(lock, one) == errno.EAGAIN
    lock(other, fcntl.LOCK_UN)
    lock(one)
    assert refused(lock, other, fcntl.LOCK_SH) == errno.EAGAIN


def test_flock_excludes_until_the_last_descriptor_closes(here, there):
    (here / "f").touch()
    with open(here / "f") as one, open(there / "f") as other:
        fcntl.flock(one, fcntl.LOCK_EX)
        assert refused(fcntl.flock, other, fcntl.LOCK_SH | fcntl.LOCK_NB) == errno.EAGAIN
        with open(here / "f") as same_node:
            assert refused(fcntl.flock, same_node, fcntl.LOCK_SH | fcntl.LOCK_NB) == errno.EAGAIN
        again = os.dup(one.fileno())
        one.close()
        assert refused(fcntl.flock, other, fcntl.LOCK_SH | fcntl.LOCK_NB) == errno.EAGAIN
        os.close(again)
        wait_until(lambda: not _is_refused(fcntl.flock, other, fcntl.LOCK_EX | fcntl.LOCK_NB), "the lock")


def _is_refused(call, *arguments):
    try:
        call(*arguments)
    except BlockingIOError:
        return True
    return False


def test_open_file_description_locks_belong_to_it(here, there):
    (here / "f").write_bytes(b"x" * 100)
    whole = FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)
    with open(here / "f", "r+b") as one, open(here / "f", "r+b") as same, open(there / "f", "r+b") as other:
        fcntl.fcntl(one, F_OFD_SETLK, whole)
        for file in (same, other):
            assert refused(fcntl.fcntl, file, F_OFD_SETLK, whole) == errno.EAGAIN
        with open(here / "f", "rb"):
            pass  # closing another descriptor ends the locks of the process, not these
        assert refused(fcntl.fcntl, other, F_OFD_SETLK, whole) == errno.EAGAIN
        one.close()
        wait_until(lambda: not _is_refused(fcntl.fcntl, other, F_OFD_SETLK, whole), "the lock")


def test_closing_any_descriptor_ends_the_process_locks(here, both):
    one, other = both
    lock(one)
    with open(here / "f", "rb"):
        pass
    lock(other)


def test_child_inherits_no_locks_and_ends_none(both):
    one, other = both
    lock(one)
    child = os.fork()
    if not child:
        try:
            os._exit(0 if refused(lock, one) == errno.EAGAIN else 1)
        finally:
            os._exit(2)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert refused(lock, other) == errno.EAGAIN


WAIT = """
with open(sys.argv[1], "r+b", buffering=0) as file:
    ready()
    getattr(fcntl, sys.argv[2])(file, fcntl.LOCK_EX)
    ready("has it")
    pause()
"""


@pytest.mark.parametrize("call", ["lockf", "flock"])
def test_waiting_process_gets_a_lock_from_the_other_mount(here, there, call):
    (here / "f").touch()
    with open(here / "f", "r+b") as file, Child(WAIT, there / "f", call) as child:
        getattr(fcntl, call)(file, fcntl.LOCK_EX)
        assert child.read_line() == "ready" and child.read_line(0.5) is None
        getattr(fcntl, call)(file, fcntl.LOCK_UN)
        assert child.read_line() == "has it"
        assert _is_refused(getattr(fcntl, call), file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        child.go()
        child.end()
        # the kernel reports the last close of a file, which releases a flock, after close has returned
        wait_until(
            lambda: not _is_refused(getattr(fcntl, call), file, fcntl.LOCK_EX | fcntl.LOCK_NB), "the lock", 10
        )


@pytest.mark.parametrize("call", ["lockf", "flock"])
def test_dead_process_loses_its_locks_and_queue_places(here, there, call):
    (here / "f").touch()
    with Child(WAIT, here / "f", call) as first:
        assert first.read_line() == "ready" and first.read_line() == "has it"
        with Child(WAIT, there / "f", call) as second:
            assert second.read_line() == "ready" and second.read_line(0.3) is None
            with Child(WAIT, here / "f", call) as third:
                assert third.read_line() == "ready" and third.read_line(0.3) is None
                second.process.kill()
                second.process.wait(120)
                first.process.kill()
                assert third.read_line() == "has it"


INTERRUPTED = """
class Woken(Exception): pass
def wake(*_): raise Woken
signal.signal(signal.SIGALRM, wake)
with open(sys.argv[1], "r+b", buffering=0) as file:
    ready()
    signal.setitimer(signal.ITIMER_REAL, 0.3)
    try:
        getattr(fcntl, sys.argv[2])(file, fcntl.LOCK_EX)
    except Woken:
        ready("woken")
    pause()
"""


@pytest.mark.parametrize("call", ["lockf", "flock"])
def test_signal_ends_waiting_and_leaves_no_lock(here, there, call):
    (here / "f").touch()
    with (
        open(here / "f", "r+b") as file,
        open(here / "f", "r+b") as same,
        Child(INTERRUPTED, there / "f", call) as child,
    ):
        getattr(fcntl, call)(file, fcntl.LOCK_EX)
        assert child.read_line() == "ready" and child.read_line() == "woken"
        getattr(fcntl, call)(file, fcntl.LOCK_UN)
        getattr(fcntl, call)(same, fcntl.LOCK_EX | fcntl.LOCK_NB)
        child.go()
        child.end()


def test_handled_signal_lets_the_wait_continue(here, there):
    (here / "f").touch()
    with (
        open(here / "f", "r+b") as file,
        Child(
            """
seen = []
signal.signal(signal.SIGALRM, lambda *_: seen.append(1))
with open(sys.argv[1], "r+b") as file:
    ready()
    signal.setitimer(signal.ITIMER_REAL, 0.05, 0.05)
    fcntl.lockf(file, fcntl.LOCK_EX)
    ready("has it" if len(seen) > 3 else "not interrupted")
""",
            there / "f",
        ) as child,
    ):
        fcntl.lockf(file, fcntl.LOCK_EX)
        assert child.read_line() == "ready" and child.read_line(0.6) is None
        fcntl.lockf(file, fcntl.LOCK_UN)
        assert child.read_line() == "has it"


def test_deadlock_between_two_mounts_is_detected(here, there):
    (here / "f").write_bytes(b"xx")
    with (
        open(here / "f", "r+b") as file,
        Child(
            """
with open(sys.argv[1], "r+b") as file:
    fcntl.lockf(file, fcntl.LOCK_EX, 1, 1)
    ready()
    fcntl.lockf(file, fcntl.LOCK_EX, 1, 0)
    ready("has it")
""",
            there / "f",
        ) as child,
    ):
        fcntl.lockf(file, fcntl.LOCK_EX, 1, 0)
        assert child.read_line() == "ready" and child.read_line(0.3) is None
        assert refused(fcntl.lockf, file, fcntl.LOCK_EX, 1, 1) == errno.EDEADLK
        fcntl.lockf(file, fcntl.LOCK_UN)
        assert child.read_line() == "has it"


COUNT = """
how = sys.argv[3]
with open(sys.argv[1], "r+b", buffering=0) as file:
    for _ in range(int(sys.argv[2])):
        getattr(fcntl, how)(file, fcntl.LOCK_EX)
        file.seek(0)
        number = int(file.read(64).split()[0])
        size = os.fstat(file.fileno()).st_size
        text = b"%d %s" % (number + 1, b"." * (number % 50))
        assert size == len(b"%d %s" % (number, b"." * ((number - 1) % 50 if number else 0))), (size, number)
        file.seek(0)
        file.truncate()
        file.write(text)
        getattr(fcntl, how)(file, fcntl.LOCK_UN)
"""


@pytest.mark.few(1)
@pytest.mark.parametrize("call", ["lockf", "flock"])
def test_counter_in_a_file_counts_every_step(here, there, call):
    """Read and written through the kernels' page caches; its size changes with each step."""
    (here / "f").write_bytes(b"0 ")
    with (
        Child(COUNT, here / "f", 60, call) as a,
        Child(COUNT, there / "f", 60, call) as b,
        Child(COUNT, here / "f", 60, call) as c,
        Child(COUNT, there / "f", 60, call) as d,
    ):
        for child in (a, b, c, d):
            child.end(120)
    assert int((here / "f").read_bytes().split()[0]) == 240


def test_mapping_shows_what_the_last_lock_holder_wrote(both):
    one, other = both
    with mmap.mmap(other.fileno(), 100, prot=mmap.PROT_READ) as page:
        for number in range(10):
            lock(other, fcntl.LOCK_SH)
            page[0:100]
            lock(other, fcntl.LOCK_UN)
            lock(one)
            os.pwrite(one.fileno(), b"%03d" % number, 50)
            lock(one, fcntl.LOCK_UN)
            lock(other, fcntl.LOCK_SH)
            assert page[50:53] == b"%03d" % number
            lock(other, fcntl.LOCK_UN)


def test_negative_entry_is_looked_up_again_under_a_lock(here, there, both):
    one, other = both
    for number in range(10):
        name = f"journal-{number}"
        assert not (there / name).exists()
        lock(one)
        (here / name).touch()
        lock(one, fcntl.LOCK_UN)
        lock(other)
        assert (there / name).exists()
        lock(other, fcntl.LOCK_UN)


def test_many_waiting_processes_do_not_block_the_release(here, there):
    """More than a mount accepts other requests at the same time."""
    (here / "f").touch()
    count = 1200
    with (
        open(here / "f", "r+b") as file,
        Child(
            """
import threading
count = int(sys.argv[2])
def wait(place):
    file = os.open(sys.argv[1], os.O_RDWR)
    fcntl.flock(file, fcntl.LOCK_SH)
    os.close(file)
threading.stack_size(256 << 10)
threads = [threading.Thread(target=wait, args=(n,)) for n in range(count)]
for thread in threads:
    thread.start()
ready()
for thread in threads:
    thread.join()
ready("done")
""",
            here / "f",
            count,
        ) as child,
    ):
        fcntl.flock(file, fcntl.LOCK_EX)
        assert child.read_line() == "ready"
        time.sleep(1)
        assert (here / "f").stat().st_size == 0, "the mount answers"
        (here / "other").write_bytes(b"and writes")
        fcntl.flock(file, fcntl.LOCK_UN)
        assert child.read_line() == "done"


def test_locks_and_waiters_survive_the_death_of_the_shard(pool, here, there):
    (here / "f").write_bytes(b"0")
    with open(here / "f", "r+b", buffering=0) as file, Child(WAIT, there / "f", "lockf") as child:
        fcntl.lockf(file, fcntl.LOCK_EX)
        assert child.read_line() == "ready" and child.read_line(0.2) is None
        for _ in range(3):
            kill_shard(pool)
            assert child.read_line(1) is None
        file.write(b"after three deaths")
        fcntl.lockf(file, fcntl.LOCK_UN)
        assert child.read_line() == "has it"
        assert _is_refused(lock, file)
        child.go()
        child.end()
    assert (there / "f").read_bytes() == b"after three deaths"


def kill_shard(pool):
    """Kill the metadata daemon once it serves, also if it was killed just before."""
    pids = []
    wait_until(lambda: pids.append(serving_shard(pool)) or pids[-1], "a shard that serves")
    os.kill(pids[-1], signal.SIGKILL)


def serving_shard(pool):
    """Process id of the shard; None while it does not serve."""
    state = PoolDirectory(pool.directory).state_of(process_name(1, 0))
    serves = state is not None and state.state == "serving" and identity_of(state.pid) is not None
    return state.pid if serves else None


def test_end_of_a_mount_ends_waiting_and_releases_locks(pool, here, mounted):
    (here / "f").touch()
    ending = Mounted(pool.directory, pool.directory.parent / "m-ending", "--drain-s", "0.5")
    place = ending.place / here.relative_to(mounted.place) / "f"
    with (
        open(here / "f", "r+b") as file,
        Child(WAIT, place, "lockf") as waits,
        Child(
            """
with open(sys.argv[1], "r+b") as file:
    fcntl.lockf(file, fcntl.LOCK_EX, 1, 100)
    ready()
    pause()
""",
            place,
        ) as holds,
    ):
        fcntl.lockf(file, fcntl.LOCK_EX, 1, 0)
        assert holds.read_line() == "ready" and waits.read_line() == "ready" and waits.read_line(0.3) is None
        assert _is_refused(lock, file, fcntl.LOCK_EX, 1, 100)
        ending.end()
        assert waits.process.wait(120) == 1 and "OSError" in waits.process.stderr.read()
        wait_until(
            lambda: not _is_refused(lock, file, fcntl.LOCK_EX, 1, 100), "the lock of the mount that ended"
        )


# -- programs ----------------------------------------------------------------------------------------------------------------

TRANSFER = """
place, who, count = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
db = sqlite3.connect(place, timeout=60, isolation_level=None)
for number in range(count):
    db.execute("begin immediate")
    a, b = (who + number) % 10, (who + 3 * number + 1) % 10
    (has,), = db.execute("select amount from account where id = ?", (a,))
    db.execute("update account set amount = ? where id = ?", (has - 1, a))
    db.execute("update account set amount = amount + 1 where id = ?", (b,))
    db.execute("insert into done values (?, ?, ?)", (who, number, "x" * 500))
    db.execute("commit")
    ready(str(number))
db.close()
"""


def accounts(place):
    db = sqlite3.connect(place, timeout=60)
    db.execute("create table account (id integer primary key, amount integer)")
    db.execute("create table done (who integer, number integer, padding text)")
    db.executemany("insert into account values (?, 100)", ((n,) for n in range(10)))
    db.commit()
    db.close()


def check_accounts(place):
    db = sqlite3.connect(place, timeout=60)
    try:
        assert db.execute("pragma integrity_check").fetchall() == [("ok",)]
        assert db.execute("select sum(amount) from account").fetchone() == (1000,)
        return db.execute("select who, number from done order by 1, 2").fetchall()
    finally:
        db.close()


@pytest.mark.t3
@pytest.mark.parametrize("journal", ["delete", "truncate", "persist"])
def test_sqlite_on_two_mounts_loses_no_transaction(here, there, journal):
    accounts(here / "db")
    program = TRANSFER.replace(
        'db.execute("begin', f'db.execute("pragma journal_mode={journal}")\n    db.execute("begin', 1
    )
    with (
        Child(program, here / "db", 1, 25) as a,
        Child(program, there / "db", 2, 25) as b,
        Child(program, here / "db", 3, 25) as c,
        Child(program, there / "db", 4, 25) as d,
    ):
        for child in (a, b, c, d):
            child.end(120)
    expected = [(who, number) for who in range(1, 5) for number in range(25)]
    assert check_accounts(here / "db") == expected == check_accounts(there / "db")


@pytest.mark.t3
def test_killed_sqlite_processes_leave_whole_transactions(here, there):
    accounts(here / "db")
    committed = {}
    for round_, place in enumerate([here, there] * 3, 1):
        with (
            Child(TRANSFER, place / "db", 10 + round_, 10_000) as victim,
            Child(TRANSFER, (there if place is here else here) / "db", 20 + round_, 15) as other,
        ):
            for _ in range(4):
                committed[10 + round_] = int(victim.read_line())
            victim.process.kill()
            other.end(120)
            committed[20 + round_] = 14
    found = check_accounts(there / "db")
    for who, last in committed.items():
        numbers = [number for its, number in found if its == who]
        assert numbers == list(range(len(numbers))) and len(numbers) > last


@pytest.mark.t3
@needs("git")
def test_git_on_two_mounts_loses_no_commit(pool, tmp_path):
    """Two clones in each mount push to one repository in the pool; a refused one fetches and retries. git locks its
    changes, not its reads: new and removed names must be visible immediately, on mounts with default options.
    """
    here, there = (pool.mount(pool.directory.parent / name).place / "git" for name in ("m-git-1", "m-git-2"))
    here.mkdir()

    def git(*words, cwd):
        settings = ("-c", "user.name=t", "-c", "user.email=t@e", "-c", "gc.auto=0")
        return subprocess.run(
            ["git", *settings, *words], cwd=cwd, text=True, capture_output=True, timeout=240
        )

    git("init", "--bare", "-b", "main", "repo", cwd=here)
    first = tmp_path / "first"
    git("clone", here / "repo", first, cwd=tmp_path)
    (first / "README").write_text("shared\n")
    git("add", ".", cwd=first)
    git("commit", "-m", "begin", cwd=first)
    assert not git("push", "origin", "HEAD:main", cwd=first).returncode
    failures = []

    def work(place, who):
        try:
            assert not git("clone", place / "repo", place / who, cwd=place).returncode
            for number in range(6):
                (place / who / f"{who}-{number}").write_text(f"{who} {number}\n" * 100)
                git("add", ".", cwd=place / who)
                assert not git("commit", "-m", f"{who} {number}", cwd=place / who).returncode
                for _ in range(200):
                    done = git("push", "origin", "HEAD:main", cwd=place / who)
                    if not done.returncode:
                        break
                    pulled = git("pull", "--rebase", "origin", "main", cwd=place / who)
                    if pulled.returncode and "cannot lock ref" not in pulled.stderr:
                        raise AssertionError(pulled.stdout + pulled.stderr)
                else:
                    raise AssertionError(done.stderr)
        except BaseException as error:
            failures.append((who, error))

    places = ((here, "a"), (there, "b"), (here, "c"), (there, "d"))
    threads = [threading.Thread(target=work, args=at) for at in places]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    for place in (here, there):
        checked = git("fsck", "--full", "--strict", cwd=place / "repo")
        assert not checked.returncode and "error" not in checked.stderr, checked.stderr
        log = git("log", "--format=%s", "main", cwd=place / "repo").stdout.splitlines()
        assert sorted(log) == sorted(["begin", *(f"{who} {number}" for who in "abcd" for number in range(6))])


def test_file_info_shows_lock_holders_and_waiters(pool, here, both, mounted):
    one, other = both
    lock(one, fcntl.LOCK_SH, 10, 20)
    fcntl.flock(other, fcntl.LOCK_EX)
    place = f"{pool.directory}:/{(here / 'f').relative_to(mounted.place)}"
    with Child(WAIT, here / "f", "flock") as child:
        assert child.read_line() == "ready" and child.read_line(0.3) is None
        said = nvpool("file", "info", place).stdout
        assert f"locked: shared (fcntl, bytes 20 to 29), process {os.getpid()} of mount" in said
        assert f"locked: exclusive (flock), process {os.getpid()} of mount" in said
        assert f"waited for: exclusive (flock), process {child.process.pid} of mount" in said
        found = json.loads(nvpool("file", "info", place, "--json").stdout)["locks"]
    assert sorted((one["kind"], one["mode"], one["first"], one["last"], one["waits"]) for one in found) == [
        ("fcntl", "shared", 20, 29, False),
        ("flock", "exclusive", 0, None, False),
        ("flock", "exclusive", 0, None, True),
    ]
    lock(one, fcntl.LOCK_UN)
    fcntl.flock(other, fcntl.LOCK_UN)
    counters = json.loads(nvpool("status", pool.directory, "--json").stdout)["processes"]
    assert next(process["counters"]["locks"] for process in counters if process["role"] == "meta") == 0


def test_invalid_lock_is_refused(here, both):
    one, _ = both
    with open(here / "f", "rb") as reader:
        assert refused(fcntl.lockf, reader, fcntl.LOCK_EX) == errno.EBADF
        fcntl.lockf(reader, fcntl.LOCK_SH)
    assert refused(lock, one, fcntl.LOCK_EX, 1, -1) == errno.EINVAL
