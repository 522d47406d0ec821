"""Errors on the wire: every class of core/errors to a code with an Error message, and back.

Called by the transports for each answer that is an error, on both sides. An error that this version does not know becomes its
family (the hundreds of its code), so that an older caller still does the right thing next. What is none of ours becomes Bug
and is logged here with its traceback, because the text alone says too little.
"""

from __future__ import annotations

import asyncio
import logging

from google.protobuf.message import DecodeError

from nvpool.core.errors import BY_WIRE_CODE, Bug, Cancelled, NvpoolError
from nvpool.rpc.v1 import wire_pb2

_log = logging.getLogger(__name__)

TEXT_CHARACTERS_MAX = 2000
"""A sentence for a person; more would only swell logs on the other side."""


def encode_error(error: BaseException) -> tuple[int, bytes]:
    """(wire code, encoded Error message) of any exception."""
    if isinstance(error, asyncio.CancelledError):
        error = Cancelled("the work was stopped on the serving side")
    elif not isinstance(error, NvpoolError):
        _log.error("unexpected %s while serving a request", type(error).__name__, exc_info=error)
        error = Bug(f"{type(error).__name__}: {error}")
    code = error.wire_code
    message = wire_pb2.Error(code=code, text=str(error)[:TEXT_CHARACTERS_MAX].encode("utf-8", "replace").decode(),
                             may_be_applied=error.may_be_applied, retry_after_s=error.retry_after_s)
    return code, message.SerializeToString()


def decode_error(code: int, raw) -> NvpoolError:
    """The error that the other side named. Never raises: what can not be read keeps at least its family."""
    error_class = BY_WIRE_CODE.get(code) or BY_WIRE_CODE.get(code // 100 * 100) or Bug
    message = wire_pb2.Error()
    try:
        message.ParseFromString(bytes(raw))
    except DecodeError:
        return error_class(f"error {code} with a text that can not be read")
    text = message.text or ("" if code in BY_WIRE_CODE else f"error {code}, which this version does not know")
    return error_class(text, may_be_applied=message.may_be_applied, retry_after_s=message.retry_after_s)
