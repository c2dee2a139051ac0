// The float arithmetic of contract T (numerics.md) on the device: the twins of common/numerics.h,
// operation by operation, and quantisation by a warp.
//
// Every operation that counts is spelled as an intrinsic, so nothing here depends on the compiler's
// contraction; the library is compiled with -fmad=false -ftz=false and exact division all the same.
#pragma once

#include <cstdint>

#include "cuda/launch.h"

namespace strata {

inline constexpr unsigned kAllLanes = 0xffffffffu;

// An IEEE half's bits to float32, exact; any NaN comes out quiet.
__device__ __forceinline__ float HalfToFloat(uint32_t bits) {
#if defined(STRATA_EMULATE)
  const uint32_t sign = (bits & 0x8000u) << 16;
  const uint32_t exponent = (bits >> 10) & 0x1fu;
  const uint32_t mantissa = bits & 0x3ffu;
  if (exponent == 0) {  // zero or subnormal: mantissa * 2^-24
    const float magnitude = static_cast<float>(mantissa) * 0x1p-24f;
    return __uint_as_float(__float_as_uint(magnitude) | sign);
  }
  const uint32_t quiet = exponent == 31 && mantissa != 0 ? 0x400000u : 0u;
  const uint32_t widened = exponent == 31 ? 255u : exponent + 112u;
  return __uint_as_float(sign | widened << 23 | mantissa << 13 | quiet);
#else
  float value;
  asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(static_cast<unsigned short>(bits)));
  return value;
#endif
}

__device__ __forceinline__ float Bf16ToFloat(uint32_t bits) { return __uint_as_float(bits << 16); }

// Constants of SiLU's exponential, explained in common/numerics.h.
inline constexpr float kLog2e = 0x1.715476p+0f;
inline constexpr float kLn2Hi = 0x1.62ep-1f;
inline constexpr float kLn2Lo = 0x1.0bfbe8p-15f;
inline constexpr float kExp6 = 0x1.6c16c2p-10f;
inline constexpr float kExp5 = 0x1.111112p-7f;
inline constexpr float kExp4 = 0x1.555556p-5f;
inline constexpr float kExp3 = 0x1.555556p-3f;
inline constexpr float kExp2 = 0x1p-1f;

// e^c for |c| <= 87.
__device__ __forceinline__ float ExpBounded(float c) {
  const float n = rintf(__fmul_rn(c, kLog2e));
  float r = __fmaf_rn(-n, kLn2Hi, c);
  r = __fmaf_rn(-n, kLn2Lo, r);
  float e = kExp6;
  e = __fmaf_rn(e, r, kExp5);
  e = __fmaf_rn(e, r, kExp4);
  e = __fmaf_rn(e, r, kExp3);
  e = __fmaf_rn(e, r, kExp2);
  e = __fmaf_rn(e, r, 1.0f);
  e = __fmaf_rn(e, r, 1.0f);
  return __fmul_rn(e, __int_as_float((__float2int_rn(n) + 127) << 23));
}

// h = (g / (1 + e^-g)) * u. A NaN gate gives NaN.
__device__ __forceinline__ float SiluMul(float g, float u) {
  if (!(g == g)) return g;
  float c = -g;
  c = c > -87.0f ? c : -87.0f;
  c = c < 87.0f ? c : 87.0f;
  return __fmul_rn(__fdiv_rn(g, __fadd_rn(1.0f, ExpBounded(c))), u);
}

// Below this the activation block counts as zero (numerics.md).
inline constexpr float kQuantFloor = 0x1p-100f;
inline constexpr float kInv127 = 0x1.020408p-7f;

// What quantising a block needs of its largest magnitude. Magnitudes are compared as integers: the
// bits of non-negative floats are ordered as their values, infinity and NaN above all.
struct BlockScale {
  float inverse;  // codes are rint(x * inverse); 0 where all codes are 0
  float scale;
};

// 127 / x, correctly rounded, for the bits of a finite x of at least kQuantFloor. The operator
// calls a function for the numbers that these steps leave out, and a kernel would save what it
// holds for the call. The quotient of x's mantissa, of [2, 4), is found by the operator's own
// steps; what is left is a power of two, and nothing that comes out is subnormal.
__device__ __forceinline__ float Of127(uint32_t bits) {
  const float scale = __uint_as_float(0x7f800000u - (bits & 0x7f800000u));
  const float x = __uint_as_float((bits & 0x007fffffu) | 0x40000000u);
#if defined(STRATA_EMULATE)
  return __fmul_rn(__fdiv_rn(127.0f, x), scale);
#else
  float inverse;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(inverse) : "f"(x));
  inverse = __fmaf_rn(inverse, __fmaf_rn(-x, inverse, 1.0f), inverse);
  float quotient = __fmul_rn(127.0f, inverse);
  quotient = __fmaf_rn(__fmaf_rn(-x, quotient, 127.0f), inverse, quotient);
  quotient = __fmaf_rn(__fmaf_rn(-x, quotient, 127.0f), inverse, quotient);
  return __fmul_rn(quotient, scale);
#endif
}

__device__ __forceinline__ BlockScale ScaleOfBlock(uint32_t largest_bits) {
  const float largest = __uint_as_float(largest_bits);
  if (largest_bits >= 0x7f800000u) return {0.0f, __uint_as_float(0x7fc00000u)};
  if (largest < kQuantFloor) return {0.0f, 0.0f};
  return {Of127(largest_bits), __fmul_rn(largest, kInv127)};
}

// A code within +-127. Without the test infinity times 0 would reach the conversion, whose result
// for NaN (0) the languages leave open.
__device__ __forceinline__ int QuantCode(float x, const BlockScale& block) {
  return block.inverse == 0.0f ? 0 : __float2int_rn(__fmul_rn(x, block.inverse));
}

// One block of 32 by a whole warp, a value a lane; all lanes must call.
struct QuantizedLane {
  int code;
  int half_sum;  // of the codes of the lane's half of the block (16 values)
  float scale;   // the block's
};

__device__ __forceinline__ QuantizedLane QuantizeLane(float x) {
  const uint32_t magnitude = __float_as_uint(x) & 0x7fffffffu;
  const BlockScale block = ScaleOfBlock(__reduce_max_sync(kAllLanes, magnitude));
  const int code = QuantCode(x, block);
  int sum = code;
  for (int step = 8; step >= 1; step /= 2) sum += __shfl_xor_sync(kAllLanes, sum, step);
  return {code, sum, block.scale};
}

// Four blocks of 32 by a whole warp: a lane holds four consecutive values, lanes 8b to 8b + 7 block
// b. All lanes must call.
struct QuantizedQuad {
  uint32_t codes;  // four int8, the first in the low byte
  int half_sum;    // of the 16 values of lanes 4h to 4h + 3
  float scale;     // of the lane's block
};

__device__ __forceinline__ QuantizedQuad QuantizeQuad(const float4& x) {
  uint32_t largest =
      max(max(__float_as_uint(x.x) & 0x7fffffffu, __float_as_uint(x.y) & 0x7fffffffu),
          max(__float_as_uint(x.z) & 0x7fffffffu, __float_as_uint(x.w) & 0x7fffffffu));
  for (int step = 4; step >= 1; step /= 2) {
    largest = max(largest, __shfl_xor_sync(kAllLanes, largest, step));
  }
  const BlockScale block = ScaleOfBlock(largest);
  const uint32_t a = static_cast<uint32_t>(QuantCode(x.x, block)) & 0xffu;
  const uint32_t b = static_cast<uint32_t>(QuantCode(x.y, block)) & 0xffu;
  const uint32_t c = static_cast<uint32_t>(QuantCode(x.z, block)) & 0xffu;
  const uint32_t d = static_cast<uint32_t>(QuantCode(x.w, block)) & 0xffu;
  const uint32_t codes = a | b << 8 | c << 16 | d << 24;
  int sum = __dp4a(static_cast<int>(codes), 0x01010101, 0);
  for (int step = 2; step >= 1; step /= 2) sum += __shfl_xor_sync(kAllLanes, sum, step);
  return {codes, sum, block.scale};
}

// One block by one thread, as common/numerics.h.
__device__ __forceinline__ void QuantizeBlock(const float* x, int8_t* codes, float* scale) {
  uint32_t largest = 0;
  for (int i = 0; i < 32; ++i) largest = max(largest, __float_as_uint(x[i]) & 0x7fffffffu);
  const BlockScale block = ScaleOfBlock(largest);
  for (int i = 0; i < 32; ++i) codes[i] = static_cast<int8_t>(QuantCode(x[i], block));
  *scale = block.scale;
}

}  // namespace strata
