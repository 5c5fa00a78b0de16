// Slabs under a driver that notes what it is asked for: what is waited for, and what is not done in a capture or a
// child.
#include <sys/mman.h>
#include <sys/wait.h>

#include <cstdio>
#include <cstdlib>
#include <string>

#include "offload/copy.h"
#include "offload/slab.h"
#include "offload_tests.h"

namespace {

using namespace fastimpl::offload;

void require(bool holds, const char* what) {
  if (holds) return;
  std::fprintf(stderr, "slab_tests: %s\n", what);
  std::exit(1);
}

struct Noting : PinDriver {
  std::string calls;
  bool capturing = false;
  int error = 0, node = -1;

  int node_of(int) override { return node; }
  int pin(void*, size_t, int) override {
    calls += 'p';
    return error;
  }
  void unpin(void* pages, int) override {
    calls += 'u';
    // They are there until now.
    *static_cast<volatile uint8_t*>(pages) = 1;
  }
  void* record(void* event, void* stream) override {
    calls += 'r';
    return event != nullptr ? event : stream;
  }
  void wait(void*, int) override { calls += 'w'; }
  bool is_capturing(int) override { return capturing; }
};

void waits_for_its_own() {
  Noting driver;
  Slabs slabs(&driver);
  int error = 0, a = 0, b = 0;
  uint8_t* const one = slabs.make(5000, 0, -1, &error);
  uint8_t* const two = slabs.make(100, 0, -1, &error);
  slabs.used(one, &a);
  slabs.used(one, &a);
  slabs.used(one, &b);
  slabs.used(&b, &a);
  slabs.drop(two);
  require(driver.calls == "pprrru", "a slab without copies waits for none");
  slabs.drop(one);
  require(driver.calls == "pprrruwwu", "one event for each stream is waited for, before pages are unpinned");
  slabs.drop(one);
  const SlabCounts counts = slabs.counts();
  require(driver.calls.size() == 9 && counts.live_count == 0 && counts.live_bytes == 0, "a slab goes once");
  require(counts.made_count == 2 && counts.freed_count == 2 && counts.wait_count == 2, "slabs are counted");
}

void captures_keep() {
  Noting driver;
  Slabs slabs(&driver);
  int error = 0;
  uint8_t* const one = slabs.make(5000, 0, -1, &error);
  driver.capturing = true;
  slabs.drop(one);
  one[4999] = 3;
  require(driver.calls == "p" && slabs.counts().kept_count == 1, "nothing is unpinned in a capture");
  uint8_t* const two = slabs.make(10, 0, -1, &error);
  require(driver.calls == "pp" && slabs.counts().kept_count == 1, "nor while it goes on");
  driver.capturing = false;
  uint8_t* const three = slabs.make(10, -1, -1, &error);
  require(driver.calls == "ppu" && slabs.counts().kept_count == 0, "what was kept goes with the next slab");
  slabs.drop(two);
  slabs.drop(three);
  require(driver.calls == "ppuu" && slabs.counts().live_count == 0, "memory for no device is not pinned");
}

void refusals() {
  Noting driver;
  Slabs slabs(&driver);
  int error = 0;
  driver.error = 2;
  require(slabs.make(5000, 0, -1, &error) == nullptr && error == 2, "a driver that refuses is heard");
  require(slabs.counts().live_count == 0, "and leaves nothing");
  driver.error = 0;
  driver.node = 0;
  SlabFacts facts{};
  uint8_t* const one = slabs.make(5000, 0, -1, &error);
  require(slabs.facts(one, &facts) && facts.is_pinned && facts.node == 0, "pages lie near the device");
  for (const int device : {1, -1}) {
    uint8_t* const other = slabs.make(5000, device, -1, &error);
    require(slabs.facts(other, &facts) && facts.node == (device == 1 ? 0 : -1), "near any device, and near none");
    slabs.drop(other);
  }
  uint8_t* const two = slabs.make(5000, 0, 1023, &error);
  require(slabs.facts(two, &facts) && facts.node == 1023 && facts.bind_error != 0, "a node that is not there is said");
  uint8_t* const three = slabs.make(5000, 0, 1024, &error);
  require(slabs.facts(three, &facts) && facts.bind_error != 0, "and so is a node that no machine has");
  require(!slabs.facts(&facts, &facts), "other memory is no slab");
  driver.calls.clear();
  slabs.drop(reinterpret_cast<void*>(&facts));
  require(driver.calls.empty() && slabs.counts().live_count == 3, "dropping other memory drops nothing");
  for (uint8_t* const slab : {one, two, three}) slabs.drop(slab);
}

bool is_mapped(uint8_t* page) {
  unsigned char held = 0;
  return mincore(page, 1, &held) == 0;
}

// Keeps the address that a driver was asked to pin.
struct Refusing : Noting {
  uint8_t* pages = nullptr;

  int pin(void* asked, size_t, int) override {
    pages = static_cast<uint8_t*>(asked);
    return 2;
  }
};

void gives_pages_back() {
  Noting driver;
  Slabs slabs(&driver), of_no_driver(nullptr);
  int error = 0;
  for (const int device : {-1, 0}) {
    for (Slabs* const some : {&slabs, &of_no_driver}) {
      uint8_t* const pages = some->make(5000, device, -1, &error);
      pages[4999] = 1;
      require(is_mapped(pages) && is_mapped(pages + 4096), "pages are there while a slab lives");
      some->drop(pages);
      require(!is_mapped(pages) && !is_mapped(pages + 4096), "and go with it, pinned or not");
    }
  }
  driver.capturing = true;
  uint8_t* const kept = slabs.make(5000, 0, -1, &error);
  slabs.drop(kept);
  require(is_mapped(kept), "a captured copy may name them");
  driver.capturing = false;
  uint8_t* const next = slabs.make(10, -1, -1, &error);
  require(next == kept || !is_mapped(kept), "until the capture is over");
  slabs.drop(next);
  Refusing refusing;
  Slabs refused(&refusing);
  require(refused.make(5000, 0, -1, &error) == nullptr && !is_mapped(refusing.pages), "what is not pinned goes");
}

void children() {
  Noting driver;
  Slabs slabs(&driver);
  int error = 0;
  uint8_t* const one = slabs.make(5000, 0, -1, &error);
  const pid_t child = fork();
  if (child == 0) {
    slabs.drop(one);
    const bool calls_nothing = driver.calls == "p";
    slabs.drop(slabs.make(5000, 0, -1, &error));
    // Not _exit: what is counted of branches is written at the end of a program.
    std::exit(calls_nothing && driver.calls == "ppu" ? 0 : 1);
  }
  int status = 1;
  require(waitpid(child, &status, 0) == child && status == 0, "a forked child frees what it made, and that alone");
  slabs.drop(one);
  require(driver.calls == "pu", "its parent does");
}

void neighbours() {
  uint8_t memory[64] = {}, other[64] = {};
  std::vector<CopyRun> runs;
  add_copy(runs, {memory, other, 8, memory, other});
  add_copy(runs, {memory + 8, other + 8, 0, memory, other});
  add_copy(runs, {memory + 8, other + 8, 4, memory, other});
  require(runs.size() == 1 && runs[0].size == 12, "neighbours are one copy");
  add_copy(runs, {memory + 12, other + 13, 4, memory, other});
  add_copy(runs, {memory + 17, other + 17, 4, memory, other});
  require(runs.size() == 3, "a gap on either side ends it");
  // By chance behind, and another allocation.
  add_copy(runs, {memory + 21, other + 21, 4, memory + 21, other});
  add_copy(runs, {memory + 25, other + 25, 4, memory + 21, other + 25});
  require(runs.size() == 5, "and so does another allocation");
}

}  // namespace

void slab_tests() {
  waits_for_its_own();
  captures_keep();
  refusals();
  gives_pages_back();
  children();
  neighbours();
}
