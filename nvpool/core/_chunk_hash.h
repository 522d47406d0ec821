/* C version of chunk_hash in primitives.py. */

#ifndef NVPOOL_BASE_CHUNK_HASH_H
#define NVPOOL_BASE_CHUNK_HASH_H

#include <stdint.h>

static inline uint64_t chunk_hash(uint64_t inode, uint32_t index)
{
    uint64_t z = inode + (index + 1ull) * 0x9E3779B97F4A7C15ull;
    for (int turn = 0; turn < 2; turn++) {
        z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9ull;
        z = (z ^ z >> 27) * 0x94D049BB133111EBull;
        z ^= z >> 31;
    }
    return z;
}

#endif
