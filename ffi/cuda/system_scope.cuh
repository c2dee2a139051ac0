// Words that a running kernel shares with the host or with a copy engine, and the device's clock.
#pragma once

#include "cuda/launch.h"
#if defined(STRATA_EMULATE)
#include <chrono>
#endif

namespace strata {

__device__ __forceinline__ uint64_t LoadAcquireSystem(const uint64_t* address) {
#if defined(STRATA_EMULATE)
  return __atomic_load_n(address, __ATOMIC_ACQUIRE);
#else
  uint64_t value;
  asm volatile("ld.acquire.sys.global.u64 %0, [%1];" : "=l"(value) : "l"(address) : "memory");
  return value;
#endif
}

__device__ __forceinline__ void StoreReleaseSystem(uint64_t* address, uint64_t value) {
#if defined(STRATA_EMULATE)
  __atomic_store_n(address, value, __ATOMIC_RELEASE);
#else
  asm volatile("st.release.sys.global.u64 [%0], %1;" ::"l"(address), "l"(value) : "memory");
#endif
}

__device__ __forceinline__ void StoreReleaseSystem(uint32_t* address, uint32_t value) {
#if defined(STRATA_EMULATE)
  __atomic_store_n(address, value, __ATOMIC_RELEASE);
#else
  asm volatile("st.release.sys.global.u32 [%0], %1;" ::"l"(address), "r"(value) : "memory");
#endif
}

// What another device or the host wrote while this step ran is read where it lies, past caches that
// they cannot reach.
__device__ __forceinline__ uint4 LoadThere(const uint4* address) {
#if defined(STRATA_EMULATE)
  return *address;
#else
  uint4 v;
  asm volatile("ld.volatile.global.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "l"(address));
  return v;
#endif
}

template <typename T>
__device__ __forceinline__ T ReadThere(const T* address) {
  return *static_cast<const volatile T*>(address);
}

__device__ __forceinline__ uint64_t NowNs() {
#if defined(STRATA_EMULATE)
  return static_cast<uint64_t>(std::chrono::steady_clock::now().time_since_epoch().count());
#else
  uint64_t now;
  asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now));
  return now;
#endif
}

}  // namespace strata
