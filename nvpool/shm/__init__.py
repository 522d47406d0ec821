"""Shared memory of a mount that outlives the process which serves it."""
