"""Fuzzing of a pool's services with requests that no client sends: `tools/fuzz.py`, `make fuzz`."""
