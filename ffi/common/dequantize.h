// One row of a GGUF matrix to float32, for tables that are read row by row.
#pragma once

#include "weights/weight_store.h"

namespace strata {

// out[i] = D * (k * w) (+ M * n), the file format's value with one rounding per operation.
void DequantizeRow(const Matrix& matrix, int64_t row, float* out);

}  // namespace strata
