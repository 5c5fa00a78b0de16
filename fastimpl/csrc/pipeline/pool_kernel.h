// Pooling on a grid: some lanes of a warp for each bag. They load its ids at once, hand them to each other, and have
// several rows under way; rows are added in order of position, each operation rounded by itself, so that a device has
// the bits of the host. Compile without contraction. Nothing is waited for: an id that the table has not is left out,
// and a bag has no ids but those of the batch.
#pragma once

#include "common/floats.h"
#include "common/simt.h"

namespace fastimpl::pipeline {

template <Float kType>
struct Stored {
  using Bits = uint16_t;
  FASTIMPL_BOTH static float value(Bits bits) {
    return kType == Float::kFloat16 ? value_of_float16(bits) : from_bfloat16(bits);
  }
};
template <>
struct Stored<Float::kFloat32> {
  using Bits = float;
  FASTIMPL_BOTH static float value(Bits bits) { return bits; }
};

// Some columns of one feature: as many as the lanes of a bag hold.
struct PoolPart {
  simt::Global<const uint8_t> rows;  // The table's, from the first element of this part on.
  int64_t row_count;
  int64_t column, first_bag;  // Of the pooled matrix; of the offsets.
  int32_t dim, count;         // Elements of a row; of this part.
  bool mean;
};

// A few parts are carried by the launch itself, which saves another; of more the kernel is given a list.
struct PoolParts {
  static constexpr int64_t kCarried = 8;
  simt::Global<const PoolPart> listed;
  PoolPart carried[static_cast<size_t>(kCarried)];
  int64_t count;

  SIMT PoolPart load(int64_t number) const { return count <= kCarried ? carried[number] : listed.load(number); }
};

// `lanes`, a power of two, sum one bag of one part, `kElements` columns each. A part's columns, its table and `out` lie
// at multiples of 16 bytes if kElements is more than 1.
// `kHasFew`: bags have one or two ids on average; a kernel of its own, since it needs more registers.
template <Float kType, typename Id, bool kWeighted, int kElements, bool kHasFew>
struct Pool {
  static constexpr int kThreads = 256;
  static constexpr unsigned kRows = kHasFew ? 4 : 8;  // Under way at once, of a bag.
  using Bits = typename Stored<kType>::Bits;
  using Row = simt::Vector<Bits, kElements>;

  // Bags that are summed at once where they have few ids, and the most ids of each of them then.
  static constexpr int kBags = kHasFew ? 4 : 1;
  static constexpr int64_t kFewIds = 4;

  PoolParts parts;
  simt::Global<const Id> ids;
  simt::Global<const int64_t> offsets;
  simt::Global<const float> weights;
  simt::Global<float> out;  // [bag_count, width]
  int64_t bag_count, width;
  unsigned lanes;

  // Parts and bags in steps of all groups of lanes, without a division for each. Of bags with few ids some at once.
  SIMT void operator()() const {
    const int64_t turns = (bag_count + kBags - 1) / kBags;
    const int64_t per_block = simt::threads() / lanes, stride = simt::blocks() * per_block,
                  begin = simt::block() * per_block + simt::thread() / lanes;
    const int64_t part_step = stride / turns, turn_step = stride - part_step * turns;
    int64_t part = begin / turns, turn = begin - part * turns;
    while (part < parts.count) {
      sum_bags(parts.load(part), turn * kBags);
      part += part_step;
      turn += turn_step;
      if (turn >= turns) {
        turn -= turns;
        ++part;
      }
    }
  }

  SIMT void sum_bags(const PoolPart& part, int64_t bag) const {
    if constexpr (kHasFew) {
      if (sum_few(part, bag)) return;
    }
    const int64_t behind = bag + kBags < bag_count ? bag + kBags : bag_count;
    for (; bag < behind; ++bag) sum_bag(part, bag);
  }

  // kBags bags, or those that are left: offsets, then ids, then rows of all are under way together. Whether it is done:
  // not where one of them has many ids, whose rows would be loaded one by one.
  SIMT bool sum_few(const PoolPart& part, int64_t bag) const {
    int64_t ends[kBags + 1], longest = 0;
    SIMT_UNROLL
    for (int b = 0; b <= kBags; ++b)
      ends[b] = inside(offsets.load(part.first_bag + (bag + b < bag_count ? bag + b : bag_count)));
    SIMT_UNROLL
    for (int b = 0; b < kBags; ++b) longest = ends[b + 1] - ends[b] > longest ? ends[b + 1] - ends[b] : longest;
    if (longest > kFewIds) return false;
    const unsigned element = (simt::lane() - first()) * kElements;
    if (element >= static_cast<unsigned>(part.count)) return true;
    float sums[kBags][kElements] = {};
    for (int64_t i = 0; i < longest; ++i) add_few(part, element, i, ends, sums);
    SIMT_UNROLL
    for (int b = 0; b < kBags; ++b) {
      if (bag + b < bag_count) store(part, (bag + b) * width + part.column + element, sums[b], ends[b + 1] - ends[b]);
    }
    return true;
  }

  // Adds the row of id `i` of each bag that has it.
  SIMT void add_few(const PoolPart& part, unsigned element, int64_t i, const int64_t (&ends)[kBags + 1],
                    float (&sums)[kBags][kElements]) const {
    const auto rows = part.rows.template as<const Bits>();
    Id given[kBags];
    Row loaded[kBags];
    bool is_loaded[kBags];
    SIMT_UNROLL
    for (int b = 0; b < kBags; ++b) given[b] = i < ends[b + 1] - ends[b] ? ids.load(ends[b] + i) : Id{-1};
    SIMT_UNROLL
    for (int b = 0; b < kBags; ++b) {
      const auto row = static_cast<int64_t>(given[b]);
      is_loaded[b] = static_cast<uint64_t>(row) < static_cast<uint64_t>(part.row_count);
      if (is_loaded[b]) loaded[b] = rows.template load_vector<kElements>(row * part.dim + element);
    }
    SIMT_UNROLL
    for (int b = 0; b < kBags; ++b) {
      const float scale = kWeighted && is_loaded[b] ? weights.load(ends[b] + i) : 1.0F;
      if (is_loaded[b]) add(sums[b], loaded[b], scale);
    }
  }

  SIMT unsigned first() const { return simt::lane() & ~(lanes - 1); }
  SIMT unsigned mask() const { return (simt::kAllLanes >> (simt::kLanes - lanes)) << first(); }

  SIMT void sum_bag(const PoolPart& part, int64_t bag) const {
    const int64_t begin = inside(offsets.load(part.first_bag + bag)),
                  end = inside(offsets.load(part.first_bag + bag + 1));
    const unsigned mine = simt::lane() - first(), element = mine * kElements;
    const bool has_columns = element < static_cast<unsigned>(part.count);
    const auto rows = part.rows.template as<const Bits>();
    float sum[kElements] = {};
    for (int64_t base = begin; base < end; base += lanes) {
      const bool has_id = base + mine < end;
      const Id given = has_id ? ids.load(base + mine) : Id{-1};
      const bool has_row = static_cast<uint64_t>(static_cast<int64_t>(given)) < static_cast<uint64_t>(part.row_count);
      const Id id = has_row ? given : Id{-1};
      const float weight = kWeighted && has_id ? weights.load(base + mine) : 0.0F;
      const unsigned count = end - base < lanes ? static_cast<unsigned>(end - base) : lanes;
      for (unsigned k = 0; k < count; k += kRows) {
        Row loaded[kRows];
        bool is_loaded[kRows];
        SIMT_UNROLL
        for (unsigned r = 0; r < kRows; ++r) {
          const auto row = static_cast<int64_t>(simt::shuffle(mask(), id, k + r, lanes));
          is_loaded[r] = has_columns && k + r < count && row >= 0;
          if (is_loaded[r]) loaded[r] = rows.template load_vector<kElements>(row * part.dim + element);
        }
        SIMT_UNROLL
        for (unsigned r = 0; r < kRows; ++r) {
          const float scale = kWeighted ? simt::shuffle(mask(), weight, k + r, lanes) : 1.0F;
          if (is_loaded[r]) add(sum, loaded[r], scale);
        }
      }
    }
    if (has_columns) store(part, bag * width + part.column + element, sum, end - begin);
  }

  SIMT int64_t inside(int64_t offset) const { return offset < 0 ? 0 : offset < ids.size() ? offset : ids.size(); }

  SIMT static void add(float (&sum)[kElements], const Row& row, float scale) {
    SIMT_UNROLL
    for (int e = 0; e < kElements; ++e) {
      const float value = Stored<kType>::value(row.values[e]);
      sum[e] += kWeighted ? scale * value : value;
    }
  }

  SIMT void store(const PoolPart& part, int64_t place, float (&sum)[kElements], int64_t length) const {
    constexpr int kStored = kElements < 4 ? kElements : 4;
    // By itself: divisions among the stores take the vectors apart.
    if (part.mean && length > 0) {
      SIMT_UNROLL
      for (int e = 0; e < kElements; ++e) sum[e] = sum[e] / static_cast<float>(length);
    }
    SIMT_UNROLL
    for (int e = 0; e < kElements; e += kStored) {
      simt::Vector<float, kStored> result;
      SIMT_UNROLL
      for (int i = 0; i < kStored; ++i) result.values[i] = sum[e + i];
      out.template store_vector<kStored>(place + e, result);
    }
  }
};

}  // namespace fastimpl::pipeline
