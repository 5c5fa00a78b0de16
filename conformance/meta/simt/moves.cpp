// Movement of ids: the host's numbers, and no memory but theirs whatever is given.
#include "planted.h"

#include "ids.h"

using namespace id_cases;

SIMT_PROOF("blocks") { prove_gathering<uint32_t>(trial); }
SIMT_PROOF("buckets") { prove_buckets<int32_t>(trial); }
// A planted fault is in all: half the kernels compile in half the time.
#if !defined(SIMT_PLANTED)
SIMT_PROOF("blocks of bytes") { prove_gathering<uint8_t>(trial); }
SIMT_PROOF("blocks of words") { prove_gathering<uint64_t>(trial); }
SIMT_PROOF("buckets int64") { prove_buckets<int64_t>(trial); }
#endif

int main(int count, char** arguments) { return planted::main(count, arguments); }
