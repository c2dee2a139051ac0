// Cells of the KV cache on the device: consecutive values of a head, as they are stored and as they
// count. The function of ffi/common/cell_rounding.cc.
#pragma once

#include "common/cells.h"
#include "cuda/numerics.cuh"

namespace strata {

// One type for each CellType, with what two and four values are stored in and how they widen.
struct Float32Cells {
  using Two = float2;
  using Four = float4;
  static constexpr bool kScaled = false;
  static __device__ __forceinline__ float2 Widen(float2 x, float) { return x; }
  static __device__ __forceinline__ float4 Widen(float4 x, float) { return x; }
};

struct Float16Cells {
  using Two = uint32_t;
  using Four = uint2;
  static constexpr bool kScaled = false;
  static __device__ __forceinline__ float2 Widen(uint32_t x, float) {
    return make_float2(HalfToFloat(x & 0xffffu), HalfToFloat(x >> 16));
  }
  static __device__ __forceinline__ float4 Widen(uint2 x, float) {
    const float2 low = Widen(x.x, 0.0f), high = Widen(x.y, 0.0f);
    return make_float4(low.x, low.y, high.x, high.y);
  }
};

struct Int8Cells {
  using Two = uint16_t;
  using Four = uint32_t;
  static constexpr bool kScaled = true;
  static __device__ __forceinline__ float Code(uint32_t x, int place, float scale) {
    return static_cast<float>(static_cast<int8_t>(x >> 8 * place & 0xffu)) * scale;
  }
  static __device__ __forceinline__ float2 Widen(uint16_t x, float scale) {
    return make_float2(Code(x, 0, scale), Code(x, 1, scale));
  }
  static __device__ __forceinline__ float4 Widen(uint32_t x, float scale) {
    return make_float4(Code(x, 0, scale), Code(x, 1, scale), Code(x, 2, scale), Code(x, 3, scale));
  }
};

__device__ __forceinline__ int GroupsOf(int dim) { return (dim + kScaleValues - 1) / kScaleValues; }

// Values first..first+1 and first..first+3 of a cache; `first` is a multiple of 2 and 4.
template <typename Stored>
__device__ __forceinline__ typename Stored::Two LoadTwo(const void* cells, int64_t first) {
  return __ldg(static_cast<const typename Stored::Two*>(cells) + first / 2);
}
template <typename Stored>
__device__ __forceinline__ typename Stored::Four LoadFour(const void* cells, int64_t first) {
  return __ldg(static_cast<const typename Stored::Four*>(cells) + first / 4);
}

// The scale of a group of `head`'s key or value, heads of all cells counted; 1 where there is none.
template <typename Stored>
__device__ __forceinline__ float LoadScale(const CellStore& cells, int64_t head, int dim,
                                           bool of_value, int channel) {
  if (!Stored::kScaled) return 1.0f;
  const int64_t first = (2 * head + of_value) * GroupsOf(dim);
  return __ldg(cells.scales + first + channel / kScaleValues);
}

// Round to nearest even: the bits of an IEEE half.
__device__ __forceinline__ uint32_t FloatToHalf(float x) {
#if defined(STRATA_EMULATE)
  const uint32_t bits = __float_as_uint(x), sign = bits >> 16 & 0x8000u;
  const uint32_t magnitude = bits & 0x7fffffffu;
  if (magnitude > 0x7f800000u) return 0x7fffu;
  if (magnitude >= 0x477ff000u) return sign | 0x7c00u;  // 65520 and more
  if (magnitude < 0x38800000u) {
    // Below 2^-14: adding 0.5 leaves multiples of 2^-24, rounded by the addition itself.
    return sign | (__float_as_uint(__uint_as_float(magnitude) + 0.5f) - 0x3f000000u);
  }
  return sign | ((magnitude - 0x38000000u + 0xfffu + (magnitude >> 13 & 1u)) >> 13);
#else
  unsigned short half;
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(half) : "f"(x));
  return half;
#endif
}

// Rounds a head of `dim` values, all lanes of a warp together: value i is x(i), read twice by the
// same lane. `to` and `scales` are the head's.
template <typename From>
__device__ __forceinline__ void StoreHead(Float32Cells, int lane, int dim, From x, void* cells,
                                          int64_t first, float*) {
  for (int i = lane; i < dim; i += 32) static_cast<float*>(cells)[first + i] = x(i);
}

template <typename From>
__device__ __forceinline__ void StoreHead(Float16Cells, int lane, int dim, From x, void* cells,
                                          int64_t first, float*) {
  for (int i = lane; i < dim; i += 32) {
    static_cast<uint16_t*>(cells)[first + i] = static_cast<uint16_t>(FloatToHalf(x(i)));
  }
}

template <typename From>
__device__ __forceinline__ void StoreHead(Int8Cells, int lane, int dim, From x, void* cells,
                                          int64_t first, float* scales) {
  for (int begin = 0; begin < dim; begin += kScaleValues) {
    const int i = begin + lane, j = i + 32;
    const float low = i < dim ? x(i) : 0.0f, high = j < dim ? x(j) : 0.0f;
    const uint32_t magnitude =
        max(__float_as_uint(low) & 0x7fffffffu, __float_as_uint(high) & 0x7fffffffu);
    const BlockScale group = ScaleOfBlock(__reduce_max_sync(kAllLanes, magnitude));
    int8_t* codes = static_cast<int8_t*>(cells) + first;
    if (i < dim) codes[i] = static_cast<int8_t>(QuantCode(low, group));
    if (j < dim) codes[j] = static_cast<int8_t>(QuantCode(high, group));
    if (lane == 0) scales[begin / kScaleValues] = group.scale;
  }
}

}  // namespace strata
