"""The bind mounts of this host's volumes below the bridge's own directory, and the processes that make them.

Called by bridge/volumes. Each is made by a process of its own (bridge/bind_helper) that is killed at a deadline, so that a
mount that hangs holds up one request and never the bridge. Knows nothing of references.
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
"""Less than the deadline of a request: a store or shard that restarts is back by then."""
AT_ONCE = 8
"""Processes at a time; the others wait, each for its own deadline."""


class Binds:
    """`root`: where the whole pool is mounted. `places`: a directory that is nobody else's."""

    def __init__(self, root: Path, places: Path) -> None:
        self.root, self.places = root, places
        self._turns = asyncio.Semaphore(AT_ONCE)

    def place(self, name: str, read_only: bool, subpath: str) -> Path:
        """Where those see the volume who want it so. The same for all of them."""
        kind = "ro" if read_only else "rw"
        return self.places / name / (f"{kind}-{hashlib.sha256(subpath.encode()).hexdigest()[:16]}" if subpath else kind)

    async def bind(self, name: str, read_only: bool, subpath: str, target: Path) -> bool:
        """As bridge/bind_helper says it; missing directories of `subpath` are made unless read-only. DeadlineExceeded."""
        return await self._ask(verb="bind", root=str(self.root), volume=path_of(name).lstrip("/"), subpath=subpath,
                               target=str(target), read_only=read_only, make=bool(subpath) and not read_only)

    async def unbind(self, target: Path, *, remove: bool = True) -> bool:
        return await self._ask(verb="unbind", target=str(target), volumes=VOLUMES.decode(), remove=remove)

    async def keep_only(self, name: str, wanted: set[Path]) -> None:
        """Of the volume's binds here these stay; others go, however they came."""
        own = self.places / name
        there = {mount.point for mount in mounts_below(own)}
        with contextlib.suppress(OSError):
            there |= {own / entry for entry in os.listdir(own)}  # names of ours, not what is mounted on them
        for target in sorted(there - wanted):
            await self.unbind(target)
        if not wanted:
            with contextlib.suppress(OSError):
                own.rmdir()

    async def _ask(self, **request: Any) -> Any:
        async with self._turns:
            # In a file and not in a pipe: a child that dies at once is seen by its code, and not as a pipe that is closed.
            given = os.memfd_create("request")
            try:
                os.write(given, json.dumps(request).encode())
                os.lseek(given, 0, os.SEEK_SET)
                process = await asyncio.create_subprocess_exec(
                    *command(Program.BIND_MOUNT), stdin=given, stdout=asyncio.subprocess.PIPE,
                    stderr=asyncio.subprocess.PIPE, start_new_session=True, cwd="/")
            finally:
                os.close(given)
            try:
                async with asyncio.timeout(BIND_S):
                    said, complaint = await process.communicate()
            except BaseException as error:
                with contextlib.suppress(ProcessLookupError):
                    process.kill()  # not waited for: it can not die before the mount answers
                if isinstance(error, TimeoutError):
                    raise DeadlineExceeded(f"the pool's mount at {self.root} has not answered within {BIND_S:.0f} s; see: "
                                           "nvpool status") from None
                raise
        if process.returncode:
            raise InvariantBroken(f"{request['verb']} has ended with {process.returncode}: "
                                  f"{complaint.decode(errors='replace')[-500:]}")
        reply = json.loads(said)
        if "error" in reply:
            raise error_of(reply)
        return reply["done"]
