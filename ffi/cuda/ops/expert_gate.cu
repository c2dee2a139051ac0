#include <algorithm>

#include "cuda/bell.cuh"
#include "cuda/expert_word.h"
#include "cuda/ops/expert_gate.h"
#include "cuda/reduce.cuh"
#include "cuda/system_scope.cuh"

namespace strata::expert_tiles {
namespace {

constexpr int kGateThreads = 256;
constexpr int kShorter = 64;
constexpr int kLooks = 64;  // between two at the stager's beat: each is a way over the link

struct GateParams {
  GateArgs a;
  GroupRange range;
  int32_t group;
};

__device__ __forceinline__ bool IsPass(const GateArgs& a) {
  return a.ring.state != nullptr && LiveRows(*a.live, a.num_rows) >= a.ring.min_rows;
}

// Whether the kernels behind the gate compute expert `e`. Both devices find the same: the table of
// the one and the list of the other's ring are written together, between passes.
__device__ __forceinline__ bool IsMine(const GateArgs& a, bool is_pass, int e, uint64_t word) {
  if (a.part == GatePart::kAll) return true;
  const bool is_peers = (word & kTagMask) == static_cast<uint64_t>(ExpertTag::kPeer);
  if (a.part == GatePart::kPeers) {
    return is_peers || (is_pass && a.ring.places[e] != kNotListed);
  }
  if (is_peers || a.taken == nullptr) return !is_peers;
  return a.taken[e] == 0 || LiveRows(*a.live, a.num_rows) < a.taken_min_rows;
}

// Whether entries up to `need` have arrived; false when nothing has for too long, and none was
// being made. One thread.
__device__ inline bool Await(const RingAt& ring, uint64_t need) {
  uint64_t seen = LoadAcquireSystem(&ring.state->arrived);
  uint64_t since = NowNs(), beat = 0;
  uint64_t patience = static_cast<uint64_t>(ring.patience_ms) * 1000000u;
  // Who has waited in vain waits as long again when there was a sign of life since.
  if (ring.state->late > 0 && ring.state->given_up == seen) patience /= kShorter;
  for (int look = 1; seen < need; ++look) {
    __nanosleep(500);
    const uint64_t now_seen = LoadAcquireSystem(&ring.state->arrived);
    const uint64_t now = NowNs();
    if (ring.has_stager && look % kLooks == 0) {
      const uint64_t now_beat = LoadAcquireSystem(&ring.words->beat);
      if (now_beat != beat) since = now;
      beat = now_beat;
    }
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

// Of a ring that has failed: a layer's experts of the file are made as they are for few rows. One
// thread.
__device__ inline void AskForFiles(const StageAt& stage) {
  if (stage.box == nullptr || stage.state->failed != 0) return;
  StoreReleaseSystem(&stage.box->wanted, stage.state->epoch);
  AwaitAnswer(stage.box, stage.state);
}

__global__ void __launch_bounds__(kGateThreads) TellKernel(const __grid_constant__ GateArgs a) {
  if (!IsPass(a)) return;
  RingWords* words = a.ring.words;
  for (int at = threadIdx.x * 32; at < a.num_experts; at += kGateThreads * 32) {
    uint32_t mask = 0;
    for (int e = at; e < min(at + 32, a.num_experts); ++e) {
      mask |= static_cast<uint32_t>(a.counts[e] > 0) << (e - at);
    }
    StoreReleaseSystem(words->masks + a.ring.first_mask + at / 32, mask);
  }
  __syncthreads();
  if (threadIdx.x == 0) {
    StoreReleaseSystem(&words->told, a.ring.state->base + a.ring.bounds[a.ring.groups]);
  }
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
      if (p.group > 0) StoreReleaseSystem(&ring.words->freed, base + first);
      if (end > first && !Await(ring, base + end)) {
        ring.state->late += end - first;
        arrived = 0;
        AskForFiles(a.stage);
      }
    }
  }
  __syncthreads();
  for (int e = p.range.first + threadIdx.x; e < p.range.end; e += kGateThreads) {
    const uint64_t word = a.words[e];
    if (!IsMine(a, is_pass, e, word)) {
      a.addresses[e] = 0;
      continue;
    }
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
      const auto at_once = static_cast<uint32_t>(a.tile_rows);
      atomicAdd(a.homes + kReadByTiles, (entries + at_once - 1) / at_once);
    }
    const bool is_peers = (word & kTagMask) == static_cast<uint64_t>(ExpertTag::kPeer);
    if (ring.is_far && is_peers && !in_ring) {
      a.addresses[e] = 0;
      if (entries > 0) StoreReleaseSystem(&ring.words->missed, uint64_t{1});
    }
  }
}

__global__ void LeaveKernel(const __grid_constant__ GateArgs a) {
  if (!IsPass(a)) return;
  const uint64_t end = a.ring.state->base + a.ring.bounds[a.ring.groups];
  StoreReleaseSystem(&a.ring.words->freed, end);
  if (a.ring.is_last) a.ring.state->base = end;
}

}  // namespace

GroupRange RangeOf(int64_t num_experts, int64_t groups, int64_t group) {
  const int64_t each = (num_experts + groups - 1) / groups;
  const int64_t first = std::min(group * each, num_experts);
  return {static_cast<int32_t>(first), static_cast<int32_t>(std::min(first + each, num_experts))};
}

std::string TellRouting(const GateArgs& args, cudaStream_t stream) {
  Shape shape;
  shape.grid = dim3(1);
  shape.block = dim3(kGateThreads);
  shape.stream = stream;
  return Launch(TellKernel, shape, args);
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
