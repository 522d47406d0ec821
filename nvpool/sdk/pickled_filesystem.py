"""An unpickled asyncio file system: it connects at the first awaited call.

Each coroutine method connects first and then turns the object into an AsyncFileSystem for good. So a
connected file system pays nothing for this. Only AsyncFileSystem.__reduce__ makes these objects.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import AsyncIterator, Callable
from functools import wraps
from typing import Any

from nvpool.sdk.aio import AsyncFileSystem, connected
from nvpool.sdk.pool_origin import Origin
from nvpool.sdk.volumes import AsyncVolumes


class Unconnected(AsyncFileSystem):
    """Placeholder of an unpickled file system; becomes an AsyncFileSystem when it connects."""

    def __init__(self, origin: Origin) -> None:  # does not call the base, which needs a client
        self.origin: Origin = origin
        self.volumes = _UnconnectedVolumes(self)
        self._connecting: asyncio.Task[None] | None = None

    async def ensure_connected(self) -> None:
        """Connect, unless this object has become an AsyncFileSystem already."""
        if type(self) is AsyncFileSystem:
            return
        if self._connecting is None or self._connecting.done():
            self._connecting = asyncio.get_running_loop().create_task(self._become())
        await asyncio.shield(self._connecting)

    async def _become(self) -> None:
        if type(self) is Unconnected:
            made = await connected(self.origin)
            self.__class__ = AsyncFileSystem  # type: ignore[assignment]  # its real class
            AsyncFileSystem.__init__(self, *made)

    def __getattr__(self, name: str) -> Any:
        if name in ("client", "vfs", "caller"):
            raise RuntimeError(
                f"this file system came out of a pickle and is not connected yet; use it in `async with`, or "
                f"await one of its calls, before its .{name}"
            )
        raise AttributeError(name)

    async def close(self, timeout_s: float = 10.0) -> None:
        """Close the file system. Before it has connected there is nothing to close."""
        if type(self) is not Unconnected:
            await AsyncFileSystem.close(self, timeout_s)

    async def __aenter__(self) -> AsyncFileSystem:
        await Unconnected.ensure_connected(self)
        return self


class _UnconnectedVolumes(AsyncVolumes):
    def __init__(self, pool: Unconnected) -> None:  # does not call the base, which needs a client
        self.pool = pool


def _connecting(
    method: Callable[..., Any], of: Callable[[Any], tuple[Unconnected, Callable[[], Any]]]
) -> Callable[..., Any]:
    if inspect.isasyncgenfunction(method):

        @wraps(method)
        async def generate(self: Any, *arguments: Any, **named: Any) -> AsyncIterator[Any]:
            pool, found = of(self)
            await Unconnected.ensure_connected(pool)
            async for one in method(found(), *arguments, **named):
                yield one

        return generate

    @wraps(method)
    async def call(self: Any, *arguments: Any, **named: Any) -> Any:
        pool, found = of(self)
        await Unconnected.ensure_connected(pool)
        return await method(found(), *arguments, **named)

    return call


def _cover(cls: type, base: type, of: Callable[[Any], tuple[Unconnected, Callable[[], Any]]]) -> None:
    for name, method in vars(base).items():
        if (
            not name.startswith("_")
            and name not in vars(cls)
            and (inspect.iscoroutinefunction(method) or inspect.isasyncgenfunction(method))
        ):
            setattr(cls, name, _connecting(method, of))


_cover(Unconnected, AsyncFileSystem, lambda pool: (pool, lambda: pool))
_cover(_UnconnectedVolumes, AsyncVolumes, lambda volumes: (volumes.pool, lambda: volumes.pool.volumes))
