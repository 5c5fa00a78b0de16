// The kernels of a store's table on a device: the rows of the host's table, whatever the order of threads.
#include "kvstore.h"
#include "optimizers.h"

using fastimpl::Optimizer;
using namespace kvstore_proofs;

SIMT_PROOF("index") { prove_index(trial); }
SIMT_PROOF("rest") { prove_rest(trial); }
SIMT_PROOF("guess") { prove_guess(trial); }
SIMT_PROOF("rows") { prove_rows(trial); }
SIMT_PROOF("removals") { prove_removals(trial); }
SIMT_PROOF("growth") { prove_growth(trial); }
SIMT_PROOF("cache") { prove_cache(trial); }
SIMT_PROOF("lines") { prove_lines(trial); }
SIMT_PROOF("left lines") { prove_left_lines(trial); }
SIMT_PROOF("log") { prove_log(trial); }
SIMT_PROOF("moments") { prove_moments(trial); }

int main(int count, char** arguments) {
  prove_each_optimizer([]<Optimizer kOptimizer>(simt::prover::Trial& trial) { prove_updates<kOptimizer>(trial); });
  return simt::prover::main(count, arguments);
}
