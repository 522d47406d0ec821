"""Every command of the CLI: help, errors for wrong arguments and for paths without a pool, and errors as JSON."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import time

import click
import pytest

from nvpool.cli import main as cli_main
from nvpool.cli import pool_suggestions
from nvpool.cli.pool_path import PlaceType
from nvpool.core.errors import AccessDenied, InvalidRequest, NotFound, with_pool
from nvpool.core.programs import Program, command
from nvpool.host.pool_directory import FORMAT_TEXT


def leaves(command: click.Command, words: tuple[str, ...] = ()):
    """Yield the words and the command object of each command that is not a group."""
    if isinstance(command, click.Group):
        if command.invoke_without_command:
            yield words, command
        for name in command.list_commands(click.Context(command)):
            yield from leaves(command.get_command(click.Context(command), name), (*words, name))
    else:
        yield words, command


COMMANDS = {" ".join(words): command for words, command in leaves(cli_main.cli)}
ELSEWHERE = {
    "completion",
    "version",
    "help",
    "config show",
    "config sample",
    "config check",
    "dev up",
    "dev down",
    "pool create",
    "node join",
    "client join",
    "encryption key",
    "doctor",
    "doctor rdma",
    "umount",
    "serve",
    "pool destroy",
}
"""These take no POOL: the last three a directory or mount point."""
OF_POOLS = [words for words in COMMANDS if words not in ELSEWHERE]


def words_for(command: click.Command, pool: str, existing: str) -> list[str]:
    """Arguments that are correct except for the pool."""
    words = []
    for parameter in command.params:
        if isinstance(parameter, click.Argument) and parameter.name == "pool":
            words.append(pool)
        elif isinstance(parameter, click.Argument):
            kind = parameter.type
            words.append(
                f"{pool}:/x"
                if isinstance(kind, PlaceType)
                else existing
                if isinstance(kind, click.Path)
                else kind.choices[0]
                if isinstance(kind, click.Choice)
                else "1"
            )
    needed = {"resize": ["--size", "1G"], "set": ["--trash", "7d"], "recover-etcd": ["--yes"]}
    return words + (
        ["--replicas", "1"]
        if command.name == "set" and "place" in [p.name for p in command.params]
        else needed.get(command.name, [])
    )


def run(capfd, *arguments: str) -> tuple[int, str, str]:
    code = cli_main.main(list(arguments))
    out, err = capfd.readouterr()
    return code, out, err


@pytest.mark.parametrize("words", COMMANDS)
def test_help_has_an_example(words):
    command = COMMANDS[words]
    assert command.help and len(command.help.split("\n")[0]) > 10
    assert re.search(r"examples?:", command.epilog or ""), f"nvpool {words} --help has no example"
    assert f"nvpool {words}" in (command.epilog or ""), f"the example of nvpool {words} is of another command"


@pytest.mark.parametrize("words", COMMANDS)
def test_unknown_option_is_a_usage_error_also_in_json(capfd, words):
    if words == "help":
        return
    code, out, err = run(capfd, *words.split(), "--no-such-option", "--json")
    assert code == 2 and "No such option" in err
    error = json.loads(out)["error"]
    assert error["code"] == "usage" and error["exit_code"] == 2 and "no-such-option" in error["message"]
    assert error["remedy"] == f"nvpool {words} --help"


@pytest.mark.parametrize("words", OF_POOLS)
def test_missing_argument_is_named(capfd, words, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("NVPOOL_POOL", raising=False)
    code, out, err = run(capfd, *words.split())
    if words in ("status", "top", "metrics"):
        assert code == 1 and f"{tmp_path} is not a pool directory" in err
    else:
        assert code == 2 and "Missing argument" in err and "--help" in err
    assert not out


@pytest.mark.parametrize("words", [*OF_POOLS, "serve", "pool destroy"])
def test_mistyped_pool_gets_no_offer_to_create_it(capfd, words, tmp_path):
    existing = tmp_path / "existing"
    existing.write_text("")
    if words in ("mount", "bench"):
        existing = tmp_path
    there = tmp_path / "training"
    there.mkdir()
    (there / "FORMAT").write_text(FORMAT_TEXT)
    wrong = str(tmp_path / "trainig")
    arguments = (
        [wrong] if words in ("serve", "pool destroy") else words_for(COMMANDS[words], wrong, str(existing))
    )
    with_json = any("--json" in parameter.opts for parameter in COMMANDS[words].params)
    code, out, err = run(capfd, *words.split(), *arguments, *(["--json"] if with_json else []))
    assert code == 1, err
    assert f"{wrong} does not exist" in err and f"did you mean {there}?" in err
    assert "pool create" not in err and "dev up" not in err
    assert len(err.strip().splitlines()) == 1, "there was output before the refusal"
    if with_json:
        error = json.loads(out)["error"]
        assert (
            error["message"] == f"{wrong} does not exist"
            and error["code"] == "NotFound"
            and error["exit_code"] == 1
        )
        assert str(there) in error["remedy"]
    else:
        assert not out


@pytest.mark.few(6)
@pytest.mark.parametrize("words", OF_POOLS)
def test_stopped_pool_error_names_the_start_command(capfd, words, tmp_path, stopped, monkeypatch):
    from nvpool.cli import pool_connection
    from nvpool.cli import pool_path as place

    monkeypatch.setattr(pool_connection, "REACH_S", 0.3)
    monkeypatch.setattr(place, "REACH_S", 0.3)
    existing = tmp_path / "existing"
    existing.write_text("")
    if words in ("mount", "bridge", "top", "trash purge", "audit"):
        return  # these wait for the pool, as designed; the audit log is read without a running pool
    arguments = words_for(COMMANDS[words], str(stopped), str(tmp_path if words == "bench" else existing))
    waits = {"status": ["--wait", "0.3"], "metrics": ["--wait", "0.1"]}.get(words, [])
    code, out, err = run(capfd, *words.split(), *arguments, *waits, "--json")
    assert code == 3, err
    assert f"start it with: nvpool serve {stopped}" in err
    error = json.loads(out)["error"]
    assert (error["code"], error["exit_code"]) == ("Unreachable", 3)
    assert error["remedy"] == f"start it with: nvpool serve {stopped}"


@pytest.fixture(scope="module")
def stopped(tmp_path_factory):
    """The directory of a pool that is not running."""
    place = tmp_path_factory.mktemp("stopped")
    (place / "drive").mkdir()
    assert cli_main.main(["pool", "create", str(place / "pool"), "--drive", f"{place / 'drive'}:64M"]) == 0
    return place / "pool"


def test_running_pools_are_suggested(monkeypatch, tmp_path):
    monkeypatch.setattr(pool_suggestions, "running", lambda: ["/srv/models", "10.0.0.1:17512"])
    assert (
        pool_suggestions.remedy_for(str(tmp_path / "x"))
        == "pools on this machine: /srv/models, 10.0.0.1:17512"
    )
    assert pool_suggestions.remedy_for("/srv/model").startswith("did you mean /srv/models?")
    monkeypatch.setattr(pool_suggestions, "running", list)
    assert "no pool runs on this machine" in pool_suggestions.remedy_for(str(tmp_path / "x"))


@pytest.mark.parametrize("words", ["config show", "config check"])
def test_config_error_names_the_pools_of_the_machine(capfd, tmp_path, words):
    for path in (tmp_path / "mistyped", tmp_path):
        code, out, err = run(capfd, *words.split(), str(path))
        assert code in (1, 2) and not out
        assert str(path) in err and "config sample" not in err
        assert re.search(r"pools? (on|runs on) this machine", err), "pools, or that there is none, are named"


def test_doctor_with_a_pool_argument_names_the_option(capfd):
    code, _, err = run(capfd, "doctor", "/srv/pool")
    assert code == 2 and "'/srv/pool'" in err and "nvpool doctor --pool POOL" in err


def test_error_object_separates_message_and_remedy(capfd, monkeypatch):
    def refuse(*_, **__):
        raise NotFound("there is no x", remedy="use y")

    monkeypatch.setattr(cli_main.cli, "main", refuse)
    code, out, err = run(capfd, "version", "--json")
    assert json.loads(out) == {
        "error": {"message": "there is no x", "code": "NotFound", "exit_code": 1, "remedy": "use y"}
    }
    assert (code, err) == (1, "nvpool: there is no x; use y\n")


NO_NODE = "there is no node 9; `nvpool node ls POOL` lists them"
IN_USE = "drive 3 holds chains; first: nvpool drive drain POOL 3 --wait   or, if it is lost: nvpool drive remove POOL 3 --lost"


@pytest.mark.parametrize(
    "words",
    [("node", "remove", "{}", "9"), ("drive", "ls", "{}"), ("dir", "show", "{}:/x"), ("status", "{}")],
)
@pytest.mark.parametrize("said", [NO_NODE, IN_USE])
def test_remedy_names_the_pool_of_the_call(capfd, monkeypatch, words, said):
    async def refuse(*_, **__):
        raise InvalidRequest(said)

    for name in ("ask", "change", "status_of"):
        monkeypatch.setattr(f"nvpool.cli.pool_connection.{name}", refuse)
    monkeypatch.setattr("nvpool.cli.pool_path.ask", refuse)
    monkeypatch.setattr("nvpool.cli.commands.node.ended_drained", lambda *_: None)
    for pool, shown in (
        ("/srv/pool", "/srv/pool"),
        ("/srv/my pool", "'/srv/my pool'"),
        ("10.0.0.1:17512", "10.0.0.1:17512"),
    ):
        code, out, err = run(capfd, *(word.format(pool) for word in words), "--json")
        assert (code, err) == (1, f"nvpool: {said.replace('POOL', shown)}\n")
        reason, _, remedy = said.replace("POOL", shown).partition("; ")
        assert json.loads(out)["error"] | {"code": ""} == {
            "message": reason,
            "remedy": remedy,
            "code": "",
            "exit_code": 1,
        }


def test_remedy_keeps_the_placeholder_without_a_pool(capfd, monkeypatch):
    def refuse(*_, **__):
        raise AccessDenied("this token was used already; make a new one with: nvpool client token POOL")

    monkeypatch.setattr(cli_main.cli, "main", refuse)
    found = json.loads(run(capfd, "version", "--json")[1])["error"]
    assert found["message"] == "this token was used already"
    assert found["remedy"] == "make a new one with: nvpool client token POOL"


def test_pool_replaces_the_placeholder_only_in_commands():
    assert (
        with_pool(
            "POOL is nvpool volume rm POOL v; nvpool dir set POOL:/x --striped, nvpool load NEW_POOL f", "/p"
        )
        == "POOL is nvpool volume rm /p v; nvpool dir set /p:/x --striped, nvpool load NEW_POOL f"
    )
    assert with_pool("nvpool node ls POOL", "") == "nvpool node ls POOL"


@pytest.mark.parametrize(
    "words, paused, to_copy, said",
    [
        (("--resume",), False, 3, "moving goes on"),
        (("--resume",), False, 0, "moving goes on, nothing is to be moved now"),
        (("--resume", "--limit", "1"), False, 3, "moving goes on, limited to 1.00 MiB/s a drive"),
        (("--pause",), True, 3, "moving is paused"),
        ((), False, 3, ""),
    ],
)
def test_rebalance_says_whether_migration_continues(capfd, monkeypatch, words, paused, to_copy, said):
    async def change(*_, **__):
        return {}

    async def status_of(*_, **__):
        return {
            "chains": {
                "full": 1,
                "total": 4,
                "fewer": 0,
                "without": 0,
                "filling": 0,
                "to_copy": to_copy,
                "bytes_left": 1,
                "seconds_left": None,
                "paused": paused,
                "limit_bytes_s": 1 << 20 if "--limit" in words else 0,
            }
        }

    monkeypatch.setattr("nvpool.cli.pool_connection.change", change)
    monkeypatch.setattr("nvpool.cli.pool_connection.status_of", status_of)
    code, out, _ = run(capfd, "pool", "rebalance", "/srv/pool", *words)
    assert code == 0 and out.splitlines()[1:] == ([said] if said else [])
    assert "go on with: nvpool pool rebalance /srv/pool --resume" in out if paused else "POOL" not in out


@pytest.mark.parametrize(
    "error, code, name",
    [
        (OSError(28, "No space left on device", "/x"), 1, "OSError"),
        (KeyboardInterrupt(), 130, "interrupted"),
        (ZeroDivisionError("by 0"), 70, "ZeroDivisionError"),
        (click.Abort(), 130, "interrupted"),
    ],
)
def test_every_error_is_json_with_the_json_option(capfd, monkeypatch, error, code, name):
    def fail(*_, **__):
        raise error

    monkeypatch.setattr(cli_main.cli, "main", fail)
    found, out, _ = run(capfd, "version", "--json")
    assert (
        found == code
        and json.loads(out)["error"]["code"] == name
        and json.loads(out)["error"]["exit_code"] == code
    )
    assert run(capfd, "version")[1] == ""
    assert run(capfd, "version", "--", "--json")[1] == "", "after -- it is not an option"


def test_version_and_help_are_commands_and_options(capfd):
    code, out, _ = run(capfd, "--version")
    assert code == 0 and out == run(capfd, "version")[1]
    assert run(capfd, "help")[1] == run(capfd, "--help")[1]
    for words in ("volume", "volume create", "status"):
        code, out, _ = run(capfd, "help", *words.split())
        assert code == 0 and out == run(capfd, *words.split(), "--help")[1]
    code, _, err = run(capfd, "help", "volume", "crate")
    assert code == 2 and "did you mean create?" in err
    assert "did you mean volume?" in run(capfd, "help", "volum")[2]


@pytest.mark.parametrize(
    "answer, said", [("", "use --yes"), ("n\n", "nothing was destroyed"), ("\n", "nothing was destroyed")]
)
def test_destroy_without_confirmation_is_refused(stopped, answer, said):
    done = subprocess.run(
        command(Program.CLI, "pool", "destroy", stopped),
        input=answer,
        text=True,
        capture_output=True,
        timeout=60,
    )
    assert done.returncode == 1 and said in done.stderr and "interrupted" not in done.stderr
    assert stopped.exists()


@pytest.mark.few(2)
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
@pytest.mark.parametrize("after_s", [0.8, 0.3, 1.6, 2.5, 4.0])
def test_interrupted_dev_up_leaves_nothing(tmp_path, number, after_s):
    place = tmp_path / "pool"
    making = subprocess.Popen(
        command(Program.CLI, "dev", "up", str(place), "--size", "64M"),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    time.sleep(after_s)
    making.send_signal(number)
    out, said = making.communicate(timeout=120)
    if " serves in " in out and "removing" not in said:  # before the signal
        assert cli_main.main(["dev", "down", str(place)]) == 0
        return
    assert making.returncode in (130, -number), said  # a signal before the program installed its handler
    assert not place.exists(), said
    assert not [entry for entry in os.listdir("/proc") if entry.isdigit() and _names(entry, str(place))]


def _names(pid: str, place: str) -> bool:
    try:
        with open(f"/proc/{pid}/cmdline", "rb") as file:
            return place.encode() in file.read()
    except OSError:
        return False


def test_interrupted_dev_up_keeps_an_existing_pool(tmp_path, capfd):
    from nvpool.cli.dev_up_rollback import DevUpRollback
    from nvpool.host.pool_directory import PoolDirectory

    place = tmp_path / "pool"
    place.mkdir()
    (place / "FORMAT").write_text(FORMAT_TEXT)
    with pytest.raises(KeyboardInterrupt), DevUpRollback(PoolDirectory(place), None):
        raise KeyboardInterrupt
    assert (place / "FORMAT").exists() and "was there before and stays" in capfd.readouterr().err


@pytest.mark.parametrize("error", [KeyboardInterrupt(), NotFound("no such mount point")])
@pytest.mark.parametrize("throw_away", [False, True])
def test_dev_up_of_a_started_pool_offers_its_removal_with_care(
    tmp_path, capfd, monkeypatch, error, throw_away
):
    from nvpool.cli.dev_up_rollback import DevUpRollback
    from nvpool.host.pool_directory import PoolDirectory

    (tmp_path / "FORMAT").write_text(FORMAT_TEXT)
    if throw_away:
        (tmp_path / "throw-away").write_text("")
    with pytest.raises(type(error)), DevUpRollback(PoolDirectory(tmp_path), None):
        monkeypatch.setattr(PoolDirectory, "supervisor", lambda directory: 4711)  # it was started meanwhile
        raise error
    said = capfd.readouterr().err
    assert "was there before and stays; it was started, and runs" in said
    assert f"nvpool status {tmp_path}" in said
    remove = f"to stop and remove it (this destroys its files): nvpool dev down {tmp_path}"
    assert remove in said if throw_away else "nvpool dev down" not in said


def test_interrupted_start_kills_an_unlocked_supervisor(tmp_path, monkeypatch):
    """The signal arrives while the process is being started: no variable has its number yet."""
    from nvpool.cli import pool_lifecycle
    from nvpool.host.pool_directory import PoolDirectory

    place = PoolDirectory(tmp_path)
    started = []

    def spawn(directory):
        os.kill(os.getpid(), signal.SIGINT)
        started.append(subprocess.Popen(["sleep", "60"]))
        return started[0]

    monkeypatch.setattr(pool_lifecycle, "spawn_supervisor", spawn)
    monkeypatch.setattr(PoolDirectory, "check", lambda self: None)
    with pytest.raises(KeyboardInterrupt):
        pool_lifecycle.start(place)
    assert started[0].poll() == -signal.SIGKILL


@pytest.mark.parametrize(
    "kind, said",
    [
        ("file", "is not a directory"),
        ("below a file", "is not a directory"),
        ("full", "is not empty"),
        ("around the pool", "which the mount would hide"),
        ("the pool itself", "which the mount would hide"),
    ],
)
def test_dev_up_checks_the_mount_point_first(tmp_path, capfd, kind, said):
    place = tmp_path / "around" / "pool"
    place.parent.mkdir()
    point = tmp_path / "point"
    if kind == "full":
        (point / "x").mkdir(parents=True)
    elif kind in ("file", "below a file"):
        point.write_text("")
        point = point / "below" if kind == "below a file" else point
    else:
        point = place.parent if kind == "around the pool" else place
    code, out, error = run(capfd, "dev", "up", str(place), "--size", "64M", "--mount", str(point))
    assert (code, out) == (1, "") and said in error and str(point) in error, error
    assert not place.exists() and error.count("\n") == 1


def test_failed_dev_up_names_what_remains(tmp_path, capfd):
    from nvpool.cli.dev_up_rollback import DevUpRollback
    from nvpool.host.pool_directory import PoolDirectory

    place = tmp_path / "pool"
    with pytest.raises(InvalidRequest), DevUpRollback(PoolDirectory(place), None):
        raise InvalidRequest("nothing was made")
    assert not capfd.readouterr().err
    with pytest.raises(InvalidRequest), DevUpRollback(PoolDirectory(place), None):
        place.mkdir()
        (place / "FORMAT").write_text(FORMAT_TEXT)
        raise InvalidRequest("it cannot be mounted")
    assert (
        f"the pool in {place} was made; " in (said := capfd.readouterr().err)
        and f"nvpool dev down {place}" in said
    )
    assert (place / "FORMAT").exists()
