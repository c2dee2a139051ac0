// Atomics, fences, loads and stores with cache hints. Atomic for the host's threads too, which may
// share mapped memory with a kernel.
#pragma once

#include <cstdint>

#include "emulate/sync.h"

// NOLINTBEGIN: CUDA's names
// Integers only: the order of floating-point atomics is undefined, and so would be results.
#define STRATA_EMULATE_ATOMICS(T)                                                             \
  inline T atomicAdd(T* address, T value) {                                                   \
    emulate::YieldIfShuffled();                                                               \
    return __atomic_fetch_add(address, value, __ATOMIC_SEQ_CST);                              \
  }                                                                                           \
  inline T atomicExch(T* address, T value) {                                                  \
    emulate::YieldIfShuffled();                                                               \
    return __atomic_exchange_n(address, value, __ATOMIC_SEQ_CST);                             \
  }                                                                                           \
  inline T atomicAnd(T* address, T value) {                                                   \
    emulate::YieldIfShuffled();                                                               \
    return __atomic_fetch_and(address, value, __ATOMIC_SEQ_CST);                              \
  }                                                                                           \
  inline T atomicOr(T* address, T value) {                                                    \
    emulate::YieldIfShuffled();                                                               \
    return __atomic_fetch_or(address, value, __ATOMIC_SEQ_CST);                               \
  }                                                                                           \
  inline T atomicXor(T* address, T value) {                                                   \
    emulate::YieldIfShuffled();                                                               \
    return __atomic_fetch_xor(address, value, __ATOMIC_SEQ_CST);                              \
  }                                                                                           \
  inline T atomicCAS(T* address, T expected, T value) {                                       \
    emulate::YieldIfShuffled();                                                               \
    __atomic_compare_exchange_n(address, &expected, value, false, __ATOMIC_SEQ_CST,           \
                                __ATOMIC_SEQ_CST);                                            \
    return expected;                                                                          \
  }                                                                                           \
  inline T atomicMax(T* address, T value) {                                                   \
    emulate::YieldIfShuffled();                                                               \
    T old = __atomic_load_n(address, __ATOMIC_SEQ_CST);                                       \
    while (old < value && !__atomic_compare_exchange_n(address, &old, value, false,           \
                                                       __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST)) { \
    }                                                                                         \
    return old;                                                                               \
  }                                                                                           \
  inline T atomicMin(T* address, T value) {                                                   \
    emulate::YieldIfShuffled();                                                               \
    T old = __atomic_load_n(address, __ATOMIC_SEQ_CST);                                       \
    while (value < old && !__atomic_compare_exchange_n(address, &old, value, false,           \
                                                       __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST)) { \
    }                                                                                         \
    return old;                                                                               \
  }
STRATA_EMULATE_ATOMICS(int)
STRATA_EMULATE_ATOMICS(unsigned)
STRATA_EMULATE_ATOMICS(unsigned long long)
#undef STRATA_EMULATE_ATOMICS
inline int atomicSub(int* address, int value) { return atomicAdd(address, -value); }
inline unsigned atomicSub(unsigned* address, unsigned value) {
  return atomicAdd(address, 0 - value);
}
// Counts to `last` and begins again at 0.
inline unsigned atomicInc(unsigned* address, unsigned last) {
  emulate::YieldIfShuffled();
  unsigned old = __atomic_load_n(address, __ATOMIC_SEQ_CST);
  while (!__atomic_compare_exchange_n(address, &old, old >= last ? 0 : old + 1, false,
                                      __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST)) {
  }
  return old;
}

// An operation on a word of its own: as strong as a fence, and ThreadSanitizer knows it.
namespace emulate {
inline int fence_word = 0;
}
inline void __threadfence() { __atomic_fetch_add(&emulate::fence_word, 0, __ATOMIC_SEQ_CST); }
inline void __threadfence_block() { __threadfence(); }
inline void __threadfence_system() { __threadfence(); }

#define STRATA_EMULATE_LOAD(name)   \
  template <typename T>             \
  inline T name(const T* address) { \
    return *address;                \
  }
STRATA_EMULATE_LOAD(__ldg)
STRATA_EMULATE_LOAD(__ldca)
STRATA_EMULATE_LOAD(__ldcg)
STRATA_EMULATE_LOAD(__ldcs)
STRATA_EMULATE_LOAD(__ldlu)
#undef STRATA_EMULATE_LOAD
#define STRATA_EMULATE_STORE(name)        \
  template <typename T>                   \
  inline void name(T* address, T value) { \
    *address = value;                     \
  }
STRATA_EMULATE_STORE(__stwb)
STRATA_EMULATE_STORE(__stcg)
STRATA_EMULATE_STORE(__stcs)
STRATA_EMULATE_STORE(__stwt)
#undef STRATA_EMULATE_STORE
// Read again each time: what another processor may change.
template <typename T>
inline T __ldcv(const T* address) {
  return *static_cast<const volatile T*>(address);
}
// NOLINTEND
