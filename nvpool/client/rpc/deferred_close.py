"""Deferred close: reports closed files to the metadata service soon, in batches, and never twice.

A release message that may have been lost is not repeated: a second one could close a file that was opened
since. Instead, every renewal of the session brings the shard's list of files that it holds open for this
client. A file that is not open here is then released with the number of handles from that list. If the number
is different by now, a file was opened or closed meanwhile, and the service leaves the file for the next time.

A part of `client/rpc/meta_client`, which owns all state that is used here.
"""

from __future__ import annotations

import asyncio
import struct

from nvpool.client.state.shard_session import ShardSession
from nvpool.core.errors import NvpoolError, StaleSession, WrongShard
from nvpool.rpc.messages import read_write_codec
from nvpool.rpc.v1 import meta_pb2, wire_pb2

RENEW_INODES_MAX = 2048
"""Maximum number of inodes in one message; the next message follows immediately."""
HELD = struct.Struct("<QI")
"""Inode and number of handles, in RenewSessionReply.held and ReleaseRequest.gone."""


class DeferredClose:
    """The part of `MetaClient` that reports closed files."""

    def release(self, inode: int, count: int = 1) -> None:
        """Release `count` registrations of `inode`; reported to the service soon, in a batch.

        A failed report does no harm: the service forgets the registrations with the session.
        """
        state = self.shard_session(inode)
        self.release_known(state, inode, state.remove_opens(inode, count))

    def release_known(self, state: ShardSession, inode: int, count: int) -> None:
        """Report the close of `count` registrations of which the shard may know, soon and in a batch."""
        if state.session and count:
            self.release_at(state, [inode] * count)

    def _give_up(self, state: ShardSession, slot: int) -> None:
        """Give up a slot of the previous process whose request is not replayed.

        The service closes the files that the request has opened.
        """
        state.given_up.append(slot)
        self.release_at(state, [])

    def release_at(self, state: ShardSession, inodes: list[int]) -> None:
        """Report these closes, and the abandoned slots of the shard, soon and in a batch."""
        state.released.extend(inodes)
        if state.releasing is None or state.releasing.done():
            state.releasing = asyncio.create_task(self._release_soon(state))

    async def _release_soon(self, state: ShardSession) -> None:
        while (state.released or state.given_up) and state.session and not self.closed:
            await asyncio.sleep(self.options.release_s)
            await self._release_now(state)

    async def release_now(self, inode: int) -> None:
        """Report all files of the inode's shard that were closed, as far as the shard answers."""
        state = self.shard_session(inode)
        while state.released and state.session and not self.closed:
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
            session=session,
            map_epoch=self.view.map.epoch,
            inodes=read_write_codec.pack_inodes(released),
            slots=given_up,
        )
        state.leaving.append(released)
        try:
            await self.send(state, wire_pb2.META_RELEASE, request, self.clock.boottime_s() + 10.0)
        except NvpoolError as error:
            if state.session == session and not isinstance(error, StaleSession):
                state.given_up += given_up  # may be sent twice
            if isinstance(error, WrongShard):
                for inode in released:  # each at its present shard
                    self.release_at(self.shard_session(inode), [inode])
                await self.view.refresh()
            elif (
                not error.may_be_applied and state.session == session and not isinstance(error, StaleSession)
            ):
                state.released.extend(released)
                await asyncio.sleep(self.options.retry_last_s)
        finally:
            state.leaving.remove(released)

    async def _look_at_held(self, state: ShardSession) -> None:
        """Release files that the shard holds open for this client but are not open here."""
        packed, state.held = state.held, b""
        # with `early` slots, a request of the previous process may still be answered with an open file
        if len(packed) % HELD.size or state.early:
            return
        closing = set(state.released).union(*state.leaving)
        held = {
            inode: count
            for inode, count in HELD.iter_unpack(packed)
            if inode not in closing and not any(inode in other.open for other in self.shards.values())
        }
        # A change in flight at that time may have opened the file, and its reply may still arrive.
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
            request = meta_pb2.ReleaseRequest(session=state.session, map_epoch=self.view.map.epoch, gone=gone)
            await self.send(state, wire_pb2.META_RELEASE, request, self.clock.boottime_s() + 10.0)
