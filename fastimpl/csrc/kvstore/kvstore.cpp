// CPU launchers of the row store's operators: checks first, then one kernel call for each batch.
//
// Operators that may run out of memory or capacity return a status, of which the caller, who knows the table's name,
// makes the error: 0, kOutOfMemory, or the number of distinct ids that were too many.
#include "kvstore/args.h"
#include "kvstore/handles.h"
#include "kvstore/words.h"

namespace {

using namespace fastimpl;
using namespace fastimpl::kvstore;
using torch::headeronly::ScalarType;

constexpr int64_t kOutOfMemory = -1;

template <typename Values = std::vector<int64_t>>
Tensor longs(const Tensor& like, const Values& values) {
  Tensor result = torch::stable::new_empty(like, {static_cast<int64_t>(values.size())}, ScalarType::Long);
  if (!values.empty()) std::copy(values.begin(), values.end(), static_cast<int64_t*>(result.data_ptr()));
  return result;
}

// Row `index` of a matrix of messages. Raises where the caller was built for another version.
template <typename Message>
Message read_message(const Tensor& words, int64_t index, const char* name) {
  constexpr int64_t kCount = sizeof(Message) / sizeof(int64_t);
  check(words, ScalarType::Long, 2, name);
  STD_TORCH_CHECK(words.size(1) == kCount && index < words.size(0), name, ": got ", words.size(1), " words, expected ",
                  kCount);
  Message message;
  std::memcpy(&message, static_cast<const int64_t*>(words.data_ptr()) + index * kCount, sizeof message);
  STD_TORCH_CHECK(message.version == Message::kVersion, name, ": got version ", message.version, ", expected ",
                  Message::kVersion);
  return message;
}

Tensor kvstore_create(Tensor formats, int64_t shard_count) {
  STD_TORCH_CHECK(formats.size(0) >= 1, "formats: got no table");
  STD_TORCH_CHECK(shard_count >= 1 && shard_count <= 4096, "shard_count: got ", shard_count, ", expected 1 to 4096");
  auto store = std::make_shared<Store>();
  for (int64_t t = 0; t < formats.size(0); ++t) {
    const RowFormat format = format_of(read_message<TableMessage>(formats, t, "formats"));
    STD_TORCH_CHECK(is_sound(format), "formats: table ", t, " has slots outside its row");
    store->tables.push_back(std::make_unique<Table>(format, shard_count));
  }
  return Handles::table().add(std::make_shared<Source>(std::move(store)));
}

void kvstore_close(Tensor handle) { Handles::table().close(handle); }

void kvstore_read(Tensor handle, int64_t table_index, Tensor ids, int64_t begin, int64_t end, Tensor out) {
  const auto source = Handles::table().get(handle);
  const Table& table = source->table(table_index);
  const int64_t* const keys = ids_of(ids);
  STD_TORCH_CHECK(begin >= 0 && begin <= end && end <= table.format.row_bytes, "range: got ", begin, " to ", end,
                  " of a row of ", table.format.row_bytes);
  STD_TORCH_CHECK(out.is_contiguous() && out.is_cpu(), "out: not a contiguous CPU tensor");
  STD_TORCH_CHECK(out.numel() * static_cast<int64_t>(out.element_size()) == ids.numel() * (end - begin), "out: got ",
                  out.numel(), " elements for ", ids.numel(), " rows of ", end - begin, " bytes");
  if (ids.numel() == 0 || begin == end) return;
  const std::shared_lock<FairSharedMutex> held(table.lock);
  read_rows(table, parallel_of(), keys, ids.numel(), {begin, end}, static_cast<uint8_t*>(out.data_ptr()),
            source->overlay(table_index));
}

Tensor kvstore_contains(Tensor handle, int64_t table_index, Tensor ids) {
  const auto source = Handles::table().get(handle);
  const Table& table = source->table(table_index);
  const int64_t* const keys = ids_of(ids);
  Tensor result = torch::stable::new_empty(ids, {ids.numel()}, ScalarType::Bool);
  const std::shared_lock<FairSharedMutex> held(table.lock);
  contains_rows(table, parallel_of(), keys, ids.numel(), static_cast<bool*>(result.data_ptr()),
                source->overlay(table_index));
  return result;
}

Tensor kvstore_ids(Tensor handle, int64_t table_index, int64_t first, int64_t last) {
  const auto source = Handles::table().get(handle);
  const Table& table = source->table(table_index);
  const std::shared_lock<FairSharedMutex> held(table.lock);
  return longs(handle, list_ids(table, parallel_of(), first, last, source->overlay(table_index)));
}

int64_t kvstore_size(Tensor handle, int64_t table_index) {
  const auto source = Handles::table().get(handle);
  const Table& table = source->table(table_index);
  const std::shared_lock<FairSharedMutex> held(table.lock);
  return count_rows(table, source->overlay(table_index));
}

// Ids that changed, ids that went, and the first mark that could be asked about when they were listed.
std::tuple<Tensor, Tensor, int64_t> kvstore_changes(Tensor handle, int64_t table_index, int64_t since) {
  const auto source = Handles::table().get(handle);
  const Table& table = source->table(table_index);
  const std::shared_lock<FairSharedMutex> held(table.lock);
  const Overlay* const moment = source->overlay(table_index);
  return {longs(handle, list_changed(table, parallel_of(), static_cast<uint64_t>(since), moment)),
          longs(handle, list_removed(table, parallel_of(), static_cast<uint64_t>(since), moment)),
          static_cast<int64_t>(moment == nullptr ? source->store->first_mark : source->moment_first_mark)};
}

// The number of the last change that is complete in every table.
int64_t kvstore_mark(Tensor handle) {
  const auto source = Handles::table().get(handle);
  if (!source->moment.empty()) return static_cast<int64_t>(source->moment[0]->version);
  std::vector<std::shared_lock<FairSharedMutex>> held;
  for (const auto& table : source->store->tables) held.emplace_back(table->lock);
  return static_cast<int64_t>(source->store->version.load());
}

// Drops what only marks before `mark` need, of all tables or, where memory runs out, of none; a status.
int64_t kvstore_forget(Tensor handle, int64_t mark) {
  const auto source = Handles::table().get(handle);
  STD_TORCH_CHECK(source->moment.empty(), "handle: a snapshot forgets nothing");
  Store& store = *source->store;
  std::vector<std::unique_lock<FairSharedMutex>> held;
  for (const auto& table : store.tables) held.emplace_back(table->lock);
  const auto first_mark = std::max(store.first_mark, static_cast<uint64_t>(mark));
  std::vector<std::shared_ptr<Removals>> logs;
  try {
    for (const auto& table : store.tables) logs.push_back(removals_since(*table, first_mark));
  } catch (const std::bad_alloc&) {
    return kOutOfMemory;
  }
  for (size_t i = 0; i < logs.size(); ++i) store.tables[i]->set_removals(std::move(logs[i]));
  store.first_mark = first_mark;
  return 0;
}

// Runs one change of one table under its lock and turns what it throws into a status. A change that throws, or that
// does not begin, has no number.
template <typename Body>
int64_t change_table(const Tensor& handle, int64_t table_index, int64_t now, Body&& body) {
  const auto source = Handles::table().get(handle);
  STD_TORCH_CHECK(source->moment.empty(), "handle: a snapshot cannot be written");
  Table& table = source->table(table_index);
  try {
    const std::lock_guard<FairSharedMutex> held(table.lock);
    body(table, Change{0, static_cast<uint64_t>(now), &source->store->version});
  } catch (const std::bad_alloc&) {
    return kOutOfMemory;
  } catch (const CapacityExceeded& exceeded) {
    return exceeded.distinct_count;
  }
  return 0;
}

int64_t kvstore_write(Tensor handle, int64_t table_index, Tensor ids, Tensor values, int64_t begin, int64_t now,
                      bool visit) {
  const int64_t* const keys = ids_of(ids);
  check(values, ScalarType::Byte, 2, "values");
  STD_TORCH_CHECK(values.size(0) == ids.numel(), "values: got ", values.size(0), " rows for ", ids.numel(), " ids");
  const int64_t row_bytes = Handles::table().get(handle)->table(table_index).format.row_bytes;
  STD_TORCH_CHECK(begin >= kHeaderBytes && values.size(1) <= row_bytes - begin, "values: got ", values.size(1),
                  " bytes from byte ", begin, " on of a row of ", row_bytes);
  const Range range{begin, begin + values.size(1)};
  return change_table(handle, table_index, now, [&](Table& table, Change change) {
    write_values(table, parallel_of(), keys, ids.numel(), static_cast<const uint8_t*>(values.data_ptr()), range, visit,
                 change);
  });
}

int64_t kvstore_write_rows(Tensor handle, int64_t table_index, Tensor ids, Tensor rows) {
  const int64_t* const keys = ids_of(ids);
  check(rows, ScalarType::Byte, 2, "rows");
  const int64_t row_bytes = Handles::table().get(handle)->table(table_index).format.row_bytes;
  STD_TORCH_CHECK(rows.size(0) == ids.numel() && rows.size(1) == row_bytes, "rows: got [", rows.size(0), ", ",
                  rows.size(1), "], expected [", ids.numel(), ", ", row_bytes, "]");
  return change_table(handle, table_index, 0, [&](Table& table, Change change) {
    write_whole(table, parallel_of(), keys, ids.numel(), static_cast<const uint8_t*>(rows.data_ptr()), change);
  });
}

int64_t kvstore_write_metadata(Tensor handle, int64_t table_index, Tensor ids, Tensor words, int64_t mask) {
  const int64_t* const keys = ids_of(ids);
  check(words, ScalarType::Long, 1, "words");
  STD_TORCH_CHECK(words.numel() == ids.numel(), "words: got ", words.numel(), " for ", ids.numel(), " ids");
  return change_table(handle, table_index, 0, [&](Table& table, Change change) {
    write_metadata(table, parallel_of(), keys, ids.numel(), static_cast<const int64_t*>(words.data_ptr()),
                   static_cast<uint64_t>(mask), change);
  });
}

// `hyper`: float64 [8], each rounded to float32 here.
int64_t kvstore_update(Tensor handle, int64_t table_index, Tensor ids, Tensor grads, Tensor hyper, int64_t now,
                       int64_t step) {
  const int64_t* const keys = ids_of(ids);
  check(grads, ScalarType::Float, 2, "grads");
  check(hyper, ScalarType::Double, 1, "hyper");
  const int64_t dim = Handles::table().get(handle)->table(table_index).format.dim;
  STD_TORCH_CHECK(hyper.numel() == 8 && grads.size(0) == ids.numel() && grads.size(1) == dim, "grads: got [",
                  grads.size(0), ", ", grads.size(1), "], expected [", ids.numel(), ", ", dim, "]");
  const Hyper values = hyper_of(static_cast<const double*>(hyper.data_ptr()));
  return change_table(handle, table_index, now, [&](Table& table, Change change) {
    update_rows(table, parallel_of(), keys, ids.numel(), static_cast<const float*>(grads.data_ptr()), values, change);
    table.step = step;
  });
}

void kvstore_set_step(Tensor handle, int64_t table_index, int64_t step) {
  const auto source = Handles::table().get(handle);
  STD_TORCH_CHECK(source->moment.empty(), "handle: a snapshot cannot be written");
  source->table(table_index).step = step;
}

int64_t kvstore_step(Tensor handle, int64_t table_index) {
  const auto source = Handles::table().get(handle);
  const Table& table = source->table(table_index);
  return source->moment.empty() ? table.step.load() : source->moment_steps[static_cast<size_t>(table_index)];
}

// Returns [status, rows removed].
Tensor kvstore_delete(Tensor handle, int64_t table_index, Tensor ids) {
  const int64_t* const keys = ids_of(ids);
  int64_t removed_count = 0;
  const int64_t status = change_table(handle, table_index, 0, [&](Table& table, Change change) {
    removed_count = remove_rows(table, parallel_of(), keys, ids.numel(), change);
  });
  return longs(handle, {status, removed_count});
}

int64_t kvstore_clear(Tensor handle, int64_t table_index) {
  return change_table(handle, table_index, 0, [&](Table& table, Change change) {
    const auto all = list_ids(table, parallel_of(), INT64_MIN, INT64_MAX, nullptr);
    remove_rows(table, parallel_of(), all.data(), static_cast<int64_t>(all.size()), change);
  });
}

// The ids of this moment, and [mark, has cutoff, score, key] of it; a cutoff only where keep_count is above 0.
std::tuple<Tensor, Tensor> kvstore_begin_round(Tensor handle, int64_t table_index, int64_t keep_count) {
  const auto source = Handles::table().get(handle);
  STD_TORCH_CHECK(source->moment.empty(), "handle: a snapshot cannot be written");
  const Table& table = source->table(table_index);
  const std::shared_lock<FairSharedMutex> held(table.lock);
  std::vector<int64_t> facts{static_cast<int64_t>(source->store->version.load()), 0, 0, 0};
  if (keep_count > 0 && keep_count < table.rows.pool.size()) {
    const Ranked cutoff = score_cutoff(table, keep_count);
    facts = {facts[0], 1, static_cast<int64_t>(cutoff.rank), cutoff.key};
  }
  return {longs(handle, list_ids(table, parallel_of(), INT64_MIN, INT64_MAX, nullptr)), longs(handle, facts)};
}

// Returns [status, rows evicted].
Tensor kvstore_evict(Tensor handle, int64_t table_index, Tensor ids, Tensor plan) {
  const int64_t* const keys = ids_of(ids);
  const auto m = read_message<EvictionMessage>(plan, 0, "plan");
  STD_TORCH_CHECK(is_policy(m.policy), "plan: got policy ", m.policy);
  const EvictionPlan chosen = plan_of(m);
  int64_t evicted_count = 0;
  const int64_t status = change_table(handle, table_index, 0, [&](Table& table, Change change) {
    evicted_count = evict_rows(table, parallel_of(), keys, ids.numel(), chosen, change);
  });
  return longs(handle, {status, evicted_count});
}

int64_t kvstore_reserve(Tensor handle, int64_t table_index, int64_t row_count) {
  STD_TORCH_CHECK(row_count >= 0, "row_count: got ", row_count);
  return change_table(handle, table_index, 0,
                      [&](Table& table, Change) { reserve_rows(table.rows, parallel_of(), row_count); });
}

// Per table [rows, blocks, bytes of rows, bytes held for rows, bytes of maps, evicted, bytes of removals], and
// snapshots alive.
std::tuple<Tensor, int64_t> kvstore_stats(Tensor handle) {
  const auto source = Handles::table().get(handle);
  std::vector<int64_t> counts;
  for (const auto& table : source->store->tables) {
    const std::shared_lock<FairSharedMutex> held(table->lock);
    const RowPool& pool = table->rows.pool;
    int64_t row_count = 0, held_bytes = pool.held_bytes(), map_bytes = table->rows.map_bytes();
    for (int64_t s = 0; s < table->rows.shard_count(); ++s) row_count += table->rows.shard_at(s).size();
    for (const auto& overlay : table->overlays) {
      held_bytes += overlay->rows.pool.held_bytes();
      map_bytes += overlay->rows.map_bytes();
    }
    counts.insert(counts.end(), {row_count, pool.size(), row_count * pool.row_bytes(), held_bytes, map_bytes,
                                 table->evicted_count, table->log_bytes()});
  }
  return {longs(handle, counts), source->store->snapshot_count.load()};
}

// A handle of this moment, the same in every table; size 0 where memory ran out.
Tensor kvstore_snapshot(Tensor handle) {
  const auto source = Handles::table().get(handle);
  STD_TORCH_CHECK(source->moment.empty(), "handle: a snapshot of a snapshot");
  const auto taken = std::make_shared<Source>(source->store);
  Store& store = *source->store;
  std::vector<std::unique_lock<FairSharedMutex>> held;
  for (const auto& table : store.tables) held.emplace_back(table->lock);
  std::vector<Overlay*> moment;
  std::vector<int64_t> steps;
  try {
    for (const auto& table : store.tables) steps.push_back(table->step);
    moment.reserve(store.tables.size());
    for (const auto& table : store.tables) moment.push_back(table->take_snapshot(store.version.load()));
  } catch (const std::bad_alloc&) {
    for (size_t i = 0; i < moment.size(); ++i) store.tables[i]->overlays.pop_back();
    return longs(handle, {});
  }
  taken->moment = std::move(moment);
  taken->moment_first_mark = store.first_mark;
  taken->moment_steps = std::move(steps);
  ++store.snapshot_count;
  held.clear();
  return Handles::table().add(taken);
}

// Rows are where they are read: nothing is to be done.
int64_t kvstore_prefetch(Tensor handle, int64_t table_index, Tensor ids) {
  ids_of(ids);
  Handles::table().get(handle)->table(table_index);
  return 0;
}

// For tests: the allocation after `allocation_count` more fails, and every later one; -1 ends it.
void kvstore_fail_after(Tensor handle, int64_t table_index, int64_t allocation_count) {
  Handles::table().get(handle)->table(table_index).memory.fail_after(allocation_count);
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(twinproof, CPU, m) {
  m.impl("kvstore_create", TORCH_BOX(&kvstore_create));
  m.impl("kvstore_close", TORCH_BOX(&kvstore_close));
  m.impl("kvstore_read", TORCH_BOX(&kvstore_read));
  m.impl("kvstore_contains", TORCH_BOX(&kvstore_contains));
  m.impl("kvstore_ids", TORCH_BOX(&kvstore_ids));
  m.impl("kvstore_size", TORCH_BOX(&kvstore_size));
  m.impl("kvstore_changes", TORCH_BOX(&kvstore_changes));
  m.impl("kvstore_mark", TORCH_BOX(&kvstore_mark));
  m.impl("kvstore_forget", TORCH_BOX(&kvstore_forget));
  m.impl("kvstore_write", TORCH_BOX(&kvstore_write));
  m.impl("kvstore_write_rows", TORCH_BOX(&kvstore_write_rows));
  m.impl("kvstore_write_metadata", TORCH_BOX(&kvstore_write_metadata));
  m.impl("kvstore_update", TORCH_BOX(&kvstore_update));
  m.impl("kvstore_set_step", TORCH_BOX(&kvstore_set_step));
  m.impl("kvstore_step", TORCH_BOX(&kvstore_step));
  m.impl("kvstore_delete", TORCH_BOX(&kvstore_delete));
  m.impl("kvstore_clear", TORCH_BOX(&kvstore_clear));
  m.impl("kvstore_begin_round", TORCH_BOX(&kvstore_begin_round));
  m.impl("kvstore_evict", TORCH_BOX(&kvstore_evict));
  m.impl("kvstore_reserve", TORCH_BOX(&kvstore_reserve));
  m.impl("kvstore_stats", TORCH_BOX(&kvstore_stats));
  m.impl("kvstore_snapshot", TORCH_BOX(&kvstore_snapshot));
  m.impl("kvstore_prefetch", TORCH_BOX(&kvstore_prefetch));
  m.impl("kvstore_fail_after", TORCH_BOX(&kvstore_fail_after));
}
