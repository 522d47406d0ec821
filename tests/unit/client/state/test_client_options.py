"""Client options of section [client] of node.toml, when a client opens a pool's directory."""

from __future__ import annotations

import asyncio
import json

import pytest

from nvpool.client.pool_client import Client
from nvpool.client.state.options import ClientOptions, configured
from nvpool.core.config import ClientSection
from nvpool.core.errors import BadConfiguration
from nvpool.poolmap.model import encode_map
from nvpool.testing.fakes.in_process_pool import InProcessPool

OF_THE_MOUNT = {"attr_timeout_s", "entry_timeout_s", "engine", "workers"}
CHANGED = {
    "deadline_s": 7.0,
    "write_buffer_bytes": 5 << 20,
    "read_ahead_bytes": 3 << 20,
    "read_ahead_bytes_max": 9 << 20,
    "transport": "stream",
    "short_circuit": False,
    "locations_bytes": 1 << 20,
    "rack": "row 3",
    "late_closes": False,
}


def opened(where, **given) -> ClientOptions:
    async def main() -> ClientOptions:
        client = await Client.open(str(where), **given)
        await client.close()
        return client.vfs.options

    return asyncio.run(main())


def test_every_configuration_key_is_an_option():
    keys = set(ClientSection.__struct_fields__)
    assert keys - set(ClientOptions._fields) == OF_THE_MOUNT
    assert keys - OF_THE_MOUNT == set(CHANGED)
    assert configured(ClientSection()) == ClientOptions()
    assert configured(ClientSection(**CHANGED)) == ClientOptions(**CHANGED)


def test_client_of_a_directory_uses_its_configuration(tmp_path):
    (tmp_path / "poolmap.json").write_bytes(encode_map(InProcessPool().pool_map))
    lines = [f"{key} = {json.dumps(value)}\n" for key, value in CHANGED.items()]
    (tmp_path / "node.toml").write_text("[client]\n" + "".join(lines))
    assert opened(tmp_path) == ClientOptions(**CHANGED)
    assert opened(tmp_path, options=ClientOptions(deadline_s=3.0)) == ClientOptions(deadline_s=3.0)
    with pytest.raises(
        BadConfiguration, match="no transport 'carrier-pigeon' is installed; there are .*grpc"
    ):
        opened(tmp_path, options=ClientOptions(transport="carrier-pigeon"))
    (tmp_path / "node.toml").write_text("[client]\ndeadline = 1\n")
    with pytest.raises(BadConfiguration, match="did you mean deadline_s"):
        opened(tmp_path)
