// The fused step of each optimizer on a device: the bits of the book, whatever the order of threads.
#include "step.h"
#include "optimizers.h"

using fastimpl::Optimizer;

int main(int count, char** arguments) {
  prove_each_optimizer(
      []<Optimizer kOptimizer>(simt::prover::Trial& trial) { step_cases::prove_all<kOptimizer>(trial); });
  return simt::prover::main(count, arguments);
}
