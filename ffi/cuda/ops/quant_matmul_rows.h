// Products for windows, of the types that files for decoding use. The bits are QuantMatmul's.
#pragma once

#include <string>

#include "cuda/ops/quant_matmul.h"

namespace strata {

// Whether QuantMatmulRows computes these.
bool TakesRows(const QuantMatmulArgs& args);

std::string QuantMatmulRows(const QuantMatmulArgs& args, cudaStream_t stream);

}  // namespace strata
