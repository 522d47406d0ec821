/* CRC32C of a few bytes, and little-endian numbers: for the compiled modules that read and pack heads of frames. A buffer of a
   KiB and more is worth a call of the library, which uses the processor's instruction. */

#ifndef NVPOOL_WIRE_CRC32C_H
#define NVPOOL_WIRE_CRC32C_H

#include <stddef.h>
#include <stdint.h>

static uint32_t crc_tables[8][256];

static void crc_fill(void)
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
}

static uint32_t crc_of(const uint8_t *bytes, size_t count)
{
    uint32_t crc = ~0u;
    for (; count >= 8; count -= 8, bytes += 8) {
        uint32_t low = crc ^ (bytes[0] | bytes[1] << 8 | bytes[2] << 16 | (uint32_t)bytes[3] << 24);
        crc = crc_tables[7][low & 255] ^ crc_tables[6][low >> 8 & 255] ^ crc_tables[5][low >> 16 & 255]
            ^ crc_tables[4][low >> 24] ^ crc_tables[3][bytes[4]] ^ crc_tables[2][bytes[5]]
            ^ crc_tables[1][bytes[6]] ^ crc_tables[0][bytes[7]];
    }
    for (; count; count--)
        crc = crc >> 8 ^ crc_tables[0][(crc ^ *bytes++) & 255];
    return ~crc;
}

static uint32_t get32(const uint8_t *at)
{
    return at[0] | at[1] << 8 | at[2] << 16 | (uint32_t)at[3] << 24;
}

static void put32(uint8_t *at, uint32_t value)
{
    at[0] = value; at[1] = value >> 8; at[2] = value >> 16; at[3] = value >> 24;
}

#endif
