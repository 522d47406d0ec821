"""Answers of daemons, and what is told where no answer came in time. Called by metaclient and chunkclient, at the door where
bytes of another process come in."""

from __future__ import annotations

from nvpool.core.errors import DeadlineExceeded, NvpoolError, Unavailable


def reason_of(error: NvpoolError, before: NvpoolError | None) -> NvpoolError:
    """Why a request has to be repeated: `error`, but where only time has run out, what went wrong before."""
    return before if before is not None and isinstance(error, DeadlineExceeded) else error


def at_the_deadline(error: NvpoolError, reason: NvpoolError, uncertain: bool = False) -> Unavailable:
    """What a request that may not be repeated any more raises: its last error, with `reason_of` all of them. `uncertain`: an
    earlier try may have been carried out."""
    family = type(error) if isinstance(error, Unavailable) else DeadlineExceeded
    return family(f"{error}" if reason is error else f"{error}; last: {reason}",
                  may_be_applied=uncertain or error.may_be_applied or reason.may_be_applied)


