# cython: language_level=3
"""C types of file_layout.py: the chain of a chunk."""

from libc.stdint cimport uint32_t, uint64_t

from nvpool.core.primitives cimport chunk_hash


cpdef uint32_t chain_of(uint64_t inode, uint32_t index) noexcept
