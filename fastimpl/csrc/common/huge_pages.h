// Huge pages for memory that others have allocated.
#pragma once

#include "common/memory.h"

namespace fastimpl {

// Has what lies between two borders of huge pages come in such; what the system declines changes nothing.
inline void advise_huge_pages(void* memory, size_t bytes) noexcept {
  const size_t begin = round_up(reinterpret_cast<size_t>(memory), kHugePageBytes),
               end = (reinterpret_cast<size_t>(memory) + bytes) / kHugePageBytes * kHugePageBytes;
  if (end > begin) madvise(reinterpret_cast<void*>(begin), end - begin, MADV_HUGEPAGE);
}

}  // namespace fastimpl
