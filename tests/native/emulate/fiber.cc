#include "emulate/fiber.h"

#include <sys/mman.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>

#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/asan_interface.h>
#include <sanitizer/common_interface_defs.h>
#elif defined(__SANITIZE_THREAD__)
#include <sanitizer/tsan_interface.h>
#endif

extern "C" void StrataEmulateSwitch(void** from, void* to);

// Saves what a call must preserve on the old stack, leaves its address in *from and takes the same
// from the new stack. Floating-point modes are the launch's and the same in every fiber.
#if defined(__x86_64__)
asm(R"(
.text
.p2align 4
.hidden StrataEmulateSwitch
.globl StrataEmulateSwitch
.type StrataEmulateSwitch, @function
StrataEmulateSwitch:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
.size StrataEmulateSwitch, .-StrataEmulateSwitch
)");
#elif defined(__aarch64__)
asm(R"(
.text
.p2align 4
.hidden StrataEmulateSwitch
.globl StrataEmulateSwitch
.type StrataEmulateSwitch, %function
StrataEmulateSwitch:
  sub sp, sp, #160
  stp x19, x20, [sp, #0]
  stp x21, x22, [sp, #16]
  stp x23, x24, [sp, #32]
  stp x25, x26, [sp, #48]
  stp x27, x28, [sp, #64]
  stp x29, x30, [sp, #80]
  stp d8, d9, [sp, #96]
  stp d10, d11, [sp, #112]
  stp d12, d13, [sp, #128]
  stp d14, d15, [sp, #144]
  mov x9, sp
  str x9, [x0]
  mov sp, x1
  ldp x19, x20, [sp, #0]
  ldp x21, x22, [sp, #16]
  ldp x23, x24, [sp, #32]
  ldp x25, x26, [sp, #48]
  ldp x27, x28, [sp, #64]
  ldp x29, x30, [sp, #80]
  ldp d8, d9, [sp, #96]
  ldp d10, d11, [sp, #112]
  ldp d12, d13, [sp, #128]
  ldp d14, d15, [sp, #144]
  add sp, sp, #160
  ret
.size StrataEmulateSwitch, .-StrataEmulateSwitch
)");
#else
#error "emulate: fibers are written for x86-64 and aarch64"
#endif

namespace emulate {
namespace {

constexpr size_t kSetStride = 4096;
constexpr size_t kGuard = 64 * 1024;        // a page of any machine
constexpr size_t kStackBytes = 256 * 1024;  // only pages that were touched take memory

// Equal frames of different fibers would lie on the same lines of the caches, whose sets repeat
// every 4 KiB: their tops are spread over 64 lines.
size_t Colour(int stack) { return static_cast<size_t>(stack) * 576 % kSetStride; }

}  // namespace

#if defined(__SANITIZE_THREAD__)
__attribute__((no_sanitize("thread")))
#endif
void Switch(Flow* from, Flow* to, [[maybe_unused]] bool ends) {
#if defined(__SANITIZE_ADDRESS__)
  __sanitizer_start_switch_fiber(ends ? nullptr : &from->fake_stack, to->stack_bottom,
                                 to->stack_bytes);
#elif defined(__SANITIZE_THREAD__)
  from->fiber = __tsan_get_current_fiber();
  __tsan_switch_to_fiber(to->fiber, 0);
#endif
  StrataEmulateSwitch(&from->stack_pointer, to->stack_pointer);
#if defined(__SANITIZE_ADDRESS__)
  __sanitizer_finish_switch_fiber(from->fake_stack, nullptr, nullptr);
#endif
}

void Started([[maybe_unused]] Flow* caller) {
#if defined(__SANITIZE_ADDRESS__)
  const void* bottom = nullptr;
  size_t bytes = 0;
  __sanitizer_finish_switch_fiber(nullptr, &bottom, &bytes);
  if (caller->stack_bottom == nullptr) {
    caller->stack_bottom = bottom;
    caller->stack_bytes = bytes;
  }
#endif
}

int StackPool::Take() {
  if (!free_.empty()) {
    const int stack = free_.back();
    free_.pop_back();
    return stack;
  }
  void* memory = mmap(nullptr, kGuard + kStackBytes, PROT_READ | PROT_WRITE,
                      MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_STACK, -1, 0);
  if (memory == MAP_FAILED || mprotect(memory, kGuard, PROT_NONE) != 0) {
    std::fprintf(stderr, "emulate: no memory for the stack of fiber %zu\n", stacks_.size());
    std::abort();
  }
  stacks_.push_back({static_cast<unsigned char*>(memory) + kGuard, nullptr, 0});
  return static_cast<int>(stacks_.size()) - 1;
}

void StackPool::GiveBackAll() {
  free_.clear();
  for (int stack = static_cast<int>(stacks_.size()) - 1; stack >= 0; --stack)
    free_.push_back(stack);
}

void StackPool::Prepare(int stack, void (*entry)(), Flow* flow) {
  unsigned char* base = stacks_[stack].base;
  auto* top = reinterpret_cast<uint64_t*>(base + kStackBytes - kSetStride - 64 + Colour(stack));
#if defined(__x86_64__)
  *--top = 0;  // entry has no caller; 16-byte alignment is that of a function just called
  *--top = reinterpret_cast<uint64_t>(entry);
  for (int i = 0; i < 6; ++i) *--top = 0;
#else
  top -= 20;
  for (int i = 0; i < 20; ++i) top[i] = 0;
  top[11] = reinterpret_cast<uint64_t>(entry);  // x30
#endif
  flow->stack_pointer = top;
#if defined(__SANITIZE_ADDRESS__)
  __asan_unpoison_memory_region(base, kStackBytes);  // an earlier fiber may have ended anywhere
  flow->fake_stack = nullptr;
  flow->stack_bottom = base;
  flow->stack_bytes = kStackBytes;
#elif defined(__SANITIZE_THREAD__)
  // A fiber's calls that never return stay on its list of calls, so it must not serve for ever.
  Stack& own = stacks_[stack];
  if (own.fiber == nullptr || ++own.uses == 256) {
    if (own.fiber != nullptr) __tsan_destroy_fiber(own.fiber);
    own.fiber = __tsan_create_fiber(0);
    own.uses = 0;
  }
  flow->fiber = own.fiber;
#endif
}

}  // namespace emulate
