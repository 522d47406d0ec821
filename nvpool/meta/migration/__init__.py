"""Migration of partitions from one shard to another."""
