"""`nvpool bridge` on the command line: an error names its remedy and leaves nothing behind."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess

import pytest

from nvpool.cli.mount.command import mount
from nvpool.core.programs import Program, command
from nvpool.daemons.bridge import mount_words, parse_words
from tests.bridge.test_docker_endpoint import scene


def bridge(*words):
    return subprocess.run(
        command(Program.CLI, "bridge", *map(str, words)), capture_output=True, text=True, timeout=60
    )


def test_help_has_examples_and_all_volume_options():
    said = bridge("--help").stdout
    for word in (
        "examples:",
        "docker volume create",
        "--json",
        "size=",
        "files=",
        "replicas=",
        "sealed=",
        "subpath=",
    ):
        assert word in said


@pytest.mark.smoke
def test_path_that_is_no_pool_is_refused(tmp_path):
    done = bridge(tmp_path, "--state", tmp_path / "state", "--docker-socket", tmp_path / "x.sock")
    assert done.returncode == 1 and str(tmp_path) in done.stderr and "Traceback" not in done.stderr
    assert not (tmp_path / "x.sock").exists()


@pytest.mark.skipif(bool(os.geteuid()), reason="the bridge runs as root")
@pytest.mark.parametrize(
    "words",
    [
        ("--metrics", "127.0.0.1:99999"),
        ("--node", "a b"),
        ("--csi", "http://x"),
        ("--docker-socket", "/run/" + 100 * "x"),
        ("--csi=/run/x.sock", "--csi-pool", "a b"),
    ],
    ids=lambda words: words[-2],
)
def test_wrong_argument_is_a_usage_error(tmp_path, words):
    done = bridge(
        "127.0.0.1:9", "--state", tmp_path / "state", "--docker-socket", tmp_path / "x.sock", *words
    )
    assert (
        done.returncode == 2
        and words[-1].strip("1270.:")[:40] in done.stderr
        and "Traceback" not in done.stderr
    )
    assert not (tmp_path / "state").exists()


def test_unreachable_pool_is_unavailable(tmp_path):
    done = bridge("127.0.0.1:9", "--state", tmp_path / "state", "--docker-socket", tmp_path / "x.sock")
    assert (
        done.returncode == (3 if not os.geteuid() else 1)
        and "ERROR" in done.stderr
        and "Traceback" not in done.stderr
    )
    assert not (tmp_path / "x.sock").exists()


@pytest.mark.parametrize("metrics", ["127.0.0.1:0", "nowhere"])
def test_log_is_json_on_request_without_node_toml(tmp_path, metrics):
    done = bridge(
        "127.0.0.1:9",
        "--state",
        tmp_path / "state",
        "--docker-socket",
        tmp_path / "x.sock",
        "--log-format",
        "json",
        "--metrics",
        metrics,
    )
    said = [json.loads(line) for line in done.stderr.splitlines()]
    assert done.returncode and said[-1]["level"] == "error" and said[-1]["process"] == "bridge"


def test_bridge_passes_its_log_options_to_the_mount():
    words = mount_words(parse_words(["pool", "--log-format=json", "--log-level=debug"]))
    known = mount.make_context("mount", ["pool", "/place", *words]).params
    assert (known["log_format"], known["log_level"]) == ("json", "debug")
    assert mount_words(parse_words(["pool"])) == (), "else as node.toml says"


@pytest.mark.parametrize("as_json", [False, True])
def test_check_shows_volumes_or_how_to_start_the_bridge(tmp_path, as_json):
    words = [
        "anything",
        "--check",
        "--docker-socket",
        tmp_path / "plugins/nvpool.sock",
        *(["--json"] if as_json else []),
    ]
    done = bridge(*words)
    assert done.returncode == 3 and "start it with: nvpool bridge" in done.stderr

    async def play(asked):
        await asked.ask_ok("/VolumeDriver.Create", Name="v")
        place = (await asked.ask_ok("/VolumeDriver.Mount", Name="v", ID="1"))["Mountpoint"]
        process = await asyncio.create_subprocess_exec(
            *command(Program.CLI, "bridge", *map(str, words)), stdout=asyncio.subprocess.PIPE
        )
        said, _ = await process.communicate()
        if as_json:
            assert json.loads(said) == [{"name": "v", "mounted": place}]
        else:
            assert said.decode().splitlines() == ["VOLUME\tMOUNTED", f"v\t{place}"]

    scene(tmp_path, play)
