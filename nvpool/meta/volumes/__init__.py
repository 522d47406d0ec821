"""Volumes: directories with a policy, each within one partition (docs/internals/volumes.md)."""
