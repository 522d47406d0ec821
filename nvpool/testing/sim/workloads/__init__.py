"""Workloads of the simulation, with their final checks."""
