// The float arithmetic of contract T (numerics.md), spelled out operation by operation.
//
// Every function is one IEEE float32 operation, or a documented sequence of them. Files that
// include this are compiled with -ffp-contract=off and without fast math, so a*b+c is never fused
// unless std::fma says so. The functions are static: files are compiled for different instruction
// sets, and the linker must not let the one for AVX-512 stand for all.
#pragma once

#include <bit>
#include <cmath>
#include <cstdint>
#include <cstring>

#if defined(__x86_64__)
#include <xmmintrin.h>
#endif

namespace strata {

// Round to nearest even, subnormals kept. XLA's threads run with FTZ and DAZ on and a thread
// inherits the mode of its creator, so every handler and every pool thread opens one of these.
class FloatMode {
 public:
  FloatMode() {
#if defined(__x86_64__)
    saved_ = _mm_getcsr();
    _mm_setcsr(0x1f80);
#endif
  }
  ~FloatMode() {
#if defined(__x86_64__)
    _mm_setcsr(saved_);
#endif
  }
  FloatMode(const FloatMode&) = delete;
  FloatMode& operator=(const FloatMode&) = delete;

 private:
  unsigned saved_ = 0;
};

// IEEE half at `bytes` (little endian, any alignment) to float32, exact.
static inline float HalfToFloat(const uint8_t* bytes) {
  uint16_t h;
  std::memcpy(&h, bytes, 2);
  const uint32_t sign = static_cast<uint32_t>(h & 0x8000u) << 16;
  const uint32_t exponent = (h >> 10) & 0x1fu;
  const uint32_t mantissa = h & 0x3ffu;
  if (exponent == 0) {  // zero or subnormal: mantissa * 2^-24, exact in float32
    const float magnitude = static_cast<float>(mantissa) * 0x1p-24f;
    return std::bit_cast<float>(std::bit_cast<uint32_t>(magnitude) | sign);
  }
  if (exponent == 31) return std::bit_cast<float>(sign | 0x7f800000u | (mantissa << 13));
  return std::bit_cast<float>(sign | ((exponent + 112) << 23) | (mantissa << 13));
}

static inline float Bf16ToFloat(const uint8_t* bytes) {
  uint16_t b;
  std::memcpy(&b, bytes, 2);
  return std::bit_cast<float>(static_cast<uint32_t>(b) << 16);
}

// Constants of SiLU's exponential. log2e and ln 2 split in two (hi has 11 trailing zero bits, so
// n * hi is exact for |n| < 2^8); the polynomial is the degree-6 Taylor expansion of e^r, enough
// for |r| <= ln2/2: the remainder r^7/5040 is below 2^-23 relative.
inline constexpr float kLog2e = 0x1.715476p+0f;
inline constexpr float kLn2Hi = 0x1.62ep-1f;
inline constexpr float kLn2Lo = 0x1.0bfbe8p-15f;
inline constexpr float kExp6 = 0x1.6c16c2p-10f;  // 1/720
inline constexpr float kExp5 = 0x1.111112p-7f;   // 1/120
inline constexpr float kExp4 = 0x1.555556p-5f;   // 1/24
inline constexpr float kExp3 = 0x1.555556p-3f;   // 1/6
inline constexpr float kExp2 = 0x1p-1f;

// e^c for |c| <= 87 in the documented order of operations.
static inline float ExpBounded(float c) {
  const float n = std::nearbyint(c * kLog2e);
  float r = std::fma(-n, kLn2Hi, c);
  r = std::fma(-n, kLn2Lo, r);
  float e = kExp6;
  e = std::fma(e, r, kExp5);
  e = std::fma(e, r, kExp4);
  e = std::fma(e, r, kExp3);
  e = std::fma(e, r, kExp2);
  e = std::fma(e, r, 1.0f);
  e = std::fma(e, r, 1.0f);
  const float power = std::bit_cast<float>((static_cast<int32_t>(n) + 127) << 23);
  return e * power;
}

// h = (g / (1 + e^-g)) * u. A NaN gate gives NaN: the comparisons keep it away from the integer
// cast.
static inline float SiluMul(float g, float u) {
  if (!(g == g)) return g;
  float c = -g;
  c = c > -87.0f ? c : -87.0f;
  c = c < 87.0f ? c : 87.0f;
  return (g / (1.0f + ExpBounded(c))) * u;
}

// Below this the activation block counts as zero (numerics.md).
inline constexpr float kQuantFloor = 0x1p-100f;
inline constexpr float kInv127 = 0x1.020408p-7f;

// 32 values to int8 codes and a scale. Codes lie within +-127.
static inline void QuantizeBlock(const float* x, int8_t* codes, float* scale) {
  float largest = 0.0f;
  bool finite = true;
  for (int i = 0; i < 32; ++i) {
    const float a = std::fabs(x[i]);
    finite = finite && a <= 0x1.fffffep127f;  // false for NaN and infinity
    largest = a > largest ? a : largest;
  }
  if (!finite || largest < kQuantFloor) {
    std::memset(codes, 0, 32);
    *scale = finite ? 0.0f : std::bit_cast<float>(0x7fc00000u);
    return;
  }
  const float inverse = 127.0f / largest;
  for (int i = 0; i < 32; ++i) {
    codes[i] = static_cast<int8_t>(std::nearbyint(x[i] * inverse));
  }
  *scale = largest * kInv127;
}

}  // namespace strata
