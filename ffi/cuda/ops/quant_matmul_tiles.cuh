// The kernels of quant_matmul_tiles.cu.
//
// Weights are decoded once into the workspace, where every block finds int8 codes and float32
// scales as matrix units take them: one kernel of products serves all types of a form, and asks for
// nothing but bytes while it multiplies.
#pragma once

#include "cuda/float_mma.cuh"
#include "cuda/ops/quant_matmul.h"
#include "cuda/reduce.cuh"
#include "cuda/tile_products.cuh"
#include "cuda/tile_rows.h"

namespace strata::matmul_tiles {

using tiles::QuantizedRows;

inline constexpr int kRows = 128;  // of a block's tile
inline constexpr int kColumns = 128;
inline constexpr int kThreads = 512;
inline constexpr int kDecodeThreads = 256;

// Some panels of a matrix, decoded; `columns` is a multiple of kColumns, `values` of a stage.
struct Decoded {
  int8_t* codes;      // [columns, values]
  float* d;           // [values / 32, columns]
  float* m;           // likewise: types with minimums
  uint32_t* factors;  // [values / 16, columns]: types with groups of 16
  int64_t columns;
  int64_t values;
};

// A warp decodes one block of 32 values of a panel's rows, a row a lane.
template <typename Decode>
__global__ void __launch_bounds__(kDecodeThreads)
    DecodeKernel(const __grid_constant__ PanelMatrix m, int first_panel,
                 const __grid_constant__ Decoded to) {
  const int lane = threadIdx.x % 32;
  const int b = threadIdx.x / 32;
  const int segment = blockIdx.y;
  const int64_t block = segment * 8 + b;
  if (block * 32 >= to.values) return;
  uint32_t words[8] = {};
  tiles::BlockFactors factors = {};
  const int blocks = min(8, m.cols / 32 - segment * 8);
  if (b < blocks) {
    const uint8_t* unit = m.bytes + (first_panel + static_cast<int>(blockIdx.x)) * m.panel_bytes +
                          static_cast<int64_t>(segment) * m.unit_bytes;
    const PanelWords raw = {unit, lane, SegmentWords<Decode>(blocks) / 4 * 4};
    tiles::WeightWords<Decode>(raw, b, tiles::GlobalBook{BookWords(Decode::kType)}, words);
    factors = tiles::LoadFactors<Decode>(raw, b);
  }
  const int64_t column = static_cast<int64_t>(blockIdx.x) * 32 + lane;
  uint4* codes = reinterpret_cast<uint4*>(to.codes + column * to.values + block * 32);
  codes[0] = make_uint4(words[0], words[1], words[2], words[3]);
  codes[1] = make_uint4(words[4], words[5], words[6], words[7]);
  to.d[block * to.columns + column] = factors.d;
  if constexpr (tiles::HasMinimum(Decode::kForm)) to.m[block * to.columns + column] = factors.m;
  if constexpr (tiles::IsSplit(Decode::kForm)) {
    to.factors[2 * block * to.columns + column] = factors.factors[0];
    to.factors[(2 * block + 1) * to.columns + column] = factors.factors[1];
  }
}

struct Piece {
  Decoded weights;
  int32_t first_tile;   // of the launch
  int32_t num_columns;  // that count
  int32_t column;       // of the result
};

struct Params {
  Piece pieces[kMostMatrices];
  int32_t num_pieces;
  int32_t num_rows;
  int32_t num_columns;  // of the result
  const int32_t* live;
  float* y;
  QuantizedRows x;
};

// Asks for one stage: values [128 * number, +128) of the tile's rows and columns.
template <typename Stage>
__device__ __forceinline__ void CopyStage(const QuantizedRows& x, int64_t first_row,
                                          const Decoded& w, int64_t first_column, int number,
                                          uint8_t* stage) {
  const int thread = static_cast<int>(threadIdx.x);
  const int64_t value = static_cast<int64_t>(number) * tiles::kStageValues;
#pragma unroll
  for (int i = 0; i < kRows * 8 / kThreads; ++i) {
    const int row = (thread + i * kThreads) / 8;
    const int chunk = thread % 8;
    CopyAsync(stage + Stage::kRowCodes + SwizzledAt(row, chunk),
              x.codes + (first_row + row) * x.values + value + chunk * 16, true);
    CopyAsync(stage + Stage::kCodes + SwizzledAt(row, chunk),
              w.codes + (first_column + row) * w.values + value + chunk * 16, true);
  }
  // A run of 128 columns is 32 chunks.
  const int line = thread / 32;
  const int at = thread % 32 * 16;
  const int64_t block = static_cast<int64_t>(number) * tiles::kStageBlocks;
  if (thread < kRows) {
    CopyAsync(stage + Stage::kRowScales + thread * 16,
              x.scales + (first_row + thread) * (x.values / 32) + block, true);
  } else if (line < 8) {
    CopyAsync(stage + Stage::kScales + (line - 4) * kColumns * 4 + at,
              w.d + (block + line - 4) * w.columns + first_column + at / 4, true);
  } else if (tiles::HasMinimum(Stage::kOf) && line < 12) {
    CopyAsync(stage + Stage::kMinimums + (line - 8) * kColumns * 4 + at,
              w.m + (block + line - 8) * w.columns + first_column + at / 4, true);
  }
  if (tiles::IsSplit(Stage::kOf) && line < 8) {
    CopyAsync(stage + Stage::kFactors + line * kColumns * 4 + at,
              w.factors + (2 * block + line) * w.columns + first_column + at / 4, true);
  }
  if (tiles::HasMinimum(Stage::kOf) && thread < 2 * kRows) {
    CopyAsync(stage + Stage::kRowSums + thread * 16,
              x.sums + (first_row + thread / 2) * (x.values / 16) + 2 * block + thread % 2 * 4,
              true);
  }
}

__device__ __forceinline__ void ZeroTile(float* y, int64_t num_columns, int first_row, int end_row,
                                         int first_column, int end_column) {
  const int width = end_column - first_column;
  for (int i = threadIdx.x; i < (end_row - first_row) * width; i += blockDim.x) {
    y[(first_row + i / width) * num_columns + first_column + i % width] = 0.0f;
  }
}

inline constexpr int kWarpRows = 2;     // groups of 16 rows of a warp
inline constexpr int kWarpColumns = 4;  // groups of 8 columns

template <Form kForm>
__global__ void __launch_bounds__(kThreads, 1) ProductKernel(const __grid_constant__ Params p) {
  using Stage = tiles::Stage<kForm, kRows, kColumns>;
  STRATA_SHARED(uint8_t, shared);
  int i = 0;
  while (i + 1 < p.num_pieces && static_cast<int>(blockIdx.y) >= p.pieces[i + 1].first_tile) ++i;
  const Piece& piece = p.pieces[i];
  const int first_row = blockIdx.x * kRows;
  const int first_column = (blockIdx.y - piece.first_tile) * kColumns;
  const int live = LiveRows(*p.live, p.num_rows);
  const int end_column = min(first_column + kColumns, piece.num_columns);
  if (first_row >= live) {
    ZeroTile(p.y, p.num_columns, first_row, min(first_row + kRows, p.num_rows),
             piece.column + first_column, piece.column + end_column);
    return;
  }
  const int lane = threadIdx.x % 32;
  const int warp = threadIdx.x / 32;
  tiles::WarpPart part;
  part.first_row = warp / 4 * 16 * kWarpRows;
  part.active = min(max((live - first_row - part.first_row + 15) / 16, 0), kWarpRows);
  part.first_column = warp % 4 * 8 * kWarpColumns;
  part.column_step = 8;
  float acc[kWarpRows][kWarpColumns][4] = {}, total[kWarpRows][kWarpColumns][4] = {};
  const int stages = static_cast<int>(p.x.values) / tiles::kStageValues;
  CopyStage<Stage>(p.x, first_row, piece.weights, first_column, 0, shared);
  for (int s = 0; s < stages; ++s) {
    WaitForCopies();
    // Who is past this barrier has done with the other half, which is filled next.
    __syncthreads();
    if (s + 1 < stages) {
      CopyStage<Stage>(p.x, first_row, piece.weights, first_column, s + 1,
                       shared + (s + 1) % 2 * Stage::kBytes);
    }
    tiles::MultiplyStage<Stage>(shared + s % 2 * Stage::kBytes, part, acc);
    if (s % 2 == 1 || s + 1 == stages) tiles::EndSegment(acc, total);
  }
#pragma unroll
  for (int m = 0; m < kWarpRows; ++m) {
#pragma unroll
    for (int n = 0; n < kWarpColumns; ++n) {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const int row = first_row + part.first_row + 16 * m + lane / 4 + e / 2 * 8;
        const int column = first_column + part.first_column + 8 * n + lane % 4 * 2 + e % 2;
        if (row >= p.num_rows || column >= end_column) continue;
        p.y[row * static_cast<int64_t>(p.num_columns) + piece.column + column] =
            row < live ? total[m][n][e] : 0.0f;
      }
    }
  }
}

struct FloatParams {
  PanelMatrix matrix;
  const float* x;
  const int32_t* live;
  float* y;
  int32_t num_rows;
  int32_t num_columns;  // of the result
  int32_t column;
};

template <GgmlType kType>
__global__ void __launch_bounds__(floats::kThreads)
    FloatKernel(const __grid_constant__ FloatParams p) {
  STRATA_SHARED(uint8_t, shared);
  const int first_panel = blockIdx.x * (floats::kTileColumns / 32);
  const int first_row = blockIdx.y * floats::kTileRows;
  const int live = LiveRows(*p.live, p.num_rows);
  if (first_row >= live) {
    ZeroTile(p.y, p.num_columns, first_row, min(first_row + floats::kTileRows, p.num_rows),
             p.column + first_panel * 32,
             p.column + min(first_panel * 32 + floats::kTileColumns, p.matrix.rows));
    return;
  }
  const auto load = [&](int row, int k) {
    if (first_row + row >= live) return make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    const float* at = p.x + (first_row + row) * static_cast<int64_t>(p.matrix.cols) + k;
    return __ldg(reinterpret_cast<const float4*>(at));
  };
  const auto store = [&](int row, int column, float sum) {
    if (first_row + row >= p.num_rows) return;
    p.y[(first_row + row) * static_cast<int64_t>(p.num_columns) + p.column + column] =
        first_row + row < live ? sum : 0.0f;
  };
  floats::Tile<kType>(p.matrix, first_panel, load, store, shared);
}

}  // namespace strata::matmul_tiles
