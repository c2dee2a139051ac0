// Wide tiles (wide_stage.cuh): the products, and the kernel.
//
// A block stays and takes one tile after the other. Half of its threads fill stages while the other
// half multiply: those that fill are ahead, also into the next tile while a tile's sums are
// written. The weights are the unit's rows, so that the activation rows, of which an expert has any
// number, are its columns and come in steps of 8.
#pragma once

#include "cuda/wide_stage.cuh"

namespace strata::wide {

#if STRATA_GROUPS

// Registers of a thread that fills and of one that multiplies; a pair of them has 256.
inline constexpr int kFillingRegisters = 80;
inline constexpr int kMultiplyingRegisters = 176;

// A multiplying thread's place: columns g and g + 8 of its warp's 16 in both halves of 64,
// activation rows 2t and 2t + 1 of those of its group of warps.
struct Part {
  int group, column, row;
  __device__ __forceinline__ Part() {
    const int thread = static_cast<int>(threadIdx.x);
    // The same for the warp, as the compiler has to know.
    group = __shfl_sync(kAllLanes, thread / 128, 0);
    column = thread / 32 % 4 * 16 + thread % 32 / 4;
    row = thread % 4 * 2;
  }
};

// What scales a block's sums, a lane's: of its columns, two in each half, and of rows 8j + 2t and
// the next, j < kGroups. Both halves of the columns use those of the rows: shared memory would not
// give more. Each is read again for the next block as soon as it was used, and has a unit's time to
// come.
template <typename Stage, int kGroups>
struct Scales {
  const uint8_t* stage;
  int column, row;
  float d[2][2], m[2][2];
  float2 rows[kGroups];

  __device__ __forceinline__ void LoadColumns(int b, int half) {
    const auto load = [&](int at, float (&to)[2]) {
      const float* from = reinterpret_cast<const float*>(stage + at) + b * kColumns + half * 64;
      to[0] = from[column], to[1] = from[column + 8];
    };
    load(Stage::kScales, d[half]);
    if constexpr (Stage::kHasMinimum) load(Stage::kMinimums, m[half]);
  }
  __device__ __forceinline__ void LoadRows(int b, int j) {
    const float* from = reinterpret_cast<const float*>(stage + Stage::kRowScales);
    rows[j] = *reinterpret_cast<const float2*>(from + b * Stage::kScaleLine + row + 8 * j);
  }
  // What block 0 of a stage needs.
  __device__ __forceinline__ void Begin(const uint8_t* of, const Part& part) {
    stage = of;
    column = part.column;
    row = part.group * kGroups * 8 + part.row;
    LoadColumns(0, 0);
    LoadColumns(0, 1);
#pragma unroll
    for (int j = 0; j < kGroups; ++j) LoadRows(0, j);
  }

  // acc + the scaled sums of block b: contract T's operations in its order.
  __device__ __forceinline__ void Add(int b, int half, const int (&products)[kGroups][4],
                                      float (&acc)[kGroups][4]) {
#pragma unroll
    for (int j = 0; j < kGroups; ++j) {
      float4 sums = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
      if constexpr (Stage::kHasMinimum) {
        const float* from = reinterpret_cast<const float*>(stage + Stage::kRowSums);
        sums = *reinterpret_cast<const float4*>(from + 2 * (b * Stage::kScaleLine + row + 8 * j));
      }
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const float scale = e % 2 ? rows[j].y : rows[j].x;
        acc[j][e] =
            __fmaf_rn(__int2float_rn(products[j][e]), __fmul_rn(d[half][e / 2], scale), acc[j][e]);
        if constexpr (Stage::kHasMinimum) {
          const float minimum = e % 2 ? __fadd_rn(sums.z, sums.w) : __fadd_rn(sums.x, sums.y);
          acc[j][e] = __fmaf_rn(minimum, __fmul_rn(m[half][e / 2], scale), acc[j][e]);
        }
      }
      if (half == 1 && b + 1 < Stage::kBlocks) LoadRows(b + 1, j);
    }
    if (b + 1 < Stage::kBlocks) LoadColumns(b + 1, half);
  }
};

// The multiplying threads: two groups of four warps, each with half of the rows and all columns.
template <typename Decode>
struct Multiplier {
  using Layout = wide::Layout<Decode>;
  using Stage = typename Layout::Stage;

  uint8_t* shared;
  Meeting met;
  RingPlace<Layout::kPlaces> at = {};  // of the next stage
  Part part = {};

  template <int kGroups>
  using Sums = float[2][kGroups][4];

  // The sums of all segments so far, which lie in shared memory, a thread's by itself: they are
  // asked for only once in 256 values.
  __device__ __forceinline__ float4* Totals() const {
    return reinterpret_cast<float4*>(shared + Layout::kTotals) + threadIdx.x;
  }

  template <int kGroups>
  __device__ __forceinline__ void AddTotals(bool is_first, Sums<kGroups>& acc) const {
#pragma unroll
    for (int i = 0; i < 2 * kGroups; ++i) {
      float (&sums)[4] = acc[i / kGroups][i % kGroups];
      float4 total = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
      if (!is_first) total = Totals()[i * kMultiplying];
      sums[0] = __fadd_rn(total.x, sums[0]), sums[1] = __fadd_rn(total.y, sums[1]);
      sums[2] = __fadd_rn(total.z, sums[2]), sums[3] = __fadd_rn(total.w, sums[3]);
    }
  }

  template <int kGroups>
  __device__ __forceinline__ void EndSegment(bool is_first, Sums<kGroups>& acc) const {
    AddTotals<kGroups>(is_first, acc);
#pragma unroll
    for (int i = 0; i < 2 * kGroups; ++i) {
      float (&sums)[4] = acc[i / kGroups][i % kGroups];
      Totals()[i * kMultiplying] = make_float4(sums[0], sums[1], sums[2], sums[3]);
      sums[0] = sums[1] = sums[2] = sums[3] = 0.0f;
    }
  }

  // The rows' sums, [row][column] in place of the threads' own.
  template <int kGroups>
  __device__ __forceinline__ void ShowTotals(const Sums<kGroups>& acc) {
    met.Wait();  // all have their own in registers
    float* totals = reinterpret_cast<float*>(shared + Layout::kTotals) +
                    (part.group * kGroups * 8 + part.row) * Layout::kLine + part.column;
#pragma unroll
    for (int i = 0; i < 2 * kGroups; ++i) {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        totals[(i % kGroups * 8 + e % 2) * Layout::kLine + i / kGroups * 64 + e / 2 * 8] =
            acc[i / kGroups][i % kGroups][e];
      }
    }
    met.Wait();
  }

  // A tile of up to 2 kRows rows. A unit is one block of 32 values for half of the columns; while
  // the matrix units multiply one of this group's, the other group scales and adds the sums of its
  // own.
  template <int kRows>
  __device__ __forceinline__ void Multiply(int stages) {
    constexpr int kGroups = kRows / 8;
    constexpr int kUnits = 2 * Stage::kBlocks;
    // Two units at once where there are registers for them: one alone takes 160 cycles to come.
    constexpr int kSets = kRows <= 64 && !Stage::kHasMinimum ? 2 : 1;
    float acc[2][kGroups][4] = {};
    int sums[kSets][kGroups][4];
    Scales<Stage, kGroups> scales;
#pragma unroll 1
    for (int s = 0; s < stages; ++s) {
      const uint8_t* stage = shared + at.place * Stage::kBytes;
      const uint64_t weights = GroupOperand(stage + Stage::kWeights, 0);
      const uint64_t rows = GroupOperand(stage + Stage::kRows + part.group * kRows * 128, 0);
      const auto begin = [&](int unit) {
        GroupFence();
        BeginGroupMma(sums[unit % kSets],
                      AdvanceOperand(weights, unit % 2 * 64 * 128 + unit / 2 * 32),
                      AdvanceOperand(rows, unit / 2 * 32));
      };
      AwaitPhase(Layout::Full(shared) + at.place, at.parity);
      scales.Begin(stage, part);
      begin(0);
      if (s > 0 && s % 2 == 0) EndSegment<kGroups>(s == 2, acc);
#pragma unroll
      for (int unit = 0; unit < kUnits; ++unit) {
        int (&own)[kGroups][4] = sums[unit % kSets];
        const bool is_last = unit + 1 == kUnits;
        if (kSets == 2 && !is_last) begin(unit + 1);
        if (kSets == 2 && !is_last) {
          WaitForSums<1>(own);
        } else {
          WaitForSums<0>(own);
        }
        scales.Add(unit / 2, unit % 2, own, acc[unit % 2]);
        if (kSets == 1 && !is_last) begin(unit + 1);
      }
      ArriveAt(Layout::Empty(shared) + at.place);
      at.Next();
    }
    AddTotals<kGroups>(stages <= 2, acc);
    ShowTotals<kGroups>(acc);
  }

  __device__ __forceinline__ void MultiplyTile(int count, int cols) {
    const int stages = cols / kStageValues;
    if (count <= 32) return Multiply<16>(stages);
    if (count <= 64) return Multiply<32>(stages);
    if (count <= 96) return Multiply<48>(stages);
    if (count <= 128) return Multiply<64>(stages);
    return Multiply<80>(stages);
  }
};

// Product: what is multiplied, and what becomes of the sums.
//   Params                      of a launch
//   Work{.., int count}         a tile, of `count` rows
//   NumTiles(p), Find(p, i)     the launch's tiles; neighbours should share rows or weights
//   Rows(p), RowOf(p, work, i)  activation rows, and which is the tile's i-th
//   Cols(p)                     values of a row: some segments, or half of one more
//   PanelOf(p, work, i)         the i-th of four panels
//   Write(p, work, totals, line)  by the multiplying threads, also for a tile of no row:
//                               sums of row r and column c at totals[r * line + c]
template <typename Decode, typename Product, int kGroup>
__device__ __forceinline__ void FillTiles(const typename Product::Params& p, uint8_t* shared) {
  Filler<Decode, kGroup> filler = {shared};
  const int end = Product::NumTiles(p);
#pragma unroll 1
  for (int i = blockIdx.x; i < end; i += gridDim.x) {
    const typename Product::Work work = Product::Find(p, i);
    if (work.count == 0) continue;
    RowCopies<typename Filler<Decode, kGroup>::Stage> rows(
        Product::Rows(p), work.count, [&](int row) { return Product::RowOf(p, work, row); });
    const int panel = static_cast<int>(threadIdx.x) / 32 % 4;
    filler.FillTile(Product::PanelOf(p, work, panel), Product::Cols(p), rows);
  }
}

template <typename Decode, typename Product>
__device__ __forceinline__ void MultiplyTiles(const typename Product::Params& p, uint8_t* shared) {
  using Layout = wide::Layout<Decode>;
  Multiplier<Decode> multiplier = {shared, {Layout::Met(shared)}};
  const float* totals = reinterpret_cast<const float*>(shared + Layout::kTotals);
  const int end = Product::NumTiles(p);
#pragma unroll 1
  for (int i = blockIdx.x; i < end; i += gridDim.x) {
    const typename Product::Work work = Product::Find(p, i);
    if (work.count > 0) multiplier.MultiplyTile(work.count, Product::Cols(p));
    Product::Write(p, work, totals, Layout::kLine);
    multiplier.met.Wait();  // before the next tile's sums take their place
  }
}

template <typename Decode, typename Product>
__global__ void __launch_bounds__(kThreads, 1)
    Kernel(const __grid_constant__ typename Product::Params p) {
  STRATA_SHARED(uint8_t, unaligned);
  uint8_t* shared = AlignForGroups(unaligned);
  Prepare<Decode>(shared);
  if (threadIdx.x < kMultiplying) {
    TakeRegisters<kMultiplyingRegisters>();
    MultiplyTiles<Decode, Product>(p, shared);
  } else {
    KeepRegisters<kFillingRegisters>();
    if (threadIdx.x < kMultiplying + kFilling) {
      FillTiles<Decode, Product, 0>(p, shared);
    } else {
      FillTiles<Decode, Product, 1>(p, shared);
    }
  }
}

#else

// For other chips of a build for several: never launched there.
template <typename Decode, typename Product>
__global__ void Kernel(const __grid_constant__ typename Product::Params) {}

#endif

template <typename Decode, typename Product>
std::string LaunchTiles(const typename Product::Params& p, cudaStream_t stream) {
  Shape shape;
  shape.grid = dim3(static_cast<unsigned>(Multiprocessors()));
  shape.block = dim3(kThreads);
  shape.shared_bytes = Layout<Decode>::kBytes + kGroupAlignment;
  shape.stream = stream;
  return Launch(Kernel<Decode, Product>, shape, p);
}

}  // namespace strata::wide
