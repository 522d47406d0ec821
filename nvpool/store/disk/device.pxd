# cython: language_level=3
"""device.py is compiled without C types: every write runs through it."""
