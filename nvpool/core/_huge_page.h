/* Memory that the kernel keeps as one huge page, where it has one. */

#ifndef NVPOOL_HUGE_PAGE_H
#define NVPOOL_HUGE_PAGE_H

#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include <stddef.h>
#include <stdint.h>
#include <sys/mman.h>

#define NVPOOL_HUGE ((size_t)2 << 20)

/* 2 MiB at a border of 2 MiB, which are never given back; NULL where there is no memory. */
static inline uint8_t *huge_page(void)
{
    uint8_t *all = mmap(NULL, 2 * NVPOOL_HUGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0), *from;
    if (all == MAP_FAILED)
        return NULL;
    from = (uint8_t *)(((uintptr_t)all + NVPOOL_HUGE - 1) & ~(uintptr_t)(NVPOOL_HUGE - 1));
    if (from > all)
        munmap(all, from - all);
    munmap(from + NVPOOL_HUGE, all + NVPOOL_HUGE - from);
    madvise(from, NVPOOL_HUGE, MADV_HUGEPAGE);
    return from;
}

#endif
