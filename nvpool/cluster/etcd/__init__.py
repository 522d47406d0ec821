"""Coordinator on etcd: client, leases and election."""
