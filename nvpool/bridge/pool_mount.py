"""The mount of the whole pool on this host, which the bridge needs and does not serve.

Called by bridge/volumes before each bind, by way of daemons/bridge. One that is there is used, whoever made it; where there
is none, `nvpool mount` makes it: its process and holder are none of the bridge's, so that they live on when the bridge ends.
Never unmounts what answers.
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
"""For the pool to be there; the request that waits has a deadline beyond it."""

log = logging.getLogger("nvpool.bridge.mount")


class PoolMount:
    """`pool` as `nvpool mount` takes it, `name` as its map has it; `words` are further options of that command. `make` false:
    somebody else mounts it, where a mount of ours would not outlive us, as in a container."""

    def __init__(self, pool: str, name: str, place: Path, words: tuple[str, ...] = (), *, make: bool = True) -> None:
        self.place, self._make = place, make
        self._pool, self._name, self._words = pool, name, words
        self._turn = asyncio.Lock()

    async def ensure(self) -> Mount:
        """The pool is mounted at `place`, and answers.

        InUse        something else is mounted there
        Unavailable  the pool does not answer, or a mount of it is there that hangs: it may go on by itself
        """
        async with self._turn:
            there = mount_at(self.place)
            if there is not None:
                if not there.ours or there.source != f"nvpool:{self._name}" or there.root != Path("/"):
                    raise InUse(f"{self.place} has {there.source} ({there.type}) mounted on it, which is not the whole pool "
                                f"{self._name}; choose another --mountpoint")
                state = await asyncio.to_thread(look_at, self.place)
                if state == "alive":
                    return there
                if state == "hung":
                    raise Unavailable(f"the mount of {self._name} at {self.place} does not answer; see: nvpool status")
                log.warning("the mount at %s is dead; it is made anew, and containers that saw it have to be started again",
                            self.place)
            if not self._make:
                raise Unavailable(f"the pool {self._name} is not mounted at {self.place}; mount it there on the host: nvpool "
                                  f"mount POOL {self.place}   or with nvpool-mount@.service")
            await self._mount()
            there = mount_at(self.place)
            if there is None:
                raise Unavailable(f"the mount of {self._name} at {self.place} has ended at once; its log is in /var/log/nvpool "
                                  "or in the pool's directory")
            log.info("the pool %s is mounted at %s", self._name, self.place)
            return there

    async def _mount(self) -> None:
        try:
            self.place.mkdir(parents=True, exist_ok=True)
        except FileExistsError:
            pass  # a dead mount, which can not be looked at
        except OSError as error:
            raise AccessDenied(f"{self.place} can not be made: {error.strerror}") from error
        options = ["--force", "--wait", f"{MOUNT_S - 5:.0f}", *self._words]
        process = await asyncio.create_subprocess_exec(
            *command(Program.CLI, "mount", self._pool, str(self.place), *options), stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.DEVNULL, stderr=asyncio.subprocess.PIPE, start_new_session=True, cwd="/")
        try:
            async with asyncio.timeout(MOUNT_S):
                _, said = await process.communicate()
        except BaseException as error:
            with contextlib.suppress(ProcessLookupError):
                process.terminate()
            if isinstance(error, TimeoutError):
                raise DeadlineExceeded(f"the pool {self._name} was not mounted at {self.place} within {MOUNT_S:.0f} s; see: "
                                       "nvpool status") from None
            raise
        if process.returncode:
            text = said.decode(errors="replace").strip().removeprefix("nvpool: ")
            family = Unavailable if process.returncode == 3 else Refused
            raise family(text or f"mounting ended with exit code {process.returncode}")
