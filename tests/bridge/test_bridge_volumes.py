"""bridge/volumes over a pool in memory: every operation may be repeated.

A death between two steps leaves at most an extra reference, never a missing one.
"""

from __future__ import annotations

import asyncio
import json
import unicodedata
from dataclasses import replace
from pathlib import PurePath

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nvpool.bridge import volumes as bridge_volumes
from nvpool.bridge.container_mount_scan import volumes_in_containers
from nvpool.bridge.request_validation import checked_name, checked_subpath, parse_options
from nvpool.bridge.volumes import SETTLED_S, BridgeVolumes
from nvpool.core.clock import ManualClock
from nvpool.core.errors import (
    AlreadyExists,
    CorruptRecord,
    InUse,
    InvalidRequest,
    NotFound,
    NvpoolError,
    TooManySymlinks,
    Unavailable,
    WrongFormat,
)
from tests.bridge.fake_volumes import FakePool, WrittenBinds

pytestmark = pytest.mark.t1

BAD_NAMES = [
    "",
    ".",
    "..",
    "../x",
    "a/b",
    "/etc",
    "a\0b",
    "x" * 10_000,
    "ä",
    unicodedata.normalize("NFD", "é"),
    "-rf",
    " a",
    "a\n",
    "a b",
    "\ud800",
    "a\\b",
    "٣",
]
BAD_SUBPATHS = [
    "..",
    "../x",
    "a/../../b",
    "/etc",
    "a\0b",
    "x" * 10_000,
    "/".join("a" * 255 for _ in range(20)),
    "\ud800",
]


@pytest.fixture
def pool():
    return FakePool()


@pytest.fixture
def bridge(pool, tmp_path):
    return new_bridge(pool, tmp_path)


def new_bridge(pool, place, clock=None):
    """A new bridge; the next one over the same folder finds the state of this one."""
    made = BridgeVolumes(pool, place / "pool", place / "state", node="here", clock=clock or ManualClock())
    made.binds = WrittenBinds(made.binds)
    asyncio.run(made.begin())
    return made


def do(awaitable):
    return asyncio.run(awaitable)


# -- names -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", BAD_NAMES, ids=lambda name: ascii(name)[:30])
def test_unsafe_name_is_refused_by_every_operation(bridge, pool, name, tmp_path):
    for operation in (
        lambda: bridge.create(name),
        lambda: bridge.remove(name),
        lambda: bridge.get(name),
        lambda: bridge.path(name),
        lambda: bridge.expand(name, 1),
        lambda: bridge.stage(name, "docker/1"),
        lambda: bridge.stats(name),
        lambda: bridge.unstage(name, "docker/1"),
        lambda: bridge.condition(name),
        lambda: bridge.holders(name),
        lambda: bridge.publish(name, "docker/1", tmp_path / "target"),
    ):
        with pytest.raises(NvpoolError) as refused:
            do(operation())
        assert type(refused.value) is InvalidRequest
        assert len(str(refused.value)) < 400 and str(refused.value).isprintable()
    assert not pool.there


@given(st.text(max_size=20))
def test_valid_name_is_one_component_in_one_unicode_form(name):
    try:
        checked_name(name)
    except NvpoolError:
        return
    assert name not in (".", "..") and "/" not in name and name.isascii() and "\0" not in name
    assert {unicodedata.normalize(form, name) for form in ("NFC", "NFD", "NFKC", "NFKD")} == {name}


@pytest.mark.parametrize("subpath", BAD_SUBPATHS, ids=lambda name: ascii(name)[:30])
def test_subpath_that_leaves_the_volume_is_refused(bridge, subpath):
    with pytest.raises(NvpoolError):
        do(bridge.create("v", {"subpath": subpath}))
    do(bridge.create("v"))
    with pytest.raises(NvpoolError):
        do(bridge.stage("v", "docker/1", subpath=subpath))
    assert do(bridge.holders("v")) == []


def test_subpath_is_normalized():
    assert checked_subpath("./a//b/.") == "a/b"


@pytest.mark.parametrize("holder", ["", "/x", "a b", "a\0", "x" * 181, "ä", 5])
def test_invalid_holder_id_is_refused(bridge, holder):
    do(bridge.create("v"))
    with pytest.raises(InvalidRequest):
        do(bridge.stage("v", holder))


@pytest.mark.parametrize(
    "options",
    [
        {"size": "-1"},
        {"size": "much"},
        {"size": "0"},
        {"files": "1.5"},
        {"files": "0"},
        {"replicas": "99"},
        {"sealed": "maybe"},
        {"colour": "red"},
        {"size": 5},
        {"Size": "1G"},
    ],
)
def test_wrong_option_is_named_and_creates_nothing(bridge, pool, options):
    with pytest.raises(InvalidRequest, match=next(iter(options))):
        do(bridge.create("v", options))
    assert not pool.there


def test_options_are_parsed():
    found = parse_options(
        {"size": "1.5G", "files": "1000", "replicas": "2", "sealed": "true", "subpath": "a/b/"}
    )
    assert found == (3 << 29, 1000, 2, True, "a/b")
    for size, said in (
        ("0.5", "'0.5' is out of range: .* 8 EiB$"),
        ("ten", "'ten' is not a size; write it like .*1.5G$"),
    ):
        with pytest.raises(InvalidRequest, match=f"the option size: {said}"):
            parse_options({"size": size})
    with pytest.raises(InvalidRequest, match="replicas is '9', and shall be a whole number from 1 to 3"):
        parse_options({"replicas": "9"})


# -- repeatable ------------------------------------------------------------------------------------------------------


def test_operations_are_idempotent(bridge, pool, tmp_path):
    for _ in range(2):
        assert do(bridge.create("v", {"size": "1M"})).bytes_max == 1 << 20
    for _ in range(2):
        place = do(bridge.stage("v", "docker/1"))
    assert do(bridge.holders("v")) == ["docker/1"] and pool.there["v"].attachments == ("here/docker/1",)
    assert bridge.binds.bound == {place: ("v", False, "")} and do(bridge.path("v")) == place
    for _ in range(2):
        do(bridge.publish("v", "docker/1", tmp_path / "target", read_only=True))
    for _ in range(2):
        do(bridge.unpublish(tmp_path / "target"))
    for _ in range(2):
        do(bridge.unstage("v", "docker/1"))
    assert not bridge.binds.bound and pool.there["v"].attachments == () and do(bridge.path("v")) is None
    for _ in range(2):
        do(bridge.remove("v"))
    assert not pool.there


def test_create_never_changes_an_existing_volume(bridge, pool):
    do(bridge.create("v", {"size": "1M", "subpath": "a"}))
    for other in ({"size": "2M"}, {"files": "7"}, {"replicas": "3"}, {"subpath": "b"}):
        with pytest.raises(AlreadyExists):
            do(bridge.create("v", other))
    assert do(bridge.create("v")).bytes_max == 1 << 20, "an option that is not given is not compared"


def test_repeated_create_does_not_seal_or_redirect_files(bridge, pool):
    do(bridge.create("v", {"size": "1M"}))
    pool.there["v"] = replace(pool.there["v"], files_used=1)
    for other, remedy in (({"sealed": "true"}, "nvpool volume seal"), ({"subpath": "a"}, "no subpath")):
        with pytest.raises(AlreadyExists, match=remedy):
            do(bridge.create("v", other))
    assert not pool.there["v"].sealed and not pool.attributes
    assert not do(bridge.create("v", {"sealed": "false"})).sealed
    pool.there["v"] = replace(pool.there["v"], sealed=True)
    assert do(bridge.create("v")).sealed and do(bridge.create("v", {"sealed": "true"})).sealed
    with pytest.raises(AlreadyExists, match="sealed for ever"):
        do(bridge.create("v", {"sealed": "false"}))


def test_repeated_create_completes_an_interrupted_seal(bridge, pool):
    pool.faults["seal"] = Unavailable("away")
    with pytest.raises(Unavailable):
        do(bridge.create("v", {"sealed": "true", "subpath": "a"}))
    pool.faults.clear()
    assert do(bridge.create("v", {"sealed": "true", "subpath": "a"})).sealed


def test_volume_is_in_use_until_its_last_holder_leaves(bridge, pool):
    do(bridge.create("v"))
    do(bridge.stage("v", "docker/1"))
    do(bridge.stage("v", "docker/2"))
    do(bridge.unstage("v", "docker/1"))
    with pytest.raises(InUse, match="stop the containers"):
        do(bridge.remove("v"))
    assert bridge.binds.bound, "the other holder still sees the volume"
    do(bridge.unstage("v", "docker/2"))
    assert not bridge.binds.bound
    do(bridge.remove("v"))


def test_volume_used_by_another_host_is_not_removed(bridge, pool):
    do(bridge.create("v"))
    do(pool.attach("v", "elsewhere/docker/9"))
    with pytest.raises(InUse, match="elsewhere"):
        do(bridge.remove("v"))


def test_sealed_volume_is_bound_read_only(bridge):
    do(bridge.create("v", {"sealed": "true"}))
    place = do(bridge.stage("v", "docker/1"))
    assert bridge.binds.bound[place] == ("v", True, "")


def test_stored_subpath_is_bound(bridge, pool, tmp_path):
    do(bridge.create("v", {"subpath": "train/2024"}))
    place = do(new_bridge(pool, tmp_path / "other").stage("v", "docker/1"))
    assert "rw-" in place.name
    assert bridge.binds.place("v", False, "train/2024").name == place.name


def test_holder_stages_a_volume_in_one_way(bridge):
    do(bridge.create("v"))
    do(bridge.stage("v", "csi/1"))
    for other in ({"read_only": True}, {"subpath": "a"}):
        with pytest.raises(AlreadyExists):
            do(bridge.stage("v", "csi/1", **other))


def test_published_volume_is_not_unstaged(bridge, tmp_path):
    do(bridge.create("v"))
    with pytest.raises(NotFound):
        do(bridge.publish("v", "csi/1", tmp_path / "a"))
    do(bridge.stage("v", "csi/1"))
    do(bridge.publish("v", "csi/1", tmp_path / "a"))
    with pytest.raises(AlreadyExists):
        do(bridge.publish("v", "csi/1", tmp_path / "a", read_only=True))
    with pytest.raises(InUse):
        do(bridge.unstage("v", "csi/1"))
    for target in ("relative", "/a/../../etc", "/a\0b"):
        with pytest.raises(InvalidRequest):
            do(bridge.publish("v", "csi/1", target))


def test_volume_grows_and_does_not_shrink(bridge):
    do(bridge.create("v", {"size": "1M"}))
    assert do(bridge.expand("v", 2 << 20)).bytes_max == 2 << 20
    assert do(bridge.expand("v", 1 << 20)).bytes_max == 2 << 20
    do(bridge.create("w"))
    assert do(bridge.expand("w", 1 << 20)).bytes_max == 0, (
        "a volume without quota takes more than that already"
    )


def test_volume_size_is_its_quota_or_the_pools(bridge):
    do(bridge.create("v", {"size": "1M"}))
    do(bridge.create("w"))
    assert do(bridge.stats("v"))[:3] == (1 << 20, 0, 1 << 20)
    assert do(bridge.stats("w"))[:3] == (4096000, 0, 4096000)
    assert do(bridge.capacity()) == 4096000


def test_unmounted_pool_is_an_abnormal_condition(bridge):
    do(bridge.create("v"))
    assert do(bridge.condition("v")).abnormal


# -- deaths and faults -----------------------------------------------------------------------------------------------


def test_references_survive_a_restart_of_the_bridge(bridge, pool, tmp_path):
    do(bridge.create("v"))
    do(bridge.stage("v", "docker/1"))
    do(pool.detach("v", "here/docker/1"))  # the pool loses the attachment
    after = new_bridge(pool, tmp_path)
    assert do(after.holders("v")) == ["docker/1"] and pool.there["v"].attachments == ("here/docker/1",)
    do(after.unstage("v", "docker/1"))
    assert pool.there["v"].attachments == ()


def test_references_end_with_a_reboot(bridge, pool, tmp_path, monkeypatch):
    do(bridge.create("v"))
    do(bridge.stage("v", "docker/1"))
    monkeypatch.setattr(bridge_volumes, "boot_id", lambda: "another")
    after = new_bridge(pool, tmp_path)
    assert do(after.holders("v")) == [] and pool.there["v"].attachments == ()


@pytest.mark.parametrize("step", ["attach", "bind", "mounted"])
@pytest.mark.parametrize("error", [Unavailable("away"), TooManySymlinks("a link")])
def test_failed_stage_leaves_no_reference(bridge, pool, step, error):
    do(bridge.create("v"))
    if step == "attach":
        pool.faults["attach"] = error
    elif step == "bind":
        bridge.binds.fault = error
    else:

        async def mounted():
            raise error

        bridge.mounted = mounted
    with pytest.raises(type(error)):
        do(bridge.stage("v", "docker/1"))
    assert do(bridge.holders("v")) == [] and not bridge.binds.bound and pool.there["v"].attachments == ()


def test_interrupted_stage_is_settled_later(bridge, pool):
    do(bridge.create("v"))
    bridge.binds.fault = asyncio.CancelledError()
    with pytest.raises(asyncio.CancelledError):
        do(bridge.stage("v", "docker/1"))
    assert do(bridge.holders("v")) == [] and pool.there["v"].attachments == ("here/docker/1",)
    assert do(bridge.settle()) == 0
    assert pool.there["v"].attachments == ()


def test_failed_detach_is_retried_by_the_next_bridge_too(bridge, pool, tmp_path):
    do(bridge.create("v"))
    do(bridge.stage("v", "docker/1"))
    pool.faults["detach"] = Unavailable("away")
    with pytest.raises(Unavailable):
        do(bridge.unstage("v", "docker/1"))
    assert do(bridge.holders("v")) == [] and not bridge.binds.bound
    assert do(bridge.settle()) == 1
    pool.faults.clear()
    new_bridge(pool, tmp_path)
    assert pool.there["v"].attachments == ()


def test_death_between_steps_leaves_no_removable_volume_in_use(bridge, pool, tmp_path, monkeypatch):
    # The state is written before the pool learns of a new attachment, and after the pool has removed one.
    do(bridge.create("v"))
    orders = []
    attach, detach = pool.attach, pool.detach

    async def spied_attach(name, holder):
        orders.append(
            ("attach", json.loads((tmp_path / "state/references.json").read_text())["references"]["v"])
        )
        await attach(name, holder)

    async def spied_detach(name, holder):
        orders.append(("detach", dict(bridge.binds.bound)))
        await detach(name, holder)

    monkeypatch.setattr(pool, "attach", spied_attach)
    monkeypatch.setattr(pool, "detach", spied_detach)
    do(bridge.stage("v", "docker/1"))
    do(bridge.unstage("v", "docker/1"))
    assert [order for order, _ in orders] == ["attach", "detach"]
    assert "docker/1" in orders[0][1] and orders[1][1] == {}


@pytest.mark.parametrize("in_use", [set(), {"v"}])
def test_restarted_engine_ends_unused_attachments(pool, tmp_path, monkeypatch, in_use):
    clock = ManualClock()
    bridge = new_bridge(pool, tmp_path, clock)
    do(bridge.create("v"))
    do(bridge.stage("v", "docker/old"))
    do(bridge.stage("v", "csi/node"))
    clock.advance(SETTLED_S + 1)
    do(bridge.stage("v", "docker/young"))
    do(pool.attach("v", "here/docker/lost"))
    do(pool.attach("v", "elsewhere/docker/1"))
    monkeypatch.setattr(bridge_volumes, "volumes_in_containers", lambda below, own: in_use)
    ended = do(bridge.reconcile("docker/"))
    assert set(ended) == (set() if in_use else {("v", "docker/old"), ("v", "docker/lost")})
    kept = ["csi/node", "docker/young", *(["docker/lost", "docker/old"] if in_use else [])]
    assert do(bridge.holders("v")) == sorted(kept)
    assert set(pool.there["v"].attachments) == {"elsewhere/docker/1", *(f"here/{holder}" for holder in kept)}


def test_volume_in_use_is_one_that_a_container_sees(tmp_path):
    line = "50 40 0:60 {} {} rw,nosuid,nodev - {} nvpool:p rw\n"
    seen = {
        "self": ("mnt:[1]", ("/volumes/own", "/state/mounts/own/rw", "fuse.nvpool")),
        "10": ("mnt:[1]", ("/volumes/own", "/elsewhere", "fuse.nvpool")),
        "11": ("mnt:[2]", ("/volumes/shared/deep/er", "/data", "fuse.nvpool")),
        "12": ("mnt:[3]", ("/volumes/copied", "/state/mounts/copied/rw", "fuse.nvpool")),
        "13": ("mnt:[4]", ("/volumes", "/mnt/pool", "fuse.nvpool")),
        "14": ("mnt:[5]", ("/volumes/other", "/data", "ext4")),
        "15": ("mnt:[6]", ("/volumes/dead", "/a\\040b", "fuse.nvpool")),
    }
    for entry, (space, mount) in seen.items():
        (tmp_path / entry / "ns").mkdir(parents=True)
        (tmp_path / entry / "ns" / "mnt").symlink_to(space)
        (tmp_path / entry / "mountinfo").write_text(line.format(*mount))
    assert volumes_in_containers("/volumes", PurePath("/state/mounts"), tmp_path) == {"shared", "dead"}


@pytest.mark.parametrize(
    "content, error", [(b"{", CorruptRecord), (b'{"version": 99}', WrongFormat), (b"[]", CorruptRecord)]
)
def test_unreadable_state_is_refused_with_the_remedy(pool, tmp_path, content, error):
    (tmp_path / "state").mkdir()
    (tmp_path / "state/references.json").write_bytes(content)
    with pytest.raises(error, match=r"remove it|use the nvpool"):
        new_bridge(pool, tmp_path)


def test_requests_for_one_volume_are_serialized(bridge, pool):
    async def scene():
        await bridge.create("v")
        await bridge.create("w")
        hold = asyncio.Event()

        async def mounted():
            await hold.wait()

        bridge.mounted = mounted
        first = asyncio.ensure_future(bridge.stage("v", "docker/1"))
        await asyncio.sleep(0)
        second = asyncio.ensure_future(bridge.remove("v"))
        assert (await asyncio.wait_for(bridge.expand("w", 1), 60)).name == "w"
        assert not second.done()
        hold.set()
        await first
        with pytest.raises(InUse):
            await second

    do(scene())
