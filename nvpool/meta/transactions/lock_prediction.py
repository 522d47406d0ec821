"""Lock prediction: records that a cross-shard transaction will probably need, guessed from its request.

They are requested together, where the decision would request one after the other. A wrong guess only locks a
record for a moment without need.
"""

from __future__ import annotations

from typing import Any

from nvpool.core.units import NAME_BYTES_MAX
from nvpool.meta.state import records
from nvpool.meta.state.transaction import View
from nvpool.meta.transactions.view import Need
from nvpool.rpc.messages.meta_messages import UnlinkRequest
from nvpool.rpc.v1 import meta_pb2 as pb

_DIRECTORY = 4


def foreseen(view: View, request: Any) -> Need | None:
    keys: list[bytes] = []
    ranges: list[tuple[bytes, bytes, int]] = []

    def inode(number: int) -> bool:
        if not 0 < number < 1 << 63 or not view.is_elsewhere(number >> records.COUNTER_BITS):
            return False
        keys.append(records.inode_key(number))
        return True

    def key_of(directory: int, name: bytes) -> bytes:
        return records.dentry_key(
            directory >> records.COUNTER_BITS, directory, view.name_hash(directory, name), name
        )

    def named(directory: int, name: bytes) -> None:
        """Add the inode that has this name here.

        If it is a directory that rmdir must find empty, a read of its names is added too.
        """
        if (raw := view.get(key_of(directory, name))) is not None:
            number, kind = records.decode_dentry(directory >> records.COUNTER_BITS, raw)
            if inode(number) and kind == _DIRECTORY and isinstance(request, UnlinkRequest):
                ranges.append((*records.dentry_range(number >> records.COUNTER_BITS, number), 1))

    if (
        isinstance(request, pb.RenameRequest)
        and max(len(request.name), len(request.new_name)) <= NAME_BYTES_MAX
    ):
        if inode(request.new_parent):
            keys.append(key_of(request.new_parent, request.new_name))
        named(request.parent, request.name)
    elif isinstance(request, pb.LinkRequest) and len(request.name) <= NAME_BYTES_MAX:
        if inode(request.parent):
            keys.append(key_of(request.parent, request.name))
    elif isinstance(request, UnlinkRequest) and len(request.name) <= NAME_BYTES_MAX:
        named(request.parent, request.name)
    return Need(keys=tuple(keys), ranges=tuple(ranges)) if keys else None
