// Products of float32 values on the matrix units: each value as the sum of two bfloat16.
//
// x = high + low + error, |error| <= 2^-18 |x|: eight bits of mantissa each, and the range is that
// of float32, so nothing has to be scaled. A product is high*high + high*low + low*high, three
// instructions into one float32 accumulator; what is left out is again below 2^-18 of it.
//
// Fragments are those of mma.sync m16n8k16 (PTX ISA, "Matrix fragments for mma.m16n8k16"), with
// g = lane / 4 and t = lane % 4:
//   A [16 x 16]: a[0] row g, columns 2t and 2t+1; a[1] row g+8; a[2], a[3] the same 8 columns on
//   B [16 x 8]:  b[0] rows 2t and 2t+1, column g; b[1] 8 rows on
//   C [16 x 8]:  c[0], c[1] row g, columns 2t and 2t+1; c[2], c[3] row g+8
// so two neighbouring tiles of C are, value for value, a tile of A.
#pragma once

#include <cstdint>

#include "cuda/launch.h"
#include "cuda/numerics.cuh"

namespace strata {

// Two values as bfloat16, rounded to nearest even, the first in the low half.
__device__ __forceinline__ uint32_t PackBf16(float first, float second) {
#if defined(STRATA_EMULATE)
  const auto rounded = [](float x) {
    const uint32_t bits = __float_as_uint(x);
    if (!(x == x)) return 0x7fffu;
    return (bits + 0x7fffu + (bits >> 16 & 1u)) >> 16;
  };
  return rounded(second) << 16 | rounded(first);
#else
  uint32_t packed;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(second), "f"(first));
  return packed;
#endif
}

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

// A tile of A, split.
struct SplitA {
  uint32_t high[4];
  uint32_t low[4];
};

// From two neighbouring tiles of C.
__device__ __forceinline__ SplitA SplitTiles(const float (&left)[4], const float (&right)[4]) {
  const SplitPair p0 = Split(left[0], left[1]);
  const SplitPair p1 = Split(left[2], left[3]);
  const SplitPair p2 = Split(right[0], right[1]);
  const SplitPair p3 = Split(right[2], right[3]);
  return {{p0.high, p1.high, p2.high, p3.high}, {p0.low, p1.low, p2.low, p3.low}};
}

// c += a b
__device__ __forceinline__ void MmaBf16(const uint32_t (&a)[4], uint32_t b0, uint32_t b1,
                                        float (&c)[4]) {
#if defined(STRATA_EMULATE)
  const int lane = threadIdx.x % 32;
  const auto exchanged = [](uint32_t x, uint32_t y, int from) {
    return __shfl_sync(kAllLanes, static_cast<unsigned long long>(y) << 32 | x, from);
  };
  const auto value = [](unsigned long long four, int i) {
    return Bf16ToFloat(static_cast<uint32_t>(four >> 16 * i) & 0xffffu);
  };
  double sums[4] = {c[0], c[1], c[2], c[3]};
  for (int t = 0; t < 4; ++t) {
    const auto left = exchanged(a[0], a[1], lane / 4 * 4 + t);
    const auto right = exchanged(a[2], a[3], lane / 4 * 4 + t);
    for (int column = 0; column < 2; ++column) {
      const auto b = exchanged(b0, b1, (lane % 4 * 2 + column) * 4 + t);
      for (int row = 0; row < 2; ++row) {
        for (int i = 0; i < 2; ++i) {
          sums[2 * row + column] += value(left, 2 * row + i) * value(b, i);
          sums[2 * row + column] += value(right, 2 * row + i) * value(b, 2 + i);
        }
      }
    }
  }
  for (int i = 0; i < 4; ++i) c[i] = static_cast<float>(sums[i]);
#else
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
      "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
#endif
}

// Four 8 x 8 matrices of 16-bit values from shared memory. Lane 8 i + r has the address of row r of
// matrix i, 16 bytes that lie at a multiple of 16; to[i] gets matrix i's row g, columns 2t and
// 2t+1, or transposed rows 2t and 2t+1, column g. Volatile: the compiler knows of no dependence
// on what barriers order.
template <bool kTransposed>
__device__ __forceinline__ void LoadMatrices(const unsigned char* row, uint32_t (&to)[4]) {
#if defined(STRATA_EMULATE)
  const int lane = threadIdx.x % 32;
  const auto address = reinterpret_cast<unsigned long long>(row);
  const auto at = [&](int matrix, int from_row, int column) {
    const auto base = __shfl_sync(kAllLanes, address, 8 * matrix + from_row);
    return static_cast<uint32_t>(reinterpret_cast<const uint16_t*>(base)[column]);
  };
  for (int i = 0; i < 4; ++i) {
    const int g = lane / 4, t = lane % 4;
    const uint32_t first = kTransposed ? at(i, 2 * t, g) : at(i, g, 2 * t);
    const uint32_t second = kTransposed ? at(i, 2 * t + 1, g) : at(i, g, 2 * t + 1);
    to[i] = second << 16 | first;
  }
#else
  const auto address = static_cast<uint32_t>(__cvta_generic_to_shared(row));
  if constexpr (kTransposed) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
                 : "r"(address)
                 : "memory");
  } else {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
                 : "r"(address)
                 : "memory");
  }
#endif
}

// kCount tiles of C that share a tile of A. b[i]: high of tile i's two halves, then low of them.
// Tile after tile within each of the three products: neighbours in the stream of instructions do
// not wait for each other.
template <int kCount>
__device__ __forceinline__ void MultiplySplit(const SplitA& a, const uint32_t (*b)[4],
                                              float (*c)[4]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) MmaBf16(a.low, b[i][0], b[i][1], c[i]);
#pragma unroll
  for (int i = 0; i < kCount; ++i) MmaBf16(a.high, b[i][2], b[i][3], c[i]);
#pragma unroll
  for (int i = 0; i < kCount; ++i) MmaBf16(a.high, b[i][0], b[i][1], c[i]);
}

}  // namespace strata
