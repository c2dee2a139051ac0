// Stacks for fibers and the switch between them: no system call, about 3 ns.
#pragma once

#include <cstddef>
#include <vector>

namespace emulate {

// Where a suspended flow of control continues.
struct Flow {
  void* stack_pointer = nullptr;
#if defined(__SANITIZE_ADDRESS__)  // must be told what is whose stack
  void* fake_stack = nullptr;
  const void* stack_bottom = nullptr;
  size_t stack_bytes = 0;
#elif defined(__SANITIZE_THREAD__)
  void* fiber = nullptr;
#endif
};

// Suspends the caller into `from` and continues `to`. `ends`: `from` is never continued.
void Switch(Flow* from, Flow* to, bool ends);

// To be called first by a flow that has just been started. `caller` is the flow of the process's
// own thread that started the first one: only now can be learned where its stack lies.
void Started(Flow* caller);

// Stacks with a page below each that nothing may touch; kept for the life of the process.
class StackPool {
 public:
  // A flow that calls `entry` when it is first continued; `entry` must not return.
  void Prepare(int stack, void (*entry)(), Flow* flow);
  int Take();
  void GiveBack(int stack) { free_.push_back(stack); }
  void GiveBackAll();

 private:
  struct Stack {
    unsigned char* base;
    void* fiber;  // ThreadSanitizer's
    int uses;     // of that
  };
  std::vector<Stack> stacks_;
  std::vector<int> free_;
};

}  // namespace emulate
