"""Errors at the border to CSI: which status of gRPC an orchestrator sees.

The one place where nvpool's errors become codes of the CSI specification ("Error Scheme" and the tables of its calls). Called
by bridge/csi/server for each call that fails; where a table of the specification wants another code than the class of the error
has, the call raises CsiRefusal with it. What is no error of ours is a bug: it is logged here with its traceback.
"""

from __future__ import annotations

import logging

from grpc import StatusCode

from nvpool.core import errors
from nvpool.core.errors import NvpoolError

log = logging.getLogger("nvpool.bridge.csi")

TEXT_CHARACTERS_MAX = 1000
"""gRPC carries it in a header of 8 KiB, percent-encoded."""


class CsiRefusal(Exception):
    """A call is answered with `code`; the text is for a person, with the remedy."""

    def __init__(self, code: StatusCode, text: str) -> None:
        super().__init__(text)
        self.code = code


def invalid(text: str) -> CsiRefusal:
    return CsiRefusal(StatusCode.INVALID_ARGUMENT, text)


def precondition(text: str) -> CsiRefusal:
    return CsiRefusal(StatusCode.FAILED_PRECONDITION, text)


CODES: dict[type[NvpoolError], StatusCode] = {
    errors.Refused: StatusCode.FAILED_PRECONDITION,
    errors.InvalidRequest: StatusCode.INVALID_ARGUMENT,
    errors.NameTooLong: StatusCode.INVALID_ARGUMENT,
    errors.NotADirectory: StatusCode.INVALID_ARGUMENT,
    errors.TooManySymlinks: StatusCode.INVALID_ARGUMENT,
    errors.TooBig: StatusCode.INVALID_ARGUMENT,
    errors.FileTooLarge: StatusCode.OUT_OF_RANGE,
    errors.NotFound: StatusCode.NOT_FOUND,
    errors.AlreadyExists: StatusCode.ALREADY_EXISTS,
    errors.NotPermitted: StatusCode.PERMISSION_DENIED,
    errors.AccessDenied: StatusCode.PERMISSION_DENIED,
    errors.NoSpace: StatusCode.RESOURCE_EXHAUSTED,
    errors.QuotaExceeded: StatusCode.RESOURCE_EXHAUSTED,
    errors.TooManyOpen: StatusCode.RESOURCE_EXHAUSTED,
    errors.TooManyLinks: StatusCode.RESOURCE_EXHAUSTED,
    errors.TooManyLocks: StatusCode.RESOURCE_EXHAUSTED,
    errors.Stale: StatusCode.UNAVAILABLE,
    errors.StaleCursor: StatusCode.ABORTED,
    errors.StaleIdentity: StatusCode.PERMISSION_DENIED,
    errors.Unavailable: StatusCode.UNAVAILABLE,
    errors.Busy: StatusCode.ABORTED,
    errors.DeadlineExceeded: StatusCode.DEADLINE_EXCEEDED,
    errors.Damaged: StatusCode.DATA_LOSS,
    errors.CorruptFrame: StatusCode.UNAVAILABLE,
    errors.Bug: StatusCode.INTERNAL,
}
"""By the nearest class. Unavailable and its like are repeated by every orchestrator; the rest is shown to people. What another
operation holds up is ABORTED, as the specification has it."""


def status_of(error: BaseException) -> tuple[StatusCode, str]:
    """(code, sentence for a person), never OK and never an empty sentence."""
    if isinstance(error, CsiRefusal):
        return error.code, _cut(str(error))
    if isinstance(error, NvpoolError):
        return next(CODES[cls] for cls in type(error).__mro__ if cls in CODES), _cut(str(error))
    log.error("unexpected %s while serving a call", type(error).__name__, exc_info=error)
    return StatusCode.INTERNAL, _cut(f"{type(error).__name__}: {error}; the log of the bridge says more")


def _cut(text: str) -> str:
    return text if len(text) <= TEXT_CHARACTERS_MAX else f"{text[:TEXT_CHARACTERS_MAX]}…"
