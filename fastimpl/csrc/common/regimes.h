// Sizes and counts at which code takes another way, and what of them a test can cross.
#pragma once

#include <cstdint>

namespace fastimpl {

// What is shipped; in a library built with REGIMES=lowered, so little that ordinary tests cross it, from both sides.
// Results are the same in both: only which way leads to them is not.
#ifdef FASTIMPL_LOWERED
constexpr int64_t regime(int64_t, int64_t lowered) { return lowered; }
#else
constexpr int64_t regime(int64_t shipped, int64_t) { return shipped; }
#endif

}  // namespace fastimpl
