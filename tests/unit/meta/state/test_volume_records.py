"""Volume records: golden file, check and repair by fsck, dump and load; and authorization in a
volume."""

import json
import stat
from pathlib import Path

import pytest

from nvpool.core.errors import (
    AccessDenied,
    AlreadyExists,
    CorruptRecord,
    CrossesVolumes,
    InUse,
    InvalidRequest,
    NotFound,
    QuotaExceeded,
    ReadOnly,
)
from nvpool.core.ids import ROOT_INODE as ROOT
from nvpool.meta.operations.trash import trash_key
from nvpool.meta.requests import volume_handlers
from nvpool.meta.state import records
from nvpool.meta.state import volume_records as volumes
from nvpool.meta.state.records import Inode
from nvpool.meta.state.volume_records import (
    ATTACHED,
    TRASH,
    USE,
    VOLUME,
    Trashed,
    VolumeRecord,
    VolumeUse,
    volume_key,
)
from nvpool.meta.volumes.removal import STEP
from nvpool.rpc.peer_roles import Peer
from nvpool.rpc.v1 import meta_pb2 as pb
from tests.unit.meta.fsck.test_meta_fsck import dump_all, load_all, on_a_shard, stored
from tests.unit.meta.fsck.test_meta_load import Empty

GOLDEN = Path(__file__).parents[3] / "golden"
NUMBER = 7 << 51 | 0x4_5678_9ABC_DEF0
T = 1_700_000_000_123_456_789
PLAIN = VolumeRecord("scratch", 10 << 30, 1000, 0, T)
FULL = VolumeRecord(
    "models",
    0,
    0,
    604_800,
    T,
    volumes.SEALED | volumes.LISTED | volumes.REMOVING,
    77,
    (("client/a.11111111", False), ("client/b.22222222", True)),
)


def golden_values():
    return {
        "key: volume": volume_key(VOLUME, NUMBER).hex(),
        "key: use": volume_key(USE, NUMBER).hex(),
        "key: attachment": volume_key(ATTACHED, NUMBER, b"docker/one").hex(),
        "volume": volumes.encode_volume(PLAIN).hex(),
        "volume with grants": volumes.encode_volume(FULL).hex(),
        "use": volumes.encode_use(VolumeUse(1 << 40, 12345)).hex(),
        "attachment": volumes.encode_attached(T).hex(),
        "key: trash": trash_key(NUMBER, NUMBER + 1).hex(),
        "trash": volumes.encode_trashed(Trashed(T, T + 10**9, NUMBER, b"name")).hex(),
        "orphan that counts": records.ORPHAN_COUNTED.hex(),
        "inode in a volume": records.encode_inode(
            Inode(NUMBER + 1, 0o100644, size=4096, mtime_ns=T, atime_ns=T, ctime_ns=T, volume=NUMBER)
        ).hex(),
    }


def test_volume_records_match_the_golden_file():
    assert golden_values() == json.loads((GOLDEN / "volume_records.json").read_text())


@pytest.mark.parametrize("record", [PLAIN, FULL])
def test_volume_record_round_trips_and_parts_are_corrupt(record):
    raw = volumes.encode_volume(record)
    assert volumes.decode_volume(raw) == record
    for cut in range(len(raw)):
        with pytest.raises(CorruptRecord):
            volumes.decode_volume(raw[:cut])
    with pytest.raises(CorruptRecord):
        volumes.decode_volume(raw + b"\0")
    for kind in (VOLUME, USE):
        assert volumes.volume_of_key(volume_key(kind, NUMBER)) == NUMBER
        assert volumes.kind_of_volume_key(volume_key(kind, NUMBER)) == kind
    for key in (
        volume_key(VOLUME, NUMBER)[:-1],
        volume_key(VOLUME, NUMBER, b"x"),
        volume_key(9, NUMBER),
        b"\0\7",
    ):
        with pytest.raises(CorruptRecord):
            volumes.kind_of_volume_key(key)


def test_inode_of_a_volume_round_trips():
    inode = Inode(
        NUMBER + 1,
        0o100644,
        size=4096,
        blocks=8,
        mtime_ns=T,
        atime_ns=T,
        ctime_ns=T,
        cut=9,
        punches=4,
        volume=NUMBER,
    )
    raw = records.encode_inode(inode)
    assert records.decode_inode(inode.number, raw) == inode
    inode.volume = 0
    assert len(records.encode_inode(inode)) == len(raw) - 8


async def make(client, name=b"v", **policy):
    """A volume with entries; the inode numbers of its root, a directory and an open file of 5,000 bytes."""
    reply = await client.create(ROOT, name, stat.S_IFDIR | 0o777, volume=pb.VolumePolicy(**policy))
    root = reply.entry.attr.inode
    directory = (await client.mkdir(root, b"d")).inode
    file = (await client.file(directory, b"f", open=True, rights=2)).inode
    await client.report(file, 5000)
    return root, directory, file


async def volume_request(client, inode, operation, **fields):
    request = pb.VolumeRequest(
        session=client.session, inode=inode, action=getattr(pb.VolumeRequest, operation), **fields
    )
    return (await client.ask("VOLUME", request)).volume


@on_a_shard
async def test_fsck_finds_and_repairs_volume_damage(shard):
    client, kv = shard.client, shard.kv
    root, directory, file = await make(client)
    await client.file(root, b"gone", open=True, rights=2)
    await client.unlink(root, b"gone")  # open, so it counts
    assert await client.fsck() == []
    state = await volume_request(client, root, "SHOW")
    assert (state.files_used, state.bytes_used) == (3, 5000)
    use, record = kv.get(volume_key(USE, root)), kv.get(volume_key(VOLUME, root))
    for plant, word in (
        (lambda: shard.put(volume_key(USE, root), volumes.encode_use(VolumeUse(7, 9))), "are counted"),
        (lambda: shard.put(volume_key(USE, root), b"?"), "use of a volume"),
        (lambda: shard.put(volume_key(USE, root), None), "has no usage record"),
        (
            lambda: shard.put(volume_key(ATTACHED, root + 1, b"me"), volumes.encode_attached(T)),
            "attached to volume",
        ),
        (lambda: shard.put(volume_key(ATTACHED, root, b"me"), b"?"), "an attachment"),
        (lambda: shard.put(volume_key(VOLUME, file), record), "has no directory"),
        (lambda: shard.put(volume_key(USE, file), use), "a usage record names volume"),
        (
            lambda: shard.put(trash_key(root, file), volumes.encode_trashed(Trashed(T, T, root, b"x"))),
            "not in it",
        ),
        (lambda: shard.put(volume_key(TRASH, root, b"12345678"), b"?"), "entry of a volume's trash"),
        (
            lambda: shard.change(file, flags=shard.view.inode(file).flags | records.TRASHED),
            "marked as in the trash",
        ),
        (lambda: shard.put(volume_key(9, root), b"?"), "no record of a volume"),
    ):
        plant()
        problems = await client.fsck()
        assert [word in problem.text for problem in problems] == [True], (word, problems)
        assert all(problem.repaired for problem in await client.fsck(repair=True))
        assert await client.fsck() == []
        assert kv.get(volume_key(USE, root)) == use and kv.get(volume_key(VOLUME, root)) == record
    shard.put(volume_key(VOLUME, root), b"?")
    await client.fsck(repair=True)
    await client.fsck(repair=True)  # its entries belong to no volume from now on
    assert await client.fsck() == []
    assert not (await client.getattr(file)).attr.volume
    await client.rename(directory, b"f", ROOT, b"f")


@on_a_shard
async def test_dump_and_load_keep_volumes(shard):
    client = shard.client
    root, _, _ = await make(client, bytes_max=10_000, files_max=7, trash_s=60)
    await client.file(root, b"gone", open=True, rights=2)
    await client.unlink(root, b"gone")
    await volume_request(client, root, "ATTACH", holder="docker/ä")
    before = await volume_request(
        client, root, "GRANT", grant=pb.VolumeGrant(client="client/a.11111111", write=True)
    )
    lines = await dump_all(client)
    kept = stored(shard.kv)
    assert {"volume", "use", "attached"} <= {json.loads(line)["type"] for line in lines.splitlines()[1:]}
    assert not any(json.loads(line)["type"] == "raw" for line in lines.splitlines()[1:])
    async with Empty() as loaded:
        await load_all(loaded, lines)
        await loaded.begin()
        assert await volume_request(loaded, root, "SHOW") == before
        assert stored(loaded.service.parts.kv).items() >= kept.items()


async def trash(client, root, operation="LIST", **fields):
    request = pb.TrashRequest(
        session=client.session, inode=root, action=getattr(pb.TrashRequest, operation), **fields
    )
    return await client.ask("TRASH", request)


@on_a_shard
async def test_removed_files_stay_in_the_trash_and_are_restored(shard):
    client, service = shard.client, shard.service
    root, directory, file = await make(client, trash_s=3600)
    await client.link(file, root, b"second")
    await client.unlink(directory, b"f")
    assert not (await trash(client, root)).entries  # it still has a name
    await client.unlink(root, b"second")
    await client.rmdir(root, b"d")
    assert await client.names(root) == set() and await client.fsck() == []
    state = await volume_request(client, root, "SHOW")
    assert (state.files_used, state.bytes_used) == (2, 5000)
    entries = {entry.inode: entry for entry in (await trash(client, root)).entries}
    assert {number: (entry.directory, entry.name, entry.size) for number, entry in entries.items()} == {
        file: (root, b"second", 5000),
        directory: (root, b"d", 0),
    }
    assert entries[file].expires_ns - entries[file].removed_ns == 3600 * 10**9
    with pytest.raises(NotFound):
        await client.file(directory, b"late")  # it accepts no names
    await trash(client, root, "RESTORE", entry=file)
    with pytest.raises(NotFound):
        await trash(client, root, "RESTORE", entry=file)
    assert (await client.lookup(root, b"second")).attr.size == 5000
    await trash(client, root, "RESTORE", entry=directory)
    new = (await client.file(directory, b"new")).inode
    assert await client.fsck() == []
    # a tree is removed from the bottom, and restored with its directory first
    await client.unlink(directory, b"new")
    await client.rmdir(root, b"d")
    await trash(client, root, "RESTORE", entry=new)
    assert await client.names(root) == {b"d", b"second"} and await client.names(directory) == {b"new"}
    assert await client.fsck() == []
    # a replaced file is there too; an existing name is not replaced
    await client.file(root, b"other")
    await client.rename(root, b"other", root, b"second")
    with pytest.raises(AlreadyExists):
        await trash(client, root, "RESTORE", entry=file)
    with pytest.raises(CrossesVolumes):
        await trash(client, root, "RESTORE", entry=file, directory=ROOT, name=b"f")
    await trash(client, root, "RESTORE", entry=file, directory=directory, name=b"f")
    assert (await client.lookup(directory, b"f")).attr.size == 5000
    assert await client.fsck() == []
    # and is removed for good
    await client.unlink(directory, b"f")
    await client.unlink(directory, b"new")
    lines = await dump_all(client)
    assert sum(json.loads(line)["type"] == "trash" for line in lines.splitlines()[1:]) == 2
    with pytest.raises(NotFound):
        await trash(client, root, "PURGE", entry=directory)
    await trash(client, root, "PURGE", entry=new)
    assert (await trash(client, root, "PURGE")).purged == 1
    assert not (await trash(client, root)).entries and await client.fsck() == []
    await client.ask("RELEASE", pb.ReleaseRequest(session=client.session, inodes=file.to_bytes(8, "little")))
    state = await volume_request(client, root, "SHOW")
    assert (state.files_used, state.bytes_used) == (
        2,
        0,
    )  # the directory, and the file that took the second name
    await service.purge_more()
    assert not service.parts.view.trashes


@on_a_shard
async def test_trash_is_purged_in_time_and_with_its_volume(shard):
    client, service = shard.client, shard.service
    root, directory, file = await make(client, trash_s=3600)
    await client.ask("RELEASE", pb.ReleaseRequest(session=client.session, inodes=file.to_bytes(8, "little")))
    await client.unlink(directory, b"f")
    assert await service.purge_more() == 0
    entry = volumes.decode_trashed(shard.kv.get(trash_key(root, file)))
    shard.put(trash_key(root, file), volumes.encode_trashed(entry._replace(expires_ns=1)))
    assert await service.purge_more() == 1
    state = await volume_request(client, root, "SHOW")
    assert (state.files_used, state.bytes_used) == (1, 0) and await client.fsck() == []
    for number in range(300):
        await client.file(directory, b"%d" % number)
        await client.unlink(directory, b"%d" % number)
    await volume_request(client, root, "SET", trash_s=0)
    await client.file(directory, b"at once")
    await client.unlink(directory, b"at once")
    assert len((await trash(client, root)).entries) == 300
    assert (await volume_request(client, root, "REMOVE")).files_removing == 301
    while await service.remove_more():
        pass
    await service.remove_more()
    with pytest.raises(NotFound):
        await volume_request(client, root, "SHOW")
    assert await client.fsck() == []
    assert not shard.kv.scan(*volumes.range_of(TRASH, root >> 51), 1)


@on_a_shard
async def test_sealed_volume_refuses_changes(shard):
    client = shard.client
    root, directory, file = await make(client)
    with pytest.raises(InUse, match="open"):
        await volume_request(client, root, "SEAL")
    await client.ask("RELEASE", pb.ReleaseRequest(session=client.session, inodes=file.to_bytes(8, "little")))
    assert (await volume_request(client, root, "SEAL")).sealed
    assert (await volume_request(client, root, "SEAL")).sealed  # again
    for change in (
        lambda: client.file(root, b"new"),
        lambda: client.mkdir(directory, b"new"),
        lambda: client.unlink(directory, b"f"),
        lambda: client.rename(directory, b"f", root, b"f"),
        lambda: client.link(file, root, b"f"),
        lambda: client.setattr(file, 1, mode=0o600),
        lambda: client.setattr(file, 8, size=0),
        lambda: client.setattr(root, 1, mode=0o700),
        lambda: client.open(file, rights=2),
        lambda: client.open(file, rights=3),
        lambda: client.report(file, 6000),
        lambda: client.allocate(file, 0, 9000, grow=True),
        lambda: volume_request(client, root, "SET", bytes_max=1 << 20),
    ):
        with pytest.raises(ReadOnly):
            await change()
    assert (await client.open(file, rights=1)).grant
    watching = await type(client)(shard.service).begin(watch=True)
    assert (await watching.getattr(file)).lease_ms == 3_600_000 > (await watching.getattr(ROOT)).lease_ms > 0
    assert (await client.lookup(directory, b"f", rights=1)).attr.size == 5000
    assert await client.fsck() == []


class _ActingAs:
    """Requests of the client come from this member."""

    def __init__(self, client, member):
        self.client, self.member = client, member

    def __enter__(self):
        client = self.client
        self.session = client.service.parts.sessions.get(client.session)
        self.before = client.peer, self.session.owner
        client.peer = Peer("test", "inproc", False, self.member)
        self.session.owner = "" if self.member.startswith("node/") else self.member

    def __exit__(self, *_):
        self.client.peer, self.session.owner = self.before


@on_a_shard
async def test_listed_volume_admits_granted_clients_and_nodes(shard):
    client = shard.client
    root, directory, file = await make(client)
    reads = (
        lambda: client.lookup(root, b"d"),
        lambda: client.getattr(file),
        lambda: client.list(root),
        lambda: client.open(file, rights=1),
        lambda: client.locks(file),
    )
    writes = (
        lambda: client.open(file, rights=2),
        lambda: client.file(root, b"new"),
        lambda: client.unlink(directory, b"f"),
        lambda: client.setattr(file, 1, mode=0o600),
        lambda: client.report(file, 6000),
    )

    async def all_are(works, error_class):
        for work in works:
            if error_class is None:
                await work()
            else:
                with pytest.raises(error_class):
                    await work()

    with _ActingAs(client, "client/a.11111111"):
        await all_are(reads, None)
    await volume_request(client, root, "GRANT", grant=pb.VolumeGrant(client="client/b.22222222", write=True))
    with _ActingAs(client, "client/a.11111111"):
        await all_are((*reads, *writes), AccessDenied)
        await client.list(ROOT)
    state = await volume_request(client, root, "GRANT", grant=pb.VolumeGrant(client="client/a.11111111"))
    assert state.listed and [(grant.client, grant.write) for grant in state.grants] == [
        ("client/a.11111111", False),
        ("client/b.22222222", True),
    ]
    with _ActingAs(client, "client/a.11111111"):
        await all_are(reads, None)
        await all_are(writes, AccessDenied)
    with _ActingAs(client, "client/b.22222222"):
        await all_are(reads, None)
        await client.report(file, 6000)
    with _ActingAs(client, "bridge/c.33333333"):
        await all_are(reads, AccessDenied)
    for member in ("node/n", ""):
        with _ActingAs(client, member):
            await all_are(reads, None)
    await volume_request(client, root, "REVOKE", grant=pb.VolumeGrant(client="client/a.11111111"))
    await volume_request(client, root, "REVOKE", grant=pb.VolumeGrant(client="client/a.11111111"))
    with _ActingAs(client, "client/a.11111111"):
        await all_are(reads, AccessDenied)
        for operation in ("GRANT", "SET", "SEAL", "REMOVE"):
            with pytest.raises(AccessDenied):
                await volume_request(
                    client,
                    root,
                    operation,
                    listed=False,
                    grant=pb.VolumeGrant(client="client/a.11111111", write=True),
                )
    await volume_request(client, root, "SET", listed=False)
    with _ActingAs(client, "client/a.11111111"):
        await all_are(reads, None)
    with pytest.raises(InvalidRequest):
        await volume_request(client, root, "GRANT", grant=pb.VolumeGrant(client="somebody"))


READER, WRITER = "client/a.11111111", "client/b.22222222"


async def grant(client, root, member, write):
    await volume_request(client, root, "GRANT", grant=pb.VolumeGrant(client=member, write=write))


@on_a_shard
async def test_reader_removes_only_its_own_attachments(shard):
    client = shard.client
    root, _, _ = await make(client)
    await grant(client, root, READER, False)
    await grant(client, root, WRITER, True)
    await volume_request(client, root, "ATTACH", holder="n1/x")
    with _ActingAs(client, WRITER):
        await volume_request(client, root, "ATTACH", holder="n2/x")
    with _ActingAs(client, READER):
        for holder, owner in (("n1/x", "a node of the pool"), ("n2/x", WRITER)):
            with pytest.raises(AccessDenied, match=f"may only read in volume v, and {owner} has attached it"):
                await volume_request(client, root, "DETACH", holder=holder)
        await volume_request(client, root, "ATTACH", holder="n3/x")
        assert list((await volume_request(client, root, "DETACH", holder="n3/x")).attachments) == [
            "n1/x",
            "n2/x",
        ]
    with _ActingAs(client, WRITER):
        assert list((await volume_request(client, root, "DETACH", holder="n1/x")).attachments) == ["n2/x"]


@on_a_shard
async def test_reader_adds_a_share_of_all_attachments(shard):
    client = shard.client
    root, _, _ = await make(client)
    await grant(client, root, READER, False)
    with _ActingAs(client, READER), pytest.MonkeyPatch.context() as patch:
        patch.setattr(volume_handlers, "READER_ATTACHMENTS_MAX", 2)
        for number in range(2):
            await volume_request(client, root, "ATTACH", holder=f"n1/{number}")
        await volume_request(client, root, "ATTACH", holder="n1/0")  # it is there already
        with pytest.raises(InUse, match="2 times already, which is the most"):
            await volume_request(client, root, "ATTACH", holder="n1/2")
    await volume_request(client, root, "ATTACH", holder="n2/0")


@on_a_shard
async def test_open_files_count_only_with_a_right(shard):
    client = shard.client
    root, directory, file = await make(client)
    opened = file.to_bytes(8, "little")
    await client.ask("RELEASE", pb.ReleaseRequest(session=client.session, inodes=opened))
    await grant(client, root, WRITER, True)
    other = await type(client)(shard.service, peer=Peer("test", "inproc", False, READER)).begin()
    await other.ask("RENEW_SESSION", pb.RenewSessionRequest(session=other.session, opened=opened))
    resumed = pb.OpenSessionRequest(
        session=other.session, secret=other.secret, names_open=True, opened=opened
    )
    await other.ask("OPEN_SESSION", resumed)
    assert not shard.service.parts.sessions.get(other.session).opens
    await grant(client, root, READER, False)
    await other.open(file, rights=1)
    for operation in ("SEAL", "REMOVE"):
        with pytest.raises(InUse, match=rf"test of {READER} \(1\)"):
            await volume_request(client, root, operation)
    await volume_request(client, root, "REVOKE", grant=pb.VolumeGrant(client=READER))
    assert (await volume_request(client, root, "SEAL")).sealed


@on_a_shard
async def test_purge_ends_when_the_right_is_taken(shard):
    client, service = shard.client, shard.service
    root, directory, _ = await make(client, trash_s=3600)
    for number in range(STEP + 10):
        await client.file(directory, b"%d" % number)
        await client.unlink(directory, b"%d" % number)
    await grant(client, root, WRITER, True)
    node, before, steps = await type(client)(service).begin(), service.internal_changes.may_change, []

    async def may_change(*arguments):
        steps.append(arguments)
        if len(steps) == 2:
            await volume_request(node, root, "REVOKE", grant=pb.VolumeGrant(client=WRITER))
        return await before(*arguments)

    service.internal_changes.may_change = may_change
    with _ActingAs(client, WRITER), pytest.raises(AccessDenied):
        await trash(client, root, "PURGE")
    entries = (await trash(node, root)).entries
    assert len(entries) == 10
    with pytest.raises(AccessDenied):
        await service.trash_handlers.restore(
            pb.TrashRequest(inode=root, entry=entries[0].inode), node.session, WRITER
        )
    assert len((await trash(node, root)).entries) == 10


@on_a_shard
async def test_quota_reservation_is_bounded_by_the_volume(shard):
    client = shard.client
    root, _, file = await make(client, bytes_max=100_000)

    async def room(needed, ahead=0):
        return (
            await client.ask(
                "VOLUME_ROOM",
                pb.VolumeRoomRequest(session=client.session, inode=root, bytes=needed + ahead, needed=needed),
            )
        ).bytes

    assert await room(1000) == 1000
    assert await room(10_000, 64 << 20) == 10_000 + 85_000 // 16
    assert await room(200_000) == 95_000
    assert await room(0) == 0
    assert await room(50_000) == 50_000
    other = await type(client)(shard.service).begin()
    assert (
        await other.ask(
            "VOLUME_ROOM",
            pb.VolumeRoomRequest(session=other.session, inode=root, bytes=60_000, needed=60_000),
        )
    ).bytes == 45_000
    with pytest.raises(QuotaExceeded):
        await client.report(file, 5000 + 50_001)  # more than was reserved
    await client.report(file, 55_000)
    state = await volume_request(client, root, "SHOW")
    assert (state.bytes_used, state.bytes_reserved) == (55_000, 45_000)
    await other.ask("CLOSE_SESSION", pb.CloseSessionRequest(session=other.session))
    assert not (await volume_request(client, root, "SHOW")).bytes_reserved
    with pytest.raises(NotFound):
        await volume_request(client, root + 1, "SHOW")
