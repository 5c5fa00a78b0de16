// Which launches carry a list of bytes to the device.
#pragma once

#include <algorithm>
#include <cstring>

#include "common/words_kernel.h"

namespace fastimpl {

constexpr int64_t words_for(int64_t bytes) { return (bytes + 7) / 8; }

// Calls `body` with each kernel that stores a part of `bytes` bytes; `to` has room for whole words.
template <typename Body>
void store_words(const void* from, int64_t bytes, simt::Global<uint64_t> to, const Body& body) {
  const auto* const source = static_cast<const uint8_t*>(from);
  for (int64_t begin = 0; begin < words_for(bytes); begin += Words::kCount) {
    StoreWords kernel{to, begin, std::min(Words::kCount, words_for(bytes) - begin), {}};
    const int64_t left = bytes - begin * 8;
    std::memcpy(kernel.words.values, source + begin * 8, static_cast<size_t>(std::min(left, kernel.count * 8)));
    body(kernel);
  }
}

}  // namespace fastimpl
