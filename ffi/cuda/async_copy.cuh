// Weights on their way to shared memory, so that no register waits for them.
#pragma once

#include <cstdint>

#include "cuda/mma.cuh"
#include "cuda/segments.cuh"

namespace strata {

// kCount bytes, 4 or 16, which arrive as those of mma.cuh's CopyAsync.
template <int kCount>
__device__ __forceinline__ void CopyBytesAsync(unsigned char* to, const uint8_t* from) {
  static_assert(kCount == 4 || kCount == 16);
#if defined(STRATA_EMULATE)
  emulate::CopyAsync(to, from, kCount, true);
#else
  const unsigned address = static_cast<unsigned>(__cvta_generic_to_shared(to));
  if constexpr (kCount == 16) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(address), "l"(from) : "memory");
  } else {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(address), "l"(from) : "memory");
  }
#endif
}

// A lane's own words of a unit of kWords, copied by itself: from any memory that it could load
// from.
template <int kWords>
__device__ __forceinline__ void CopyOwnWords(unsigned char* to, const uint8_t* unit, int lane) {
#pragma unroll
  for (int c = 0; c < kWords / 4; ++c) {
    CopyBytesAsync<16>(to + (c * 32 + lane) * 16, unit + (c * 32 + lane) * 16);
  }
  constexpr int kRest = kWords / 4 * 512;
#pragma unroll
  for (int i = 0; i < kWords % 4; ++i) {
    CopyBytesAsync<4>(to + kRest + (i * 32 + lane) * 4, unit + kRest + (i * 32 + lane) * 4);
  }
}

// The lane's words of a unit in shared memory.
template <int kWords>
__device__ __forceinline__ void TakeOwnWords(const unsigned char* at, int lane,
                                             uint32_t (&words)[kWords]) {
  const uint4* chunks = reinterpret_cast<const uint4*>(InShared(at)) + lane;
#pragma unroll
  for (int c = 0; c < kWords / 4; ++c) {
    const uint4 chunk = chunks[c * 32];
    words[4 * c] = chunk.x;
    words[4 * c + 1] = chunk.y;
    words[4 * c + 2] = chunk.z;
    words[4 * c + 3] = chunk.w;
  }
  const uint32_t* rest = reinterpret_cast<const uint32_t*>(InShared(at) + kWords / 4 * 512) + lane;
#pragma unroll
  for (int i = 0; i < kWords % 4; ++i) words[kWords / 4 * 4 + i] = rest[i * 32];
}

__device__ __forceinline__ const uint8_t* FromLane(const uint8_t* address, int lane) {
  const long long bits = reinterpret_cast<long long>(address);
  return reinterpret_cast<const uint8_t*>(__shfl_sync(kAllLanes, bits, lane));
}

// A warp's place in shared memory for units (panels.h) of at most kMost bytes, of which a lane
// takes its own 1/32. All lanes call together.
template <int kMost>
class Slot {
 public:
  // Bytes of a slot, with what it needs to know when they are there.
  static constexpr int kSize = (kMost + 16 + 127) / 128 * 128;

  // `at` is a multiple of 128.
  __device__ __forceinline__ Slot(unsigned char* at, int lane) : at_(at) {
#if !defined(STRATA_EMULATE) && __CUDA_ARCH__ >= 900
    if (lane == 0) {
      asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(Arrived()) : "memory");
      asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
      asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
    }
    __syncwarp();
#else
    (void)lane;
#endif
  }

  // Asks for a unit in memory of this device: for that which lane `source` names.
  template <int kBytes = kMost>
  __device__ __forceinline__ void Ask(const uint8_t* unit, int lane, int source = 0) {
    static_assert(kBytes <= kMost);
#if !defined(STRATA_EMULATE) && __CUDA_ARCH__ >= 900
    if (lane == source) {
      asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(Arrived()),
                   "r"(kBytes)
                   : "memory");
      // A step reads each weight once: what it goes through in the second cache is the first to
      // make room, so that rows and tables stay (3 % of a step).
      uint64_t once;
      asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(once));
      asm volatile(
          "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], "
          "[%1], %2, [%3], %4;" ::"r"(Address()),
          "l"(unit), "r"(kBytes), "r"(Arrived()), "l"(once)
          : "memory");
    }
#else
    CopyOwnWords<kBytes / 128>(at_, FromLane(unit, source), lane);
#endif
  }

  // The same for a unit in any memory that a lane could load from.
  template <int kBytes = kMost>
  __device__ __forceinline__ void AskByLanes(const uint8_t* unit, int lane, int source) {
    static_assert(kBytes <= kMost);
    CopyOwnWords<kBytes / 128>(at_, FromLane(unit, source), lane);
#if !defined(STRATA_EMULATE) && __CUDA_ARCH__ >= 900
    by_lanes_ = true;
#endif
  }

  // Waits for the unit asked for. A block must not end before.
  __device__ __forceinline__ void Wait() {
#if !defined(STRATA_EMULATE) && __CUDA_ARCH__ >= 900
    if (by_lanes_) {
      by_lanes_ = false;
      WaitForCopies();
      // What the lanes wrote comes before the next unit, which others write.
      asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
      return;
    }
    unsigned done = 0;
    while (done == 0) {
      asm volatile(
          "{ .reg .pred p; mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;"
          " selp.u32 %0, 1, 0, p; }"
          : "=r"(done)
          : "r"(Arrived()), "r"(parity_)
          : "memory");
    }
    parity_ ^= 1;
#else
    WaitForCopies();
#endif
  }

  // The lane's words of the unit, which is there; the slot is free again.
  template <int kWords>
  __device__ __forceinline__ void Take(int lane, RawWords<kWords>* raw) {
    TakeOwnWords<kWords>(at_, lane, raw->words);
    __syncwarp();
  }

 private:
#if !defined(STRATA_EMULATE)
  __device__ __forceinline__ unsigned Address() const {
    return static_cast<unsigned>(__cvta_generic_to_shared(at_));
  }
  // The mbarrier behind the bytes.
  __device__ __forceinline__ unsigned Arrived() const { return Address() + (kMost + 7) / 8 * 8; }
#endif

  unsigned char* at_;
  unsigned parity_ = 0;
  bool by_lanes_ = false;
};

}  // namespace strata
