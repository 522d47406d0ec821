"""State of a shard: records, the transactions that change them, and the turns of locks and appends."""
