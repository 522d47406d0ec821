/* Preloaded library (LD_PRELOAD): records each change of files below a directory, and injects failures on request.
 *
 *   NVPOOL_FAULTS_ROOT   the directory (absolute); other files are not affected
 *   NVPOOL_FAULTS_LOG    a directory for the records, in <pid>.log; not set: nothing is recorded
 *   NVPOOL_FAULTS_RULES  a file of struct rule, mapped shared, so that a test can arm and disarm faults at any time
 *
 * A record is written after the operation has succeeded, under the same lock, so that log and operations have the same order.
 * Only a sync is logged at its begin and at its end, because other threads continue to write meanwhile.
 * power_loss.py reads the format:  struct record, path bytes, data bytes.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>
#include <limits.h>

enum { OPEN = 1, WRITE, TRUNCATE, RENAME, UNLINK, SYNC_BEGIN, SYNC_END, MKDIR, RMDIR, LINK, ALLOCATE, LIED };
enum { ON_WRITE = 1, ON_SYNC = 2, ON_READ = 4, ON_OPEN = 8, ON_ALLOCATE = 16, ON_RENAME = 32 };
enum { FAIL = 1, SHORT = 2, LIE = 3 };

struct record {
    uint32_t magic, kind;
    uint64_t time_ns, device, inode, offset, length, extra;
    uint32_t path_bytes, data_bytes;
};

struct rule {
    volatile uint32_t armed, on, action, error;
    volatile int64_t skip, count; /* let `skip` pass, then act on `count`; -1 for ever */
    char path[160];               /* part of the path below the root; empty: any */
};
#define RULES 16
#define FDS 65536
#define PAGE 4096

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static char root[PATH_MAX];
static size_t root_bytes;
static int log_fd = -1, ready, log_pid;
static char log_dir[PATH_MAX];
static struct rule *rules;
static struct file { char *path; uint64_t device, inode; int dsync, direct; } files[FDS];

#define REAL(name) ({ static __typeof__(&name) f; if (!f) f = (__typeof__(&name))dlsym(RTLD_NEXT, #name); f; })

__attribute__((constructor)) static void begin(void) {
    if (ready) return;
    ready = 1;
    const char *r = getenv("NVPOOL_FAULTS_ROOT"), *l = getenv("NVPOOL_FAULTS_LOG"), *f = getenv("NVPOOL_FAULTS_RULES");
    if (!r || !realpath(r, root)) return;
    root_bytes = strlen(root);
    if (l) snprintf(log_dir, sizeof log_dir, "%s", l);
    if (f) {
        int fd = syscall(SYS_openat, AT_FDCWD, f, O_RDWR | O_CLOEXEC);
        if (fd >= 0) {
            void *m = mmap(0, sizeof(struct rule) * RULES, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
            if (m != MAP_FAILED) rules = m;
            syscall(SYS_close, fd);
        }
    }
}

static uint64_t now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (uint64_t)t.tv_sec * 1000000000ull + t.tv_nsec;
}

/* Absolute path of `path`, if it is below the root; a symlink at its end is not followed. */
static char *below(int dirfd, const char *path) {
    if (!root_bytes || !path) return 0;
    char base[PATH_MAX], whole[PATH_MAX * 2], real[PATH_MAX];
    if (path[0] == '/') snprintf(whole, sizeof whole, "%s", path);
    else {
        if (dirfd == AT_FDCWD) { if (!getcwd(base, sizeof base)) return 0; }
        else {
            char link[64];
            snprintf(link, sizeof link, "/proc/self/fd/%d", dirfd);
            ssize_t n = readlink(link, base, sizeof base - 1);
            if (n < 0) return 0;
            base[n] = 0;
        }
        snprintf(whole, sizeof whole, "%s/%s", base, path);
    }
    char *name = strrchr(whole, '/');
    if (!name) return 0;
    if (!strcmp(name, "/.") || !strcmp(name, "/..")) name = whole + strlen(whole); /* the whole path is a directory */
    else *name++ = 0;
    if (!realpath(*whole ? whole : "/", real)) return 0;
    char *out;
    if (!*name) out = strdup(real);
    else if (asprintf(&out, "%s/%s", real, name) < 0) return 0;
    if (strncmp(out, root, root_bytes) || (out[root_bytes] && out[root_bytes] != '/')) { free(out); return 0; }
    return out;
}

static void put(uint32_t kind, const struct file *f, const char *path, uint64_t offset, uint64_t length, uint64_t extra,
                const void *data, uint32_t data_bytes) {
    if (!*log_dir) return;
    if (log_fd < 0 || log_pid != getpid()) {
        char name[PATH_MAX + 32];
        log_pid = getpid();
        snprintf(name, sizeof name, "%s/%d.log", log_dir, log_pid);
        log_fd = syscall(SYS_openat, AT_FDCWD, name, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0644);
        if (log_fd >= 0 && log_fd < 900) { /* leave low descriptors to the program */
            int high = fcntl(log_fd, F_DUPFD_CLOEXEC, 900);
            if (high >= 0) { syscall(SYS_close, log_fd); log_fd = high; }
        }
    }
    struct record r = {0x4e565046, kind, now(), f ? f->device : 0, f ? f->inode : 0, offset, length, extra,
                       path ? strlen(path) : 0, data_bytes};
    struct iovec v[3] = {{&r, sizeof r}, {(void *)path, r.path_bytes}, {(void *)data, data_bytes}};
    size_t want = sizeof r + r.path_bytes + data_bytes;
    ssize_t n = syscall(SYS_writev, log_fd, v, 3);
    if (n != (ssize_t)want) { static const char m[] = "faults: the record could not be written\n"; syscall(SYS_write, 2, m, sizeof m - 1); abort(); }
}

/* The action for this operation: 0, or FAIL (errno set), SHORT, LIE. */
static int fault(uint32_t on, const char *path) {
    if (!rules) return 0;
    for (int i = 0; i < RULES; i++) {
        struct rule *r = &rules[i];
        if (!r->armed || !(r->on & on) || (r->path[0] && (!path || !strstr(path + root_bytes, (char *)r->path)))) continue;
        if (r->skip > 0) { __sync_fetch_and_sub(&r->skip, 1); continue; }
        if (r->count == 0) continue;
        if (r->count > 0) __sync_fetch_and_sub(&r->count, 1);
        if (r->action == FAIL) errno = r->error;
        return r->action;
    }
    return 0;
}

static struct file *known(int fd) { return fd >= 0 && fd < FDS && files[fd].path ? &files[fd] : 0; }

static void forget(int fd) {
    if (fd >= 0 && fd < FDS && files[fd].path) { free(files[fd].path); files[fd].path = 0; }
}

static int opened(int fd, char *path, int flags, int existed) {
    if (!path) { return fd; }
    struct stat s;
    if (fd < 0 || fd >= FDS || fstat(fd, &s)) { free(path); return fd; }
    forget(fd);
    files[fd] = (struct file){path, s.st_dev, s.st_ino, (flags & (O_DSYNC | O_SYNC)) != 0, (flags & O_DIRECT) != 0};
    if (!S_ISDIR(s.st_mode)) put(OPEN, &files[fd], path, 0, s.st_size, (existed ? 0 : 1) | (flags & O_TRUNC ? 2 : 0), 0, 0);
    return fd;
}

static int do_open(int dirfd, const char *name, int flags, mode_t mode) {
    begin();
    char *path = below(dirfd, name);
    if (!path) return syscall(SYS_openat, dirfd, name, flags, mode);
    pthread_mutex_lock(&lock);
    int fd = -1;
    if (fault(ON_OPEN, path) == FAIL) free(path);
    else {
        struct stat s;
        int existed = !(flags & O_CREAT) || !stat(path, &s);
        fd = opened(syscall(SYS_openat, dirfd, name, flags, mode), path, flags, existed);
    }
    int e = errno;
    pthread_mutex_unlock(&lock);
    errno = e;
    return fd;
}
#define MODE ({ mode_t m = 0; if (flags & (O_CREAT | __O_TMPFILE)) { va_list a; va_start(a, flags); m = va_arg(a, mode_t); va_end(a); } m; })
int open(const char *p, int flags, ...) { return do_open(AT_FDCWD, p, flags, MODE); }
int open64(const char *p, int flags, ...) { return do_open(AT_FDCWD, p, flags | O_LARGEFILE, MODE); }
int openat(int d, const char *p, int flags, ...) { return do_open(d, p, flags, MODE); }
int openat64(int d, const char *p, int flags, ...) { return do_open(d, p, flags | O_LARGEFILE, MODE); }
int __open_2(const char *p, int flags) { return do_open(AT_FDCWD, p, flags, 0); }
int __open64_2(const char *p, int flags) { return do_open(AT_FDCWD, p, flags, 0); }
int creat(const char *p, mode_t m) { return do_open(AT_FDCWD, p, O_CREAT | O_WRONLY | O_TRUNC, m); }
int close(int fd) {
    pthread_mutex_lock(&lock);
    forget(fd);
    pthread_mutex_unlock(&lock);
    return syscall(SYS_close, fd);
}
static int copied(int from, int to) {
    pthread_mutex_lock(&lock);
    struct file *f = known(from);
    if (f && to >= 0 && to < FDS && to != from) {
        forget(to);
        files[to] = *f;
        files[to].path = strdup(f->path);
    }
    pthread_mutex_unlock(&lock);
    return to;
}
int dup(int fd) { return copied(fd, syscall(SYS_dup, fd)); }
int dup2(int fd, int to) { return copied(fd, syscall(SYS_dup2, fd, to)); }
int dup3(int fd, int to, int flags) { return copied(fd, syscall(SYS_dup3, fd, to, flags)); }

/* A write of any kind; `at` -1 means the file's own position. */
static ssize_t do_write(int fd, const struct iovec *v, int n, off_t at, int rw_flags) {
    if (!known(fd)) {
        if (at < 0 && n == 1) return syscall(SYS_write, fd, v->iov_base, v->iov_len);
        if (at < 0) return syscall(SYS_writev, fd, v, n);
        if (n == 1 && !rw_flags) return syscall(SYS_pwrite64, fd, v->iov_base, v->iov_len, at);
        return syscall(SYS_pwritev2, fd, v, n, (unsigned long)at, 0ul, rw_flags);
    }
    pthread_mutex_lock(&lock);
    struct file *f = known(fd);
    size_t total = 0;
    for (int i = 0; i < n; i++) total += v[i].iov_len;
    ssize_t done = -1;
    int action = fault(ON_WRITE, f->path);
    if (action != FAIL) {
        char *joined; /* aligned for O_DIRECT, as the program's buffers are, so that our copy does not fail */
        if (posix_memalign((void **)&joined, PAGE, total ? total : 1)) abort();
        char *p = joined;
        for (int i = 0; i < n; i++) { memcpy(p, v[i].iov_base, v[i].iov_len); p += v[i].iov_len; }
        size_t want = total;
        if (action == SHORT && f->direct) want = total >= 2 * PAGE ? total / 2 / PAGE * PAGE : total; /* ends between blocks */
        else if (action == SHORT && total > 1) want = total / 2;
        off_t place = at;
        if (at < 0) {
            done = syscall(SYS_write, fd, joined, want);
            if (done >= 0) place = lseek(fd, 0, SEEK_CUR) - done;
        } else done = syscall(SYS_pwrite64, fd, joined, want, at);
        if (done > 0) put(WRITE, f, f->path, place, done, f->dsync || (rw_flags & (RWF_DSYNC | RWF_SYNC)), joined, done);
        int e = errno;
        free(joined);
        errno = e;
    }
    int e = errno;
    pthread_mutex_unlock(&lock);
    errno = e;
    return done;
}
ssize_t write(int fd, const void *b, size_t n) { struct iovec v = {(void *)b, n}; return do_write(fd, &v, 1, -1, 0); }
ssize_t pwrite(int fd, const void *b, size_t n, off_t o) { struct iovec v = {(void *)b, n}; return do_write(fd, &v, 1, o, 0); }
ssize_t pwrite64(int fd, const void *b, size_t n, off64_t o) { struct iovec v = {(void *)b, n}; return do_write(fd, &v, 1, o, 0); }
ssize_t writev(int fd, const struct iovec *v, int n) { return do_write(fd, v, n, -1, 0); }
ssize_t pwritev(int fd, const struct iovec *v, int n, off_t o) { return do_write(fd, v, n, o, 0); }
ssize_t pwritev64(int fd, const struct iovec *v, int n, off64_t o) { return do_write(fd, v, n, o, 0); }
ssize_t pwritev2(int fd, const struct iovec *v, int n, off_t o, int flags) { return do_write(fd, v, n, o, flags); }
ssize_t pwritev64v2(int fd, const struct iovec *v, int n, off64_t o, int flags) { return do_write(fd, v, n, o, flags); }

static int reads_fail(int fd) {
    if (!rules || !known(fd)) return 0;
    pthread_mutex_lock(&lock);
    struct file *f = known(fd);
    int failed = f && fault(ON_READ, f->path) == FAIL, e = errno;
    pthread_mutex_unlock(&lock);
    errno = e;
    return failed;
}
ssize_t read(int fd, void *b, size_t n) { return reads_fail(fd) ? -1 : syscall(SYS_read, fd, b, n); }
ssize_t pread(int fd, void *b, size_t n, off_t o) { return reads_fail(fd) ? -1 : syscall(SYS_pread64, fd, b, n, o); }
ssize_t pread64(int fd, void *b, size_t n, off64_t o) { return reads_fail(fd) ? -1 : syscall(SYS_pread64, fd, b, n, o); }
ssize_t preadv(int fd, const struct iovec *v, int n, off_t o) { return reads_fail(fd) ? -1 : syscall(SYS_preadv, fd, v, n, (unsigned long)o, 0ul); }
ssize_t preadv64(int fd, const struct iovec *v, int n, off64_t o) { return reads_fail(fd) ? -1 : syscall(SYS_preadv, fd, v, n, (unsigned long)o, 0ul); }
ssize_t preadv2(int fd, const struct iovec *v, int n, off_t o, int flags) { return reads_fail(fd) ? -1 : syscall(SYS_preadv2, fd, v, n, (unsigned long)o, 0ul, flags); }
ssize_t preadv64v2(int fd, const struct iovec *v, int n, off64_t o, int flags) { return reads_fail(fd) ? -1 : syscall(SYS_preadv2, fd, v, n, (unsigned long)o, 0ul, flags); }

int ftruncate(int fd, off_t n) {
    pthread_mutex_lock(&lock);
    struct file *f = known(fd);
    int r = f && fault(ON_ALLOCATE, f->path) == FAIL ? -1 : syscall(SYS_ftruncate, fd, n), e = errno;
    if (!r && f) put(TRUNCATE, f, f->path, 0, n, 0, 0, 0);
    pthread_mutex_unlock(&lock);
    errno = e;
    return r;
}
int ftruncate64(int fd, off64_t n) { return ftruncate(fd, n); }

int fallocate(int fd, int mode, off_t o, off_t n) {
    pthread_mutex_lock(&lock);
    struct file *f = known(fd);
    int r = f && fault(ON_ALLOCATE, f->path) == FAIL ? -1 : syscall(SYS_fallocate, fd, mode, o, n), e = errno;
    if (!r && f) put(ALLOCATE, f, f->path, o, n, mode, 0, 0);
    pthread_mutex_unlock(&lock);
    errno = e;
    return r;
}
int fallocate64(int fd, int mode, off64_t o, off64_t n) { return fallocate(fd, mode, o, n); }
int posix_fallocate(int fd, off_t o, off_t n) { return fallocate(fd, 0, o, n) ? errno : 0; }
int posix_fallocate64(int fd, off64_t o, off64_t n) { return posix_fallocate(fd, o, n); }

static int do_sync(int fd, int call) {
    pthread_mutex_lock(&lock);
    struct file copy = {0}, *f = known(fd);
    int action = 0;
    char *path = 0;
    if (f) {
        copy = *f;
        path = strdup(f->path);
        action = fault(ON_SYNC, path);
        if (action != FAIL) put(action == LIE ? LIED : SYNC_BEGIN, &copy, path, 0, 0, 0, 0, 0);
    }
    int e = errno;
    pthread_mutex_unlock(&lock);
    if (action == FAIL) { free(path); errno = e; return -1; }
    if (action == LIE) { free(path); return 0; }
    int r = syscall(call, fd);
    e = errno;
    if (f && !r) {
        pthread_mutex_lock(&lock);
        put(SYNC_END, &copy, path, 0, 0, 0, 0, 0);
        pthread_mutex_unlock(&lock);
    }
    free(path);
    errno = e;
    return r;
}
int fsync(int fd) { return do_sync(fd, SYS_fsync); }
int fdatasync(int fd) { return do_sync(fd, SYS_fdatasync); }

static int do_names(uint32_t kind, int d1, const char *from, int d2, const char *to, int call, unsigned flags) {
    begin();
    char *a = below(d1, from), *b = to ? below(d2, to) : 0;
    pthread_mutex_lock(&lock);
    int r;
    if (a && kind == RENAME && fault(ON_RENAME, a) == FAIL) r = -1;
    else if (kind == RENAME) r = syscall(SYS_renameat2, d1, from, d2, to, flags);
    else if (kind == LINK) r = syscall(SYS_linkat, d1, from, d2, to, flags);
    else if (kind == MKDIR) r = syscall(SYS_mkdirat, d1, from, flags);
    else r = syscall(SYS_unlinkat, d1, from, flags);
    int e = errno;
    if (!r && (a || b)) put(kind, 0, a ? a : "", 0, 0, 0, b, b ? strlen(b) : 0);
    pthread_mutex_unlock(&lock);
    free(a);
    free(b);
    errno = e;
    (void)call;
    return r;
}
int rename(const char *a, const char *b) { return do_names(RENAME, AT_FDCWD, a, AT_FDCWD, b, 0, 0); }
int renameat(int d, const char *a, int e, const char *b) { return do_names(RENAME, d, a, e, b, 0, 0); }
int renameat2(int d, const char *a, int e, const char *b, unsigned f) { return do_names(RENAME, d, a, e, b, 0, f); }
int unlink(const char *a) { return do_names(UNLINK, AT_FDCWD, a, 0, 0, 0, 0); }
int unlinkat(int d, const char *a, int f) { return do_names(f & AT_REMOVEDIR ? RMDIR : UNLINK, d, a, 0, 0, 0, f); }
int rmdir(const char *a) { return do_names(RMDIR, AT_FDCWD, a, 0, 0, 0, AT_REMOVEDIR); }
int mkdir(const char *a, mode_t m) { return do_names(MKDIR, AT_FDCWD, a, 0, 0, 0, m); }
int mkdirat(int d, const char *a, mode_t m) { return do_names(MKDIR, d, a, 0, 0, 0, m); }
int link(const char *a, const char *b) { return do_names(LINK, AT_FDCWD, a, AT_FDCWD, b, 0, 0); }
int linkat(int d, const char *a, int e, const char *b, int f) { return do_names(LINK, d, a, e, b, 0, f); }
