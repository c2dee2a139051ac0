// hyper_read: writes a block's output to the residual streams, then reads the next block's input
// from them.
//
// Per row, streams X [J, D]:
//   X_s += beta_s y                                  (the previous block's deferred write; +0 at
//   the start) N_s = X_s / sqrt(mean X_s^2 + eps) * norm_s a = silu((W_down N) / J);  g = W_up a;
//   x = 1/J sum_s sigmoid(g_s) N_s next_beta_s = 2 sigmoid((W_inject N)_s / J)      (without an
//   inject matrix: none)
// (model.md, section 2). Products have contract T's arithmetic. A row's bits depend on that row
// alone. Rows at and past num_live keep their streams and give zeros.
#pragma once

#include <cstdint>

#include "weights/weight_store.h"

namespace strata {

struct HyperReadArgs {
  float* streams;     // [T, J, D]  in place
  const float* y;     // [T, D]
  const float* beta;  // [T, J]
  const float* norm;  // [J, D]
  float* x;           // [T, D]
  float* next_beta;   // [T, J]     zero without inject
  int64_t num_rows;   // T
  int64_t num_live;
  int64_t num_streams;  // J
  int64_t width;        // D, a multiple of 16
  float eps;
  const Matrix* down;    // [R, J*D]
  const Matrix* inject;  // [J, J*D]   null for the final mixer
  const Matrix* up;      // [J*D, R]
};

void HyperRead(const HyperReadArgs& args);

}  // namespace strata
