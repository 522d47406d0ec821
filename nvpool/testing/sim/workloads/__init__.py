"""Workloads of the simulation, with what has to hold afterwards."""
