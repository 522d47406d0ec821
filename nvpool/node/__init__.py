"""Supervisor of a node: runs the node's processes and takes part in coordinating the pool."""
