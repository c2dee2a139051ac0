// Comparing floats by their bits, for tests of contract T.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstring>

#include "check.h"

namespace strata {

inline float FromBits(uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

inline uint32_t BitsOf(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  return bits;
}

// Payloads of NaNs are not part of the contract.
inline bool SameBits(float a, float b) {
  return BitsOf(a) == BitsOf(b) || (std::isnan(a) && std::isnan(b));
}

inline void CheckSame(float got, float expected, const char* type, const char* what) {
  if (SameBits(got, expected)) return;
  std::fprintf(stderr, "%s, %s: %a, %a expected\n", type, what, static_cast<double>(got),
               static_cast<double>(expected));
  CHECK(false);
}

}  // namespace strata
