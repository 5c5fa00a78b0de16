// Checks, places and movement of ids, gradients of weights, and words that launches carry: the host's numbers, and no
// memory but theirs whatever is given.
#include "planted.h"

#include "ids.h"

using namespace id_cases;

SIMT_PROOF("words of a launch") { prove_words(trial); }
SIMT_PROOF("checks") { prove_checks<int64_t>(trial); }
SIMT_PROOF("places") { prove_places<int32_t>(trial); }
SIMT_PROOF("gradients of weights") { prove_weight_gradients<int64_t>(trial); }
SIMT_PROOF("blocks") { prove_gathering<uint32_t>(trial); }
SIMT_PROOF("buckets") { prove_buckets<int32_t>(trial); }
SIMT_PROOF("four bytes where they fit") {
  const auto fits = [](int64_t rows, int64_t ids) { return plan_sort(rows, ids).is_narrow; };
  trial.expect(fits(kNarrowMax, 1) && !fits(kNarrowMax + 1, 1), "the row of none has to fit");
  trial.expect(fits(1, kNarrowMax + 1) && !fits(1, kNarrowMax + 2), "the last position has to fit");
  for (const int64_t rows :
       {int64_t{0}, int64_t{1}, int64_t{2}, int64_t{255}, int64_t{256}, kNarrowMax, kNarrowMax + 1}) {
    const int bits = plan_sort(rows, 1).bits;
    trial.expect((rows >> bits) == 0 && (bits == 1 || (rows >> (bits - 1)) != 0),
                 "as many bits as the row of none has");
    trial.expect(!plan_sort(rows, 1).is_narrow || bits <= 32, "no bits but those of a word");
  }
}
// A planted fault is in all: half the kernels compile in half the time.
#if !defined(SIMT_PLANTED)
SIMT_PROOF("checks int32") { prove_checks<int32_t>(trial); }
SIMT_PROOF("places int64") { prove_places<int64_t>(trial); }
SIMT_PROOF("gradients of weights int32") { prove_weight_gradients<int32_t>(trial); }
SIMT_PROOF("blocks of bytes") { prove_gathering<uint8_t>(trial); }
SIMT_PROOF("blocks of words") { prove_gathering<uint64_t>(trial); }
SIMT_PROOF("buckets int64") { prove_buckets<int64_t>(trial); }
#endif

int main(int count, char** arguments) { return planted::main(count, arguments); }
