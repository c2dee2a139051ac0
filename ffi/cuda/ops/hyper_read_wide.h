// hyper_read for tiles by group instructions, where the device has them.
#pragma once

#include "cuda/ops/hyper_read_tiles_parts.cuh"

namespace strata::hyper {

// Whether there are such kernels for the current device, capability 9.0, and a rank.
bool HasWideHyperRead(int64_t rank);

std::string LaunchWideHyperRead(const TileParams& p, cudaStream_t stream);

}  // namespace strata::hyper
