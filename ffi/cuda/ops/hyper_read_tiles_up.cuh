// The last kernel of hyper_read for tiles: the product with up, the mixed row and its streams.
#pragma once

#include "cuda/ops/hyper_read_tiles_parts.cuh"

namespace strata::hyper {

inline constexpr int kUpRows = 64;
inline constexpr int kUpColumns = 64;  // of every stream
inline constexpr int kUpThreads = 256;
inline constexpr int kUpPanels = kStreams * kUpColumns / 32;
inline constexpr int kMixedPlane = kUpRows * 16;        // a chunk's high or low halves
inline constexpr int kMixedStep = 2 * 4 * kMixedPlane;  // bytes of a step

struct alignas(16) UpShared {
  unsigned char mixed[kStages][kMixedStep];
  unsigned char weights[kStages][kUpPanels * kPanelStep];
};

// Where the pair of values in columns `column` (even) and the next of a row's input of up lie; the
// low halves kMixedPlane on. [64 rows][chunk][high, low][row][16 bytes]
__device__ __forceinline__ int64_t MixedAt(int row, int column, int rank) {
  return static_cast<int64_t>(row / kUpRows) * kUpRows * rank * 4 + column / 8 * (2 * kMixedPlane) +
         row % kUpRows * 16 + column % 8 * 2;
}

// Begins the copies of a step: 64 rows of the input, two panels of every stream's columns.
__device__ __forceinline__ void CopyUp(const TileParams& p, int value, int stage,
                                       UpShared* shared) {
  if (value < p.rank) {
    const int own = threadIdx.x * 16;
    const unsigned char* mixed =
        p.mixed + MixedAt(blockIdx.y * kUpRows, 0, p.rank) + value / kStep * kMixedStep + own;
#pragma unroll
    for (int at = 0; at < kMixedStep; at += kUpThreads * 16) {
      CopyAsync(shared->mixed[stage] + own + at, mixed + at, true);
    }
    static_assert(kUpThreads * 16 == 2 * kPanelStep);
    const int panel = static_cast<int>(blockIdx.x) * (kUpColumns / 32) + own / kPanelStep;
    const uint8_t* weights =
        p.up.bytes + panel * p.up.panel_bytes + own % kPanelStep + StepAt(p.up, value);
#pragma unroll
    for (int s = 0; s < kStreams; ++s) {
      CopyAsync(shared->weights[stage] + own + s * (2 * kPanelStep),
                weights + s * (p.width / 32) * p.up.panel_bytes, true);
    }
  }
  EndCopyGroup();
}

// The mean over the streams of gate times normed value, for two columns of a row.
__device__ __forceinline__ float2 MixPair(const TileParams& p, int row, int column,
                                          const float2 (&gates)[kStreams]) {
  const float4 scales = *reinterpret_cast<const float4*>(p.scales + row * kStreams);
  const float of_stream[kStreams] = {scales.x, scales.y, scales.z, scales.w};
  float2 sum = make_float2(0.0f, 0.0f);
#pragma unroll
  for (int s = 0; s < kStreams; ++s) {
    const float* at = p.new_streams + (row * kStreams + s) * p.width + column;
    const float2 v = *reinterpret_cast<const float2*>(at);
    const float2 gamma = *reinterpret_cast<const float2*>(p.norm + s * p.width + column);
    sum.x += GateOf(gates[s].x) * (v.x * of_stream[s] * gamma.x);
    sum.y += GateOf(gates[s].y) * (v.y * of_stream[s] * gamma.y);
  }
  return make_float2(sum.x / kStreams, sum.y / kStreams);
}

// The warp's 32 rows of half a step.
__device__ __forceinline__ void LoadMixed(const unsigned char* mixed, int half, SplitA (&to)[2]) {
  const int lane = threadIdx.x % 32;
  const int row = threadIdx.x / 32 % 2 * 32 + lane % 16;
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const unsigned char* at =
        mixed + (2 * half + lane / 16) * (2 * kMixedPlane) + (row + 16 * i) * 16;
    LoadMatrices(to[i].high, at);
    LoadMatrices(to[i].low, at + kMixedPlane);
  }
}

// A step's products of a warp's 32 rows with its 16 columns of every stream. The columns of a
// stream are loaded while those of the one before are multiplied.
__device__ __forceinline__ void MultiplyUp(const unsigned char* mixed, const unsigned char* weights,
                                           float (&acc)[2][kStreams][2][4]) {
  const uint8_t* pairs = PairAt(weights, threadIdx.x / 64);
  SplitA a[2][2];
  uint32_t b[2][2][2];
  LoadMixed(mixed, 0, a[0]);
  LoadPair(pairs, 0, b[0]);
  LoadMixed(mixed, 1, a[1]);
#pragma unroll
  for (int i = 0; i < 2 * kStreams; ++i) {
    const int half = i / kStreams, s = i % kStreams;
    if (i + 1 < 2 * kStreams) {
      LoadPair(pairs + (i + 1) % kStreams * (2 * kPanelStep), (i + 1) / kStreams, b[(i + 1) % 2]);
    }
#pragma unroll
    for (int k = 0; k < 8; ++k) {
      const SplitA& rows = a[half][k / 2 % 2];
      MmaBf16(acc[k / 2 % 2][s][k % 2], k < 4 ? rows.low : rows.high, b[i % 2][k % 2][0],
              b[i % 2][k % 2][1]);
    }
  }
}

// The values of x that a thread's gates belong to; zeros where rows are dead.
__device__ __forceinline__ void MixTile(const TileParams& p, int num_live,
                                        const float (&gates)[2][kStreams][2][4]) {
  const int lane = threadIdx.x % 32;
  const int warp = threadIdx.x / 32;
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    const int tile = i / 2 % 2, side = i % 2;
    const int row = blockIdx.y * kUpRows + warp % 2 * 32 + i / 4 * 16 + side * 8 + lane / 4;
    const int column = blockIdx.x * kUpColumns + warp / 2 * 16 + tile * 8 + lane % 4 * 2;
    float2 value = make_float2(0.0f, 0.0f);
    if (row < num_live) {
      float2 own[kStreams];
#pragma unroll
      for (int s = 0; s < kStreams; ++s) {
        const float* sums = gates[i / 4][s][tile] + 2 * side;
        own[s] = make_float2(sums[0], sums[1]);
      }
      value = MixPair(p, row, column, own);
    }
    *reinterpret_cast<float2*>(p.x + row * p.width + column) = value;
  }
}

// A block has 64 rows and 64 columns of every stream; warps 2 x 4 share them, a warp with 32 rows
// and 16 columns of every stream, so that a thread has all that a value of x is mixed from. Two
// blocks share a multiprocessor: one mixes while the other multiplies.
__global__ void __launch_bounds__(kUpThreads, 2)
    HyperUpTileKernel(const __grid_constant__ TileParams p) {
  STRATA_SHARED(UpShared, shared);
  const int num_live = LiveRows(*p.live, p.num_rows);
  float gates[2][kStreams][2][4] = {};
  if (static_cast<int>(blockIdx.y) * kUpRows < num_live) {
    CopyUp(p, 0, 0, shared);
    CopyUp(p, kStep, 1, shared);
    int stage = 0;
    for (int value = 0; value < p.rank; value += kStep) {
      WaitForGroups<1>();
      __syncthreads();
      const unsigned char* mixed = shared->mixed[stage];
      const unsigned char* weights = shared->weights[stage];
      CopyUp(p, value + 2 * kStep, (stage + 2) % kStages, shared);
      stage = (stage + 1) % kStages;
      MultiplyUp(mixed, weights, gates);
    }
  }
  MixTile(p, num_live, gates);
}

}  // namespace strata::hyper
