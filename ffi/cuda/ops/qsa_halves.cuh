// A float as two IEEE halves, for products by matrix units that are nearly float32's.
#pragma once

#include "cuda/mma.cuh"

namespace strata {

// x = high + low + (an error below 2^-22 |x|, or 2^-25 where x is small), in pairs; past 65,504
// infinite.
struct SplitPair {
  uint32_t high, low;
};

__device__ __forceinline__ SplitPair Split(float a, float b) {
  const uint32_t high = PackF16(a, b);
  return {high, PackF16(a - HalfToFloat(high & 0xffffu), b - HalfToFloat(high >> 16))};
}

}  // namespace strata
