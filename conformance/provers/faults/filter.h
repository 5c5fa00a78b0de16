// The seccomp filter that stops a process for its tracer at file-system calls only.
#ifndef TWINPROOF_FILTER_H
#define TWINPROOF_FILTER_H

int tp_install_filter(void);

#endif
