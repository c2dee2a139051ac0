// gdn_window: a gated-delta-net block between its projections, row after row.
//
// Per row: causal depthwise convolution (K taps) and SiLU over the q, k, v channels; q and k
// normalised per head (x / sqrt(sum x^2 + 1e-6)), q scaled by C^-1/2; then per value head n with
// key head n mod Kh, from state S [C, Cv]:
//   d = exp(a_log_neg softplus(alpha + dt_bias)),  b = sigmoid(beta)
//   u = b (v - d (k^T S));  S <- d S + k u^T;  o = q^T S
// and y = RMS(o) norm_weight sigmoid(z) per value head (model.md, section 3; weights in GGUF
// order). Each row depends on the rows before it and on the incoming state only, in one order of
// sums: the same bits in a window of any width and in a tile. Rows at and past num_live change no
// state and give zeros.
//
// Rows from num_certain on are drafts: they are computed from the state after the rows before them,
// but the two states that are left behind stand for the certain rows alone. What a draft puts into
// the recurrence waits in `pending`. The next call first replays the num_kept drafts that came true
// (no y is made of them), then goes on with its own rows: the same additions in the same order as
// if they had been certain, so the same bits.
#pragma once

#include <cstdint>

namespace strata {

struct GdnWindowArgs {
  const float* proj;         // [T, channels + Vh*C + 2 Vh]: q|k|v, then z, alpha, beta
  const float* conv_weight;  // [K, channels]  tap K-1 is the row itself
  const float* decay;        // [Vh]  -exp(A_log)
  const float* dt_bias;      // [Vh]
  const float* norm_weight;  // [C]
  float* conv_state;  // [K-1, channels]  last inputs before the window, oldest first; in place
  float* state;       // [Vh, C, C]       key index first; in place
  float* pending;     // [R, channels + 2 Vh]  q|k|v, alpha, beta of drafts; in place
  float* y;           // [T, Vh*C]
  int64_t num_rows;   // T
  int64_t num_live;
  int64_t num_certain;  // at most num_live
  int64_t num_kept;     // at most R; num_live - num_certain is, too
  int64_t num_taps;     // K
  int64_t key_heads;    // Kh
  int64_t value_heads;  // Vh
  int64_t head_dim;     // C, of keys and values; a multiple of 16
  float eps;
};

void GdnWindow(const GdnWindowArgs& args);

}  // namespace strata
