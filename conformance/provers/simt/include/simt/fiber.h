// Stacks and the switch between them: one for each thread of a grid.
#pragma once

#include <sys/mman.h>

#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <new>

#if !defined(__x86_64__) && !defined(SIMT_UCONTEXT)
#define SIMT_UCONTEXT
#endif
#if defined(SIMT_UCONTEXT)
#include <ucontext.h>
#endif

namespace simt::prover {

// A page below the stack is never mapped, so that a kernel which needs more crashes instead of spoiling a neighbour.
class Stack {
 public:
  static constexpr size_t kBytes = size_t{1} << 17, kGuardBytes = 4096;

  Stack() {
    void* const made =
        mmap(nullptr, kBytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (made == MAP_FAILED) throw std::bad_alloc();
    low_ = static_cast<char*>(made);
    mprotect(low_, kGuardBytes, PROT_NONE);
  }
  Stack(Stack&& other) noexcept : low_(other.low_) { other.low_ = nullptr; }
  Stack& operator=(Stack&&) = delete;
  ~Stack() {
    if (low_ != nullptr) munmap(low_, kBytes);
  }
  char* low() const { return low_ + kGuardBytes; }
  char* high() const { return low_ + kBytes; }

 private:
  char* low_;
};

#if defined(SIMT_UCONTEXT)

// A place in a program: registers and a stack.
struct Context {
  ucontext_t saved;

  void start(const Stack& stack, void (*entry)()) {
    getcontext(&saved);
    saved.uc_stack.ss_sp = stack.low();
    saved.uc_stack.ss_size = static_cast<size_t>(stack.high() - stack.low());
    saved.uc_link = nullptr;
    makecontext(&saved, entry, 0);
  }
};

inline void switch_context(Context* from, Context* to) { swapcontext(&from->saved, &to->saved); }

#else

// Registers that a call preserves lie on the stack; the rest the compiler takes for lost.
inline __attribute__((naked, noinline)) void switch_stack(void** /*from*/, void* /*to*/) {
  __asm__(
      "pushq %rbp\n\tpushq %rbx\n\tpushq %r12\n\tpushq %r13\n\tpushq %r14\n\tpushq %r15\n\t"
      "movq %rsp, (%rdi)\n\tmovq %rsi, %rsp\n\t"
      "popq %r15\n\tpopq %r14\n\tpopq %r13\n\tpopq %r12\n\tpopq %rbx\n\tpopq %rbp\n\tret");
}

struct Context {
  void* stack_pointer = nullptr;

  void start(const Stack& stack, void (*entry)()) {
    auto* top = reinterpret_cast<void**>(stack.high());
    *--top = nullptr;  // Where a return address would lie: `entry` never returns.
    *--top = reinterpret_cast<void*>(entry);
    for (int i = 0; i < 6; ++i) *--top = nullptr;
    stack_pointer = top;
  }
};

inline void switch_context(Context* from, Context* to) { switch_stack(&from->stack_pointer, to->stack_pointer); }

#endif

}  // namespace simt::prover
