"""Volumes for containers: Docker plugin and CSI."""
