// The products of expert_ffn_tiles.cu by tiles of more entries, where the device has what they
// need.
#pragma once

#include "cuda/ops/expert_tile_launch.h"

namespace strata::expert_tiles {

// Whether a launch has such kernels, for the current device: capability 9.0, matrices of one of
// their types whose rows end in a whole segment or in half of one, and fewer values of all
// activation rows together (padded) than 32 bits count.
bool HasWideGateUp(const PanelMatrix& gate, const PanelMatrix& up, int64_t values);
bool HasWideDown(const PanelMatrix& down, int64_t values);

// Values of the activation rows, at most: of a call's rows, and of the hidden rows of its entries,
// the shared expert's among them.
inline int64_t GateUpValues(const TileParams& p) { return p.num_rows * p.in.values; }
inline int64_t DownValues(const TileParams& p) {
  return p.num_rows * (int64_t{1} + p.num_active) * p.in.values;
}

std::string LaunchWideGateUp(const TileParams& p, cudaStream_t stream);
std::string LaunchWideDown(const TileParams& p, cudaStream_t stream);

}  // namespace strata::expert_tiles
