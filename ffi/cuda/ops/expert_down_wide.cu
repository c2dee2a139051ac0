#include "cuda/ops/expert_wide_tiles.cuh"
#include "cuda/ops/expert_wide_tiles.h"

namespace strata::expert_tiles {
namespace {

using Types = WideTypes<WideDown, DecodeQ8_0, DecodeQ4_K, DecodeIQ4_NL, DecodeIQ4_XS, DecodeIQ3_S>;

}  // namespace

bool HasWideDown(const PanelMatrix& down, int64_t values) { return Types::Have(down, values); }

std::string LaunchWideDown(const TileParams& p, cudaStream_t stream) {
  return Types::Launch(p, stream);
}

}  // namespace strata::expert_tiles
