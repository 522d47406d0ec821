"""Administration of a running pool: dumps, statistics and calls to one shard or target."""
