// Accesses: bounds, alignment, order, and what atomics may see; a part of world.h.
#pragma once

#include <simt/world.h>

namespace simt::prover {

inline uint16_t World::number_of(Site site) {
  const auto found = site_numbers_.find({site.file, site.line});
  if (found != site_numbers_.end()) return found->second;
  const auto number = static_cast<uint16_t>(sites_.size());
  sites_.push_back(site);
  site_numbers_.emplace(std::make_pair(site.file, site.line), number);
  return number;
}

inline void World::stop_outside(const char* what, int64_t at, int64_t count, int64_t limit, Site site) {
  std::string message = std::string(what) + ": got element " + std::to_string(at);
  if (count > 1) message += " and " + std::to_string(count - 1) + " more";
  stop(kind::kOutOfBounds, message + " of a span of " + std::to_string(limit), {here(what, site)});
}

// The memory that a span begins in: a device array, or what the block shares. An access may not leave it.
inline Region& World::region_of(const void* base, const char* what, Site site) {
  const auto address = reinterpret_cast<uintptr_t>(base);
  Region& mine = *shared_[static_cast<size_t>(block())];
  if (mine.contains(address)) return mine;
  for (const auto& region : regions_) {
    if (region->contains(address)) return *region;
  }
  stop(kind::kNotDevice, std::string(what) + " through a span that begins in no array of the device",
       {here(what, site)});
}

// Checks that an access lies in the memory that its span begins in, at a multiple of the alignment. Returns where.
inline std::pair<Region*, int64_t> World::locate(const void* base, const void* at, int64_t size, int64_t alignment,
                                                 const char* what, Site site) {
  Region& region = region_of(base, what, site);
  const int64_t offset = static_cast<const uint8_t*>(at) - region.data;
  if (offset < 0 || offset + size > region.size) {
    stop(kind::kOutOfBounds,
         std::string(what) + " of bytes " + std::to_string(offset) + " to " + std::to_string(offset + size) + " of " +
             region.name + ", which has " + std::to_string(region.size),
         {here(what, site)});
  }
  if (reinterpret_cast<uintptr_t>(at) % static_cast<uintptr_t>(alignment) != 0) {
    stop(kind::kMisaligned,
         std::string(what) + " of " + std::to_string(size) + " bytes at byte " + std::to_string(offset) + " of " +
             region.name + ", whose address is no multiple of " + std::to_string(alignment),
         {here(what, site)});
  }
  return {&region, offset};
}

inline void World::touch(const void* base, const void* at, int64_t size, int64_t alignment, bool writes,
                         const char* what, Site site) {
  me().site = site;
  yield({reinterpret_cast<uintptr_t>(at), static_cast<uint32_t>(size), writes, false});
  const auto [region, offset] = locate(base, at, size, alignment, what, site);
  record(*region, offset, size,
         {row(now_)[now_], static_cast<uint16_t>(now_), number_of(site), 0, writes, false, false}, site);
  if (writes) {
    std::fill_n(region->is_written.begin() + offset, size, uint8_t{1});
    if (!atomics_.empty()) forget_atomics(at, size);
  } else {
    check_written(*region, offset, size, site);
  }
}

inline void World::check_written(const Region& region, int64_t offset, int64_t size, Site site) {
  for (int64_t i = offset; i < offset + size; ++i) {
    if (region.is_written[static_cast<size_t>(i)] == 0)
      stop(kind::kUninitialized,
           "load of byte " + std::to_string(i) + " of " + region.name + ", which nobody has written",
           {here("load", site)});
  }
}

inline void World::stop_race(const Region& region, int64_t offset, const Access& old, const Access& now, Site site) {
  const bool is_old_copy = old.agent >= total_, is_now_copy = now.agent >= total_;
  const bool is_own = old.agent % total_ == now.agent % total_;
  std::string message = std::string(verb_of(now, is_now_copy)) + " of byte " + std::to_string(offset) + " of " +
                        region.name + " is not ordered after the " + verb_of(old, is_old_copy) +
                        (is_own ? " of this thread, which was not waited for" : " by another thread");
  if (old.is_atomic && now.is_atomic) message += ": the scope is the block, and it is another block";
  stop(kind::kRace, message,
       {here(verb_of(now, is_now_copy), site),
        place_of(old.agent % total_, verb_of(old, is_old_copy), sites_[old.site])});
}

// Compares an access with an earlier one. Returns whether the earlier one may be forgotten: whatever comes after this
// access, and races with the earlier one, races with this one too.
inline bool World::compare(const Region& region, int64_t offset, const Access& old, const Access& access, Site site) {
  if ((old.bytes & access.bytes) == 0) return false;
  const bool is_one_block = block_of(old.agent) == block();
  if (row(now_)[old.agent] < old.clock) {
    const bool is_strong =
        old.is_atomic && access.is_atomic && (is_one_block || (!old.is_block_scope && !access.is_block_scope));
    if (!is_strong) stop_race(region, offset, old, access, site);
    return false;
  }
  const bool is_as_strict = !access.is_atomic || (old.is_atomic && old.is_block_scope == access.is_block_scope &&
                                                  (is_one_block || !old.is_block_scope));
  return access.writes && is_as_strict && (old.bytes & ~access.bytes) == 0;
}

inline void World::record_word(Region& region, int64_t offset, const Access& access, Site site) {
  Cell& cell = region.cells[static_cast<size_t>(region.word_of(offset))];
  if (cell.generation != generation_) {
    cell.generation = generation_;
    cell.writes.clear();
    cell.loads.clear();
  }
  for (int i = 0; i < cell.writes.size();) {
    if (compare(region, offset, cell.writes[i], access, site)) {
      cell.writes.remove(i);
    } else {
      ++i;
    }
  }
  if (!access.writes) {
    for (int i = 0; i < cell.loads.size(); ++i) {
      Access& old = cell.loads[i];
      if (old.agent != access.agent || old.bytes != access.bytes || old.is_atomic != access.is_atomic ||
          old.is_block_scope != access.is_block_scope)
        continue;
      old.clock = access.clock;
      old.site = access.site;
      return;
    }
    return cell.loads.add(access);
  }
  for (int i = 0; i < cell.loads.size();) {
    if (compare(region, offset, cell.loads[i], access, site)) {
      cell.loads.remove(i);
    } else {
      ++i;
    }
  }
  cell.writes.add(access);
}

// Compares an access with those that it may race with, and remembers it.
inline void World::record(Region& region, int64_t offset, int64_t size, Access access, Site site) {
  const auto begin = reinterpret_cast<uintptr_t>(region.data) + static_cast<uintptr_t>(offset);
  for (uintptr_t at = begin; at < begin + static_cast<uintptr_t>(size);) {
    const uintptr_t first = at % 4, count = std::min<uintptr_t>(4 - first, begin + static_cast<uintptr_t>(size) - at);
    access.bytes = static_cast<uint8_t>(((1U << count) - 1) << first);
    record_word(region, offset + static_cast<int64_t>(at - begin), access, site);
    at += count;
  }
}

inline void World::forget_atomics(const void* at, int64_t size) {
  const auto begin = reinterpret_cast<uintptr_t>(at) & ~uintptr_t{7};
  for (uintptr_t place = begin; place < reinterpret_cast<uintptr_t>(at) + static_cast<uintptr_t>(size); place += 4)
    atomics_.erase(place);
}

// A load finds a value; what changes one, does too.
inline void World::touch_atomic(const Atomic& access, bool loads, bool writes, const char* what) {
  const Site site = access.site;
  me().site = site;
  yield({reinterpret_cast<uintptr_t>(access.at), access.size, writes, true});
  const auto [region, offset] = locate(access.base, access.at, access.size, access.size, what, site);
  record(
      *region, offset, access.size,
      {row(now_)[now_], static_cast<uint16_t>(now_), number_of(site), 0, writes, true, access.scope == Scope::kBlock},
      site);
  if (loads) check_written(*region, offset, access.size, site);
  if (writes) std::fill_n(region->is_written.begin() + offset, access.size, uint8_t{1});
}

inline AtomicPlace& World::atomic_place(const Atomic& access) {
  const auto address = reinterpret_cast<uintptr_t>(access.at);
  const uint32_t size = access.size;
  const auto differs = [&](uintptr_t place, uint32_t other) {
    const auto found = atomics_.find(place);
    return found != atomics_.end() && found->second.size == other;
  };
  if (differs(address, 12 - size) || (size == 8 && differs(address + 4, 4)) ||
      (size == 4 && address % 8 == 4 && differs(address - 4, 8)))
    stop(kind::kMixedAtomics, "atomic accesses of 4 and of 8 bytes meet", {here("atomic access", access.site)});
  AtomicPlace& place = atomics_[address];
  if (place.entries.empty()) {
    uint64_t bits = 0;
    std::memcpy(&bits, access.at, size);
    place.size = size;
    place.entries.push_back({bits, -1, 0, {}, false, {}});
  }
  return place;
}

// An acquiring load comes after what was released to it; a relaxed one does after a fence.
inline void World::take(const AtomicEntry& entry, Order order, Scope scope) {
  if (entry.released.empty() || !includes(entry, scope)) return;
  if (order == Order::kAcquire || order == Order::kAcqRel) {
    join(row(now_), entry.released.data());
  } else {
    join(&me().to_acquire, entry.released.data());
  }
}

inline uint64_t World::atomic_load(const Atomic& access) {
  touch_atomic(access, true, false, "atomic load");
  AtomicPlace& place = atomic_place(access);
  const Clock* const mine = row(now_);
  const auto newest = static_cast<int>(place.entries.size()) - 1;
  // The newest entry that this thread knows of: by having written or seen it, or by order.
  int oldest = newest;
  for (; oldest > 0; --oldest) {
    const AtomicEntry& entry = place.entries[static_cast<size_t>(oldest)];
    const bool is_known = (entry.thread >= 0 && mine[entry.thread] >= entry.clock) ||
                          std::any_of(entry.seen.begin(), entry.seen.end(),
                                      [mine](const auto& load) { return mine[load.first] >= load.second; });
    if (is_known) break;
  }
  AtomicEntry& entry = place.entries[static_cast<size_t>(newest - schedule_->choose(newest - oldest + 1))];
  const std::pair<int, Clock> load{now_, mine[now_]};
  if (std::find(entry.seen.begin(), entry.seen.end(), load) == entry.seen.end()) entry.seen.push_back(load);
  take(entry, access.order, access.scope);
  return entry.bits;
}

inline void World::add_entry(AtomicPlace& place, uint64_t bits, Order order, Scope scope,
                             const std::vector<Clock>* inherited) {
  constexpr size_t kKept = 16;
  AtomicEntry entry{bits, now_, row(now_)[now_], {}, scope == Scope::kBlock, {}};
  if (inherited != nullptr && !inherited->empty()) join(&entry.released, inherited->data());
  if (order == Order::kRelease || order == Order::kAcqRel) {
    join(&entry.released, row(now_));
    ++row(now_)[now_];
  } else if (!me().released.empty()) {
    join(&entry.released, me().released.data());
    entry.is_block_scope |= me().is_release_block_scope;
  }
  place.entries.push_back(std::move(entry));
  if (place.entries.size() > kKept) place.entries.erase(place.entries.begin());
}

inline void World::atomic_store(const Atomic& access, uint64_t bits) {
  touch_atomic(access, false, true, "atomic store");
  add_entry(atomic_place(access), bits, access.order, access.scope, nullptr);
  std::memcpy(access.at, &bits, access.size);
}

// Reads the newest value, as every atomic change does, and stores what `change` makes of it.
template <typename Change>
uint64_t World::atomic_change(const Atomic& access, const Change& change) {
  touch_atomic(access, true, true, "atomic change");
  AtomicPlace& place = atomic_place(access);
  const AtomicEntry last = place.entries.back();
  take(last, access.order, access.scope);
  uint64_t bits = last.bits;
  if (change(&bits)) {
    add_entry(place, bits, access.order, access.scope, &last.released);
    std::memcpy(access.at, &bits, access.size);
  } else {
    place.entries.back().seen.emplace_back(now_, row(now_)[now_]);
  }
  return last.bits;
}

inline void World::fence(Scope scope) {
  yield({});
  Fiber& fiber = me();
  if (!fiber.to_acquire.empty()) join(row(now_), fiber.to_acquire.data());
  fiber.to_acquire.clear();
  fiber.released.assign(row(now_), row(now_) + 2 * total_);
  fiber.is_release_block_scope = scope == Scope::kBlock;
  ++row(now_)[now_];
}

inline uint8_t* World::shared_part(int64_t offset_bytes, int64_t bytes, int64_t alignment, Site site) {
  Region& region = *shared_[static_cast<size_t>(block())];
  if (offset_bytes < 0 || bytes < 0 || offset_bytes + bytes > region.size)
    stop(kind::kOutOfBounds,
         "shared: got bytes " + std::to_string(offset_bytes) + " to " + std::to_string(offset_bytes + bytes) +
             ", the launch gives " + std::to_string(region.size),
         {here("shared", site)});
  if (offset_bytes % alignment != 0)
    stop(kind::kMisaligned,
         "shared: got offset " + std::to_string(offset_bytes) + ", expected a multiple of " + std::to_string(alignment),
         {here("shared", site)});
  return region.data + offset_bytes;
}

// The copy is an agent of its own: what it reads and writes is ordered after what this thread did before, and before
// what it does after waiting. When the bytes move is chosen: at once, or when they are waited for.
inline void World::copy_async(const Span& to, const Span& from, int bytes, int valid_bytes, Site site) {
  me().site = site;
  yield({});
  const auto [target, to_offset] = locate(to.base, to.at, bytes, bytes, "copy_async", site);
  const auto [source, from_offset] = locate(from.base, from.at, valid_bytes, bytes, "copy_async", site);
  Fiber& fiber = me();
  width_ = 2 * total();
  const auto agent = static_cast<uint16_t>(total() + now_);
  const Clock clock = ++fiber.copy_clock;
  const uint16_t number = number_of(site);
  check_written(*source, from_offset, valid_bytes, site);
  record(*source, from_offset, valid_bytes, {clock, agent, number, 0, false, false, false}, site);
  record(*target, to_offset, bytes, {clock, agent, number, 0, true, false, false}, site);
  std::fill_n(target->is_written.begin() + to_offset, bytes, uint8_t{1});
  const AsyncCopy copy{target->data + to_offset, source->data + from_offset, bytes, valid_bytes, fiber.group, clock};
  if (schedule_->choose(2) == 1) copy.move();
  fiber.copies.push_back(copy);
}

inline void World::wait_copies(int64_t left) {
  yield({});
  Fiber& fiber = me();
  while (!fiber.copies.empty() && fiber.copies.front().group < fiber.group - left) {
    const AsyncCopy& copy = fiber.copies.front();
    copy.move();
    row(now_)[total_ + now_] = std::max(row(now_)[total_ + now_], copy.clock);
    fiber.copies.pop_front();
  }
}

}  // namespace simt::prover
