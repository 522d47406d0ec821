"""What bridge/volumes promises, over a pool in memory: everything may be repeated, and a death between two steps leaves a
reference too many, never one too few."""

from __future__ import annotations

import asyncio
import json
import unicodedata
from dataclasses import replace
from pathlib import PurePath

import pytest
from hypothesis import given
from hypothesis import strategies as st
from volumes_twin import TwinPool, WrittenBinds

from nvpool.bridge import volumes as bridge_volumes
from nvpool.bridge.container_mounts import volumes_in_containers
from nvpool.bridge.options import checked_name, checked_subpath, parse_options
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
    return TwinPool()


@pytest.fixture
def bridge(pool, tmp_path):
    return opened(pool, tmp_path)


def opened(pool, place, clock=None):
    """A bridge as it begins; the next one over the same place finds what this one leaves."""
    made = BridgeVolumes(pool, place / "pool", place / "state", node="here", clock=clock or ManualClock())
    made._binds = WrittenBinds(made._binds)
    asyncio.run(made.begin())
    return made


def do(wish):
    return asyncio.run(wish)


# -- names -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", BAD_NAMES, ids=lambda name: ascii(name)[:30])
def test_a_name_that_could_lead_elsewhere_is_refused_by_every_operation(bridge, pool, name, tmp_path):
    for wish in (
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
            do(wish())
        assert type(refused.value) is InvalidRequest
        assert len(str(refused.value)) < 400 and str(refused.value).isprintable()
    assert not pool.there


@given(st.text(max_size=20))
def test_a_name_that_passes_is_one_component_and_has_one_unicode_form(name):
    try:
        checked_name(name)
    except NvpoolError:
        return
    assert name not in (".", "..") and "/" not in name and name.isascii() and "\0" not in name
    assert {unicodedata.normalize(form, name) for form in ("NFC", "NFD", "NFKC", "NFKD")} == {name}


@pytest.mark.parametrize("subpath", BAD_SUBPATHS, ids=lambda name: ascii(name)[:30])
def test_a_subpath_that_leads_out_is_refused(bridge, subpath):
    with pytest.raises(NvpoolError):
        do(bridge.create("v", {"subpath": subpath}))
    do(bridge.create("v"))
    with pytest.raises(NvpoolError):
        do(bridge.stage("v", "docker/1", subpath=subpath))
    assert do(bridge.holders("v")) == []


def test_a_subpath_is_written_in_one_way():
    assert checked_subpath("./a//b/.") == "a/b"


@pytest.mark.parametrize("holder", ["", "/x", "a b", "a\0", "x" * 181, "ä", 5])
def test_an_id_of_a_holder_that_makes_no_sense_is_refused(bridge, holder):
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
def test_a_wrong_option_is_named_and_makes_nothing(bridge, pool, options):
    with pytest.raises(InvalidRequest, match=next(iter(options))):
        do(bridge.create("v", options))
    assert not pool.there


def test_options_as_people_write_them():
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


def test_everything_twice_is_as_once(bridge, pool, tmp_path):
    for _ in range(2):
        assert do(bridge.create("v", {"size": "1M"})).bytes_max == 1 << 20
    for _ in range(2):
        place = do(bridge.stage("v", "docker/1"))
    assert do(bridge.holders("v")) == ["docker/1"] and pool.there["v"].attachments == ("here/docker/1",)
    assert bridge._binds.bound == {place: ("v", False, "")} and do(bridge.path("v")) == place
    for _ in range(2):
        do(bridge.publish("v", "docker/1", tmp_path / "target", read_only=True))
    for _ in range(2):
        do(bridge.unpublish(tmp_path / "target"))
    for _ in range(2):
        do(bridge.unstage("v", "docker/1"))
    assert not bridge._binds.bound and pool.there["v"].attachments == () and do(bridge.path("v")) is None
    for _ in range(2):
        do(bridge.remove("v"))
    assert not pool.there


def test_a_volume_that_is_there_with_other_options_is_not_changed(bridge, pool):
    do(bridge.create("v", {"size": "1M", "subpath": "a"}))
    for other in ({"size": "2M"}, {"files": "7"}, {"replicas": "3"}, {"subpath": "b"}):
        with pytest.raises(AlreadyExists):
            do(bridge.create("v", other))
    assert do(bridge.create("v")).bytes_max == 1 << 20, "what was not asked for is taken as it is"


def test_a_volume_with_files_is_neither_sealed_nor_led_elsewhere_by_a_repeated_create(bridge, pool):
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


def test_a_create_that_was_interrupted_before_the_seal_is_finished_by_the_next(bridge, pool):
    pool.faults["seal"] = Unavailable("away")
    with pytest.raises(Unavailable):
        do(bridge.create("v", {"sealed": "true", "subpath": "a"}))
    pool.faults.clear()
    assert do(bridge.create("v", {"sealed": "true", "subpath": "a"})).sealed


def test_a_volume_is_in_use_until_its_last_holder_has_gone(bridge, pool):
    do(bridge.create("v"))
    do(bridge.stage("v", "docker/1"))
    do(bridge.stage("v", "docker/2"))
    do(bridge.unstage("v", "docker/1"))
    with pytest.raises(InUse, match="stop the containers"):
        do(bridge.remove("v"))
    assert bridge._binds.bound, "the other one sees it still"
    do(bridge.unstage("v", "docker/2"))
    assert not bridge._binds.bound
    do(bridge.remove("v"))


def test_a_volume_that_another_host_uses_is_not_removed(bridge, pool):
    do(bridge.create("v"))
    do(pool.attach("v", "elsewhere/docker/9"))
    with pytest.raises(InUse, match="elsewhere"):
        do(bridge.remove("v"))


def test_a_sealed_volume_is_seen_read_only(bridge):
    do(bridge.create("v", {"sealed": "true"}))
    place = do(bridge.stage("v", "docker/1"))
    assert bridge._binds.bound[place] == ("v", True, "")


def test_the_stored_subpath_is_what_is_seen(bridge, pool, tmp_path):
    do(bridge.create("v", {"subpath": "train/2024"}))
    place = do(opened(pool, tmp_path / "other").stage("v", "docker/1"))
    assert "rw-" in place.name
    assert bridge._binds.place("v", False, "train/2024").name == place.name


def test_one_holder_has_a_volume_in_one_way(bridge):
    do(bridge.create("v"))
    do(bridge.stage("v", "csi/1"))
    for other in ({"read_only": True}, {"subpath": "a"}):
        with pytest.raises(AlreadyExists):
            do(bridge.stage("v", "csi/1", **other))


def test_what_is_published_is_not_taken_away_and_a_place_is_published_once(bridge, tmp_path):
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


def test_a_volume_grows_and_does_not_shrink(bridge):
    do(bridge.create("v", {"size": "1M"}))
    assert do(bridge.expand("v", 2 << 20)).bytes_max == 2 << 20
    assert do(bridge.expand("v", 1 << 20)).bytes_max == 2 << 20
    do(bridge.create("w"))
    assert do(bridge.expand("w", 1 << 20)).bytes_max == 0, "it takes more than that already"


def test_sizes_of_a_volume_are_its_quota_or_what_the_pool_has(bridge):
    do(bridge.create("v", {"size": "1M"}))
    do(bridge.create("w"))
    assert do(bridge.stats("v"))[:3] == (1 << 20, 0, 1 << 20)
    assert do(bridge.stats("w"))[:3] == (4096000, 0, 4096000)
    assert do(bridge.capacity()) == 4096000


def test_a_pool_that_is_not_mounted_is_no_good_condition(bridge):
    do(bridge.create("v"))
    assert do(bridge.condition("v")).abnormal


# -- deaths and faults -----------------------------------------------------------------------------------------------


def test_references_outlive_the_bridge(bridge, pool, tmp_path):
    do(bridge.create("v"))
    do(bridge.stage("v", "docker/1"))
    do(pool.detach("v", "here/docker/1"))  # what the pool has lost
    after = opened(pool, tmp_path)
    assert do(after.holders("v")) == ["docker/1"] and pool.there["v"].attachments == ("here/docker/1",)
    do(after.unstage("v", "docker/1"))
    assert pool.there["v"].attachments == ()


def test_references_end_with_the_boot_in_which_they_were_made(bridge, pool, tmp_path, monkeypatch):
    do(bridge.create("v"))
    do(bridge.stage("v", "docker/1"))
    monkeypatch.setattr(bridge_volumes, "boot_id", lambda: "another")
    after = opened(pool, tmp_path)
    assert do(after.holders("v")) == [] and pool.there["v"].attachments == ()


@pytest.mark.parametrize("step", ["attach", "bind", "mounted"])
@pytest.mark.parametrize("error", [Unavailable("away"), TooManySymlinks("a link")])
def test_a_stage_that_fails_holds_nothing(bridge, pool, step, error):
    do(bridge.create("v"))
    if step == "attach":
        pool.faults["attach"] = error
    elif step == "bind":
        bridge._binds.fault = error
    else:

        async def mounted():
            raise error

        bridge._mounted = mounted
    with pytest.raises(type(error)):
        do(bridge.stage("v", "docker/1"))
    assert do(bridge.holders("v")) == [] and not bridge._binds.bound and pool.there["v"].attachments == ()


def test_a_stage_that_was_cut_off_is_settled_later(bridge, pool):
    do(bridge.create("v"))
    bridge._binds.fault = asyncio.CancelledError()
    with pytest.raises(asyncio.CancelledError):
        do(bridge.stage("v", "docker/1"))
    assert do(bridge.holders("v")) == [] and pool.there["v"].attachments == ("here/docker/1",)
    assert do(bridge.settle()) == 0
    assert pool.there["v"].attachments == ()


def test_an_unstage_that_the_pool_does_not_hear_is_told_later_also_by_the_next_bridge(bridge, pool, tmp_path):
    do(bridge.create("v"))
    do(bridge.stage("v", "docker/1"))
    pool.faults["detach"] = Unavailable("away")
    with pytest.raises(Unavailable):
        do(bridge.unstage("v", "docker/1"))
    assert do(bridge.holders("v")) == [] and not bridge._binds.bound
    assert do(bridge.settle()) == 1
    pool.faults.clear()
    opened(pool, tmp_path)
    assert pool.there["v"].attachments == ()


def test_a_death_after_any_write_of_the_state_leaves_no_volume_removable_that_is_seen(
    bridge, pool, tmp_path, monkeypatch
):
    # The state is written before the pool is told of a new user, and after it was told of one that went.
    do(bridge.create("v"))
    orders = []
    attach, detach = pool.attach, pool.detach

    async def spied_attach(name, holder):
        orders.append(
            ("attach", json.loads((tmp_path / "state/references.json").read_text())["references"]["v"])
        )
        await attach(name, holder)

    async def spied_detach(name, holder):
        orders.append(("detach", dict(bridge._binds.bound)))
        await detach(name, holder)

    monkeypatch.setattr(pool, "attach", spied_attach)
    monkeypatch.setattr(pool, "detach", spied_detach)
    do(bridge.stage("v", "docker/1"))
    do(bridge.unstage("v", "docker/1"))
    assert [order for order, _ in orders] == ["attach", "detach"]
    assert "docker/1" in orders[0][1] and orders[1][1] == {}


@pytest.mark.parametrize("in_use", [set(), {"v"}])
def test_an_engine_that_starts_anew_ends_what_no_container_sees(pool, tmp_path, monkeypatch, in_use):
    clock = ManualClock()
    bridge = opened(pool, tmp_path, clock)
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


def test_a_volume_is_in_use_where_a_container_sees_it_and_not_where_a_copy_of_the_binds_is(tmp_path):
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
def test_a_state_that_can_not_be_read_is_refused_with_what_to_do(pool, tmp_path, content, error):
    (tmp_path / "state").mkdir()
    (tmp_path / "state/references.json").write_bytes(content)
    with pytest.raises(error, match=r"remove it|use the nvpool"):
        opened(pool, tmp_path)


def test_requests_for_one_volume_wait_for_one_another_and_others_do_not(bridge, pool):
    async def scene():
        await bridge.create("v")
        await bridge.create("w")
        hold = asyncio.Event()

        async def mounted():
            await hold.wait()

        bridge._mounted = mounted
        first = asyncio.ensure_future(bridge.stage("v", "docker/1"))
        await asyncio.sleep(0)
        second = asyncio.ensure_future(bridge.remove("v"))
        assert (await asyncio.wait_for(bridge.expand("w", 1), 5)).name == "w"
        assert not second.done()
        hold.set()
        await first
        with pytest.raises(InUse):
            await second

    do(scene())
