"""Import and export of whole trees: parallel, resumable, verified.

A transfer keeps contents (holes stay holes), modes, owners (as root), times in nanoseconds, symbolic links,
hard links within the tree, extended attributes, fifos, sockets and device nodes. A file gets its times last,
after its bytes were synced, read back and compared. So a repeated transfer can skip every file that has the
size and the times of its source, also after a power loss, and a truncated file is never taken for a complete
one.

`nvpool import`, `nvpool export` and the quickstart use this package. A transfer removes nothing from the
destination except the tail of a file that is longer than its source. Symbolic links below the source or the
destination are never followed.
"""
