// Without a filter every system call would stop twice; with it, only the calls of the table in session.c do.
#define _GNU_SOURCE
#include "filter.h"

#include <errno.h>
#include <linux/audit.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "session.h"

#if defined(__x86_64__)
#define TP_ARCH AUDIT_ARCH_X86_64
#elif defined(__aarch64__)
#define TP_ARCH AUDIT_ARCH_AARCH64
#else
#error "the fault harness knows x86-64 and aarch64"
#endif

// Returns 0, or the errno of the refusal. A tracer must already be attached, or the calls fail with ENOSYS.
int tp_install_filter(void) {
    struct sock_filter code[160];
    unsigned short n = 0;
    size_t count;
    const struct tp_shape *shapes = tp_shapes(&count);
    code[n++] = (struct sock_filter)BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, arch));
    code[n++] = (struct sock_filter)BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, TP_ARCH, 1, 0);
    code[n++] = (struct sock_filter)BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW);
    code[n++] = (struct sock_filter)BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, nr));
    for (size_t i = 0; i < count; i++) {
        if (shapes[i].nr >= TP_NR_FWRITE) continue;
        code[n++] = (struct sock_filter)BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, (unsigned)shapes[i].nr, 0, 1);
        code[n++] = (struct sock_filter)BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_TRACE);
    }
    code[n++] = (struct sock_filter)BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW);
    struct sock_fprog program = {n, code};
    if (prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) != 0) return errno;
    if (syscall(SYS_seccomp, SECCOMP_SET_MODE_FILTER, 0, &program) != 0) return errno;
    return 0;
}
