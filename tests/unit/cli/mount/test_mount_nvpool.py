"""mount.nvpool: arguments of mount(8) and /etc/fstab, and the words of a mount that they become."""

import subprocess
import tomllib
from pathlib import Path

import pytest
from click.testing import CliRunner

from nvpool.cli.mount import mount_nvpool
from nvpool.cli.mount.command import mount
from nvpool.cli.mount.mount_nvpool import main, parse
from nvpool.core.errors import InvalidRequest
from nvpool.core.programs import Program, command
from nvpool.fuse.kernel import mount as kernel_mount
from nvpool.fuse.mount_point import MountOptions
from nvpool.mountd.arguments import is_read_only, parse_words


def parsed(source, *options, words=()):
    return parse([source, "/mnt/none-here", *words, *(("-o", ",".join(options)) if options else ())])


@pytest.mark.parametrize(
    "source, pool, subtree",
    [
        ("host:/volumes/x", "host:17512", "/volumes/x"),
        ("10.0.0.1:4000:/volumes/x", "10.0.0.1:4000", "/volumes/x"),
        ("host:/", "host:17512", "/"),
        ("host:4000", "host:4000", "/"),
        ("[fd00::1]:/x", "[fd00::1]:17512", "/x"),
        ("[fd00::1]:4000:/x", "[fd00::1]:4000", "/x"),
        ("/srv/pool:/a/b", "/srv/pool", "/a/b"),
        ("/srv/pool", "/srv/pool", "/"),
        ("stream://10.0.0.1:4000:/x", "stream://10.0.0.1:4000", "/x"),
    ],
)
def test_sources(source, pool, subtree):
    found = parsed(source)
    assert (found.source, found.pool, found.subtree) == (source, pool, subtree)


def test_directory_with_a_colon_is_a_pool(tmp_path):
    place = tmp_path / "a:" / "b"
    place.mkdir(parents=True)
    assert parsed(str(place))[2:4] == (str(place), "/")
    assert parsed(f"{place}:/c")[2:4] == (f"{tmp_path}/a", "/b:/c")  # the first colon divides, as everywhere


def test_client_directory_is_an_option_and_host_a_label():
    for source, subtree in (
        ("anything:/volumes/x", "/volumes/x"),
        ("pool", "/"),
        ("10.0.0.1:17512:/x", "/x"),
    ):
        found = parsed(source, "pool=/etc/nvpool/pool")
        assert (found.source, found.pool, found.subtree) == (source, "/etc/nvpool/pool", subtree)


@pytest.mark.parametrize("source", ["host", "fd00::1:/x", "host:port:/x", ":/x", "ho[st:/x"])
def test_invalid_source_is_refused(source, capsys):
    assert main([source, "/mnt/none-here"]) == 1
    assert "mount.nvpool: " in capsys.readouterr().err


def test_options_become_arguments_of_a_mount():
    found = parsed(
        "h:/x",
        "rw",
        "noexec",
        "writeback",
        "max_read=64K",
        "read-ahead=0",
        "workers=4",
        "deadline-s=5",
        "no_short_circuit",
        "holder",
        "allow_other",
        "engine=kernel",
        'context="a:b,c"',
        "wait=7",
        "log=/var/log/x",
        "metrics=127.0.0.1:9478",
        "log_format=json",
        "log-level=debug",
        "attr_timeout_s=0",
    )
    assert found.words == (
        "-orw",
        "-onoexec",
        "--writeback",
        "--max-read=65536",
        "--read-ahead=0",
        "--workers=4",
        "--deadline-s=5.0",
        "--no-short-circuit",
        "--holder",
        "-oallow_other",
        "--engine=kernel",
        '-ocontext="a:b,c"',
        "--metrics=127.0.0.1:9478",
        "--log-format=json",
        "--log-level=debug",
        "--attr-timeout-s=0.0",
    )
    assert (found.log, found.wait_s, found.remount, found.fake) == ("/var/log/x", 7.0, False, False)


def test_fstab_options_of_other_programs_are_ignored():
    found = parsed(
        "h:/x",
        "defaults",
        "noauto",
        "user",
        "_netdev",
        "x-systemd.automount",
        "x-systemd.idle-timeout=60",
        "nofail",
        "comment=ours",
        "X-mount.mkdir",
        "ro",
    )
    assert found.words == ("-oro",)


@pytest.mark.parametrize(
    "option, said",
    [
        ("bogus", "'bogus' is not an option of nvpool; there are pool="),
        ("workers", "needs a value"),
        ("workers=many", "is not a value"),
        ("workers=65", "is not a value for it: it is a whole number from 1 to 64"),
        ("entry-timeout-s=-1", "is not a value for it: it is seconds from 0 to 3600"),
        ("deadline-s=nan", "is not a value for it: it is seconds from 1 to 86400"),
        ("wait=-1", "is not a value for it"),
        ("max-background=0", "is not a value for it: it is a whole number from 1 to"),
        ("max_read=-", "is not a value"),
        ("pool=", "needs a value"),
        ("metrics=nowhere", "is not a value"),
        ("log-format=xml", "is not a value"),
        ("engine=steam", "is not a value"),
        ("writeback=1", "is not an option"),
    ],
)
def test_unknown_option_is_refused_with_the_valid_ones(option, said, capsys):
    assert main(["h:/x", "/mnt/none-here", "-o", f"ro,{option}"]) == 1
    error = capsys.readouterr().err
    assert said in error and (
        "is not an option" not in said or ("deadline-s=" in error and "noexec" in error)
    )
    if "value" not in said:
        assert parsed("h:/x", "ro", option, words=("-s",)).words == (
            "-oro",
        )  # mount -s: unknown options are ignored


def test_flags_match_those_of_a_mount():
    assert (
        mount_nvpool.FLAGS == kernel_mount.FLAG_OF_OPTION
        and set(mount_nvpool.PASSED) == kernel_mount.PASSED_OPTIONS
    )
    assert mount_nvpool.PASSED_VALUES == kernel_mount.PASSED_VALUES


def test_quoted_commas_are_kept_in_options():
    context = 'context="system_u:object_r:x:s0:c1,ro,c2"'
    found = parsed("h:/x", "noexec", context)
    words = parse_words(["/pool", "/mnt/none-here", *found.words])
    flags, passed = kernel_mount.parsed(MountOptions("p", allow_other=False, extra=tuple(words.extra)))
    assert passed[1:] == [context] and flags & 8 and not flags & 1
    assert not is_read_only(words) and not mount_nvpool.was_read_only(list(found.words))


def test_log_and_kernel_options_reach_the_mount_daemon(monkeypatch, tmp_path):
    given = []
    monkeypatch.setattr(
        "nvpool.cli.mount.control.mount_pool",
        lambda pool, place, log, words, wait_s: given.extend(words) or 7,
    )
    done = CliRunner().invoke(
        mount,
        [
            "127.0.0.1:9",
            str(tmp_path),
            "--log",
            str(tmp_path / "log"),
            "--log-format",
            "json",
            "--log-level",
            "debug",
            "--attr-timeout-s",
            "0",
            "--negative-timeout-s",
            "2",
        ],
    )
    assert done.exit_code == 0, done.output
    words = parse_words([str(tmp_path), str(tmp_path), *given])
    assert (words.log_format, words.log_level) == ("json", "debug")
    assert (words.attr_timeout_s, words.entry_timeout_s, words.negative_timeout_s) == (0.0, None, 2.0)


def test_single_letter_options_of_mount_8():
    found = parsed("h:/x", words=("-f", "-n", "-v", "-t", "nvpool"))
    assert found.fake and found.verbose
    for wrong in (("-q",), ("-t", "ext4"), ("-N", "/proc/1/ns/mnt"), ("more",)):
        with pytest.raises(InvalidRequest):
            parsed("h:/x", words=wrong)
    assert main(["h:/x"]) == 1


def test_fake_mount_only_checks_its_arguments(tmp_path, capsys):
    assert main(["host:/x", str(tmp_path), "-f"]) == 0
    assert main([f"{tmp_path}/none:/x", str(tmp_path), "-f"]) == 32
    assert "none" in capsys.readouterr().err
    assert main(["host:/x/../..", str(tmp_path), "-f"]) == 1


def test_kernel_options_are_accepted_only_for_a_remount():
    shown = (
        "rw",
        "nosuid",
        "nodev",
        "relatime",
        "user_id=0",
        "group_id=0",
        "default_permissions",
        "allow_other",
        "ro",
    )
    assert parsed("h:/x", "remount", *shown).flags == 1 | 2 | 4
    assert (
        parsed("nvpool:p:/x", "remount", "ro", "rw", "noexec", "suid").flags == 4 | 8
    )  # as /proc/mounts may show it
    with pytest.raises(InvalidRequest, match="user_id"):
        parsed("h:/x", *shown)


def test_remount_without_a_mount_is_refused(tmp_path, capsys):
    assert main(["h:/x", str(tmp_path), "-o", "remount,ro"]) == 32
    assert "nothing of nvpool is mounted" in capsys.readouterr().err


def test_helper_is_installed_where_mount_8_finds_it():
    project = tomllib.loads(Path(__file__).resolve().parents[4].joinpath("pyproject.toml").read_text())[
        "project"
    ]
    assert project["scripts"]["mount.nvpool"] == "nvpool.cli.mount.mount_nvpool:main" and callable(
        mount_nvpool.main
    )
    done = subprocess.run(command(Program.MOUNT_COMMAND), capture_output=True, text=True, check=False)
    assert done.returncode == 1 and "mount -t nvpool" in done.stderr
