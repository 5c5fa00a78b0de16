// Words that a launch carries to the device itself. A copy of host memory would have to be waited for, or be pinned,
// and a graph could not hold it; arguments of a launch are copied when it is made, also into a graph.
#pragma once

#include "common/simt.h"

namespace fastimpl {

// As many as the arguments of a launch have room for.
struct Words {
  static constexpr int64_t kCount = 496;
  uint64_t values[static_cast<size_t>(kCount)];
};

// One block stores `count` of them from place `begin` on.
struct StoreWords {
  static constexpr int kThreads = 256;
  simt::Global<uint64_t> to;
  int64_t begin, count;
  Words words;

  SIMT void operator()() const {
    for (int64_t i = simt::thread(); i < count; i += simt::threads()) to.store(begin + i, words.values[i]);
  }
};

}  // namespace fastimpl
