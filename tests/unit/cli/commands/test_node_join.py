"""`nvpool node join` in a directory that belongs to a node already: a member of the pool, or a removed one."""

import asyncio

import msgspec
import pytest
from click.testing import CliRunner
from msgspec.structs import replace

from nvpool.cli import pool_connection
from nvpool.cli.commands.node import check_member, join
from nvpool.core.errors import InvalidRequest, StaleIdentity, Unreachable
from nvpool.host.pool_directory import PoolDirectory
from nvpool.poolmap.model import Node, encode_map
from nvpool.rpc.v1.pool_pb2 import MapReply
from nvpool.testing.contracts.coordinator import first_map


@pytest.fixture
def directory(tmp_path):
    one = PoolDirectory(tmp_path)
    one.node_json.write_bytes(msgspec.json.encode({"node": 2, "member": "node/beta.2"}))
    return one


@pytest.fixture
def answers(monkeypatch):
    """Replies of the pool at the address."""
    given, asked = [], []

    async def ask(pool, method, request, reply_type, *, wait_s, endpoints):
        asked.append(endpoints)
        await asyncio.sleep(0)
        if isinstance(given[0], Exception):
            raise given[0]
        return MapReply(map=encode_map(given[0]))

    monkeypatch.setattr(pool_connection, "ask", ask)
    yield given
    assert asked and set(asked) == {("stream://10.0.0.1:17512",)}


def pool_of(*members):
    """A pool with these nodes, numbered from 2."""
    first = first_map()
    return replace(
        first,
        nodes=(
            *first.nodes,
            *(
                Node(number, "b", "h", ("stream://10.0.0.2:1",), member=member)
                for number, member in enumerate(members, 2)
            ),
        ),
    )


@pytest.mark.parametrize(
    "answer",
    [StaleIdentity("node/beta.2 is not in the pool"), pool_of(), pool_of("node/another.2")],
    ids=["refused", "gone", "its number belongs to another node"],
)
def test_removed_node_gets_the_remedy_and_keeps_its_token(directory, answers, answer):
    answers.append(answer)
    with pytest.raises(
        InvalidRequest, match=f"(?s)removed from this pool.*nvpool pool destroy {directory.path}.*not used"
    ):
        check_member(directory, "10.0.0.1:17512")


def test_client_directory_is_refused_as_a_node(tmp_path):
    client = PoolDirectory(tmp_path)
    client.node_json.write_bytes(msgspec.json.encode({"node": 0, "member": "client/beta"}))
    with pytest.raises(
        InvalidRequest, match="a client's directory of this pool, no node's; name another one with --dir"
    ):
        check_member(client, "10.0.0.1:17512")


@pytest.mark.parametrize(
    "answer", [pool_of("node/beta.2"), Unreachable("nobody")], ids=["member", "unreachable"]
)
def test_member_or_possible_member_continues(directory, answers, answer):
    answers.append(answer)
    check_member(directory, "stream://10.0.0.1:17512")


def test_invalid_drive_is_refused_before_the_token_is_used(tmp_path):
    file = tmp_path / "file"
    file.touch()
    done = CliRunner().invoke(
        join, ["10.0.0.1:17512", "--token", "t", "--dir", str(tmp_path / "pool"), "--drive", str(file)]
    )
    assert isinstance(done.exception, InvalidRequest) and "neither a directory nor a block device" in str(
        done.exception
    )
