// Products of many float32 rows with matrices that are not quantised, by bfloat16 matrix units.
//
// A float is split into two bfloat16, x = high + low + (an error below 2^-17 |x|), and the products
// low * high, high * high and, unless the weights are bfloat16 themselves, high * low are added in
// float32: in the matrix unit over a segment of 256 values, then segments to a total. That order
// knows neither the number of rows nor a row's place, so a row's bits depend on the row alone. They
// are not those of the kernels for few rows (contract C: the read map tells prompts from windows).
//
// A block of 256 threads computes 64 rows x 64 columns (two panels). Rows and weights lie in shared
// memory as they are in global memory, two steps of 64 values ahead of their use, and are split
// where a warp takes them into registers.
#pragma once

#include "cuda/mma.cuh"
#include "cuda/products.cuh"
#include "cuda/split_mma.cuh"

namespace strata::floats {

inline constexpr int kTileRows = 64;
inline constexpr int kTileColumns = 64;
inline constexpr int kThreads = 256;
inline constexpr int kStep = 64;   // values of a row in shared memory at once
inline constexpr int kStages = 3;  // steps in shared memory
inline constexpr int kRowBytes = kTileRows * kStep * 4;

// A value's bytes in a panel.
template <GgmlType kType>
inline constexpr int kBytes = kType == GgmlType::kF32 ? 4 : 2;

template <GgmlType kType>
inline constexpr int kStageBytes = kRowBytes + kTileColumns * kStep * kBytes<kType>;

// Dynamic shared bytes of a block.
template <GgmlType kType>
inline constexpr int kShared = kStages * kStageBytes<kType>;

// Chunk c (16 bytes) of a row of 256 bytes is where 8 rows' pairs of chunks lie in different banks.
__device__ __forceinline__ int RowChunkAt(int row, int chunk) {
  return row * 256 + ((chunk ^ 2 * row) & 15) * 16;
}

// A thread's copies of a step: 4 chunks of a row's 16, and chunks of the two panels. RowOf(i) gives
// the values of row 0..63 of the tile, null for rows that do not count: those are zeros.
template <GgmlType kType, typename RowOf>
__device__ __forceinline__ void CopyStep(const PanelMatrix& m, int first_panel, int k0,
                                         const RowOf& row_of, uint8_t* stage) {
  const int thread = static_cast<int>(threadIdx.x);
  const int row = thread / 4;
  const float* values = row_of(row);
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const int chunk = thread % 4 + 4 * i;
    const bool valid = values != nullptr && k0 + chunk * 4 < m.cols;
    CopyAsync(stage + RowChunkAt(row, chunk),
              valid ? static_cast<const void*>(values + k0 + chunk * 4) : m.bytes, valid);
  }
  constexpr int kChunks = kStep * kBytes<kType> / 16;  // of a column: a warp's, one after the other
  const int64_t segment = static_cast<int64_t>(k0 / 256) * m.unit_bytes;
#pragma unroll
  for (int i = 0; i < 2 * kChunks / 8; ++i) {
    const int line = thread / 32 + 8 * i;
    const int panel = first_panel + line / kChunks;
    const int chunk = line % kChunks;
    const bool valid = panel * 32 < m.rows && k0 + chunk * (16 / kBytes<kType>) < m.cols;
    const uint8_t* unit = m.bytes + panel * m.panel_bytes + segment;
    const int at = (k0 % 256 * kBytes<kType> / 16 + chunk) * 512 + thread % 32 * 16;
    CopyAsync(stage + kRowBytes + line * 512 + thread % 32 * 16, valid ? unit + at : m.bytes,
              valid);
  }
  EndCopyGroup();
}

// 16 rows x 16 values as two fragments.
struct RowFragment {
  uint32_t high[4], low[4];

  __device__ __forceinline__ RowFragment(const uint8_t* stage, int first_row, int k) {
    const int lane = static_cast<int>(threadIdx.x) % 32;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int row = first_row + lane / 4 + i % 2 * 8;
      const int value = k + lane % 4 * 2 + i / 2 * 8;
      const float2 x =
          *reinterpret_cast<const float2*>(stage + RowChunkAt(row, value / 4) + value % 4 * 4);
      const SplitPair split = Split(x.x, x.y);
      high[i] = split.high, low[i] = split.low;
    }
  }
};

// 16 columns x 16 values likewise: words 2j and 2j + 1 are those of columns 8j.
template <GgmlType kType>
struct ColumnFragment {
  uint32_t high[4], low[4];

  __device__ __forceinline__ ColumnFragment(const uint8_t* weights, int panel, int first, int k) {
    const int lane = static_cast<int>(threadIdx.x) % 32;
    const uint8_t* at = weights + panel * kStep * kBytes<kType> * 32;
    if constexpr (kType == GgmlType::kF32) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int column = first + i / 2 * 8 + lane / 4;
        const int value = k + i % 2 * 8 + lane % 4 * 2;
        const float2 w =
            *reinterpret_cast<const float2*>(at + value / 4 * 512 + column * 16 + value % 4 * 4);
        const SplitPair split = Split(w.x, w.y);
        high[i] = split.high, low[i] = split.low;
      }
    } else {
      LoadMatrices(high,
                   at + (k / 8 + lane / 8 % 2) * 512 + (first + lane / 16 * 8 + lane % 8) * 16);
      if constexpr (kType == GgmlType::kF16) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const uint32_t halves = high[i];
          const SplitPair split = Split(HalfToFloat(halves & 0xffffu), HalfToFloat(halves >> 16));
          high[i] = split.high, low[i] = split.low;
        }
      }
    }
  }
};

// One step for the warp's 16 rows x 32 columns.
template <GgmlType kType>
__device__ __forceinline__ void MultiplyStep(const uint8_t* stage, float (&acc)[4][4]) {
  const int warp = static_cast<int>(threadIdx.x) / 32;
#pragma unroll
  for (int k = 0; k < kStep; k += 16) {
    const RowFragment x(stage, warp % 4 * 16, k);
#pragma unroll
    for (int pair = 0; pair < 2; ++pair) {
      const ColumnFragment<kType> w(stage + kRowBytes, warp / 4, 16 * pair, k);
#pragma unroll
      for (int one = 0; one < 2; ++one) {
        float (&sums)[4] = acc[2 * pair + one];
        MmaBf16(sums, x.low, w.high[2 * one], w.high[2 * one + 1]);
        if constexpr (kType != GgmlType::kBF16) {
          MmaBf16(sums, x.high, w.low[2 * one], w.low[2 * one + 1]);
        }
        MmaBf16(sums, x.high, w.high[2 * one], w.high[2 * one + 1]);
      }
    }
  }
}

// The products of 64 rows with the matrix's columns of panels `first_panel` and the next, by a
// whole block of kThreads; `shared`: kShared<kType> bytes, 16-byte aligned, free again after a
// barrier.
//   row_of(row) -> const float*   row 0..63 of the tile, 16-byte aligned; null: does not count
//   store(row, column, sum)       column: a row of the matrix; each (row, column) comes once
template <GgmlType kType, typename RowOf, typename StoreY>
__device__ __forceinline__ void Tile(const PanelMatrix& m, int first_panel, const RowOf& row_of,
                                     const StoreY& store, uint8_t* shared) {
  float total[4][4] = {}, acc[4][4] = {};
  const int steps = (m.cols + kStep - 1) / kStep;
#pragma unroll
  for (int s = 0; s < kStages - 1; ++s) {
    CopyStep<kType>(m, first_panel, s * kStep, row_of, shared + s * kStageBytes<kType>);
  }
#pragma unroll 1
  for (int s = 0; s < steps; ++s) {
    WaitForGroups<kStages - 2>();
    // Who is past this barrier has done with the stage before, which is filled next.
    __syncthreads();
    const int ahead = s + kStages - 1;
    CopyStep<kType>(m, first_panel, ahead * kStep, row_of,
                    shared + ahead % kStages * kStageBytes<kType>);
    MultiplyStep<kType>(shared + s % kStages * kStageBytes<kType>, acc);
    if ((s + 1) * kStep % 256 != 0 && s + 1 < steps) continue;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        total[i][j] = __fadd_rn(total[i][j], acc[i][j]);
        acc[i][j] = 0.0f;
      }
    }
  }
  WaitForCopies();
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int warp = static_cast<int>(threadIdx.x) / 32;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const int row = warp % 4 * 16 + lane / 4 + j / 2 * 8;
      const int column = first_panel * 32 + warp / 4 * 32 + i * 8 + lane % 4 * 2 + j % 2;
      if (column < m.rows) store(row, column, total[i][j]);
    }
  }
}

}  // namespace strata::floats
