"""Answers of daemons, decoded: what can not be read is CorruptFrame, never an exception of protobuf. Called by metaclient and
chunkclient, at the door where bytes of another process come in."""

from __future__ import annotations

from google.protobuf.message import DecodeError

from nvpool.base.errors import CorruptFrame


def decoded(reply_type, raw):
    try:
        return reply_type.FromString(raw if type(raw) is bytes else bytes(raw))
    except DecodeError:
        raise CorruptFrame(f"an answer is no {reply_type.DESCRIPTOR.name}") from None
