// The kernel of quant_matmul_rows.cu: products for windows, where a launch is over before a block
// has done much, so that what counts is how soon all of the weights are on their way.
//
// A block for each multiprocessor takes whole panels, a warp one segment of a panel at a time, so
// no block waits for another. A segment's bytes lie together and are copied to shared memory, where
// no register waits for them: the first ones before anything else is known, the next ones as soon
// as a warp has taken the last into its registers. A block meets when its activations are quantised
// and when its sums are there.
//
// Types that are not quantised have items of four rows and a lane for each block of 32 values,
// whose sums are short chains. A warp asks for the weights of its next segment before it multiplies
// with the last. Beside quantised panels items come last, before the same barrier, and the blocks
// that have fewer panels take them.
#pragma once

#include <type_traits>

#include "cuda/async_copy.cuh"
#include "cuda/ops/quant_matmul.h"
#include "cuda/products.cuh"
#include "cuda/segments_body.cuh"

namespace strata::rows {

inline constexpr int kMostWarps = 16;
inline constexpr int kItemRows = 4;     // of a matrix that is not quantised
inline constexpr int kItemsAtOnce = 4;  // of a block, between two barriers

struct Slice {
  PanelMatrix matrix;
  int32_t first;   // panel of the launch, or item
  int32_t column;  // of the result
};

struct Params {
  Slice slices[kMostMatrices];  // quantised ones first
  const float* x;
  const int32_t* live;
  float* y;
  int32_t num_slices;
  int32_t num_hot;     // slices that are quantised
  int32_t num_panels;  // of these
  int32_t num_items;   // of the others
  int32_t num_rows;
  int32_t width;
  int32_t num_columns;
  int32_t segments;
  int32_t group_rows;      // activation rows of a block, at most kMostRows
  int32_t panels_at_once;  // of a block, between two barriers
  int32_t slots_at;        // in shared memory, where a warp has a slot of slot_bytes
  int32_t slot_bytes;
  int32_t sums_at;   // [panels_at_once, segments, group_rows, 32]
  int32_t items_at;  // the same of kItemsAtOnce items, with 4 for 32
};

__device__ __forceinline__ int Warps() { return static_cast<int>(blockDim.x) / 32; }

// The number of live rows. The compiler must not know that it is the same for all threads: it would
// wait for it at once (as in hyper_read_parts.cuh).
__device__ __forceinline__ int LiveNow(const Params& p) {
  return p.live[threadIdx.x < blockDim.x ? 0 : 1];
}

__device__ __forceinline__ int FirstRow(const Params& p) {
  return static_cast<int>(blockIdx.y) * p.group_rows;
}

// A warp's way through its block's segments, panel by panel.
struct Walk {
  int panel;  // of the launch
  int round;  // panels of the block before it
  int segment;
  int slice;

  __device__ __forceinline__ explicit Walk(const Params& p)
      : panel(blockIdx.x), round(0), segment(threadIdx.x / 32), slice(0) {
    Find(p);
  }
  __device__ __forceinline__ bool Done(const Params& p) const { return panel >= p.num_panels; }
  __device__ __forceinline__ void Next(const Params& p) {
    segment += Warps();
    Find(p);
  }
  __device__ __forceinline__ void Find(const Params& p) {
    for (; segment >= p.segments; segment -= p.segments, ++round) {
      panel += static_cast<int>(gridDim.x);
    }
    while (slice + 1 < p.num_hot && panel >= p.slices[slice + 1].first) ++slice;
  }
  __device__ __forceinline__ const uint8_t* Bytes(const Params& p) const {
    const Slice& s = p.slices[slice];
    return s.matrix.bytes + (panel - s.first) * s.matrix.panel_bytes +
           segment * s.matrix.unit_bytes;
  }
};

// Writes the totals of the block's `count` panels from `first` on, segments added in ascending
// order; zeros for rows that do not count. A warp takes a panel and a row.
__device__ __forceinline__ void WritePanels(const Params& p, int first, int count, int num_rows,
                                            const float* sums) {
  const int lane = threadIdx.x % 32;
  const int all = min(p.group_rows, p.num_rows - FirstRow(p));
  int slice = 0;
#pragma unroll 1
  for (int job = threadIdx.x / 32; job < count * all; job += Warps()) {
    const int k = job / all;
    const int r = job - k * all;
    const int panel = static_cast<int>(blockIdx.x + (first + k) * gridDim.x);
    while (slice + 1 < p.num_hot && panel >= p.slices[slice + 1].first) ++slice;
    const Slice& s = p.slices[slice];
    float total = 0.0f;
    if (r < num_rows) {
      const float* at = InShared(sums) + (k * p.segments * p.group_rows + r) * 32 + lane;
      const int stride = p.group_rows * 32;
#pragma unroll 8
      for (int i = 0; i < p.segments; ++i) total = __fadd_rn(total, at[i * stride]);
    }
    const int own = (panel - s.first) * 32 + lane;
    if (own < s.matrix.rows) {
      p.y[static_cast<int64_t>(FirstRow(p) + r) * p.num_columns + s.column + own] = total;
    }
  }
}

// The products of a lane's block of 32 values with kRows activation rows.
template <GgmlType kType, int kRows>
__device__ __forceinline__ void FloatProducts(const RawWords<32>& raw,
                                              const float* const (&x)[kRows],
                                              float (&products)[kRows]) {
  constexpr int kWordsOfFour = kType == GgmlType::kF32 ? 4 : 2;
#pragma unroll
  for (int r = 0; r < kRows; ++r) products[r] = 0.0f;
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    const float4 w = FourFloats<kType>(raw.words + kWordsOfFour * i);
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      const float4 v = *reinterpret_cast<const float4*>(x[r] + 4 * i);
      products[r] = __fmaf_rn(w.x, v.x, products[r]);
      products[r] = __fmaf_rn(w.y, v.y, products[r]);
      products[r] = __fmaf_rn(w.z, v.z, products[r]);
      products[r] = __fmaf_rn(w.w, v.w, products[r]);
    }
  }
}

// A segment's sum: its eight blocks' products, which lie four lanes apart, in ascending order.
__device__ __forceinline__ float AddBlocks(float product, int lane) {
  float parts[8];
#pragma unroll
  for (int k = 0; k < 8; ++k) parts[k] = __shfl_sync(kAllLanes, product, (lane & 3) + 4 * k);
  float sum = 0.0f;
#pragma unroll
  for (int k = 0; k < 8; ++k) sum = __fadd_rn(sum, parts[k]);
  return sum;
}

// One segment of an item: to[r * 4] <- the sum of row lane % 4 with activation row r; x are those
// of the lane's block.
template <GgmlType kType>
__device__ __forceinline__ void FloatSegment(const RawWords<32>& raw, const float* x, int width,
                                             int num_rows, float* to) {
  const int lane = threadIdx.x % 32;
  if (num_rows == 1) {
    float products[1];
    const float* const of[1] = {x};
    FloatProducts<kType, 1>(raw, of, products);
    const float sum = AddBlocks(products[0], lane);
    if (lane < kItemRows) to[lane] = sum;
    return;
  }
#pragma unroll 1
  for (int r = 0; r < num_rows; r += 2) {
    const int second = min(r + 1, num_rows - 1);
    float products[2];
    const float* const of[2] = {x + r * width, x + second * width};
    FloatProducts<kType, 2>(raw, of, products);
    const float sums[2] = {AddBlocks(products[0], lane), AddBlocks(products[1], lane)};
    if (lane < kItemRows) {
      to[r * kItemRows + lane] = sums[0];
      to[second * kItemRows + lane] = sums[1];
    }
  }
}

// An item by its turn in the block. The last blocks take the first ones: they have fewer panels.
struct Item {
  int slice;
  int own;  // item of the slice

  __device__ __forceinline__ Item(const Params& p, int turn) : slice(p.num_hot) {
    own = static_cast<int>(gridDim.x - 1 - blockIdx.x + turn * gridDim.x);
    while (slice + 1 < p.num_slices && own >= p.slices[slice + 1].first) ++slice;
    own -= p.slices[slice].first;
  }
};

// The block's items of matrices that are not quantised, kItemsAtOnce between two barriers.
class FloatItems {
 public:
  // `warps`: so many of the block's, the last ones, share the work.
  __device__ __forceinline__ FloatItems(const Params& p, int warps)
      : count_((p.num_items - static_cast<int>(gridDim.x - 1 - blockIdx.x) +
                static_cast<int>(gridDim.x) - 1) /
               static_cast<int>(gridDim.x)),
        warps_(warps),
        job_(Warps() - 1 - static_cast<int>(threadIdx.x) / 32) {
    if (job_ >= warps) job_ = count_ * p.segments;
  }
  // Asks for the weights of the warp's first segment, once.
  __device__ __forceinline__ void Begin(const Params& p) {
    if (!begun_) Load(p);
    begun_ = true;
  }
  // Asks for them long before, where there are no registers to wait with.
  __device__ __forceinline__ void Prefetch(const Params& p) const {
    const int turn = job_ / p.segments;
    if (turn >= count_) return;
    const Place at(p, turn, job_ - turn * p.segments);
#if !defined(STRATA_EMULATE)
    for (int i = 0; i < (at.is_wide ? 8 : 4); ++i) {
      asm volatile("prefetch.global.L2 [%0];" ::"l"(at.block + i * 512 + at.row * 16));
    }
#endif
  }
  // Whether there are items that Multiply has not taken.
  __device__ __forceinline__ bool Left() const { return done_ < count_; }

  // The warp's segments of the next items.
  __device__ __forceinline__ void Multiply(const Params& p, int num_rows) {
    const int end = min(done_ + kItemsAtOnce, count_) * p.segments;
    Begin(p);
#pragma unroll 1
    while (job_ < end) {
      const int turn = job_ / p.segments;
      const int segment = job_ - turn * p.segments;
      const RawWords<32> raw = next_;
      const GgmlType type = p.slices[Item(p, turn).slice].matrix.type;
      job_ += warps_;
      Load(p);
      const int block = segment * 8 + static_cast<int>(threadIdx.x) % 32 / kItemRows;
      const float* x = p.x + static_cast<int64_t>(FirstRow(p)) * p.width + 32 * block;
      float* to = Sums(p) + ((turn - done_) * p.segments + segment) * p.group_rows * kItemRows;
      if (num_rows == 0) continue;
      if (type == GgmlType::kF32) {
        FloatSegment<GgmlType::kF32>(raw, x, p.width, num_rows, to);
      } else if (type == GgmlType::kF16) {
        FloatSegment<GgmlType::kF16>(raw, x, p.width, num_rows, to);
      } else {
        FloatSegment<GgmlType::kBF16>(raw, x, p.width, num_rows, to);
      }
    }
  }

  // Writes their totals, after a barrier.
  __device__ __forceinline__ void Write(const Params& p, int num_rows) {
    const int all = min(p.group_rows, p.num_rows - FirstRow(p));
    const int count = min(kItemsAtOnce, count_ - done_);
#pragma unroll 1
    for (int i = threadIdx.x; i < count * all * kItemRows; i += Warps() * 32) {
      const int row = i % kItemRows;
      const int k = i / kItemRows / all;
      const int r = i / kItemRows - k * all;
      const Item item(p, done_ + k);
      const Slice& slice = p.slices[item.slice];
      float total = 0.0f;
      if (r < num_rows) {
        const float* at = Sums(p) + (k * p.segments * p.group_rows + r) * kItemRows + row;
        const int stride = p.group_rows * kItemRows;
#pragma unroll 8
        for (int s = 0; s < p.segments; ++s) total = __fadd_rn(total, at[s * stride]);
      }
      const int own = item.own * kItemRows + row;
      if (own < slice.matrix.rows) {
        p.y[static_cast<int64_t>(FirstRow(p) + r) * p.num_columns + slice.column + own] = total;
      }
    }
    done_ += kItemsAtOnce;
  }

  // All that are left.
  __device__ __forceinline__ void Finish(const Params& p, int num_rows) {
    while (Left()) {
      __syncthreads();
      Multiply(p, num_rows);
      __syncthreads();
      Write(p, num_rows);
    }
  }

 private:
  __device__ __forceinline__ static float* Sums(const Params& p) {
    STRATA_SHARED(unsigned char, shared);
    return reinterpret_cast<float*>(InShared(shared + p.items_at));
  }

  // A lane's block of 32 values of its row in a segment of an item.
  struct Place {
    const uint8_t* block;
    int row;  // of the panel
    bool is_wide;

    __device__ __forceinline__ Place(const Params& p, int turn, int segment) {
      const Item item(p, turn);
      const PanelMatrix& m = p.slices[item.slice].matrix;
      const int lane = threadIdx.x % 32;
      is_wide = m.type == GgmlType::kF32;
      row = item.own % (32 / kItemRows) * kItemRows + lane % kItemRows;
      block = m.bytes + item.own / (32 / kItemRows) * m.panel_bytes + segment * m.unit_bytes +
              lane / kItemRows * (is_wide ? 4096 : 2048);
    }
  };

  // Asks for the weights of the warp's segment, if there is one.
  __device__ __forceinline__ void Load(const Params& p) {
    const int turn = job_ / p.segments;
    if (turn >= count_) return;
    const Place at(p, turn, job_ - turn * p.segments);
    if (at.is_wide) return LoadWords(at.block, at.row, &next_);
    RawWords<16> half;
    LoadWords(at.block, at.row, &half);
#pragma unroll
    for (int i = 0; i < 16; ++i) next_.words[i] = half.words[i];
  }

  int count_;  // of the block
  int warps_;
  int done_ = 0;  // items written
  bool begun_ = false;
  int job_;  // the warp's next: a segment of an item
  RawWords<32> next_;
};

// The block's quantised panels, and behind them its items. Its activations are staged meanwhile.
template <typename Hot>
__device__ __forceinline__ void HotPanels(const Params& p) {
  STRATA_SHARED(unsigned char, shared);
  constexpr int kWords = SegmentWords<Hot>(8);
  const int lane = threadIdx.x % 32;
  const int live = LiveNow(p);
  Walk walk(p);
  Slot<kWords * 128> slot(shared + p.slots_at + threadIdx.x / 32 * p.slot_bytes, lane);
  // Rows after the first group's are rarely there: their weights are not asked for in advance.
  const bool now = blockIdx.y == 0 || live > FirstRow(p);
  const bool asked = now && !walk.Done(p);
  if (asked) slot.Ask(walk.Bytes(p), lane);
  FloatItems(p, Warps() / 2).Prefetch(p);
  WaitForKernelBefore();
  LetNextKernelBegin();
  const float* x = p.x + static_cast<int64_t>(FirstRow(p)) * p.width;
  const FirstQuads quads(x, p.width);
  const int num_rows = min(max(live - FirstRow(p), 0), min(p.group_rows, p.num_rows - FirstRow(p)));
  const QuantizedShared q = QuantizedAt(shared, p.group_rows, p.width);
  quads.Quantize(x, num_rows, p.width, q);
  __syncthreads();
  const Rows rows = {q.codes, q.scales, q.sums, nullptr, p.width, nullptr, 0};
  if (asked && num_rows == 0) slot.Wait();
  float* sums = reinterpret_cast<float*>(shared + p.sums_at);
  const int panels =
      (p.num_panels - static_cast<int>(blockIdx.x) + static_cast<int>(gridDim.x) - 1) /
      static_cast<int>(gridDim.x);
#pragma unroll 1
  for (int first = 0;; first += p.panels_at_once) {
    const int count = min(p.panels_at_once, panels - first);
    while (num_rows > 0 && walk.round < first + count) {
      RawWords<kWords> raw;
      slot.Wait();
      slot.Take(lane, &raw);
      float* to = sums + ((walk.round - first) * p.segments + walk.segment) * p.group_rows * 32;
      const int segment = walk.segment;
      walk.Next(p);
      if (!walk.Done(p)) slot.Ask(walk.Bytes(p), lane);
      SumsInto<Hot>(&raw, rows, segment, num_rows, to + lane);
    }
    if (first + p.panels_at_once >= panels) {
      // What follows has all registers. The last warps had the fewest segments.
      FloatItems items(p, Warps() / 2);
      items.Multiply(p, num_rows);
      __syncthreads();
      WritePanels(p, first, count, num_rows, sums);
      items.Write(p, num_rows);
      return items.Finish(p, num_rows);
    }
    __syncthreads();
    WritePanels(p, first, count, num_rows, sums);
    __syncthreads();
  }
}

// A kernel for types that are not quantised only.
struct NoHot {};

template <typename Hot>
__global__ void __launch_bounds__(kMostWarps * 32, 1) RowsKernel(const __grid_constant__ Params p) {
  if constexpr (!std::is_same_v<Hot, NoHot>) {
    HotPanels<Hot>(p);
  } else {
    FloatItems items(p, Warps());
    items.Begin(p);
    WaitForKernelBefore();
    LetNextKernelBegin();
    const int all = min(p.group_rows, p.num_rows - FirstRow(p));
    items.Finish(p, min(max(LiveNow(p) - FirstRow(p), 0), all));
  }
}

}  // namespace strata::rows
