"""Administration of a running pool: snapshot barriers, statistics and calls to one shard or target."""
