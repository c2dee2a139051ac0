// Products of float32 values on the matrix units: each value as the sum of two bfloat16.
//
// x = high + low + error, |error| <= 2^-18 |x|: eight bits of mantissa each, and the range is that
// of float32, so nothing has to be scaled. A product is low * high + high * low + high * high,
// three instructions into one float32 accumulator; what is left out is again below 2^-18 of it.
#pragma once

#include "cuda/mma.cuh"

namespace strata {

struct SplitPair {
  uint32_t high;
  uint32_t low;
};

__device__ __forceinline__ SplitPair Split(float first, float second) {
  const uint32_t high = PackBf16(first, second);
  const float a = __uint_as_float(high << 16);
  const float b = __uint_as_float(high & 0xffff0000u);
  return {high, PackBf16(__fsub_rn(first, a), __fsub_rn(second, b))};
}

// A tile of the left operand, 16 x 16.
struct SplitA {
  uint32_t high[4];
  uint32_t low[4];
};

// Of two neighbouring tiles of results: they are, value for value, a tile of the left operand.
__device__ __forceinline__ SplitA SplitTiles(const float (&left)[4], const float (&right)[4]) {
  const SplitPair p0 = Split(left[0], left[1]);
  const SplitPair p1 = Split(left[2], left[3]);
  const SplitPair p2 = Split(right[0], right[1]);
  const SplitPair p3 = Split(right[2], right[3]);
  return {{p0.high, p1.high, p2.high, p3.high}, {p0.low, p1.low, p2.low, p3.low}};
}

// kCount tiles of results that share a tile of the left operand. b[i]: the two halves of tile i of
// the right one, high, then low. Tile after tile within each of the three products: neighbours in
// the stream of instructions do not wait for each other.
template <int kCount>
__device__ __forceinline__ void MultiplySplit(const SplitA& a, const uint32_t (*b)[4],
                                              float (*c)[4]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) MmaBf16(c[i], a.low, b[i][0], b[i][1]);
#pragma unroll
  for (int i = 0; i < kCount; ++i) MmaBf16(c[i], a.high, b[i][2], b[i][3]);
#pragma unroll
  for (int i = 0; i < kCount; ++i) MmaBf16(c[i], a.high, b[i][0], b[i][1]);
}

}  // namespace strata
