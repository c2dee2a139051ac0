// quant_matmul for tiles of a prompt: more rows than a window has, by matrix units.
//
// Quantised matrices by contract T, bit for bit what QuantMatmul gives for few rows. Others by
// float_mma.cuh: a row's bits depend on that row alone, but are not those of the kernels for few.
#pragma once

#include "cuda/ops/quant_matmul.h"
#include "cuda/tile_rows.h"

namespace strata {

int64_t QuantMatmulTilesWorkspace(int64_t num_rows,
                                  const std::vector<const DeviceMatrix*>& matrices);

std::string QuantMatmulTiles(const QuantMatmulArgs& args, cudaStream_t stream);

}  // namespace strata
