"""One supervised process: started, adopted, restarted, stopped. The programs here are three lines of Python."""

import asyncio
import json
import os
import signal
import subprocess
import sys

import pytest

from nvpool.core.clock import SYSTEM_CLOCK, ManualClock
from nvpool.core.config import SupervisorConfig
from nvpool.host.pool_directory import PoolDirectory
from nvpool.host.process_identity import identity_of, runs
from nvpool.node import child_process as child_module
from nvpool.node.child_process import Child

SERVES = """if True:
    import os, signal, sys, time
    from nvpool.host.pool_directory import Flock, PoolDirectory, announcement
    from nvpool.core.errors import InUse
    directory = PoolDirectory(sys.argv[1])
    with open(directory.path / "starts", "a") as file:
        file.write(f"{os.getpid()}\\n")
    try:
        lock = Flock.take(directory.run / "meta-1.lock", "shard 1")
    except InUse:
        sys.exit(75)
    directory.announce("meta-1", announcement("meta", now_ms=7, number=1))
"""
QUICK = SupervisorConfig(restart_delay_min_s=0.01, restart_delay_max_s=0.1, healthy_s=30)


@pytest.fixture
def directory(tmp_path):
    found = PoolDirectory(tmp_path)
    found.run.mkdir()
    yield found
    for pid in starts(found):  # a failed test leaves no processes
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            pass


def starts(directory: PoolDirectory) -> list[int]:
    path = directory.path / "starts"
    return [int(line) for line in path.read_text().split()] if path.exists() else []


def started(program: str, *arguments: str) -> subprocess.Popen:
    return subprocess.Popen([sys.executable, "-c", program, *arguments], stdin=subprocess.PIPE)


def child_of(directory: PoolDirectory, program: str = SERVES + "    signal.pause()") -> Child:
    return Child(
        directory, "meta", 1, [sys.executable, "-c", program, str(directory.path)], QUICK, SYSTEM_CLOCK
    )


async def until(holds, what: str) -> None:
    async with asyncio.timeout(120):
        while not holds():  # noqa: ASYNC110  (files and processes emit no event)
            await asyncio.sleep(0.01)
    assert holds(), what


def scenario(run):
    """Run `run(stopping, hurry)` in a loop; a supervising task that failed meanwhile fails the test."""

    async def whole():
        await run(asyncio.Event(), asyncio.Event())

    asyncio.run(whole())


def test_dead_process_is_restarted_and_stops_on_request(directory):
    async def run(stopping, hurry):
        child = child_of(directory)
        keeper = asyncio.ensure_future(child.keep(stopping))
        await until(lambda: child.state == "serving", "it serves")
        first = child.pid
        os.kill(first, signal.SIGKILL)
        await until(lambda: child.state == "serving" and child.pid not in (0, first), "another one serves")
        assert (child.restarts, child.last_end, child.since_ms) == (1, "killed by SIGKILL", 7)
        last = child.pid
        stopping.set()
        await keeper
        await child.end(5, hurry)
        assert identity_of(last) is None and child.state == "stopped" and starts(directory) == [first, last]

    scenario(run)


def test_restart_delay_rises_with_each_death(directory):
    async def run(stopping, hurry):
        child = child_of(directory, "import sys; sys.exit(3)")
        keeper = asyncio.ensure_future(child.keep(stopping))
        await until(lambda: child.restarts >= 3, "it is tried again")
        assert child.last_end == "exit code 3"
        stopping.set()
        await asyncio.wait_for(keeper, 120)
        assert child.state == "stopped" and child.pid == 0

    scenario(run)


def test_restart_delay_is_reset_after_healthy_service(directory, monkeypatch):
    waits = []

    async def no_wait(event, wait_s):
        waits.append(wait_s)

    monkeypatch.setattr(child_module, "wait_until_set", no_wait)

    async def run(stopping, hurry):
        clock, timing = (
            ManualClock(),
            SupervisorConfig(restart_delay_min_s=1, restart_delay_max_s=60, healthy_s=30),
        )
        program = SERVES + "    signal.pause()"
        child = Child(
            directory, "meta", 1, [sys.executable, "-c", program, str(directory.path)], timing, clock
        )
        keeper = asyncio.ensure_future(child.keep(stopping))
        for serves_s in (0, 29, 0, 30, 0, 31):
            await until(lambda: child.state == "serving", "it serves")
            clock.advance(serves_s)
            killed = child.pid
            os.kill(killed, signal.SIGKILL)
            await until(lambda: child.pid not in (0, killed), "another one is started")  # noqa: B023
            clock.advance(100)  # a slow start does not count as service
        assert waits == [1, 2, 4, 1, 2, 1]
        stopping.set()
        await keeper
        await child.end(5, hurry)

    scenario(run)


def test_restarted_process_inherits_memory_unless_adopted(
    directory,
):
    program = (
        SERVES
        + """
    memory = int(sys.argv[2])
    size = os.fstat(memory).st_size
    os.pwrite(memory, b"x", size)
    with open(directory.path / "seen", "a") as file:
        file.write(f"{size} {sys.argv[3]}\\n")
    signal.pause()
"""
    )

    def seen():
        path = directory.path / "seen"
        return [line.split() for line in path.read_text().splitlines()] if path.exists() else []

    async def run(stopping, hurry):
        clock = ManualClock()
        child = Child(
            directory,
            "meta",
            1,
            [sys.executable, "-c", program, str(directory.path)],
            QUICK,
            clock,
            keeps_memory=True,
        )
        keeper = asyncio.ensure_future(child.keep(stopping))
        for count in (1, 2, 3):
            await until(lambda: len(seen()) == count, "it has looked")  # noqa: B023
            clock.advance(1)
            os.kill(child.pid, signal.SIGKILL)
        await until(lambda: len(seen()) == 4, "it has looked")
        assert seen() == [[str(count), "1000.0"] for count in range(4)]
        stopping.set()
        await keeper
        await child.end(5, hurry)
        other = started(SERVES + "    signal.pause()", str(directory.path))
        await until(
            lambda: len(starts(directory)) == 5 and directory.state_of("meta-1").pid == other.pid,
            "another one serves",
        )
        child = Child(
            directory,
            "meta",
            1,
            [sys.executable, "-c", program, str(directory.path)],
            QUICK,
            clock,
            keeps_memory=True,
        )
        stopping.clear()
        keeper = asyncio.ensure_future(child.keep(stopping))
        await until(lambda: child.state == "serving" and child.adopted, "it is adopted")
        clock.advance(1)
        other.kill()
        other.communicate()
        await until(lambda: len(seen()) == 5, "it has looked")
        assert seen()[4] == ["0", str(clock.boottime_s())]
        stopping.set()
        await keeper
        await child.end(5, hurry)

    scenario(run)


def test_reason_of_an_exit_is_kept_until_it_serves(directory):
    directory.log.mkdir()
    says = f"""if True:
        import os, sys
        from nvpool.runtime.logging_setup import start_log, log
        from pathlib import Path
        start_log("meta-1", "info", Path({str(directory.log)!r}) / "meta-1.log")
        if not os.path.exists(sys.argv[1] + "/mended"):
            log.error("not this one, %s", "mend it")
            log.error("it has format 7; use the version that made it")
            sys.exit(1)
"""

    async def run(stopping, hurry):
        child = child_of(directory, says + SERVES + "    signal.pause()")
        keeper = asyncio.ensure_future(child.keep(stopping))
        await until(lambda: child.restarts, "it has ended")
        assert child.reason == "it has format 7; use the version that made it"
        (directory.path / "mended").touch()
        await until(lambda: child.state == "serving", "it serves")
        assert child.reason == ""
        stopping.set()
        await keeper
        await child.end(5, hurry)

    scenario(run)


def test_log_line_is_kept_with_any_bytes(tmp_path):
    path = tmp_path / "meta-1.log"
    code = f"""if True:
        import os, sys
        from nvpool.runtime.logging_setup import start_log, log
        from pathlib import Path
        start_log("meta-1", "info", Path({str(path)!r}), form=sys.argv[1])
        log.info("of the drive %s", os.fsdecode(b"/mnt/\\xff\\n"))
    """
    for form in ("text", "json"):
        subprocess.run([sys.executable, "-c", code, form], check=True, env={**os.environ, "LC_ALL": "C"})
    text, record = path.read_text().splitlines()[0], json.loads(path.read_text().splitlines()[-1])
    assert "of the drive /mnt/\\udcff" in text and record["message"] == "of the drive " + os.fsdecode(
        b"/mnt/\xff\n"
    )


def test_running_process_is_adopted(directory):
    async def run(stopping, hurry):
        running = started(SERVES + "    signal.pause()", str(directory.path))
        await until(lambda: directory.state_of("meta-1") is not None, "it announced itself")
        child = child_of(directory)
        keeper = asyncio.ensure_future(child.keep(stopping))
        await until(lambda: child.state == "serving", "it serves")
        assert child.adopted and child.pid == running.pid and starts(directory) == [running.pid]
        running.kill()  # an adopted process that dies is restarted like any other
        running.wait()
        await until(
            lambda: child.state == "serving" and child.pid not in (0, running.pid), "another one serves"
        )
        assert not child.adopted and child.restarts == 1
        stopping.set()
        await keeper
        await child.end(5, hurry)

    scenario(run)


def test_of_two_concurrent_starts_one_serves(directory):
    async def run(stopping, hurry):
        children = [child_of(directory) for _ in range(2)]
        keepers = [asyncio.ensure_future(child.keep(stopping)) for child in children]
        await until(lambda: all(child.state == "serving" for child in children), "both keep the same")
        assert len({child.pid for child in children}) == 1
        assert sum(child.restarts for child in children) == 0, "a lock that is held is not a death"
        stopping.set()
        await asyncio.gather(*keepers)
        for child in children:
            await child.end(5, hurry)

    scenario(run)


def test_stale_pid_in_a_lock_file_is_ignored(directory):
    async def run(stopping, hurry):
        unrelated = started("input()")
        identity = identity_of(unrelated.pid)
        (directory.run / "meta-1.lock").write_text(f"{unrelated.pid} {identity.start - 1} {identity.boot}\n")
        child = child_of(directory)
        keeper = asyncio.ensure_future(child.keep(stopping))
        await until(lambda: child.state == "serving", "it serves")
        assert child.pid != unrelated.pid
        stopping.set()
        await keeper
        await child.end(5, hurry)
        assert runs(identity), "an unrelated process is never signalled"
        unrelated.communicate(b"\n", timeout=10)

    scenario(run)


def test_process_that_ignores_sigterm_is_killed(directory):
    deaf = SERVES + "    signal.signal(signal.SIGTERM, signal.SIG_IGN)\n    while True: signal.pause()"

    async def run(stopping, hurry):
        for drain_s, hurried in ((0.2, False), (60, True)):
            stopping.clear()
            child = child_of(directory, deaf)
            keeper = asyncio.ensure_future(child.keep(stopping))
            await until(lambda child=child: child.state == "serving", "it serves")
            pid = child.pid
            stopping.set()
            await keeper
            if hurried:
                asyncio.get_running_loop().call_later(0.1, hurry.set)
            async with asyncio.timeout(120):
                await child.end(drain_s, hurry)
            assert identity_of(pid) is None

    scenario(run)


def test_suspended_process_can_be_stopped(directory):
    async def run(stopping, hurry):
        child = child_of(directory)
        keeper = asyncio.ensure_future(child.keep(stopping))
        await until(lambda: child.state == "serving", "it serves")
        pid = child.pid
        child.signal(signal.SIGSTOP)
        stopping.set()
        await keeper
        async with asyncio.timeout(120):
            await child.end(0.2, hurry)
        assert identity_of(pid) is None

    scenario(run)


def test_started_process_inherits_no_descriptor_or_session(directory):
    async def run(stopping, hurry):
        inherited = os.open(directory.path, os.O_RDONLY)
        os.set_inheritable(inherited, True)
        report = SERVES + (
            "    import json\n    (directory.path / 'report').write_text(json.dumps([sorted(int(n) for n in "
            "os.listdir('/proc/self/fd') if int(n) < 100 and int(n) > 2 and "
            "os.path.isdir(f'/proc/self/fd/{n}')), os.getsid(0) == os.getpid(), os.getcwd()]))\n"
            "    signal.pause()"
        )
        child = child_of(directory, report)
        keeper = asyncio.ensure_future(child.keep(stopping))
        await until(
            lambda: (directory.path / "report").exists() and (directory.path / "report").read_text(),
            "it reports",
        )
        os.close(inherited)
        descriptors, own_session, cwd = json.loads((directory.path / "report").read_text())
        assert own_session and cwd == "/" and inherited not in descriptors
        stopping.set()
        await keeper
        await child.end(5, hurry)

    scenario(run)
