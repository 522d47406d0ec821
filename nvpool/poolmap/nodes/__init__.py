"""Nodes in the pool map: joining, draining, removal, membership of etcd."""
