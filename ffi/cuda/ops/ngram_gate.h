// ngram_gate on the device: the contract of ops/ngram_gate.h, in two kernels.
//
// The first sums over each row's streams and leaves two factors for each in the workspace. The
// second gives every channel a thread, which convolves a run of rows.
#pragma once

#include <cstdint>
#include <string>

#include "cuda/launch.h"

namespace strata {

struct NgramGateArgs {
  const float* key_value;    // [T, (J+1) D]  16-byte aligned, as all rows of D
  const float* norm_key;     // [J, D]
  const float* norm_query;   // [J, D]
  const float* norm_conv;    // [J, D]
  const float* conv_weight;  // [taps, J*D]  the last tap is the row itself
  const float* streams;      // [T, J, D]
  const float* conv_state;   // [(taps-1) dilation, J*D]  inputs before row 0, oldest first
  const float* pending;      // [R, J*D]  inputs of drafts
  const int32_t* kept;       // one number, as the next two
  const int32_t* certain;
  const int32_t* live;
  float* new_streams;     // may be streams
  float* new_conv_state;  // may be conv_state
  float* new_pending;     // may be pending
  float2* factors;        // [T, J]  the workspace: sigmoid(z), and 1 / RMS(G)
  int64_t num_rows;       // T
  int64_t num_pending;    // R
  int64_t num_streams;    // J
  int64_t width;          // D, a multiple of 4
  int64_t num_taps;       // at most kMostNgramTaps
  int64_t dilation;
  float eps;
};

inline constexpr int64_t kMostNgramTaps = 4;
inline constexpr int64_t kMostNgramHistory = 64;  // (taps-1) dilation

// Bytes of scratch memory for T rows of J streams.
constexpr int64_t NgramGateWorkspace(int64_t num_rows, int64_t num_streams) {
  return num_rows * num_streams * 8;
}

std::string NgramGate(const NgramGateArgs& args, cudaStream_t stream);

}  // namespace strata
