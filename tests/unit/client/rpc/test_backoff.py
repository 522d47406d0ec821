"""Retries of a client that a target refuses."""

import asyncio

import pytest

from nvpool.client.rpc import backoff
from nvpool.client.rpc.backoff import IDENTITY_TRIES, until_known
from nvpool.core.errors import AccessDenied, StaleIdentity


def test_refused_client_gives_up_with_the_reason(monkeypatch):
    monkeypatch.setattr(backoff, "IDENTITY_S", 0.0)

    async def main():
        error = StaleIdentity("client/one is not in the pool any more")
        for tries in range(1, IDENTITY_TRIES + 1):
            await until_known(error, tries, 60.0)
        with pytest.raises(AccessDenied, match="client/one is not in the pool any more"):
            await until_known(error, IDENTITY_TRIES + 1, 60.0)

    asyncio.run(main())
