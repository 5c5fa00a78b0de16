// Reading from files at offsets, with counts of calls and bytes.
#pragma once

#include <unistd.h>

#include <cerrno>
#include <cstdint>

namespace fastimpl {

struct ReadCounts {
  int64_t status = 0;  // 0, an errno, or kEndOfFile.
  int64_t calls = 0;
  int64_t bytes = 0;
};

constexpr int64_t kEndOfFile = -1;

inline int64_t read_fully(int file, uint8_t* target, int64_t count, int64_t offset, ReadCounts* counts) {
  while (count > 0) {
    const ssize_t got = pread(file, target, static_cast<size_t>(count), static_cast<off_t>(offset));
    ++counts->calls;
    if (got < 0 && errno == EINTR) continue;
    if (got < 0) return errno;
    if (got == 0) return kEndOfFile;
    counts->bytes += got;
    target += got;
    offset += got;
    count -= got;
  }
  return 0;
}

}  // namespace fastimpl
