# cython: language_level=3
"""frame_stream.py is compiled without C types: its functions run for every frame."""
