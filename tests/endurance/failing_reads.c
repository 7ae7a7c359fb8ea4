/* While a file named by FAILING_READS is there, reads from files with "bad_disk" in their path fail with EIO. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <linux/aio_abi.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

static int is_on(void) {
    const char *marker = getenv("FAILING_READS");
    int before = errno, on = marker != NULL && access(marker, F_OK) == 0;
    errno = before;
    return on;
}

static int fails(int fd) {
    char link[64], name[4096];
    int before = errno;
    ssize_t n;
    if (!is_on()) return 0;
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    n = readlink(link, name, sizeof name - 1);
    errno = before;
    if (n < 0) return 0;
    name[n] = 0;
    return strstr(name, "bad_disk") != NULL;
}

#define REAL(name) __typeof__(&name) real = (__typeof__(&name))dlsym(RTLD_NEXT, #name)
#define FAIL_IF(condition) do { if (condition) { errno = EIO; return -1; } } while (0)

ssize_t read(int fd, void *to, size_t n) { REAL(read); FAIL_IF(fails(fd)); return real(fd, to, n); }
ssize_t pread(int fd, void *to, size_t n, off_t at) { REAL(pread); FAIL_IF(fails(fd)); return real(fd, to, n, at); }
ssize_t pread64(int fd, void *to, size_t n, off64_t at) { REAL(pread64); FAIL_IF(fails(fd)); return real(fd, to, n, at); }
ssize_t preadv(int fd, const struct iovec *v, int n, off_t at) { REAL(preadv); FAIL_IF(fails(fd)); return real(fd, v, n, at); }
ssize_t preadv64(int fd, const struct iovec *v, int n, off64_t at) { REAL(preadv64); FAIL_IF(fails(fd)); return real(fd, v, n, at); }
ssize_t preadv2(int fd, const struct iovec *v, int n, off_t at, int flags) {
    REAL(preadv2); FAIL_IF(fails(fd)); return real(fd, v, n, at, flags);
}
ssize_t preadv64v2(int fd, const struct iovec *v, int n, off64_t at, int flags) {
    REAL(preadv64v2); FAIL_IF(fails(fd)); return real(fd, v, n, at, flags);
}

/* Lists of reads: the kernel takes the list, and says of each read that it failed. */
long syscall(long number, ...) {
    static long (*real)(long, ...);
    long a[6], result, at;
    va_list more;
    if (!real) real = (long (*)(long, ...))dlsym(RTLD_NEXT, "syscall");
    va_start(more, number);
    for (at = 0; at < 6; at++) a[at] = va_arg(more, long);
    va_end(more);
    result = real(number, a[0], a[1], a[2], a[3], a[4], a[5]);
    if (number == SYS_io_getevents && result > 0 && is_on()) {
        struct io_event *events = (struct io_event *)a[3];
        for (at = 0; at < result; at++)
            if (fails(((struct iocb *)events[at].obj)->aio_fildes)) events[at].res = -EIO;
    }
    return result;
}
