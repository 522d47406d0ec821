/* Stores marks into memory that outlives this process (RecordMemory in primitives). A mark becomes visible after
   everything that the mark validates, and as one store, because the process may be killed between any two
   instructions. */

#ifndef NVPOOL_CORE_RECORD_MARK_H
#define NVPOOL_CORE_RECORD_MARK_H

#include <stdint.h>

static inline void put_mark(uint8_t *at, uint64_t mark)
{
    __atomic_signal_fence(__ATOMIC_SEQ_CST);
    __atomic_store_n((uint64_t *)at, mark, __ATOMIC_RELAXED);
    __atomic_signal_fence(__ATOMIC_SEQ_CST);
}

#endif
