// LD_PRELOAD shim: stands in front of libc's file-system calls. Idle until armed, from C (twinproof_faults_arm, through
// ctypes in a forked child) or by TWINPROOF_FAULTS in the environment of an unmodified program.
//
// Each wrapper makes the system call itself, so that no symbol lookup can recurse into the shim. What it cannot see:
// system calls made without libc (use the tracer), io_uring, and the writes inside stdio, for which fopen, fwrite,
// fflush and fclose are seen instead.
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/sendfile.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

#include "filter.h"
#include "rawcall.h"
#include "session.h"

#define EXPORT __attribute__((visibility("default")))
#define ALIAS(name) __attribute__((visibility("default"), alias(name)))
#define VECTOR_MAX 1024

static struct tp_session *session;
static int label;
static __thread int inside;

#include "hold.h"

// Starts counting in this process and its future children. Returns 0 or an errno. NULL disarms.
EXPORT int twinproof_faults_arm(const char *file, int rank) {
    int error = 0;
    session = NULL;
    if (file == NULL) return 0;
    label = rank;
    struct tp_session *opened = tp_open_session(file, &error);
    session = opened;
    return error;
}

// For a child that a tracer has just seized: stop at file-system calls from here on.
EXPORT int twinproof_faults_filter(void) { return tp_install_filter(); }

__attribute__((constructor)) static void arm_from_environment(void) {
    const char *file = getenv("TWINPROOF_FAULTS"), *rank = getenv("TWINPROOF_FAULTS_RANK");
    if (rank == NULL) rank = getenv("RANK");
    if (file == NULL) return;
    int error = twinproof_faults_arm(file, rank == NULL ? 0 : atoi(rank));
    if (error != 0) {
        fprintf(stderr, "twinproof fault shim: cannot open %s: errno %d\n", file, error);
        _exit(127);
    }
}

static void die(enum tp_action action) {
    pid_t target = action == TP_KILL_GROUP ? 0 : (pid_t)tp_raw(SYS_getpid, 0, 0, 0, 0, 0, 0);
    tp_raw(SYS_kill, target, SIGKILL, 0, 0, 0, 0);
    for (;;) tp_raw(SYS_ppoll, 0, 0, 0, 0, 0, 0);
}

// Half of a write or of a read, and at least a byte of it.
static void shorten(const struct tp_shape *shape, long args[6], struct iovec half[VECTOR_MAX]) {
    if (shape->vector < 0) {
        if (args[(int)shape->size] > 1) args[(int)shape->size] /= 2;
        return;
    }
    const struct iovec *given = (const struct iovec *)args[1];
    long count = args[2] < VECTOR_MAX ? args[2] : VECTOR_MAX;
    size_t left = 0;
    for (long i = 0; i < count; i++) left += given[i].iov_len;
    left = left > 1 ? left / 2 : left;
    long used = 0;
    for (; used < count && left > 0; used++) {
        half[used] = given[used];
        if (half[used].iov_len > left) half[used].iov_len = left;
        left -= half[used].iov_len;
    }
    args[1] = (long)half;
    args[2] = used;
}

static void obey_before(const struct tp_verdict *verdict) {
    if (verdict->action == TP_KILL || verdict->action == TP_KILL_GROUP) die(verdict->action);
    if (verdict->action == TP_DELAY) {
        struct timespec pause = {verdict->delay_us / 1000000, (long)(verdict->delay_us % 1000000) * 1000};
        tp_raw(SYS_nanosleep, (long)&pause, 0, 0, 0, 0, 0);
    }
}

static struct tp_caller self(void) {
    pid_t pid = (pid_t)tp_raw(SYS_getpid, 0, 0, 0, 0, 0, 0), tid = (pid_t)tp_raw(SYS_gettid, 0, 0, 0, 0, 0, 0);
    struct tp_caller who = {pid, tid, label, 0};
    return who;
}

// The call with its faults; the kernel's convention, an errno being negative.
static long guarded(struct tp_session *armed, long nr, long args[6]) {
    struct tp_caller who = self();
    struct tp_verdict verdict;
    struct iovec half[VECTOR_MAX];
    long result;
    tp_begin(armed, &who, nr, args, &verdict);
    obey_before(&verdict);
    int expired = verdict.action == TP_HOLD && hold(armed, verdict.delay_us);
    if (expired) {
        result = -ETIMEDOUT;
    } else if (verdict.action == TP_ERRNO) {
        // The kernel gives the descriptor back even where close reports an error.
        if (nr == SYS_close) tp_raw(nr, args[0], 0, 0, 0, 0, 0);
        result = -verdict.error;
    } else {
        const struct tp_shape *shape = tp_shape_of(nr);
        int cut = verdict.action == TP_SHORT || verdict.action == TP_TORN;
        if (cut && tp_is_write(shape->call)) shorten(shape, args, half);
        if (verdict.action == TP_SHORT && tp_is_read(shape->call)) shorten(shape, args, half);
        result = tp_raw(nr, args[0], args[1], args[2], args[3], args[4], args[5]);
    }
    tp_end(&who, armed, verdict.event, result);
    if (verdict.action == TP_TORN) die(TP_KILL);
    return result;
}

static long via(long nr, long a, long b, long c, long d, long e, long f) {
    struct tp_session *armed = session;
    long args[6] = {a, b, c, d, e, f}, result;
    if (armed == NULL || inside || tp_shape_of(nr) == NULL) {
        result = tp_raw(nr, a, b, c, d, e, f);
    } else {
        int before = errno;
        inside = 1;
        result = guarded(armed, nr, args);
        inside = 0;
        errno = before;
    }
    if ((unsigned long)result <= -4096UL) return result;
    errno = (int)-result;
    return -1;
}

static mode_t mode_of(int flags, va_list rest) {
    return (flags & O_CREAT) || (flags & O_TMPFILE) == O_TMPFILE ? va_arg(rest, mode_t) : 0;
}

EXPORT int openat(int dir, const char *path, int flags, ...) {
    va_list rest;
    va_start(rest, flags);
    mode_t mode = mode_of(flags, rest);
    va_end(rest);
    return (int)via(SYS_openat, dir, (long)path, flags, mode, 0, 0);
}
EXPORT int open(const char *path, int flags, ...) {
    va_list rest;
    va_start(rest, flags);
    mode_t mode = mode_of(flags, rest);
    va_end(rest);
    return (int)via(SYS_openat, AT_FDCWD, (long)path, flags, mode, 0, 0);
}
EXPORT int creat(const char *path, mode_t mode) {
    return (int)via(SYS_openat, AT_FDCWD, (long)path, O_WRONLY | O_CREAT | O_TRUNC, mode, 0, 0);
}
EXPORT int __open_2(const char *path, int flags) { return (int)via(SYS_openat, AT_FDCWD, (long)path, flags, 0, 0, 0); }
EXPORT int __openat_2(int dir, const char *path, int flags) {
    return (int)via(SYS_openat, dir, (long)path, flags, 0, 0, 0);
}
EXPORT ssize_t write(int fd, const void *data, size_t size) {
    return via(SYS_write, fd, (long)data, (long)size, 0, 0, 0);
}
EXPORT ssize_t pwrite(int fd, const void *data, size_t size, off_t at) {
    return via(SYS_pwrite64, fd, (long)data, (long)size, at, 0, 0);
}
EXPORT ssize_t writev(int fd, const struct iovec *parts, int count) {
    return via(SYS_writev, fd, (long)parts, count, 0, 0, 0);
}
EXPORT ssize_t pwritev(int fd, const struct iovec *parts, int count, off_t at) {
    return via(SYS_pwritev, fd, (long)parts, count, at, 0, 0);
}
EXPORT ssize_t pwritev2(int fd, const struct iovec *parts, int count, off_t at, int flags) {
    return via(SYS_pwritev2, fd, (long)parts, count, at, 0, flags);
}
EXPORT ssize_t read(int fd, void *data, size_t size) { return via(SYS_read, fd, (long)data, (long)size, 0, 0, 0); }
EXPORT ssize_t pread(int fd, void *data, size_t size, off_t at) {
    return via(SYS_pread64, fd, (long)data, (long)size, at, 0, 0);
}
EXPORT ssize_t readv(int fd, const struct iovec *parts, int count) {
    return via(SYS_readv, fd, (long)parts, count, 0, 0, 0);
}
EXPORT ssize_t preadv(int fd, const struct iovec *parts, int count, off_t at) {
    return via(SYS_preadv, fd, (long)parts, count, at, 0, 0);
}
EXPORT ssize_t preadv2(int fd, const struct iovec *parts, int count, off_t at, int flags) {
    return via(SYS_preadv2, fd, (long)parts, count, at, 0, flags);
}
EXPORT int fsync(int fd) { return (int)via(SYS_fsync, fd, 0, 0, 0, 0, 0); }
EXPORT int fdatasync(int fd) { return (int)via(SYS_fdatasync, fd, 0, 0, 0, 0, 0); }
EXPORT int syncfs(int fd) { return (int)via(SYS_syncfs, fd, 0, 0, 0, 0, 0); }
EXPORT int sync_file_range(int fd, off_t at, off_t size, unsigned flags) {
    return (int)via(SYS_sync_file_range, fd, at, size, flags, 0, 0);
}
EXPORT int rename(const char *from, const char *to) {
    return (int)via(SYS_renameat2, AT_FDCWD, (long)from, AT_FDCWD, (long)to, 0, 0);
}
EXPORT int renameat(int dir, const char *from, int dir2, const char *to) {
    return (int)via(SYS_renameat2, dir, (long)from, dir2, (long)to, 0, 0);
}
EXPORT int renameat2(int dir, const char *from, int dir2, const char *to, unsigned flags) {
    return (int)via(SYS_renameat2, dir, (long)from, dir2, (long)to, flags, 0);
}
EXPORT int link(const char *from, const char *to) {
    return (int)via(SYS_linkat, AT_FDCWD, (long)from, AT_FDCWD, (long)to, 0, 0);
}
EXPORT int linkat(int dir, const char *from, int dir2, const char *to, int flags) {
    return (int)via(SYS_linkat, dir, (long)from, dir2, (long)to, flags, 0);
}
EXPORT int symlink(const char *to, const char *path) {
    return (int)via(SYS_symlinkat, (long)to, AT_FDCWD, (long)path, 0, 0, 0);
}
EXPORT int symlinkat(const char *to, int dir, const char *path) {
    return (int)via(SYS_symlinkat, (long)to, dir, (long)path, 0, 0, 0);
}
EXPORT int unlink(const char *path) { return (int)via(SYS_unlinkat, AT_FDCWD, (long)path, 0, 0, 0, 0); }
EXPORT int unlinkat(int dir, const char *path, int flags) {
    return (int)via(SYS_unlinkat, dir, (long)path, flags, 0, 0, 0);
}
EXPORT int rmdir(const char *path) { return (int)via(SYS_unlinkat, AT_FDCWD, (long)path, AT_REMOVEDIR, 0, 0, 0); }
EXPORT int mkdir(const char *path, mode_t mode) { return (int)via(SYS_mkdirat, AT_FDCWD, (long)path, mode, 0, 0, 0); }
EXPORT int mkdirat(int dir, const char *path, mode_t mode) {
    return (int)via(SYS_mkdirat, dir, (long)path, mode, 0, 0, 0);
}
EXPORT int ftruncate(int fd, off_t size) { return (int)via(SYS_ftruncate, fd, size, 0, 0, 0, 0); }
EXPORT int truncate(const char *path, off_t size) { return (int)via(SYS_truncate, (long)path, size, 0, 0, 0, 0); }
EXPORT int fallocate(int fd, int mode, off_t at, off_t size) {
    return (int)via(SYS_fallocate, fd, mode, at, size, 0, 0);
}
EXPORT ssize_t sendfile(int to, int from, off_t *at, size_t size) {
    return via(SYS_sendfile, to, from, (long)at, (long)size, 0, 0);
}
EXPORT ssize_t copy_file_range(int from, off_t *at, int to, off_t *to_at, size_t size, unsigned flags) {
    return via(SYS_copy_file_range, from, (long)at, to, (long)to_at, (long)size, flags);
}
EXPORT void *mmap(void *at, size_t size, int access, int flags, int fd, off_t offset) {
    return (void *)via(SYS_mmap, (long)at, (long)size, access, flags, fd, offset);
}
EXPORT int msync(void *at, size_t size, int flags) { return (int)via(SYS_msync, (long)at, (long)size, flags, 0, 0, 0); }
EXPORT int close(int fd) { return (int)via(SYS_close, fd, 0, 0, 0, 0, 0); }
EXPORT long syscall(long nr, ...) {
    long args[6];
    va_list rest;
    va_start(rest, nr);
    for (int i = 0; i < 6; i++) args[i] = va_arg(rest, long);
    va_end(rest);
    return via(nr, args[0], args[1], args[2], args[3], args[4], args[5]);
}

ALIAS("open") int open64(const char *, int, ...);
ALIAS("openat") int openat64(int, const char *, int, ...);
ALIAS("creat") int creat64(const char *, mode_t);
ALIAS("__open_2") int __open64_2(const char *, int);
ALIAS("__openat_2") int __openat64_2(int, const char *, int);
ALIAS("pwrite") ssize_t pwrite64(int, const void *, size_t, off64_t);
ALIAS("pwritev") ssize_t pwritev64(int, const struct iovec *, int, off64_t);
ALIAS("pwritev2") ssize_t pwritev64v2(int, const struct iovec *, int, off64_t, int);
ALIAS("pread") ssize_t pread64(int, void *, size_t, off64_t);
ALIAS("preadv") ssize_t preadv64(int, const struct iovec *, int, off64_t);
ALIAS("preadv2") ssize_t preadv64v2(int, const struct iovec *, int, off64_t, int);
ALIAS("ftruncate") int ftruncate64(int, off64_t);
ALIAS("truncate") int truncate64(const char *, off64_t);
ALIAS("fallocate") int fallocate64(int, int, off64_t, off64_t);
ALIAS("sendfile") ssize_t sendfile64(int, int, off64_t *, size_t);
ALIAS("mmap") void *mmap64(void *, size_t, int, int, int, off64_t);

EXPORT int posix_fallocate(int fd, off_t at, off_t size) {
    int before = errno;
    long result = via(SYS_fallocate, fd, 0, at, size, 0, 0);
    int error = result == 0 ? 0 : errno;
    errno = before;
    if (error != EOPNOTSUPP) return error;
    // libc emulates it by writing; those writes are its own.
    int (*real)(int, off_t, off_t) = (int (*)(int, off_t, off_t))dlsym(RTLD_NEXT, "posix_fallocate");
    return real(fd, at, size);
}
ALIAS("posix_fallocate") int posix_fallocate64(int, off64_t, off64_t);

#include "stdio_calls.h"
