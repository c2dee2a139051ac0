// The kernels' side of peer_bell.h.
#pragma once

#include "cuda/peer_bell.h"
#include "cuda/system_scope.cuh"

namespace strata {

// A layer begins: one thread of the primary's first kernel, and one of the peer's.
__device__ __forceinline__ void AskPeer(const PeerBellAt& bell) { ++bell.news->awaited; }
__device__ __forceinline__ void BeginPeerTurn(const PeerBellAt& bell) { ++bell.turn->begun; }

// The block's rows are stored. Every thread of each block of the peer's second kernel, once.
__device__ __forceinline__ void TellPrimary(const PeerBellAt& bell) {
  __syncthreads();
  if (threadIdx.x == 0) StoreReleaseSystem(bell.news->told + blockIdx.x, bell.turn->begun);
}

// Waits for the rows that this layer asked for. Every thread of a block of the primary's second
// kernel that needs one.
__device__ inline void AwaitPeer(const PeerBellAt& bell) {
  constexpr int kLooks = 256;  // between two at the clock and at the other blocks
  const uint64_t wanted = ReadThere(&bell.news->awaited);
  for (int teller = threadIdx.x; teller < bell.tellers; teller += blockDim.x) {
    uint64_t since = 0;
    for (int look = 1; LoadAcquireSystem(bell.news->told + teller) != wanted; ++look) {
      if (look % kLooks != 0) continue;
      if (ReadThere(&bell.news->failed) != 0) break;
      const uint64_t now = NowNs();
      if (since == 0) since = now;
      if (now - since <= uint64_t{ReadThere(&bell.limit->timeout_ms)} * 1000000u) continue;
      atomicExch(&bell.news->failed, 1u);
      StoreReleaseSystem(&bell.limit->aborted, uint32_t{1});
      break;
    }
  }
  __syncthreads();
}

}  // namespace strata
