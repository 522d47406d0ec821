"""Reads and writes of chunks at stores, and local reads that bypass them.

`chunk_client` is the entry point; `short_circuit` reads local drives, `hedged_reads` deals with slow
targets, and `unstable_writes` commits writes. Used by `read`, `write` and `vfs`.
"""
