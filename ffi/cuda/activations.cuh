// Activation rows in a block's shared memory, quantised as contract T says (numerics.md).
#pragma once

#include "cuda/launch.h"
#include "cuda/numerics.cuh"
#include "cuda/segment_dot.cuh"

namespace strata {

inline constexpr int kMostRows = 8;  // activation rows that one pass over a matrix serves

// Activation rows of a block, where the work of one row fills `blocks`. Rows share blocks so that
// weights are read once, but a block takes longer with every row. Where the card has a
// multiprocessor for each block of each row, weights are few and lie in the L2 cache, and a row has
// its own blocks.
inline int64_t RowsOfBlock(int64_t num_rows, int64_t blocks) {
  if (num_rows * blocks <= Multiprocessors()) return 1;
  return num_rows < kMostRows ? num_rows : kMostRows;
}

// Shared bytes of `rows` quantised rows of `width` values.
__host__ __device__ constexpr size_t QuantizedBytes(int64_t rows, int64_t width) {
  // Codes, then a scale for every 32, then a sum of codes for every 16.
  return static_cast<size_t>(rows * (width + width / 32 * 4 + width / 16 * 2));
}

struct QuantizedShared {
  int8_t* codes;
  float* scales;
  int16_t* sums;
};

__device__ __forceinline__ QuantizedShared QuantizedAt(unsigned char* shared, int rows, int width) {
  QuantizedShared q;
  q.codes = reinterpret_cast<int8_t*>(shared);
  q.scales = reinterpret_cast<float*>(shared + rows * width);
  q.sums = reinterpret_cast<int16_t*>(shared + rows * width + rows * (width / 32) * 4);
  return q;
}

// One block of 32 values, a value a lane; `codes` is where the block's first code goes. Every lane
// of the warp must call it. The sums of 16 codes serve types with minimums.
__device__ __forceinline__ void QuantizeBlockByWarp(float value, int lane, int8_t* codes,
                                                    float* scale, int16_t* sums) {
  const QuantizedLane q = QuantizeLane(value);
  codes[lane] = static_cast<int8_t>(q.code);
  if (lane == 0) *scale = q.scale;
  if (lane % 16 == 0) sums[lane / 16] = static_cast<int16_t>(q.half_sum);
}

// Four blocks of a row, a quad, by a warp: four values a lane. Past the row's end there are zeros.
inline constexpr int kQuad = 128;

__host__ __device__ constexpr int NumQuads(int width) { return (width + kQuad - 1) / kQuad; }

__device__ __forceinline__ float4 LoadQuad(const float* row, int width, int quad, int lane) {
  const int at = quad * kQuad + 4 * lane;
  if (at >= width) return make_float4(0.0f, 0.0f, 0.0f, 0.0f);
  return *reinterpret_cast<const float4*>(row + at);
}

// Every lane of the warp must call it.
__device__ __forceinline__ void QuantizeQuadTo(const float4& values, int row, int width, int quad,
                                               int lane, const QuantizedShared& to) {
  const QuantizedQuad q = QuantizeQuad(values);
  const int at = quad * kQuad + 4 * lane;
  if (at >= width) return;
  const int value = row * width + at;
  *reinterpret_cast<uint32_t*>(to.codes + value) = q.codes;
  if (lane % 8 == 0) to.scales[value / 32] = q.scale;
  if (lane % 4 == 0) to.sums[value / 16] = static_cast<int16_t>(q.half_sum);
}

// Quads that a warp has on their way at once.
inline constexpr int kQuadsAhead = 4;

// A warp's next quads from `begin` on of `jobs` of all rows, `quads` a row.
__device__ __forceinline__ void QuantizeQuads(const float* __restrict__ x, int64_t stride, int jobs,
                                              int begin, int quads, int width,
                                              const QuantizedShared& to) {
  const int lane = threadIdx.x % 32;
  const int warps = blockDim.x / 32;
  float4 values[kQuadsAhead];
#pragma unroll
  for (int k = 0; k < kQuadsAhead; ++k) {
    const int job = min(begin + k * warps, jobs - 1);
    const int row = job / quads;
    values[k] = LoadQuad(x + row * stride, width, job - row * quads, lane);
  }
#pragma unroll
  for (int k = 0; k < kQuadsAhead; ++k) {
    const int job = begin + k * warps;
    if (job >= jobs) break;
    const int row = job / quads;
    QuantizeQuadTo(values[k], row, width, job - row * quads, lane, to);
  }
}

// A warp's first quads of the first row, asked for before anything else of a kernel is known: with
// 16 warps all of a row of 6144 values.
inline constexpr int kFirstQuads = 3;

struct FirstQuads {
  float4 values[kFirstQuads];

  __device__ __forceinline__ FirstQuads(const float* x, int width) {
    const int warps = blockDim.x / 32;
#pragma unroll
    for (int k = 0; k < kFirstQuads; ++k) {
      values[k] = LoadQuad(x, width, threadIdx.x / 32 + k * warps, threadIdx.x % 32);
    }
  }
  // These and what is left of `rows` rows that lie `width` apart; the caller synchronises.
  __device__ __forceinline__ void Quantize(const float* x, int rows, int width,
                                           const QuantizedShared& to) const {
    const int lane = threadIdx.x % 32;
    const int warps = blockDim.x / 32;
    const int quads = NumQuads(width);
    int job = threadIdx.x / 32;
#pragma unroll
    for (int k = 0; k < kFirstQuads; ++k) {
      if (job >= quads) break;
      QuantizeQuadTo(values[k], 0, width, job, lane, to);
      job += warps;
    }
    for (; job < rows * quads; job += kQuadsAhead * warps) {
      QuantizeQuads(x, width, rows * quads, job, quads, width, to);
    }
  }
};

// Quantises `rows` rows of `width` floats (a multiple of 32), `stride` apart, by the whole block;
// ends with a barrier. Rows are 16-byte aligned.
__device__ __forceinline__ void QuantizeRows(const float* __restrict__ x, int64_t stride, int rows,
                                             int width, const QuantizedShared& to) {
  const int quads = NumQuads(width);
  const int jobs = rows * quads;
  const int warps = blockDim.x / 32;
  for (int begin = threadIdx.x / 32; begin < jobs; begin += kQuadsAhead * warps) {
    QuantizeQuads(x, stride, jobs, begin, quads, width, to);
  }
  __syncthreads();
}

}  // namespace strata
