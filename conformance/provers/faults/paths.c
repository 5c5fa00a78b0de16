// Resolves descriptors through /proc, so that a file keeps its name across renames and no table of descriptors is
// needed. An unresolvable path is the empty string, which is under no root.
#define _GNU_SOURCE
#include "paths.h"

#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

static const char DELETED[] = " (deleted)";

static int proc_link(const struct tp_caller *who, const char *what, char path[TP_FULL_PATH_BYTES]) {
    char link[64];
    snprintf(link, sizeof link, "/proc/%d/%s", who->foreign ? (int)who->tid : (int)getpid(), what);
    ssize_t size = readlink(link, path, TP_FULL_PATH_BYTES - 1);
    path[size > 0 ? size : 0] = 0;
    return size > 0 && path[0] == '/';
}

void tp_path_of_descriptor(const struct tp_caller *who, int fd, char path[TP_FULL_PATH_BYTES], uint64_t *inode) {
    char what[32], link[64];
    struct stat status;
    snprintf(what, sizeof what, "fd/%d", fd);
    if (!proc_link(who, what, path)) {
        path[0] = 0;
        return;
    }
    size_t size = strlen(path), tail = sizeof DELETED - 1;
    if (size > tail && strcmp(path + size - tail, DELETED) == 0) path[size - tail] = 0;
    snprintf(link, sizeof link, "/proc/%d/fd/%d", who->foreign ? (int)who->tid : (int)getpid(), fd);
    if (stat(link, &status) == 0) *inode = status.st_ino;
}

void tp_inode_of(const char *path, uint64_t *inode) {
    struct stat status;
    *inode = lstat(path, &status) == 0 ? status.st_ino : 0;
}

static int read_string(const struct tp_caller *who, long address, char into[TP_FULL_PATH_BYTES]) {
    if (address == 0) return 0;
    if (!who->foreign) {
        size_t size = strnlen((const char *)address, TP_FULL_PATH_BYTES);
        if (size >= TP_FULL_PATH_BYTES) return 0;
        memcpy(into, (const char *)address, size + 1);
        return 1;
    }
    // A string may end just before an unmapped page, so no read crosses a page border.
    for (size_t done = 0; done < TP_FULL_PATH_BYTES;) {
        unsigned long at = (unsigned long)address + done;
        size_t part = 256 - at % 256;
        if (part > TP_FULL_PATH_BYTES - done) part = TP_FULL_PATH_BYTES - done;
        if (!tp_read(who, at, into + done, part)) return 0;
        if (memchr(into + done, 0, part) != NULL) return 1;
        done += part;
    }
    return 0;
}

void tp_path_of_name(const struct tp_caller *who, int dir, long name, char path[TP_FULL_PATH_BYTES], uint64_t *inode) {
    char given[TP_FULL_PATH_BYTES], whole[2 * TP_FULL_PATH_BYTES], what[32], resolved[TP_FULL_PATH_BYTES];
    path[0] = 0;
    if (!read_string(who, name, given)) return;
    whole[0] = 0;
    if (given[0] != '/') {
        snprintf(what, sizeof what, dir == AT_FDCWD ? "cwd" : "fd/%d", dir);
        if (!proc_link(who, what, whole)) return;
        strcat(whole, "/");
    }
    strcat(whole, given);
    size_t size = strlen(whole);
    while (size > 1 && whole[size - 1] == '/') whole[--size] = 0;
    // The last component itself is not followed: rename, unlink and link work on the entry, not on what it points to.
    char *slash = strrchr(whole, '/');
    char *last = slash + 1;
    if (strcmp(last, ".") == 0 || strcmp(last, "..") == 0) {
        if (realpath(whole, path) == NULL) path[0] = 0;
    } else {
        *slash = 0;
        if (realpath(whole[0] ? whole : "/", resolved) == NULL) return;
        int wrote = snprintf(path, TP_FULL_PATH_BYTES, "%s/%s", strcmp(resolved, "/") == 0 ? "" : resolved, last);
        if (wrote >= TP_FULL_PATH_BYTES) path[0] = 0;
    }
    if (path[0]) tp_inode_of(path, inode);
}

void tp_path_of_address(const struct tp_caller *who, unsigned long at, char path[TP_FULL_PATH_BYTES], uint64_t *inode) {
    char maps[64], line[TP_FULL_PATH_BYTES + 128];
    path[0] = 0;
    snprintf(maps, sizeof maps, "/proc/%d/maps", who->foreign ? (int)who->tid : (int)getpid());
    FILE *file = fopen(maps, "re");
    if (file == NULL) return;
    while (fgets(line, sizeof line, file) != NULL) {
        unsigned long from, to, number;
        int name = 0;
        if (sscanf(line, "%lx-%lx %*s %*s %*s %lu %n", &from, &to, &number, &name) < 3 || name == 0) continue;
        if (at < from || at >= to || line[name] != '/') continue;
        line[strcspn(line, "\n")] = 0;
        strncpy(path, line + name, TP_FULL_PATH_BYTES - 1);
        path[TP_FULL_PATH_BYTES - 1] = 0;
        *inode = number;
        break;
    }
    fclose(file);
}

int tp_is_under(const char *path, const char *root) {
    size_t size = strlen(root);
    return path[0] && size && strncmp(path, root, size) == 0 && (path[size] == 0 || path[size] == '/');
}
