// The fused step of one optimizer, which has all that is shared: faults are planted in this.
#include "planted.h"

#include "step.h"

SIMT_PROOF("rowwise adagrad") {
  step_cases::prove_vectors<fastimpl::Optimizer::kRowwiseAdagrad>(trial, trial.case_number);
}

int main(int count, char** arguments) { return planted::main(count, arguments); }
