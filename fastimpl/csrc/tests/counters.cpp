// Only in a library that counts branches (-DCOVERAGE=ON): writes the counters of a process that will not end by exit().
extern "C" {
void __gcov_dump();
void __gcov_reset();
__attribute__((visibility("default"))) void fastimpl_write_counters();
}

void fastimpl_write_counters() {
  __gcov_dump();
  // What is written is not to be written again, and a second call is to write what came since.
  __gcov_reset();
}
