/* Marks in memory that outlives this process (shm/mount_state): written behind all that they promise, and whole, since it may be
   killed in between. */

#ifndef NVPOOL_BASE_KEPT_H
#define NVPOOL_BASE_KEPT_H

#include <stdint.h>

static inline void put_mark(uint8_t *at, uint64_t mark)
{
    __atomic_signal_fence(__ATOMIC_SEQ_CST);
    __atomic_store_n((uint64_t *)at, mark, __ATOMIC_RELAXED);
    __atomic_signal_fence(__ATOMIC_SEQ_CST);
}

#endif
