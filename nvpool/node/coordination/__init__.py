"""Coordination between nodes: leadership, etcd, and failover of shards."""
