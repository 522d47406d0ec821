"""Commands that copy and check whole pools, on a real pool of this machine."""

import contextlib
import json
import os
import signal
import subprocess
import tempfile
import time
from pathlib import Path

import pytest

from nvpool import connect
from nvpool.core.programs import Program, command

MIB = 1 << 20


def nvpool(*words, code=0, timeout=240):
    done = subprocess.run(
        command(Program.CLI, *map(str, words)),
        capture_output=True,
        text=True,
        timeout=timeout,
        stdin=subprocess.DEVNULL,
    )
    assert done.returncode == code, f"{words} ended with {done.returncode}\n{done.stdout}\n{done.stderr}"
    return done


def as_json(*words, **more):
    return json.loads(nvpool(*words, "--json", **more).stdout)


@pytest.fixture(scope="module")
def pool(tmp_path_factory):
    directory = tmp_path_factory.mktemp("commands") / "p"
    nvpool("dev", "up", directory, "--size", "256M", "--size", "512M")
    try:
        yield directory
    finally:
        nvpool("dev", "down", directory)


@pytest.fixture(scope="module")
def pool_on_tcp(tmp_path_factory):
    directory = tmp_path_factory.mktemp("commands") / "p"
    directory.with_name("node.toml").write_text('[network]\nhost = "127.0.0.1"\n')
    nvpool("dev", "up", directory, "--size", "64M", "--config", directory.with_name("node.toml"))
    try:
        yield directory
    finally:
        nvpool("dev", "down", directory)


@pytest.fixture(scope="module")
def tree(tmp_path_factory):
    root = tmp_path_factory.mktemp("tree") / "tree"
    (root / "deep" / "er").mkdir(parents=True)
    for number in range(40):
        (root / "deep" / f"{number}").write_bytes(os.urandom(number * 997))
    (root / "large").write_bytes(os.urandom(3 * MIB + 5))
    with open(root / "holes", "wb") as file:
        file.truncate(4 * MIB)
        file.seek(2 * MIB)
        file.write(b"middle")
    (root / "other").hardlink_to(root / "large")
    (root / "link").symlink_to("deep/1")
    os.setxattr(root / "large", "user.colour", b"red")
    os.utime(root / "deep" / "3", ns=(1, 999_999_999_123_456_789))
    return root


def assert_same_tree(one: Path, other: Path) -> None:
    """Compare with rsync, which knows which differences between trees matter; it prints the differences."""
    done = subprocess.run(
        ["rsync", "-naHXc", "--delete", "--out-format=%i %n", f"{one}/", f"{other}/"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert not done.stdout, done.stdout
    for path in one.rglob("*"):
        assert path.lstat().st_mtime_ns == (other / path.relative_to(one)).lstat().st_mtime_ns, path


def test_import_and_export_round_trip(pool, tree, tmp_path):
    first = as_json("import", tree, f"{pool}:/in/tree")
    assert (
        first["failed"] == 0
        and first["files"] == 43
        and first["hard_links"] == 1
        and first["skipped_files"] == 0
    )
    second = as_json("import", tree, f"{pool}:/in/tree")
    assert second["skipped_files"] == 43 and second["bytes"] == first["bytes"]
    assert as_json("export", f"{pool}:/in/tree", tmp_path / "out")["failed"] == 0
    assert_same_tree(tree, tmp_path / "out")
    assert (tmp_path / "out" / "holes").stat().st_blocks * 512 < MIB
    nvpool("fsck", pool)


@pytest.mark.smoke
def test_file_info_lists_chunks_and_their_targets(pool, tree):
    nvpool("import", tree / "holes", f"{pool}:/info/holes")
    found = as_json("file", "info", f"{pool}:/info/holes")
    assert found["size"] == 4 * MIB and found["chunks_max"] == 4
    assert [chunk["index"] for chunk in found["chunks"]] == [2], "the other chunks are holes"
    (copy,) = found["chunks"][0]["copies"]
    assert found["chunks"][0]["chain_targets"] == [copy["target"]] and copy["allocated_bytes"] == 4096
    assert "holes" in nvpool("file", "info", f"{pool}:/info/holes").stdout
    assert "does not exist" in nvpool("file", "info", f"{pool}:/info/none", code=1).stderr


def test_invalid_arguments_are_refused_with_a_reason(pool, tree, tmp_path):
    assert "POOL:/path" in nvpool("import", tree, pool, code=2).stderr
    assert "does not exist" in nvpool("import", tmp_path / "none", f"{pool}:/x", code=2).stderr
    assert "does not exist" in nvpool("export", f"{tmp_path}/none:/x", tmp_path / "y", code=1).stderr
    nvpool("export", f"{pool}:/nowhere", tmp_path / "y", code=1)
    (tmp_path / "text").write_text("hello")
    assert "its first line is not" in nvpool("load", pool, tmp_path / "text", code=1).stderr


@pytest.mark.parametrize(
    "order, word", [("start", "started"), ("pause", "paused"), ("resume", "continues"), ("stop", "stopped")]
)
def test_scrub_request_reports_its_effect(pool, order, word):
    done = nvpool("scrub", order, pool)
    assert f"scrubbing {'is ' if order in ('pause', 'stop') else ''}{word} on targets 1, 2" in done.stdout
    assert f"nvpool scrub status {pool}" in done.stderr
    assert as_json("scrub", order, pool, "--drive", 1)["targets"] == [1]


@pytest.mark.parametrize("words", [("drive", "drain"), ("drive", "remove"), ("scrub", "start", "--drive")])
def test_unknown_drive_error_lists_the_drives(pool, words):
    noun, verb, *option = words
    said = nvpool(noun, verb, pool, *option, "x", code=1).stderr
    assert f"no drive x; its drives are 1 ({pool}/targets/1 of node 1), 2 (" in said
    assert os.path.join(os.getcwd(), "x") not in said


def test_rebalance_without_an_option_changes_nothing(pool):
    before = as_json("status", pool)["pool"]["epoch"]
    assert nvpool("pool", "rebalance", pool).stdout == nvpool("pool", "rebalance", pool, "--status").stdout
    as_json("pool", "rebalance", pool, "--wait")
    assert as_json("status", pool)["pool"]["epoch"] == before
    assert as_json("pool", "rebalance", pool, "--start") == as_json("pool", "rebalance", pool, "--start")
    assert "leave it out" in nvpool("pool", "rebalance", pool, "--status", "--pause", code=2).stderr


def test_volume_create_reports_an_existing_volume(pool):
    assert nvpool("volume", "create", pool, "twice", "--size", "1GiB").stdout.startswith(
        "volume twice made\n"
    )
    again = nvpool("volume", "create", pool, "twice", "--size", "1GiB")
    assert again.stdout.startswith("volume twice already exists")
    assert as_json("volume", "create", pool, "twice", "--size", "1GiB")["created"] is False
    assert as_json("volume", "create", pool, "other")["created"] is True
    said = nvpool(
        "volume", "create", pool, "twice", "--size", "2500M", "--trash", "7d", "--files", "10", code=1
    ).stderr
    assert "size 1 GiB, not 2500 MiB, files no limit, not 10, trash off, not 7d" in said


@pytest.mark.parametrize("kind", ["node", "client"])
def test_token_is_refused_by_a_pool_on_unix_sockets(pool, kind):
    assert "pool create DIR --drive PATH --host ADDRESS" in nvpool(kind, "token", pool, code=1).stderr


def test_token_of_a_loopback_pool_warns(pool_on_tcp, tmp_path):
    pool = pool_on_tcp
    for kind in ("node", "client"):
        done = nvpool(kind, "token", pool)
        assert f"nvpool {kind} join 127.0.0.1:" in done.stdout and "no other machine can join" in done.stderr
        assert "--host ADDRESS" in as_json(kind, "token", pool)["warning"]
    made = as_json("client", "token", pool)
    address = made["address"].removeprefix("stream://")
    nvpool("client", "join", address, tmp_path / "one", "--token", made["token"])
    said = nvpool("client", "join", address, tmp_path / "two", "--token", made["token"], code=1).stderr
    assert "nvpool client token" in said and "nvpool node token" not in said


def test_changes_are_in_the_audit_log(pool_on_tcp):
    pool = pool_on_tcp
    nvpool("volume", "create", pool, "audited", "--size", "1GiB")
    nvpool("volume", "grant", pool, "audited", "client/x.00000000", "ro", "--force")
    nvpool("client", "token", pool)
    nvpool("client", "remove", pool, "client/none.00000000", code=1)
    found = [
        (one["event"], one["result"])
        for one in as_json("audit", pool)
        if one["who"].get("uid") == os.geteuid()
    ]
    for event in (
        ("start", "done"),
        ("volume-create", "done"),
        ("volume-grant", "done"),
        ("token", "done"),
        ("member-remove", "failed"),
    ):
        assert event in found
    grant = next(
        one
        for one in as_json("audit", pool, "--since", "1h")
        if one["event"] == "volume-grant" and one["what"].get("volume") == "audited"
    )
    assert (
        grant["what"]["client"] == "client/x.00000000"
        and grant["what"]["right"] == "ro"
        and grant["who"]["pid"] > 0
    )
    assert "nvp1." not in (Path(pool) / "log" / "audit.log").read_text()


def test_certificate_is_renewed_under_a_new_key(pool_on_tcp, tmp_path):
    pool = pool_on_tcp

    def own():
        return next(one for one in as_json("cert", "ls", pool) if one["role"] == "node")

    before, key = own(), (Path(pool) / "secret" / "member.key").read_bytes()
    assert before["days_left"] > 80 and not before["revoked"]
    done = as_json("cert", "rotate", pool, "--new-key")
    assert {one["kind"] for one in done["certificates"]} == {
        "authority",
        "member",
        "etcd-authority",
        "etcd-member",
    }
    assert own()["to"] >= before["to"] and own()["member"] == before["member"]
    assert (Path(pool) / "secret" / "member.key").read_bytes() != key
    made = as_json("client", "token", pool)
    nvpool(
        "client",
        "join",
        made["address"].removeprefix("stream://"),
        tmp_path / "client",
        "--token",
        made["token"],
    )
    member = next(
        one["member"] for one in as_json("cert", "ls", pool) if one["role"] == "client" and not one["revoked"]
    )
    nvpool("cert", "revoke", pool, member)
    assert next(one for one in as_json("cert", "ls", pool) if one["member"] == member)["revoked"]
    assert as_json("status", pool)["pool"]["state"] == "serving"


def test_refusals_print_no_progress(pool, tmp_path):
    (tmp_path / "text").write_text("hello")
    for words in (
        ("export", f"{pool}:/nowhere", tmp_path / "y"),
        ("load", pool, tmp_path / "text"),
        ("dump", pool, tmp_path / "no" / "such"),
    ):
        assert len(nvpool(*words, code=1).stderr.splitlines()) == 1


def test_dump_loads_into_an_empty_pool_only(pool, tree, tmp_path):
    nvpool("import", tree, f"{pool}:/dumped")
    records = as_json("dump", pool, tmp_path / "dump")["records"]
    assert records > 43
    content = (tmp_path / "dump").read_bytes()
    (tmp_path / "cut").write_bytes(content[:-9])
    (tmp_path / "flipped").write_bytes(content[:400] + bytes([content[400] ^ 1]) + content[401:])
    nvpool("load", pool, tmp_path / "dump", code=1)
    nvpool("dev", "up", tmp_path / "q", "--size", "256M", "--size", "512M")
    try:
        assert "cut short" in nvpool("load", tmp_path / "q", tmp_path / "cut", code=4).stderr
        nvpool("load", tmp_path / "q", tmp_path / "flipped", code=4)
        found = as_json("load", tmp_path / "q", tmp_path / "dump")
        assert found["records"] == records and found["problems"] == [] and found["files_sampled"] > 40
        assert found["files_without_data"] == found["files_sampled"], "contents are not in a dump"
        there, here = (as_json("file", "info", f"{place}:/dumped/deep/3") for place in (tmp_path / "q", pool))
        assert {key: here[key] for key in ("inode", "size", "mode", "mtime_ns", "cut")} == {
            key: there[key] for key in ("inode", "size", "mode", "mtime_ns", "cut")
        }
    finally:
        nvpool("dev", "down", tmp_path / "q")


def test_load_reports_missing_contents(tmp_path):
    (tmp_path / "file").write_text("content")
    nvpool("dev", "up", tmp_path / "q", "--size", "128M")
    nvpool("import", tmp_path / "file", f"{tmp_path / 'q'}:/file")
    nvpool("dump", tmp_path / "q", tmp_path / "dump")
    nvpool("dev", "down", tmp_path / "q")
    nvpool("dev", "up", tmp_path / "q", "--size", "128M")
    try:
        done = nvpool("load", tmp_path / "q", tmp_path / "dump")
        assert "contents of files are not in a dump" in done.stdout
        assert "1 of 1 sampled files have no data here" in done.stderr and "nvpool import" in done.stderr
        nvpool("import", "--compare", tmp_path / "file", f"{tmp_path / 'q'}:/file")
        nvpool("export", f"{tmp_path / 'q'}:/file", tmp_path / "back")
        assert (tmp_path / "back").read_text() == "content"
    finally:
        nvpool("dev", "down", tmp_path / "q")


def test_fsck_names_the_file_of_a_flipped_byte(tmp_path):
    (tmp_path / "src").mkdir()
    mark = b"THIS IS THE CONTENT THAT IS GOING TO ROT " * 100
    (tmp_path / "src" / "rotten").write_bytes(mark)
    (tmp_path / "src" / "sound").write_bytes(b"s" * 5000)
    nvpool("dev", "up", tmp_path / "q", "--size", "128M")
    try:
        nvpool("import", tmp_path / "src", f"{tmp_path / 'q'}:/")
        assert as_json("fsck", tmp_path / "q")["unrepaired"] == 0
        flipped = 0
        for path in (tmp_path / "q" / "targets").rglob("*"):
            if path.is_file() and (at := find_in(path, mark[:200])) is not None:
                with open(path, "r+b") as file:
                    file.seek(at + 7)
                    file.write(b"?")
                flipped += 1
        assert flipped == 1
        found = as_json("fsck", tmp_path / "q", code=4)
        assert found["unrepaired"] == 1 and "/rotten" in found["problems"][0]["text"]
        assert "--repair" in nvpool("fsck", tmp_path / "q", code=4).stderr
        nvpool("fsck", tmp_path / "q", "--no-scrub")
        out = as_json("export", f"{tmp_path / 'q'}:/", tmp_path / "out", code=1)
        assert [Path(failure["path"]).name for failure in out["failures"]] == ["rotten"]
        assert (tmp_path / "out" / "sound").read_bytes() == b"s" * 5000
    finally:
        nvpool("dev", "down", tmp_path / "q")


def find_in(path: Path, wanted: bytes) -> int | None:
    with open(path, "rb") as file:
        at = 0
        while piece := file.read(MIB):
            if (place := piece.find(wanted)) >= 0:
                return at + place
            at += len(piece)
    return None


def import_command(source, place, *options):
    return command(Program.CLI, "import", str(source), place, *options)


def wait_until_all_serve(pool, without):
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        done = subprocess.run(
            command(Program.CLI, "status", str(pool), "--check", "--json"), capture_output=True, text=True
        )
        if not done.returncode and without.isdisjoint(
            process["pid"] for process in json.loads(done.stdout)["processes"]
        ):
            return
    raise AssertionError(f"the pool does not come back: {done.stdout}{done.stderr}")


def wait_until_visible(place, moving):
    """Poll without starting a program: while a program starts, the import may complete."""
    deadline = time.monotonic() + 120
    directory, _, path = place.partition(":")
    with contextlib.closing(connect(directory)) as client:
        while moving.poll() is None and time.monotonic() < deadline:
            with contextlib.suppress(FileNotFoundError):
                client.stat(path)
                return
            time.sleep(0.005)
    raise AssertionError(f"{place} never appeared, or the import completed too soon")


def test_import_survives_the_death_of_every_daemon(pool, tmp_path):
    (tmp_path / "src").mkdir()
    for number in range(2000):
        (tmp_path / "src" / f"{number}").write_bytes(os.urandom(9_000))
    processes = as_json("status", pool)["processes"]
    moving = subprocess.Popen(
        import_command(tmp_path / "src", f"{pool}:/killed", "--json", "--parallel", "1"),
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        wait_until_visible(f"{pool}:/killed", moving)
        moving.send_signal(signal.SIGSTOP)  # so that the import does not complete before the first kill
        assert moving.poll() is None
        for roles in (
            ("store", "meta"),
            ("supervisor",),
        ):  # never all together: none would be left to restart the others
            for process in processes:
                if process["role"] in roles:
                    os.kill(process["pid"], 9)
            moving.send_signal(signal.SIGCONT)
            wait_until_all_serve(pool, {process["pid"] for process in processes if process["role"] in roles})
        out, _ = moving.communicate(timeout=240)
    finally:
        moving.kill()
    assert moving.returncode == 0 and json.loads(out)["failed"] == 0
    nvpool("export", f"{pool}:/killed", tmp_path / "out")
    assert_same_tree(tmp_path / "src", tmp_path / "out")
    nvpool("fsck", pool)


def test_interrupted_import_is_resumed(pool, tmp_path):
    (tmp_path / "src").mkdir()
    for number in range(4000):  # several seconds of work
        (tmp_path / "src" / f"{number}").write_bytes(os.urandom(9_000))
    command = import_command(tmp_path / "src", f"{pool}:/interrupted", "--parallel", "1")
    moving = subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        wait_until_visible(f"{pool}:/interrupted", moving)
        moving.send_signal(signal.SIGINT)
        _, errors = moving.communicate(timeout=240)
    finally:
        moving.kill()
    assert moving.returncode == 130 and "interrupted" in errors
    assert as_json("import", tmp_path / "src", f"{pool}:/interrupted")["failed"] == 0
    nvpool("export", f"{pool}:/interrupted", tmp_path / "out")
    assert_same_tree(tmp_path / "src", tmp_path / "out")


def test_bench_compares_the_pool_with_the_local_drive(pool):
    found = as_json("bench", pool, "--size", "16M", "--seconds", "0.1")
    assert all(line["sdk"]["rate"] > 0 for line in found if "O_DIRECT" not in line["load"])
    assert all(line["local"]["p99_us"] > 0 for line in found if "O_DIRECT" not in line["load"])
    listing = nvpool("import", "--help").stdout
    assert "examples:" in listing


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_creator_of_a_temporary_pool_can_write_to_it():
    nobody = 65534
    with tempfile.TemporaryDirectory(prefix="nvpool-", dir="/tmp") as directory:
        os.chown(directory, nobody, nobody)

        def as_nobody(*words):
            subprocess.run(
                command(Program.CLI, *words),
                user=nobody,
                group=nobody,
                extra_groups=[],
                cwd=directory,
                env={**os.environ, "HOME": directory},
                check=True,
                timeout=240,
            )

        as_nobody("dev", "up", f"{directory}/p", "--size", "128M")
        try:
            with connect(f"{directory}/p") as pool:
                found = pool.stat("/")
            assert (found.st_uid, found.st_gid) == (nobody, nobody)
        finally:
            as_nobody("dev", "down", f"{directory}/p")
