// Barriers in shared memory at which some threads wait for what others do (mbarrier, and its
// try_wait of sm_90 and later): who fills a place and who empties it need not wait for one another
// in turn.
#pragma once

#include "cuda/launch.h"

#if defined(STRATA_EMULATE)
#include "emulate/async.h"
#endif

namespace strata {

#if defined(STRATA_EMULATE)
using emulate::Barrier;
#else
using Barrier = uint64_t;
#endif

// A phase of the barrier ends with `count` arrivals. By one thread, before a block's barrier.
__device__ __forceinline__ void InitBarrier(Barrier* barrier, int count) {
#if defined(STRATA_EMULATE)
  *barrier = {count, 0, 0, 0};
#else
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(
                   static_cast<unsigned>(__cvta_generic_to_shared(barrier))),
               "r"(count)
               : "memory");
#endif
}

// What the thread has done in shared memory is seen by those that wait for this phase.
__device__ __forceinline__ void ArriveAt(Barrier* barrier) {
#if defined(STRATA_EMULATE)
  emulate::ArriveAtBarrier(barrier);
#else
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(
                   static_cast<unsigned>(__cvta_generic_to_shared(barrier)))
               : "memory");
#endif
}

// The same, as soon as the thread's copies (CopyAsync) so far are there, for which it does not
// wait.
__device__ __forceinline__ void ArriveBehindCopies(Barrier* barrier) {
#if defined(STRATA_EMULATE)
  emulate::WaitForCopies();
  emulate::ArriveAtBarrier(barrier);
#else
  asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(
                   static_cast<unsigned>(__cvta_generic_to_shared(barrier)))
               : "memory");
#endif
}

// Waits until the last phase that has ended has the parity `parity`: 0 for the first, and 1 before.
__device__ __forceinline__ void AwaitPhase(Barrier* barrier, unsigned parity) {
#if defined(STRATA_EMULATE)
  emulate::AwaitBarrier(barrier, parity);
#else
  unsigned done = 0;
  while (done == 0) {
    asm volatile(
        "{\n.reg .pred p;\nmbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\n"
        "selp.u32 %0, 1, 0, p;\n}"
        : "=r"(done)
        : "r"(static_cast<unsigned>(__cvta_generic_to_shared(barrier))), "r"(parity)
        : "memory");
  }
#endif
}

// Gives registers of the calling group of 128 threads back, so that it keeps kCount, or takes more;
// kCount is a multiple of 8.
template <int kCount>
__device__ __forceinline__ void KeepRegisters() {
#if !defined(STRATA_EMULATE) && defined(__CUDA_ARCH_FEAT_SM90_ALL)
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kCount));
#endif
}
template <int kCount>
__device__ __forceinline__ void TakeRegisters() {
#if !defined(STRATA_EMULATE) && defined(__CUDA_ARCH_FEAT_SM90_ALL)
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kCount));
#endif
}

// A barrier of a fixed number of threads that all arrive and wait.
struct Meeting {
  Barrier* barrier;
  unsigned parity = 0;

  __device__ __forceinline__ void Wait() {
    ArriveAt(barrier);
    AwaitPhase(barrier, parity);
    parity ^= 1;
  }
};

// A place of a ring of kPlaces, each full and empty in turn.
template <int kPlaces>
struct RingPlace {
  int place = 0;
  unsigned parity = 0;  // of the phase in which the place becomes full

  __device__ __forceinline__ void Next() {
    if (++place == kPlaces) place = 0, parity ^= 1;
  }
};

}  // namespace strata
