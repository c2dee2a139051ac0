// The second of the kernels that expert_ffn_gate_up.cuh begins: the products with down, and the sum
// of a row's entries.
#pragma once

#include "cuda/ops/expert_ffn_gate_up.cuh"

namespace strata {

inline constexpr int kDownWarps = 20;  // more would leave too few registers

// What a lane holds of a segment's hidden values on the way to shared memory.
struct StageLoads {
  uint2 codes;
  float scale;
  int sums;

  __device__ __forceinline__ void Load(const FfnParams& p, int64_t entry, int segment, int blocks,
                                       int lane) {
    const int64_t block = entry * (p.hidden_width / 32) + segment * 8;
    if (lane < blocks * 4) codes = reinterpret_cast<const uint2*>(p.codes + block * 32)[lane];
    if (lane < blocks) {
      scale = p.scales[block + lane];
      sums = reinterpret_cast<const int*>(p.sums + block * 2)[lane];
    }
  }
  __device__ __forceinline__ void Store(int blocks, int lane, SegmentStage* stage) const {
    __syncwarp();  // all lanes are done with the segment before
    if (lane < blocks * 4) reinterpret_cast<uint2*>(InShared(stage->codes))[lane] = codes;
    if (lane < blocks) {
      InShared(stage->scales)[lane] = scale;
      reinterpret_cast<int*>(InShared(stage->sums))[lane] = sums;
    }
    __syncwarp();
  }
};

// `after` runs once the unit's first words are on their way; it loads the activations.
template <typename Decode, int kBlocks, typename After>
__device__ __forceinline__ float DownSum(const uint8_t* unit, SegmentStage* stage, int lane,
                                         const After& after) {
  typename Unit<Decode, kBlocks>::First words;
  words.Load(unit, lane);
  if (Unit<Decode, kBlocks>::kParts == 2) {
    PrefetchUnit(unit, Unit<Decode, kBlocks>::kWords * 128, lane);
  }
  after().Store(kBlocks, lane, stage);
  return Unit<Decode, kBlocks>::Sum(words, unit, RowsOf(*stage, nullptr, 0), lane);
}

// Segments of a panel of a row's down matrices: whole ones of all entries, then the halves.
struct DownJobs {
  Divider by_whole;  // whole segments of an entry
  int entries, whole, count;

  __device__ __forceinline__ explicit DownJobs(const FfnParams& p)
      : by_whole(p.by_whole),
        entries(p.num_active + 1),
        whole(entries * p.by_whole.divisor),
        count(whole + (p.hidden_width % 256 != 0 ? entries : 0)) {}
  __device__ __forceinline__ bool IsWhole(int job) const { return job < whole; }
  __device__ __forceinline__ int Entry(int job) const {
    return IsWhole(job) ? by_whole.Quotient(job) : job - whole;
  }
  __device__ __forceinline__ int Segment(int job) const {
    return IsWhole(job) ? job - by_whole.Quotient(job) * by_whole.divisor : by_whole.divisor;
  }
};

// Adds a panel's entries in the router's order; lane e holds the weight of entry e. kWhole is the
// number of whole segments, or 0 where the compiler does not know it.
template <int kWhole>
__device__ __forceinline__ float AddEntries(const DownJobs& jobs, const float* sums, float weight,
                                            int lane) {
  const int whole = kWhole > 0 ? kWhole : jobs.by_whole.divisor;
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

inline size_t InlineDownShared(int64_t warps, int64_t jobs) {
  return static_cast<size_t>(warps * static_cast<int64_t>(sizeof(SegmentStage)) +
                             2 * jobs * 32 * 4);
}

// The rows that others computed, a warp an entry: as the entry's first segment, the others zero.
// That is the row's own bits, for no sum of segments is ever -0.
__device__ __forceinline__ void TakeRemote(const FfnParams& p, const RowHomes& homes,
                                           const DownJobs& jobs, float* sums, int row, int panel,
                                           int lane, bool* looked) {
  const int warps = blockDim.x / 32;
  const int whole = jobs.by_whole.divisor;
  const float* host_rows = nullptr;
  if (homes.host != 0) {
    AwaitRows(p, blockIdx.x == 0, looked);
    host_rows = HostRows(p);
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
  const int whole = jobs.by_whole.divisor;
  for (int e = 0; e < p.num_active; ++e) {
    if (homes.Away(e)) continue;
    float total = 0.0f;
    for (int s = 0; s < whole; ++s) total = __fadd_rn(total, sums[(e * whole + s) * 32 + lane]);
    if (jobs.count > jobs.whole) total = __fadd_rn(total, sums[(jobs.whole + e) * 32 + lane]);
    const int64_t entry = static_cast<int64_t>(row) * p.num_active + e;
    p.rows[entry * p.width + panel * 32 + lane] = total;
  }
}

// Routed downs are of Decode's type, which has no code book, the shared expert's Q8_0. The kernel
// may begin when every block of the first one has seen the router's end: experts and weights are
// read without waiting for hidden values.
template <typename Decode, bool kDoors>
__global__ void __launch_bounds__(kDownWarps * 32, 1)
    InlineDownKernel(const __grid_constant__ FfnParams p) {
  STRATA_SHARED(unsigned char, shared);
  LetNextKernelBegin();
  const int lane = threadIdx.x % 32;
  const int warp = threadIdx.x / 32;
  const int warps = blockDim.x / 32;
  const DownJobs jobs(p);
  SegmentStage* stage = reinterpret_cast<SegmentStage*>(shared) + warp;
  float* sums = reinterpret_cast<float*>(shared + warps * sizeof(SegmentStage));
  const int panels = p.by_columns.divisor;
  const int live = min(max(*p.live, 0), p.num_rows);
  bool looked = false;
  int turn = 0;
  // Lane e looks after entry e. Without doors the next item's weights are known and asked for
  // early.
  const auto id_of = [&](int row) {
    return lane < p.num_active ? p.ids[row * p.num_active + lane] : 0;
  };
  const auto place_of = [&](uint64_t word) {
    return lane < p.num_active ? reinterpret_cast<uint64_t>(PanelsOf(word)) + p.down_at
                               : reinterpret_cast<uint64_t>(p.shared_down.bytes);
  };
  uint64_t next_at = 0;
  for (int item = blockIdx.x; item < live * panels; item += gridDim.x, ++turn) {
    const int row = p.by_columns.Quotient(item);
    const int panel = item - row * panels;
    const int next_item = item + static_cast<int>(gridDim.x);
    const bool more = !kDoors && next_item < live * panels;
    const int next_id = more ? id_of(p.by_columns.Quotient(next_item)) : 0;
    uint64_t at = next_at;
    RowHomes homes = {};
    if (kDoors || turn == 0) {
      const int id = id_of(row);
      if constexpr (kDoors) homes = HomesOf(p, id, lane);
      at = place_of(kDoors ? homes.word : lane < p.num_active ? p.experts[id] : 0);
    }
    const auto skips = [&](int e) {
      return kDoors && (e < p.num_active ? homes.Away(e) : p.rows != nullptr);
    };
    float weight = 0.0f;
    if (kDoors && p.rows != nullptr) {
      weight = 0.0f;  // nobody weighs
    } else if (lane < p.num_active) {
      weight = p.weights[row * p.num_active + lane];
    } else if (lane == p.num_active) {
      weight = p.shared_weights[row];
    }
    float* own = sums + turn % 2 * jobs.count * 32;
    for (int job = warp; job < jobs.count; job += warps) {
      const int e = jobs.Entry(job);
      if (skips(e)) continue;
      const int segment = jobs.Segment(job);
      const bool whole = jobs.IsWhole(job);
      const PanelMatrix& m = e < p.num_active ? p.down : p.shared_down;
      const uint8_t* unit = PanelsOf(FromLane(at, e)) + UnitAt(m, panel, segment);
      // And for the next unit.
      const auto load = [&] {
        const int next = job + warps;
        if (next < jobs.count && !skips(jobs.Entry(next))) {
          const PanelMatrix& n = jobs.Entry(next) < p.num_active ? p.down : p.shared_down;
          PrefetchUnit(
              PanelsOf(FromLane(at, jobs.Entry(next))) + UnitAt(n, panel, jobs.Segment(next)),
              jobs.IsWhole(next) ? n.unit_bytes : n.unit_bytes / 2, lane);
        }
        WaitForKernelBefore();  // for good, after the first time
        StageLoads loads = {};
        loads.Load(p, EntryIndex(p, row, e), segment, whole ? 8 : 4, lane);
        return loads;
      };
      float sum = 0.0f;
      if (e < p.num_active) {
        sum = whole ? DownSum<Decode, 8>(unit, stage, lane, load)
                    : DownSum<Decode, 4>(unit, stage, lane, load);
      } else {
        sum = whole ? DownSum<DecodeQ8_0, 8>(unit, stage, lane, load)
                    : DownSum<DecodeQ8_0, 4>(unit, stage, lane, load);
      }
      own[job * 32 + lane] = sum;
      if (more && job == warp) next_at = place_of(lane < p.num_active ? p.experts[next_id] : 0);
    }
    if (more) {  // every warp has a job
      const PanelMatrix& n = jobs.Entry(warp) < p.num_active ? p.down : p.shared_down;
      const int next_panel = next_item - p.by_columns.Quotient(next_item) * panels;
      PrefetchUnit(
          PanelsOf(FromLane(next_at, jobs.Entry(warp))) + UnitAt(n, next_panel, jobs.Segment(warp)),
          jobs.IsWhole(warp) ? n.unit_bytes : n.unit_bytes / 2, lane);
    }
    WaitForKernelBefore();
    if (kDoors && p.rows == nullptr) TakeRemote(p, homes, jobs, own, row, panel, lane, &looked);
    __syncthreads();
    if (warp == turn % warps && kDoors && p.rows != nullptr) {
      StoreRows(p, homes, jobs, own, row, panel, lane);
    } else if (warp == turn % warps) {
      const float y = jobs.by_whole.divisor == 2 ? AddEntries<2>(jobs, own, weight, lane)
                                                 : AddEntries<0>(jobs, own, weight, lane);
      p.y[static_cast<int64_t>(row) * p.width + panel * 32 + lane] = y;
    }
  }
  WaitForKernelBefore();
  if (kDoors) {
    TakeWords(p.latch, blockIdx.x * blockDim.x + threadIdx.x, gridDim.x * blockDim.x);
    if (blockIdx.x == 0 && p.mailbox.box != nullptr) {
      AwaitRows(p, true, &looked);
      if (threadIdx.x == 0) ForgetLetter(p);
    }
    if (p.rows != nullptr) return;
  }
  const int dead = p.num_rows * p.width;
  for (int i = live * p.width + blockIdx.x * blockDim.x + threadIdx.x; i < dead;
       i += gridDim.x * blockDim.x) {
    p.y[i] = 0.0f;
  }
}

}  // namespace strata
