// The kernels of expert_ffn for the types that files for decoding use: products inlined, so that a
// warp's weights are asked for before it prepares its activations, and nothing is saved for a call.
//
// A warp needs only the activations of its own segment: it prepares those itself, and the block
// meets once for an item (32 hidden values, or 32 columns), for the sums. Blocks take items in
// turn, because the number of live rows is known on the device only. The first kernel copies the
// weights of its next item to shared memory while it multiplies with the last, where there is room;
// the second asks for its first weights before the first is over.
#pragma once

#include "cuda/async_copy.cuh"
#include "cuda/ops/expert_ffn_doors.cuh"
#include "cuda/ops/expert_ffn_mailbox.cuh"
#include "cuda/ops/expert_ffn_parts.cuh"
#include "cuda/ops/expert_ffn_units.cuh"

namespace strata {

inline constexpr int kPairWarps = 10;  // one a segment of gate and up
inline constexpr int kDownWarps = 20;  // more would leave too few registers
// Of the largest card so far: blocks that find no processor free run after the others.
inline constexpr int kProcessors = 132;

// The sums of one segment of gate and up; `prepare` runs once the first weights are on their way.
template <typename Decode, typename Prepare>
__device__ __forceinline__ float2 PairSums(const uint8_t* gate, const uint8_t* up, const Rows& rows,
                                           int lane, const Prepare& prepare) {
  using Whole = Unit<Decode, 8>;
  typename Whole::First words, up_words;
  words.Load(gate, lane);
  if constexpr (Whole::kWords <= 28) {
    up_words.Load(up, lane);
  } else {
    if (Whole::kParts == 2) PrefetchUnit(gate, Whole::kWords * 128, lane);
    PrefetchUnit(up, Whole::kWords * 128, lane);
  }
  prepare();
  float2 sums = {0.0f, 0.0f};
#pragma unroll 1  // one body for both: less to fetch, and fewer registers
  for (int i = 0; i < 2; ++i) {
    const float sum = Whole::Sum(words, gate, rows, lane);
    if (i == 1) {
      sums.y = sum;
      break;
    }
    sums.x = sum;
    gate = up;
    if constexpr (Whole::kWords <= 28) {
      words = up_words;
    } else {
      words.Load(up, lane);
    }
  }
  return sums;
}

// The same from shared memory; `ask` runs once that is free again.
template <typename Decode, typename Ask>
__device__ __forceinline__ float2 AheadPair(const unsigned char* own, const Rows& rows, int lane,
                                            const Ask& ask) {
  using Whole = Unit<Decode, 8>;
  static_assert(Whole::kParts == 1);
  typename Whole::First words, up_words;
  TakeOwnWords(own, lane, words.words);
  if constexpr (Whole::kWords <= 28) {
    TakeOwnWords(own + Whole::kWords * 128, lane, up_words.words);
    ask();
  }
  float2 sums = {0.0f, 0.0f};
#pragma unroll 1  // one body for both, as in PairSums
  for (int i = 0; i < 2; ++i) {
    const float sum = Whole::Sum(words, nullptr, rows, lane);
    if (i == 1) {
      sums.y = sum;
      break;
    }
    sums.x = sum;
    if constexpr (Whole::kWords <= 28) {
      words = up_words;
    } else {
      TakeOwnWords(own + Whole::kWords * 128, lane, words.words);
      ask();
    }
  }
  return sums;
}

// 32 hidden values of a row: where they are in the launch's order. The shared expert comes first,
// because it has the most bytes.
struct PairItem {
  int row, entry, panel;
  bool routed;

  __device__ __forceinline__ PairItem(const FfnParams& p, int item) {
    const int rank = p.by_panels.Quotient(item);  // of all rows
    row = p.by_entries.Quotient(rank);
    panel = item - rank * p.by_panels.divisor;
    const int place = rank - row * p.by_entries.divisor;
    routed = place != 0;
    entry = routed ? place - 1 : p.num_active;
  }
};

__device__ __forceinline__ int ItemsOfRow(const FfnParams& p) {
  return p.by_entries.divisor * p.by_panels.divisor;
}

__device__ __forceinline__ int64_t UnitAt(const PanelMatrix& m, int panel, int segment) {
  return panel * m.panel_bytes + static_cast<int64_t>(segment) * m.unit_bytes;
}

// Shared memory of the first kernel: the code book; for every warp its activations, and weights of
// gate and up that are on their way; two sets of sums [gate then up, segments, 32]; and the rows'
// words, [num_rows, A], 0 for entries that are computed elsewhere.
struct GateUpShared {
  int64_t stages_at, weights_at, sums_at, words_at, bytes;

  __host__ __device__ constexpr GateUpShared(int64_t segments, int64_t book_bytes,
                                             int64_t pair_bytes, int64_t words)
      : stages_at(book_bytes),
        weights_at(stages_at + segments * static_cast<int64_t>(sizeof(SegmentStage))),
        sums_at(weights_at + segments * pair_bytes),
        words_at(sums_at + 2 * 2 * segments * 32 * 4),
        bytes(words_at + words * 8) {}
};

template <typename Decode>
inline constexpr int kPairBytes = 2 * SegmentWords<Decode>(8) * 128;

// Fills the words of the live rows, by a whole block that synchronises; `counts`: and notes the use
// of their experts.
template <bool kDoors>
__device__ __forceinline__ void FillWords(const FfnParams& p, int live, bool counts,
                                          uint64_t* words) {
  const int lane = threadIdx.x % 32;
  const int warps = blockDim.x / 32;
  for (int row = threadIdx.x / 32; row < live; row += warps) {
    const bool mine = lane < p.num_active;
    const int id = mine ? p.ids[row * p.num_active + lane] : 0;
    if constexpr (kDoors) {
      const RowHomes homes = HomesOf(p, id, lane);
      if (counts && mine) CountEntry(p, homes, lane, id, homes.word);
      if (mine) words[row * p.num_active + lane] = homes.Away(lane) ? 0 : homes.word;
    } else {
      if (counts && mine) atomicAdd(p.usage + id, 1u);
      if (mine) words[row * p.num_active + lane] = p.experts[id];
    }
  }
}

// A block's way through the items that are computed here.
template <bool kDoors>
struct PairWalk {
  int item, end, step;
  const uint64_t* words;
  uint64_t word;  // of the item's expert

  __device__ __forceinline__ bool Done() const { return item >= end; }
  __device__ __forceinline__ void Next(const FfnParams& p) {
    item += step;
    Find(p);
  }
  __device__ __forceinline__ void Find(const FfnParams& p) {
    for (; item < end; item += step) {
      const PairItem at(p, item);
      word = at.routed ? InShared(words)[at.row * p.num_active + at.entry] : 0;
      if (at.routed ? word != 0 : !kDoors || p.rows == nullptr) return;
    }
  }
};

// The segment's values of a row, four a lane of each half.
struct SegmentValues {
  float4 x[2];

  __device__ __forceinline__ void Load(const FfnParams& p, int row, int segment, int lane) {
    const float4* from = reinterpret_cast<const float4*>(p.x + static_cast<int64_t>(row) * p.width +
                                                         segment * 256 + 4 * lane);
    x[0] = __ldg(from);
    x[1] = __ldg(from + 32);
  }
};

// Routed gates and ups are of Decode's type, the shared expert's Q8_0. A warp for each segment.
// kAhead: there is room for the next item's weights.
template <typename Decode, bool kDoors, bool kAhead>
__global__ void __launch_bounds__(kPairWarps * 32, 2)
    InlineGateUpKernel(const __grid_constant__ FfnParams p) {
  STRATA_SHARED(unsigned char, shared);
  constexpr int kBookBytes = GridBytes(Decode::kType, kBookCopies);
  using Whole = Unit<Decode, 8>;
  const int lane = threadIdx.x % 32;
  const int warp = threadIdx.x / 32;
  const int segments = blockDim.x / 32;
  const GateUpShared places(segments, kBookBytes, kAhead ? kPairBytes<Decode> : 0, 0);
  SegmentStage* stage = reinterpret_cast<SegmentStage*>(shared + places.stages_at) + warp;
  unsigned char* own = shared + places.weights_at + warp * kPairBytes<Decode>;
  uint64_t* words = reinterpret_cast<uint64_t*>(shared + places.words_at);
  const int live = min(max(*p.live, 0), p.num_rows);
  const int rings = kDoors && p.mailbox.box != nullptr;
  if constexpr (kBookBytes > 0) StageBook<Decode>(shared);
  WaitForKernelBefore();
  // Not sooner: the second kernel takes it that the router is done.
  LetNextKernelBegin();
  if constexpr (kDoors) {
    if (rings && blockIdx.x == 0) return Ring(p);
  }
  FillWords<kDoors>(p, live, blockIdx.x == static_cast<unsigned>(rings), words);
  __syncthreads();
  PairWalk<kDoors> walk = {static_cast<int>(blockIdx.x) - rings, live * ItemsOfRow(p),
                           static_cast<int>(gridDim.x) - rings, words, 0};
  walk.Find(p);
  SegmentValues values;
  const auto gate_of = [&](const PairItem& at) {
    return PanelsOf(walk.word) + UnitAt(p.gate, at.panel, warp);
  };
  // Asks for what the walk's item needs.
  const auto ask = [&] {
    if (walk.Done()) return;
    const PairItem at(p, walk.item);
    if (kDoors && (walk.word & kLinked) != 0) LetLetterPass(p);
    if (kAhead && at.routed) {
      const uint8_t* gate = gate_of(at);
      CopyOwnWords<Whole::kWords>(own, gate, lane);
      CopyOwnWords<Whole::kWords>(own + Whole::kWords * 128, gate + p.up_at, lane);
    }
    values.Load(p, at.row, warp, lane);
  };
  ask();
  for (int turn = 0; !walk.Done(); ++turn) {
    const PairItem at(p, walk.item);
    const Rows rows = RowsOf(*stage, shared);
    int item = walk.item;
    float2 pair;
    if (kAhead && at.routed) {
      QuantizeSegment(values.x, lane, stage);
      AwaitOwnCopies();
      pair = AheadPair<Decode>(own, rows, lane, [&] {
        walk.Next(p);
        ask();
      });
    } else {
      const auto prepare = [&] { QuantizeSegment(values.x, lane, stage); };
      if (at.routed) {
        const uint8_t* gate = gate_of(at);
        pair = PairSums<Decode>(gate, gate + p.up_at, rows, lane, prepare);
      } else {
        const int64_t unit = UnitAt(p.shared_gate, at.panel, warp);
        pair = PairSums<DecodeQ8_0>(p.shared_gate.bytes + unit, p.shared_up.bytes + unit, rows,
                                    lane, prepare);
      }
      walk.Next(p);
      ask();
    }
    // Two sets of sums: a block may be an item ahead of the warp that adds.
    float* sums = reinterpret_cast<float*>(shared + places.sums_at) + turn % 2 * 2 * segments * 32;
    sums[warp * 32 + lane] = pair.x;
    sums[(segments + warp) * 32 + lane] = pair.y;
    __syncthreads();
    Forget(&item);
    if (warp == turn % segments) {
      const PairItem done(p, item);
      WriteHidden(p, sums, segments, done.row, done.entry, done.panel, lane);
    }
  }
}

// What a lane holds of a segment's hidden values on the way to shared memory.
struct StageLoads {
  uint2 codes;
  float scale;
  int sums;

  __device__ __forceinline__ void Load(const FfnParams& p, int64_t entry, int segment, int blocks,
                                       int lane) {
    const int64_t block = entry * (p.hidden_width / 32) + segment * 8;
    if (lane < blocks * 4)
      codes = __ldg(reinterpret_cast<const uint2*>(p.codes + block * 32) + lane);
    if (lane < blocks) {
      scale = __ldg(p.scales + block + lane);
      sums = __ldg(reinterpret_cast<const int*>(p.sums + block * 2) + lane);
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
  return Unit<Decode, kBlocks>::Sum(words, unit, RowsOf(*stage, nullptr), lane);
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
  for (int item = blockIdx.x; item < live * panels; item += gridDim.x, ++turn) {
    const int row = p.by_columns.Quotient(item);
    const int panel = item - row * panels;
    // Lane e looks after entry e.
    uint64_t at = reinterpret_cast<uint64_t>(p.shared_down.bytes);
    const int id = lane < p.num_active ? p.ids[row * p.num_active + lane] : 0;
    RowHomes homes = {};
    if constexpr (kDoors) homes = HomesOf(p, id, lane);
    const auto skips = [&](int e) {
      return kDoors && (e < p.num_active ? homes.Away(e) : p.rows != nullptr);
    };
    float weight = 0.0f;
    if (lane < p.num_active) {
      at = reinterpret_cast<uint64_t>(PanelsOf(kDoors ? homes.word : p.experts[id])) + p.down_at;
    }
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
