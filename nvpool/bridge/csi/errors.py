"""Translation of nvpool's errors into gRPC status codes of CSI.

This is the only place that maps errors to the codes of the CSI specification ("Error Scheme" and the tables
of its calls). bridge/csi/server calls `status_of` for each failed call. If the specification requires another
code than that of the error's class, the call raises `CsiRefusal` with that code. Any other exception is a bug
and is logged here with its traceback.
"""

from __future__ import annotations

import logging

from grpc import StatusCode

from nvpool.core import errors
from nvpool.core.errors import NvpoolError

log = logging.getLogger("nvpool.bridge.csi")

TEXT_CHARACTERS_MAX = 1000
"""gRPC sends the text percent-encoded in a header of 8 KiB."""


class CsiRefusal(Exception):
    """Failure of a call with status `code`. The text is for a person, and includes the remedy."""

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
"""Status code of an error class; the nearest base class counts.

Every orchestrator retries UNAVAILABLE and similar codes, and shows the others to people. A conflict with a
running operation is ABORTED, as the specification requires.
"""


def status_of(error: BaseException) -> tuple[StatusCode, str]:
    """Return (code, sentence for a person); never OK."""
    if isinstance(error, CsiRefusal):
        return error.code, _cut(str(error))
    if isinstance(error, NvpoolError):
        return next(CODES[cls] for cls in type(error).__mro__ if cls in CODES), _cut(str(error))
    log.error("unexpected %s while serving a call", type(error).__name__, exc_info=error)
    return StatusCode.INTERNAL, _cut(f"{type(error).__name__}: {error}; the log of the bridge says more")


def _cut(text: str) -> str:
    return text if len(text) <= TEXT_CHARACTERS_MAX else f"{text[:TEXT_CHARACTERS_MAX]}…"
