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

// Where the accumulators start. A compiler that knows the value writes it into four registers anew
// for every instruction, a fifth of a kernel's time; so it comes out of shared memory.
struct Start {
  int bits[4];

  // `shared`: 16 aligned bytes. Ends with a barrier.
  __device__ __forceinline__ explicit Start(uint8_t* shared) {
    int4* at = reinterpret_cast<int4*>(shared);
    if (threadIdx.x == 0) *at = make_int4(kMagicBits, kMagicBits, kMagicBits, kMagicBits);
    __syncthreads();
    const int4 v = *at;
    bits[0] = v.x, bits[1] = v.y, bits[2] = v.z, bits[3] = v.w;
#if !defined(STRATA_EMULATE)
#pragma unroll
    for (int i = 0; i < 4; ++i) asm volatile("" : "+r"(bits[i]));
#endif
    __syncthreads();
  }
};

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

// What a block of weights has besides codes, for the lane's two columns, 2t and 2t + 1.
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

// acc + the scaled sums of a block, in the order of d[] of mma.cuh.
template <Form kForm>
__device__ __forceinline__ void AddSums(const Start& start, const uint32_t (&a)[4], uint32_t b0,
                                        uint32_t b1, const RowPair& rows, const ColumnPair& columns,
                                        float (&acc)[4]) {
  int s[4], s2[4];
  if constexpr (IsSplit(kForm)) {
    MmaS8Half(s, a[0], a[1], b0, start.bits);
    MmaS8Half(s2, a[2], a[3], b1, start.bits);
  } else {
    MmaS8(s, a, b0, b1, start.bits);
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

// Where a warp's lane finds its part of a stage: kM groups of 16 rows from `first_row` and pairs of
// groups of 8 columns, the second `column_step` columns behind the first.
struct WarpPart {
  int row_codes;  // bytes; block b's are at the exclusive or with 32 b
  int codes;
  int row;     // g
  int column;  // 2t
  int column_step;

  __device__ __forceinline__ WarpPart(int first_row, int first_column, int step) {
    const int lane = static_cast<int>(threadIdx.x) % 32;
    row_codes = SwizzledAt(first_row + lane % 16, lane / 16);
    codes = SwizzledAt(first_column + lane / 16 * step + lane % 8, lane / 8 % 2);
    row = first_row + lane / 4;
    column = first_column + lane % 4 * 2;
    column_step = step;
  }
};

// Block b of the stage for the first kActive groups of 16 rows: acc[i][j] of rows 16 i and column
// groups j. The next pair of column groups lies 16 columns on.
template <typename Stage, int kActive, int kM, int kN>
__device__ __forceinline__ void MultiplyBlock(const uint8_t* stage, int b, const Start& start,
                                              const WarpPart& part, float (&acc)[kM][kN][4]) {
  static_assert(kN % 2 == 0, "weights are loaded for two groups of columns at once");
  uint32_t a[kActive][4];
  RowPair rows[kActive];
#pragma unroll
  for (int i = 0; i < kActive; ++i) {
    LoadMatrices(a[i], stage + Stage::kRowCodes + 16 * 128 * i + (part.row_codes ^ 32 * b));
    rows[i] = LoadRows<Stage>(stage, part.row + 16 * i, b);
  }
#pragma unroll
  for (int pair = 0; pair < kN / 2; ++pair) {
    uint32_t w[4];
    LoadMatrices(w, stage + Stage::kCodes + 16 * 128 * pair + (part.codes ^ 32 * b));
#pragma unroll
    for (int one = 0; one < 2; ++one) {
      const ColumnPair columns =
          LoadColumns<Stage>(stage, part.column + 16 * pair + one * part.column_step, b);
#pragma unroll
      for (int i = 0; i < kActive; ++i) {
        AddSums<Stage::kOf>(start, a[i], w[2 * one], w[2 * one + 1], rows[i], columns,
                            acc[i][2 * pair + one]);
      }
    }
  }
}

template <typename Stage, int kActive, int kM, int kN>
__device__ __forceinline__ void MultiplyStage(const uint8_t* stage, const Start& start,
                                              const WarpPart& part, float (&acc)[kM][kN][4]) {
#pragma unroll
  for (int b = 0; b < kStageBlocks; ++b) {
    MultiplyBlock<Stage, kActive>(stage, b, start, part, acc);
  }
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
