/* What compiled reads of a mount say to the kernel, and the clock they go by. */

#ifndef NVPOOL_FUSE_KERNEL_H
#define NVPOOL_FUSE_KERNEL_H

#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include <stdint.h>
#include <stdlib.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

static double boottime_s(void)
{
    struct timespec now;
    clock_gettime(CLOCK_BOOTTIME, &now);
    return now.tv_sec + now.tv_nsec * 1e-9;
}

/* An answer to the kernel, linux/fuse.h: its length, an error (0), whose request it is; what was asked for. */
static ssize_t answer(int fd, uint64_t unique, const void *bytes, size_t length)
{
    struct { uint32_t length; int32_t error; uint64_t unique; } head = {(uint32_t)(16 + length), 0, unique};
    struct iovec vectors[2] = {{&head, 16}, {(void *)bytes, length}};
    return writev(fd, vectors, 2);
}

#endif
