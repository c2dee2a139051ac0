// CUDA's arithmetic. Exact functions are exact here; approximate ones (__expf, rsqrtf and the like)
// are the host's, within their error of the device's and not equal to them.
#pragma once

#include <math.h>

#include <cstdint>
#include <cstring>

#include "emulate/sync.h"

#if defined(__SSE4_1__)
#include <immintrin.h>
#endif

// NOLINTBEGIN: CUDA's names
inline float __fmaf_rn(float a, float b, float c) { return fmaf(a, b, c); }
inline float __fmul_rn(float a, float b) { return a * b; }
inline float __fadd_rn(float a, float b) { return a + b; }
inline float __fsub_rn(float a, float b) { return a - b; }
inline float __fdiv_rn(float a, float b) { return a / b; }
inline float __fsqrt_rn(float a) { return sqrtf(a); }
inline float __frcp_rn(float a) { return 1.0f / a; }
inline double __fma_rn(double a, double b, double c) { return fma(a, b, c); }
inline double __dadd_rn(double a, double b) { return a + b; }
inline double __dmul_rn(double a, double b) { return a * b; }

inline float __fdividef(float a, float b) { return a / b; }
inline float __expf(float a) { return expf(a); }
inline float __exp10f(float a) { return powf(10.0f, a); }
inline float __logf(float a) { return logf(a); }
inline float __log2f(float a) { return log2f(a); }
inline float __powf(float a, float b) { return powf(a, b); }
inline float __sinf(float a) { return sinf(a); }
inline float __cosf(float a) { return cosf(a); }
inline float rsqrtf(float a) { return 1.0f / sqrtf(a); }
inline float __saturatef(float a) { return a > 0.0f ? (a < 1.0f ? a : 1.0f) : 0.0f; }

namespace emulate {
template <typename To, typename From>
inline To Bits(From from) {
  static_assert(sizeof(To) == sizeof(From));
  To to;
  std::memcpy(&to, &from, sizeof(To));
  return to;
}
// As the device converts: values outside the type's range give its ends, NaN gives 0.
template <typename To>
inline To Saturated(float value, double below, double above) {
  if (value != value) return 0;
  if (value <= below) return static_cast<To>(below);
  if (value >= above) return static_cast<To>(above);
  return static_cast<To>(value);
}
inline int ToInt(float value) { return Saturated<int>(value, -2147483648.0, 2147483647.0); }
inline unsigned ToUnsigned(float value) { return Saturated<unsigned>(value, 0.0, 4294967295.0); }
}  // namespace emulate

inline int __float2int_rn(float a) { return emulate::ToInt(rintf(a)); }
inline int __float2int_rz(float a) { return emulate::ToInt(truncf(a)); }
inline int __float2int_rd(float a) { return emulate::ToInt(floorf(a)); }
inline int __float2int_ru(float a) { return emulate::ToInt(ceilf(a)); }
inline unsigned __float2uint_rn(float a) { return emulate::ToUnsigned(rintf(a)); }
inline unsigned __float2uint_rz(float a) { return emulate::ToUnsigned(truncf(a)); }
inline float __int2float_rn(int a) { return static_cast<float>(a); }
inline float __uint2float_rn(unsigned a) { return static_cast<float>(a); }
inline float __ll2float_rn(long long a) { return static_cast<float>(a); }
inline unsigned __float_as_uint(float a) { return emulate::Bits<unsigned>(a); }
inline int __float_as_int(float a) { return emulate::Bits<int>(a); }
inline float __uint_as_float(unsigned a) { return emulate::Bits<float>(a); }
inline float __int_as_float(int a) { return emulate::Bits<float>(a); }
inline long long __double_as_longlong(double a) { return emulate::Bits<long long>(a); }
inline double __longlong_as_double(long long a) { return emulate::Bits<double>(a); }

inline int __dp4a(int a, int b, int c) {
#if defined(__SSE4_1__)  // these two are most of what an expert's product is
  const __m128i products = _mm_madd_epi16(_mm_cvtepi8_epi16(_mm_cvtsi32_si128(a)),
                                          _mm_cvtepi8_epi16(_mm_cvtsi32_si128(b)));
  return static_cast<int>(static_cast<uint32_t>(c) +
                          static_cast<uint32_t>(_mm_cvtsi128_si32(products)) +
                          static_cast<uint32_t>(_mm_extract_epi32(products, 1)));
#else
  const uint32_t x = static_cast<uint32_t>(a), y = static_cast<uint32_t>(b);
  uint32_t sum = static_cast<uint32_t>(c);
  for (int i = 0; i < 32; i += 8) {
    sum += static_cast<uint32_t>(static_cast<int8_t>(x >> i) * static_cast<int8_t>(y >> i));
  }
  return static_cast<int>(sum);
#endif
}
inline unsigned __dp4a(unsigned a, unsigned b, unsigned c) {
  for (int i = 0; i < 32; i += 8) c += (a >> i & 0xffu) * (b >> i & 0xffu);
  return c;
}
// Both 16-bit halves of a, times the two lower bytes of b.
inline int __dp2a_lo(int a, int b, int c) {
  const int low = static_cast<int16_t>(a) * static_cast<int8_t>(b);
  const int high = static_cast<int16_t>(a >> 16) * static_cast<int8_t>(b >> 8);
  return c + low + high;
}

// Selector nibbles with their highest bit set are left undefined by CUDA's documentation (the
// instruction then replicates a sign).
inline unsigned __byte_perm(unsigned x, unsigned y, unsigned selector, emulate::Place place = {}) {
  if ((selector & 0x8888u) != 0) emulate::Fail("__byte_perm: a selector above 7", place);
  const uint64_t bytes = static_cast<uint64_t>(y) << 32 | x;
#if defined(__SSE4_1__)
  const uint64_t spread = (selector & 0xffu) | (selector & 0xff00u) << 8;
  const __m128i places =
      _mm_cvtsi64_si128(static_cast<int64_t>((spread & 0xf000fu) | (spread & 0xf000f0u) << 4));
  return static_cast<unsigned>(
      _mm_cvtsi128_si32(_mm_shuffle_epi8(_mm_cvtsi64_si128(static_cast<int64_t>(bytes)), places)));
#else
  unsigned result = 0;
  for (int i = 0; i < 4; ++i) {
    const unsigned from = selector >> (4 * i) & 7u;
    result |= static_cast<unsigned>(bytes >> (8 * from) & 0xffu) << (8 * i);
  }
  return result;
#endif
}
inline unsigned __funnelshift_l(unsigned low, unsigned high, unsigned shift) {
  return static_cast<unsigned>(((static_cast<uint64_t>(high) << 32 | low) << (shift & 31u)) >> 32);
}
inline unsigned __funnelshift_r(unsigned low, unsigned high, unsigned shift) {
  return static_cast<unsigned>((static_cast<uint64_t>(high) << 32 | low) >> (shift & 31u));
}
inline int __popc(unsigned a) { return __builtin_popcount(a); }
inline int __popcll(unsigned long long a) { return __builtin_popcountll(a); }
inline int __clz(int a) { return a == 0 ? 32 : __builtin_clz(static_cast<unsigned>(a)); }
inline int __clzll(long long a) {
  return a == 0 ? 64 : __builtin_clzll(static_cast<unsigned long long>(a));
}
inline int __ffs(int a) { return __builtin_ffs(a); }
inline int __ffsll(long long a) { return __builtin_ffsll(a); }
inline unsigned __brev(unsigned a) {
  unsigned reversed = 0;
  for (int i = 0; i < 32; ++i) reversed |= (a >> i & 1u) << (31 - i);
  return reversed;
}
inline int __mul24(int a, int b) { return (a << 8 >> 8) * (b << 8 >> 8); }
inline unsigned __umulhi(unsigned a, unsigned b) {
  return static_cast<unsigned>(static_cast<uint64_t>(a) * b >> 32);
}
inline int __mulhi(int a, int b) { return static_cast<int>(static_cast<int64_t>(a) * b >> 32); }

// Byte-wise, as the four halves of a word.
#define STRATA_EMULATE_BYTEWISE(name, T, expression)                    \
  inline unsigned name(unsigned a, unsigned b) {                        \
    unsigned result = 0;                                                \
    for (int i = 0; i < 32; i += 8) {                                   \
      const int x = static_cast<T>(a >> i), y = static_cast<T>(b >> i); \
      result |= static_cast<unsigned>((expression) & 0xff) << i;        \
    }                                                                   \
    return result;                                                      \
  }
STRATA_EMULATE_BYTEWISE(__vadd4, uint8_t, x + y)
STRATA_EMULATE_BYTEWISE(__vsub4, uint8_t, x - y)
STRATA_EMULATE_BYTEWISE(__vcmpne4, uint8_t, x != y ? 0xff : 0)
STRATA_EMULATE_BYTEWISE(__vcmpeq4, uint8_t, x == y ? 0xff : 0)
STRATA_EMULATE_BYTEWISE(__vsubss4, int8_t, x - y > 127 ? 127 : x - y < -128 ? -128 : x - y)
#undef STRATA_EMULATE_BYTEWISE

// CUDA's min and max: of two types, the one C++ would convert both to.
#define STRATA_EMULATE_MIN_MAX(A, B, R)                                                   \
  inline R min(A a, B b) {                                                                \
    return static_cast<R>(a) < static_cast<R>(b) ? static_cast<R>(a) : static_cast<R>(b); \
  }                                                                                       \
  inline R max(A a, B b) {                                                                \
    return static_cast<R>(a) > static_cast<R>(b) ? static_cast<R>(a) : static_cast<R>(b); \
  }
STRATA_EMULATE_MIN_MAX(int, int, int)
STRATA_EMULATE_MIN_MAX(unsigned, unsigned, unsigned)
STRATA_EMULATE_MIN_MAX(int, unsigned, unsigned)
STRATA_EMULATE_MIN_MAX(unsigned, int, unsigned)
STRATA_EMULATE_MIN_MAX(long, long, long)
STRATA_EMULATE_MIN_MAX(unsigned long, unsigned long, unsigned long)
STRATA_EMULATE_MIN_MAX(long, unsigned long, unsigned long)
STRATA_EMULATE_MIN_MAX(unsigned long, long, unsigned long)
STRATA_EMULATE_MIN_MAX(long long, long long, long long)
STRATA_EMULATE_MIN_MAX(unsigned long long, unsigned long long, unsigned long long)
STRATA_EMULATE_MIN_MAX(long long, unsigned long long, unsigned long long)
STRATA_EMULATE_MIN_MAX(unsigned long long, long long, unsigned long long)
#undef STRATA_EMULATE_MIN_MAX
inline float min(float a, float b) { return fminf(a, b); }
inline float max(float a, float b) { return fmaxf(a, b); }
inline double min(double a, double b) { return fmin(a, b); }
inline double max(double a, double b) { return fmax(a, b); }
inline double min(float a, double b) { return fmin(a, b); }
inline double max(float a, double b) { return fmax(a, b); }
inline double min(double a, float b) { return fmin(a, b); }
inline double max(double a, float b) { return fmax(a, b); }
// NOLINTEND
