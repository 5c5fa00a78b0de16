// What a prover reports: a kind, a sentence, and the places in the source that take part.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace simt::prover {

// A line of a kernel. `Site::here()` as a default argument is the line of the call.
struct Site {
  const char* file;
  int line;

  static Site here(const char* file = __builtin_FILE(), int line = __builtin_LINE()) { return {file, line}; }
};

struct Place {
  std::string what;  // Such as "store of 4 bytes", "barrier".
  int64_t block, thread;
  Site site;
};

struct Fault {
  std::string kind, kernel, message;
  std::vector<Place> places;
};

// Kinds of faults; the same words are in docs/simt.md.
namespace kind {
constexpr const char *kRace = "race", *kOutOfBounds = "out-of-bounds", *kMisaligned = "misaligned",
                     *kUninitialized = "uninitialized", *kNotDevice = "not-device-memory", *kMask = "mask",
                     *kReturnedLane = "returned-lane", *kShuffleOutside = "shuffle-outside-mask",
                     *kDivergence = "barrier-divergence", *kDeadlock = "deadlock", *kLimit = "launch-limit",
                     *kNoEnd = "no-end", *kMixedAtomics = "mixed-atomics", *kWrongResult = "wrong-result",
                     *kScheduleDependence = "schedule-dependence", *kMisuse = "misuse";
}

// Ends a run of a proof; thrown on the program's own stack alone.
struct Stopped {};

}  // namespace simt::prover
