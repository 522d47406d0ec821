"""Kernel cache coherence: which names, attributes and pages the kernel caches, and their invalidation.

A part of `fuse/ops/operations`. The kernel answers from its caches for the timeouts it was given
(`options`). After a change by another client it must not use old data for longer than that, and mostly not
that long: the metadata service recalls a lease before another client may change the inode, and the mount
invalidates the kernel's caches before it acknowledges the recall (`recalls`). So the change comes after the
kernel has dropped the old data. Names and attributes: `names`. Pages: `pages`, and for changes that bypass
them `page_cache_bypass`. Functions of the engine that notify the kernel: `notices`.
"""
