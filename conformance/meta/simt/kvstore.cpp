// The kernels of a store's table on a device: the rows of the host's table, whatever the order of threads.
#include "kvstore.h"

using fastimpl::Optimizer;
using namespace kvstore_proofs;

SIMT_PROOF("index") { prove_index(trial); }
SIMT_PROOF("rest") { prove_rest(trial); }
SIMT_PROOF("rows") { prove_rows(trial); }
SIMT_PROOF("removals") { prove_removals(trial); }
SIMT_PROOF("growth") { prove_growth(trial); }
SIMT_PROOF("cache") { prove_cache(trial); }
SIMT_PROOF("lines") { prove_lines(trial); }
SIMT_PROOF("clones") { prove_clones(trial); }
SIMT_PROOF("sgd") { prove_updates<Optimizer::kSgd>(trial); }
SIMT_PROOF("adagrad") { prove_updates<Optimizer::kAdagrad>(trial); }
SIMT_PROOF("rowwise adagrad") { prove_updates<Optimizer::kRowwiseAdagrad>(trial); }
SIMT_PROOF("adam") { prove_updates<Optimizer::kAdam>(trial); }
SIMT_PROOF("partial rowwise adam") { prove_updates<Optimizer::kPartialRowwiseAdam>(trial); }
SIMT_PROOF("lamb") { prove_updates<Optimizer::kLamb>(trial); }

int main(int count, char** arguments) { return simt::prover::main(count, arguments); }
