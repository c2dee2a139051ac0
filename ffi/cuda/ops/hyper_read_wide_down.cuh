// The first kernel of hyper_read for tiles, by group instructions (group_mma_floats.cuh).
//
// A block has 128 rows of one stream; blocks of the four streams of the same rows are neighbours,
// for they read the same rows of y. Four warps write the new streams and split their values into
// stages, two groups multiply them, 64 rows each, by all of down's columns and by inject's. A
// stage is a step of 32 values, rows and weights; the sums stay in registers.
#pragma once

#include "cuda/barriers.cuh"
#include "cuda/group_mma_floats.cuh"
#include "cuda/ops/hyper_read_tiles_parts.cuh"

namespace strata::hyper {

inline constexpr int kGroupRows = 64;
inline constexpr int kMultiplying = 256;  // threads: two groups
inline constexpr int kSplitting = 128;
inline constexpr int kWideDownThreads = kMultiplying + kSplitting;
inline constexpr int kWideDownRows = 2 * kGroupRows;
// Lines of so many steps are on their way to the second cache.
inline constexpr int kStepsAhead = 4;

// The block's shared memory: barriers, scales, stages of rows and of weights, gamma.
template <int kRank>
struct DownLayout {
  static constexpr int kHalf = kRank / 2;
  static constexpr int kPlaces = 5;
  // A chunk of all rows: those of four chunks begin in different banks.
  static constexpr int kRowLine = kWideDownRows * 16 + 32;
  static constexpr int kRowPlane = 4 * kRowLine;  // high or low
  static constexpr int kRowStage = 2 * kRowPlane;
  static constexpr int kLine = (kRank + 8) * 16;  // a chunk of all columns, inject's behind down's
  static constexpr int kStage = 4 * kLine;
  static constexpr int kScales = 512;
  static constexpr int kRows = kScales + kWideDownRows * 4;
  static constexpr int kWeights = kRows + kPlaces * kRowStage;
  static constexpr int kNorm = kWeights + kPlaces * kStage;
  static size_t Bytes(int64_t width) { return kNorm + static_cast<size_t>(width) * 4; }
};

struct DownBarriers {
  Barrier full[8];
  Barrier empty[8];
  Barrier scales;
};
static_assert(sizeof(DownBarriers) <= 512);

#if STRATA_GROUPS

// A splitting thread: 4 values of every 16th row of a step, so that eight threads have a line.
template <int kRank, bool kWhole>
class DownSplitter {
 public:
  using Layout = DownLayout<kRank>;
  static constexpr int kStride = kSplitting / 8;
  static constexpr int kNumber = kWideDownRows / kStride;

  __device__ __forceinline__ DownSplitter(const TileParams& p, int num_live, uint8_t* shared)
      : width_(p.width) {
    const int thread = threadIdx.x - kMultiplying;
    const int row = static_cast<int>(blockIdx.y) * kWideDownRows + thread / 8;
    const int own = thread % 8 * 4;
    live_ = num_live - row;
    const int place = (row * kStreams + static_cast<int>(blockIdx.x)) * p.width + own;
    x_ = p.streams + place;
    y_ = p.y + row * p.width + own;
    to_ = p.new_streams - p.streams;
    norm_ = reinterpret_cast<const float*>(shared + Layout::kNorm) + own;
    rows_ = shared + Layout::kRows + thread % 8 / 2 * Layout::kRowLine + thread / 8 * 16 +
            thread % 2 * 8;
#pragma unroll
    for (int i = 0; i < kNumber; ++i) {
      beta_[i] = IsLive(i) ? p.beta[(row + kStride * i) * kStreams + blockIdx.x] : 0.0f;
      in_x_[i] = in_y_[i] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
      Load(i, 0);
    }
  }
  __device__ __forceinline__ bool IsLive(int i) const { return kWhole || kStride * i < live_; }
  __device__ __forceinline__ void Load(int i, int value) {
    if (!IsLive(i)) return;
    in_x_[i] = *reinterpret_cast<const float4*>(x_ + i * kStride * kStreams * width_ + value);
    in_y_[i] = *reinterpret_cast<const float4*>(y_ + i * kStride * width_ + value);
  }
  // Writes the new streams, and their values times gamma, split; asks for the next step.
  __device__ __forceinline__ void SplitStep(int place, bool more) {
    const float4 gamma = *reinterpret_cast<const float4*>(norm_);
    unsigned char* rows = rows_ + place * Layout::kRowStage;
#pragma unroll
    for (int i = 0; i < kNumber; ++i) {
      float4 v = in_x_[i];
      const float4 y = in_y_[i];
      v = make_float4(fmaf(beta_[i], y.x, v.x), fmaf(beta_[i], y.y, v.y), fmaf(beta_[i], y.z, v.z),
                      fmaf(beta_[i], y.w, v.w));
      if (more) Load(i, kStep);
      if (IsLive(i)) {
        *reinterpret_cast<float4*>(const_cast<float*>(x_) + to_ + i * kStride * kStreams * width_) =
            v;
      }
      squares_[i] = fmaf(v.x, v.x, squares_[i]);
      squares_[i] = fmaf(v.y, v.y, squares_[i]);
      squares_[i] = fmaf(v.z, v.z, squares_[i]);
      squares_[i] = fmaf(v.w, v.w, squares_[i]);
      const SplitPair first = Split(v.x * gamma.x, v.y * gamma.y);
      const SplitPair second = Split(v.z * gamma.z, v.w * gamma.w);
      *reinterpret_cast<uint2*>(rows + i * kStride * 16) = make_uint2(first.high, second.high);
      *reinterpret_cast<uint2*>(rows + i * kStride * 16 + Layout::kRowPlane) =
          make_uint2(first.low, second.low);
    }
    x_ += kStep, y_ += kStep, norm_ += kStep;
  }
  // 1 / rms of the rows.
  __device__ __forceinline__ void StoreScales(const TileParams& p, float* scales) const {
    const int thread = threadIdx.x - kMultiplying;
#pragma unroll
    for (int i = 0; i < kNumber; ++i) {
      float squares = squares_[i];
#pragma unroll
      for (int step = 1; step < 8; step *= 2) {
        squares += __shfl_xor_sync(kAllLanes, squares, step);
      }
      const float scale = rsqrtf(fmaf(squares, 1.0f / static_cast<float>(width_), p.eps));
      if (thread % 8 == 0) scales[thread / 8 + kStride * i] = scale;
    }
  }

 private:
  int width_;
  int live_;  // of the rows from the first on
  const float *x_, *y_, *norm_;
  int64_t to_;  // values from a stream to the new one
  unsigned char* rows_;
  float beta_[kNumber];
  float4 in_x_[kNumber], in_y_[kNumber];
  float squares_[kNumber] = {};
};

// `kWhole`: all rows of the block are live.
template <int kRank, bool kWhole>
__device__ __forceinline__ void SplitDown(const TileParams& p, int num_live, uint8_t* shared,
                                          DownBarriers* b) {
  using Layout = DownLayout<kRank>;
  DownSplitter<kRank, kWhole> rows(p, num_live, shared);
  RingPlace<Layout::kPlaces> at;
  const int steps = p.width / kStep;
#pragma unroll 1
  for (int step = 0; step < steps; ++step) {
    AwaitPhase(b->empty + at.place, at.parity ^ 1);
    rows.SplitStep(at.place, step + 1 < steps);
    __syncwarp();
    if (threadIdx.x % 32 == 0) ArriveAt(b->full + at.place);
    at.Next();
  }
  rows.StoreScales(p, reinterpret_cast<float*>(shared + Layout::kScales));
  ArriveAt(&b->scales);
}

// A multiplying warp's share of the copies of a step's weights, and of their addresses.
template <int kRank>
struct DownCopiesWide {
  using Layout = DownLayout<kRank>;
  const uint8_t* from;
  int to, bytes;

  __device__ __forceinline__ explicit DownCopiesWide(const TileParams& p) : bytes(0) {
    const int i = threadIdx.x / 32 + threadIdx.x % 32 * 8;  // of all warps, one after the other
    const int first = static_cast<int>(blockIdx.x) * p.width * 64 + i % 4 * 512;
    from = nullptr, to = i % 4 * Layout::kLine;
    if (i < kRank / 8) {
      from = p.down.bytes + i / 4 * p.down.panel_bytes + first;
      to += i / 4 * 512, bytes = 512;
    } else if (i < kRank / 8 + 4 && p.has_inject) {
      from = p.inject.bytes + first;
      to += kRank * 16, bytes = 128;
    }
  }
  __device__ __forceinline__ void Begin(int step, uint8_t* stage, Barrier* full, int all) const {
    if (threadIdx.x == 0) ExpectBytes(full, all);
    if (bytes > 0) CopyBulk(stage + to, from + step * kPanelStep, bytes, full);
  }
};

// A multiplying thread's row, of streams or of y, of which lines come to the second cache.
struct DownAhead {
  const float* row;
  int when;  // every fourth step for the rows of y, which blocks share

  __device__ __forceinline__ DownAhead(const TileParams& p, int num_live) : row(nullptr), when(-1) {
    const int thread = static_cast<int>(threadIdx.x) % kWideDownRows;
    const int at = static_cast<int>(blockIdx.y) * kWideDownRows + thread;
    if (at >= num_live) return;
    const bool of_y = threadIdx.x >= kWideDownRows;
    const int stream = static_cast<int>(blockIdx.x);
    row = of_y ? p.y + at * p.width : p.streams + (at * kStreams + stream) * p.width;
    if (of_y) when = stream;
  }
  __device__ __forceinline__ void Ask(int step, int steps) const {
#if !defined(STRATA_EMULATE)
    if (row == nullptr || step >= steps || (when >= 0 && when != step % kStreams)) return;
    asm volatile("prefetch.global.L2 [%0];" ::"l"(row + step * kStep));
#else
    (void)step, (void)steps;
#endif
  }
};

template <int kRank>
struct WideDownSums {
  using Layout = DownLayout<kRank>;
  float first[kRank / 16][4];
  float second[kRank / 16 + 1][4];  // inject's are the last

  __device__ __forceinline__ WideDownSums() {
#pragma unroll
    for (auto& four : first) four[0] = four[1] = four[2] = four[3] = 0.0f;
#pragma unroll
    for (auto& four : second) four[0] = four[1] = four[2] = four[3] = 0.0f;
  }
  // A step; `rows` and `weights` as ColumnsOperand.
  __device__ __forceinline__ void Add(uint64_t rows, uint64_t weights) {
    GroupFence();
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const uint64_t left = AdvanceOperand(weights, half * 2 * Layout::kLine);
      const uint64_t right = AdvanceOperand(left, Layout::kHalf * 16);
      const uint64_t high = AdvanceOperand(rows, half * 2 * Layout::kRowLine);
      const uint64_t low = AdvanceOperand(high, Layout::kRowPlane);
      BeginGroupMma(first, low, left);
      BeginGroupMma(second, low, right);
      BeginGroupMma(first, high, left);
      BeginGroupMma(second, high, right);
    }
    EndProducts();
  }
  __device__ __forceinline__ void Store(const TileParams& p, const float* scales,
                                        int num_live) const {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int own = threadIdx.x / 32 * 16 + lane / 4 + 8 * i;
      const int row = static_cast<int>(blockIdx.y) * kWideDownRows + own;
      if (row >= num_live) continue;
      const float scale = scales[own];
      const int stream = row * kStreams + static_cast<int>(blockIdx.x);
      float* to = p.sums + stream * kRank + lane % 4 * 2;
#pragma unroll
      for (int j = 0; j < kRank / 8; ++j) {
        const float* sums = j < kRank / 16 ? first[j] : second[j - kRank / 16];
        *reinterpret_cast<float2*>(to + 8 * j) =
            make_float2(sums[2 * i] * scale, sums[2 * i + 1] * scale);
      }
      if (lane % 4 == 0) p.scales[stream] = scale;
      if (lane % 4 * 2 < kStreams) {
        const float* sums = second[kRank / 16];
        *reinterpret_cast<float2*>(p.injected + stream * kStreams + lane % 4 * 2) =
            make_float2(sums[2 * i] * scale, sums[2 * i + 1] * scale);
      }
    }
  }
};

template <int kRank>
__device__ __forceinline__ void MultiplyDown(const TileParams& p, int num_live, uint8_t* shared,
                                             DownBarriers* b) {
  using Layout = DownLayout<kRank>;
  constexpr int kPlaces = Layout::kPlaces;
  const DownCopiesWide<kRank> copies(p);
  const DownAhead ahead(p, num_live);
  const int bytes = 64 * (kRank + (p.has_inject ? 8 : 0));
  const int steps = p.width / kStep;
  uint8_t* weights = shared + Layout::kWeights;
  for (int i = 0; i < kPlaces - 1 && i < steps; ++i) {
    copies.Begin(i, weights + i * Layout::kStage, b->full + i, bytes);
  }
  const int group = __shfl_sync(kAllLanes, static_cast<int>(threadIdx.x) / 128, 0);
  const uint64_t all_rows =
      ColumnsOperand(shared + Layout::kRows + group * kGroupRows * 16, Layout::kRowLine);
  const uint64_t all_weights = ColumnsOperand(weights, Layout::kLine);
  WideDownSums<kRank> sums;
  RingPlace<kPlaces> at, next;  // of the step, and of the one before and behind all others
  next.place = kPlaces - 1;
  int step = 0;
#pragma unroll 1
  do {
    AwaitPhase(b->full + at.place, at.parity);
    // For the rows, here and not by those that write them: they have much on its way.
    PublishToUnits();
    sums.Add(AdvanceOperand(all_rows, at.place * Layout::kRowStage),
             AdvanceOperand(all_weights, at.place * Layout::kStage));
    ahead.Ask(step + kStepsAhead, steps);
    WaitForProducts<1>();
    if (step > 0) {
      __syncwarp();
      if (threadIdx.x % 32 == 0) ArriveAt(b->empty + next.place);
    }
    if (step + kPlaces - 1 < steps) {
      // The place of the step before: the other group may not be through with it.
      if (step > 0) AwaitPhase(b->empty + next.place, next.parity ^ 1);
      copies.Begin(step + kPlaces - 1, weights + next.place * Layout::kStage, b->full + next.place,
                   bytes);
    }
    next.Next();
    at.Next();
  } while (++step < steps);
  WaitForProducts<0>();
  HoldSums(sums.first);
  HoldSums(sums.second);
  AwaitPhase(&b->scales, 0);
  sums.Store(p, reinterpret_cast<const float*>(shared + Layout::kScales), num_live);
}

template <int kRank>
__global__ void __launch_bounds__(kWideDownThreads, 1)
    WideDownKernel(const __grid_constant__ TileParams p) {
  using Layout = DownLayout<kRank>;
  STRATA_SHARED(uint8_t, shared);
  DownBarriers* b = reinterpret_cast<DownBarriers*>(shared);
  const int num_live = LiveRows(*p.live, p.num_rows);
  if (static_cast<int>(blockIdx.y) * kWideDownRows >= num_live) return;
  if (threadIdx.x == 0) {
    for (int i = 0; i < Layout::kPlaces; ++i) {
      InitBarrier(b->full + i, 1 + kSplitting / 32);
      InitBarrier(b->empty + i, kMultiplying / 32);
    }
    InitBarrier(&b->scales, kSplitting);
    PublishToUnits();
  }
  float* norm = reinterpret_cast<float*>(shared + Layout::kNorm);
  for (int i = threadIdx.x; i < p.width; i += kWideDownThreads) {
    norm[i] = p.norm[blockIdx.x * p.width + i];
  }
  __syncthreads();
  if (threadIdx.x < kMultiplying) {
    TakeRegisters<192>();
    MultiplyDown<kRank>(p, num_live, shared, b);
  } else {
    KeepRegisters<120>();
    if (static_cast<int>(blockIdx.y + 1) * kWideDownRows <= num_live) {
      SplitDown<kRank, true>(p, num_live, shared, b);
    } else {
      SplitDown<kRank, false>(p, num_live, shared, b);
    }
  }
}

#else

// For other chips of a build for several: never launched there.
template <int kRank>
__global__ void WideDownKernel(const __grid_constant__ TileParams) {}

#endif

}  // namespace strata::hyper
