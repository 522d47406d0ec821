"""Old names of configuration keys, options and fields of JSON results: valid for one release."""

import asyncio
import json
import logging

import pytest
from click.testing import CliRunner

from nvpool.cli import pool_connection
from nvpool.cli.commands.dir import directory
from nvpool.cli.mount import mount_nvpool
from nvpool.cli.mount.command import mount
from nvpool.cli.output import print_json
from nvpool.client.state.options import configured
from nvpool.core import config
from nvpool.core.errors import BadConfiguration
from nvpool.core.renamed_fields import RENAMED_FIELDS, with_old_fields, with_present_fields
from nvpool.mountd.arguments import client_options, parse_words, start_mount_log
from nvpool.rpc.v1 import pool_pb2


@pytest.mark.parametrize(
    "section, old, new, text, value",
    [
        ("store", "short_cut", "short_circuit", "false", False),
        ("store", "short_cut_group", "short_circuit_group", '"render"', "render"),
        ("client", "short_cut", "short_circuit", "false", False),
    ],
)
def test_old_key_sets_the_renamed_one(section, old, new, text, value):
    found = config.parse(f"[{section}]\n{old} = {text}\n")
    assert found == config.parse(f"[{section}]\n{new} = {text}\n")
    assert getattr(getattr(found, section), new) == value
    assert found != config.Config()


def test_each_renamed_key_is_a_present_key():
    keys = config.as_dict(config.Config())
    for (section, old), new in config.RENAMED_KEYS.items():
        assert new in keys[section] and old not in keys[section]
    assert "short_cut" not in config.sample()


def test_loading_an_old_key_warns_with_line_and_new_name(tmp_path, caplog):
    path = tmp_path / "node.toml"
    path.write_text('[store]\n\nshort_cut = true\n[client]\nshort_cut = false\n[log]\nlevel = "debug"\n')
    for _ in range(2):  # the second call gets the cached configuration
        caplog.clear()
        with caplog.at_level(logging.WARNING):
            assert not config.load(path).client.short_circuit
        assert [record.getMessage() for record in caplog.records] == [
            f"{path}, line {line}: {section}.short_cut is now named {section}.short_circuit; rename the key: the next "
            f"release refuses the old name"
            for line, section in ((3, "store"), (5, "client"))
        ]


def test_loading_present_keys_warns_of_nothing(tmp_path, caplog):
    path = tmp_path / "node.toml"
    path.write_text("[store]\nshort_circuit = true\n")
    config.load(path)
    assert not caplog.records


def test_a_file_with_both_names_is_refused_with_both():
    with pytest.raises(BadConfiguration) as caught:
        config.parse("[store]\nshort_circuit = true\nshort_cut = false\n", "node.toml")
    assert "line 3: store.short_cut is the old name of store.short_circuit" in str(caught.value)


def test_a_wrong_value_of_an_old_key_is_refused_under_its_name():
    with pytest.raises(BadConfiguration, match='store.short_cut = "no": write true or false'):
        config.parse('[store]\nshort_cut = "no"\n')


def test_an_old_key_is_unknown_in_other_sections():
    with pytest.raises(BadConfiguration, match="log.short_cut is unknown"):
        config.parse("[log]\nshort_cut = true\n")


def mounted_with(monkeypatch, tmp_path, *options):
    """Words for the mount daemon, and stderr of `nvpool mount` with `options`."""
    given = []
    monkeypatch.setattr(
        "nvpool.cli.mount.control.mount_pool",
        lambda pool, place, log, words, wait_s: given.extend(words) or 7,
    )
    done = CliRunner().invoke(mount, ["127.0.0.1:9", str(tmp_path), "--log", str(tmp_path / "log"), *options])
    assert done.exit_code == 0, done.output
    return given, done.stderr


def test_mount_accepts_the_old_option_with_a_warning(monkeypatch, tmp_path):
    words, error = mounted_with(monkeypatch, tmp_path, "--no-short-cut")
    assert words == ["--no-short-circuit"]
    assert "--no-short-cut is now named --no-short-circuit" in error


def test_mount_warns_of_no_present_option(monkeypatch, tmp_path):
    words, error = mounted_with(monkeypatch, tmp_path, "--no-short-circuit")
    assert words == ["--no-short-circuit"] and "now named" not in error


def test_mount_help_hides_the_old_option():
    shown = CliRunner().invoke(mount, ["--help"]).output
    assert "--no-short-circuit" in shown and "--no-short-cut" not in shown


@pytest.mark.parametrize("word", ["no-short-cut", "no_short_cut"])
def test_fstab_accepts_the_old_word_with_a_warning(word, monkeypatch, tmp_path, capsys):
    found = mount_nvpool.parse(["h:/x", str(tmp_path), "-o", word])
    assert found.words == ("--no-short-circuit",)
    assert mount_nvpool.main(["h:/x", str(tmp_path), "-f", "-o", word]) == 0
    assert "mount.nvpool: the option no-short-cut is now named no-short-circuit" in capsys.readouterr().err
    assert mount_nvpool.main(["h:/x", str(tmp_path), "-f", "-o", "no-short-circuit"]) == 0
    assert capsys.readouterr().err == ""


def test_fstab_refuses_the_old_word_with_a_value(tmp_path, capsys):
    assert mount_nvpool.main(["h:/x", str(tmp_path), "-f", "-o", "no-short-cut=1"]) == 1
    assert "is not an option of nvpool" in capsys.readouterr().err


@pytest.mark.parametrize("word", ["--no-short-circuit", "--no-short-cut"])
def test_mount_daemon_reads_both_options(word):
    section = config.ClientSection()
    assert client_options(parse_words(["h:1", "/mnt/none-here"]), section).short_circuit
    assert not client_options(parse_words(["h:1", "/mnt/none-here", word]), section).short_circuit
    assert configured(section).short_circuit


def test_mount_daemon_logs_the_old_option(monkeypatch, caplog):
    monkeypatch.setattr("nvpool.mountd.arguments.start_log", lambda *given, **named: None)
    for word, count in (("--no-short-cut", 1), ("--no-short-circuit", 0)):
        caplog.clear()
        start_mount_log("mount", parse_words(["h://1", "/mnt/none-here", word]))
        assert sum("now named --no-short-circuit" in one.getMessage() for one in caplog.records) == count


@pytest.mark.parametrize("word, warns", [("--wide", True), ("--striped", False)])
def test_dir_set_reads_both_options(word, warns, monkeypatch):
    requested = []

    async def set_layout(place, replicas, chunk_bytes, striped):
        requested.append(striped)
        return {"path": "/x", "inode": 2, "replicas": 1, "chunk_bytes": 1 << 20, "striped": striped}

    monkeypatch.setattr("nvpool.cli.commands.dir.set_layout", set_layout)
    done = CliRunner().invoke(directory, ["set", "127.0.0.1:9:/x", word, "--json"])
    assert done.exit_code == 0, done.output
    assert requested == [True]
    assert ("--wide is now named --striped" in done.stderr) == warns
    assert (shown := json.loads(done.stdout))["striped"] is True and shown["wide"] is True


def test_dir_set_help_hides_the_old_option():
    shown = CliRunner().invoke(directory, ["set", "--help"]).output
    assert "--striped" in shown and "--wide" not in shown


def test_json_results_have_both_names_of_a_field(capsys):
    print_json({"nodes": [{"node": 2, "desired_state": "draining"}], "wide": "unrelated"})
    assert json.loads(capsys.readouterr().out) == {
        "nodes": [{"node": 2, "desired_state": "draining", "wish": "draining"}],
        "wide": "unrelated",
    }


def test_results_of_an_earlier_supervisor_get_present_names(monkeypatch):
    status = {"drives": [{"drive": 1, "wish": "lost"}], "chains": {}}

    async def ask(*arguments, **named):
        return pool_pb2.PoolStatusReply(status=json.dumps(status).encode())

    monkeypatch.setattr(pool_connection, "ask", ask)
    (drive,) = asyncio.run(pool_connection.status_of("127.0.0.1:9"))["drives"]
    assert drive["desired_state"] == "lost"


def test_both_names_of_a_field_have_one_value():
    for new, old in RENAMED_FIELDS.items():
        assert with_old_fields([{new: 1, old: 2}]) == [{new: 1, old: 1}]
        assert with_present_fields([{new: 1, old: 2}]) == [{new: 1, old: 2}]
        assert with_present_fields(({old: 2},)) == [{new: 2, old: 2}]
