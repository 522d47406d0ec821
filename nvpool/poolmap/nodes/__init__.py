"""Nodes in the pool map: joining, draining, removal, and membership of etcd."""
