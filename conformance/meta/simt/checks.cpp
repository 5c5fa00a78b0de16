// Checks of ids, and words that launches carry: the host's numbers, and no memory but theirs whatever is given.
#include "planted.h"

#include "ids.h"

using namespace id_cases;

SIMT_PROOF("words of a launch") { prove_words(trial); }
SIMT_PROOF("checks") { prove_checks<int64_t>(trial); }
// A planted fault is in both: half the kernels compile in half the time.
#if !defined(SIMT_PLANTED)
SIMT_PROOF("checks int32") { prove_checks<int32_t>(trial); }
#endif

int main(int count, char** arguments) { return planted::main(count, arguments); }
