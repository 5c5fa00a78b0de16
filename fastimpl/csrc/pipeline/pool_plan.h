// Which kernel pools which columns: features of one type, width of access and number of lanes go into one launch.
#pragma once

#include <algorithm>
#include <vector>

#include "pipeline/pool_kernel.h"

namespace fastimpl::pipeline {

// What the plan has to know of a feature. `rows` is an address of the device, which the host does not follow.
struct PoolFeature {
  const uint8_t* rows;
  int64_t row_count, dim, column;
  Float type;
  bool mean;
};

struct PoolLaunch {
  Float type;
  bool has_vectors;  // 16 bytes of a row at once, else one element.
  unsigned lanes;
  std::vector<PoolPart> parts;

  bool needs_list() const { return static_cast<int64_t>(parts.size()) > PoolParts::kCarried; }
  int64_t elements() const { return has_vectors ? 16 / float_bytes(type) : 1; }
  // One group of lanes for each bag of each part, up to as many as fill any device several times, or `max_blocks` if
  // that is not 0: the rest of the device is left to others. Small blocks leave few registers over.
  simt::Shape shape(int64_t bag_count, int64_t max_blocks) const {
    constexpr int64_t kThreadsMax = 1 << 20;
    const bool is_limited = max_blocks > 0;
    const int64_t threads = static_cast<int64_t>(parts.size()) * bag_count * lanes, of_block = is_limited ? 256 : 64,
                  blocks = (std::min(threads, kThreadsMax) + of_block - 1) / of_block;
    return {is_limited ? std::min(max_blocks, blocks) : blocks, of_block};
  }
};

// Whether rows and results lie where vectors may.
inline bool has_vectors(const PoolFeature& feature, int64_t width, const float* out) {
  const auto is_aligned = [](const void* at) { return reinterpret_cast<uintptr_t>(at) % 16 == 0; };
  return feature.dim * float_bytes(feature.type) % 16 == 0 && is_aligned(feature.rows) && is_aligned(out) &&
         feature.column % 4 == 0 && width % 4 == 0;
}

// None without bags or columns.
inline std::vector<PoolLaunch> plan_pooling(const std::vector<PoolFeature>& features, int64_t bag_count, int64_t width,
                                            const float* out) {
  std::vector<PoolLaunch> launches;
  for (size_t f = 0; f < features.size(); ++f) {
    const PoolFeature& feature = features[f];
    if (bag_count == 0 || feature.dim == 0) continue;
    PoolLaunch wanted{feature.type, has_vectors(feature, width, out), 1, {}};
    while (wanted.lanes < simt::kLanes && wanted.lanes * wanted.elements() < feature.dim) wanted.lanes *= 2;
    auto found = std::find_if(launches.begin(), launches.end(), [&wanted](const PoolLaunch& known) {
      return known.type == wanted.type && known.has_vectors == wanted.has_vectors && known.lanes == wanted.lanes;
    });
    if (found == launches.end()) found = launches.insert(found, wanted);
    const int64_t columns = wanted.lanes * wanted.elements();
    const int64_t bytes = float_bytes(feature.type), all_bytes = feature.row_count * feature.dim * bytes;
    for (int64_t element = 0; element < feature.dim; element += columns) {
      // An empty table has no rows, and no id leads there.
      const int64_t skipped = std::min(element * bytes, all_bytes);
      found->parts.push_back({{feature.rows + skipped, all_bytes - skipped},
                              feature.row_count,
                              feature.column + element,
                              static_cast<int64_t>(f) * bag_count,
                              static_cast<int32_t>(feature.dim),
                              static_cast<int32_t>(std::min(columns, feature.dim - element)),
                              feature.mean});
    }
  }
  return launches;
}

// The arguments that all launches of a call share.
template <typename Id>
struct PoolBatch {
  simt::Global<const Id> ids;
  simt::Global<const int64_t> offsets;
  simt::Global<const float> weights;  // None without weights.
  simt::Global<float> out;
  int64_t bag_count, width;
};

template <Float kType, bool kWeighted, typename Id, typename Body>
void with_pool_of(const PoolLaunch& launch, const PoolBatch<Id>& batch, simt::Global<const PoolPart> parts,
                  const Body& body) {
  PoolParts all{parts, {}, static_cast<int64_t>(launch.parts.size())};
  if (!launch.needs_list()) std::copy(launch.parts.begin(), launch.parts.end(), all.carried);
  constexpr int kElements = kType == Float::kFloat32 ? 4 : 8;
  const auto make = [&](auto kernel) {
    body(decltype(kernel){all, batch.ids, batch.offsets, batch.weights, batch.out, batch.bag_count, batch.width,
                          launch.lanes});
  };
  const bool has_few = batch.ids.size() <= 2 * (batch.offsets.size() - 1);
  if (!launch.has_vectors) return make(Pool<kType, Id, kWeighted, 1, false>());
  has_few ? make(Pool<kType, Id, kWeighted, kElements, true>()) : make(Pool<kType, Id, kWeighted, kElements, false>());
}

// Calls `body` with the kernel of a launch, whose parts lie on the device if it needs a list of them.
template <bool kWeighted, typename Id, typename Body>
void with_pool(const PoolLaunch& launch, const PoolBatch<Id>& batch, simt::Global<const PoolPart> parts,
               const Body& body) {
  switch (launch.type) {
    case Float::kFloat32: return with_pool_of<Float::kFloat32, kWeighted>(launch, batch, parts, body);
    case Float::kFloat16: return with_pool_of<Float::kFloat16, kWeighted>(launch, batch, parts, body);
    case Float::kBFloat16: return with_pool_of<Float::kBFloat16, kWeighted>(launch, batch, parts, body);
  }
}

}  // namespace fastimpl::pipeline
