#include <simt/prove.h>
struct Reverse {
  static constexpr int kThreads = 64;
  simt::Global<float> row;
  SIMT void operator()() const {
    simt::shared<float>(0, 64).store(63 - simt::thread(), row.load(simt::thread()));
    simt::sync_block();
    row.store(simt::thread(), simt::shared<float>(0, 64).load(simt::thread()));
  }
};
SIMT_PROOF("reverse") { trial.launch(Reverse{trial.array("row", std::vector<float>(64, 1))}, {1, 64, 256}); }
int main(int count, char** arguments) { return simt::prover::main(count, arguments); }
