// The kernels of expert_ffn for the types that files for decoding use: products inlined, so that a
// warp's weights are asked for before it prepares its activations, and nothing is saved for a call.
//
// A warp needs only the activations of its own segment: it prepares those itself, and the block
// meets once for an item (32 hidden values, or 32 columns), for the sums. Blocks take items in
// turn, because the number of live rows is known on the device only. Where a block may have more
// shared memory the kernel of expert_ffn_ahead.cuh is faster.
#pragma once

#include "cuda/ops/expert_ffn_doors.cuh"
#include "cuda/ops/expert_ffn_mailbox.cuh"
#include "cuda/ops/expert_ffn_parts.cuh"
#include "cuda/ops/expert_ffn_units.cuh"

namespace strata {

inline constexpr int kPairWarps = 10;  // of an item: one a segment of gate and up

// The sums of one segment of gate and up; `prepare` runs once the first weights are on their way.
template <typename Decode, typename Prepare>
__device__ __forceinline__ float2 PairSums(const uint8_t* gate, const uint8_t* up, const Rows& rows,
                                           int lane, const Prepare& prepare) {
  using Whole = Unit<Decode, 8>;
  typename Whole::First words, up_words;
  words.Load(gate, lane);
  if constexpr (Whole::kWords <= 28) {
    up_words.Load(up, lane);
  } else {
    if (Whole::kParts == 2) PrefetchUnit(gate, Whole::kWords * 128, lane);
    PrefetchUnit(up, Whole::kWords * 128, lane);
  }
  prepare();
  float2 sums = {0.0f, 0.0f};
#pragma unroll 1  // one body for both: less to fetch, and fewer registers
  for (int i = 0; i < 2; ++i) {
    const float sum = Whole::Sum(words, gate, rows, lane);
    if (i == 1) {
      sums.y = sum;
      break;
    }
    sums.x = sum;
    gate = up;
    if constexpr (Whole::kWords <= 28) {
      words = up_words;
    } else {
      words.Load(up, lane);
    }
  }
  return sums;
}

// 32 hidden values of a row: where they are in the launch's order. The shared expert comes first,
// because it has the most bytes.
struct PairItem {
  int row, entry, panel;
  bool routed;

  __device__ __forceinline__ PairItem(const FfnParams& p, int item) {
    const int rank = p.by_panels.Quotient(item);  // of all rows
    row = p.by_entries.Quotient(rank);
    panel = item - rank * p.by_panels.divisor;
    const int place = rank - row * p.by_entries.divisor;
    routed = place != 0;
    entry = routed ? place - 1 : p.num_active;
  }
};

__device__ __forceinline__ int ItemsOfRow(const FfnParams& p) {
  return p.by_entries.divisor * p.by_panels.divisor;
}

__device__ __forceinline__ int64_t UnitAt(const PanelMatrix& m, int panel, int segment) {
  return panel * m.panel_bytes + static_cast<int64_t>(segment) * m.unit_bytes;
}

// Shared memory of the first kernel: the code book; for every warp its activations; two sets of
// sums [gate then up, segments, 32]; and the rows' words, [num_rows, A], 0 for entries that are
// computed elsewhere.
struct GateUpShared {
  int64_t stages_at, sums_at, words_at, bytes;

  __host__ __device__ constexpr GateUpShared(int64_t segments, int64_t book_bytes, int64_t words)
      : stages_at(book_bytes),
        sums_at(stages_at + segments * static_cast<int64_t>(sizeof(SegmentStage))),
        words_at(sums_at + 2 * 2 * segments * 32 * 4),
        bytes(words_at + words * 8) {}
};

// Fills the words of the live rows, by a whole block that synchronises; `counts`: and notes the use
// of their experts. `first_row`: of the warp, which has that row and every blockDim.x / 32-th
// after.
template <bool kDoors>
__device__ __forceinline__ void FillWords(const FfnParams& p, int live, bool counts,
                                          uint64_t* words, int first_row) {
  const int lane = threadIdx.x % 32;
  const int warps = blockDim.x / 32;
  for (int row = first_row; row < p.num_rows; row += warps) {
    const bool mine = lane < p.num_active;
    const int id = mine ? p.ids[row * p.num_active + lane] : 0;
    if (row >= live) break;  // not sooner: `live` and the id are on their way together
    if constexpr (kDoors) {
      const RowHomes homes = HomesOf(p, id, lane);
      if (counts && mine) CountEntry(p, homes, lane, id, homes.word);
      if (mine) words[row * p.num_active + lane] = homes.Away(lane) ? 0 : homes.word;
    } else {
      if (counts && mine) atomicAdd(p.usage + id, 1u);
      if (mine) words[row * p.num_active + lane] = p.experts[id];
    }
  }
}

// A block's way through the items that are computed here.
template <bool kDoors>
struct PairWalk {
  int item, end, step;
  const uint64_t* words;
  uint64_t word;  // of the item's expert

  __device__ __forceinline__ bool Done() const { return item >= end; }
  __device__ __forceinline__ void Next(const FfnParams& p) {
    item += step;
    Find(p);
  }
  __device__ __forceinline__ void Find(const FfnParams& p) {
    for (; item < end; item += step) {
      const PairItem at(p, item);
      word = at.routed ? InShared(words)[at.row * p.num_active + at.entry] : 0;
      if (at.routed ? word != 0 : !kDoors || p.rows == nullptr) return;
    }
  }
};

// The segment's values of a row, four a lane of each half.
struct SegmentValues {
  float4 x[2];

  __device__ __forceinline__ void Load(const FfnParams& p, int row, int segment, int lane) {
    const float4* from = reinterpret_cast<const float4*>(p.x + static_cast<int64_t>(row) * p.width +
                                                         segment * 256 + 4 * lane);
    x[0] = from[0];
    x[1] = from[32];
  }
};

// Routed gates and ups are of Decode's type, the shared expert's Q8_0. A warp for each segment.
template <typename Decode, bool kDoors>
__global__ void __launch_bounds__(kPairWarps * 32, 2)
    InlineGateUpKernel(const __grid_constant__ FfnParams p) {
  STRATA_SHARED(unsigned char, shared);
  const int lane = threadIdx.x % 32;
  const int warp = threadIdx.x / 32;
  const int segments = blockDim.x / 32;
  constexpr int kBookBytes = GridBytes(Decode::kType, kBookCopies);
  const GateUpShared places(segments, kBookBytes, 0);
  SegmentStage* stage = reinterpret_cast<SegmentStage*>(shared + places.stages_at) + warp;
  uint64_t* words = reinterpret_cast<uint64_t*>(shared + places.words_at);
  const int live = min(max(*p.live, 0), p.num_rows);
  const int rings = kDoors && p.mailbox.box != nullptr;
  if constexpr (kBookBytes > 0) StageBook<Decode, kBookCopies>(shared);
  WaitForKernelBefore();
  // Not sooner: the second kernel takes it that the router is done.
  LetNextKernelBegin();
  if constexpr (kDoors) {
    BeginLayer(p);
    if (rings && blockIdx.x == 0) return Ring(p);
  }
  FillWords<kDoors>(p, live, blockIdx.x == static_cast<unsigned>(rings), words, warp);
  __syncthreads();
  const int blocks = static_cast<int>(gridDim.x) - rings;
  PairWalk<kDoors> walk = {static_cast<int>(blockIdx.x) - rings, live * ItemsOfRow(p), blocks,
                           words, 0};
  walk.Find(p);
  SegmentValues values;
  // Asks for what the walk's item needs.
  const auto ask = [&] {
    if (walk.Done()) return;
    if (kDoors && (walk.word & kLinked) != 0) LetLetterPass(p);
    values.Load(p, PairItem(p, walk.item).row, warp, lane);
  };
  ask();
  for (int turn = 0; !walk.Done(); ++turn) {
    int item = walk.item;
    const PairItem at(p, item);
    const Rows rows = RowsOf(*stage, shared, kBookCopies);
    const auto prepare = [&] { QuantizeSegment(values.x, lane, stage); };
    float2 pair;
    if (at.routed) {
      const uint8_t* gate = PanelsOf(walk.word) + UnitAt(p.gate, at.panel, warp);
      pair = PairSums<Decode>(gate, gate + p.up_at, rows, lane, prepare);
    } else {
      const int64_t unit = UnitAt(p.shared_gate, at.panel, warp);
      pair = PairSums<DecodeQ8_0>(p.shared_gate.bytes + unit, p.shared_up.bytes + unit, rows, lane,
                                  prepare);
    }
    walk.Next(p);
    ask();
    // Two sets of sums: a block may be an item ahead of the warp that adds.
    float* sums = reinterpret_cast<float*>(shared + places.sums_at) + turn % 2 * 2 * segments * 32;
    sums[warp * 32 + lane] = pair.x;
    sums[(segments + warp) * 32 + lane] = pair.y;
    __syncthreads();
    Forget(&item);
    if (warp == turn % segments) {
      const PairItem done(p, item);
      WriteHidden(p, sums, segments, done.row, done.entry, done.panel, lane);
    }
  }
}

}  // namespace strata
