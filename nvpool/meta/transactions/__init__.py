"""Cross-shard transactions: two-phase commit."""
