// What the kernels of qsa_select share.
#pragma once

#include "cuda/ops/qsa_select.h"

namespace strata {

inline constexpr int kIndexGroup = 16;  // blocks side by side in index_keys

// Complete blocks that row t sees.
__device__ __forceinline__ int CompleteBlocks(const QsaSelectArgs& a, int pos, int t) {
  return min((pos + t + 1) / a.ratio, a.num_groups * kIndexGroup);
}

}  // namespace strata
