/* Fields of protobuf messages as proto3 writes them: one that is zero is left out. Each returns the place behind what it wrote. */

#ifndef NVPOOL_WIRE_FIELDS_H
#define NVPOOL_WIRE_FIELDS_H

#include <stdint.h>
#include <string.h>

static inline uint8_t *put_varint(uint8_t *at, uint64_t value)
{
    for (; value > 127; value >>= 7)
        *at++ = (uint8_t)(value | 128);
    *at = (uint8_t)value;
    return at + 1;
}

static inline uint8_t *put_number(uint8_t *at, uint8_t tag, uint64_t value)
{
    if (!value)
        return at;
    *at = tag;
    return put_varint(at + 1, value);
}

static inline uint8_t *put_fixed(uint8_t *at, uint8_t tag, uint64_t value)
{
    if (!value)
        return at;
    *at = tag;
    for (int place = 0; place < 8; place++)
        at[1 + place] = (uint8_t)(value >> 8 * place);
    return at + 9;
}

#endif
