#include <algorithm>

#include "cuda/expert_word.h"
#include "cuda/ops/expert_gate.h"
#include "cuda/ops/expert_groups.h"
#include "cuda/reduce.cuh"
#include "cuda/system_scope.cuh"

namespace strata::expert_tiles {
namespace {

constexpr int kGateThreads = 256;
constexpr int kShorter = 64;

struct GateParams {
  GateArgs a;
  GroupRange range;
  int32_t group;
};

__device__ __forceinline__ bool IsPass(const GateArgs& a) {
  return a.ring.state != nullptr && LiveRows(*a.live, a.num_rows) >= a.ring.min_rows;
}

// Whether entries up to `need` have arrived; false when nothing has for too long. One thread.
__device__ inline bool Await(const RingAt& ring, uint64_t need) {
  uint64_t seen = LoadAcquireSystem(&ring.state->arrived);
  uint64_t since = NowNs();
  uint64_t patience = static_cast<uint64_t>(ring.patience_ms) * 1000000u;
  // Who has waited in vain waits as long again when there was a sign of life since.
  if (ring.state->late > 0 && ring.state->given_up == seen) patience /= kShorter;
  while (seen < need) {
    __nanosleep(500);
    const uint64_t now_seen = LoadAcquireSystem(&ring.state->arrived);
    const uint64_t now = NowNs();
    if (now_seen != seen) {
      seen = now_seen;
      since = now;
    } else if (now - since > patience) {
      ring.state->given_up = seen;
      return false;
    }
  }
  return true;
}

__global__ void __launch_bounds__(kGateThreads) GateKernel(const __grid_constant__ GateParams p) {
  __shared__ int arrived;
  const GateArgs& a = p.a;
  const RingAt& ring = a.ring;
  const bool is_pass = IsPass(a);
  if (threadIdx.x == 0) {
    arrived = is_pass;
    if (is_pass) {
      const uint32_t first = ring.bounds[p.group], end = ring.bounds[p.group + 1];
      const uint64_t base = ring.state->base;
      if (p.group > 0) StoreReleaseSystem(ring.freed, base + first);
      if (end > first && !Await(ring, base + end)) {
        ring.state->late += end - first;
        arrived = 0;
      }
    }
  }
  __syncthreads();
  for (int e = p.range.first + threadIdx.x; e < p.range.end; e += kGateThreads) {
    const uint64_t word = a.words[e];
    uint64_t address = word & ~kTagBits;
    const bool is_linked = (word & kLinked) != 0;
    const bool in_ring = arrived != 0 && ring.places[e] != kNotListed;
    if (in_ring) {
      const uint64_t n = ring.state->base + ring.places[e];
      address = reinterpret_cast<uint64_t>(ring.slots) + n % ring.num_slots * ring.slot_bytes;
    }
    a.addresses[e] = address;
    const auto entries = static_cast<uint32_t>(a.counts[e]);
    if (is_linked && !in_ring && entries > 0 && a.homes != nullptr) {
      atomicAdd(a.homes + kReadByTiles, (entries + kTileRows - 1) / kTileRows);
    }
  }
}

__global__ void LeaveKernel(const __grid_constant__ GateArgs a) {
  if (!IsPass(a)) return;
  const uint64_t end = a.ring.state->base + a.ring.bounds[a.ring.groups];
  StoreReleaseSystem(a.ring.freed, end);
  if (a.ring.is_last) a.ring.state->base = end;
}

}  // namespace

GroupRange RangeOf(int64_t num_experts, int64_t groups, int64_t group) {
  const int64_t each = (num_experts + groups - 1) / groups;
  const int64_t first = std::min(group * each, num_experts);
  return {static_cast<int32_t>(first), static_cast<int32_t>(std::min(first + each, num_experts))};
}

std::string AwaitGroup(const GateArgs& args, int64_t group, cudaStream_t stream) {
  Shape shape;
  shape.grid = dim3(1);
  shape.block = dim3(kGateThreads);
  shape.stream = stream;
  const GroupRange range = RangeOf(args.num_experts, args.ring.groups, group);
  return Launch(GateKernel, shape, GateParams{args, range, static_cast<int32_t>(group)});
}

std::string LeaveRing(const GateArgs& args, cudaStream_t stream) {
  Shape shape;
  shape.grid = dim3(1);
  shape.block = dim3(1);
  shape.stream = stream;
  return Launch(LeaveKernel, shape, args);
}

}  // namespace strata::expert_tiles
