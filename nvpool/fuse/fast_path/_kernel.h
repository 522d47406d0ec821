/* Replies of compiled reads to the kernel. */

#ifndef NVPOOL_FUSE_KERNEL_H
#define NVPOOL_FUSE_KERNEL_H

#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include <stdint.h>
#include <stdlib.h>
#include <sys/uio.h>
#include <unistd.h>

/* Send a reply, linux/fuse.h: its length, an error (0), the request's number; then the requested bytes. */
static ssize_t answer(int fd, uint64_t unique, const void *bytes, size_t length)
{
    struct { uint32_t length; int32_t error; uint64_t unique; } head = {(uint32_t)(16 + length), 0, unique};
    struct iovec vectors[2] = {{&head, 16}, {(void *)bytes, length}};
    return writev(fd, vectors, 2);
}

#endif
