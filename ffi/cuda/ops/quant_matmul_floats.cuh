// The kernels of quant_matmul_floats.cu: products of many float32 rows with matrices that are not
// quantised, by group instructions (group_mma_floats.cuh), in the order of float_mma.cuh.
//
// A group of 128 threads has 64 rows and all columns of a block's tile; the block's groups share
// the weights, which bulk copies bring some steps ahead. Rows come from memory to registers, a step
// ahead, and are split there. A segment's sums are registers; what is added to once in 256 values
// lies in shared memory: so a tile may have as many columns as registers have sums, and fewer bytes
// pass the second cache, which both kinds of operands together would be bound by.
#pragma once

#include "cuda/group_mma_floats.cuh"
#include "cuda/ops/quant_matmul.h"
#include "cuda/products.cuh"
#include "cuda/reduce.cuh"
#include "cuda/split_mma.cuh"

namespace strata::matmul_floats {

inline constexpr int kGroupRows = 64;
inline constexpr int kStep = 32;  // values of a row
inline constexpr int kSegment = 256 / kStep;
inline constexpr int kMostShared = 227 * 1024;
inline constexpr int kMostPlaces = 8;

// Columns of a matrix lie side by side with those of others in units: panels, or less among planes.
template <int kPlanes>
inline constexpr int kUnit = kPlanes == 1 ? 32 : 16;

// A matrix's units; its bytes where they are not planes.
struct Piece {
  const uint8_t* bytes;
  int64_t panel_bytes;
  int32_t first_unit;
  int32_t rows;
  int32_t column;  // of the result
};

struct Params {
  Piece pieces[kMostMatrices];
  int32_t num_pieces;
  int32_t num_units;
  int32_t num_rows;
  int32_t num_columns;  // of the result
  int32_t width;
  int32_t column_tiles;
  int32_t row_tiles;  // that pass all columns before the next do
  const float* x;
  const int32_t* live;
  float* y;
  uint8_t* planes;
};

// Sizes of a kernel for `kPlanes` parts of a weight. A chunk is 8 values of all columns.
template <int kPlanes, int kColumns, int kGroups>
struct Layout {
  static constexpr int kThreads = 128 * kGroups;
  static constexpr int kRows = kGroupRows * kGroups;
  static constexpr int kUnits = kColumns / kUnit<kPlanes>;
  static constexpr int kLine = kColumns * 16;
  static constexpr int kStage = kPlanes * kStep / 8 * kLine;
  static constexpr int kTotals = 256;
  static constexpr int kWeights = kTotals + kColumns * kRows * 4;
  static constexpr int kFit = (kMostShared - kWeights) / kStage;
  static constexpr int kPlaces = kFit < kMostPlaces ? kFit : kMostPlaces;
  static constexpr int kBytes = kWeights + kPlaces * kStage;
};

__device__ __forceinline__ const Piece& PieceOf(const Params& p, int unit) {
  int i = 0;
  while (i + 1 < p.num_pieces && unit >= p.pieces[i + 1].first_unit) ++i;
  return p.pieces[i];
}

// Where a step's 16 values of a tile lie among planes: [tile][step][half][plane][chunk][column].
template <int kColumns>
__device__ __forceinline__ int64_t PlanesAt(int tile, int steps, int value) {
  return (static_cast<int64_t>(tile) * steps * 2 + value / 16) * (4 * kColumns * 16);
}

// Splits a matrix into the planes of its columns. Thread t of a row loads values 4t.. of 16 at
// once, which the matrix unit takes for 2t, 2t + 1, 2t + 8 and 2t + 9: weights are put in that
// order.
template <GgmlType kType, int kColumns>
__global__ void __launch_bounds__(256)
    SplitWeightsKernel(const __grid_constant__ Params p, const __grid_constant__ PanelMatrix m,
                       int first_unit) {
  const int row = blockIdx.x * 32 + threadIdx.x % 32;
  const int value = (blockIdx.y * 8 + threadIdx.x / 32) * 16;
  if (value >= p.width || row >= (m.rows + kUnit<2> - 1) / kUnit<2> * kUnit<2>) return;
  constexpr int kEach = kType == GgmlType::kF32 ? 4 : 8;  // of a chunk in the panel
  const uint8_t* from = m.bytes + blockIdx.x * m.panel_bytes +
                        static_cast<int64_t>(value / 256) * m.unit_bytes +
                        value % 256 / kEach * 512 + row % 32 * 16;
  uint32_t high[8], low[8];
#pragma unroll
  for (int t = 0; t < 4; ++t) {
    float4 w;
    if constexpr (kType == GgmlType::kF32) {
      w = *reinterpret_cast<const float4*>(from + t * 512);
    } else {
      const uint2 halves = *reinterpret_cast<const uint2*>(from + t / 2 * 512 + t % 2 * 8);
      w = make_float4(HalfToFloat(halves.x & 0xffffu), HalfToFloat(halves.x >> 16),
                      HalfToFloat(halves.y & 0xffffu), HalfToFloat(halves.y >> 16));
    }
    const SplitPair first = Split(w.x, w.y), second = Split(w.z, w.w);
    high[t] = first.high, low[t] = first.low;
    high[4 + t] = second.high, low[4 + t] = second.low;
  }
  const int column = first_unit * kUnit<2> + row;
  uint8_t* to = p.planes + PlanesAt<kColumns>(column / kColumns, p.width / kStep, value) +
                column % kColumns * 16;
#pragma unroll
  for (int chunk = 0; chunk < 2; ++chunk) {
    *reinterpret_cast<uint4*>(to + chunk * kColumns * 16) =
        make_uint4(high[4 * chunk], high[4 * chunk + 1], high[4 * chunk + 2], high[4 * chunk + 3]);
    *reinterpret_cast<uint4*>(to + (2 + chunk) * kColumns * 16) =
        make_uint4(low[4 * chunk], low[4 * chunk + 1], low[4 * chunk + 2], low[4 * chunk + 3]);
  }
}

#if STRATA_GROUPS

// The block's tile.
struct Tile {
  int row, column;  // numbers

  __device__ __forceinline__ Tile(const Params& p, int rows) {
    const int all = (p.num_rows + rows - 1) / rows;
    const int of_group = p.row_tiles * p.column_tiles;
    const int first = static_cast<int>(blockIdx.x) / of_group * p.row_tiles;
    const int count = min(p.row_tiles, all - first);
    const int at = static_cast<int>(blockIdx.x) % of_group;
    row = first + at % count;
    column = at / count;
  }
};

// Four values that a block loads once. Pairs, half of a request each, are better off in the first
// cache: without it the products of 12,800 columns took 4.05 ms in place of 2.34.
__device__ __forceinline__ float4 LoadOnce(const float* at) {
#if defined(STRATA_EMULATE)
  return *reinterpret_cast<const float4*>(at);
#else
  float4 v;
  asm volatile("ld.global.nc.L1::no_allocate.L2::128B.v4.f32 {%0, %1, %2, %3}, [%4];"
               : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w)
               : "l"(at));
  return v;
#endif
}

// A thread's two rows of the tile; those that do not count are the last that does.
template <bool kPairs>
struct RowsOf {
  const float* rows[2];

  __device__ __forceinline__ RowsOf(const Params& p, int first_row, int live) {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int row =
          min(first_row + static_cast<int>(threadIdx.x) / 32 * 16 + lane / 4 + 8 * i, live - 1);
      rows[i] = p.x + row * static_cast<int64_t>(p.width) + lane % 4 * (kPairs ? 2 : 4);
    }
  }
  // `value`: of the step that rows are at, known to the compiler.
  __device__ __forceinline__ void Load(int value, float4 (&in)[2]) const {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      if constexpr (kPairs) {
        const float2 first = *reinterpret_cast<const float2*>(rows[i] + value);
        const float2 second = *reinterpret_cast<const float2*>(rows[i] + value + 8);
        in[i] = make_float4(first.x, first.y, second.x, second.y);
      } else {
        in[i] = LoadOnce(rows[i] + value);
      }
    }
  }
  __device__ __forceinline__ void Next() {
    rows[0] += kStep;
    rows[1] += kStep;
  }
};

__device__ __forceinline__ void SplitRows(const float4 (&in)[2], SplitA* a) {
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const SplitPair first = Split(in[i].x, in[i].y), second = Split(in[i].z, in[i].w);
    a->high[i] = first.high, a->high[2 + i] = second.high;
    a->low[i] = first.low, a->low[2 + i] = second.low;
  }
}

// A lane's share in the copies of a step's weights.
template <int kPlanes, int kColumns, int kGroups>
struct Fill {
  using L = Layout<kPlanes, kColumns, kGroups>;
  const uint8_t* from = nullptr;  // of the next step
  int to = 0, expected = 0;

  __device__ __forceinline__ Fill(const Params& p, const Tile& tile) {
    const int first_unit = tile.column * L::kUnits;
    const int units = min(L::kUnits, p.num_units - first_unit);
    if constexpr (kPlanes == 2) {
      expected = L::kStage;
      if (threadIdx.x == 0) {
        from = p.planes + PlanesAt<kColumns>(tile.column, p.width / kStep, 0);
      }
    } else {
      expected = units * 4 * 512;
      const int i = threadIdx.x / 32 + threadIdx.x % 32 * (L::kThreads / 32);
      const int unit = first_unit + i / 4, chunk = i % 4;
      if (i / 4 < units) {
        const Piece& piece = PieceOf(p, unit);
        from = piece.bytes + (unit - piece.first_unit) * piece.panel_bytes + chunk * 512;
        to = chunk * L::kLine + i / 4 * 512;
      }
    }
  }
  // Asks for the next step.
  __device__ __forceinline__ void Ask(uint8_t* stage, Barrier* full) {
    if (threadIdx.x == 0) ExpectBytes(full, expected);
    if (from == nullptr) return;
    constexpr int kBytes = kPlanes == 2 ? L::kStage : 512;
    CopyBulk(stage + to, from, kBytes, full);
    from += kPlanes == 2 ? L::kStage : 4 * 512;
  }
};

// The places of a block's weights: those of a step become full by copies, and empty by the arrivals
// of all warps.
template <int kPlanes, int kColumns, int kGroups>
struct Ring {
  using L = Layout<kPlanes, kColumns, kGroups>;
  static constexpr int kEarly = L::kPlaces - 2;  // steps that weights are ahead

  Fill<kPlanes, kColumns, kGroups> fill;
  uint8_t* shared;
  int place = 0;  // of the step
  unsigned parity = 0;

  __device__ __forceinline__ Barrier* Full(int at) const {
    return reinterpret_cast<Barrier*>(shared) + at;
  }
  __device__ __forceinline__ Barrier* Empty(int at) const { return Full(L::kPlaces + at); }
  __device__ __forceinline__ uint8_t* Stage(int at) const {
    return shared + L::kWeights + at * L::kStage;
  }
  __device__ __forceinline__ void Init() const {
    if (threadIdx.x != 0) return;
    for (int i = 0; i < L::kPlaces; ++i) {
      InitBarrier(Full(i), 1);
      InitBarrier(Empty(i), L::kThreads / 32);
    }
    PublishToUnits();
  }
  // Behind the block's barrier.
  __device__ __forceinline__ void AskFirst(int steps) {
    for (int i = 0; i < kEarly && i < steps; ++i) fill.Ask(Stage(i), Full(i));
  }
  // The step's weights.
  __device__ __forceinline__ const uint8_t* Await() const {
    AwaitPhase(Full(place), parity);
    return Stage(place);
  }
  // The warp's products of the step before are made.
  __device__ __forceinline__ void LeaveBefore() const {
    __syncwarp();
    if (threadIdx.x % 32 == 0) ArriveAt(Empty(place == 0 ? L::kPlaces - 1 : place - 1));
  }
  // Asks for weights ahead, where the step before the last one had its own.
  __device__ __forceinline__ void AskNext(int step, int steps) {
    if (step + kEarly >= steps) return;
    const int there = place < 2 ? place + kEarly : place - 2;
    if (step >= 2) AwaitPhase(Empty(there), place < 2 ? parity ^ 1 : parity);
    fill.Ask(Stage(there), Full(there));
  }
  __device__ __forceinline__ void Next() {
    if (++place == L::kPlaces) place = 0, parity ^= 1;
  }
};

template <int kPlanes, int kColumns, int kGroups, int kDepth>
struct Products {
  using L = Layout<kPlanes, kColumns, kGroups>;
  float sums[kColumns / 8][4] = {};

  __device__ __forceinline__ void Begin(const SplitA& a, const uint8_t* weights) {
    GroupFence();
    const uint64_t high = ColumnsOperand(weights, L::kLine);
    BeginGroupMma(sums, a.low, high);
    if constexpr (kPlanes == 2) {
      BeginGroupMma(sums, a.high, ColumnsOperand(weights + 2 * L::kLine, L::kLine));
    }
    BeginGroupMma(sums, a.high, high);
    EndProducts();
  }
  // Ends a segment: the first, one of the others, or the last, whose totals become the sums.
  __device__ __forceinline__ void EndSegment(bool first, bool last, float4* totals) {
    WaitForProducts<0>();
    HoldSums(sums);
#pragma unroll
    for (int j = 0; j < kColumns / 8; ++j) {
      float4* at = totals + j * L::kThreads;
      const float4 before = first ? make_float4(0.0f, 0.0f, 0.0f, 0.0f) : *at;
      const float4 total =
          make_float4(__fadd_rn(before.x, sums[j][0]), __fadd_rn(before.y, sums[j][1]),
                      __fadd_rn(before.z, sums[j][2]), __fadd_rn(before.w, sums[j][3]));
      if (!last) *at = total;
      sums[j][0] = last ? total.x : 0.0f, sums[j][1] = last ? total.y : 0.0f;
      sums[j][2] = last ? total.z : 0.0f, sums[j][3] = last ? total.w : 0.0f;
    }
  }
  __device__ __forceinline__ void Run(const Params& p, const Tile& tile, int live, uint8_t* shared);
  __device__ __forceinline__ void Store(const Params& p, const Tile& tile, int live) const;
};

template <int kPlanes, int kColumns, int kGroups, int kDepth>
__device__ __forceinline__ void Products<kPlanes, kColumns, kGroups, kDepth>::Run(const Params& p,
                                                                                  const Tile& tile,
                                                                                  int live,
                                                                                  uint8_t* shared) {
  static_assert(kSegment % kDepth == 0 && L::kPlaces > 2);
  const int steps = p.width / kStep;
  float4* totals = reinterpret_cast<float4*>(shared + L::kTotals) + threadIdx.x;
  Ring<kPlanes, kColumns, kGroups> ring = {Fill<kPlanes, kColumns, kGroups>(p, tile), shared};
  ring.Init();
  RowsOf<kPlanes == 1> rows(p, tile.row * L::kRows, live);
  float4 in[kDepth][2][2];
#pragma unroll
  for (int d = 0; d < kDepth; ++d) {
    if (d >= steps) break;
    rows.Load(0, in[d][0]);
    rows.Load(16, in[d][1]);
    rows.Next();
  }
  __syncthreads();
  ring.AskFirst(steps);
  SplitA a[2] = {};
  // No branch but those of loops lies between a product and the wait for it: the compiler would
  // wait there itself.
  int step = 0;
#pragma unroll 1
  do {
    const int end = min(step / kSegment * kSegment + kSegment, steps);
#pragma unroll 1
    do {
#pragma unroll
      for (int d = 0; d < kDepth; ++d) {
        if (d > 0 && step >= end) break;
        const uint8_t* weights = ring.Await();
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          SplitRows(in[d][half], &a[half]);
          if (step + kDepth < steps) rows.Load(half * 16, in[d][half]);
          Begin(a[half], weights + half * 2 * kPlanes * L::kLine);
          WaitForProducts<1>();
          HoldOperand(a[1 - half].low);
          HoldOperand(a[1 - half].high);
          if (half == 0 && step > 0) ring.LeaveBefore();
        }
        rows.Next();
        ring.AskNext(step, steps);
        ring.Next();
        ++step;
      }
    } while (step < end);
    EndSegment(step <= kSegment, step == steps, totals);
  } while (step < steps);
}

template <int kPlanes, int kColumns, int kGroups, int kDepth>
__device__ __forceinline__ void Products<kPlanes, kColumns, kGroups, kDepth>::Store(
    const Params& p, const Tile& tile, int live) const {
  const int lane = threadIdx.x % 32;
  const int row = tile.row * L::kRows + threadIdx.x / 32 * 16 + lane / 4;
#pragma unroll
  for (int u = 0; u < L::kUnits; ++u) {
    const int unit = tile.column * L::kUnits + u;
    if (unit >= p.num_units) break;
    const Piece& piece = PieceOf(p, unit);
#pragma unroll
    for (int i = 0; i < kUnit<kPlanes> / 4; ++i) {
      const int j = u * (kUnit<kPlanes> / 8) + i / 2, h = i % 2;
      const int column = (unit - piece.first_unit) * kUnit<kPlanes> + i / 2 * 8 + lane % 4 * 2;
      if (row + 8 * h >= p.num_rows || column >= piece.rows) continue;
      const bool counts = row + 8 * h < live;
      const float first = counts ? sums[j][2 * h] : 0.0f;
      const float second = counts ? sums[j][2 * h + 1] : 0.0f;
      const int to = piece.column + column;
      float* y = p.y + (row + 8 * h) * static_cast<int64_t>(p.num_columns) + to;
      if ((p.num_columns | to) % 2 == 0 && column + 1 < piece.rows) {
        *reinterpret_cast<float2*>(y) = make_float2(first, second);
        continue;
      }
      y[0] = first;
      if (column + 1 < piece.rows) y[1] = second;
    }
  }
}

template <int kPlanes, int kColumns, int kGroups, int kDepth>
__global__ void __launch_bounds__(128 * kGroups, 1)
    GroupFloatKernel(const __grid_constant__ Params p) {
  STRATA_SHARED(uint8_t, shared);
  const Tile tile(p, kGroupRows * kGroups);
  const int live = LiveRows(*p.live, p.num_rows);
  Products<kPlanes, kColumns, kGroups, kDepth> products;
  if (tile.row * kGroupRows * kGroups < live) products.Run(p, tile, live, shared);
  products.Store(p, tile, live);
}

#else

// For other chips of a build for several: never launched there.
template <int kPlanes, int kColumns, int kGroups, int kDepth>
__global__ void GroupFloatKernel(const __grid_constant__ Params) {}

#endif

}  // namespace strata::matmul_floats
