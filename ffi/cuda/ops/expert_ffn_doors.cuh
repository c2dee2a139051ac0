// Entries of expert_ffn that this device does not compute: which they are, and where their rows
// come from. Kernels that are built without doors know of none of this.
#pragma once

#include "cuda/ops/expert_ffn_parts.cuh"
#include "cuda/peer_bell.cuh"

namespace strata {

__device__ __forceinline__ uint64_t FromLane(uint64_t word, int lane) {
  return static_cast<uint64_t>(__shfl_sync(kAllLanes, static_cast<long long>(word), lane));
}

// The layer begins: said by one thread of the first kernel, the primary's and the peer's.
__device__ __forceinline__ void BeginLayer(const FfnParams& p) {
  if (p.bell.tellers == 0 || threadIdx.x != 0 || blockIdx.x != 0) return;
  p.rows == nullptr ? AskPeer(p.bell) : BeginPeerTurn(p.bell);
}

// Thread `first` of `count`: takes the wishes for a layer that no kernel reads meanwhile.
__device__ __forceinline__ void TakeWords(const Latch& latch, int first, int count) {
  if (latch.wanted == nullptr) return;
  for (int i = first; i < latch.count; i += count) {
    latch.words[i] = *static_cast<const volatile uint64_t*>(latch.wanted + i);
  }
}

// What becomes of a row's routed entries; bit e of a mask is entry e.
struct RowHomes {
  uint64_t word;  // of the entry with the lane's number
  unsigned away;  // computed elsewhere
  unsigned host;  // of these, by the host

  __device__ __forceinline__ bool Away(int e) const { return away >> e & 1u; }
};

// Every lane of the warp must call it; `id` is the expert of the entry with the lane's number. All
// that call it for a row in one launch get the same, and so does the launch after it: words change
// in between two uses of a layer only (device_store.h).
__device__ __forceinline__ RowHomes HomesOf(const FfnParams& p, int id, int lane) {
  RowHomes homes = {};
  const bool mine = lane < p.num_active;
  if (mine) homes.word = p.experts[id];
  const auto tag = static_cast<ExpertTag>(homes.word & kTagMask);
  if (p.rows != nullptr) {  // these are the peer's kernels
    homes.away = __ballot_sync(kAllLanes, mine && tag != ExpertTag::kPeer);
    return homes;
  }
  homes.host = __ballot_sync(kAllLanes, mine && tag == ExpertTag::kHost);
  // The last misses in the router's order are read over the link, in windows without those whose
  // panels are nowhere.
  unsigned linked = homes.host;
  if (p.mailbox.box != nullptr) {
    linked &= ~__ballot_sync(kAllLanes, mine && (homes.word & kFromFile) != 0);
  }
  for (int left = p.streamed[__popc(homes.host)]; left > 0 && linked != 0; --left) {
    const unsigned last = 0x80000000u >> __clz(static_cast<int>(linked));
    homes.host &= ~last;
    linked &= ~last;
  }
  homes.away = homes.host | __ballot_sync(kAllLanes, mine && tag == ExpertTag::kPeer);
  return homes;
}

// Raises the use of an entry's expert, and of its home. By one thread for each entry.
__device__ __forceinline__ void CountEntry(const FfnParams& p, const RowHomes& homes, int e,
                                           int expert, uint64_t word) {
  if (p.usage == nullptr) return;
  atomicAdd(p.usage + expert, 1u);
  int home = (word & kLinked) != 0 ? kOverLink : kOnPrimary;
  if (homes.Away(e)) home = homes.host >> e & 1u ? kOnHost : kOnPeer;
  if ((word & kFromFile) != 0) home = kOfFile;
  atomicAdd(p.homes + home, 1u);
}

// One value of an away entry's row; `host_rows` is where the host's answer lies.
__device__ __forceinline__ float RemoteValue(const FfnParams& p, const RowHomes& homes, int row,
                                             int e, int column, const float* host_rows) {
  const int64_t entry = static_cast<int64_t>(row) * p.num_active + e;
  const bool by_host = homes.host >> e & 1u;
  const float* value = (by_host ? host_rows : p.peer_rows) + entry * p.width + column;
  // Never through a cache that another device or the host cannot reach: the rows were written while
  // this step ran.
  return *static_cast<const volatile float*>(value);
}

}  // namespace strata
