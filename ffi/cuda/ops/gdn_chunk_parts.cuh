// What the kernels of gdn_chunk share: where the first leaves its results for the second.
//
// Matrices lie in pieces of 64 x 64 split values: 64 rows of 64 high halves, then of the low ones.
// The 16-byte groups of a row are permuted by its number, so that eight rows of one group lie in
// different banks of shared memory, and a piece is copied there as it is.
#pragma once

#include "cuda/ops/gdn_chunk.h"
#include "cuda/ops/gdn_parts.cuh"
#include "cuda/reduce.cuh"
#include "cuda/split_mma.cuh"

namespace strata::gdn {

inline constexpr int kPlaneBytes = 64 * 64 * 2;
inline constexpr int kPieceBytes = 2 * kPlaneBytes;

// Of a chunk and value head, floats [3][64].
enum Gate { kBeta, kFromStart, kToEnd };  // exp(c), exp(c of the last row - c)
inline constexpr int kGateFloats = 3 * kGdnChunk;

// Offset within a plane of the pair of values in columns `column` (even) and the next.
__device__ __forceinline__ int PairAt(int row, int column) {
  return row * 128 + ((column / 8 ^ row) & 7) * 16 + column % 8 * 2;
}

struct ChunkParams {
  GdnWindowArgs a;
  unsigned char* keys;     // [chunks, Kh, C/64] pieces
  unsigned char* queries;  // likewise, scaled
  unsigned char* inverse;  // [chunks, Vh] pieces: (I + A)^-1
  unsigned char* weights;  // [chunks, Vh] pieces: (q k^T) decayed, the diagonal included
  float* gates;            // [chunks, Vh, 3, 64]
  int stride;              // values in a row of proj
  int channels;            // of the convolution
};

// A block's rows of B [64 rows, 16 columns from `step` on] as products need them: `tiles` of 8
// rows from tile `first` on, each its halves' high parts, then the low ones.
template <int kCount>
__device__ __forceinline__ void LoadRowTiles(const unsigned char* piece, int step, int first,
                                             uint32_t (*to)[4]) {
  const int lane = threadIdx.x % 32;
  const int row = first * 8 + lane % 8;
  const unsigned char* at =
      piece + lane / 16 * kPlaneBytes + PairAt(row, step * 16 + lane / 8 % 2 * 8);
#pragma unroll
  for (int i = 0; i < kCount; ++i) LoadMatrices(to[i], at + i * 8 * 128);
}

// The same of B transposed: rows 16 step.. of a piece, `tiles` of 8 columns.
template <int kCount>
__device__ __forceinline__ void LoadColumnTiles(const unsigned char* piece, int step, int first,
                                                uint32_t (*to)[4]) {
  const int lane = threadIdx.x % 32;
  const int row = step * 16 + lane % 16;
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    const unsigned char* at = piece + lane / 16 * kPlaneBytes + PairAt(row, (first + i) * 8);
    LoadTransposed(to[i], at);
  }
}

}  // namespace strata::gdn
