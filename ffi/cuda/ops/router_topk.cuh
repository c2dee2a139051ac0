// The experts of one row by one warp; a kernel that has a row's logits can end with it.
//
// A key is a logit's order above the complement of its id, so keys are distinct, and the largest is
// the best expert. Each lane's largest key is found first. The A-th largest of these is a bound
// that at least A keys reach, and only keys of A lanes do: in a row of 512 about a dozen. What
// reaches it is gathered, and an expert's place is the number of larger keys.
#pragma once

#include "cuda/launch.h"
#include "cuda/numerics.cuh"

namespace strata {

using ExpertKey = unsigned long long;

// Shared memory for a row, in parts that are 16-byte aligned if `bytes` is.
struct RouterScratch {
  ExpertKey* lane_best;  // [32]
  ExpertKey* gathered;   // [E + 2]
  ExpertKey* chosen;     // [A]
  uint32_t* ordered;     // [E]
  float* exponentials;   // [A]

  __device__ RouterScratch(unsigned char* bytes, int num_experts, int num_active)
      : lane_best(reinterpret_cast<ExpertKey*>(bytes)),
        gathered(lane_best + 32),
        chosen(gathered + num_experts + 2),
        ordered(reinterpret_cast<uint32_t*>(chosen + num_active)),
        exponentials(reinterpret_cast<float*>(ordered + num_experts)) {}

  __host__ __device__ static constexpr size_t Bytes(int64_t num_experts, int64_t num_active) {
    return static_cast<size_t>((34 + num_experts + num_active) * 8 +
                               (num_experts + num_active) * 4 + 15) /
           16 * 16;
  }
};

// A float's bits in the order of its value, as in ops/router_topk.cc: both zeros alike, any NaN
// first.
__device__ __forceinline__ uint32_t OrderedBits(float value) {
  if (value != value) return 0xffffffffu;
  const uint32_t bits = __float_as_uint(__fadd_rn(value, 0.0f));
  return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}

// The value again; NaN where it was one.
__device__ __forceinline__ float OrderedValue(uint32_t ordered) {
  return __uint_as_float(ordered & 0x80000000u ? ordered & 0x7fffffffu : ~ordered);
}

__device__ __forceinline__ ExpertKey KeyOf(uint32_t ordered, int expert) {
  return static_cast<ExpertKey>(ordered) << 32 | ~static_cast<uint32_t>(expert);
}

// How many of `keys` [count, an even number] are larger. Every lane reads the same words.
__device__ __forceinline__ int CountLarger(const ExpertKey* keys, int count, ExpertKey key) {
  int larger = 0;
#pragma unroll 8
  for (int i = 0; i < count; i += 2) {
    const ulonglong2 two = *reinterpret_cast<const ulonglong2*>(keys + i);
    larger += static_cast<int>(two.x > key) + static_cast<int>(two.y > key);
  }
  return larger;
}

// The lane's best key; leaves every logit's order in `scratch`. Like SelectOrdered, to be called by
// all lanes of one warp.
__device__ __forceinline__ ExpertKey OrderLogits(const float* logits, int num_experts, int lane,
                                                 const RouterScratch& scratch) {
  constexpr int kAtOnce = 16;  // loads under way
  uint32_t best = 0;
  int best_expert = -1;  // its key is 0: a lane without experts
  for (int first = lane; first < num_experts; first += 32 * kAtOnce) {
    float values[kAtOnce];
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      values[i] = first + 32 * i < num_experts ? logits[first + 32 * i] : 0.0f;
    }
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      const int expert = first + 32 * i;
      if (expert >= num_experts) break;
      const uint32_t ordered = OrderedBits(values[i]);
      scratch.ordered[expert] = ordered;
      if (best_expert < 0 || ordered > best) {  // the lower of equals stays
        best = ordered;
        best_expert = expert;
      }
    }
  }
  return KeyOf(best, best_expert);
}

// Gathers the keys that reach `bound`; returns how many.
__device__ __forceinline__ int GatherKeys(ExpertKey bound, int num_experts, int lane,
                                          const RouterScratch& scratch) {
  int count = 0;
#pragma unroll 4
  for (int first = 0; first < num_experts; first += 32) {
    const int expert = first + lane;
    const ExpertKey key = expert < num_experts ? KeyOf(scratch.ordered[expert], expert) : 0;
    const bool reaches = expert < num_experts && key >= bound;
    const unsigned lanes = __ballot_sync(kAllLanes, reaches);
    if (reaches) scratch.gathered[count + __popc(lanes & ((1u << lane) - 1))] = key;
    count += __popc(lanes);
  }
  if (lane == 0) scratch.gathered[count] = 0;  // an even number is counted
  return count;
}

// Experts and weights of a row whose logits were ordered; `best` is what OrderLogits returned. The
// sum has the order of ops/router_topk.cc, and every operation is the same, so the bits are the
// CPU's.
__device__ __forceinline__ void SelectOrdered(ExpertKey best, int num_experts, int num_active,
                                              int lane, const RouterScratch& scratch, int32_t* ids,
                                              float* weights) {
  scratch.lane_best[lane] = best;
  __syncwarp();
  ExpertKey bound = 0;
  if (num_active <= 32) {
    const bool is_bound = CountLarger(scratch.lane_best, 32, best) == num_active - 1;
    bound = __shfl_sync(kAllLanes, best, __ffs(__ballot_sync(kAllLanes, is_bound)) - 1);
  }
  const int count = GatherKeys(bound, num_experts, lane, scratch);
  __syncwarp();
  for (int i = lane; i < count; i += 32) {
    const ExpertKey key = scratch.gathered[i];
    const int place = CountLarger(scratch.gathered, count + count % 2, key);
    if (place < num_active) scratch.chosen[place] = key;
  }
  __syncwarp();
  const float top = OrderedValue(static_cast<uint32_t>(scratch.chosen[0] >> 32));
  for (int a = lane; a < num_active; a += 32) {
    const ExpertKey key = scratch.chosen[a];
    const float below = __fsub_rn(OrderedValue(static_cast<uint32_t>(key >> 32)), top);
    ids[a] = static_cast<int32_t>(~static_cast<uint32_t>(key));
    scratch.exponentials[a] = below == below ? ExpBounded(below > -87.0f ? below : -87.0f) : below;
  }
  __syncwarp();
  float sum = 0.0f;
#pragma unroll 4
  for (int a = 0; a < num_active; ++a) sum = __fadd_rn(sum, scratch.exponentials[a]);
  for (int a = lane; a < num_active; a += 32) {
    weights[a] = __fdiv_rn(scratch.exponentials[a], sum);
  }
}

__device__ __forceinline__ void SelectExperts(const float* logits, int num_experts, int num_active,
                                              const RouterScratch& scratch, int32_t* ids,
                                              float* weights) {
  const int lane = threadIdx.x % 32;
  const ExpertKey best = OrderLogits(logits, num_experts, lane, scratch);
  SelectOrdered(best, num_experts, num_active, lane, scratch, ids, weights);
}

}  // namespace strata
