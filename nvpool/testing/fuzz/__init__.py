"""Requests that no client of ours would send, to the services of a pool: `tools/fuzz.py`, `make fuzz`."""
