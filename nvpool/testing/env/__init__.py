"""Environments for tests: pools of real processes, etcd, containers, network namespaces."""
