// ProductKernel of quant_matmul_tiles.cuh for chips whose matrix units work on their own
// (group_mma.cuh): types with groups of 32 values, whose blocks are one instruction long.
//
// Two groups of 128 threads share a tile of 128 x 128; each has all rows and 64 columns. A *unit*
// is one block of 32 values for half of the rows: 32 integers a thread, of which two sets take
// turns, one being multiplied while the other is scaled and added.
#pragma once

#include "cuda/group_mma.cuh"
#include "cuda/ops/quant_matmul_tiles.cuh"

namespace strata::matmul_tiles {

inline constexpr int kGroupThreads = 256;

#if STRATA_GROUPS

// A lane's D, and M where the form has one, of a block for its columns 8j + 2t and the next.
template <Form kForm>
struct GroupColumns {
  float2 d[8];
  float2 m[tiles::HasMinimum(kForm) ? 8 : 1];

  template <typename Stage>
  __device__ __forceinline__ void Load(const uint8_t* stage, int column, int b) {
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      const tiles::ColumnPair pair = tiles::LoadColumns<Stage>(stage, column + 8 * j, b);
      d[j] = pair.d;
      if constexpr (tiles::HasMinimum(kForm)) m[j] = pair.m;
    }
  }
};

// acc + a unit's scaled sums: contract T's operations in its order.
template <Form kForm>
__device__ __forceinline__ void AddUnit(const int (&sums)[8][4], const tiles::RowPair& rows,
                                        const GroupColumns<kForm>& columns, float (&acc)[8][4]) {
#pragma unroll
  for (int j = 0; j < 8; ++j) {
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      const float scale = rows.scale[e / 2];
      const float d = e % 2 ? columns.d[j].y : columns.d[j].x;
      acc[j][e] = __fmaf_rn(__int2float_rn(sums[j][e]), __fmul_rn(d, scale), acc[j][e]);
      if constexpr (tiles::HasMinimum(kForm)) {
        const float minimum = __fadd_rn(rows.sums[e / 2].x, rows.sums[e / 2].y);
        const float m = e % 2 ? columns.m[j].y : columns.m[j].x;
        acc[j][e] = __fmaf_rn(minimum, __fmul_rn(m, scale), acc[j][e]);
      }
    }
  }
}

// The units of a stage, in order: block 0 for rows 0.. and rows 64.., block 1, ...
inline constexpr int kUnits = 2 * tiles::kStageBlocks;

template <typename Stage>
__device__ __forceinline__ void BeginUnit(const uint8_t* stage, int unit, int (&sums)[8][4]) {
  const int group = static_cast<int>(threadIdx.x) / 128;
  BeginGroupMma(sums, GroupOperand(stage + Stage::kRowCodes + unit % 2 * 64 * 128, unit / 2 * 32),
                GroupOperand(stage + Stage::kCodes + group * 64 * 128, unit / 2 * 32));
}

template <Form kForm>
__global__ void __launch_bounds__(kGroupThreads, 1)
    GroupProductKernel(const __grid_constant__ Params p) {
  using Stage = tiles::Stage<kForm, kRows, kColumns>;
  static_assert(Stage::kBytes % kGroupAlignment == 0, "both stages must be aligned");
  STRATA_SHARED(uint8_t, unaligned);
  uint8_t* shared = AlignForGroups(unaligned);
  const Tile tile(p);
  if (tile.IsDead(p)) return;
  const int lane = threadIdx.x % 32;
  const int row = threadIdx.x / 32 % 4 * 16 + lane / 4;
  const int column = threadIdx.x / 128 * 64 + lane % 4 * 2;
  StageCopies<Stage, kGroupThreads> copies(p.x, tile.first_row, tile.piece.weights,
                                           tile.first_column);
  float acc[2][8][4] = {}, total[2][8][4] = {};
  int sums[2][8][4] = {};
  GroupColumns<kForm> columns = {};
  tiles::RowPair rows = {};
  copies.Next(shared);
  const int stages = static_cast<int>(p.x.values) / tiles::kStageValues;
#pragma unroll 1
  for (int s = 0; s < stages; ++s) {
    const uint8_t* stage = shared + s % 2 * Stage::kBytes;
    WaitForCopies();
    PublishToUnits();
    // Who is past this barrier has all of the stage before in registers: its place is filled next.
    __syncthreads();
    if (s + 1 < stages) copies.Next(shared + (s + 1) % 2 * Stage::kBytes);
    GroupFence();
    BeginUnit<Stage>(stage, 0, sums[0]);
    // The last unit of the stage before: so the units have work at once.
    AddUnit<kForm>(sums[1], rows, columns, acc[1]);
    if (s % 2 == 0) tiles::EndSegment(acc, total);
#pragma unroll
    for (int unit = 0; unit < kUnits; ++unit) {
      if (unit % 2 == 0) columns.template Load<Stage>(stage, column, unit / 2);
      rows = tiles::LoadRows<Stage>(stage, row + unit % 2 * 64, unit / 2);
      if (unit + 1 == kUnits) break;
      GroupFence();
      BeginUnit<Stage>(stage, unit + 1, sums[(unit + 1) % 2]);
      WaitForSums<1>(sums[unit % 2]);
      AddUnit<kForm>(sums[unit % 2], rows, columns, acc[unit % 2]);
    }
    WaitForSums<0>(sums[1]);
  }
  AddUnit<kForm>(sums[1], rows, columns, acc[1]);
  tiles::EndSegment(acc, total);
#pragma unroll
  for (int half = 0; half < 2; ++half) {
#pragma unroll
    for (int j = 0; j < 8; ++j) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        tile.Store(p, row + 64 * half + 8 * h, column + 8 * j, total[half][j][2 * h],
                   total[half][j][2 * h + 1]);
      }
    }
  }
}

#else

// For other chips of a build for several: never launched there.
template <Form kForm>
__global__ void GroupProductKernel(const __grid_constant__ Params) {}

#endif

}  // namespace strata::matmul_tiles
