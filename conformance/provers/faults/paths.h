// Absolute paths and inodes of what a call works on, in this process or in a traced one.
#ifndef TWINPROOF_PATHS_H
#define TWINPROOF_PATHS_H

#include "session.h"

#define TP_FULL_PATH_BYTES 4096

void tp_path_of_descriptor(const struct tp_caller *who, int fd, char path[TP_FULL_PATH_BYTES], uint64_t *inode);
void tp_path_of_name(const struct tp_caller *who, int dir, long name, char path[TP_FULL_PATH_BYTES], uint64_t *inode);
void tp_path_of_address(const struct tp_caller *who, unsigned long at, char path[TP_FULL_PATH_BYTES], uint64_t *inode);
void tp_inode_of(const char *path, uint64_t *inode);
int tp_is_under(const char *path, const char *root);

#endif
