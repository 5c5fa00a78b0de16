// The update of a chunk in its slot, of each kind: the bits of the book, whatever the order of threads.
#include "slot.h"

using slot_cases::prove_all;

SIMT_PROOF("sgd") { prove_all<SlotKind::kSgd>(trial); }
SIMT_PROOF("momentum") { prove_all<SlotKind::kMomentum>(trial); }
SIMT_PROOF("adam") { prove_all<SlotKind::kAdam>(trial); }
SIMT_PROOF("amsgrad") { prove_all<SlotKind::kAmsgrad>(trial); }
SIMT_PROOF("adagrad") { prove_all<SlotKind::kAdagrad>(trial); }

int main(int count, char** arguments) { return simt::prover::main(count, arguments); }
