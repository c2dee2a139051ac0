// expert_ffn for tiles of a prompt: more rows than a window has, by int8 matrix units.
//
// Bit for bit what ExpertFfn gives for few rows (contract T).
#pragma once

#include "cuda/ops/expert_ffn.h"

namespace strata {

// Whether all of the layer's matrices are quantised: others are left to ExpertFfn's kernels.
bool HasExpertTiles(const ExpertFfnArgs& args);

// Bytes. `hidden`: the larger of the routed and the shared experts'; `is_whole`: experts may arrive
// in a ring (expert_ring.h), or a peer computes some (peer_tiles.h).
int64_t ExpertFfnTilesWorkspace(int64_t num_rows, int64_t num_active, int64_t num_experts,
                                int64_t width, int64_t hidden, bool is_whole);

std::string ExpertFfnTiles(const ExpertFfnArgs& args, cudaStream_t stream);

}  // namespace strata
