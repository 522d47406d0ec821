"""Volumes: directories with a policy, each within one partition (ARCHITECTURE, "Volumes")."""
