"""Whole trees into a pool and out of it: parallel, resumable, verified.

Kept are contents (holes stay holes), modes, owners (as root), times in nanoseconds, symbolic links, hard links within the tree,
extended attributes, fifos, sockets and device nodes. A file gets its times last, after its bytes are synced and were read
back and compared: so whoever repeats an interrupted transfer leaves out what has the size and the times of its source, also
after a loss of power, and a file that was cut short is never taken for a whole one.

Called by `nvpool import`, `nvpool export` and the quickstart. Removes nothing from the destination but the tail of a file that
is longer than its source, and never follows a symbolic link below the source or the destination.
"""
