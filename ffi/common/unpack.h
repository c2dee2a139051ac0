// Weight rows to the common form of contract T, one segment of at most 256 values at a time.
//
// A segment of row-major codes is what every type can produce; panel.h turns 16 of them into the
// layout that the products read. The scalar functions are the specification; the others must give
// the same bytes and the same float bits.
#pragma once

#include <cstdint>

#include "common/gguf_types.h"

namespace strata {

inline constexpr int kBlock = 32;         // values that share one activation scale
inline constexpr int kSegmentBlocks = 8;  // blocks in a segment
inline constexpr int kSegment = 256;      // kBlock * kSegmentBlocks

// One segment of one weight row. Which members a type fills depends on its Form.
struct RowSegment {
  alignas(64) uint8_t codes[kSegment];  // w + bias, value order
  float d[kSegmentBlocks];              // D per block of 32: every quantised form
  float m[kSegmentBlocks];              // M per block: kMin, kSplitMin
  float k[2 * kSegmentBlocks];          // factor per 16 values, an exact integer: kSplit, kSplitMin
  float n[2 * kSegmentBlocks];          // factor of the minimum per 16 values: kSplitMin
};

// Reads `num_blocks` blocks of 32 values from `blocks`, the first byte of a segment. Types whose
// stored block is 256 always get 8; the others get fewer in the last segment of a row.
using UnpackFn = void (*)(const uint8_t* blocks, int num_blocks, RowSegment* out);

// Null for types that are not quantised.
UnpackFn ScalarUnpack(GgmlType type);

// Needs AVX2 and F16C. The scalar function where no faster one exists.
UnpackFn Avx2Unpack(GgmlType type);

// Uses AVX-512 VBMI where the CPU has it and it pays; else the AVX2 function.
UnpackFn Avx512Unpack(GgmlType type);

}  // namespace strata
