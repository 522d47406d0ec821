"""Mount of the whole pool on this host, which the bridge needs but does not serve.

bridge/volumes calls `ensure` before each bind, through daemons/bridge. An existing mount is used, no matter
who made it. If there is none, `nvpool mount` makes it; the process and the holder of that mount do not belong
to the bridge, so they survive its end. A mount that answers is never unmounted.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from pathlib import Path

from nvpool.core.errors import AccessDenied, DeadlineExceeded, InUse, Refused, Unavailable
from nvpool.core.programs import Program, command
from nvpool.host.mountinfo import Mount, look_at, mount_at

MOUNT_S = 40.0
"""Time limit of mounting; the deadline of a request that waits for the mount is longer."""

log = logging.getLogger("nvpool.bridge.mount")


class PoolMount:
    """Mount of `pool` at `place`.

    `pool` is as for `nvpool mount`, `name` the name in the pool map, and `words` are further options of that
    command. `make` is false if another program makes the mount, for example because the bridge runs in a
    container, where its own mount would not survive it.
    """

    def __init__(
        self, pool: str, name: str, place: Path, words: tuple[str, ...] = (), *, make: bool = True
    ) -> None:
        self.place, self._make = place, make
        self._pool, self._name, self._words = pool, name, words
        self._turn = asyncio.Lock()

    async def ensure(self) -> Mount:
        """Ensure that the pool is mounted at `place` and answers; return the mount.

        InUse        something else is mounted there
        Unavailable  the pool does not answer, or its mount there hangs, which may end by itself; retry later
        """
        async with self._turn:
            there = mount_at(self.place)
            if there is not None:
                if not there.ours or there.source != f"nvpool:{self._name}" or there.root != Path("/"):
                    raise InUse(
                        f"{self.place} has {there.source} ({there.type}) mounted on it, which is not the whole pool "
                        f"{self._name}; choose another --mountpoint"
                    )
                state = await asyncio.to_thread(look_at, self.place)
                if state == "alive":
                    return there
                if state == "hung":
                    raise Unavailable(
                        f"the mount of {self._name} at {self.place} does not answer; see: nvpool status"
                    )
                log.warning(
                    "the mount at %s is dead; it is mounted again; restart the containers that use it",
                    self.place,
                )
            if not self._make:
                raise Unavailable(
                    f"the pool {self._name} is not mounted at {self.place}; mount it there on the host: nvpool "
                    f"mount POOL {self.place}   or with nvpool-mount@.service"
                )
            await self._mount()
            there = mount_at(self.place)
            if there is None:
                raise Unavailable(
                    f"the mount of {self._name} at {self.place} ended right after its start; "
                    "see its log in /var/log/nvpool or in the pool's directory"
                )
            log.info("the pool %s is mounted at %s", self._name, self.place)
            return there

    async def _mount(self) -> None:
        try:
            self.place.mkdir(parents=True, exist_ok=True)
        except FileExistsError:
            pass  # a dead mount, which stat(2) cannot access
        except OSError as error:
            raise AccessDenied(f"{self.place} cannot be made: {error.strerror}") from error
        options = ["--force", "--wait", f"{MOUNT_S - 5:.0f}", *self._words]
        process = await asyncio.create_subprocess_exec(
            *command(Program.CLI, "mount", self._pool, str(self.place), *options),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.PIPE,
            start_new_session=True,
            cwd="/",
        )
        try:
            async with asyncio.timeout(MOUNT_S):
                _, said = await process.communicate()
        except BaseException as error:
            with contextlib.suppress(ProcessLookupError):
                process.terminate()
            if isinstance(error, TimeoutError):
                raise DeadlineExceeded(
                    f"the pool {self._name} was not mounted at {self.place} within {MOUNT_S:.0f} s; see: "
                    "nvpool status"
                ) from None
            raise
        if process.returncode:
            text = said.decode(errors="replace").strip().removeprefix("nvpool: ")
            family = Unavailable if process.returncode == 3 else Refused
            raise family(text or f"mounting ended with exit code {process.returncode}")
