// What is known of each byte of a device's memory: whether it was written, and which accesses later ones have to be
// ordered after.
#pragma once

#include <cstdint>
#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include <simt/fault.h>
#include <simt/schedule.h>

namespace simt::prover {

// One access to a word of four bytes, or to some of them. `agent` is a thread, or the asynchronous copies of a thread;
// `clock` is the agent's own.
struct Access {
  uint32_t clock;
  uint16_t agent, site;
  uint8_t bytes;  // A bit for each byte of the word.
  bool writes, is_atomic, is_block_scope;
};

// A list whose first elements need no memory of their own.
class Accesses {
 public:
  int size() const { return count_; }
  Access& operator[](int i) { return i < kInline ? held_[i] : (*more_)[static_cast<size_t>(i - kInline)]; }
  void clear() {
    count_ = 0;
    if (more_) more_->clear();
  }
  void add(const Access& access) {
    if (count_ < kInline) {
      held_[count_] = access;
    } else {
      if (!more_) more_ = std::make_unique<std::vector<Access>>();
      more_->push_back(access);
    }
    ++count_;
  }
  void remove(int i) {
    (*this)[i] = (*this)[count_ - 1];
    if (count_ > kInline) more_->pop_back();
    --count_;
  }

 private:
  static constexpr int kInline = 2;
  int count_ = 0;
  Access held_[kInline];
  std::unique_ptr<std::vector<Access>> more_;
};

// The accesses to a word that a later one may race with. A cell of an earlier launch is empty.
struct Cell {
  uint32_t generation = 0;
  Accesses writes, loads;
};

// Memory that kernels may reach, with its shadow.
class Region {
 public:
  static constexpr size_t kAlignment = 256;

  // Data begins `shift` bytes after a multiple of 256, as memory of a device does.
  Region(std::string region_name, int64_t bytes, int64_t shift = 0)
      : name(std::move(region_name)),
        size(bytes),
        memory_(static_cast<size_t>(bytes + shift) + kAlignment),
        cells(static_cast<size_t>((bytes + shift) / 4 + 2)),
        is_written(static_cast<size_t>(bytes), 0) {
    const auto begin = reinterpret_cast<uintptr_t>(memory_.data());
    data = memory_.data() + ((kAlignment - begin % kAlignment) % kAlignment) + shift;
  }

  bool contains(uintptr_t address) const {
    return address >= reinterpret_cast<uintptr_t>(data) && address < reinterpret_cast<uintptr_t>(data) + size;
  }
  // The word that an offset lies in; words are those of addresses.
  int64_t word_of(int64_t offset) const {
    return static_cast<int64_t>((reinterpret_cast<uintptr_t>(data) + static_cast<uintptr_t>(offset)) / 4 -
                                reinterpret_cast<uintptr_t>(data) / 4);
  }
  // Makes the content unknown: bytes that look like no value, and differ from run to run.
  void poison(Random* random) {
    for (int64_t i = 0; i < size; ++i) data[i] = static_cast<uint8_t>(random->next() | 0x80);
    std::fill(is_written.begin(), is_written.end(), uint8_t{0});
  }

  std::string name;
  int64_t size;

 private:
  std::vector<uint8_t> memory_;

 public:
  std::vector<Cell> cells;
  std::vector<uint8_t> is_written;
  uint8_t* data;
};

// The values that an atomic place has had in this launch, oldest first. A relaxed load may return any that nothing
// which it is ordered after has superseded.
struct AtomicEntry {
  uint64_t bits;
  int thread;  // -1: before the launch, or a plain store that all are ordered after.
  uint32_t clock;
  std::vector<uint32_t> released;  // What an acquiring load comes after; empty without a release.
  bool is_block_scope;
  std::vector<std::pair<int, uint32_t>> seen;  // Loads that returned it: thread and clock.
};

struct AtomicPlace {
  uint32_t size;
  std::vector<AtomicEntry> entries;
};

}  // namespace simt::prover
