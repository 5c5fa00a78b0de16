// CPU launchers of the row store's operators that need no store: ids and rows in memory or in files.
#include <torch/csrc/stable/library.h>

#include "checkpoint/rectangle_read.h"
#include "common/huge_pages.h"
#include "common/regimes.h"
#include "kvstore/args.h"
#include "kvstore/saved.h"

namespace {

using namespace fastimpl;
using namespace fastimpl::kvstore;

constexpr int64_t kReadBytes = regime(1 << 20, 100);  // Less is not worth another thread.

// Ids by bucket, ascending inside, the buckets' counts, and how many ids were outside [begin, end): nothing is sorted
// when there are any.
std::tuple<Tensor, Tensor, int64_t> kvstore_sort_ids(Tensor ids, int64_t total_count, int64_t bucket_size,
                                                     int64_t begin, int64_t end) {
  check(ids, ScalarType::Long, 1, "ids");
  STD_TORCH_CHECK(total_count >= 1 && bucket_size >= 0 && begin >= 0 && begin <= end && end <= total_count,
                  "buckets: got ", begin, " to ", end, " of ", total_count);
  Tensor sorted = torch::stable::new_empty(ids, {ids.numel(), 1}),
         counts = torch::stable::new_empty(ids, {end - begin, 1});
  const auto* const keys = static_cast<const int64_t*>(ids.data_ptr());
  // Ids go to places all over it.
  advise_huge_pages(sorted.data_ptr(), static_cast<size_t>(ids.numel()) * sizeof(int64_t));
  const int64_t outside =
      sort_by_bucket(parallel_of(), keys, ids.numel(), {total_count, bucket_size}, begin, end,
                     static_cast<int64_t*>(sorted.data_ptr()), static_cast<int64_t*>(counts.data_ptr()));
  return {sorted, counts, outside};
}

// The keys of whole rows.
Tensor kvstore_keys(Tensor rows) {
  check(rows, ScalarType::Byte, 2, "rows");
  STD_TORCH_CHECK(rows.size(1) >= kHeaderBytes, "rows: got ", rows.size(1), " bytes, expected a header at least");
  Tensor keys = torch::stable::new_empty(rows, {rows.size(0)}, ScalarType::Long);
  read_keys(parallel_of(), static_cast<const uint8_t*>(rows.data_ptr()), rows.size(0), rows.size(1),
            static_cast<int64_t*>(keys.data_ptr()));
  return keys;
}

// Whether saved rows are what they should be; `ends`: the number of rows up to the end of each bucket.
bool kvstore_saved_fit(Tensor rows, Tensor ids, Tensor ends, int64_t start, int64_t bucket_size) {
  check(rows, ScalarType::Byte, 2, "rows");
  check(ends, ScalarType::Long, 1, "ends");
  const int64_t* const keys = ids_of(ids);
  STD_TORCH_CHECK(rows.size(0) == ids.numel() && rows.size(1) >= kHeaderBytes && ends.numel() >= 1 && start >= 0 &&
                      bucket_size >= 0,
                  "rows: got [", rows.size(0), ", ", rows.size(1), "] for ", ids.numel(), " ids and ", ends.numel(),
                  " buckets");
  return fits(parallel_of(), static_cast<const uint8_t*>(rows.data_ptr()), keys, ids.numel(), rows.size(1), start,
              {{ends.numel(), bucket_size}, static_cast<const int64_t*>(ends.data_ptr()), ends.numel()});
}

// Fills dense with the file's bytes from `begin` on; a tensor of one status, since torch's functionalization takes no
// other result of an operator that writes: 0, an errno, or kEndOfFile. By the threads that work on the rows afterwards:
// others would have to compete with them, who wait for work awake.
Tensor kvstore_read_file(int64_t file, int64_t begin, Tensor dense) {
  STD_TORCH_CHECK(dense.is_contiguous() && dense.is_cpu(), "dense: not a contiguous CPU tensor");
  auto* const to = static_cast<uint8_t*>(dense.data_ptr());
  const int64_t byte_count = dense.numel() * static_cast<int64_t>(dense.element_size());
  const Parallel parallel = parallel_of();
  std::atomic<int64_t> status{0};
  parallel.run_ranges(byte_count, kReadBytes, [&](int64_t first, int64_t last) {
    ReadCounts counts;
    const int64_t found = read_fully(static_cast<int>(file), to + first, last - first, begin + first, &counts);
    if (found != 0) status = found;
  });
  Tensor result = torch::stable::new_empty(dense, {1}, ScalarType::Long);
  *static_cast<int64_t*>(result.data_ptr()) = status;
  return result;
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(twinproof, CPU, m) {
  m.impl("kvstore_sort_ids", TORCH_BOX(&kvstore_sort_ids));
  m.impl("kvstore_keys", TORCH_BOX(&kvstore_keys));
  m.impl("kvstore_read_file", TORCH_BOX(&kvstore_read_file));
  m.impl("kvstore_saved_fit", TORCH_BOX(&kvstore_saved_fit));
}
