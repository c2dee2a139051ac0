// quant_matmul: activations times one or more GGUF matrices that read the same input.
//
// y[t] = concat over matrices of (W x[t]), in contract T's arithmetic: the input is quantised once
// per block of 32 for quantised matrices and stays float32 for the others. A row's bits depend on
// that row and the matrices alone. Rows at and past num_live are zero.
#pragma once

#include <cstdint>
#include <span>

#include "weights/weight_store.h"

namespace strata {

struct QuantMatmulArgs {
  const float* x;    // [T, K]
  float* y;          // [T, sum of rows]
  int64_t num_rows;  // T
  int64_t num_live;
  int64_t width;  // K
  std::span<const Matrix* const> matrices;
};

void QuantMatmul(const QuantMatmulArgs& args);

}  // namespace strata
