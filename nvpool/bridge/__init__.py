"""Volumes for containers: Docker volume plugin and CSI driver."""
