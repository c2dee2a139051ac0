#include "cuda/ops/expert_wide_tiles.cuh"
#include "cuda/ops/expert_wide_tiles.h"

namespace strata::expert_tiles {
namespace {

using Types =
    WideTypes<WideGateUp, DecodeQ8_0, DecodeQ4_K, DecodeIQ4_XS, DecodeIQ3_S, DecodeIQ3_XXS>;

}  // namespace

bool HasWideGateUp(const PanelMatrix& gate, const PanelMatrix& up, int64_t values) {
  return gate.type == up.type && Types::Have(gate, values);
}

std::string LaunchWideGateUp(const TileParams& p, cudaStream_t stream) {
  return Types::Launch(p, stream);
}

}  // namespace strata::expert_tiles
