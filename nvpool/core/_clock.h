/* Reads the clocks of core/clock without a Python call. */

#ifndef NVPOOL_BASE_CLOCK_H
#define NVPOOL_BASE_CLOCK_H

#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include <time.h>

static inline double seconds_of(clockid_t clock)
{
    struct timespec now;
    clock_gettime(clock, &now);
    return now.tv_sec + now.tv_nsec * 1e-9;
}

static inline double boottime_s(void) { return seconds_of(CLOCK_BOOTTIME); }

static inline double stopwatch(void) { return seconds_of(CLOCK_MONOTONIC); }

static inline long long wall_ns(void)
{
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    return now.tv_sec * 1000000000LL + now.tv_nsec;
}

/* Histogram slot of a duration, as metrics.Times counts durations. */
static inline int slot_of(double took_s)
{
    unsigned long long micros = took_s > 0 ? (unsigned long long)(took_s * 1e6) : 0;
    int slot = 0;
    for (; micros; micros >>= 1)
        slot++;
    return slot;
}

#endif
