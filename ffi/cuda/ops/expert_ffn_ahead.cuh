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
// rows, warps, 32], the rows' words [rows, A] (FillWords), the items whose sums are there, and with
// doors the entries that are computed here (ListEntries).
struct AheadPlaces {
  int slots_at, rows_at, sums_at, words_at, done_at, entries_at, bytes;

  __host__ __device__ constexpr AheadPlaces(int warps, int rows, int active, int width,
                                            int book_bytes, int slot_bytes)
      : slots_at(book_bytes),
        rows_at(slots_at + warps * slot_bytes),
        sums_at(rows_at + (static_cast<int>(QuantizedBytes(rows, width)) + 15) / 16 * 16),
        words_at(sums_at + (rows > 2 * kItemsAtOnce ? rows : 2 * kItemsAtOnce) * warps * 128),
        done_at(words_at + rows * active * 8),
        entries_at(done_at + 2 * kItemsAtOnce * static_cast<int>(sizeof(uint32_t))),
        bytes(entries_at + (1 + rows * active) * static_cast<int>(sizeof(uint16_t))) {}
};

// The number of entries of live rows that are computed here, then row * A + entry of each: with
// those computed elsewhere among them, blocks that take every n-th would have more than others. By
// a warp; the caller synchronises.
__device__ __forceinline__ void ListEntries(const uint64_t* words, int count, uint16_t* entries,
                                            int lane) {
  int listed = 0;
  for (int first = 0; first < count; first += 32) {
    const bool here = first + lane < count && InShared(words)[first + lane] != 0;
    const unsigned mask = __ballot_sync(kAllLanes, here);
    const int place = listed + __popc(mask & ((1u << lane) - 1));
    if (here) entries[1 + place] = static_cast<uint16_t>(first + lane);
    listed += __popc(mask);
  }
  if (lane == 0) entries[0] = static_cast<uint16_t>(listed);
}

// A block's items, of which a warp has a segment of gate or up each. The shared expert's come
// first, because they have the most bytes: each counts as two in the blocks' turns.
struct AheadItems {
  // Of the routed ones 32 at a time: lane k knows the k-th, so that what it takes to find an item
  // is done once for all of them.
  unsigned left = 0;              // lanes whose items are not done
  unsigned linked = 0;            // lanes whose experts lie in the host's memory
  const uint8_t* unit = nullptr;  // the lane's
  uint32_t what = 0;              // the lane's: row << 26, entry << 20, panel
  int next, end, step;            // turns
  int shared;                     // items of the shared expert
  int gap;                        // turns that are left out behind the first round
  const uint16_t* entries;        // that are computed here; null: all are

  // `count`: of the entries.
  __device__ __forceinline__ AheadItems(const FfnParams& p, int first, int blocks, int live,
                                        int count, const uint16_t* entries)
      : next(first),
        step(blocks),
        shared(p.rows != nullptr || live == 0 ? 0 : p.by_panels.divisor),
        entries(entries) {
    gap = shared <= blocks ? shared : 0;
    end = shared + gap + count * p.by_panels.divisor;
  }
  __device__ __forceinline__ int First() const { return __ffs(static_cast<int>(left)) - 1; }
  __device__ __forceinline__ bool IsLinked() const { return (linked & left & (0u - left)) != 0; }
  __device__ __forceinline__ void Drop() { left &= left - 1; }
  // The next routed ones, if there are any; `own_at` is where the warp's segment lies in an
  // expert's first panel.
  __device__ __forceinline__ void Fill(const FfnParams& p, const uint64_t* words, int64_t own_at,
                                       int lane) {
    while (left == 0 && next < end) {
      const int at = next + lane * step;
      int item = at - shared;
      if (at >= step + gap) item -= gap;
      uint64_t word = 0;
      if (item >= 0 && item < end - shared - gap && (at < step || at >= step + gap)) {
        int rank = p.by_panels.Quotient(item);
        const int panel = item - rank * p.by_panels.divisor;
        if (entries != nullptr) rank = InShared(entries)[rank];
        const int row = p.by_active.Quotient(rank);
        word = InShared(words)[rank];
        what = static_cast<uint32_t>(row << 26 | (rank - row * p.by_active.divisor) << 20 | panel);
        unit = PanelsOf(word) + own_at + panel * p.gate.panel_bytes;
      }
      left = __ballot_sync(kAllLanes, word != 0);
      linked = __ballot_sync(kAllLanes, (word & kLinked) != 0);
      next += 32 * step;
    }
  }
};

// A warp's 128 values of each live row: there are as many warps as a row has such parts. They are
// to be asked for before the first weights, behind which they would wait.
struct RowQuads {
  float4 values[kMostRows];

  __device__ __forceinline__ RowQuads(const FfnParams& p, int live) {
    const float* at = p.x + threadIdx.x / 32 * kQuad + threadIdx.x % 32 * 4;
#pragma unroll
    for (int row = 0; row < kMostRows; ++row) {
      values[row] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
      if (row == 0 || row < live) {  // the first row does not wait for `live`
        values[row] = *reinterpret_cast<const float4*>(at + static_cast<int64_t>(row) * p.width);
      }
    }
  }
  // The caller synchronises.
  __device__ __forceinline__ void Quantize(const FfnParams& p, int live,
                                           const QuantizedShared& to) const {
    constexpr int kTogether = 4;  // the steps of one wait for one another, those of others do not
    const int lane = threadIdx.x % 32;
    const int at = threadIdx.x / 32 * kQuad + 4 * lane;
#pragma unroll
    for (int first = 0; first < kMostRows; first += kTogether) {
      if (first >= live) break;
      QuantizedQuad quads[kTogether];
#pragma unroll
      for (int k = 0; k < kTogether; ++k) quads[k] = QuantizeQuad(values[first + k]);
#pragma unroll
      for (int k = 0; k < kTogether; ++k) {
        if (first + k >= live) break;
        const int value = (first + k) * p.width + at;
        *reinterpret_cast<uint32_t*>(to.codes + value) = quads[k].codes;
        if (lane % 8 == 0) to.scales[value / 32] = quads[k].scale;
        if (lane % 4 == 0) to.sums[value / 16] = static_cast<int16_t>(quads[k].half_sum);
      }
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
  const int live = min(max(*p.live, 0), p.num_rows);
  const int rings = kDoors && p.mailbox.box != nullptr;
  WaitForKernelBefore();
  // Not sooner: the second kernel takes it that the router is done.
  LetNextKernelBegin();
  if constexpr (kDoors) {
    BeginLayer(p);
    if (rings && blockIdx.x == 0) return Ring(p);
  }
  uint64_t* words = reinterpret_cast<uint64_t*>(shared + places.words_at);
  // First what the first weights wait for, by the last warps, which have the least to do with the
  // book.
  FillWords<kDoors>(p, live, blockIdx.x == static_cast<unsigned>(rings), words, warps - 1 - warp);
  if constexpr (kBookBytes > 0) StageBook<Decode, kMostBookCopies>(shared);
  const RowQuads quads(p, live);
  __syncthreads();
  const int first = static_cast<int>(blockIdx.x) - rings;
  const int blocks = static_cast<int>(gridDim.x) - rings;
  int count = live * p.num_active;
  const uint16_t* listed = nullptr;
  if constexpr (kDoors) {
    auto* entries = reinterpret_cast<uint16_t*>(shared + places.entries_at);
    if (warp == 0) ListEntries(words, count, entries, lane);
    __syncthreads();
    count = entries[0];
    listed = entries + 1;
  }
  AheadItems items(p, first, blocks, live, count, listed);
  const int64_t own_at = (is_up ? p.up_at : 0) + static_cast<int64_t>(segment) * p.gate.unit_bytes;
  const auto ask = [&] {
    items.Fill(p, words, own_at, lane);
    if (items.left == 0) return;
    if (kDoors && items.IsLinked()) LetLetterPassWarp(p, lane);
    AskFor<Decode>(&slot, items.unit, true, items.IsLinked(), lane, items.First());
  };
  // Of the shared expert's panel, or the first routed one behind its panels.
  const auto shared_unit = [&](int panel) {
    const PanelMatrix& m = is_up ? p.shared_up : p.shared_gate;
    return m.bytes + UnitAt(m, panel, segment);
  };
  const auto ask_at = [&](int panel) {
    if (panel >= items.shared) return ask();
    slot.template Ask<SharedWhole::kPartBytes>(shared_unit(panel), lane);
  };
  ask_at(first);
  const QuantizedShared q = QuantizedAt(shared + places.rows_at, p.num_rows, p.width);
  quads.Quantize(p, live, q);
  __syncthreads();
  const Rows rows = {q.codes, q.scales, q.sums, nullptr, p.width, nullptr, 0};
  float* sums = reinterpret_cast<float*>(shared + places.sums_at);
  const int first_block = segment * 8;
#pragma unroll 1
  for (int panel = first; panel < items.shared; panel += blocks) {
    float* to = sums + warp * 32 + lane;
    RawWords<SharedWhole::kCount> raw;
    slot.Wait();
    slot.Take(lane, &raw);
    slot.template Ask<SharedWhole::kPartBytes>(shared_unit(panel) + SharedWhole::kSecondAt, lane);
    AddPartToAll<DecodeQ8_0, 0>(&raw, rows, live, first_block, to, warps * 32);
    slot.Wait();
    slot.Take(lane, &raw);
    ask_at(panel + blocks);
    AddPartToAll<DecodeQ8_0, 1>(&raw, rows, live, first_block, to, warps * 32);
    __syncthreads();
    for (int row = warp; row < live; row += warps) {
      WriteHidden(p, sums + row * warps * 32, segments, row, p.num_active, panel, lane);
    }
    __syncthreads();
  }
  const auto book = LaneBookOf<Decode>(shared, lane);
  uint32_t* done = reinterpret_cast<uint32_t*>(shared + places.done_at);
  // Two sets of sums: warps may be in the next items while one adds up.
#pragma unroll 1
  for (int set = 0, adder = 0; items.left != 0; set ^= 1) {
    const int from = set * kItemsAtOnce;
    int count = 0;
#pragma unroll 1
    for (; count < kItemsAtOnce && items.left != 0; ++count) {
      const uint32_t what = __shfl_sync(kAllLanes, items.what, items.First());
      if (threadIdx.x == 0) done[from + count] = what;
      const float sum = SlotSum<Decode, 8>(&slot, nullptr, book, rows, static_cast<int>(what >> 26),
                                           first_block, false, lane, [&] {
                                             items.Drop();
                                             ask();
                                           });
      sums[((from + count) * warps + warp) * 32 + lane] = sum;
    }
    __syncthreads();
#pragma unroll 1
    for (int i = 0; i < count; ++i, adder = adder + 1 < warps ? adder + 1 : 0) {
      if (warp != adder) continue;
      const uint32_t what = done[from + i];
      WriteHidden(p, sums + (from + i) * warps * 32, segments, static_cast<int>(what >> 26),
                  static_cast<int>(what >> 20 & 63u), static_cast<int>(what & 0xfffffu), lane);
    }
  }
}

}  // namespace strata
