// Copies from global to shared memory that run while a thread computes.
#pragma once

#include <cstdint>
#include <cstring>

#include "cuda/launch.h"

namespace strata {

// Begins a copy of 16 bytes, past the first-level cache; both addresses are multiples of 16.
__device__ __forceinline__ void CopyAsync(void* shared, const void* global) {
#if defined(STRATA_EMULATE)
  std::memcpy(shared, global, 16);
#else
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(
                   static_cast<uint32_t>(__cvta_generic_to_shared(shared))),
               "l"(global)
               : "memory");
#endif
}

// Closes a group of the thread's copies, which may be empty.
__device__ __forceinline__ void EndCopyGroup() {
#if !defined(STRATA_EMULATE)
  asm volatile("cp.async.commit_group;" ::: "memory");
#endif
}

// Waits until at most the thread's kLast newest groups are under way. Others see what a thread
// copied after the barrier that follows.
template <int kLast>
__device__ __forceinline__ void WaitForCopies() {
#if !defined(STRATA_EMULATE)
  asm volatile("cp.async.wait_group %0;" ::"n"(kLast) : "memory");
#endif
}

}  // namespace strata
