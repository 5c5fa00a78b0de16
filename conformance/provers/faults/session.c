// Decides which calls count, numbers and records them, and says which of them fail. See session.h.
#define _GNU_SOURCE
#include "session.h"

#include <errno.h>
#include <fcntl.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

#include "paths.h"

#define NO -1
static const struct tp_shape SHAPES[] = {
    //  number               call            fd  dir path dir2 path2 size offset flags vector
    {SYS_openat, TP_OPEN, NO, 0, 1, NO, NO, NO, NO, 2, NO},
    {SYS_write, TP_WRITE, 0, NO, NO, NO, NO, 2, NO, NO, NO},
    {SYS_pwrite64, TP_PWRITE, 0, NO, NO, NO, NO, 2, 3, NO, NO},
    {SYS_writev, TP_WRITEV, 0, NO, NO, NO, NO, 2, NO, NO, 1},
    {SYS_pwritev, TP_PWRITEV, 0, NO, NO, NO, NO, 2, 3, NO, 1},
    {SYS_pwritev2, TP_PWRITEV, 0, NO, NO, NO, NO, 2, 3, 5, 1},
    {TP_NR_FWRITE, TP_FWRITE, 0, NO, NO, NO, NO, 1, NO, NO, NO},
    {TP_NR_FFLUSH, TP_FFLUSH, 0, NO, NO, NO, NO, NO, NO, NO, NO},
    {SYS_fsync, TP_FSYNC, 0, NO, NO, NO, NO, NO, NO, NO, NO},
    {SYS_fdatasync, TP_FDATASYNC, 0, NO, NO, NO, NO, NO, NO, NO, NO},
    {SYS_syncfs, TP_SYNCFS, 0, NO, NO, NO, NO, NO, NO, NO, NO},
    {SYS_sync_file_range, TP_SYNC_FILE_RANGE, 0, NO, NO, NO, NO, 2, 1, 3, NO},
    {SYS_renameat2, TP_RENAME, NO, 0, 1, 2, 3, NO, NO, 4, NO},
    {SYS_linkat, TP_LINK, NO, 0, 1, 2, 3, NO, NO, 4, NO},
    {SYS_symlinkat, TP_SYMLINK, NO, 1, 2, NO, NO, NO, NO, NO, NO},
    {SYS_unlinkat, TP_UNLINK, NO, 0, 1, NO, NO, NO, NO, 2, NO},
    {SYS_mkdirat, TP_MKDIR, NO, 0, 1, NO, NO, NO, NO, NO, NO},
    {SYS_ftruncate, TP_FTRUNCATE, 0, NO, NO, NO, NO, 1, NO, NO, NO},
    {SYS_truncate, TP_TRUNCATE, NO, NO, 0, NO, NO, 1, NO, NO, NO},
    {SYS_fallocate, TP_FALLOCATE, 0, NO, NO, NO, NO, 3, 2, 1, NO},
    {SYS_sendfile, TP_SENDFILE, 0, NO, NO, NO, NO, 3, NO, NO, NO},
    {SYS_copy_file_range, TP_COPY_FILE_RANGE, 2, NO, NO, NO, NO, 4, NO, 5, NO},
    {SYS_mmap, TP_MMAP, 4, NO, NO, NO, NO, 1, 5, 3, NO},
    {SYS_msync, TP_MSYNC, NO, NO, NO, NO, NO, 1, NO, 2, NO},
    {SYS_close, TP_CLOSE, 0, NO, NO, NO, NO, NO, NO, NO, NO},
    {SYS_read, TP_READ, 0, NO, NO, NO, NO, 2, NO, NO, NO},
    {SYS_pread64, TP_PREAD, 0, NO, NO, NO, NO, 2, 3, NO, NO},
    {SYS_readv, TP_READV, 0, NO, NO, NO, NO, 2, NO, NO, 1},
    {SYS_preadv, TP_PREADV, 0, NO, NO, NO, NO, 2, 3, NO, 1},
    {SYS_preadv2, TP_PREADV, 0, NO, NO, NO, NO, 2, 3, 5, 1},
    {SYS_renameat, TP_RENAME, NO, 0, 1, 2, 3, NO, NO, NO, NO},
#ifdef SYS_openat2
    {SYS_openat2, TP_OPEN, NO, 0, 1, NO, NO, NO, NO, NO, NO},
#endif
#ifdef SYS_open  // x86-64 keeps the calls without a folder descriptor; newer architectures never had them.
    {SYS_open, TP_OPEN, NO, NO, 0, NO, NO, NO, NO, 1, NO},
    {SYS_creat, TP_OPEN, NO, NO, 0, NO, NO, NO, NO, NO, NO},
    {SYS_rename, TP_RENAME, NO, NO, 0, NO, 1, NO, NO, NO, NO},
    {SYS_link, TP_LINK, NO, NO, 0, NO, 1, NO, NO, NO, NO},
    {SYS_symlink, TP_SYMLINK, NO, NO, 1, NO, NO, NO, NO, NO, NO},
    {SYS_unlink, TP_UNLINK, NO, NO, 0, NO, NO, NO, NO, NO, NO},
    {SYS_rmdir, TP_RMDIR, NO, NO, 0, NO, NO, NO, NO, NO, NO},
    {SYS_mkdir, TP_MKDIR, NO, NO, 0, NO, NO, NO, NO, NO, NO},
#endif
};

const struct tp_shape *tp_shapes(size_t *count) {
    *count = sizeof SHAPES / sizeof SHAPES[0];
    return SHAPES;
}

const struct tp_shape *tp_shape_of(long nr) {
    for (size_t i = 0; i < sizeof SHAPES / sizeof SHAPES[0]; i++)
        if (SHAPES[i].nr == nr) return &SHAPES[i];
    return NULL;
}

int tp_is_read(enum tp_call call) { return call >= TP_READ && call <= TP_PREADV; }

int tp_is_write(enum tp_call call) {
    return (call >= TP_WRITE && call <= TP_FWRITE) || call == TP_SENDFILE || call == TP_COPY_FILE_RANGE;
}

struct tp_session *tp_open_session(const char *file, int *error) {
    int fd = (int)syscall(SYS_openat, AT_FDCWD, file, O_RDWR | O_CLOEXEC);
    struct stat status;
    if (fd < 0 || fstat(fd, &status) != 0) {
        *error = errno;
        return NULL;
    }
    void *at = mmap(NULL, (size_t)status.st_size, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    *error = at == MAP_FAILED ? errno : 0;
    syscall(SYS_close, fd);
    if (at == MAP_FAILED) return NULL;
    struct tp_session *session = at;
    if ((size_t)status.st_size < sizeof *session || session->magic != TP_MAGIC || session->version != TP_VERSION ||
        session->event_bytes != sizeof(struct tp_event) || session->fault_bytes != sizeof(struct tp_fault)) {
        *error = EPROTO;
        return NULL;
    }
    return session;
}

int tp_read(const struct tp_caller *who, unsigned long address, void *into, size_t size) {
    if (!who->foreign) {
        memcpy(into, (const void *)address, size);
        return 1;
    }
    struct iovec here = {into, size}, there = {(void *)address, size};
    return process_vm_readv(who->pid, &here, 1, &there, 1, 0) == (ssize_t)size;
}

static uint64_t vector_bytes(const struct tp_caller *who, unsigned long address, long count) {
    uint64_t total = 0;
    for (long i = 0; i < count; i++) {
        struct iovec part;
        if (!tp_read(who, address + (unsigned long)i * sizeof part, &part, sizeof part)) break;
        total += part.iov_len;
    }
    return total;
}

static int ends_with(const char *text, const char *suffix) {
    size_t n = strlen(text), m = strlen(suffix);
    return n >= m && memcmp(text + n - m, suffix, m) == 0;
}

// Every fault that the call matches counts it; the first whose turn it is wins.
static int choose_fault(struct tp_session *session, int rank, enum tp_call call, const char *path, const char *path2) {
    int chosen = -1;
    for (uint32_t i = 0; i < session->fault_count; i++) {
        struct tp_fault *fault = &session->faults[i];
        if (!(fault->calls >> call & 1) || (fault->rank >= 0 && fault->rank != rank)) continue;
        if (fault->suffix[0] && !ends_with(path, fault->suffix) && !ends_with(path2, fault->suffix)) continue;
        uint64_t number = atomic_fetch_add(&fault->matched, 1) + 1;
        int due = number >= fault->nth && (fault->times == 0 || number < (uint64_t)fault->nth + fault->times);
        if (due && chosen < 0) chosen = (int)i;
    }
    return chosen;
}

static void store_path(struct tp_session *session, char into[TP_PATH_BYTES], const char *path) {
    size_t size = strlen(path);
    if (size >= TP_PATH_BYTES) {
        atomic_fetch_add(&session->too_long, 1);
        size = TP_PATH_BYTES - 1;
    }
    memcpy(into, path, size);
    into[size] = 0;
}

static enum tp_call call_of(const struct tp_shape *shape, const long args[6]) {
    if (shape->nr == SYS_unlinkat && (args[2] & AT_REMOVEDIR)) return TP_RMDIR;
    return shape->call;
}

static int is_shared_store(const long args[6]) {
    return (args[2] & PROT_WRITE) && (args[3] & MAP_TYPE) != MAP_PRIVATE && !(args[3] & MAP_ANONYMOUS);
}

static int folder_of(int argument, const long args[6]) { return argument < 0 ? AT_FDCWD : (int)args[argument]; }

void tp_begin(struct tp_session *session, const struct tp_caller *who, long nr, const long args[6],
              struct tp_verdict *out) {
    char path[TP_FULL_PATH_BYTES] = "", path2[TP_FULL_PATH_BYTES] = "";
    uint64_t inode = 0, inode2 = 0;
    memset(out, 0, sizeof *out);
    const struct tp_shape *shape = tp_shape_of(nr);
    if (shape == NULL || (shape->call == TP_MMAP && !is_shared_store(args))) return;
    if (shape->call == TP_MSYNC) {
        tp_path_of_address(who, (unsigned long)args[0], path, &inode);
    } else if (shape->fd >= 0) {
        tp_path_of_descriptor(who, (int)args[(int)shape->fd], path, &inode);
    } else {
        tp_path_of_name(who, folder_of(shape->dir, args), args[(int)shape->path], path, &inode);
        if (shape->path2 >= 0)
            tp_path_of_name(who, folder_of(shape->dir2, args), args[(int)shape->path2], path2, &inode2);
    }
    if (!tp_is_under(path, session->root) && !tp_is_under(path2, session->root)) return;

    enum tp_call call = call_of(shape, args);
    int fault = choose_fault(session, who->rank, call, path, path2);
    out->matched = 1;
    out->action = TP_PASS;
    if (fault >= 0) {
        out->action = (enum tp_action)session->faults[fault].action;
        out->error = session->faults[fault].error;
        out->delay_us = session->faults[fault].delay_us;
    }
    uint64_t slot = atomic_fetch_add(&session->used, 1);
    if (slot >= session->capacity) return;
    struct tp_event *event = out->event = &session->events[slot];
    event->pid = who->pid;
    event->tid = who->tid;
    event->rank = who->rank;
    event->call = (int32_t)call;
    event->fault = fault;
    event->flags = shape->flags < 0 ? 0 : (int32_t)args[(int)shape->flags];
    event->offset = shape->offset < 0 ? -1 : args[(int)shape->offset];
    // Where a copy goes is behind a pointer; without one it is the file position.
    off_t place;
    if (call == TP_COPY_FILE_RANGE && args[3] && tp_read(who, (unsigned long)args[3], &place, sizeof place))
        event->offset = place;
    event->size = shape->size < 0 ? 0 : (uint64_t)args[(int)shape->size];
    if (shape->vector >= 0) event->size = vector_bytes(who, (unsigned long)args[(int)shape->vector], args[2]);
    event->inode = inode;
    event->inode2 = inode2;
    store_path(session, event->path, path);
    store_path(session, event->path2, path2);
    event->begin = atomic_fetch_add(&session->clock, 1) + 1;
}

void tp_end(const struct tp_caller *who, struct tp_session *session, struct tp_event *event, long result) {
    if (event == NULL) return;
    int failed = (unsigned long)result > -4096UL;
    event->error = failed ? (int32_t)-result : 0;
    event->result = failed ? -1 : result;
    int makes = event->call == TP_OPEN || event->call == TP_MKDIR || event->call == TP_SYMLINK;
    if (!failed && makes && event->inode == 0) {
        char ignored[TP_FULL_PATH_BYTES];
        event->created = 1;
        if (event->call == TP_OPEN)
            tp_path_of_descriptor(who, (int)result, ignored, &event->inode);
        else
            tp_inode_of(event->path, &event->inode);
    }
    event->end = atomic_fetch_add(&session->clock, 1) + 1;
}
