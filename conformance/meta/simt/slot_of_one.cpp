// The update of one kind, which has all states: faults are planted in this.
#include "planted.h"

#include "slot.h"

SIMT_PROOF("amsgrad") { slot_cases::prove_all<SlotKind::kAmsgrad>(trial); }

int main(int count, char** arguments) { return planted::main(count, arguments); }
