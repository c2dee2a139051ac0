// How the KV cache keeps keys and values (--kv).
//
// float32; float16, rounded to nearest even (past 65,504 it is infinite, and the step ends with an
// error); or int8 codes with a float32 scale for every kScaleValues values of a head, the last
// group of a head may be shorter. Codes follow contract T's rule for activations (numerics.md): id
// = 127 / max|x|, code = rint(x id), scale = max|x| * 0x1.020408p-7f; a group below 2^-100 is zero,
// one that is not finite has a NaN for a scale. A stored value is code * scale.
#pragma once

#include <cstdint>

namespace strata {

enum class CellType { kFloat32, kFloat16, kInt8 };

inline constexpr int kScaleValues = 64;

// Groups of a head; a cell has the groups of its key, then those of its value.
inline constexpr int64_t ScaleGroups(int64_t head_dim) {
  return (head_dim + kScaleValues - 1) / kScaleValues;
}

// The caches of one layer, in place.
struct CellStore {
  void* keys;     // [S, K, C]
  void* values;   // [S, K, C]
  float* scales;  // [S, K, 2*ScaleGroups]  int8 only
  CellType type;
};

}  // namespace strata
