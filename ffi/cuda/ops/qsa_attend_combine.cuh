// qsa_attend's second kernel: adds a row's slots up and applies the gate.
#pragma once

#include "cuda/ops/qsa_attend.h"
#include "cuda/ops/qsa_parts.cuh"

namespace strata::attend {

// A thread block has 64 channels of a head: 16 threads of four for each of 16 groups of slots.
constexpr int kCombineGroups = 16;
constexpr int kCombineQuads = 16;
constexpr int kCombineThreads = kCombineGroups * kCombineQuads;
constexpr int kCombineColumns = 4 * kCombineQuads;
constexpr int kGroupSlots = kAttendSlots / kCombineGroups;
constexpr int kSlotWarps = kAttendSlots / 32;

struct CombineShared {
  float4 sums[kCombineGroups][kCombineQuads];
  float weights[kAttendSlots];  // -1: the slot has no cell
  float tops[kSlotWarps];
  float totals[kSlotWarps];
};

// Fills shared.weights and returns the sum of the weights of all cells. `stat` is the maximum and
// the sum of slot threadIdx.x; no sum, no cell. All threads together.
__device__ __forceinline__ float WeighSlots(float2 stat, CombineShared& shared) {
  const int thread = threadIdx.x, warp = thread / 32;
  const bool used = stat.y != 0.0f;  // as a NaN is
  if (warp < kSlotWarps) {
    const float top = WarpMax(used ? stat.x : -INFINITY);
    if (thread % 32 == 0) shared.tops[warp] = top;
  }
  __syncthreads();
  if (warp < kSlotWarps) {
    float top = shared.tops[0];
    for (int w = 1; w < kSlotWarps; ++w) top = fmaxf(top, shared.tops[w]);
    const float weight = used ? expf(stat.x - top) : -1.0f;
    const float total = WarpSum(used ? weight * stat.y : 0.0f);
    shared.weights[thread] = weight;
    if (thread % 32 == 0) shared.totals[warp] = total;
  }
  __syncthreads();
  float total = shared.totals[0];
  for (int w = 1; w < kSlotWarps; ++w) total += shared.totals[w];
  return total;
}

// Grid: chunks of a head's channels, heads, rows. sums [rows, slots, H, C], stats [rows, slots, H].
__global__ void __launch_bounds__(kCombineThreads)
    CombineKernel(const __grid_constant__ QsaAttendArgs a, const float* sums, const float2* stats,
                  int slots, int first_row) {
  __shared__ CombineShared shared;
  const int thread = threadIdx.x, group = thread / kCombineQuads, dim = a.head_dim;
  const int t = first_row + blockIdx.z, head = blockIdx.y, first = blockIdx.x * kCombineColumns;
  const bool writes = thread < kCombineColumns && first + thread < dim;
  float* out = a.out + (static_cast<int64_t>(t) * a.num_heads + head) * dim + first + thread;
  if (t >= *a.live) {
    if (writes) *out = 0.0f;
    return;
  }
  // All loads start before any is waited for; what an unused slot holds is dropped.
  const int64_t row_slots = static_cast<int64_t>(blockIdx.z) * slots;
  const int channel = first + thread % kCombineQuads * 4;
  float2 stat = make_float2(0.0f, 0.0f);
  if (thread < slots) stat = stats[(row_slots + thread) * a.num_heads + head];
  float4 part[kGroupSlots];
#pragma unroll
  for (int n = 0; n < kGroupSlots; ++n) {
    const int slot = group + n * kCombineGroups;
    part[n] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    if (slot < slots && channel < dim) {
      part[n] = *reinterpret_cast<const float4*>(
          sums + ((row_slots + slot) * a.num_heads + head) * dim + channel);
    }
  }
  const float gate = writes ? a.proj[t * a.proj_stride + (2 * head + 1) * dim + first + thread] : 0;
  const float total = WeighSlots(stat, shared);
  float4 sum = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
#pragma unroll
  for (int n = 0; n < kGroupSlots; ++n) {
    const float weight = shared.weights[group + n * kCombineGroups];
    if (weight == -1.0f) continue;
    sum.x = __fmaf_rn(weight, part[n].x, sum.x);
    sum.y = __fmaf_rn(weight, part[n].y, sum.y);
    sum.z = __fmaf_rn(weight, part[n].z, sum.z);
    sum.w = __fmaf_rn(weight, part[n].w, sum.w);
  }
  shared.sums[group][thread % kCombineQuads] = sum;
  __syncthreads();
  if (!writes) return;
  float all = 0.0f;
  for (int g = 0; g < kCombineGroups; ++g) all += (&shared.sums[g][0].x)[thread];
  *out = all * (1.0f / total) * Sigmoid(gate);
}

}  // namespace strata::attend
