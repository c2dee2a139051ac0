// What the kernels of sparse attention share: sums of several values over the lanes of a warp.
#pragma once

#include "cuda/reduce.cuh"

namespace strata {

// One exchange of a sum over lanes that leaves each lane half of the values: lanes with the bit
// `step` go on with the upper kKept, the others with the lower. After exchanges with 16, 8, ... the
// upper bits of a lane's number say which value it has. All values are summed in the same tree.
template <int kKept, int kValues>
__device__ __forceinline__ void Halve(float (&x)[kValues], int lane, int step) {
  const bool upper = (lane & step) != 0;
#pragma unroll
  for (int v = 0; v < kKept; ++v) {
    const float sent = upper ? x[v] : x[v + kKept];
    const float kept = upper ? x[v + kKept] : x[v];
    x[v] = kept + __shfl_xor_sync(kAllLanes, sent, step);
  }
}

// The largest value of a warp's lanes, NaNs left out; every lane gets it. All lanes must call.
__device__ __forceinline__ float WarpMax(float value) {
#pragma unroll
  for (int step = 16; step > 0; step /= 2) {
    value = fmaxf(value, __shfl_xor_sync(kAllLanes, value, step));
  }
  return value;
}

__device__ __forceinline__ int WarpSum(int value) {
#pragma unroll
  for (int step = 16; step > 0; step /= 2) value += __shfl_xor_sync(kAllLanes, value, step);
  return value;
}

}  // namespace strata
