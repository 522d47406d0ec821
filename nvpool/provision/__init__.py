"""Provisioning: creating pools and chunk stores, and joining nodes, clients and bridges to a pool."""
