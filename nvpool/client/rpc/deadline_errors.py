"""Errors of requests that run out of time: which reason the caller gets.

Used by the metadata client and the chunk client, where replies of other processes arrive.
"""

from __future__ import annotations

from nvpool.core.errors import DeadlineExceeded, NvpoolError, Unavailable


def reason_of(error: NvpoolError, before: NvpoolError | None) -> NvpoolError:
    """The reason of a retry: `error`, or the earlier reason if `error` is a timeout."""
    return before if before is not None and isinstance(error, DeadlineExceeded) else error


def at_the_deadline(error: NvpoolError, reason: NvpoolError, uncertain: bool = False) -> Unavailable:
    """The error to raise for a request that must not be retried any more.

    It has the last error and the reason (see `reason_of`). `uncertain`: an earlier attempt may have been
    executed.
    """
    family = type(error) if isinstance(error, Unavailable) else DeadlineExceeded
    return family(
        f"{error}" if reason is error else f"{error}; last: {reason}",
        may_be_applied=uncertain or error.may_be_applied or reason.may_be_applied,
    )
