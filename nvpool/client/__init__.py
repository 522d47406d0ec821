"""Client of a pool, used by mounts, the SDK and tools.

`Client.open` in `session` is the entry point; it makes the file system (`vfs`), which uses `read`, `write`,
`lookup`, `data` (stores), `rpc` (metadata service) and `state` (caches).
"""
