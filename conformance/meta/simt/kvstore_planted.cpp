// The proofs of kvstore.cpp with one of many faults: a proof of each for every number.
inline int simt_planted = 0;

#include "kvstore.h"

using fastimpl::Optimizer;
using namespace kvstore_proofs;

namespace {

constexpr int kFaultsMax = 200;

void add(const std::string& name, void (*body)(simt::prover::Trial&)) {
  for (int number = 0; number <= kFaultsMax; ++number) {
    simt::prover::proofs().push_back({name + " " + std::to_string(number), [=](simt::prover::Trial& trial) {
                                        simt_planted = number;
                                        body(trial);
                                      }});
  }
}

}  // namespace

int main(int count, char** arguments) {
  add("index", prove_index);
  add("rest", prove_rest);
  add("guess", prove_guess);
  add("rows", prove_rows);
  add("removals", prove_removals);
  add("growth", prove_growth);
  add("cache", prove_cache);
  add("lines", prove_lines);
  add("left lines", prove_left_lines);
  add("log", prove_log);
  add("moments", prove_moments);
  add("row-wise", prove_updates<Optimizer::kPartialRowwiseAdam>);
  add("scaled", prove_updates<Optimizer::kLamb>);
  return simt::prover::main(count, arguments);
}
