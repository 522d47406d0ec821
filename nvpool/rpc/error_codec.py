"""Error encoding on the wire: each class of core/errors as a code and an Error message.

The transports on both sides call this module for each response that is an error. An error that this version
does not know becomes its family (the hundreds of its code), so that an older caller still takes the right
next step. Any other exception becomes Bug and is logged here with its traceback, because the text alone is
not enough to find the cause.
"""

from __future__ import annotations

import asyncio
import logging

from google.protobuf.message import DecodeError

from nvpool.core.errors import BY_WIRE_CODE, Bug, Cancelled, NvpoolError
from nvpool.rpc.api import Buffer
from nvpool.rpc.v1 import wire_pb2

_log = logging.getLogger(__name__)

TEXT_CHARACTERS_MAX = 2000
"""Longest error text: a sentence for a person; more would only fill logs on the other side."""


def encode_error(error: BaseException) -> tuple[int, bytes]:
    """(wire code, encoded Error message) of any exception."""
    if isinstance(error, asyncio.CancelledError):
        error = Cancelled("the work was stopped on the serving side")
    elif not isinstance(error, NvpoolError):
        _log.error("unexpected %s while serving a request", type(error).__name__, exc_info=error)
        error = Bug(f"{type(error).__name__}: {error}")
    code = error.wire_code
    message = wire_pb2.Error(
        code=code,
        text=str(error)[:TEXT_CHARACTERS_MAX].encode("utf-8", "replace").decode(),
        may_be_applied=error.may_be_applied,
        retry_after_s=error.retry_after_s,
    )
    return code, message.SerializeToString()


def decode_error(code: int, raw: Buffer) -> NvpoolError:
    """The error that the other side sent. Never raises: an unreadable error keeps at least its family."""
    error_class = BY_WIRE_CODE.get(code) or BY_WIRE_CODE.get(code // 100 * 100) or Bug
    message = wire_pb2.Error()
    try:
        message.ParseFromString(bytes(raw))
    except DecodeError:
        return error_class(f"error {code} with a text that cannot be read")
    text = message.text or ("" if code in BY_WIRE_CODE else f"error {code}, which this version does not know")
    return error_class(text, may_be_applied=message.may_be_applied, retry_after_s=message.retry_after_s)
