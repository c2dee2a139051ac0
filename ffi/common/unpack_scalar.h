// What the files of the scalar unpackers share. One file per family of types:
//   unpack_scalar_small.cc   blocks of 32, 64 or 128 values
//   unpack_scalar_kquants.cc Q2_K to Q6_K
//   unpack_scalar_grids.cc   IQ types with a code book
#pragma once

#include <bit>
#include <cstdint>
#include <cstring>

#include "common/numerics.h"
#include "common/unpack.h"

namespace strata {

// Null for types of other families.
UnpackFn ScalarUnpackSmall(GgmlType type);
UnpackFn ScalarUnpackKQuants(GgmlType type);
UnpackFn ScalarUnpackGrids(GgmlType type);

inline uint16_t Load16(const uint8_t* bytes) {
  uint16_t word;
  std::memcpy(&word, bytes, sizeof word);
  return word;
}

inline uint32_t Load32(const uint8_t* bytes) {
  uint32_t word;
  std::memcpy(&word, bytes, sizeof word);
  return word;
}

// A stored half-precision scale. A signalling NaN comes out quiet, as every conversion instruction
// makes it, so that scalar and vector code agree on the bits of a broken file too.
inline float LoadScale(const uint8_t* bytes) {
  const uint32_t is_nan = (Load16(bytes) & 0x7fffu) > 0x7c00u;
  return std::bit_cast<float>(std::bit_cast<uint32_t>(HalfToFloat(bytes)) | (is_nan << 22));
}

}  // namespace strata
