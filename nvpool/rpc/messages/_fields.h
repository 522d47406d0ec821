/* Encode and decode protobuf fields as proto3 does: a field with the value zero is omitted. Each function
   returns the address behind the bytes that it wrote or read. */

#ifndef NVPOOL_WIRE_FIELDS_H
#define NVPOOL_WIRE_FIELDS_H

#include <stddef.h>
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

/* Read a varint of up to 63 bits before `end`; return the address behind it, or NULL if there is none. */
static inline const uint8_t *take_varint(const uint8_t *at, const uint8_t *end, uint64_t *value)
{
    uint64_t found = 0;
    for (int shift = 0; at < end && shift < 63; shift += 7, at++) {
        found |= (uint64_t)(*at & 127) << shift;
        if (!(*at & 128)) {
            *value = found;
            return at + 1;
        }
    }
    return NULL;
}

#endif
