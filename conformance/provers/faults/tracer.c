// Follows a process, its threads and its children through ptrace and applies the faults of a session to system calls,
// whoever makes them: Rust code with inline assembly, stdio, static binaries.
//
//     tracer SESSION RANK run COMMAND [ARGUMENT...]   run a program; ends as the program ended
//     tracer SESSION RANK seize PID                   attach to PID, print one line, stay until it is gone
//
// A seccomp filter stops the process at file-system calls only. The filter is installed by the process itself: here
// after the fork, or by the seized process (twinproof_faults_filter of the shim) once it has read the line. A delay
// holds up every traced thread, since one tracer serves them all.
#define _GNU_SOURCE
#include <errno.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ptrace.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <sys/user.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "filter.h"
#include "session.h"

#if !defined(__x86_64__)
#error "the tracer changes registers of x86-64 only"
#endif

#define TASKS_MAX 1024
#define REFUSED 126

// A thread between the entry and the return of a call that counts.
struct task {
    pid_t tid;
    struct tp_event *event;
    enum tp_action action;
    int error;
};

static struct task tasks[TASKS_MAX];
static struct tp_session *session;
static int label;

static struct task *task_of(pid_t tid, int make) {
    struct task *unused = NULL;
    for (int i = 0; i < TASKS_MAX; i++) {
        if (tasks[i].tid == tid) return &tasks[i];
        if (tasks[i].tid == 0 && unused == NULL) unused = &tasks[i];
    }
    if (!make) return NULL;
    if (unused == NULL) {
        fprintf(stderr, "twinproof tracer: more than %d threads are inside a call\n", TASKS_MAX);
        exit(REFUSED);
    }
    *unused = (struct task){.tid = tid};
    return unused;
}

static void forget(pid_t tid) {
    struct task *task = task_of(tid, 0);
    if (task != NULL) task->tid = 0;
}

static pid_t process_of(pid_t tid) {
    char name[64], line[128];
    pid_t pid = tid;
    snprintf(name, sizeof name, "/proc/%d/status", (int)tid);
    FILE *file = fopen(name, "re");
    if (file == NULL) return tid;
    while (fgets(line, sizeof line, file) != NULL)
        if (sscanf(line, "Tgid: %d", &pid) == 1) break;
    fclose(file);
    return pid;
}

static void die(pid_t pid, enum tp_action action) {
    pid_t group = getpgid(pid);
    // The tracer outlives a group that it shares with its victim just long enough to have sent the signal.
    kill(action == TP_KILL_GROUP && group > 1 ? -group : pid, SIGKILL);
}

// Makes a write or a read shorter: fewer bytes, fewer parts, or one part turned into the plain call.
static void shorten(const struct tp_caller *who, const struct tp_shape *shape, struct user_regs_struct *regs) {
    unsigned long long *size = shape->size == 2 ? &regs->rdx : shape->size == 3 ? &regs->r10 : &regs->r8;
    if (shape->vector < 0 || *size > 1) {
        if (*size > 1) *size /= 2;
        return;
    }
    struct iovec only;
    if (*size == 0 || !tp_read(who, regs->rsi, &only, sizeof only) || only.iov_len < 2) return;
    regs->rsi = (unsigned long)only.iov_base;
    regs->rdx = only.iov_len / 2;
    int is_read = tp_is_read(shape->call), has_place = shape->call == TP_PWRITEV || shape->call == TP_PREADV;
    regs->orig_rax = is_read ? (has_place ? SYS_pread64 : SYS_read) : (has_place ? SYS_pwrite64 : SYS_write);
}

// At the entry of a call. Returns whether its return has to be seen too.
static int enter(pid_t tid) {
    struct user_regs_struct regs;
    struct tp_verdict verdict;
    if (ptrace(PTRACE_GETREGS, tid, 0, &regs) != 0) return 0;
    struct tp_caller who = {process_of(tid), tid, label, 1};
    long nr = (long)regs.orig_rax;
    long args[6] = {(long)regs.rdi, (long)regs.rsi, (long)regs.rdx, (long)regs.r10, (long)regs.r8, (long)regs.r9};
    tp_begin(session, &who, nr, args, &verdict);
    if (!verdict.matched) return 0;
    if (verdict.action == TP_KILL || verdict.action == TP_KILL_GROUP) {
        die(who.pid, verdict.action);
        return 0;
    }
    if (verdict.action == TP_DELAY) {
        struct timespec pause = {verdict.delay_us / 1000000, (long)(verdict.delay_us % 1000000) * 1000};
        nanosleep(&pause, NULL);
    }
    const struct tp_shape *shape = tp_shape_of(nr);
    int cut = verdict.action == TP_SHORT || verdict.action == TP_TORN;
    if ((cut && tp_is_write(shape->call)) || (verdict.action == TP_SHORT && tp_is_read(shape->call))) {
        shorten(&who, shape, &regs);
        ptrace(PTRACE_SETREGS, tid, 0, &regs);
    }
    // The kernel gives the descriptor back even where close reports an error, so that call is made all the same.
    if (verdict.action == TP_ERRNO && shape->call != TP_CLOSE) {
        regs.orig_rax = (unsigned long long)-1;
        ptrace(PTRACE_SETREGS, tid, 0, &regs);
    }
    struct task *task = task_of(tid, 1);
    task->event = verdict.event;
    task->action = verdict.action;
    task->error = verdict.error;
    return 1;
}

static void leave(pid_t tid) {
    struct user_regs_struct regs;
    struct task *task = task_of(tid, 0);
    if (task == NULL || ptrace(PTRACE_GETREGS, tid, 0, &regs) != 0) return;
    struct tp_caller who = {process_of(tid), tid, label, 1};
    if (task->action == TP_ERRNO) {
        regs.rax = (unsigned long long)(long long)-task->error;
        ptrace(PTRACE_SETREGS, tid, 0, &regs);
    }
    tp_end(&who, session, task->event, (long)regs.rax);
    if (task->action == TP_TORN) die(who.pid, TP_KILL);
    task->tid = 0;
}

static int stops_a_group(int signal) {
    return signal == SIGSTOP || signal == SIGTSTP || signal == SIGTTIN || signal == SIGTTOU;
}

// Serves stops until every traced thread is gone. Returns the wait status of `main_pid`.
static int serve(pid_t main_pid) {
    int ended = 0, status;
    for (;;) {
        pid_t tid = waitpid(-1, &status, __WALL);
        if (tid < 0 && errno == EINTR) continue;
        if (tid < 0) return ended;
        if (WIFEXITED(status) || WIFSIGNALED(status)) {
            forget(tid);
            if (tid == main_pid) ended = status;
            continue;
        }
        int event = status >> 16, signal = WSTOPSIG(status);
        int see_return = 0;
        if (event == PTRACE_EVENT_SECCOMP) {
            see_return = enter(tid);
            signal = 0;
        } else if (signal == (SIGTRAP | 0x80)) {
            leave(tid);
            signal = 0;
        } else if (event == PTRACE_EVENT_STOP && stops_a_group(signal)) {
            ptrace(PTRACE_LISTEN, tid, 0, 0);
            continue;
        } else if (event != 0) {
            signal = 0;
        }
        // A signal can arrive between entry and return; the return is then still to be seen.
        struct task *task = task_of(tid, 0);
        ptrace(see_return || task != NULL ? PTRACE_SYSCALL : PTRACE_CONT, tid, 0, signal);
    }
}

static void seize(pid_t pid) {
    long options = PTRACE_O_TRACESECCOMP | PTRACE_O_TRACESYSGOOD | PTRACE_O_TRACECLONE | PTRACE_O_TRACEFORK |
                   PTRACE_O_TRACEVFORK | PTRACE_O_TRACEEXEC;
    if (ptrace(PTRACE_SEIZE, pid, 0, options) == 0) return;
    fprintf(stderr, "twinproof tracer: ptrace is refused: %s\n", strerror(errno));
    exit(REFUSED);
}

static pid_t start(char **command) {
    int gate[2];
    char byte;
    if (pipe(gate) != 0) exit(REFUSED);
    pid_t child = fork();
    if (child == 0) {
        close(gate[1]);
        setpgid(0, 0);
        if (read(gate[0], &byte, 1) != 1) _exit(REFUSED);
        close(gate[0]);
        int error = tp_install_filter();
        if (error != 0) {
            fprintf(stderr, "twinproof tracer: the seccomp filter is refused: %s\n", strerror(error));
            _exit(REFUSED);
        }
        execvp(command[0], command);
        fprintf(stderr, "twinproof tracer: %s: %s\n", command[0], strerror(errno));
        _exit(127);
    }
    close(gate[0]);
    seize(child);
    if (write(gate[1], "g", 1) != 1) exit(REFUSED);
    close(gate[1]);
    return child;
}

int main(int count, char **words) {
    int error = 0;
    if (count < 5) return REFUSED;
    session = tp_open_session(words[1], &error);
    label = atoi(words[2]);
    if (session == NULL) {
        fprintf(stderr, "twinproof tracer: cannot open %s: %s\n", words[1], strerror(error));
        return REFUSED;
    }
    if (strcmp(words[3], "seize") == 0) {
        seize(atoi(words[4]));
        if (write(1, "seized\n", 7) != 7) return REFUSED;
        serve(0);
        return 0;
    }
    int status = serve(start(words + 4));
    if (WIFEXITED(status)) return WEXITSTATUS(status);
    // Ending by the same signal lets the caller see how the program ended.
    signal(WTERMSIG(status), SIG_DFL);
    kill(getpid(), WTERMSIG(status));
    return REFUSED;
}
