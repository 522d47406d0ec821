"""`nvpool node join` at a directory that is a node's already: one that is in the pool, one that was removed from it."""

import asyncio

import msgspec
import pytest
from click.testing import CliRunner
from msgspec.structs import replace

from nvpool.cli import pool_connection
from nvpool.cli.commands.node import _check_member, join
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
    """What the pool answers at the address."""
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
    """A pool of these nodes, numbered from two on."""
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
    ids=["refused", "gone", "its number is another's"],
)
def test_a_node_that_was_removed_is_told_how_to_begin_anew_and_keeps_its_token(directory, answers, answer):
    answers.append(answer)
    with pytest.raises(
        InvalidRequest, match=f"(?s)removed from this pool.*nvpool pool destroy {directory.path}.*not used"
    ):
        _check_member(directory, "10.0.0.1:17512")


def test_a_clients_directory_becomes_no_node_and_is_not_said_to_be_of_one(tmp_path):
    client = PoolDirectory(tmp_path)
    client.node_json.write_bytes(msgspec.json.encode({"node": 0, "member": "client/beta"}))
    with pytest.raises(
        InvalidRequest, match="a client's directory of this pool, no node's; name another one with --dir"
    ):
        _check_member(client, "10.0.0.1:17512")


@pytest.mark.parametrize(
    "answer", [pool_of("node/beta.2"), Unreachable("nobody")], ids=["in", "nobody answers"]
)
def test_a_node_that_is_in_the_pool_or_may_be_goes_on(directory, answers, answer):
    answers.append(answer)
    _check_member(directory, "stream://10.0.0.1:17512")


def test_what_can_be_no_drive_is_refused_before_the_token_is_used(tmp_path):
    file = tmp_path / "file"
    file.touch()
    done = CliRunner().invoke(
        join, ["10.0.0.1:17512", "--token", "t", "--dir", str(tmp_path / "pool"), "--drive", str(file)]
    )
    assert isinstance(done.exception, InvalidRequest) and "neither a directory nor a block device" in str(
        done.exception
    )
