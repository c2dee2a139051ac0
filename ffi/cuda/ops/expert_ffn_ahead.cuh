// The first kernel of expert_ffn where a block may have much shared memory, for windows of few
// rows: a warp for each segment of gate and of up, whose weights go through its slot.
//
// A block takes items in turn, 32 hidden values of an entry, and meets once for kItemsAtOnce of
// them: a warp that is done with its segment of one begins with the next. The shared expert is read
// once for all rows. All activations are quantised before.
#pragma once

#include "cuda/ops/expert_ffn_gate_up.cuh"
#include "cuda/ops/expert_ffn_slots.cuh"

namespace strata {

inline constexpr int kItemsAtOnce = 4;

template <typename Decode>
using AheadSlot = Slot<std::max(Unit<Decode, 8>::kPartBytes, Unit<DecodeQ8_0, 8>::kPartBytes)>;

// Shared memory of a block: the code book, the warps' slots, the quantised rows, sums [items or
// rows, warps, 32], the rows' words [rows, A] (FillWords), and the items whose sums are there.
struct AheadPlaces {
  int slots_at, rows_at, sums_at, words_at, done_at, bytes;

  __host__ __device__ constexpr AheadPlaces(int warps, int rows, int active, int width,
                                            int book_bytes, int slot_bytes)
      : slots_at(book_bytes),
        rows_at(slots_at + warps * slot_bytes),
        sums_at(rows_at + (static_cast<int>(QuantizedBytes(rows, width)) + 15) / 16 * 16),
        words_at(sums_at + (rows > 2 * kItemsAtOnce ? rows : 2 * kItemsAtOnce) * warps * 128),
        done_at(words_at + rows * active * 8),
        bytes(done_at + 2 * kItemsAtOnce * static_cast<int>(sizeof(int4))) {}
};

// A block's way through its items. The shared expert's come first, because they have the most
// bytes: each counts as two in the blocks' turns.
template <bool kDoors>
struct AheadWalk {
  int at, end, step;
  int shared;  // items
  int gap;     // turns that are left out behind the first round
  const uint64_t* words;
  int row, entry, panel;
  uint64_t word;  // of the item's expert

  __device__ __forceinline__ AheadWalk(const FfnParams& p, int first, int blocks, int live,
                                       const uint64_t* all_words)
      : at(first), step(blocks), words(all_words) {
    shared = kDoors && p.rows != nullptr ? 0 : p.by_panels.divisor;
    if (live == 0) shared = 0;
    gap = shared <= blocks ? shared : 0;
    end = shared + gap + live * p.num_active * p.by_panels.divisor;
    Find(p);
  }
  __device__ __forceinline__ bool Done() const { return at >= end; }
  __device__ __forceinline__ bool IsShared() const { return at < shared; }
  __device__ __forceinline__ void Next(const FfnParams& p) {
    at += step;
    Find(p);
  }
  __device__ __forceinline__ void Find(const FfnParams& p) {
    for (; at < end; at += step) {
      if (IsShared()) {
        row = 0, entry = p.num_active, panel = at, word = 0;
        return;
      }
      int item = at - shared;
      if (at >= step) item -= gap;
      if (at >= step && at < step + gap) continue;
      if (item >= end - shared - gap) continue;
      const int rank = p.by_panels.Quotient(item);
      panel = item - rank * p.by_panels.divisor;
      row = p.by_active.Quotient(rank);
      entry = rank - row * p.by_active.divisor;
      word = InShared(words)[rank];
      if (word != 0) return;
    }
  }
};

// Routed gates and ups are of Decode's type, the shared expert's Q8_0.
template <typename Decode, bool kDoors>
__global__ void __launch_bounds__(2 * kPairWarps * 32, 1)
    AheadGateUpKernel(const __grid_constant__ FfnParams p) {
  STRATA_SHARED(unsigned char, shared);
  using Whole = Unit<Decode, 8>;
  using SharedWhole = Unit<DecodeQ8_0, 8>;
  static_assert(Whole::kParts == 1);
  const int lane = threadIdx.x % 32;
  const int warp = threadIdx.x / 32;
  const int warps = blockDim.x / 32;
  const int segments = warps / 2;
  const bool is_up = warp >= segments;
  const int segment = is_up ? warp - segments : warp;
  constexpr int kBookBytes = GridBytes(Decode::kType, kMostBookCopies);
  const AheadPlaces places(warps, p.num_rows, p.num_active, p.width, kBookBytes,
                           AheadSlot<Decode>::kSize);
  AheadSlot<Decode> slot(shared + places.slots_at + warp * AheadSlot<Decode>::kSize, lane);
  if constexpr (kBookBytes > 0) StageBook<Decode, kMostBookCopies>(shared);
  const int live = min(max(*p.live, 0), p.num_rows);
  const int rings = kDoors && p.mailbox.box != nullptr;
  WaitForKernelBefore();
  // Not sooner: the second kernel takes it that the router is done.
  LetNextKernelBegin();
  if constexpr (kDoors) {
    if (rings && blockIdx.x == 0) return Ring(p);
  }
  const FirstQuads quads(p.x, p.width);
  uint64_t* words = reinterpret_cast<uint64_t*>(shared + places.words_at);
  FillWords<kDoors>(p, live, blockIdx.x == static_cast<unsigned>(rings), words);
  __syncthreads();
  AheadWalk<kDoors> walk(p, static_cast<int>(blockIdx.x) - rings,
                         static_cast<int>(gridDim.x) - rings, live, words);
  // The unit of the walk's item, and asks for its first part.
  const uint8_t* unit = nullptr;
  const auto ask = [&] {
    if (walk.Done()) return;
    if (walk.IsShared()) {
      const PanelMatrix& m = is_up ? p.shared_up : p.shared_gate;
      unit = m.bytes + UnitAt(m, walk.panel, segment);
      slot.template Ask<SharedWhole::kPartBytes>(unit, lane);
      return;
    }
    const uint8_t* at = PanelsOf(walk.word) + (is_up ? p.up_at : 0);
    at += UnitAt(p.gate, walk.panel, segment);
    if ((walk.word & kLinked) == 0) {
      slot.template Ask<Whole::kPartBytes>(at, lane);
    } else {
      if (kDoors) LetLetterPassWarp(p, lane);
      slot.template AskByLanes<Whole::kPartBytes>(at, lane);
    }
  };
  ask();
  const QuantizedShared q = QuantizedAt(shared + places.rows_at, p.num_rows, p.width);
  quads.Quantize(p.x, live, p.width, q);
  __syncthreads();
  const Rows rows = {q.codes, q.scales, q.sums, nullptr, p.width, nullptr, 0};
  float* sums = reinterpret_cast<float*>(shared + places.sums_at);
  const int first_block = segment * 8;
  while (!walk.Done() && walk.IsShared()) {
    const int panel = walk.panel;
    float* to = sums + warp * 32 + lane;
    RawWords<SharedWhole::kCount> raw;
    slot.Wait();
    slot.Take(lane, &raw);
    slot.template Ask<SharedWhole::kPartBytes>(unit + SharedWhole::kSecondAt, lane);
    AddPartToAll<DecodeQ8_0, 0>(&raw, rows, live, first_block, to, warps * 32);
    slot.Wait();
    slot.Take(lane, &raw);
    walk.Next(p);
    ask();
    AddPartToAll<DecodeQ8_0, 1>(&raw, rows, live, first_block, to, warps * 32);
    __syncthreads();
    for (int row = warp; row < live; row += warps) {
      WriteHidden(p, sums + row * warps * 32, segments, row, p.num_active, panel, lane);
    }
    __syncthreads();
  }
  const auto book = LaneBookOf<Decode>(shared, lane);
  int4* done = reinterpret_cast<int4*>(shared + places.done_at);
  // Two sets of sums: warps may be in the next items while one adds up.
  for (int set = 0, adder = 0; !walk.Done(); set ^= 1) {
    const int from = set * kItemsAtOnce;
    int count = 0;
#pragma unroll 1
    for (; count < kItemsAtOnce && !walk.Done(); ++count) {
      if (threadIdx.x == 0) done[from + count] = {walk.row, walk.entry, walk.panel, 0};
      const int row = walk.row;
      const float sum =
          SlotSum<Decode, 8>(&slot, nullptr, book, rows, row, first_block, false, lane, [&] {
            walk.Next(p);
            ask();
          });
      sums[((from + count) * warps + warp) * 32 + lane] = sum;
    }
    __syncthreads();
#pragma unroll 1
    for (int i = 0; i < count; ++i, adder = adder + 1 < warps ? adder + 1 : 0) {
      if (warp != adder) continue;
      const int4 item = done[from + i];
      WriteHidden(p, sums + (from + i) * warps * 32, segments, item.x, item.y, item.z, lane);
    }
  }
}

}  // namespace strata
