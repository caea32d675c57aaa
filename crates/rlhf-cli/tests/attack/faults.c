/* Counts the calls by which a program changes files below one folder, and lets the n-th of them go wrong.
 *
 * FAULT_DIR: the folder. FAULT_AT: the number of the call, from 1; 0 for none. FAULT_KIND: "kill" before the call,
 * "half" after half of a write, or the errno of one failure: "ENOSPC", "EIO". FAULT_NAME: a part of the path in the folder
 * that the files have, if it is set. FAULT_COUNT: a file for the number of calls, outside the folder. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <unistd.h>

static long calls;

static int below(const char *path) {
    const char *dir = getenv("FAULT_DIR"), *name = getenv("FAULT_NAME");
    char whole[2 * PATH_MAX + 2], cwd[PATH_MAX];
    if (!dir || !path) return 0;
    if (path[0] != '/') {
        if (!getcwd(cwd, sizeof cwd)) return 0;
        snprintf(whole, sizeof whole, "%s/%s", cwd, path);
        path = whole;
    }
    return strncmp(path, dir, strlen(dir)) == 0 && (!name || strstr(path + strlen(dir), name));
}

static int below_fd(int fd) {
    char link[64], path[PATH_MAX];
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t n = readlink(link, path, sizeof path - 1);
    if (n < 0) return 0;
    path[n] = 0;
    return below(path);
}

/* 0: go on; 1: write half and die; -1: fail with errno. */
static int fault(int writes) {
    const char *at = getenv("FAULT_AT"), *kind = getenv("FAULT_KIND");
    long n = __sync_add_and_fetch(&calls, 1);
    if (!at || !kind || n != atol(at)) return 0;
    if (!strcmp(kind, "half") && writes) return 1;
    if (!strcmp(kind, "kill") || !strcmp(kind, "half")) kill(getpid(), SIGKILL);
    errno = !strcmp(kind, "ENOSPC") ? ENOSPC : EIO;
    return -1;
}

__attribute__((destructor)) static void report(void) {
    const char *path = getenv("FAULT_COUNT");
    FILE *file = path ? fopen(path, "w") : NULL;
    if (file) {
        fprintf(file, "%ld\n", calls);
        fclose(file);
    }
}

#define REAL(name) ((__typeof__(&name))dlsym(RTLD_NEXT, #name))

/* Runs no destructor. */
__attribute__((noreturn)) void _exit(int code) {
    report();
    REAL(_exit)(code);
    __builtin_unreachable();
}

ssize_t write(int fd, const void *bytes, size_t len) {
    int f = below_fd(fd) ? fault(1) : 0;
    if (f < 0) return -1;
    if (f) {
        REAL(write)(fd, bytes, len / 2);
        kill(getpid(), SIGKILL);
    }
    return REAL(write)(fd, bytes, len);
}

ssize_t writev(int fd, const struct iovec *parts, int count) {
    int f = below_fd(fd) ? fault(1) : 0;
    if (f < 0) return -1;
    if (f) {
        if (count) REAL(write)(fd, parts[0].iov_base, parts[0].iov_len / 2);
        kill(getpid(), SIGKILL);
    }
    return REAL(writev)(fd, parts, count);
}

#define CHANGES(flags) ((flags) & (O_CREAT | O_TRUNC))
#define OPEN(name)                                                    \
    int name(const char *path, int flags, ...) {                      \
        va_list rest;                                                 \
        va_start(rest, flags);                                        \
        mode_t mode = va_arg(rest, mode_t);                           \
        va_end(rest);                                                 \
        if (CHANGES(flags) && below(path) && fault(0)) return -1;     \
        return REAL(name)(path, flags, mode);                         \
    }
OPEN(open)
OPEN(open64)

#define OPENAT(name)                                                  \
    int name(int at, const char *path, int flags, ...) {              \
        va_list rest;                                                 \
        va_start(rest, flags);                                        \
        mode_t mode = va_arg(rest, mode_t);                           \
        va_end(rest);                                                 \
        if (CHANGES(flags) && at == AT_FDCWD && below(path) && fault(0)) return -1; \
        return REAL(name)(at, path, flags, mode);                     \
    }
OPENAT(openat)
OPENAT(openat64)

int rename(const char *from, const char *to) { return below(to) && fault(0) ? -1 : REAL(rename)(from, to); }
int link(const char *from, const char *to) { return below(to) && fault(0) ? -1 : REAL(link)(from, to); }
int unlink(const char *path) { return below(path) && fault(0) ? -1 : REAL(unlink)(path); }
int rmdir(const char *path) { return below(path) && fault(0) ? -1 : REAL(rmdir)(path); }
int mkdir(const char *path, mode_t mode) { return below(path) && fault(0) ? -1 : REAL(mkdir)(path, mode); }
int fsync(int fd) { return below_fd(fd) && fault(0) ? -1 : REAL(fsync)(fd); }
int fdatasync(int fd) { return below_fd(fd) && fault(0) ? -1 : REAL(fdatasync)(fd); }
int ftruncate64(int fd, off64_t len) { return below_fd(fd) && fault(0) ? -1 : REAL(ftruncate64)(fd, len); }
int unlinkat(int at, const char *path, int flags) {
    int ours = at == AT_FDCWD ? below(path) : below_fd(at);
    return ours && fault(0) ? -1 : REAL(unlinkat)(at, path, flags);
}
