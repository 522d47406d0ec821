/* BLAKE2b with a key (RFC 7693), for the compiled modules that hash some dozen bytes many times with one key: what a hash of
   that costs by way of hashlib is mostly the way. The block of the key is hashed once. */

#ifndef NVPOOL_BASE_BLAKE2B_H
#define NVPOOL_BASE_BLAKE2B_H

#include <stddef.h>
#include <stdint.h>
#include <string.h>

#define BLAKE2B_BLOCK 128
#define BLAKE2B_KEY_MAX 64

typedef struct { uint64_t h[8]; size_t digest_bytes; } blake2b_keyed;

static const uint64_t blake2b_iv[8] = {
    0x6a09e667f3bcc908u, 0xbb67ae8584caa73bu, 0x3c6ef372fe94f82bu, 0xa54ff53a5f1d36f1u,
    0x510e527fade682d1u, 0x9b05688c2b3e6c1fu, 0x1f83d9abfb41bd6bu, 0x5be0cd19137e2179u};

static const uint8_t blake2b_sigma[12][16] = {
    {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15}, {14, 10, 4, 8, 9, 15, 13, 6, 1, 12, 0, 2, 11, 7, 5, 3},
    {11, 8, 12, 0, 5, 2, 15, 13, 10, 14, 3, 6, 7, 1, 9, 4}, {7, 9, 3, 1, 13, 12, 11, 14, 2, 6, 5, 10, 4, 0, 15, 8},
    {9, 0, 5, 7, 2, 4, 10, 15, 14, 1, 11, 12, 6, 8, 3, 13}, {2, 12, 6, 10, 0, 11, 8, 3, 4, 13, 7, 5, 15, 14, 1, 9},
    {12, 5, 1, 15, 14, 13, 4, 10, 0, 7, 6, 3, 9, 2, 8, 11}, {13, 11, 7, 14, 12, 1, 3, 9, 5, 0, 15, 4, 8, 6, 2, 10},
    {6, 15, 14, 9, 11, 3, 0, 8, 12, 2, 13, 7, 1, 4, 10, 5}, {10, 2, 8, 4, 7, 6, 1, 5, 15, 11, 9, 14, 3, 12, 13, 0},
    {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15}, {14, 10, 4, 8, 9, 15, 13, 6, 1, 12, 0, 2, 11, 7, 5, 3}};

static inline uint64_t blake2b_turn(uint64_t word, int bits) { return word >> bits | word << (64 - bits); }

static void blake2b_compress(uint64_t *h, const uint8_t *block, uint64_t count, int last)
{
    uint64_t v[16], m[16];
    for (int word = 0; word < 16; word++) {
        m[word] = 0;
        for (int byte = 7; byte >= 0; byte--)
            m[word] = m[word] << 8 | block[8 * word + byte];
    }
    memcpy(v, h, 64);
    memcpy(v + 8, blake2b_iv, 64);
    v[12] ^= count;
    if (last)
        v[14] = ~v[14];
#define BLAKE2B_G(a, b, c, d, x, y) \
    a += b + x; d = blake2b_turn(d ^ a, 32); c += d; b = blake2b_turn(b ^ c, 24); \
    a += b + y; d = blake2b_turn(d ^ a, 16); c += d; b = blake2b_turn(b ^ c, 63);
    for (int round = 0; round < 12; round++) {
        const uint8_t *s = blake2b_sigma[round];
        BLAKE2B_G(v[0], v[4], v[8], v[12], m[s[0]], m[s[1]])
        BLAKE2B_G(v[1], v[5], v[9], v[13], m[s[2]], m[s[3]])
        BLAKE2B_G(v[2], v[6], v[10], v[14], m[s[4]], m[s[5]])
        BLAKE2B_G(v[3], v[7], v[11], v[15], m[s[6]], m[s[7]])
        BLAKE2B_G(v[0], v[5], v[10], v[15], m[s[8]], m[s[9]])
        BLAKE2B_G(v[1], v[6], v[11], v[12], m[s[10]], m[s[11]])
        BLAKE2B_G(v[2], v[7], v[8], v[13], m[s[12]], m[s[13]])
        BLAKE2B_G(v[3], v[4], v[9], v[14], m[s[14]], m[s[15]])
    }
#undef BLAKE2B_G
    for (int word = 0; word < 8; word++)
        h[word] ^= v[word] ^ v[word + 8];
}

/* key_bytes: 1 to BLAKE2B_KEY_MAX; digest_bytes: 1 to 64. */
static void blake2b_begin(blake2b_keyed *keyed, const uint8_t *key, size_t key_bytes, size_t digest_bytes)
{
    uint8_t block[BLAKE2B_BLOCK] = {0};
    memcpy(block, key, key_bytes);
    memcpy(keyed->h, blake2b_iv, 64);
    keyed->h[0] ^= 0x01010000u ^ key_bytes << 8 ^ digest_bytes;
    keyed->digest_bytes = digest_bytes;
    blake2b_compress(keyed->h, block, BLAKE2B_BLOCK, 0);
}

/* Of one byte and more. */
static void blake2b_digest(const blake2b_keyed *keyed, const uint8_t *message, size_t count, uint8_t *digest)
{
    uint64_t h[8], hashed = BLAKE2B_BLOCK;
    uint8_t block[BLAKE2B_BLOCK] = {0};
    memcpy(h, keyed->h, 64);
    for (; count > BLAKE2B_BLOCK; count -= BLAKE2B_BLOCK, message += BLAKE2B_BLOCK)
        blake2b_compress(h, message, hashed += BLAKE2B_BLOCK, 0);
    memcpy(block, message, count);
    blake2b_compress(h, block, hashed + count, 1);
    for (size_t byte = 0; byte < keyed->digest_bytes; byte++)
        digest[byte] = h[byte >> 3] >> 8 * (byte & 7);
}

#endif
