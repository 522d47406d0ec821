"""How the metadata service hears of files that are closed: soon, in batches, and never twice.

A message about it that may have been lost is not said again: said twice it could close what was opened since. Instead every
renewal of the session tells what the service holds open for us, and what is not open here at all is given up then, with
the number of handles that it told: where that is another by now, something was opened or closed meanwhile, and the service
leaves it for the next time.

A part of `client/rpc/meta_client`, which owns all that is used here.
"""

from __future__ import annotations

import asyncio
import struct

from nvpool.client.rpc.shard_session import ShardSession
from nvpool.core.errors import NvpoolError, StaleSession, WrongShard
from nvpool.rpc.messages import data_codec
from nvpool.rpc.v1 import meta_pb2, wire_pb2

RENEW_INODES_MAX = 16384
"""In one message; the rest goes with the next, at once."""
HELD = struct.Struct("<QI")
"""Inode and handles, in RenewSessionReply.held and ReleaseRequest.gone."""


class Releasing:
    def release(self, inode: int, count: int = 1) -> None:
        """`count` registrations of `inode` are given up. Told to the service soon, in a batch; it is no loss if that fails:
        the service forgets them with the session."""
        state = self._shard_of(inode)
        left = state.open.get(inode, 0) - count
        if left > 0:
            state.open[inode] = left
        else:
            state.open.pop(inode, None)
        untold = state.untold.pop(inode, 0)
        if untold > count:
            state.untold[inode] = untold - count
        count -= min(untold, count)
        if not state.session or not count:
            return
        self._release_at(state, [inode] * count)

    def _give_up(self, state: ShardSession, slot: int) -> None:
        """What the process before us has sent in the slot is not asked for again: the service closes what that has opened."""
        state.given_up.append(slot)
        self._release_at(state, [])

    def _release_at(self, state: ShardSession, inodes: list[int]) -> None:
        state.released.extend(inodes)
        if state.releasing is None or state.releasing.done():
            state.releasing = asyncio.create_task(self._release_soon(state))

    async def _release_soon(self, state: ShardSession) -> None:
        while (state.released or state.given_up) and state.session and not self._closed:
            await asyncio.sleep(self._options.release_s)
            await self._release_now(state)

    async def release_now(self, inode: int) -> None:
        """What was closed of the inode's shard is known there on return, as far as it answers."""
        state = self._shard_of(inode)
        while state.released and state.session and not self._closed:
            count = len(state.released)
            await self._release_now(state)
            if len(state.released) >= count:
                return

    async def _release_now(self, state: ShardSession) -> None:
        released, state.released = state.released[:RENEW_INODES_MAX], state.released[RENEW_INODES_MAX:]
        if not (released or state.given_up) or not state.session:
            return
        given_up, state.given_up = state.given_up, []
        session = state.session
        request = meta_pb2.ReleaseRequest(
            session=session, map_epoch=self._view.map.epoch, inodes=data_codec.pack_inodes(released), slots=given_up
        )
        state.leaving.append(released)
        try:
            await self._send(state, wire_pb2.META_RELEASE, request, self._clock.boottime_s() + 10.0)
        except NvpoolError as error:
            if state.session == session and not isinstance(error, StaleSession):
                state.given_up += given_up  # may be said twice
            if isinstance(error, WrongShard):
                for inode in released:  # each where it is by now
                    self._release_at(self._shard_of(inode), [inode])
                await self._view.refresh()
            elif not error.may_be_applied and state.session == session and not isinstance(error, StaleSession):
                state.released.extend(released)
                await asyncio.sleep(self._options.retry_last_s)
        finally:
            state.leaving.remove(released)

    async def _look_at_held(self, state: ShardSession) -> None:
        """Give up what the shard has just said that it holds open for us, and what is not open here."""
        packed, state.held = state.held, b""
        if len(packed) % HELD.size or state.early:  # the process before us may yet be answered that it has opened something
            return
        closing = set(state.released).union(*state.leaving)
        held = {inode: count for inode, count in HELD.iter_unpack(packed)
                if inode not in closing and not any(inode in other.open for other in self._shards.values())}
        # A change that was under way then may have opened it, and its answer may yet come.
        under_way = frozenset(range(state.slot_count)).difference(slot for slot, _ in state.slots)
        doubts, state.doubts = state.doubts, {}
        gone = b""
        for inode, count in held.items():
            known, slots = doubts.get(inode, (count, under_way))
            slots = slots & under_way if known == count else under_way
            if slots:
                state.doubts[inode] = count, slots
            else:
                gone += HELD.pack(inode, count)
        if gone:
            request = meta_pb2.ReleaseRequest(session=state.session, map_epoch=self._view.map.epoch, gone=gone)
            await self._send(state, wire_pb2.META_RELEASE, request, self._clock.boottime_s() + 10.0)
