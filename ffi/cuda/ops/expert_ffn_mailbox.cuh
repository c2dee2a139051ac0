// The device's side of the mailbox (mailbox.h).
#pragma once

#include "cuda/bell.cuh"
#include "cuda/ops/expert_ffn_doors.cuh"

namespace strata {

// Asks the host for its entries of all rows, if there are any. By a whole block, before any other
// work: the host's answer takes longest.
__device__ inline void Ring(const FfnParams& p) {
  __shared__ unsigned masks[kMostLetterRows];
  const MailboxAt& m = p.mailbox;
  const int lane = threadIdx.x % 32;
  const int warps = blockDim.x / 32;
  const int live = min(max(*p.live, 0), p.num_rows);
  const uint64_t epoch = m.state->epoch + 1;
  const bool failed = m.state->failed != 0;
  unsigned char* letter = m.box->letters + epoch % 2 * m.sizes.letter_bytes;
  auto* head = reinterpret_cast<Letter*>(letter);
  auto* ids = reinterpret_cast<int32_t*>(letter + m.sizes.ids_at);
  int any = 0;
  for (int row = threadIdx.x / 32; row < live; row += warps) {
    const int id = lane < p.num_active ? p.ids[row * p.num_active + lane] : 0;
    const unsigned host = HomesOf(p, id, lane).host;
    any |= host != 0;
    if (lane == 0) masks[row] = host;
    if (failed) continue;
    if (lane < p.num_active) ids[row * p.num_active + lane] = id;
    if (lane == 0) head->masks[row] = host;
  }
  any = __syncthreads_or(any);
  auto* rung = static_cast<volatile uint32_t*>(&m.state->rung);
  if (!any || failed) {
    if (threadIdx.x == 0) {
      m.state->awaited = 0;
      *rung = 1;
    }
    return;
  }
  for (int row = 0; row < live; ++row) {
    if (masks[row] == 0) continue;
    const auto* from = reinterpret_cast<const float4*>(p.x + static_cast<int64_t>(row) * p.width);
    auto* to = reinterpret_cast<float4*>(letter + m.sizes.x_at) + row * (p.width / 4);
    for (int i = threadIdx.x; i < p.width / 4; i += blockDim.x) to[i] = from[i];
  }
  __syncthreads();
  if (threadIdx.x != 0) return;
  head->layer = m.layer;
  head->num_live = live;
  m.state->epoch = epoch;
  m.state->awaited = epoch;
  __threadfence_system();
  StoreReleaseSystem(&m.box->doorbell, epoch);
  __threadfence_system();
  *rung = 1;
}

// Waits, one thread, for the letter to be on its way.
__device__ __forceinline__ void AwaitRing(const FfnParams& p) {
  constexpr int kMostLooks = 100;  // some 30 us
  const auto* rung = static_cast<const volatile uint32_t*>(&p.mailbox.state->rung);
  for (int look = 0; look < kMostLooks && *rung == 0; ++look) __nanosleep(200);
}

// Holds a block back that is about to read panels over the link. Every thread of the block.
__device__ __forceinline__ void LetLetterPass(const FfnParams& p) {
  if (p.mailbox.box == nullptr) return;
  if (threadIdx.x == 0) AwaitRing(p);
  __syncthreads();
}

// The same for a warp that goes its own way.
__device__ __forceinline__ void LetLetterPassWarp(const FfnParams& p, int lane) {
  if (p.mailbox.box == nullptr) return;
  if (lane == 0) AwaitRing(p);
  __syncwarp();
}

// For the next layer. One thread of the second kernel.
__device__ __forceinline__ void ForgetLetter(const FfnParams& p) {
  if (p.mailbox.box != nullptr) p.mailbox.state->rung = 0;
}

// Waits, one thread of the kernel, for the answer that this layer asked for, and tells the others;
// gives up where the host shows no sign of life for too long.
__device__ inline void AwaitHost(const FfnParams& p) {
  const MailboxAt& m = p.mailbox;
  if (AwaitAnswer(m.box, m.state)) {
    StoreReleaseSystem(&m.state->answered,
                       *static_cast<const volatile uint64_t*>(&m.state->awaited));
  }
}

// The same for the other blocks, one thread of each, from the first.
__device__ inline void AwaitNews(const FfnParams& p) { AwaitNews(p.mailbox.state); }

// Every thread of a block that needs the host's rows. `first`: the kernel's first block, which
// looks for all; it calls this before it ends, too, for it may need no such row itself. `looked`:
// whether it has.
__device__ inline void AwaitRows(const FfnParams& p, bool first, bool* looked) {
  if (first && *looked) return;
  *looked = true;
  if (threadIdx.x == 0) {
    if (first) {
      AwaitHost(p);
    } else {
      AwaitNews(p);
    }
  }
  __syncthreads();
}

// The host's rows of this layer, once they are awaited.
__device__ __forceinline__ const float* HostRows(const FfnParams& p) {
  const uint64_t epoch = *static_cast<const volatile uint64_t*>(&p.mailbox.state->awaited);
  return p.mailbox.rows + epoch % 2 * p.mailbox.sizes.row_floats;
}

}  // namespace strata
