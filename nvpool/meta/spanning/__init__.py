"""Changes over several shards: one shard decides (`coordinator`), the others hold their records for it (`participant`)."""
