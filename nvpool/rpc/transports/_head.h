/* Frame headers (rpc/transports/frame). Call crc_begin before any function of this file. */

#ifndef NVPOOL_WIRE_HEAD_H
#define NVPOOL_WIRE_HEAD_H

#include "_crc.h"

static inline void put_head(uint8_t *at, uint8_t kind, uint16_t code, uint32_t number, uint32_t deadline_ms,
                            uint32_t message_bytes, uint32_t payload_bytes, uint32_t message_crc)
{
    put32(at, 0x504E | (uint32_t)kind << 16);
    put32(at + 4, code);
    put32(at + 8, number);
    put32(at + 12, deadline_ms);
    put32(at + 16, message_bytes);
    put32(at + 20, payload_bytes);
    put32(at + 24, message_crc);
    put32(at + 28, crc_of(at, 28));
}

/* Whether the bytes are an intact header of this kind. */
static inline int is_head(const uint8_t *at, uint8_t kind)
{
    return get32(at) == (0x504E | (uint32_t)kind << 16) && !at[6] && !at[7] && crc_of(at, 28) == get32(at + 28);
}

#endif
