// The first kernel of hyper_read for tiles, and what it shares with the last one
// (hyper_read_tiles_up.cuh).
//
// Operands of the matrix units lie in shared memory by chunks of 8 bfloat16: [chunk][row][16
// bytes], as panels have them, so weights are copied as they are and eight rows of a chunk are in
// different banks.
#pragma once

#include <cstddef>

#include "cuda/products.cuh"
#include "cuda/reduce.cuh"
#include "cuda/split_mma.cuh"

namespace strata::hyper {

inline constexpr int kStreams = 4;
inline constexpr int kStep = 32;               // values of a row in shared memory at once
inline constexpr int kPanelStep = kStep * 64;  // bytes of a panel's 32 rows of them
inline constexpr int kStages = 3;              // of weights: two are on their way

struct TileParams {
  const float* streams;
  float* new_streams;
  const float* y;
  const float* beta;
  const float* norm;
  const int32_t* live;
  float* x;
  float* next_beta;
  float* scales;         // [T, J]  1 / rms
  float* sums;           // [T, J, rank]  of down, scaled
  float* injected;       // [T, J, J]  of inject, scaled: stream, column
  unsigned char* mixed;  // [T/64] pieces of the input of up; see MixedAt
  int32_t num_rows, width, rank;
  float eps;
  bool has_inject;
  PanelMatrix down, inject, up;
};

// Near enough for a gate, without the operator's case for tiny and huge divisors.
__device__ __forceinline__ float GateOf(float x) {
  x = x < -80.0f ? -80.0f : x;  // a NaN stays one
  return __fdividef(1.0f, 1.0f + __expf(-(x > 80.0f ? 80.0f : x)));
}

// Where a matrix's panels have the step that begins with `value`, from the panel's first byte on.
__device__ __forceinline__ int64_t StepAt(const PanelMatrix& m, int value) {
  return static_cast<int64_t>(value / 256) * m.unit_bytes + value % 256 * 64;
}

// A lane's row of pair `pair` of tiles of B [16 values, 8 rows of panels] in a step.
__device__ __forceinline__ const uint8_t* PairAt(const uint8_t* panels, int pair) {
  const int lane = threadIdx.x % 32;
  return panels + pair / 2 * kPanelStep + pair % 2 * 256 + lane / 16 * 128 + lane % 8 * 16 +
         lane / 8 % 2 * 512;
}

// The pair in half a step.
__device__ __forceinline__ void LoadPair(const uint8_t* pair, int half, uint32_t (*to)[2]) {
  uint32_t four[4];
  LoadMatrices(four, pair + half * 1024);
  to[0][0] = four[0];
  to[0][1] = four[1];
  to[1][0] = four[2];
  to[1][1] = four[3];
}

inline constexpr int kDownRows = 64;
inline constexpr int kDownThreads = 256;
// A row's 8 values and its neighbours' begin in other banks than those of the next chunk's rows.
inline constexpr int kChunkBytes = kDownRows * 16 + 64;
inline constexpr int kPlaneBytes = 4 * kChunkBytes;

// The last panel of weights is that of inject.
template <int kTiles>
struct alignas(16) DownShared {
  unsigned char rows[2][2 * kPlaneBytes];  // high, low
  unsigned char weights[kStages][(kTiles + 1) * kPanelStep];
  float scales[kDownRows];
  float norm[1];  // [D]: gamma of the block's stream
};

template <int kTiles>
size_t DownSharedBytes(int64_t width) {
  return offsetof(DownShared<kTiles>, norm) + static_cast<size_t>(width) * 4;
}

// A thread's values of a step: a row's values 4q to 4q + 3 and 16 on.
struct DownInput {
  float4 x[2];
  float4 y[2];
};

// The block's rows of one stream. Thread 4r + q has row r.
class DownRows {
 public:
  __device__ DownRows(const TileParams& p, int num_live) : p_(p) {
    const int row = blockIdx.x * kDownRows + threadIdx.x / 4;
    live_ = row < num_live;
    quad_ = threadIdx.x % 4;
    place_ = (row * kStreams + blockIdx.y) * p.width + 4 * quad_;
    y_ = row * p.width + 4 * quad_;
    beta_ = live_ ? p.beta[row * kStreams + blockIdx.y] : 0.0f;
  }

  __device__ void Load(int value, DownInput* in) const {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int at = value + 16 * i;
      const float4 zero = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
      const bool there = live_ && value < p_.width;
      in->x[i] = there ? *reinterpret_cast<const float4*>(p_.streams + place_ + at) : zero;
      in->y[i] = there ? *reinterpret_cast<const float4*>(p_.y + y_ + at) : zero;
    }
  }

  // Writes the new streams, and their values times gamma, split, into `rows`.
  __device__ void Store(int value, const DownInput& in, const float* norm, unsigned char* rows) {
    if (value >= p_.width) return;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int at = value + 16 * i;
      float4 v = in.x[i];
      v = make_float4(fmaf(beta_, in.y[i].x, v.x), fmaf(beta_, in.y[i].y, v.y),
                      fmaf(beta_, in.y[i].z, v.z), fmaf(beta_, in.y[i].w, v.w));
      if (live_) *reinterpret_cast<float4*>(p_.new_streams + place_ + at) = v;
      squares_ = fmaf(v.x, v.x, squares_);
      squares_ = fmaf(v.y, v.y, squares_);
      squares_ = fmaf(v.z, v.z, squares_);
      squares_ = fmaf(v.w, v.w, squares_);
      const float4 gamma = *reinterpret_cast<const float4*>(norm + at + 4 * quad_);
      const SplitPair first = Split(v.x * gamma.x, v.y * gamma.y);
      const SplitPair second = Split(v.z * gamma.z, v.w * gamma.w);
      unsigned char* to =
          rows + (2 * i + quad_ / 2) * kChunkBytes + threadIdx.x / 4 * 16 + quad_ % 2 * 8;
      *reinterpret_cast<uint2*>(to) = make_uint2(first.high, second.high);
      *reinterpret_cast<uint2*>(to + kPlaneBytes) = make_uint2(first.low, second.low);
    }
  }

  // The stream's 1 / rms; all lanes must call.
  __device__ float Scale() const {
    float squares = squares_ + __shfl_xor_sync(kAllLanes, squares_, 1);
    squares += __shfl_xor_sync(kAllLanes, squares, 2);
    return rsqrtf(fmaf(squares, 1.0f / static_cast<float>(p_.width), p_.eps));
  }

 private:
  const TileParams& p_;
  bool live_;
  int quad_, place_, y_;
  float beta_;
  float squares_ = 0.0f;
};

// Panels that there are not: zeros in every stage.
template <int kTiles>
__device__ __forceinline__ void ClearDown(const TileParams& p, DownShared<kTiles>* shared) {
  for (int panel = p.rank / 32; panel <= kTiles; ++panel) {
    if (panel == kTiles && p.has_inject) continue;
    for (int stage = 0; stage < kStages; ++stage) {
      for (int at = threadIdx.x * 16; at < kPanelStep; at += kDownThreads * 16) {
        *reinterpret_cast<uint4*>(shared->weights[stage] + panel * kPanelStep + at) =
            make_uint4(0, 0, 0, 0);
      }
    }
  }
}

// A thread's share in the copies of weights: 16 bytes of every other panel of a step.
template <int kTiles>
class DownCopies {
 public:
  __device__ explicit DownCopies(const TileParams& p) : p_(p) {
    offset_ = threadIdx.x % kCopies * 16;
    panel_ = threadIdx.x / kCopies;
    from_ = p.down.bytes + panel_ * p.down.panel_bytes + offset_;
  }

  // Begins the copies of the step at `value`.
  __device__ void Begin(int value, unsigned char* to) const {
    if (value < p_.width) {
      const int column = blockIdx.y * p_.width + value;
      const uint8_t* from = from_ + StepAt(p_.down, column);
      to += panel_ * kPanelStep + offset_;
#pragma unroll
      for (int i = 0; i < kTiles / 2; ++i) {
        if (2 * i + panel_ < p_.rank / 32) {
          CopyAsync(to + 2 * i * kPanelStep, from + 2 * i * p_.down.panel_bytes, true);
        }
      }
      if (panel_ == 0 && p_.has_inject) {
        CopyAsync(to + kTiles * kPanelStep, p_.inject.bytes + StepAt(p_.inject, column) + offset_,
                  true);
      }
    }
    EndCopyGroup();
  }

 private:
  static constexpr int kCopies = kPanelStep / 16;
  static_assert(kDownThreads == 2 * kCopies);
  const TileParams& p_;
  const uint8_t* from_;
  int offset_, panel_;
};

// What a warp multiplies in half a step: 32 rows by 8 kTiles columns of down; tile j has columns
// 8 ColumnTile(j) on. In the warps of the
// first columns by inject's, too.
__device__ __forceinline__ int ColumnTile(int j) {
  const int quarter = threadIdx.x / 64;
  return (j / 2 * 4 + quarter) * 2 + j % 2;
}

template <int kTiles>
struct DownOperands {
  SplitA a[2];
  uint32_t down[kTiles][2];
  uint32_t inject[2][2];

  __device__ __forceinline__ void Load(const unsigned char* rows, const unsigned char* weights,
                                       int half) {
    const int lane = threadIdx.x % 32;
    const int warp = threadIdx.x / 32;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const unsigned char* at =
          rows + (2 * half + lane / 16) * kChunkBytes + (warp % 2 * 32 + 16 * i + lane % 16) * 16;
      LoadMatrices(a[i].high, at);
      LoadMatrices(a[i].low, at + kPlaneBytes);
    }
    // Every fourth pair of tiles: places are a constant apart.
    const uint8_t* first = PairAt(weights, warp / 2);
#pragma unroll
    for (int j = 0; j < kTiles / 2; ++j) LoadPair(first + 2 * j * kPanelStep, half, down + 2 * j);
    if (warp / 2 == 0) LoadPair(PairAt(weights, 2 * kTiles), half, inject);
  }
};

template <int kTiles>
struct DownSums {
  float down[2][kTiles][4] = {};
  float inject[2][4] = {};

  __device__ __forceinline__ void Add(const DownOperands<kTiles>& with) {
#pragma unroll
    for (int part = 0; part < 2; ++part) {
#pragma unroll
      for (int j = 0; j < kTiles; ++j) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          MmaBf16(down[i][j], part == 0 ? with.a[i].low : with.a[i].high, with.down[j][0],
                  with.down[j][1]);
        }
      }
    }
    if (threadIdx.x / 64 != 0) return;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      MmaBf16(inject[i], with.a[i].low, with.inject[0][0], with.inject[0][1]);
    }
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      MmaBf16(inject[i], with.a[i].high, with.inject[0][0], with.inject[0][1]);
    }
  }

  __device__ __forceinline__ void Store(const TileParams& p, const float* scales,
                                        int num_live) const {
    const int lane = threadIdx.x % 32;
    const int warp = threadIdx.x / 32;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int side = i % 2 * 2;
      const int own = warp % 2 * 32 + i / 2 * 16 + i % 2 * 8 + lane / 4;
      const int row = blockIdx.x * kDownRows + own;
      if (row >= num_live) continue;
      const int stream = row * kStreams + static_cast<int>(blockIdx.y);
      const float scale = scales[own];
#pragma unroll
      for (int j = 0; j < kTiles; ++j) {
        const int column = ColumnTile(j) * 8 + lane % 4 * 2;
        const float* sums = down[i / 2][j] + side;
        if (column >= p.rank) continue;
        *reinterpret_cast<float2*>(p.sums + stream * p.rank + column) =
            make_float2(sums[0] * scale, sums[1] * scale);
      }
      if (warp / 2 != 0) continue;
      if (lane % 4 == 0) p.scales[stream] = scale;
      if (lane % 4 * 2 < kStreams) {
        *reinterpret_cast<float2*>(p.injected + stream * kStreams + lane % 4 * 2) =
            make_float2(inject[i / 2][side] * scale, inject[i / 2][side + 1] * scale);
      }
    }
  }
};

// A block has 64 rows of one stream; warps 2 x 4 share rows and columns of down. While one half of
// a step is multiplied the operands of the next are loaded; between the halves the next step's rows
// are staged and the block meets.
template <int kTiles>
__global__ void __launch_bounds__(kDownThreads)
    HyperDownTileKernel(const __grid_constant__ TileParams p) {
  STRATA_SHARED(DownShared<kTiles>, shared);
  const int num_live = LiveRows(*p.live, p.num_rows);
  if (static_cast<int>(blockIdx.x) * kDownRows >= num_live) return;
  DownRows rows(p, num_live);
  const DownCopies<kTiles> copies(p);
  DownInput inputs[2];
#pragma unroll
  for (int i = 0; i < kStages; ++i) copies.Begin(i * kStep, shared->weights[i]);
#pragma unroll
  for (int i = 0; i < 2; ++i) rows.Load(i * kStep, &inputs[i]);
  ClearDown(p, shared);
  for (int i = threadIdx.x; i < p.width; i += kDownThreads) {
    shared->norm[i] = p.norm[blockIdx.y * p.width + i];
  }
  __syncthreads();
  rows.Store(0, inputs[0], shared->norm, shared->rows[0]);
  rows.Load(2 * kStep, &inputs[0]);
  WaitForGroups<kStages - 1>();
  __syncthreads();
  DownSums<kTiles> sums;
  DownOperands<kTiles> first, second;
  first.Load(shared->rows[0], shared->weights[0], 0);
  int stage = 0;
  for (int value = 0; value < p.width; value += 2 * kStep) {
#pragma unroll
    for (int turn = 0; turn < 2; ++turn) {
      const int now = value + turn * kStep;
      unsigned char* weights = shared->weights[stage];
      stage = stage + 1 == kStages ? 0 : stage + 1;
      second.Load(shared->rows[turn], weights, 1);
      sums.Add(first);
      rows.Store(now + kStep, inputs[1 - turn], shared->norm, shared->rows[1 - turn]);
      rows.Load(now + 3 * kStep, &inputs[1 - turn]);
      WaitForGroups<kStages - 2>();
      // Past the barrier the next step lies ready, and nobody reads this one's weights any more.
      __syncthreads();
      copies.Begin(now + kStages * kStep, weights);
      if (now + kStep < p.width) first.Load(shared->rows[1 - turn], shared->weights[stage], 0);
      sums.Add(second);
    }
  }
  const float scale = rows.Scale();
  if (threadIdx.x % 4 == 0) shared->scales[threadIdx.x / 4] = scale;
  __syncthreads();
  sums.Store(p, shared->scales, num_live);
}

}  // namespace strata::hyper
