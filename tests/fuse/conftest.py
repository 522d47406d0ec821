"""A real pool, really mounted: one for each test process, and a directory for each test.

NVPOOL_TEST_FLOOR=1 mounts the in-memory floor instead of a pool: a failure there too is not the pool's fault.
NVPOOL_TEST_OLD_KERNEL=1 mounts as on Linux before 6.9, which does not resend requests.
"""

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from pathlib import Path

import pytest

from nvpool.core.programs import Program, command

ROOT = Path(__file__).resolve().parents[2]
FLOOR = bool(os.environ.get("NVPOOL_TEST_FLOOR"))
OLD_KERNEL = bool(os.environ.get("NVPOOL_TEST_OLD_KERNEL"))


def why_no_mount() -> str:
    if os.geteuid():
        return "only root can mount here"
    if not os.path.exists("/dev/fuse"):
        return "there is no /dev/fuse"
    try:
        os.close(os.open("/dev/fuse", os.O_RDWR))
    except OSError as error:
        return f"/dev/fuse cannot be opened: {error.strerror}"
    return ""


NO_MOUNT = why_no_mount()
needs_mount = pytest.mark.skipif(bool(NO_MOUNT), reason=NO_MOUNT or "-")


def pytest_generate_tests(metafunc):
    """Each test runs on the engines that its module lists in ENGINES; without the list, on the default one.

    Where a module lists several, those beside the default one belong to tier T3.
    """
    if "engine" in metafunc.fixturenames:
        engines = getattr(metafunc.module, "ENGINES", ("kernel",))
        marked = [
            pytest.param(name, marks=pytest.mark.t3) if name != "kernel" and len(engines) > 1 else name
            for name in engines
        ]
        metafunc.parametrize("engine", marked, indirect=True, scope="session")


@pytest.fixture(scope="session")
def engine(request):
    return request.param


def pytest_collection_modifyitems(items):
    for item in items:
        if "mount" in item.keywords and NO_MOUNT:
            item.add_marker(pytest.mark.skip(reason=NO_MOUNT))


def needs(*programs):
    missing = [program for program in programs if shutil.which(program) is None]
    return pytest.mark.skipif(
        bool(missing), reason=f"{', '.join(missing)} not installed (make setup installs it)"
    )


def wait_until(condition, what, limit_s=120.0):
    end = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < end, f"{what}: not within {limit_s} s"
        time.sleep(0.02)


class Mounted:
    """A mount daemon as a process. `log` is its log file."""

    def __init__(self, pool, place, *options):
        self.place = Path(place)
        self.place.mkdir(parents=True, exist_ok=True)
        self.log = Path(f"{place}.log")
        words = command(Program.MOUNT, *options, str(pool), str(place))
        if pool is None:
            words = [sys.executable, str(ROOT / "bench" / "fuse_floor.py"), *options, str(place)]
        with open(self.log, "ab") as said:
            self.process = subprocess.Popen(
                words, stdin=subprocess.DEVNULL, stdout=said, stderr=said, cwd="/", start_new_session=True
            )
        try:
            wait_until(
                lambda: self.process.poll() is not None or os.path.ismount(self.place), f"mount of {place}"
            )
            assert self.process.poll() is None, self.log.read_text()
        except BaseException:
            self.end()
            raise

    def end(self, number=signal.SIGTERM):
        """The exit code. The mount is gone afterwards in any case."""
        if self.process.poll() is None:
            self.process.send_signal(number)
        try:
            return self.process.wait(120)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
            raise
        finally:
            while is_mounted(self.place):
                subprocess.run(["umount", "-l", str(self.place)], check=True)


def is_mounted(place):
    with open("/proc/self/mountinfo") as file:
        return any(line.split(" ")[4] == str(place) for line in file)


def nvpool(*words, **options):
    return subprocess.run(
        command(Program.CLI, *map(str, words)),
        check=True,
        capture_output=True,
        text=True,
        cwd="/",
        timeout=240,
        **options,
    )


class Pool:
    """A pool of one node in a directory, as `nvpool dev up` creates it."""

    def __init__(self, directory):
        self.directory = Path(directory)
        self.mounts = []
        self.by_engine = {}
        if not FLOOR:
            from nvpool.testing.env.pool import PLAIN_TCP

            config = self.directory.with_suffix(".toml")
            config.write_text(PLAIN_TCP)  # for mounts with a transport other than the pool's own choice
            nvpool("dev", "up", self.directory, "--size", "4G", "--size", "2G", "--config", config)

    def mount(self, place, *options):
        if OLD_KERNEL and "--workers" not in options:
            options = ("--no-resend", *options)
        mounted = Mounted(None if FLOOR else self.directory, place, *options)
        self.mounts.append(mounted)
        return mounted

    def mounted_by(self, engine):
        if engine not in self.by_engine:
            self.by_engine[engine] = self.mount(self.directory.parent / f"m-{engine}", "--engine", engine)
        return self.by_engine[engine]

    def close(self):
        for mounted in self.mounts:
            with contextlib.suppress(Exception):
                mounted.end()
        if not FLOOR:
            nvpool("dev", "down", self.directory)


@pytest.fixture(scope="session")
def pool():
    if NO_MOUNT:
        pytest.skip(NO_MOUNT)
    place = Path(tempfile.mkdtemp(prefix="nvpool-fuse-"))
    place.chmod(0o755)
    made = Pool(place / "pool")
    try:
        yield made
    finally:
        made.close()
        shutil.rmtree(place)


@pytest.fixture(scope="session")
def mounted(pool, engine):
    return pool.mounted_by(engine)


@pytest.fixture
def here(mounted, request):
    """An empty directory on the mount; files that a test leaves in it are removed."""
    assert mounted.process.poll() is None, mounted.log.read_text()
    place = mounted.place / f"{request.node.name[:80].replace('/', '_')}-{os.getpid()}"
    place.mkdir()
    place.chmod(0o777)
    yield place
    shutil.rmtree(place)
    assert "Traceback" not in mounted.log.read_text(errors="replace")


@pytest.fixture(scope="session")
def second(pool, mounted):
    """The same pool, mounted a second time by another process: for caches, another node."""
    if FLOOR:
        pytest.skip("the floor has one mount")
    if not hasattr(pool, "other"):
        pool.other = pool.mount(pool.directory.parent / "m2")
    return pool.other


@pytest.fixture(scope="module")
def own():
    """A pool for the tests of one module, which kill its daemons."""
    place = Path(tempfile.mkdtemp(prefix="nvpool-own-"))
    made = Pool(place / "pool")
    yield made
    nvpool("fsck", made.directory)  # fails if it finds a problem
    made.close()
    shutil.rmtree(place)


def as_user(uid, gid, call, groups=()):
    """The result or the exception of `call` in a process of that user. `repr` must be able to carry the result."""
    read, write = os.pipe()
    child = os.fork()
    if not child:
        os.close(read)
        try:
            os.setgroups(groups)
            os.setresgid(gid, gid, gid)
            os.setresuid(uid, uid, uid)
            os.umask(0o022)
            try:
                said = ("returned", call())
            except OSError as error:
                said = ("raised", error.errno)
        except BaseException:
            said = ("broke", traceback.format_exc())
        os.write(write, repr(said).encode())
        os._exit(0)
    os.close(write)
    with open(read, "rb") as channel:
        text = channel.read()
    os.waitpid(child, 0)
    how, what = eval(text)
    if how == "raised":
        raise OSError(what, os.strerror(what))
    assert how == "returned", what
    return what
