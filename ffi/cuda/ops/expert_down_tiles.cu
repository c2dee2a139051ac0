#include "cuda/ops/expert_tile_launch.h"
#include "cuda/ops/expert_wide_tiles.h"

namespace strata::expert_tiles {
namespace {

template <typename Weights>
std::string Run(const TileParams& p, int64_t tiles, cudaStream_t stream) {
  return LaunchTiles<Weights>(DownTiles<Weights>, p, (p.slice + kColumns - 1) / kColumns, tiles,
                              stream);
}

}  // namespace

std::string LaunchDown(const TileParams& p, int64_t tiles, cudaStream_t stream) {
  if (HasWideDown(p.first, DownValues(p))) return LaunchWideDown(p, stream);
  switch (p.first.type) {
#define STRATA_CASE(name) \
  case GgmlType::k##name: \
    return Run<Inlined<Decode##name>>(p, tiles, stream);
    STRATA_CASE(Q8_0)
    STRATA_CASE(Q5_0)
    STRATA_CASE(Q2_0)
    STRATA_CASE(Q4_K)
    STRATA_CASE(Q5_K)
    STRATA_CASE(Q6_K)
    STRATA_CASE(IQ4_NL)
    STRATA_CASE(IQ4_XS)
    STRATA_CASE(IQ3_S)
#undef STRATA_CASE
    default:
      return Run<AnyType>(p, tiles, stream);
  }
}

}  // namespace strata::expert_tiles
