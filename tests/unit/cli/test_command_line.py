"""The command line without a pool: fast start, clear errors, meaningful exit codes."""

import json
import os
import subprocess
import sys
import tomllib
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from nvpool.cli import main as cli_main
from nvpool.cli.commands.dev import default_sizes
from nvpool.cli.commands.pool import drive_of, name_of, rebalance
from nvpool.cli.commands.volume import Duration, create
from nvpool.cli.output import ago, exit_code, print_table
from nvpool.cli.pool_connection import endpoints_of
from nvpool.core.errors import (
    BadConfiguration,
    Bug,
    CorruptRecord,
    Damaged,
    NotFound,
    NvpoolError,
    Refused,
    Stale,
    StaleEpoch,
    Unavailable,
    Unreachable,
    every_error,
)
from nvpool.core.programs import Program, command
from nvpool.core.version import VERSION
from nvpool.sdk.paths import as_os_error

ROOT = Path(cli_main.__file__).parents[2]


def run(capfd, *arguments: str) -> tuple[int, str, str]:
    code = cli_main.main(list(arguments))
    out, err = capfd.readouterr()
    return code, out, err


@pytest.mark.parametrize("arguments", [["--help"], ["version"], ["pool", "--help"], ["status", "--help"]])
def test_command_without_pool_loads_no_heavy_module(arguments):
    code = (
        "import sys; from nvpool.cli.main import main; main(sys.argv[1:]); "
        "sys.stderr.write(' '.join(sorted(m.partition('.')[0] for m in sys.modules if '.' not in m)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments], capture_output=True, text=True, check=True, timeout=240
    )
    assert not {"rich", "grpc", "lmdb", "uvloop", "google", "pyfuse3", "crc32c"} & set(done.stderr.split())


def test_every_command_has_help_and_an_example():
    context = click.Context(cli_main.cli)
    for name, (where, text) in cli_main.COMMANDS.items():
        module = where.partition(":")[0]
        if not (ROOT / (module.replace(".", "/") + ".py")).exists():
            continue
        command = cli_main.cli.get_command(context, name)
        assert command is not None and text.endswith("."), name
        found = [command, *command.commands.values()] if isinstance(command, click.Group) else [command]
        for one in found:
            assert one.help, f"{name} {one.name} has no help"
            if not isinstance(one, click.Group) and one.name != "version":
                assert "nvpool" in (one.epilog or ""), f"{name} {one.name} has no example"


def test_help_lists_commands_and_exit_codes(capfd):
    code, out, _ = run(capfd, "--help")
    assert code == 0
    assert all(name in out for name in cli_main.COMMANDS)
    assert all(f"  {number} " in out for number in (0, 1, 2, 3, 4, 70, 130))


@pytest.mark.parametrize(
    "arguments, said",
    [
        (["stat"], "did you mean status?"),
        (["--nonsense"], "No such option"),
        (["pool", "create"], "Missing argument"),
        (["pool", "create", "/x"], "--drive"),
        (["dev", "up", "/x", "--drives", "0"], "--drives"),
        (["dev", "up", "/x", "--size", "big"], "is not a size"),
        (["completion", "tcsh"], "tcsh"),
    ],
)
def test_wrong_command_line_has_exit_code_2(capfd, arguments, said):
    code, out, err = run(capfd, *arguments)
    assert (code, out) == (2, "") and said in err


def test_version_is_that_of_the_package(capfd):
    assert tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"] == VERSION
    assert run(capfd, "version")[:2] == (0, f"nvpool {VERSION}\n")
    assert json.loads(run(capfd, "version", "--json")[1])["nvpool"] == VERSION


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_script_of_each_shell_calls_nvpool(capfd, shell):
    code, out, _ = run(capfd, "completion", shell)
    assert code == 0 and "_NVPOOL_COMPLETE" in out


def test_completion_offers_the_commands():
    done = subprocess.run(
        command(Program.CLI),
        capture_output=True,
        text=True,
        timeout=240,
        env=os.environ | {"_NVPOOL_COMPLETE": "bash_complete", "COMP_WORDS": "nvpool d", "COMP_CWORD": "1"},
    )
    assert {"plain,drive", "plain,dev", "plain,dump"} <= set(done.stdout.split())


def test_every_error_has_the_exit_code_of_its_family():
    for cls in every_error():
        family = next(f for f in (Refused, Stale, Unavailable, Damaged, Bug) if issubclass(cls, f))
        expected = (
            2
            if cls is BadConfiguration
            else {Refused: 1, Stale: 3, Unavailable: 3, Damaged: 4, Bug: 70}[family]
        )
        assert exit_code(cls("x")) == expected, cls
    assert exit_code(ValueError()) == 70
    assert exit_code(FileNotFoundError(2, "x")) == 1
    for cause in (
        Unreachable("x"),
        StaleEpoch("x"),
        CorruptRecord("x"),
        NotFound("x"),
    ):  # as the SDK raises them
        with pytest.raises(OSError) as raised, as_os_error("/x"):
            raise cause
        assert exit_code(raised.value) == exit_code(cause)
    assert exit_code(KeyboardInterrupt()) == 130


def failing(monkeypatch, error: BaseException) -> None:
    @click.command()
    def broken():
        raise error

    monkeypatch.setattr(cli_main.CommandGroup, "get_command", lambda self, context, name: broken)


@pytest.mark.parametrize(
    "error, code, said",
    [
        (Unavailable("no reply"), 3, "nvpool: no reply\n"),
        (Refused("no"), 1, "nvpool: no\n"),
        (PermissionError(13, "Permission denied", "/x"), 1, "nvpool: /x: Permission denied\n"),
        (KeyboardInterrupt(), 130, "\ninterrupted\n"),
    ],
)
def test_error_is_one_line_on_stderr(capfd, monkeypatch, error, code, said):
    failing(monkeypatch, error)
    assert run(capfd, "version") == (code, "", said)


def test_only_a_bug_shows_a_traceback(capfd, monkeypatch):
    failing(monkeypatch, ZeroDivisionError())
    code, out, err = run(capfd, "version")
    assert (code, out) == (70, "") and "Traceback" in err and "bug of nvpool" in err


@pytest.mark.parametrize("pool", ["host", "host:", ":1", "host:0", "host:99999", "host:x"])
def test_invalid_address_is_refused(pool, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(NvpoolError):
        endpoints_of(pool)
    assert endpoints_of("host:1") == ("stream://host:1", "grpc://host:1")
    assert endpoints_of("grpc://host:1") == ("grpc://host:1",)


def test_unreachable_address_is_unavailable(capfd):
    code, out, err = run(capfd, "status", "127.0.0.1:1", "--wait", "5")
    assert (code, out) == (3, "") and "does not answer" in err


def test_dev_down_without_a_pool_succeeds(capfd, tmp_path):
    assert run(capfd, "dev", "down", str(tmp_path / "nowhere"))[0] == 0


def test_dev_down_refuses_other_directories(capfd, tmp_path):
    (tmp_path / "mine").write_text("precious")
    assert run(capfd, "dev", "down", str(tmp_path))[0] == 1
    (tmp_path / "FORMAT").write_text("nvpool pool 1\n")
    code, _, err = run(capfd, "dev", "down", str(tmp_path))
    assert code == 1 and "pool destroy" in err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["FORMAT", "mine"]


def test_configuration_commands_agree(capfd, tmp_path):
    file = tmp_path / "node.toml"
    code, sample, _ = run(capfd, "config", "sample")
    file.write_text(sample)
    assert code == 0 and run(capfd, "config", "check", str(file))[0] == 0
    shown, default = (
        json.loads(run(capfd, "config", *more, "--json")[1]) for more in (["show", str(file)], ["sample"])
    )
    assert shown == default
    file.write_text("[log]\nlevl = 3\n")
    code, out, err = run(capfd, "config", "check", str(tmp_path))
    assert (code, out) == (2, "") and "line 2: log.levl" in err


def test_table_in_a_pipe_is_plain_lines(capfd):
    print_table(("name", "what"), [("one", None), ("two\tb", True), ("three", 5)])
    assert capfd.readouterr().out == "NAME\tWHAT\none\t-\ntwo b\tyes\nthree\t5\n"


def test_drive_argument_is_a_path_with_optional_size(tmp_path):
    assert drive_of("/mnt/a") == {"path": "/mnt/a", "capacity_bytes": 0}
    assert drive_of("/mnt/a:1G") == {"path": "/mnt/a", "capacity_bytes": 1 << 30}
    (tmp_path / "pci:0").mkdir()
    assert drive_of(f"{tmp_path}/pci:0") == {"path": f"{tmp_path}/pci:0", "capacity_bytes": 0}
    with pytest.raises(click.UsageError):
        drive_of("/mnt/a:big")


def test_default_sizes_differ_and_fit_into_free_space():
    assert default_sizes(2, 1 << 40) == [8 << 30, 16 << 30]
    small = default_sizes(3, 4 << 30)
    assert sum(small) <= 0.8 * (4 << 30) and len(set(small)) == 2


def test_pool_is_named_after_its_directory():
    assert name_of("/srv/my pool") == "mypool"
    assert name_of("/") == "pool"


def test_time_ago_has_two_units():
    assert [ago(0, seconds * 1000) for seconds in (5, 65, 3700, 90000)] == ["5s", "1m 5s", "1h 1m", "1d 1h"]


@pytest.mark.parametrize(
    ("text", "seconds"), [("0", 0), ("90", 90), ("1.5m", 90), ("7d", 604_800), ("0s", 0), ("2 w", 1_209_600)]
)
def test_duration_is_parsed(text, seconds):
    assert Duration().convert(text, None, None) == seconds


@pytest.mark.parametrize("text", ["0.5s", "0.001m", "d", "", "soon", "1e999d", "nand", "1.5"])
def test_invalid_duration_is_refused(text):
    with pytest.raises(click.BadParameter, match="time|second"):
        Duration().convert(text, None, None)


@pytest.mark.parametrize("mode", ["-1", "10000", "777777777777", "rwx"])
def test_invalid_mode_is_refused_before_the_request(mode):
    done = CliRunner().invoke(create, ["127.0.0.1:9", "v", f"--mode={mode}"])
    assert done.exit_code == 2 and "octal" in done.output


@pytest.mark.parametrize("limit", ["99999999999999999999999", "1048577", "inf"])
def test_invalid_rate_is_refused_before_the_request(limit):
    done = CliRunner().invoke(rebalance, ["127.0.0.1:9", "--limit", limit])
    assert done.exit_code == 2 and "range" in done.output


def numbers(command, words=()):
    """Each option with bounds, after the words of its command."""
    for parameter in command.params:
        if isinstance(parameter.type, click.FloatRange):
            yield *words, parameter
    for name, one in getattr(command, "commands", {}).items():
        yield from numbers(one, (*words, name))


def test_nan_is_out_of_every_bound():
    context = click.Context(cli_main.cli)
    found = [
        one for name in cli_main.COMMANDS for one in numbers(cli_main.cli.get_command(context, name), (name,))
    ]
    assert {words[-1] for *words, _ in found} >= {"mount", "umount", "rebalance", "top", "status"}
    for *words, option in found:
        assert option.type.convert("1.5", option, None) == 1.5, words
        with pytest.raises(click.BadParameter, match="'nan' is not a number"):
            option.type.convert("nan", option, None)
