// The kernels of expert_ffn for the types that files for decoding use: products inlined, so that a
// warp's weights are asked for before it prepares its activations, and nothing is saved for a call.
//
// A warp needs only the activations of its own segment: it prepares those itself, and the block
// meets once for an item (32 hidden values, or 32 columns), for the sums. Blocks take items in
// turn, because the number of live rows is known on the device only. The first kernel copies the
// weights of its next item to shared memory while it multiplies with the last, where there is room;
// the second asks for its first weights before the first is over.
#pragma once

#include "cuda/async_copy.cuh"
#include "cuda/ops/expert_ffn_doors.cuh"
#include "cuda/ops/expert_ffn_mailbox.cuh"
#include "cuda/ops/expert_ffn_parts.cuh"
#include "cuda/ops/expert_ffn_units.cuh"

namespace strata {

inline constexpr int kPairWarps = 10;  // of an item: one a segment of gate and up
// Of the largest card so far: blocks that find no processor free run after the others.
inline constexpr int kProcessors = 132;

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

// The same from shared memory; `ask` runs once that is free again.
template <typename Decode, typename Ask>
__device__ __forceinline__ float2 AheadPair(const unsigned char* own, const Rows& rows, int lane,
                                            const Ask& ask) {
  using Whole = Unit<Decode, 8>;
  static_assert(Whole::kParts == 1);
  typename Whole::First words, up_words;
  TakeOwnWords(own, lane, words.words);
  if constexpr (Whole::kWords <= 28) {
    TakeOwnWords(own + Whole::kWords * 128, lane, up_words.words);
    ask();
  }
  float2 sums = {0.0f, 0.0f};
#pragma unroll 1  // one body for both, as in PairSums
  for (int i = 0; i < 2; ++i) {
    const float sum = Whole::Sum(words, nullptr, rows, lane);
    if (i == 1) {
      sums.y = sum;
      break;
    }
    sums.x = sum;
    if constexpr (Whole::kWords <= 28) {
      words = up_words;
    } else {
      TakeOwnWords(own + Whole::kWords * 128, lane, words.words);
      ask();
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

// Shared memory of the first kernel: the code book; for every warp its activations, and weights of
// gate and up that are on their way; two sets of sums [groups, gate then up, segments, 32]; and the
// rows' words, [num_rows, A], 0 for entries that are computed elsewhere.
struct GateUpShared {
  int64_t stages_at, weights_at, sums_at, words_at, bytes;

  __host__ __device__ constexpr GateUpShared(int64_t warps, int64_t book_bytes, int64_t pair_bytes,
                                             int64_t words)
      : stages_at(book_bytes),
        weights_at(stages_at + warps * static_cast<int64_t>(sizeof(SegmentStage))),
        sums_at(weights_at + warps * pair_bytes),
        words_at(sums_at + 2 * 2 * warps * 32 * 4),
        bytes(words_at + words * 8) {}
};

// How a block of the first kernel is made up. With a code book and room for weights on their way, a
// block takes two items at a time and all of a multiprocessor, so that they share the book; else,
// and where a block may have to stand back for one of its items, two blocks share one.
template <typename Decode, bool kDoors, bool kAhead>
struct PairShape {
  static constexpr bool kShared = kAhead && !kDoors && GridEntries(Decode::kType) > 0;
  static constexpr int kGroups = kShared ? 2 : 1;
  static constexpr int kCopies = kShared ? kMostBookCopies : kBookCopies;
  static constexpr int kBookBytes = GridBytes(Decode::kType, kCopies);
};

template <typename Decode>
inline constexpr int kPairBytes = 2 * SegmentWords<Decode>(8) * 128;

// Fills the words of the live rows, by a whole block that synchronises; `counts`: and notes the use
// of their experts.
template <bool kDoors>
__device__ __forceinline__ void FillWords(const FfnParams& p, int live, bool counts,
                                          uint64_t* words) {
  const int lane = threadIdx.x % 32;
  const int warps = blockDim.x / 32;
  for (int row = threadIdx.x / 32; row < live; row += warps) {
    const bool mine = lane < p.num_active;
    const int id = mine ? p.ids[row * p.num_active + lane] : 0;
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

// A group's way through the items that are computed here.
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
// kAhead: there is room for the next item's weights.
template <typename Decode, bool kDoors, bool kAhead>
__global__ void __launch_bounds__(kPairWarps * 32 * PairShape<Decode, kDoors, kAhead>::kGroups,
                                  2 / PairShape<Decode, kDoors, kAhead>::kGroups)
    InlineGateUpKernel(const __grid_constant__ FfnParams p) {
  STRATA_SHARED(unsigned char, shared);
  using Form = PairShape<Decode, kDoors, kAhead>;
  using Whole = Unit<Decode, 8>;
  const int lane = threadIdx.x % 32;
  const int warps = blockDim.x / 32;
  const int segments = warps / Form::kGroups;
  const int group = Form::kGroups > 1 && static_cast<int>(threadIdx.x) >= segments * 32 ? 1 : 0;
  const int warp = threadIdx.x / 32 - group * segments;  // of the group
  const GateUpShared places(warps, Form::kBookBytes, kAhead ? kPairBytes<Decode> : 0, 0);
  SegmentStage* stage =
      reinterpret_cast<SegmentStage*>(shared + places.stages_at) + threadIdx.x / 32;
  unsigned char* own = shared + places.weights_at + threadIdx.x / 32 * kPairBytes<Decode>;
  uint64_t* words = reinterpret_cast<uint64_t*>(shared + places.words_at);
  const int live = min(max(*p.live, 0), p.num_rows);
  const int rings = kDoors && p.mailbox.box != nullptr;
  if constexpr (Form::kBookBytes > 0) StageBook<Decode, Form::kCopies>(shared);
  WaitForKernelBefore();
  // Not sooner: the second kernel takes it that the router is done.
  LetNextKernelBegin();
  if constexpr (kDoors) {
    if (rings && blockIdx.x == 0) return Ring(p);
  }
  FillWords<kDoors>(p, live, blockIdx.x == static_cast<unsigned>(rings), words);
  __syncthreads();
  const int blocks = static_cast<int>(gridDim.x) - rings;
  PairWalk<kDoors> walk = {static_cast<int>(blockIdx.x) - rings + group * blocks,
                           live * ItemsOfRow(p), blocks * Form::kGroups, words, 0};
  walk.Find(p);
  SegmentValues values;
  const auto gate_of = [&](const PairItem& at) {
    return PanelsOf(walk.word) + UnitAt(p.gate, at.panel, warp);
  };
  // Asks for what the walk's item needs.
  const auto ask = [&] {
    if (walk.Done()) return;
    const PairItem at(p, walk.item);
    if (kDoors && (walk.word & kLinked) != 0) LetLetterPass(p);
    if (kAhead && at.routed) {
      const uint8_t* gate = gate_of(at);
      CopyOwnWords<Whole::kWords>(own, gate, lane);
      CopyOwnWords<Whole::kWords>(own + Whole::kWords * 128, gate + p.up_at, lane);
    }
    values.Load(p, at.row, warp, lane);
  };
  ask();
  const int first = static_cast<int>(blockIdx.x) - rings;  // of the first group, which has the most
  for (int turn = 0;; ++turn) {
    int item = walk.item;
    const bool has = !walk.Done();
    if (Form::kGroups == 1 ? !has : first + turn * walk.step >= walk.end) return;
    const PairItem at(p, has ? item : 0);
    const Rows rows = RowsOf(*stage, shared, Form::kCopies);
    float2 pair = {0.0f, 0.0f};
    if (!has) {
      // The other group has one more.
    } else if (kAhead && at.routed) {
      QuantizeSegment(values.x, lane, stage);
      AwaitOwnCopies();
      pair = AheadPair<Decode>(own, rows, lane, [&] {
        walk.Next(p);
        ask();
      });
    } else {
      const auto prepare = [&] { QuantizeSegment(values.x, lane, stage); };
      if (at.routed) {
        const uint8_t* gate = gate_of(at);
        pair = PairSums<Decode>(gate, gate + p.up_at, rows, lane, prepare);
      } else {
        const int64_t unit = UnitAt(p.shared_gate, at.panel, warp);
        pair = PairSums<DecodeQ8_0>(p.shared_gate.bytes + unit, p.shared_up.bytes + unit, rows,
                                    lane, prepare);
      }
      walk.Next(p);
      ask();
    }
    // Two sets of sums: a block may be an item ahead of the warp that adds.
    float* sums = reinterpret_cast<float*>(shared + places.sums_at) +
                  (turn % 2 * Form::kGroups + group) * 2 * segments * 32;
    sums[warp * 32 + lane] = pair.x;
    sums[(segments + warp) * 32 + lane] = pair.y;
    __syncthreads();
    Forget(&item);
    if (has && warp == turn % segments) {
      const PairItem done(p, item);
      WriteHidden(p, sums, segments, done.row, done.entry, done.panel, lane);
    }
  }
}

}  // namespace strata
