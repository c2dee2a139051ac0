// ngram_gate: gates the n-gram embedding by the residual streams and adds it to them.
//
// Per row and stream s, with K_s and v the projected embedding and N(.) the RMS norm of one stream:
//   z = (N(K_s) key_s . N(X_s) query_s) / sqrt(D);  z = sign(z) sqrt(max(|z|, 1e-6))
//   G_s = sigmoid(z) v;   X_s += G_s + silu(conv(N(G_s) conv_s))
// with a causal depthwise convolution over time, its taps `dilation` rows apart (model.md, section
// 7). Each row depends on the rows before it and the incoming state only. Rows at and past num_live
// change nothing.
//
// Rows from num_certain on are drafts, and num_kept drafts of the call before came true: as in
// ops/gdn_window.h, for the state of the convolution.
#pragma once

#include <cstdint>

namespace strata {

struct NgramGateArgs {
  const float* key_value;    // [T, (J+1) D]
  const float* norm_key;     // [J, D]
  const float* norm_query;   // [J, D]
  const float* norm_conv;    // [J, D]
  const float* conv_weight;  // [taps, J*D]  the last tap is the row itself
  float* streams;            // [T, J, D]    in place
  float* conv_state;  // [(taps-1) dilation, J*D]  inputs before row 0, oldest first; in place
  float* pending;     // [R, J*D]  the drafts' inputs; in place
  int64_t num_live;
  int64_t num_certain;  // at most num_live
  int64_t num_kept;     // at most R; num_live - num_certain is, too
  int64_t num_streams;  // J
  int64_t width;        // D, a multiple of 16
  int64_t num_taps;
  int64_t dilation;
  float eps;
};

void NgramGate(const NgramGateArgs& args);

}  // namespace strata
