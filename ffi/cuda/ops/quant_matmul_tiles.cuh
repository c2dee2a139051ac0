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

// A thread's share in the copies of a stage: chunks of codes of some rows and columns, and some
// of what lies besides; where each begins, and how far it is from stage to stage.
template <typename Stage, int kThreads>
struct StageCopies {
  static constexpr bool kMin = tiles::HasMinimum(Stage::kOf), kSplit = tiles::IsSplit(Stage::kOf);
  static constexpr int kLine = kColumns / 4;  // chunks of a run of columns
  // Chunks of row scales, D, M, factors and row sums: where each kind ends.
  static constexpr int kEndScales = kRows, kEndD = kEndScales + 4 * kLine;
  static constexpr int kEndM = kEndD + (kMin ? 4 * kLine : 0);
  static constexpr int kEndFactors = kEndM + (kSplit ? 8 * kLine : 0);
  static constexpr int kEnd = kEndFactors + (kMin ? 2 * kRows : 0);
  static constexpr int kOthers = (kEnd + kThreads - 1) / kThreads;

  const int8_t* rows;
  const int8_t* columns;
  int64_t row_step, column_step;  // from one of the thread's to the next
  const void* others[kOthers];
  int32_t steps[kOthers];

  __device__ __forceinline__ StageCopies(const QuantizedRows& x, int64_t first_row,
                                         const Decoded& w, int64_t first_column) {
    const int thread = static_cast<int>(threadIdx.x);
    rows = x.codes + (first_row + thread / 8) * x.values + thread % 8 * 16;
    columns = w.codes + (first_column + thread / 8) * w.values + thread % 8 * 16;
    row_step = kThreads / 8 * x.values;
    column_step = kThreads / 8 * w.values;
#pragma unroll
    for (int i = 0; i < kOthers; ++i) Find(i, thread + i * kThreads, x, first_row, w, first_column);
  }

  __device__ __forceinline__ void Find(int i, int chunk, const QuantizedRows& x, int64_t first_row,
                                       const Decoded& w, int64_t first_column) {
    const auto line = [&](const void* from, int number) {
      others[i] = static_cast<const float*>(from) + number / kLine * w.columns + first_column +
                  number % kLine * 4;
    };
    steps[i] = static_cast<int32_t>(4 * w.columns * 4);
    if (chunk < kEndScales) {
      others[i] = x.scales + (first_row + chunk) * (x.values / 32);
      steps[i] = 16;
    } else if (chunk < kEndD) {
      line(w.d, chunk - kEndScales);
    } else if (chunk < kEndM) {
      line(w.m, chunk - kEndD);
    } else if (chunk < kEndFactors) {
      line(w.factors, chunk - kEndM);
      steps[i] *= 2;
    } else {
      const int64_t row = first_row + (chunk - kEndFactors) / 2;
      others[i] = x.sums + row * (x.values / 16) + (chunk - kEndFactors) % 2 * 4;
      steps[i] = 32;
    }
  }

  // Asks for the next stage.
  __device__ __forceinline__ void Next(uint8_t* stage) {
    const int thread = static_cast<int>(threadIdx.x);
    uint8_t* to = stage + SwizzledAt(thread / 8, thread % 8);
#pragma unroll
    for (int i = 0; i < kRows * 8 / kThreads; ++i) {
      CopyAsync(to + Stage::kRowCodes + i * (kThreads / 8 * 128), rows + i * row_step, true);
      CopyAsync(to + Stage::kCodes + i * (kThreads / 8 * 128), columns + i * column_step, true);
    }
    rows += tiles::kStageValues;
    columns += tiles::kStageValues;
#pragma unroll
    for (int i = 0; i < kOthers; ++i) {
      // They lie in the stage in the order of their numbers.
      const int chunk = thread + i * kThreads;
      if (chunk < kEnd) CopyAsync(stage + Stage::kRowScales + chunk * 16, others[i], true);
      others[i] = static_cast<const uint8_t*>(others[i]) + steps[i];
    }
  }
};

__device__ __forceinline__ void ZeroTile(float* y, int64_t num_columns, int first_row, int end_row,
                                         int first_column, int end_column) {
  const int width = end_column - first_column;
  for (int i = threadIdx.x; i < (end_row - first_row) * width; i += blockDim.x) {
    y[(first_row + i / width) * num_columns + first_column + i % width] = 0.0f;
  }
}

// The block's tile.
struct Tile {
  const Piece& piece;
  int first_row, live;
  int first_column, end_column;  // of the piece

  __device__ __forceinline__ explicit Tile(const Params& p)
      : piece(p.pieces[PieceOf(p)]), first_row(blockIdx.x * kRows) {
    live = LiveRows(*p.live, p.num_rows);
    first_column = (blockIdx.y - piece.first_tile) * kColumns;
    end_column = min(first_column + kColumns, piece.num_columns);
  }
  __device__ __forceinline__ static int PieceOf(const Params& p) {
    int i = 0;
    while (i + 1 < p.num_pieces && static_cast<int>(blockIdx.y) >= p.pieces[i + 1].first_tile) ++i;
    return i;
  }
  // Zeros for a tile without a live row.
  __device__ __forceinline__ bool IsDead(const Params& p) const {
    if (first_row < live) return false;
    ZeroTile(p.y, p.num_columns, first_row, min(first_row + kRows, p.num_rows),
             piece.column + first_column, piece.column + end_column);
    return true;
  }
  // Two neighbouring columns of a row of the tile; `column` is even.
  __device__ __forceinline__ void Store(const Params& p, int row, int column, float first,
                                        float second) const {
    row += first_row;
    column += first_column;
    if (row >= p.num_rows || column >= end_column) return;
    if (row >= live) first = second = 0.0f;
    const int to = piece.column + column;
    float* y = p.y + row * static_cast<int64_t>(p.num_columns) + to;
    if ((p.num_columns | to) % 2 == 0 && column + 1 < end_column) {
      *reinterpret_cast<float2*>(y) = make_float2(first, second);
      return;
    }
    y[0] = first;
    if (column + 1 < end_column) y[1] = second;
  }
};

// The products by mma.sync: 16 warps of 32 rows x 32 columns.
inline constexpr int kWarpRows = 2;     // groups of 16 rows of a warp
inline constexpr int kWarpColumns = 4;  // groups of 8 columns
inline constexpr int kThreads = 512;

template <Form kForm>
__global__ void __launch_bounds__(kThreads, 1) ProductKernel(const __grid_constant__ Params p) {
  using Stage = tiles::Stage<kForm, kRows, kColumns>;
  STRATA_SHARED(uint8_t, shared);
  const Tile tile(p);
  if (tile.IsDead(p)) return;
  const int warp = threadIdx.x / 32;
  const tiles::WarpPart part(warp / 4 * 16 * kWarpRows, warp % 4 * 8 * kWarpColumns, 8);
  const tiles::Start start(shared);
  StageCopies<Stage, kThreads> copies(p.x, tile.first_row, tile.piece.weights, tile.first_column);
  float acc[kWarpRows][kWarpColumns][4] = {}, total[kWarpRows][kWarpColumns][4] = {};
  copies.Next(shared);
  const int stages = static_cast<int>(p.x.values) / tiles::kStageValues;
#pragma unroll 1
  for (int s = 0; s < stages; ++s) {
    WaitForCopies();
    // Who is past this barrier has done with the other half, which is filled next.
    __syncthreads();
    if (s + 1 < stages) copies.Next(shared + (s + 1) % 2 * Stage::kBytes);
    tiles::MultiplyStage<Stage, kWarpRows>(shared + s % 2 * Stage::kBytes, start, part, acc);
    if (s % 2 == 1 || s + 1 == stages) tiles::EndSegment(acc, total);
  }
#pragma unroll
  for (int m = 0; m < kWarpRows; ++m) {
#pragma unroll
    for (int n = 0; n < kWarpColumns; ++n) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        tile.Store(p, part.row + 16 * m + 8 * h, part.column + 8 * n, total[m][n][2 * h],
                   total[m][n][2 * h + 1]);
      }
    }
  }
}

// A matrix of FloatKernel, and where its part of the grid and of the result begins.
struct FloatPiece {
  PanelMatrix matrix;
  int32_t first_tile;
  int32_t column;
};

struct FloatParams {
  FloatPiece pieces[kMostMatrices];  // of one type
  int32_t num_pieces;
  int32_t num_rows;
  int32_t num_columns;  // of the result
  const float* x;
  const int32_t* live;
  float* y;
};

template <GgmlType kType>
__global__ void __launch_bounds__(floats::kThreads, 2)
    FloatKernel(const __grid_constant__ FloatParams p) {
  STRATA_SHARED(uint8_t, shared);
  int i = 0;
  while (i + 1 < p.num_pieces && static_cast<int>(blockIdx.x) >= p.pieces[i + 1].first_tile) ++i;
  const PanelMatrix matrix = p.pieces[i].matrix;
  const int to = p.pieces[i].column;
  const int first_panel = (blockIdx.x - p.pieces[i].first_tile) * (floats::kTileColumns / 32);
  const int first_row = blockIdx.y * floats::kTileRows;
  const int live = LiveRows(*p.live, p.num_rows);
  if (first_row >= live) {
    ZeroTile(p.y, p.num_columns, first_row, min(first_row + floats::kTileRows, p.num_rows),
             to + first_panel * 32, to + min(first_panel * 32 + floats::kTileColumns, matrix.rows));
    return;
  }
  const auto row_of = [&](int row) -> const float* {
    return first_row + row < live ? p.x + (first_row + row) * static_cast<int64_t>(matrix.cols)
                                  : nullptr;
  };
  const auto store = [&](int row, int column, float sum) {
    if (first_row + row >= p.num_rows) return;
    p.y[(first_row + row) * static_cast<int64_t>(p.num_columns) + to + column] =
        first_row + row < live ? sum : 0.0f;
  };
  floats::Tile<kType>(matrix, first_panel, row_of, store, shared);
}

}  // namespace strata::matmul_tiles
