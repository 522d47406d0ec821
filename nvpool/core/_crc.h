/* CRC32C of short buffers (up to some hundred bytes), and the integers of the binary formats.

   For the compiled modules that parse and pack headers, frames and records. CRC32C uses the x86-64
   instruction (SSE 4.2) if the processor has the instruction, and tables otherwise. Each module calls
   `crc_begin` once. */

#ifndef NVPOOL_BASE_CRC_H
#define NVPOOL_BASE_CRC_H

#include <stddef.h>
#include <stdint.h>
#include <string.h>

static uint32_t crc_tables[8][256];

/* Eight bytes a step: "slicing by 8", Kounavis and Berry, ISCC 2005. */
static uint32_t crc_by_table(uint32_t crc, const uint8_t *bytes, size_t count)
{
    for (; count >= 8; count -= 8, bytes += 8) {
        uint32_t low = crc ^ (bytes[0] | bytes[1] << 8 | bytes[2] << 16 | (uint32_t)bytes[3] << 24);
        crc = crc_tables[7][low & 255] ^ crc_tables[6][low >> 8 & 255] ^ crc_tables[5][low >> 16 & 255]
            ^ crc_tables[4][low >> 24] ^ crc_tables[3][bytes[4]] ^ crc_tables[2][bytes[5]]
            ^ crc_tables[1][bytes[6]] ^ crc_tables[0][bytes[7]];
    }
    for (; count; count--)
        crc = crc >> 8 ^ crc_tables[0][(crc ^ *bytes++) & 255];
    return crc;
}

#if defined(__x86_64__) && defined(__GNUC__)

__attribute__((target("sse4.2")))
static uint32_t crc_by_instruction(uint32_t crc, const uint8_t *bytes, size_t count)
{
    uint64_t word, wide = crc;
    for (; count >= 8; count -= 8, bytes += 8) {
        memcpy(&word, bytes, 8);
        wide = __builtin_ia32_crc32di(wide, word);
    }
    crc = (uint32_t)wide;
    for (; count; count--)
        crc = __builtin_ia32_crc32qi(crc, *bytes++);
    return crc;
}

static uint32_t (*crc_step)(uint32_t, const uint8_t *, size_t) = crc_by_table;

static void crc_choose(void) { if (__builtin_cpu_supports("sse4.2")) crc_step = crc_by_instruction; }

#else

static uint32_t (*crc_step)(uint32_t, const uint8_t *, size_t) = crc_by_table;

static void crc_choose(void) {}

#endif

static void crc_begin(int by_table)
{
    for (uint32_t number = 0; number < 256; number++) {
        uint32_t crc = number;
        for (int bit = 0; bit < 8; bit++)
            crc = crc >> 1 ^ (crc & 1 ? 0x82F63B78u : 0);
        crc_tables[0][number] = crc;
    }
    for (uint32_t number = 0; number < 256; number++)
        for (int more = 1; more < 8; more++)
            crc_tables[more][number] = crc_tables[more - 1][number] >> 8
                ^ crc_tables[0][crc_tables[more - 1][number] & 255];
    crc_step = crc_by_table;
    if (!by_table)
        crc_choose();
}

static inline uint32_t crc_of(const uint8_t *bytes, size_t count) { return ~crc_step(~0u, bytes, count); }

static inline uint16_t get16(const uint8_t *at) { return at[0] | at[1] << 8; }

static inline uint32_t get32(const uint8_t *at) { return at[0] | at[1] << 8 | at[2] << 16 | (uint32_t)at[3] << 24; }

static inline uint64_t get64(const uint8_t *at) { return get32(at) | (uint64_t)get32(at + 4) << 32; }

static inline void put16(uint8_t *at, uint16_t value) { at[0] = value; at[1] = value >> 8; }

static inline void put32(uint8_t *at, uint32_t value)
{
    at[0] = value; at[1] = value >> 8; at[2] = value >> 16; at[3] = value >> 24;
}

static inline void put64(uint8_t *at, uint64_t value) { put32(at, (uint32_t)value); put32(at + 4, value >> 32); }

static inline void put64_big(uint8_t *at, uint64_t value)
{
    for (int byte = 7; byte >= 0; byte--, value >>= 8)
        at[byte] = value;
}

#endif
