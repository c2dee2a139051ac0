// 16 floats at a time for the dense host ops, in the compiler's vector extension.
//
// A function marked STRATA_CLONES is built for AVX-512, AVX2 and the baseline, and the loader
// picks. The dense part need not give the same bits on different CPUs (design.md), but on one
// machine it must not depend on the number of rows: so everything here works on one row, with a
// fixed order of sums.
#pragma once

#include <cstdint>
#include <cstring>

#include "common/numerics.h"

#if defined(__x86_64__) && !defined(STRATA_NO_CLONES)
#define STRATA_CLONES __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#else
#define STRATA_CLONES
#endif
#define STRATA_INLINE inline __attribute__((always_inline))

namespace strata {

typedef float Float16v __attribute__((vector_size(64)));
typedef int32_t Int16v __attribute__((vector_size(64)));

inline constexpr int64_t kLanes = 16;

STRATA_INLINE void Load(const float* from, Float16v& to) { std::memcpy(&to, from, 64); }
STRATA_INLINE void Store(const Float16v& from, float* to) { std::memcpy(to, &from, 64); }

// The lanes' sum, pairs eight apart first, then four, two and one apart.
STRATA_INLINE float SumLanes(const Float16v& v) {
  float lane[16];
  std::memcpy(lane, &v, 64);
  for (int step = 8; step > 0; step /= 2) {
    for (int i = 0; i < step; ++i) lane[i] += lane[i + step];
  }
  return lane[0];
}

STRATA_INLINE float Dot(const float* a, const float* b, int64_t count) {
  Float16v sum = {};
  int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes) {
    Float16v x, y;
    Load(a + i, x);
    Load(b + i, y);
    sum += x * y;
  }
  float total = SumLanes(sum);
  for (; i < count; ++i) total += a[i] * b[i];
  return total;
}

// e^x, relative error below 2^-22; x is clamped to +-87. NaN stays NaN.
STRATA_INLINE void Exp(Float16v& x) {
  const Float16v limit = Float16v{} + 87.0f;
  const Float16v nan = x;
  const Int16v is_nan = nan != nan;
  x = x > limit ? limit : x;
  x = x < -limit ? -limit : x;
  x = is_nan ? Float16v{} : x;
  // Adding and taking away 1.5 * 2^23 rounds to the nearest integer.
  const Float16v magic = Float16v{} + 0x1.8p23f;
  Float16v n = x * kLog2e + magic;
  n = n - magic;
  Float16v r = x - n * kLn2Hi;
  r = r - n * kLn2Lo;
  Float16v e = Float16v{} + kExp6;
  e = e * r + kExp5;
  e = e * r + kExp4;
  e = e * r + kExp3;
  e = e * r + kExp2;
  e = e * r + 1.0f;
  e = e * r + 1.0f;
  const Int16v power = (__builtin_convertvector(n, Int16v) + 127) << 23;
  Float16v scale;
  std::memcpy(&scale, &power, 64);
  x = e * scale;
  x = is_nan ? nan : x;
}

// 1 / (1 + e^-x).
STRATA_INLINE void Sigmoid(Float16v& x) {
  Float16v e = -x;
  Exp(e);
  x = 1.0f / (1.0f + e);
}

}  // namespace strata
