// Products of many activation rows with int8 matrix units, contract T bit for bit.
//
// A tile of rows meets a tile of weights in shared memory, 128 values (a *stage*, 4 blocks of 32)
// at a time. One instruction gives the exact int32 sums of a block of 32 for 16 rows x 8 columns;
// then each sum is scaled and added by the float32 operations of contract T in its order. So tiles
// of any size give the bits of the kernels for few rows.
//
// From integer to float: the unit's accumulator starts at the bits of 1.5 * 2^23, in whose binade
// floats are 1 apart. |I| < 2^22, so the result's bits are those of 1.5 * 2^23 + I, and a
// subtraction leaves float(I), exactly: a full-rate operation where a conversion is none.
#pragma once

#include "cuda/mma.cuh"
#include "cuda/tile_weights.cuh"

namespace strata::tiles {

inline constexpr int kStageValues = 128;
inline constexpr int kStageBlocks = kStageValues / 32;
inline constexpr float kMagic = 12582912.0f;  // 1.5 * 2^23
inline constexpr int kMagicBits = 0x4b400000;

// Where things lie in a stage of kRows activation rows and kColumns weight rows.
template <Form kForm, int kRows, int kColumns>
struct Stage {
  static constexpr int kRowCodes = 0;                         // [row] swizzled 128 bytes
  static constexpr int kCodes = kRowCodes + kRows * 128;      // [column] likewise
  static constexpr int kRowScales = kCodes + kColumns * 128;  // [row][block] float
  static constexpr int kScales = kRowScales + kRows * 16;     // [block][column] float: D
  static constexpr int kMinimums = kScales + kColumns * 16;   // likewise: M
  static constexpr int kFactors =                             // [group][column]
      kMinimums + (HasMinimum(kForm) ? kColumns * 16 : 0);
  static constexpr int kRowSums = kFactors + (IsSplit(kForm) ? kColumns * 32 : 0);
  static constexpr int kBytes = kRowSums + (HasMinimum(kForm) ? kRows * 32 : 0);  // [row][group]
  static constexpr int kNumRows = kRows, kNumColumns = kColumns;
  static constexpr Form kOf = kForm;
};

// The part of a warp: kM * 16 rows from first_row; kN * 8 columns, the j-th eight of them from
// first_column + j * column_step.
struct WarpPart {
  int first_row;
  int active;  // of the kM groups of 16 rows; the others are left out
  int first_column;
  int column_step;
};

// acc + the scaled sums of a block for two columns (2t, 2t + 1) and two rows (g, g + 8): in the
// order of c[] of mma.cuh.
struct ColumnPair {
  float2 d, m;
  uint2 first, second;  // factors of the two groups
};

template <typename Stage>
__device__ __forceinline__ ColumnPair LoadColumns(const uint8_t* stage, int column, int b) {
  ColumnPair c;
  constexpr int kColumns = Stage::kNumColumns;
  c.d = *reinterpret_cast<const float2*>(stage + Stage::kScales + (b * kColumns + column) * 4);
  if constexpr (HasMinimum(Stage::kOf)) {
    c.m = *reinterpret_cast<const float2*>(stage + Stage::kMinimums + (b * kColumns + column) * 4);
  }
  if constexpr (IsSplit(Stage::kOf)) {
    const uint8_t* at = stage + Stage::kFactors + (2 * b * kColumns + column) * 4;
    c.first = *reinterpret_cast<const uint2*>(at);
    c.second = *reinterpret_cast<const uint2*>(at + kColumns * 4);
  }
  return c;
}

__device__ __forceinline__ float Exact(int sum) { return __fsub_rn(__int_as_float(sum), kMagic); }

// What a block of an activation row has besides codes, for rows g and g + 8.
struct RowPair {
  float scale[2];
  float2 sums[2];  // of the codes of the two groups
};

template <typename Stage>
__device__ __forceinline__ RowPair LoadRows(const uint8_t* stage, int row, int b) {
  RowPair r;
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const int at = row + 8 * h;
    r.scale[h] = *reinterpret_cast<const float*>(stage + Stage::kRowScales + at * 16 + b * 4);
    if constexpr (HasMinimum(Stage::kOf)) {
      r.sums[h] = *reinterpret_cast<const float2*>(stage + Stage::kRowSums + at * 32 + b * 8);
    }
  }
  return r;
}

template <Form kForm>
__device__ __forceinline__ void AddSums(const uint32_t (&a)[4], uint32_t b0, uint32_t b1,
                                        const RowPair& rows, const ColumnPair& columns,
                                        float (&acc)[4]) {
  int s[4], s2[4];
  if constexpr (IsSplit(kForm)) {
    MmaS8Half(s, a[0], a[1], b0, kMagicBits);
    MmaS8Half(s2, a[2], a[3], b1, kMagicBits);
  } else {
    MmaS8(s, a, b0, b1, kMagicBits);
  }
#pragma unroll
  for (int e = 0; e < 4; ++e) {
    const float scale = rows.scale[e / 2];
    const uint32_t k0 = e % 2 ? columns.first.y : columns.first.x;
    const uint32_t k1 = e % 2 ? columns.second.y : columns.second.x;
    float sum = Exact(s[e]);
    // Integers below 2^24, so each of these is exact in whatever order.
    if constexpr (IsSplit(kForm)) {
      sum = __fmaf_rn(FactorK(k1), Exact(s2[e]), __fmul_rn(FactorK(k0), sum));
    }
    acc[e] = __fmaf_rn(sum, __fmul_rn(e % 2 ? columns.d.y : columns.d.x, scale), acc[e]);
    if constexpr (HasMinimum(kForm)) {
      const float2 of_row = rows.sums[e / 2];
      float minimum = 0.0f;
      if constexpr (IsSplit(kForm)) {
        minimum = __fmaf_rn(FactorN(k1), of_row.y, __fmul_rn(FactorN(k0), of_row.x));
      } else {
        minimum = __fadd_rn(of_row.x, of_row.y);
      }
      acc[e] = __fmaf_rn(minimum, __fmul_rn(e % 2 ? columns.m.y : columns.m.x, scale), acc[e]);
    }
  }
}

// Block b of the stage for the warp's part: acc[i][j] of rows 16 i and columns j.
template <typename Stage, int kM, int kN>
__device__ __forceinline__ void MultiplyBlock(const uint8_t* stage, int b, const WarpPart& part,
                                              float (&acc)[kM][kN][4]) {
  static_assert(kN % 2 == 0, "weights are loaded for two groups of columns at once");
  const int lane = static_cast<int>(threadIdx.x) % 32;
  uint32_t a[kM][4];
  RowPair rows[kM];
#pragma unroll
  for (int i = 0; i < kM; ++i) {
    const int row = part.first_row + 16 * i;
    LoadMatrices(a[i], stage + Stage::kRowCodes + SwizzledAt(row + lane % 16, 2 * b + lane / 16));
    rows[i] = LoadRows<Stage>(stage, row + lane / 4, b);
  }
#pragma unroll
  for (int pair = 0; pair < kN / 2; ++pair) {
    const int column = part.first_column + 2 * pair * part.column_step;
    uint32_t w[4];
    LoadMatrices(
        w, stage + Stage::kCodes +
               SwizzledAt(column + lane / 16 * part.column_step + lane % 8, 2 * b + lane / 8 % 2));
#pragma unroll
    for (int one = 0; one < 2; ++one) {
      const ColumnPair columns =
          LoadColumns<Stage>(stage, column + one * part.column_step + lane % 4 * 2, b);
#pragma unroll
      for (int i = 0; i < kM; ++i) {
        if (i >= part.active) break;
        AddSums<Stage::kOf>(a[i], w[2 * one], w[2 * one + 1], rows[i], columns,
                            acc[i][2 * pair + one]);
      }
    }
  }
}

template <typename Stage, int kM, int kN>
__device__ __forceinline__ void MultiplyStage(const uint8_t* stage, const WarpPart& part,
                                              float (&acc)[kM][kN][4]) {
#pragma unroll
  for (int b = 0; b < kStageBlocks; ++b) MultiplyBlock<Stage>(stage, b, part, acc);
}

// The end of a segment: its sum joins the row's.
template <int kM, int kN>
__device__ __forceinline__ void EndSegment(float (&acc)[kM][kN][4], float (&total)[kM][kN][4]) {
#pragma unroll
  for (int i = 0; i < kM; ++i) {
#pragma unroll
    for (int j = 0; j < kN; ++j) {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        total[i][j][e] = __fadd_rn(total[i][j][e], acc[i][j][e]);
        acc[i][j][e] = 0.0f;
      }
    }
  }
}

}  // namespace strata::tiles
