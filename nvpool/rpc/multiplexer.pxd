# cython: language_level=3
"""multiplexer.py is compiled without C types: its functions run for every request."""
