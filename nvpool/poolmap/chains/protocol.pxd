# cython: language_level=3
"""protocol.py is compiled without C types: its functions run for every write of a chain."""
