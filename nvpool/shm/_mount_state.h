/* Stores marks into memory that outlives this process (shm/mount_state). A mark becomes visible after
   everything that the mark validates, and as one store, because the process may be killed between any two
   instructions. */

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
