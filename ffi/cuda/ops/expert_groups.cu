#include "cuda/expert_word.h"
#include "cuda/numerics.cuh"
#include "cuda/ops/expert_groups.h"
#include "cuda/reduce.cuh"

namespace strata::expert_tiles {
namespace {

constexpr int kGroupThreads = 256;

// What lies on a peer that does not compute, the primary's kernels read like their own.
__device__ __forceinline__ void CountEntries(const TileCounts& to, int expert, uint32_t count) {
  atomicAdd(to.usage + expert, count);
  if (to.homes == nullptr) return;
  const uint64_t word = to.experts[expert];
  int home = (word & kLinked) != 0 ? kTilesOverLink : kOnPrimary;
  if ((word & kFromFile) != 0) home = kOfFile;
  const bool is_peers = (word & kTagMask) == static_cast<uint64_t>(ExpertTag::kPeer);
  if (to.peer_computes && is_peers) home = kOnPeer;
  atomicAdd(to.homes + home, count);
}

// A block lists the entries of one expert. Its warps take runs of entries one after the other, and
// count first, so each knows where its own begin.
__global__ void __launch_bounds__(kGroupThreads)
    ListKernel(const int32_t* ids, const int32_t* live, int num_rows, int num_active, Groups to,
               TileCounts counts) {
  constexpr int kWarps = kGroupThreads / 32;
  __shared__ int less[kWarps], equal[kWarps];
  const int expert = blockIdx.x;
  const int lane = threadIdx.x % 32;
  const int warp = threadIdx.x / 32;
  const int entries = LiveRows(*live, num_rows) * num_active;
  const int run = ((entries + kGroupThreads - 1) / kGroupThreads) * 32;
  const int begin = min(warp * run, entries);
  const int end = min(begin + run, entries);
  int below = 0, own = 0;
  for (int i = begin + lane; i < end; i += 32) {
    const int id = ids[i];
    below += id < expert;
    own += id == expert;
  }
  below = __reduce_add_sync(kAllLanes, below);
  own = __reduce_add_sync(kAllLanes, own);
  if (lane == 0) less[warp] = below, equal[warp] = own;
  __syncthreads();
  int start = 0, at = 0, count = 0;
  for (int w = 0; w < kWarps; ++w) {
    start += less[w];
    if (w < warp) at += equal[w];
    count += equal[w];
  }
  at += start;
  for (int i = begin; i < end; i += 32) {
    const bool mine = i + lane < end && ids[i + lane] == expert;
    const unsigned all = __ballot_sync(kAllLanes, mine);
    if (mine) to.order[at + __popc(all & ((1u << lane) - 1))] = i + lane;
    at += __popc(all);
  }
  if (threadIdx.x == 0) {
    to.starts[expert] = start;
    to.counts[expert] = count;
    if (count > 0) CountEntries(counts, expert, static_cast<uint32_t>(count));
  }
}

// One warp: cuts the experts' lists into tiles, an expert's of one size but for the last.
__global__ void TileKernel(int num_experts, Groups to) {
  const int lane = threadIdx.x;
  int base = 0;
  for (int first = 0; first < num_experts; first += 32) {
    const int expert = first + lane;
    const int count = expert < num_experts ? to.counts[expert] : 0;
    const int own = (count + to.tile_rows - 1) / to.tile_rows;
    const int rows = own == 0 ? 0 : (count + own * 16 - 1) / (own * 16) * 16;
    int through = own;
    for (int step = 1; step < 32; step *= 2) {
      const int before = __shfl_up_sync(kAllLanes, through, step);
      if (lane >= step) through += before;
    }
    if (expert < num_experts) to.first_tiles[expert] = base + through - own;
    for (int i = 0; i < own; ++i) {
      to.tiles[base + through - own + i] = {expert, to.starts[expert] + i * rows,
                                            min(rows, count - i * rows)};
    }
    base += __shfl_sync(kAllLanes, through, 31);
  }
  if (lane == 0) to.first_tiles[num_experts] = base;
}

}  // namespace

std::string GroupEntries(const int32_t* ids, const int32_t* live, int64_t num_rows,
                         int64_t num_active, int64_t num_experts, const Groups& to,
                         const TileCounts& counts, cudaStream_t stream) {
  Shape shape;
  shape.grid = dim3(static_cast<unsigned>(num_experts));
  shape.block = dim3(kGroupThreads);
  shape.stream = stream;
  const std::string error = Launch(ListKernel, shape, ids, live, static_cast<int>(num_rows),
                                   static_cast<int>(num_active), to, counts);
  if (!error.empty()) return error;
  shape.grid = dim3(1);
  shape.block = dim3(32);
  return Launch(TileKernel, shape, static_cast<int>(num_experts), to);
}

}  // namespace strata::expert_tiles
