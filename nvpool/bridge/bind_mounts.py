"""Bind mounts of volumes on this host, and the helper processes that make them.

bridge/volumes uses it. A process of its own (bridge/bind_helper) makes each bind and is killed at a deadline,
so a hung mount delays one request and never the bridge. The module knows nothing of references.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import os
from pathlib import Path
from typing import Any

from nvpool.bridge.bind_helper import error_of
from nvpool.core.errors import DeadlineExceeded, InvariantBroken
from nvpool.core.names import VOLUMES, path_of
from nvpool.core.programs import Program, command
from nvpool.host.mountinfo import mounts_below

BIND_S = 20.0
"""Below the deadline of a request, and enough for the restart of a store or shard."""
BINDS_IN_PARALLEL = 8
"""Helper processes at a time; further requests wait until their own deadlines."""


class Binds:
    """Binds of volumes. `root`: mount point of the whole pool. `places`: a directory for these binds only."""

    def __init__(self, root: Path, places: Path) -> None:
        self.root, self.places = root, places
        self._turns = asyncio.Semaphore(BINDS_IN_PARALLEL)

    def place(self, name: str, read_only: bool, subpath: str) -> Path:
        """Return the bind's place. All holders with the same mode and subpath share one place."""
        kind = "ro" if read_only else "rw"
        return (
            self.places
            / name
            / (f"{kind}-{hashlib.sha256(subpath.encode()).hexdigest()[:16]}" if subpath else kind)
        )

    async def bind(self, name: str, read_only: bool, subpath: str, target: Path) -> bool:
        """Bind the volume at `target`; results and errors as `bind` in bridge/bind_helper.

        Missing directories of `subpath` are created unless read-only. DeadlineExceeded: the mount hangs.
        """
        return await self._ask(
            verb="bind",
            root=str(self.root),
            volume=path_of(name).lstrip("/"),
            subpath=subpath,
            target=str(target),
            read_only=read_only,
            make=bool(subpath) and not read_only,
        )

    async def unbind(self, target: Path, *, remove: bool = True) -> bool:
        return await self._ask(verb="unbind", target=str(target), volumes=VOLUMES.decode(), remove=remove)

    async def keep_only(self, name: str, wanted: set[Path]) -> None:
        """Remove all binds of the volume below `places` except those in `wanted`, whatever their origin."""
        own = self.places / name
        there = {mount.point for mount in mounts_below(own)}
        with contextlib.suppress(OSError):
            there |= {own / entry for entry in os.listdir(own)}  # lists names without access to the mounts
        for target in sorted(there - wanted):
            await self.unbind(target)
        if not wanted:
            with contextlib.suppress(OSError):
                own.rmdir()

    async def _ask(self, **request: Any) -> Any:
        async with self._turns:
            # A file and not a pipe: if the child exits early, its exit code is seen, and not a broken pipe.
            given = os.memfd_create("request")
            try:
                os.write(given, json.dumps(request).encode())
                os.lseek(given, 0, os.SEEK_SET)
                process = await asyncio.create_subprocess_exec(
                    *command(Program.BIND_MOUNT),
                    stdin=given,
                    stdout=asyncio.subprocess.PIPE,
                    stderr=asyncio.subprocess.PIPE,
                    start_new_session=True,
                    cwd="/",
                )
            finally:
                os.close(given)
            try:
                async with asyncio.timeout(BIND_S):
                    said, complaint = await process.communicate()
            except BaseException as error:
                with contextlib.suppress(ProcessLookupError):
                    process.kill()  # no wait: the process cannot exit before the mount answers
                if isinstance(error, TimeoutError):
                    raise DeadlineExceeded(
                        f"the pool's mount at {self.root} has not answered within {BIND_S:.0f} s; see: "
                        "nvpool status"
                    ) from None
                raise
        if process.returncode:
            raise InvariantBroken(
                f"{request['verb']} has ended with {process.returncode}: "
                f"{complaint.decode(errors='replace')[-500:]}"
            )
        reply = json.loads(said)
        if "error" in reply:
            raise error_of(reply)
        return reply["done"]
