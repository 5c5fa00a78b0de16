// Rows as they were: who has not changed since a moment, and copies of those that are about to. Written with simt.h.
#pragma once

#include "common/simt.h"
#include "kvstore/device_rows.h"

namespace fastimpl::kvstore::device {

// 1 for each of these rows that has not changed since a moment; 0 where there is none. One thread a row.
struct MarkOlder {
  static constexpr int kThreads = 256;
  RowStore rows;
  uint64_t version;
  Global<const int64_t> slots;
  Global<int64_t> marks;
  Count count = {};

  SIMT void operator()() const {
    const int64_t end = count.of(slots.size());
    for (int64_t at = first_item(); at < slots.size(); at += item_step()) {
      const int64_t slot = at < end ? slots.load(at) : kNowhere;
      marks.store(at, slot != kNowhere && rows.version(rows.row(slot)) <= version ? 1 : 0);
    }
  }
};

// Rows that changed since a moment are nowhere. One thread a row.
struct HideNewer {
  static constexpr int kThreads = 256;
  RowStore rows;
  uint64_t version;
  Global<int64_t> slots;

  SIMT void operator()() const {
    for (int64_t at = first_item(); at < slots.size(); at += item_step()) {
      const int64_t slot = slots.load(at);
      if (slot != kNowhere && rows.version(rows.row(slot)) > version) slots.store(at, kNowhere);
    }
  }
};

// Rows of one table become rows of another, of the same stride, whole and with their versions. Half a warp a row.
struct CopyRows {
  static constexpr int kThreads = 256;
  RowStore from, to;
  Global<const int64_t> from_slots, to_slots;
  Count count = {};

  SIMT void operator()() const {
    const HalfWarp group;
    const int64_t end = count.of(from_slots.size());
    for (int64_t at = group.number(); at < end; at += group.count())
      Piece<16>::copy(group, to.row(to_slots.load(at)), 0, from.row(from_slots.load(at)), 0, from.stride);
  }
};

}  // namespace fastimpl::kvstore::device
