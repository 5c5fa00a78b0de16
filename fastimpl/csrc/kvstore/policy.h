// Which rows an eviction round removes, on the host and on the device; the predicates of refimpl.kvstore.condemned.
#pragma once

#include <cmath>

#include "kvstore/hash.h"

namespace fastimpl::kvstore {

enum class Policy : int64_t { kTtl = 0, kCount, kTtlCount, kL2, kTimestamp, kScore };

struct EvictionPlan {
  Policy policy;
  int64_t ttl_seconds, count_threshold, timestamp_threshold;
  double decay, l2_threshold;
  int64_t now;
  uint64_t mark;
  bool has_cutoff;
  uint64_t cutoff_score;
  int64_t cutoff_key;
};

FASTIMPL_BOTH inline bool has_decay(const EvictionPlan& plan) {
  return (plan.policy == Policy::kCount || plan.policy == Policy::kTtlCount) && plan.decay != 1.0;
}

FASTIMPL_BOTH inline uint64_t decayed_count(const EvictionPlan& plan, uint64_t count) {
  if (!has_decay(plan)) return count;
  return static_cast<uint64_t>(std::floor(static_cast<double>(count) * plan.decay));
}

// `square_sum`: of the weights, which the L2 policy alone looks at.
FASTIMPL_BOTH inline bool is_condemned(const EvictionPlan& plan, uint64_t word, int64_t key, double square_sum) {
  const auto timestamp = static_cast<int64_t>(timestamp_of(word));
  const bool old = plan.ttl_seconds != 0 && plan.now - timestamp > plan.ttl_seconds;
  const bool rare = static_cast<int64_t>(decayed_count(plan, count_of(word))) < plan.count_threshold;
  switch (plan.policy) {
    case Policy::kTtl: return old;
    case Policy::kCount: return rare;
    case Policy::kTtlCount: return old && rare;
    case Policy::kTimestamp: return timestamp < plan.timestamp_threshold;
    case Policy::kL2: return square_sum < plan.l2_threshold * plan.l2_threshold;
    case Policy::kScore:
      return plan.has_cutoff &&
             (count_of(word) < plan.cutoff_score || (count_of(word) == plan.cutoff_score && key < plan.cutoff_key));
  }
  return false;
}

}  // namespace fastimpl::kvstore
