"""What a change over several shards will need, as far as its request tells: asked for together, where decisions would ask for
one after the other. A guess that is wrong holds something in vain for a moment.
"""

from __future__ import annotations

from typing import Any

from nvpool.core.units import NAME_BYTES_MAX
from nvpool.meta.state import records
from nvpool.meta.state.transaction import View
from nvpool.meta.transactions.view import Need
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
        return records.dentry_key(directory >> records.COUNTER_BITS, directory, view.name_hash(directory, name), name)

    def named(directory: int, name: bytes) -> None:
        """The inode that has this name here; with what is in it where it is a directory that may have to be empty."""
        if (raw := view.get(key_of(directory, name))) is not None:
            number, kind = records.decode_dentry(directory >> records.COUNTER_BITS, raw)
            if inode(number) and kind == _DIRECTORY and isinstance(request, pb.UnlinkRequest):
                ranges.append((*records.dentry_range(number >> records.COUNTER_BITS, number), 1))

    if isinstance(request, pb.RenameRequest) and max(len(request.name), len(request.new_name)) <= NAME_BYTES_MAX:
        if inode(request.new_parent):
            keys.append(key_of(request.new_parent, request.new_name))
        named(request.parent, request.name)
    elif isinstance(request, pb.LinkRequest) and len(request.name) <= NAME_BYTES_MAX:
        if inode(request.parent):
            keys.append(key_of(request.parent, request.name))
    elif isinstance(request, pb.UnlinkRequest) and len(request.name) <= NAME_BYTES_MAX:
        named(request.parent, request.name)
    return Need(keys=tuple(keys), ranges=tuple(ranges)) if keys else None
