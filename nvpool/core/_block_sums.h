/* CRC32C of 4 KiB blocks with the x86-64 instruction (SSE 4.2), for the compiled modules. */

#ifndef NVPOOL_BASE_BLOCK_SUMS_H
#define NVPOOL_BASE_BLOCK_SUMS_H

#include <stddef.h>
#include <stdint.h>
#include <string.h>

#define BLOCK 4096

#if defined(__x86_64__) && defined(__GNUC__)

static int has_instruction(void) { return __builtin_cpu_supports("sse4.2"); }

/* Three blocks in parallel: each step waits three cycles for the previous step of its block, and the
   processor can start one step in each cycle. */
__attribute__((target("sse4.2")))
static void sum_blocks(const unsigned char *data, size_t count, uint32_t *sums)
{
    size_t block = 0;
    for (; block + 3 <= count; block += 3, data += 3 * BLOCK) {
        uint64_t a = 0xFFFFFFFFu, b = a, c = a, word;
        for (size_t at = 0; at < BLOCK; at += 8) {
            memcpy(&word, data + at, 8);
            a = __builtin_ia32_crc32di(a, word);
            memcpy(&word, data + BLOCK + at, 8);
            b = __builtin_ia32_crc32di(b, word);
            memcpy(&word, data + 2 * BLOCK + at, 8);
            c = __builtin_ia32_crc32di(c, word);
        }
        sums[block] = ~(uint32_t)a;
        sums[block + 1] = ~(uint32_t)b;
        sums[block + 2] = ~(uint32_t)c;
    }
    for (; block < count; block++, data += BLOCK) {
        uint64_t a = 0xFFFFFFFFu, word;
        for (size_t at = 0; at < BLOCK; at += 8) {
            memcpy(&word, data + at, 8);
            a = __builtin_ia32_crc32di(a, word);
        }
        sums[block] = ~(uint32_t)a;
    }
}

#else

static int has_instruction(void) { return 0; }
static void sum_blocks(const unsigned char *data, size_t count, uint32_t *sums) { (void)data; (void)count; (void)sums; }

#endif

#endif
