// The products of expert_ffn_tiles.cu by tiles of more entries, where the device has what they
// need.
#pragma once

#include "cuda/ops/expert_tile_launch.h"

namespace strata::expert_tiles {

// Whether a launch has such kernels, for the current device: capability 9.0, and matrices of one of
// their types whose rows end in a whole segment or in half of one.
bool HasWideGateUp(const PanelMatrix& gate, const PanelMatrix& up);
bool HasWideDown(const PanelMatrix& down);

std::string LaunchWideGateUp(const TileParams& p, cudaStream_t stream);
std::string LaunchWideDown(const TileParams& p, cudaStream_t stream);

}  // namespace strata::expert_tiles
