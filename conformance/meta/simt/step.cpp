// The fused step of each optimizer on a device: the bits of the book, whatever the order of threads.
#include "step.h"

using fastimpl::Optimizer;
using step_cases::prove_all;

SIMT_PROOF("sgd") { prove_all<Optimizer::kSgd>(trial); }
SIMT_PROOF("adagrad") { prove_all<Optimizer::kAdagrad>(trial); }
SIMT_PROOF("rowwise adagrad") { prove_all<Optimizer::kRowwiseAdagrad>(trial); }
SIMT_PROOF("adam") { prove_all<Optimizer::kAdam>(trial); }
SIMT_PROOF("partial rowwise adam") { prove_all<Optimizer::kPartialRowwiseAdam>(trial); }
SIMT_PROOF("lamb") { prove_all<Optimizer::kLamb>(trial); }

int main(int count, char** arguments) { return simt::prover::main(count, arguments); }
