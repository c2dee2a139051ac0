// gdn_window on the device: the contract of ops/gdn_window.h, in one kernel.
//
// A block is a value head. It reads the head's state once, keeps it in registers from row to row
// and writes it once, after the last certain row. The q and k channels of a key head are convolved
// by every block that reads them; the last of these blocks to have read their old inputs writes the
// new ones.
#pragma once

#include <cstdint>
#include <string>

#include "cuda/launch.h"

namespace strata {

struct GdnWindowArgs {
  const float* proj;         // [T, channels + Vh*C + 2 Vh]: q|k|v, then z, alpha, beta
  const float* conv_weight;  // [K, channels]  tap K-1 is the row itself
  const float* decay;        // [Vh]  -exp(A_log)
  const float* dt_bias;      // [Vh]
  const float* norm_weight;  // [C]
  const float* conv_state;   // [K-1, channels]  oldest first
  const float* state;        // [Vh, C, C]       key index first, 16-byte aligned
  const float* pending;      // [R, channels + 2 Vh]  q|k|v, alpha, beta of drafts
  const int32_t* kept;       // one number, as the next two; not read without pending rows
  const int32_t* certain;
  const int32_t* live;
  float* y;               // [T, Vh*C]
  float* new_conv_state;  // may be conv_state
  float* new_state;       // may be state
  float* new_pending;     // may be pending
  int64_t num_pending;    // R; 0: every row is certain
  int64_t num_rows;       // T, at least 1
  int64_t num_taps;       // K, at most kMostGdnTaps
  int64_t key_heads;      // Kh, at most kMostGdnKeyHeads
  int64_t value_heads;    // Vh
  int64_t head_dim;       // C: a multiple of 16, at most kMostGdnDim
  float eps;
};

inline constexpr int64_t kMostGdnTaps = 4;
inline constexpr int64_t kMostGdnKeyHeads = 1024;
inline constexpr int64_t kMostGdnDim = 128;

std::string GdnWindow(const GdnWindowArgs& args, cudaStream_t stream);

}  // namespace strata
