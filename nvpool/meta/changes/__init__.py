"""Decisions, one file per operation: (view, request, now in ns) -> Draft. Pure: no await, no clock, no I/O but reads
through the view. A refusal is an exception and leaves nothing. Called by `meta/service` only."""
