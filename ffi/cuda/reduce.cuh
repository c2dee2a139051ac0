// What the kernels that are not products share: sums in a fixed tree, and the sigmoid.
#pragma once

#include "cuda/launch.h"
#include "cuda/numerics.cuh"

namespace strata {

// The sum over a warp's lanes; every lane gets it. All lanes must call.
__device__ __forceinline__ float WarpSum(float value) {
#pragma unroll
  for (int step = 16; step > 0; step /= 2) value += __shfl_xor_sync(kAllLanes, value, step);
  return value;
}

__device__ __forceinline__ float Sigmoid(float x) { return 1.0f / (1.0f + expf(-x)); }

// Which of a launch's rows count. Nothing on the device can refuse a number that is no number of
// rows, so it is brought into range.
__device__ __forceinline__ int LiveRows(int live, int64_t num_rows) {
  return min(max(live, 0), static_cast<int>(num_rows));
}

}  // namespace strata
