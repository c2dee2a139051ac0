#include "cuda/ops/expert_wide_tiles.cuh"
#include "cuda/ops/expert_wide_tiles.h"

namespace strata::expert_tiles {
namespace {

// Types with groups of 32 values: others need two sums for a block.
#define STRATA_WIDE_TYPES(X) X(Q8_0) X(Q4_K) X(IQ4_NL) X(IQ4_XS) X(IQ3_S)

bool HasType(GgmlType type) {
  switch (type) {
#define STRATA_CASE(name) case GgmlType::k##name:
    STRATA_WIDE_TYPES(STRATA_CASE)
#undef STRATA_CASE
    return true;
    default:
      return false;
  }
}

}  // namespace

bool HasWideDown(const PanelMatrix& down) { return HasType(down.type) && FitsWide(down); }

std::string LaunchWideDown(const TileParams& p, cudaStream_t stream) {
  switch (p.first.type) {
#define STRATA_CASE(name) \
  case GgmlType::k##name: \
    return wide::LaunchTiles<Decode##name, WideDown>(p, stream);
    STRATA_WIDE_TYPES(STRATA_CASE)
#undef STRATA_CASE
    default:
      return "a type without wide tiles";
  }
}

}  // namespace strata::expert_tiles
