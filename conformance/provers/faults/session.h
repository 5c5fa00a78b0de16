// What the shim, the tracer and Python share: one memory-mapped file with the faults to inject and the calls seen.
//
// Python lays the file out (session.py mirrors these structures) and reads it back. Every process of a run maps the
// same file, so one clock orders the events of all of them and one counter per fault decides which call is the n-th,
// whichever process makes it. A process that is killed leaves its events behind, because the mapping is shared.
#ifndef TWINPROOF_SESSION_H
#define TWINPROOF_SESSION_H

#include <stdatomic.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/types.h>

#define TP_MAGIC 0x54504c46u
#define TP_VERSION 2u
#define TP_PATH_BYTES 320
#define TP_ROOT_BYTES 1024
#define TP_SUFFIX_BYTES 192
#define TP_FAULTS_MAX 16

// The order is that of CALLS in model.py.
enum tp_call {
    TP_OPEN, TP_WRITE, TP_PWRITE, TP_WRITEV, TP_PWRITEV, TP_FWRITE, TP_FFLUSH, TP_FSYNC, TP_FDATASYNC, TP_SYNCFS,
    TP_SYNC_FILE_RANGE, TP_RENAME, TP_LINK, TP_SYMLINK, TP_UNLINK, TP_RMDIR, TP_MKDIR, TP_FTRUNCATE, TP_TRUNCATE,
    TP_FALLOCATE, TP_SENDFILE, TP_COPY_FILE_RANGE, TP_MMAP, TP_MSYNC, TP_CLOSE, TP_READ, TP_PREAD, TP_READV, TP_PREADV
};

// The order is that of ACTIONS in model.py.
enum tp_action { TP_PASS, TP_ERRNO, TP_SHORT, TP_DELAY, TP_KILL, TP_KILL_GROUP, TP_TORN, TP_HOLD };

// Calls of stdio that end in system calls which no symbol lookup reaches; numbers outside of the kernel's.
enum { TP_NR_FWRITE = 100001, TP_NR_FFLUSH = 100002 };

struct tp_fault {
    uint64_t calls;  // bit per enum tp_call
    uint32_t nth;    // counted from 1 over all matching calls
    uint32_t times;  // consecutive matches that fail; 0: all from the n-th on
    int32_t action;
    int32_t error;
    int32_t rank;  // -1: any
    uint32_t delay_us;
    _Atomic uint64_t matched;
    char suffix[TP_SUFFIX_BYTES];
};

struct tp_event {
    uint64_t begin;  // clock at entry; 0 while the slot is being filled
    uint64_t end;    // clock at return; 0 for a call that never returned
    int32_t pid, tid, rank, call;
    int32_t error;   // errno, 0 for success
    int32_t fault;   // index of the fault that fired, or -1
    int32_t flags;   // open and rename flags
    int32_t created; // 1: the call made this directory entry
    int64_t result;
    int64_t offset;  // -1: the file position
    uint64_t size;
    uint64_t inode, inode2;
    char path[TP_PATH_BYTES], path2[TP_PATH_BYTES];
};

struct tp_session {
    uint32_t magic, version, event_bytes, fault_bytes;
    uint32_t capacity, fault_count;
    _Atomic uint64_t clock;
    _Atomic uint64_t used;     // slots asked for; more than capacity means that events were lost
    _Atomic uint64_t too_long; // paths that did not fit
    _Atomic uint32_t held;     // calls that began to wait for their release
    _Atomic uint32_t released; // how many of them may go on; both are futexes, see hold.h
    char root[TP_ROOT_BYTES];
    struct tp_fault faults[TP_FAULTS_MAX];
    struct tp_event events[];
};

// Who makes a call. The shim looks at its own process, the tracer at another one.
struct tp_caller {
    pid_t pid, tid;
    int rank;
    int foreign;
};

// One call that matched: what to do about it, and where its event stands (NULL where the table is full).
struct tp_verdict {
    int matched;
    enum tp_action action;
    int error;
    uint32_t delay_us;
    struct tp_event *event;
};

// How the arguments of a system call are laid out; -1 where there is no such argument.
struct tp_shape {
    long nr;
    enum tp_call call;
    signed char fd, dir, path, dir2, path2, size, offset, flags, vector;
};

struct tp_session *tp_open_session(const char *file, int *error);
const struct tp_shape *tp_shape_of(long nr);
const struct tp_shape *tp_shapes(size_t *count);
void tp_begin(struct tp_session *session, const struct tp_caller *who, long nr, const long args[6],
              struct tp_verdict *out);
void tp_end(const struct tp_caller *who, struct tp_session *session, struct tp_event *event, long result);
int tp_read(const struct tp_caller *who, unsigned long address, void *into, size_t size);
int tp_is_read(enum tp_call call);
int tp_is_write(enum tp_call call);

#endif
