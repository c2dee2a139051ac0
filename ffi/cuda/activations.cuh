// Activation rows in a block's shared memory, quantised as contract T says (numerics.md).
#pragma once

#include "cuda/launch.h"
#include "cuda/segment_dot.cuh"

namespace strata {

inline constexpr int kMostRows = 8;  // activation rows that one pass over a matrix serves

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

// One block of 32 values, a value a lane; `at` is where the block's first code goes. Every lane of
// the warp must call it. The sums of 16 codes serve types with minimums.
__device__ __forceinline__ void QuantizeBlockByWarp(float value, int lane, int8_t* codes,
                                                    float* scale, int16_t* sums) {
  const float magnitude = fabsf(value);
  const bool finite = __all_sync(0xffffffffu, magnitude <= 0x1.fffffep127f);
  float largest = magnitude;
  for (int step = 16; step > 0; step /= 2) {
    largest = fmaxf(largest, __shfl_xor_sync(0xffffffffu, largest, step));
  }
  int code = 0;
  float result = 0.0f;
  if (!finite) {
    result = __uint_as_float(0x7fc00000u);
  } else if (largest >= 0x1p-100f) {
    code = __float2int_rn(__fmul_rn(value, __fdiv_rn(127.0f, largest)));
    result = __fmul_rn(largest, 0x1.020408p-7f);
  }
  int sum = code;
  for (int step = 8; step > 0; step /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, step);
  codes[lane] = static_cast<int8_t>(code);
  if (lane == 0) *scale = result;
  if (lane % 16 == 0) sums[lane / 16] = static_cast<int16_t>(sum);
}

// Quantises `rows` rows of `width` floats (a multiple of 32), `stride` apart, by the whole block;
// ends with a barrier.
__device__ __forceinline__ void QuantizeRows(const float* __restrict__ x, int64_t stride, int rows,
                                             int width, const QuantizedShared& to) {
  const int lane = threadIdx.x % 32;
  const int blocks = width / 32;
  const int warps = blockDim.x / 32;
  for (int job = threadIdx.x / 32; job < rows * blocks; job += warps) {
    const int row = job / blocks;
    const int block = job - row * blocks;
    QuantizeBlockByWarp(x[row * stride + block * 32 + lane], lane,
                        to.codes + row * width + block * 32, to.scales + row * blocks + block,
                        to.sums + (row * blocks + block) * 2);
  }
  __syncthreads();
}

}  // namespace strata
