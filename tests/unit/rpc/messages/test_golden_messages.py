"""Golden values without a golden file beside their own tests: numbers, grants, data messages, the pool map.

Never regenerate a golden file to make a test pass: a different byte is a new format with a new version."""

import json
from pathlib import Path

from nvpool.core import grants, ids
from nvpool.core.ids import RequestId
from nvpool.poolmap.chains.placement import build_table
from nvpool.poolmap.chains.protocol import of_old_floor
from nvpool.poolmap.chains.tables import ChainSet, encode_chains
from nvpool.poolmap.file_layout import Layout
from nvpool.poolmap.grant_revocation import taken
from nvpool.poolmap.model import (
    MAP_FORMAT,
    Drive,
    Node,
    PartitionRange,
    PoolMap,
    PoolSettings,
    Shard,
    Target,
    decode_map,
    encode_map,
)
from nvpool.rpc.messages import read_write_codec
from nvpool.rpc.messages.direntries import pack_entry
from nvpool.rpc.v1 import data_pb2, meta_pb2
from nvpool.store.chunks.api import ChunkCopy, InodeCut
from nvpool.store.replication.transfer_server import (
    CHUNK_VERSION,
    INODE_CUT,
    WANTED,
    decode_copy,
    encode_copy,
)
from nvpool.store.server.service import EXTENT

GOLDEN = Path(__file__).parents[3] / "golden"
INODE = ids.inode_number(0x123, 0x4_5678_9ABC_DEF0)
SESSION = 0x0001_0000_0000_0005
NAMED_WITHOUT_EPOCH = {
    "ChunkDescription",
    "BadBlock",
    "FetchedChunk",
    "DataStatusRequest",
    "DataStatusReply",
    "Scrubbing",
    "UseRequest",
    "UseReply",
}
"""Parts of messages, and status and statistics of a process, which contain nothing of the pool."""

OF_OLDER_BUILDS = {"FetchReply"}
"""Golden messages that this build decodes but does not send."""


def numbers() -> dict[str, int | list[int]]:
    return {
        "root": ids.ROOT_INODE,
        "inode": INODE,
        "last inode": ids.inode_number(4095, (1 << 51) - 1),
        "version": ids.version(7, 9),
        "last version": ids.version((1 << 32) - 1, (1 << 32) - 1),
        "session": SESSION,
        "request": list(RequestId(SESSION, 63, 1 << 40)),
        "layout": list(Layout(1, 20)),
        "grant rights": [grants.READ, grants.WRITE, grants.SERVICE],
    }


def a_grant() -> bytes:
    return grants.sign(
        grants.Grant(rights=3, key=2, session=SESSION, inode=INODE, cut=5, ends_ms=1_700_000_000_000),
        bytes(range(32)),
    )


def a_grant_of_table_2() -> bytes:
    return grants.sign(grants.Grant(3, 2, SESSION, INODE, 5, 1_700_000_000_000, 2), bytes(range(32)))


def a_grant_in_a_volume() -> bytes:
    return grants.sign(
        grants.Grant(
            3,
            2,
            SESSION,
            INODE,
            5,
            1_700_000_000_000,
            2,
            0x123456,
            grants.volume_tag(INODE),
            grants.member_tag("client/one.0a1b2c3d"),
        ),
        bytes(range(32)),
    )


def messages() -> dict[str, str]:
    epoch = 0x1122_3344
    reads = read_write_codec.pack_reads([(INODE, 7, 4096, 8192, 0, 0), (1, 0, 0, 4096, 0, 0)])
    writes = read_write_codec.pack_writes([(INODE, 5, 77, 7, 100, 5000, 0, 0)])
    change = meta_pb2.Change(session=SESSION, slot=63, sequence=1 << 40, map_epoch=epoch, uid=1000, gid=100)
    made = {
        "grant": a_grant(),
        "grant of table 2": a_grant_of_table_2(),
        "grant in a volume": a_grant_in_a_volume(),
        "read entries": reads,
        "write entries": writes,
        "read results": read_write_codec.pack_read_results([(0, 1, 8192, ids.version(7, 9)), (404, 0, 0, 0)]),
        "write results": read_write_codec.pack_write_results([(0, 0, 0, ids.version(7, 10))]),
        "inodes": read_write_codec.pack_inodes([1, INODE]),
        "ReadRequest": data_pb2.ReadRequest(
            map_epoch=epoch, target=2, grants=[a_grant()], reads=reads, verify=True
        ),
        "ReadReply": data_pb2.ReadReply(map_epoch=epoch, results=b"r", checksums=b"cccc"),
        "WriteRequest": data_pb2.WriteRequest(
            map_epoch=epoch,
            target=2,
            grants=[a_grant()],
            writes=writes,
            checksums=b"cccc",
            session=SESSION,
            slot=63,
            versions=[ids.version(7, 10)],
        ),
        "WriteReply": data_pb2.WriteReply(map_epoch=epoch, results=b"r"),
        "PeerWriteRequest": data_pb2.PeerWriteRequest(
            map_epoch=epoch,
            target=2,
            authority=a_grant(),
            sender=1,
            link=3 << 32 | 4,
            table=2,
            chain_epoch=7,
            version=ids.version(7, 10),
            base=ids.version(7, 9),
            inode=INODE,
            index=3,
            offset=4095,
            cut=6,
            session=SESSION,
            slot=63,
            sequence=1 << 40,
            checksums=b"cccc",
        ),
        "PeerWriteReply": data_pb2.PeerWriteReply(map_epoch=epoch, status=210, version=ids.version(7, 10)),
        "FlushRequest": data_pb2.FlushRequest(map_epoch=epoch, target=2),
        "FlushReply": data_pb2.FlushReply(map_epoch=epoch),
        "CutRequest": data_pb2.CutRequest(
            map_epoch=epoch, target=2, authority=a_grant(), inode=INODE, size=1 << 33, cut=6, chunk_bits=20
        ),
        "CutRequest of a hole": data_pb2.CutRequest(
            map_epoch=epoch,
            target=2,
            authority=a_grant(),
            inode=INODE,
            size=4096,
            cut=6,
            chunk_bits=20,
            end=1 << 33,
        ),
        "CutReply": data_pb2.CutReply(map_epoch=epoch, bytes=8192),
        "ExtentsRequest": data_pb2.ExtentsRequest(
            map_epoch=epoch, target=2, grant=a_grant(), inode=INODE, first=1, until=1 << 32
        ),
        "ExtentsReply": data_pb2.ExtentsReply(
            map_epoch=epoch, extents=EXTENT.pack(7, 1, 255) + EXTENT.pack(9, 0, 1), more=True, next=10
        ),
        "CopyRequest": data_pb2.CopyRequest(
            map_epoch=epoch,
            target=2,
            read_grant=a_grant(),
            write_grant=a_grant(),
            from_inode=INODE,
            from_index=7,
            from_offset=4096,
            inode=1,
            index=2,
            offset=8192,
            length=12288,
            cut=5,
            session=SESSION,
            slot=63,
            sequence=77,
        ),
        "VersionsRequest": data_pb2.VersionsRequest(
            map_epoch=epoch,
            target=2,
            authority=a_grant(),
            chains=encode_chains(ChainSet([(1, 0), (2, 9), (2, 1023)])),
            begun=True,
            after_inode=INODE,
            after_index=7,
            limit=100,
        ),
        "VersionsReply": data_pb2.VersionsReply(
            map_epoch=epoch,
            more=True,
            chunks=CHUNK_VERSION.pack(INODE, 7, 3, ids.version(7, 9), 5, 2),
            inodes=INODE_CUT.pack(INODE, 6, ids.version(6, 1), 20),
            end_inode=INODE,
            end_index=7,
            busy=True,
            used_bytes=1 << 40,
        ),
        "VersionsReply, split floors": data_pb2.VersionsReply(
            map_epoch=epoch, inodes=INODE_CUT.pack(INODE, 6, ids.version(6, 1), 20), split_floors=True
        ),
        "FetchRequest": data_pb2.FetchRequest(
            map_epoch=epoch, target=2, authority=a_grant(), chunks=WANTED.pack(INODE, 7, 2, 1024, 512)
        ),
        "FetchReply, split floors": data_pb2.FetchReply(
            map_epoch=epoch,
            busy=True,
            chunks=[
                encode_copy(
                    ChunkCopy(
                        INODE,
                        7,
                        ids.version(7, 9),
                        2,
                        5,
                        ((SESSION, 63, 77),),
                        InodeCut(INODE, 6, ids.version(6, 1), 20),
                        ((0, 1), (5, 2)),
                        b"aaaabbbbcccc",
                        bytes(3 * 4096),
                        (5,),
                        True,
                    ),
                    True,
                ),
                data_pb2.FetchedChunk(inode=1, index=2, status=402),
            ],
        ),
        "CopyReply": data_pb2.CopyReply(map_epoch=epoch, version=ids.version(7, 10), bytes=8192),
        "AllocateRequest": meta_pb2.AllocateRequest(
            change=change, inode=INODE, offset=4096, length=8192, punch=True, grow=True, rights=3
        ),
        "RemoveRequest": data_pb2.RemoveRequest(
            map_epoch=epoch, target=2, authority=a_grant(), inodes=b"i" * 8
        ),
        "PullRequest": data_pb2.PullRequest(
            map_epoch=epoch, target=2, authority=a_grant(), table=2, inode=INODE, index=7, source=3
        ),
        "PullReply": data_pb2.PullReply(map_epoch=epoch, version=ids.version(7, 10)),
        "DescribeRequest": data_pb2.DescribeRequest(target=2, inode=INODE, first=1, limit=2, map_epoch=epoch),
        "ListRequest": data_pb2.ListRequest(target=2, after=INODE, limit=2, map_epoch=epoch),
        "ScrubRequest": data_pb2.ScrubRequest(target=2, cursor=b"c", blocks=3, map_epoch=epoch),
        "CreateRequest": meta_pb2.CreateRequest(
            change=change, parent=1, name=b"n\xff", mode=0o100644, open=True, rights=3
        ),
        "ReportRequest": meta_pb2.ReportRequest(
            change=change, inode=INODE, cut=5, end=4096, wrote=True, sync=True, release=True
        ),
        "ShipRequest": meta_pb2.ShipRequest(
            shard=1, member=2, term=3, committed=1 << 33, pairs=True, authority=a_grant()
        ),
        "ShipReply": meta_pb2.ShipReply(sequence=1 << 33),
        "FollowRequest": meta_pb2.FollowRequest(
            shard=1,
            member=2,
            term=3,
            step=meta_pb2.FollowRequest.INSTALL,
            sequence=1 << 33,
            sequence_term=2,
            authority=a_grant(),
        ),
        "FollowReply": meta_pb2.FollowReply(
            stored=5, stored_term=1, runs=[meta_pb2.FollowRun(term=2, first=6, last=9)], synced=8
        ),
        "follow steps": bytes(meta_pb2.FollowRequest.Step.values()),
        "ShardAliveRequest": meta_pb2.ShardAliveRequest(
            shard=1, member=2, term=3, map_epoch=epoch, authority=a_grant()
        ),
        "ShardAliveReply": meta_pb2.ShardAliveReply(term=3, lease_ms=3000, map=b"m"),
        "StandbyRequest": meta_pb2.StandbyRequest(
            shard=1, member=2, term=3, up=True, epoch=7, authority=a_grant()
        ),
        "StandbyReply": meta_pb2.StandbyReply(map=b"m"),
        "TakeRightRequest": meta_pb2.TakeRightRequest(
            shard=1,
            authority=a_grant(),
            volume=INODE,
            member="client/one",
            rights=3,
            life_ms=130_000,
            known=epoch,
        ),
        "TakeRightReply": meta_pb2.TakeRightReply(map=b"m", unaware=[1, 300]),
        "NamesRequest": meta_pb2.NamesRequest(
            inodes=b"i" * 8, directory=INODE, elsewhere=True, cursor=b"c", limit=9
        ),
        "NamesReply": meta_pb2.NamesReply(
            names=[meta_pb2.NamedInode(inode=INODE, directory=2, name=b"n\xff", above=1)],
            gone=b"g" * 8,
            cursor=b"c",
            done=True,
        ),
        "ListDirRequest": meta_pb2.ListDirRequest(
            session=SESSION, map_epoch=epoch, inode=1, cursor=1 << 40, limit=512, attrs=True, packed=True
        ),
        "listed entry": pack_entry(
            1 << 62 | 5,
            meta_pb2.Attr(
                inode=INODE,
                mode=0o100644,
                links=2,
                uid=1000,
                gid=100,
                size=1 << 33,
                blocks=8,
                atime_ns=-1,
                mtime_ns=1 << 60,
                ctime_ns=3,
                change=7,
                cut=6,
                rdev=0x801,
                table=1,
                chunk_bits=20,
                flags=1,
                parent=9,
                punches=2,
            ),
            True,
            b"n\xff",
        ),
    }
    return {
        name: (one if isinstance(one, bytes) else one.SerializeToString(deterministic=True)).hex()
        for name, one in made.items()
    }


def a_map() -> PoolMap:
    targets = (
        Target(1, 1, 1, 64 << 20, ("stream+unix:///p/run/target-1.sock", "stream://127.0.0.1:17512")),
        Target(2, 2, 1, 128 << 20, ("grpc://127.0.0.1:17513",)),
    )
    return PoolMap(
        format=MAP_FORMAT,
        pool_id="0123456789abcdef" * 2,
        name="pool",
        epoch=3,
        settings=PoolSettings(1 << 20, 1),
        nodes=(Node(1, "host", "boot", ("stream://127.0.0.1:17510",)),),
        drives=(Drive(1, 1, "/d/1", 64 << 20), Drive(2, 1, "/dev/nvme1n1", 128 << 20)),
        targets=targets,
        tables=(build_table(targets, 1),),
        shards=(Shard(1, 1, ("stream://127.0.0.1:17514",)),),
        partitions=(PartitionRange(0, 4096, 1),),
    )


def test_numbers_match_the_golden_file():
    assert numbers() == json.loads((GOLDEN / "numbers.json").read_text())


def test_grants_and_data_messages_match_the_golden_file():
    golden = json.loads((GOLDEN / "messages.json").read_text())
    assert {name: golden.pop(name) for name in OF_OLDER_BUILDS}.keys() == OF_OLDER_BUILDS
    assert messages() == golden


def test_fetched_chunk_of_an_older_build_is_decoded():
    raw = bytes.fromhex(json.loads((GOLDEN / "messages.json").read_text())["FetchReply"])
    reply = data_pb2.FetchReply.FromString(raw)
    copy = decode_copy(reply.chunks[0], memoryview(bytes(3 * 4096)))
    assert copy.version == ids.version(7, 9) and copy.known == InodeCut(
        INODE, 6, of_old_floor(ids.version(6, 1)), 20
    )


def test_pool_map_matches_its_golden_files():
    raw = (GOLDEN / "poolmap.json").read_bytes().strip()
    assert decode_map(raw) == a_map() and encode_map(a_map()) == raw
    assert a_map().fingerprint == "f5373a35705e9c89"
    assert (
        decode_map((GOLDEN / "poolmap-1.json").read_bytes().strip()) == a_map()
    )  # maps before chains had a goal
    assert (
        decode_map((GOLDEN / "poolmap-2.json").read_bytes().strip()) == a_map()
    )  # maps before losses could be accepted
    assert (
        decode_map((GOLDEN / "poolmap-3.json").read_bytes().strip()) == a_map()
    )  # maps before nodes were revoked
    assert (
        decode_map((GOLDEN / "poolmap-4.json").read_bytes().strip()) == a_map()
    )  # maps before targets had verifiers
    assert (
        decode_map((GOLDEN / "poolmap-5.json").read_bytes().strip()) == a_map()
    )  # maps before chains could be reset
    assert (
        decode_map((GOLDEN / "poolmap-6.json").read_bytes().strip()) == a_map()
    )  # maps before moves had an epoch
    assert (
        decode_map((GOLDEN / "poolmap-7.json").read_bytes().strip()) == a_map()
    )  # maps before rights were revoked
    taking = taken(a_map(), INODE, "client/one.0a1b2c3d", grants.READ, 1_700_000_000_000, 130_000)
    assert encode_map(taking) == (GOLDEN / "poolmap-taken.json").read_bytes().strip()
    assert decode_map(encode_map(taking)) == taking


def test_every_data_message_has_the_map_epoch():
    without = {
        name
        for name, message in data_pb2.DESCRIPTOR.message_types_by_name.items()
        if "map_epoch" not in message.fields_by_name
    }
    assert without == NAMED_WITHOUT_EPOCH
