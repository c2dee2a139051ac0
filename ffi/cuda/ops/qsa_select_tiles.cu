#include <algorithm>

#include "cuda/ops/qsa_halves.cuh"
#include "cuda/ops/qsa_parts.cuh"
#include "cuda/ops/qsa_select_parts.cuh"
#include "cuda/ops/qsa_select_tiles.h"
#include "cuda/tile_rows.h"

namespace strata {
namespace score_tiles {
namespace {

constexpr int kHeads = 4;
constexpr int kThreads = 256;
constexpr int kWarpRows = 8;  // two fragments of 16: four rows of four heads each
constexpr int kRows = kThreads / 32 * kWarpRows;
constexpr int kBlocks = 64;
constexpr int kPairStride =
    kBlocks + 4;  // words: eight lanes' columns of four pairs, no bank twice
constexpr int kMostDim = 128;

// high, then low [dim / 2][kPairStride] <- pairs of channels of the keys of blocks first_block...
__device__ __forceinline__ void StageKeys(const QsaSelectArgs& a, int first_block, uint32_t* high) {
  uint32_t* low = high + a.index_dim / 2 * kPairStride;
  for (int i = threadIdx.x; i < a.index_dim / 2 * (kBlocks / 4); i += kThreads) {
    const int pair = i / (kBlocks / 4), column = i % (kBlocks / 4) * 4;
    const int group = (first_block + column) / kIndexGroup;
    float4 x = make_float4(0.0f, 0.0f, 0.0f, 0.0f), y = x;
    if (group < a.num_groups) {
      const float* from = a.index_keys +
                          (static_cast<int64_t>(group) * a.index_dim + 2 * pair) * kIndexGroup +
                          column % kIndexGroup;
      x = __ldg(reinterpret_cast<const float4*>(from));
      y = __ldg(reinterpret_cast<const float4*>(from + kIndexGroup));
    }
    const SplitPair s[4] = {Split(x.x, y.x), Split(x.y, y.y), Split(x.z, y.z), Split(x.w, y.w)};
    const int at = pair * kPairStride + column;
    *reinterpret_cast<uint4*>(high + at) = make_uint4(s[0].high, s[1].high, s[2].high, s[3].high);
    *reinterpret_cast<uint4*>(low + at) = make_uint4(s[0].low, s[1].low, s[2].low, s[3].low);
  }
}

// Row 4 r + h of a fragment is head h of the warp's row r; a lane's step takes four channels.
struct QueryStep {
  uint32_t high[4], low[4];

  __device__ __forceinline__ void Load(const float* q, int rows, int dim, int step) {
    const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = g / kHeads + 2 * half;
      const float4 x = row < rows ? __ldg(reinterpret_cast<const float4*>(
                                        q + (row * kHeads + g % kHeads) * dim + 16 * step + 4 * t))
                                  : make_float4(0.0f, 0.0f, 0.0f, 0.0f);
      const SplitPair first = Split(x.x, x.y), second = Split(x.z, x.w);
      high[half] = first.high, low[half] = first.low;
      high[half + 2] = second.high, low[half + 2] = second.low;
    }
  }
};

// x[32 m + 4 n + i] += element i of fragment m's product with columns 8 n...
__device__ __forceinline__ void Multiply(const QsaSelectArgs& a, const float* q, int rows,
                                         const uint32_t* keys, float (&x)[64]) {
  const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
  const uint32_t* low_keys = keys + a.index_dim / 2 * kPairStride;
#pragma unroll 1
  for (int step = 0; step < a.index_dim / 16; ++step) {
    QueryStep query[2];
    query[0].Load(q, rows, a.index_dim, step);
    query[1].Load(q + 4 * kHeads * a.index_dim, rows - 4, a.index_dim, step);
#pragma unroll
    for (int n = 0; n < 8; ++n) {
      const int at = (8 * step + 2 * t) * kPairStride + 8 * n + g;
      const uint32_t b0 = keys[at], b1 = keys[at + kPairStride];
      const uint32_t low0 = low_keys[at], low1 = low_keys[at + kPairStride];
#pragma unroll
      for (int m = 0; m < 2; ++m) {
        float (&sum)[4] = *reinterpret_cast<float (*)[4]>(&x[32 * m + 4 * n]);
        MmaF16(sum, query[m].low, b0, b1);
        MmaF16(sum, query[m].high, low0, low1);
        MmaF16(sum, query[m].high, b0, b1);
      }
    }
  }
}

// Grid: kBlocks blocks each, kRows rows each.
__global__ void __launch_bounds__(kThreads, 2)
    ScoreTilesKernel(const __grid_constant__ QsaSelectArgs a, int first_row, int num_rows) {
  STRATA_SHARED(uint32_t, keys);
  const int lane = threadIdx.x % 32;
  const int first_block = blockIdx.x * kBlocks, begin = blockIdx.y * kRows;
  const int live = LiveRows(*a.live, a.num_rows), pos = *a.pos;
  const int end = min(min(begin + kRows, num_rows), live - first_row);
  const int last = CompleteBlocks(a, pos, first_row + end - 1);
  if ((end <= begin) | (last <= a.num_blocks) | (first_block >= last)) return;
  StageKeys(a, first_block, keys);
  __syncthreads();
  const int row = begin + static_cast<int>(threadIdx.x) / 32 * kWarpRows;
  if (row >= end) return;
  float x[64] = {};
  const int64_t t = first_row + row;
  Multiply(a, a.index_q + t * kHeads * a.index_dim, end - row, keys, x);
#pragma unroll
  for (int i = 0; i < 64; ++i) x[i] = x[i] > 0.0f ? x[i] : 0.0f;  // a NaN counts as nothing
  // Over the heads, which are the lanes' bits 2 and 3; a lane is left with a fragment's half.
  Halve<32>(x, lane, 8);
  Halve<16>(x, lane, 4);
  const int capacity = a.num_groups * kIndexGroup;
  const int column = first_block + lane / 4 % 2 * 32 + lane % 4 * 2;
#pragma unroll
  for (int n = 0; n < 4; ++n) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int of = row + lane / 8 % 2 * 4 + lane / 16 + 2 * half;
      if (of >= end || column + 8 * n >= capacity) continue;
      *reinterpret_cast<uint2*>(a.scores + static_cast<int64_t>(of) * capacity + column + 8 * n) =
          make_uint2(__float_as_uint(x[4 * n + 2 * half] + 0.0f),
                     __float_as_uint(x[4 * n + 2 * half + 1] + 0.0f));
    }
  }
}

}  // namespace
}  // namespace score_tiles

bool ScoreTilesApply(const QsaSelectArgs& args) {
  return args.num_rows > kMostWindowRows && args.index_heads == score_tiles::kHeads &&
         args.index_dim % 16 == 0 && args.index_dim <= score_tiles::kMostDim;
}

std::string ScoreTiles(const QsaSelectArgs& args, int first, int rows, cudaStream_t stream) {
  using score_tiles::kBlocks;
  using score_tiles::kRows;
  const int capacity = args.num_groups * kIndexGroup;
  Shape shape;
  shape.grid = dim3(static_cast<unsigned>((capacity + kBlocks - 1) / kBlocks),
                    static_cast<unsigned>((rows + kRows - 1) / kRows));
  shape.block = dim3(score_tiles::kThreads);
  shape.shared_bytes = sizeof(uint32_t) * args.index_dim * score_tiles::kPairStride;
  shape.stream = stream;
  return Launch(score_tiles::ScoreTilesKernel, shape, args, first, rows);
}

}  // namespace strata
