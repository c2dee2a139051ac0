// What all kernels of expert_ffn share.
#pragma once

#include "cuda/activations.cuh"
#include "cuda/expert_word.h"
#include "cuda/mailbox.h"
#include "cuda/numerics.cuh"
#include "cuda/peer_bell.h"
#include "cuda/products.cuh"

namespace strata {

// Division of what is below 2^32 / divisor: a multiplication, where the device's own is a routine
// that every block would run before its first load.
struct Divider {
  int32_t divisor;
  uint32_t inverse;

  __device__ __forceinline__ int Quotient(int n) const {
    return divisor == 1 ? n : static_cast<int>(__umulhi(static_cast<unsigned>(n), inverse));
  }
};

inline Divider DividerBy(int64_t divisor) {
  return {static_cast<int32_t>(divisor),
          static_cast<uint32_t>(((int64_t{1} << 32) + divisor - 1) / divisor)};
}

struct FfnParams {
  const float* x;
  const int32_t* ids;
  const float* weights;
  const float* shared_weights;
  const int32_t* live;
  float* y;
  int8_t* codes;            // [entries, hidden]
  float* scales;            // [entries, hidden / 32]
  int16_t* sums;            // [entries, hidden / 16]
  float* hidden;            // [entries, hidden]; null where every down matrix is quantised
  const uint64_t* experts;  // words (expert_word.h)
  uint32_t* usage;          // null: not counted here
  // With doors only.
  const float* peer_rows;  // [num_rows * A, width] of entries that the peer computes
  PeerBellAt bell;         // of the peer
  uint32_t* homes;         // counts of EntryHome
  MailboxAt mailbox;       // of the host, for windows
  Latch latch;             // of the next layer's words
  float* rows;             // if not null: all that is wanted are the entries' rows, without weights
  uint8_t streamed[kMostDoorEntries + 1];  // of so many misses of a row, those read over the link
  int64_t up_at, down_at;
  int32_t num_rows, num_active, width, hidden_width, routed_hidden, shared_hidden;
  int32_t grids_at;   // of the code books in the first kernel's shared memory: gate's, then up's
  int32_t hidden_at;  // of the quantised hidden rows in the second's
  int32_t down_grids_at;       // there, too: down's, then the shared expert's
  Divider by_panels;           // panels of 32 hidden values
  Divider by_entries;          // of a row
  Divider by_active;           // routed ones of a row
  Divider by_whole;            // whole segments of a row's hidden values
  Divider by_columns;          // panels of 32 columns of the result
  PanelMatrix gate, up, down;  // of routed experts; `bytes` unused
  PanelMatrix shared_gate, shared_up, shared_down;
};

__device__ __forceinline__ const uint8_t* PanelsOf(uint64_t word) {
  return reinterpret_cast<const uint8_t*>(word & ~kTagBits);
}

// Entry e of a row: routed ones first, then the shared.
__device__ __forceinline__ int64_t EntryIndex(const FfnParams& p, int64_t row, int e) {
  return row * (p.num_active + 1) + e;
}

// One block of 32 hidden values from the segments' sums, [gate then up, segments, 32], by a warp.
__device__ __forceinline__ void WriteHidden(const FfnParams& p, const float* sums, int segments,
                                            int row, int e, int panel, int lane) {
  float g = 0.0f, u = 0.0f;
#pragma unroll 5
  for (int s = 0; s < segments; ++s) {
    g = __fadd_rn(g, sums[s * 32 + lane]);
    u = __fadd_rn(u, sums[(segments + s) * 32 + lane]);
  }
  const float h = SiluMul(g, u);
  const int64_t entry = EntryIndex(p, row, e);
  if (p.hidden != nullptr) p.hidden[entry * p.hidden_width + panel * 32 + lane] = h;
  const int64_t block = entry * (p.hidden_width / 32) + panel;
  QuantizeBlockByWarp(h, lane, p.codes + block * 32, p.scales + block, p.sums + block * 2);
}

}  // namespace strata
