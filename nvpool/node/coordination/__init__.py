"""Coordination between nodes: leadership, etcd membership, and failover of shards."""
