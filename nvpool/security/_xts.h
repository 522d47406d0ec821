/* Tweaks of one XTS data unit, and the exclusive or of tweaks and data. Used by _xts.pyx alone.
 *
 * The tweak of the n-th 16 bytes is the first tweak times x^n in GF(2^128), modulo x^128 + x^7 + x^2 + x + 1
 * (IEEE 1619-2018, 5.2). The code derives eight consecutive tweaks from the previous eight in one step. The
 * eight do not depend on each other, so the compiler can compute several in parallel.
 */
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__) && defined(__GLIBC__)
#define NVPOOL_WIDE __attribute__((optimize("O3"), target_clones("avx512f", "default")))
#elif defined(__GNUC__) && !defined(__clang__)
#define NVPOOL_WIDE __attribute__((optimize("O3")))
#else
#define NVPOOL_WIDE
#endif

typedef uint64_t lanes __attribute__((vector_size(64)));
enum { XTS_LANES = 8, XTS_WORDS = 512 };

/* Writes the tweaks of a 4 KiB block: alternately eight low halves and eight high halves. */
NVPOOL_WIDE static void spread_tweak(uint64_t *to, uint64_t low, uint64_t high)
{
	lanes lows, highs, carry;
	for (size_t lane = 0; lane < XTS_LANES; lane++) {
		uint64_t top = high >> 63;
		lows[lane] = low, highs[lane] = high;
		high = high << 1 | low >> 63;
		low = low << 1 ^ top * 0x87;
	}
	for (size_t at = 0; at < XTS_WORDS; at += 2 * XTS_LANES) {
		memcpy(to + at, &lows, sizeof lows);
		memcpy(to + at + XTS_LANES, &highs, sizeof highs);
		carry = highs >> 56;
		highs = highs << 8 | lows >> 56;
		lows = lows << 8 ^ carry ^ carry << 1 ^ carry << 2 ^ carry << 7;
	}
}

NVPOOL_WIDE static void mix_block(uint64_t *restrict to, const uint64_t *restrict from, const uint64_t *restrict tweaks)
{
	for (size_t at = 0; at < XTS_WORDS; at += 2 * XTS_LANES)
		for (size_t lane = 0; lane < XTS_LANES; lane++) {
			to[at + 2 * lane] = from[at + 2 * lane] ^ tweaks[at + lane];
			to[at + 2 * lane + 1] = from[at + 2 * lane + 1] ^ tweaks[at + XTS_LANES + lane];
		}
}
