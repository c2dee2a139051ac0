// Products of activation rows with one unit of a panel (panels.h): 32 weight rows, one a lane,
// times a segment of 256 values.
//
// The sums are contract T's bit for bit: the same integers, the same float32 operations in the same
// order as common/kernels_scalar.cc. Lanes do not speak to each other and may be masked off.
#pragma once

#include <cstdint>

#include "common/gguf_types.h"
#include "cuda/launch.h"

namespace strata {

// Up to 8 activation rows of `width` values. All but x lie in shared memory, because every lane
// reads the same words.
struct Rows {
  const int8_t* codes;   // [R, K]     16-byte aligned, K a multiple of 32
  const float* scales;   // [R, K/32]
  const int16_t* sums;   // [R, K/16]  4-byte aligned; sums of 16 codes each
  const float* x;        // [R, K]     anywhere, 16-byte aligned: for types that are not quantised
  int width;             // K
  const uint32_t* grid;  // shared, 16-byte aligned: what StageGrid wrote; unused if GridBytes is 0
  int grid_copies;       // as given to StageGrid
};

// Code books. Lanes look up different entries, and two lanes whose entries share a bank wait for
// each other; with `copies` copies side by side, lane l reads copy l % copies. Entries of 4 bytes:
// 32 copies never collide, 16 take 2 turns, 8 take 3 on average, 1 takes 3.5.
// Entries of 4 bytes: IQ3_XXS (256), IQ3_S (512). Of 8 bytes: IQ2_XXS (256), IQ2_XS (512), IQ2_S
// (1024), IQ1_S and IQ1_M (2048).
__host__ __device__ constexpr int GridEntries(GgmlType type) {
  switch (type) {
    case GgmlType::kIQ3_XXS:
    case GgmlType::kIQ2_XXS:
      return 256;
    case GgmlType::kIQ3_S:
    case GgmlType::kIQ2_XS:
      return 512;
    case GgmlType::kIQ2_S:
      return 1024;
    case GgmlType::kIQ1_S:
    case GgmlType::kIQ1_M:
      return 2048;
    default:
      return 0;
  }
}

// 32-bit words of an entry.
__host__ __device__ constexpr int GridEntryWords(GgmlType type) {
  return type == GgmlType::kIQ3_XXS || type == GgmlType::kIQ3_S ? 1 : 2;
}

// Shared memory for a type's code book; 0 if it has none. `copies`: 1, 2, 4, 8, 16 or 32.
__host__ __device__ constexpr int GridBytes(GgmlType type, int copies) {
  return GridEntries(type) * GridEntryWords(type) * 4 * copies;
}

// The most copies that are of use and fit 64 KiB; 0 for types without a code book.
__host__ __device__ constexpr int BestGridCopies(GgmlType type) {
  int copies = GridEntries(type) == 0 ? 0 : 32 / GridEntryWords(type);
  while (GridBytes(type, copies) > 65536) copies /= 2;
  return copies;
}

// Fills `grid` (GridBytes(type, copies) bytes of shared memory); thread `thread` of `num_threads`
// that all call it. The caller synchronises before SegmentDot.
__device__ void StageGrid(GgmlType type, int copies, uint32_t* grid, int thread, int num_threads);

// The words of a type's code book in global memory, 8-byte aligned; null if it has none.
__device__ const uint32_t* BookWords(GgmlType type);

// acc[r] = the segment's sum for the lane's row and activation row r < num_rows (1..8), from +0;
// the caller adds segments in ascending order. `blocks`: 1..8 blocks of 32 in this segment;
// `first_block`: index of its first block in the row. Reads the whole unit of the lane.
__device__ void SegmentDot(GgmlType type, const uint8_t* unit, int lane, int blocks,
                           const Rows& rows, int first_block, int num_rows, float* acc);

// Values 4 `four` on (0..8 * blocks - 1) of the lane's row, as common/dequantize.cc gives them.
// Their whole block of 32 is decoded, whose codes do not lie as they are used.
__device__ float4 FourOfSegment(GgmlType type, const uint8_t* unit, int lane, int blocks, int four);

}  // namespace strata
