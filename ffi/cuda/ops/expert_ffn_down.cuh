// The second of the kernels that expert_ffn_gate_up.cuh begins: the products with down, and the sum
// of a row's entries.
//
// An item is 32 columns of a row. A block has consecutive ones, so that they are of one row or two,
// whose hidden values it copies first; its warps share the segments of all entries of all its
// items, the longest first, and go through their slots (expert_ffn_slots.cuh).
#pragma once

#include <type_traits>

#include "cuda/ops/expert_ffn_gate_up.cuh"
#include "cuda/ops/expert_ffn_slots.cuh"

namespace strata {

inline constexpr int kDownWarps = 20;  // more would leave too few registers

// Sums of a panel of a row's down matrices: those of whole segments of all entries, then of the
// halves.
struct DownJobs {
  int whole_each;  // whole segments of an entry
  int entries, whole, count;

  __device__ __forceinline__ explicit DownJobs(const FfnParams& p)
      : whole_each(p.by_whole.divisor),
        entries(p.num_active + 1),
        whole(entries * whole_each),
        count(whole + (p.hidden_width % 256 != 0 ? entries : 0)) {}
};

// Adds a panel's entries in the router's order; lane e holds the weight of entry e. kWhole is the
// number of whole segments, or 0 where the compiler does not know it.
template <int kWhole>
__device__ __forceinline__ float AddEntries(const DownJobs& jobs, const float* sums, float weight,
                                            int lane) {
  const int whole = kWhole > 0 ? kWhole : jobs.whole_each;
  const float* at = InShared(sums) + lane;
  const float* half = jobs.count > jobs.whole ? at + jobs.whole * 32 : nullptr;
  float y = 0.0f;
#pragma unroll 4
  for (int e = 0; e < jobs.entries; ++e) {
    float total = 0.0f;
    for (int s = 0; s < whole; ++s) total = __fadd_rn(total, at[(e * whole + s) * 32]);
    if (half != nullptr) total = __fadd_rn(total, half[e * 32]);
    y = __fmaf_rn(__shfl_sync(kAllLanes, weight, e), total, y);
  }
  return y;
}

// What of others' rows a block has waited for.
struct Awaited {
  bool host = false;
  bool peer = false;
};

// The rows that others computed, a warp an entry: as the entry's first segment, the others zero.
// That is the row's own bits, for no sum of segments is ever -0.
__device__ __forceinline__ void TakeRemote(const FfnParams& p, const RowHomes& homes,
                                           const DownJobs& jobs, float* sums, int row, int panel,
                                           int lane, Awaited* awaited) {
  if (homes.away == 0) return;
  const int warps = blockDim.x / 32;
  const int whole = jobs.whole_each;
  const float* host_rows = nullptr;
  if (homes.host != 0) {
    AwaitRows(p, blockIdx.x == 0, &awaited->host);
    host_rows = HostRows(p);
  }
  if ((homes.away & ~homes.host) != 0 && p.bell.tellers > 0 && !awaited->peer) {
    AwaitPeer(p.bell);
    awaited->peer = true;
  }
  for (int e = threadIdx.x / 32; e < p.num_active; e += warps) {
    if (!homes.Away(e)) continue;
    sums[e * whole * 32 + lane] = RemoteValue(p, homes, row, e, panel * 32 + lane, host_rows);
    for (int s = 1; s < whole; ++s) sums[(e * whole + s) * 32 + lane] = 0.0f;
    if (jobs.count > jobs.whole) sums[(jobs.whole + e) * 32 + lane] = 0.0f;
  }
}

// The rows of entries that were computed here, without their weights.
__device__ __forceinline__ void StoreRows(const FfnParams& p, const RowHomes& homes,
                                          const DownJobs& jobs, const float* sums, int row,
                                          int panel, int lane) {
  const int whole = jobs.whole_each;
  for (int e = 0; e < p.num_active; ++e) {
    if (homes.Away(e)) continue;
    float total = 0.0f;
    for (int s = 0; s < whole; ++s) total = __fadd_rn(total, sums[(e * whole + s) * 32 + lane]);
    if (jobs.count > jobs.whole) total = __fadd_rn(total, sums[(jobs.whole + e) * 32 + lane]);
    const int64_t entry = static_cast<int64_t>(row) * p.num_active + e;
    p.rows[entry * p.width + panel * 32 + lane] = total;
  }
}

// What a block knows of its rows, in shared memory.
struct DownRows {
  uint64_t* downs;  // [span, 32] where entries' downs lie, kLinked or 0; 0 if computed elsewhere
  float* weights;   // [span, 32]
  uint2* masks;     // [span] RowHomes::away and host
  int32_t* counts;  // [span] of entries that are computed here
  uint8_t* local;   // [span, 32] which they are: the shared one, which is the longest, first

  __device__ __forceinline__ DownRows(unsigned char* at, int span)
      : downs(reinterpret_cast<uint64_t*>(at)),
        weights(reinterpret_cast<float*>(downs + span * 32)),
        masks(reinterpret_cast<uint2*>(weights + span * 32)),
        counts(reinterpret_cast<int32_t*>(masks + span)),
        local(reinterpret_cast<uint8_t*>(counts + span)) {}
  static constexpr int64_t Bytes(int64_t span) { return span * (32 * 8 + 32 * 4 + 8 + 4 + 32); }

  // By a warp for each row, from `first` on. A row's lane e looks after entry e.
  template <bool kDoors>
  __device__ __forceinline__ void Fill(const FfnParams& p, int first, int count) const {
    const int lane = threadIdx.x % 32;
    const bool routed = lane < p.num_active;
    for (int r = threadIdx.x / 32; r < count; r += static_cast<int>(blockDim.x) / 32) {
      const int row = first + r;
      const int id = routed ? p.ids[row * p.num_active + lane] : 0;
      RowHomes homes = {};
      if constexpr (kDoors) {
        homes = HomesOf(p, id, lane);
        if (lane == 0) masks[r] = make_uint2(homes.away, homes.host);
      } else if (routed) {
        homes.word = p.experts[id];
      }
      uint64_t down = 0;
      if (routed && !homes.Away(lane)) {
        down =
            (reinterpret_cast<uint64_t>(PanelsOf(homes.word)) + p.down_at) | (homes.word & kLinked);
      } else if (lane == p.num_active && (!kDoors || p.rows == nullptr)) {
        down = reinterpret_cast<uint64_t>(p.shared_down.bytes);
      }
      downs[r * 32 + lane] = down;
      if constexpr (kDoors) {
        const unsigned here = __ballot_sync(kAllLanes, down != 0);
        if (down != 0) local[r * 32 + __popc(here >> lane >> 1)] = static_cast<uint8_t>(lane);
        if (lane == 0) counts[r] = __popc(here);
      }
      if (kDoors && p.rows != nullptr) continue;  // nobody weighs
      float weight = 0.0f;
      if (routed) weight = p.weights[row * p.num_active + lane];
      if (lane == p.num_active) weight = p.shared_weights[row];
      weights[r * 32 + lane] = weight;
    }
  }

  // Division by the most entries that one of `count` rows has here, at least 1.
  __device__ __forceinline__ Divider MostLocal(int count) const {
    int most = 1;
    for (int r = 0; r < count; ++r) most = max(most, InShared(counts)[r]);
    return {most, 0xffffffffu / static_cast<unsigned>(most) + 1};
  }
};

// The quantised hidden values of `count` entries from `first` on, as the first kernel left them.
__device__ __forceinline__ void CopyHidden(const FfnParams& p, int64_t first, int count,
                                           const QuantizedShared& to) {
  const int codes = count * p.hidden_width / 16;  // chunks of 16 bytes, a multiple of 8
  const auto* from_codes = reinterpret_cast<const uint4*>(p.codes + first * p.hidden_width);
  const auto* from_scales = reinterpret_cast<const uint4*>(p.scales + first * p.hidden_width / 32);
  const auto* from_sums = reinterpret_cast<const uint4*>(p.sums + first * p.hidden_width / 16);
#pragma unroll 2
  for (int i = threadIdx.x; i < codes + codes / 4; i += blockDim.x) {
    if (i < codes) {
      reinterpret_cast<uint4*>(to.codes)[i] = from_codes[i];
    } else if (i < codes + codes / 8) {
      reinterpret_cast<uint4*>(to.scales)[i - codes] = from_scales[i - codes];
    } else {
      reinterpret_cast<uint4*>(to.sums)[i - codes - codes / 8] = from_sums[i - codes - codes / 8];
    }
  }
}

// A warp's way through the jobs of a batch of `items` items: the whole segments of all entries that
// are computed here, then the halves.
struct DownWalk {
  int at, items;
  Divider by_local;  // such entries of a row: as many as the block's row with the most has
  int item = 0, entry = 0, segment = 0;
  bool whole = false;
  uint64_t down = 0;  // of the entry (DownRows)

  __device__ __forceinline__ int Whole(const DownJobs& jobs) const {
    return items * by_local.divisor * jobs.whole_each;
  }
  __device__ __forceinline__ bool Done(const DownJobs& jobs) const {
    return at >= Whole(jobs) + (jobs.count > jobs.whole ? items * by_local.divisor : 0);
  }
  // The next job from `at` on that the item's row has; `begin` is the batch's first item,
  // `first_row` that of `rows`.
  template <bool kDoors>
  __device__ __forceinline__ void Find(const FfnParams& p, const DownJobs& jobs,
                                       const DownRows& rows, int begin, int first_row) {
    for (; !Done(jobs); at += static_cast<int>(blockDim.x) / 32) {
      whole = at < Whole(jobs);
      int pair = at - Whole(jobs);  // of an item and an entry
      segment = jobs.whole_each;
      if (whole) {
        pair = p.by_whole.Quotient(at);
        segment = at - pair * jobs.whole_each;
      }
      item = by_local.Quotient(pair);
      const int place = pair - item * by_local.divisor;
      const int row = p.by_columns.Quotient(begin + item) - first_row;
      entry = jobs.entries - 1 - place;
      if constexpr (kDoors) {
        if (place >= InShared(rows.counts)[row]) continue;
        entry = InShared(rows.local)[row * 32 + place];
      }
      down = InShared(rows.downs)[row * 32 + entry];
      return;
    }
  }
  // Where the job's sum belongs.
  __device__ __forceinline__ int Place(const DownJobs& jobs) const {
    return item * jobs.count + (whole ? entry * jobs.whole_each + segment : jobs.whole + entry);
  }
};

template <typename Decode>
using DownSlot = Slot<std::max(Unit<Decode, 8>::kPartBytes, Unit<DecodeQ8_0, 8>::kPartBytes)>;

// Shared memory of a block, from the number of its warps: their slots first.
struct DownPlaces {
  int32_t span;   // rows of a block's items
  int32_t batch;  // items between two barriers
  int32_t hidden_at, sums_at, rows_at, bytes;
};

// Routed downs are of Decode's type, which has no code book, the shared expert's Q8_0. The kernel
// may begin when every block of the first one has seen the router's end: experts and weights are
// read without waiting for hidden values.
template <typename Decode, bool kDoors>
__global__ void __launch_bounds__(kDownWarps * 32, 1)
    InlineDownKernel(const __grid_constant__ FfnParams p,
                     const __grid_constant__ DownPlaces places) {
  STRATA_SHARED(unsigned char, shared);
  LetNextKernelBegin();
  const int lane = threadIdx.x % 32;
  const int warp = threadIdx.x / 32;
  const int warps = blockDim.x / 32;
  const DownJobs jobs(p);
  const int panels = p.by_columns.divisor;
  const int live = min(max(*p.live, 0), p.num_rows);
  const int blocks = static_cast<int>(gridDim.x), block = static_cast<int>(blockIdx.x);
  const int begin = live * panels * block / blocks;
  const int end = live * panels * (block + 1) / blocks;
  const int first_row = p.by_columns.Quotient(begin);
  const int num_rows = begin < end ? p.by_columns.Quotient(end - 1) - first_row + 1 : 0;
  const DownRows known(shared + places.rows_at, places.span);
  known.Fill<kDoors>(p, first_row, num_rows);
  DownSlot<Decode> slot(shared + warp * DownSlot<Decode>::kSize, lane);
  const QuantizedShared q =
      QuantizedAt(shared + places.hidden_at, places.span * jobs.entries, p.hidden_width);
  const Rows rows = {q.codes, q.scales, q.sums, nullptr, p.hidden_width, nullptr, 0};
  float* sums = reinterpret_cast<float*>(shared + places.sums_at);
  Awaited awaited;
  __syncthreads();
  Divider by_local = p.by_entries;
  if constexpr (kDoors) by_local = known.MostLocal(num_rows);
#pragma unroll 1
  for (int first = begin; first < end; first += places.batch) {
    DownWalk walk = {warp, min(places.batch, end - first), by_local};
    const uint8_t* unit = nullptr;
    // The unit of the walk's job, and asks for its first part.
    const auto ask = [&] {
      if (walk.Done(jobs)) return;
      const bool is_shared = walk.entry == p.num_active;
      const PanelMatrix& m = is_shared ? p.shared_down : p.down;
      const int item = first + walk.item;
      const int panel = item - p.by_columns.Quotient(item) * panels;
      unit =
          reinterpret_cast<const uint8_t*>(walk.down & ~kLinked) + UnitAt(m, panel, walk.segment);
      if (is_shared) {
        AskFor<DecodeQ8_0>(&slot, unit, walk.whole, false, lane);
      } else {
        AskFor<Decode>(&slot, unit, walk.whole, (walk.down & kLinked) != 0, lane);
      }
    };
    walk.Find<kDoors>(p, jobs, known, first, first_row);
    ask();
    if (first == begin) {
      WaitForKernelBefore();
      CopyHidden(p, EntryIndex(p, first_row, 0), num_rows * jobs.entries, q);
      __syncthreads();
    }
#pragma unroll 1
    while (!walk.Done(jobs)) {
      const int place = walk.Place(jobs);
      const int row =
          (p.by_columns.Quotient(first + walk.item) - first_row) * jobs.entries + walk.entry;
      const bool is_shared = walk.entry == p.num_active, is_whole = walk.whole;
      const bool linked = (walk.down & kLinked) != 0;
      const int first_block = walk.segment * 8;
      const auto next = [&] {
        walk.at += warps;
        walk.Find<kDoors>(p, jobs, known, first, first_row);
        ask();
      };
      const auto sum_of = [&](auto decode, auto blocks_of) {
        return SlotSum<decltype(decode), blocks_of.value>(&slot, unit, NoBook{}, rows, row,
                                                          first_block, linked, lane, next);
      };
      using Long = std::integral_constant<int, 8>;
      using Short = std::integral_constant<int, 4>;
      float sum = 0.0f;
      if (is_shared) {
        sum = is_whole ? sum_of(DecodeQ8_0{}, Long{}) : sum_of(DecodeQ8_0{}, Short{});
      } else {
        sum = is_whole ? sum_of(Decode{}, Long{}) : sum_of(Decode{}, Short{});
      }
      sums[place * 32 + lane] = sum;
    }
    const int count = min(places.batch, end - first);
    if (kDoors && p.rows == nullptr) {
      for (int i = 0; i < count; ++i) {
        const int row = p.by_columns.Quotient(first + i);
        const uint2 masks = known.masks[row - first_row];
        TakeRemote(p, {0, masks.x, masks.y}, jobs, sums + i * jobs.count * 32, row,
                   first + i - row * panels, lane, &awaited);
      }
    }
    __syncthreads();
    for (int i = warp; i < count; i += warps) {
      const int row = p.by_columns.Quotient(first + i);
      const int panel = first + i - row * panels;
      const float* own = sums + i * jobs.count * 32;
      if (kDoors && p.rows != nullptr) {
        const uint2 masks = known.masks[row - first_row];
        StoreRows(p, {0, masks.x, masks.y}, jobs, own, row, panel, lane);
        continue;
      }
      const float weight = known.weights[(row - first_row) * 32 + lane];
      const float y = jobs.whole_each == 2 ? AddEntries<2>(jobs, own, weight, lane)
                                           : AddEntries<0>(jobs, own, weight, lane);
      p.y[static_cast<int64_t>(row) * p.width + panel * 32 + lane] = y;
    }
    if (first + places.batch < end) __syncthreads();
  }
  WaitForKernelBefore();
  if (kDoors) {
    TakeWords(p.latch, blockIdx.x * blockDim.x + threadIdx.x, gridDim.x * blockDim.x);
    if (blockIdx.x == 0 && p.mailbox.box != nullptr) {
      AwaitRows(p, true, &awaited.host);
      if (threadIdx.x == 0) ForgetLetter(p);
    }
    if (p.rows != nullptr) {
      if (p.bell.tellers > 0) TellPrimary(p.bell);
      return;
    }
  }
  const int dead = p.num_rows * p.width;
  for (int i = live * p.width + blockIdx.x * blockDim.x + threadIdx.x; i < dead;
       i += gridDim.x * blockDim.x) {
    p.y[i] = 0.0f;
  }
}

}  // namespace strata
