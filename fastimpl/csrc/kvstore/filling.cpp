// CPU launchers of the row store's operators that fill an empty table from a file: open, rows in order, publish.
#include "checkpoint/rectangle_read.h"
#include "kvstore/args.h"
#include "kvstore/handles.h"

namespace {

using namespace fastimpl;
using namespace fastimpl::kvstore;

constexpr int64_t kOutOfMemory = -1, kRefused = 1;

// A handle of rows that wait for a table, with memory for `row_count` of them; size 0 where memory ran out. `ahead`:
// how many changes of the store will come between now and their publishing.
Tensor kvstore_fill_open(Tensor handle, int64_t table_index, int64_t row_count, int64_t ahead) {
  const auto source = Handles::table().get(handle);
  STD_TORCH_CHECK(source->moment.empty() && !source->filling, "handle: not a store's");
  STD_TORCH_CHECK(row_count >= 0 && ahead >= 0, "row_count, ahead: got ", row_count, ", ", ahead);
  Table& table = source->table(table_index);
  const auto opened = std::make_shared<Source>(source->store);
  try {
    opened->filling =
        std::make_unique<Filling>(table, source->store->version.load() + 1 + static_cast<uint64_t>(ahead));
    reserve_rows(opened->filling->rows, parallel_of(), row_count);
  } catch (const std::bad_alloc&) {
    return torch::stable::new_empty(handle, {0}, ScalarType::Long);
  }
  return Handles::table().add(opened);
}

Filling& filling_of(const std::shared_ptr<Source>& source) {
  STD_TORCH_CHECK(source->filling, "handle: not a filling's");
  return *source->filling;
}

// Adds rows whose bytes begin at byte `begin` of a file and whose ids are `ids`; `start`, `ends` and `bucket_size` as
// in kvstore_saved_fit. kRefused: they are not what was saved, or cannot be read.
int64_t kvstore_fill(Tensor filling, int64_t file, int64_t begin, Tensor ids, Tensor ends, int64_t start,
                     int64_t bucket_size) {
  const auto source = Handles::table().get(filling);
  Filling& filled = filling_of(source);
  const int64_t* const keys = ids_of(ids);
  check(ends, ScalarType::Long, 1, "ends");
  STD_TORCH_CHECK(ends.numel() >= 1 && start >= 0 && bucket_size >= 0 && begin >= 0, "start, bucket_size, begin: got ",
                  start, ", ", bucket_size, ", ", begin);
  const int64_t row_bytes = filled.table.format.row_bytes;
  const ReadRows read = [=](uint8_t* to, int64_t first, int64_t count) {
    ReadCounts counts;
    return read_fully(static_cast<int>(file), to, count * row_bytes, begin + (first - start) * row_bytes, &counts) == 0;
  };
  const SavedOrder order{{ends.numel(), bucket_size}, static_cast<const int64_t*>(ends.data_ptr()), ends.numel()};
  try {
    return fill_rows(filled, parallel_of(), read, keys, ids.numel(), start, order) ? 0 : kRefused;
  } catch (const std::bad_alloc&) {
    return kOutOfMemory;
  }
}

// Makes the rows the table's. kRefused: it is not empty.
int64_t kvstore_fill_publish(Tensor filling) {
  const auto source = Handles::table().get(filling);
  Filling& filled = filling_of(source);
  try {
    const std::lock_guard<FairSharedMutex> held(filled.table.lock);
    return publish(filled, parallel_of(), {0, 0, &source->store->version}) ? 0 : kRefused;
  } catch (const std::bad_alloc&) {
    return kOutOfMemory;
  }
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(twinproof, CPU, m) {
  m.impl("kvstore_fill_open", TORCH_BOX(&kvstore_fill_open));
  m.impl("kvstore_fill", TORCH_BOX(&kvstore_fill));
  m.impl("kvstore_fill_publish", TORCH_BOX(&kvstore_fill_publish));
}
