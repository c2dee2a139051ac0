// The kernel of quant_matmul.cu: how a launch's products are cut into parts, computed and added.
//
// A part is one segment of one panel (of a float32 matrix, where parts are few, one block of 32
// values). A block of threads quantises its activation rows once and then takes a run of parts, one
// a warp; one row's launch has a block for each multiprocessor. A warp asks for its first part's
// weights before it knows anything of the activations, and always for the next part's while it
// computes one, into the L2 cache: that is what keeps the memory busy.
#pragma once

#include <type_traits>

#include "cuda/ops/quant_matmul.h"
#include "cuda/products.cuh"
#include "cuda/segments_body.cuh"

namespace strata::matmul {

inline constexpr int kWarps = 16;  // of 128 registers: all that a multiprocessor has
inline constexpr int kMostCounters = 1 << 14;

enum class Mode : int32_t {
  kParts,   // runs of parts: a panel may lie in several runs, whose last block adds it up
  kPanels,  // runs of whole panels, added up by their block
  kWarps,   // a warp takes whole panels and adds as it goes
};

struct Slice {
  PanelMatrix matrix;
  int32_t first_panel;  // of the launch
  int32_t first_part;   // of the launch
  int32_t column;       // of the result
  int32_t parts;        // of a panel
  int32_t part_blocks;  // blocks of 32 values of a part: 8, or 1
  int32_t part_bytes;
  int32_t grid_at;      // of the type's code book in shared memory
  int32_t grid_copies;  // 0: none
  bool stages_grid;     // false: a slice before it has the same
};

struct Params {
  Slice slices[kMostMatrices];
  int32_t num_slices;
  Mode mode;
  const float* x;
  const int32_t* live;
  float* y;
  float* workspace;  // [groups, parts, group_rows, 32] where Mode::kParts
  int32_t num_rows;
  int32_t width;
  int32_t num_columns;
  int32_t num_panels;
  int32_t num_parts;
  int32_t num_runs;
  int32_t group_rows;  // activation rows a block serves, at most kMostRows
  int32_t sums_at;     // in shared memory: [parts of a run, group_rows, 32]
  bool quantised;      // whether any matrix is
};

// How many blocks of a panel have left their sums. A launch leaves zeros behind, and all launches
// of a device are on its one compute stream, so no two of them count at once.
static __device__ unsigned arrivals[kMostCounters];

// A panel of the launch, or a part of one.
struct Place {
  int slice;
  int panel;  // of the slice
  int part;   // of the panel
};

__device__ __forceinline__ Place PlaceOfPanel(const Params& p, int panel) {
  int i = 0;
  while (i + 1 < p.num_slices && panel >= p.slices[i + 1].first_panel) ++i;
  return {i, panel - p.slices[i].first_panel, 0};
}

__device__ __forceinline__ Place PlaceOfPart(const Params& p, int part) {
  int i = 0;
  while (i + 1 < p.num_slices && part >= p.slices[i + 1].first_part) ++i;
  const unsigned own = static_cast<unsigned>(part - p.slices[i].first_part);
  const unsigned panel = own / static_cast<unsigned>(p.slices[i].parts);
  return {i, static_cast<int>(panel),
          static_cast<int>(own - panel * static_cast<unsigned>(p.slices[i].parts))};
}

__device__ __forceinline__ int FirstPart(const Params& p, const Place& place) {
  return p.slices[place.slice].first_part + place.panel * p.slices[place.slice].parts;
}

// The run's parts, or panels where Mode::kWarps.
struct Run {
  int begin, end;
};

// `number` * items / runs, rounded up: where a run begins.
__device__ __forceinline__ int BeginOfRun(int number, int items, int runs) {
  return static_cast<int>((static_cast<unsigned>(number) * static_cast<unsigned>(items) +
                           static_cast<unsigned>(runs) - 1) /
                          static_cast<unsigned>(runs));
}

__device__ __forceinline__ int RunOfPart(const Params& p, int part) {
  return static_cast<int>(static_cast<unsigned>(part) * static_cast<unsigned>(p.num_runs) /
                          static_cast<unsigned>(p.num_parts));
}

__device__ __forceinline__ Run RunOf(const Params& p, int number) {
  const int items = p.mode == Mode::kParts ? p.num_parts : p.num_panels;
  Run run = {BeginOfRun(number, items, p.num_runs), BeginOfRun(number + 1, items, p.num_runs)};
  if (p.mode != Mode::kPanels) return run;
  run.begin = FirstPart(p, PlaceOfPanel(p, run.begin));
  run.end = run.end == p.num_panels ? p.num_parts : FirstPart(p, PlaceOfPanel(p, run.end));
  return run;
}

// A warp's way through its run.
struct Walk {
  Place place;
  int at;   // part, or panel where Mode::kWarps
  int end;  // of the run

  __device__ __forceinline__ Walk(const Params& p, const Run& run)
      : at(run.begin + static_cast<int>(threadIdx.x / 32)), end(run.end) {
    place.slice = place.panel = place.part = 0;
    Find(p);
  }
  __device__ __forceinline__ bool Done() const { return at >= end; }
  __device__ __forceinline__ void Find(const Params& p) {
    if (Done()) return;
    place = p.mode == Mode::kWarps ? PlaceOfPanel(p, at) : PlaceOfPart(p, at);
  }
  __device__ __forceinline__ void Next(const Params& p) {
    if (Done()) return;
    if (p.mode == Mode::kWarps && ++place.part < p.slices[place.slice].parts) return;
    at += kWarps;
    Find(p);
  }
};

__device__ __forceinline__ const uint8_t* BytesOf(const Params& p, const Place& place) {
  const Slice& slice = p.slices[place.slice];
  return slice.matrix.bytes + place.panel * slice.matrix.panel_bytes +
         static_cast<int64_t>(place.part) * slice.part_bytes;
}

__device__ __forceinline__ void PrefetchPart(const Params& p, const Walk& walk, int lane) {
  if (walk.Done()) return;
  const Slice& slice = p.slices[walk.place.slice];
  const int64_t left =
      slice.matrix.panel_bytes - static_cast<int64_t>(walk.place.part) * slice.part_bytes;
  PrefetchOwn(BytesOf(p, walk.place),
              left < slice.part_bytes ? static_cast<int>(left) : slice.part_bytes, lane);
}

// sums[r * 32] <- a part's sum for the lane's row and activation row r; any type.
__device__ __forceinline__ void MultiplyPart(const Params& p, const Place& place, int lane,
                                             const Rows& rows, int num_rows, float* sums) {
  const Slice& slice = p.slices[place.slice];
  if (place.panel * 32 + lane >= slice.matrix.rows) return;
  const int first_block = place.part * slice.part_blocks;
  const int blocks = min(slice.part_blocks, p.width / 32 - first_block);
  const uint8_t* bytes = BytesOf(p, place);
  if (num_rows == 1 && slice.matrix.type == GgmlType::kF32) {
    FloatBody<GgmlType::kF32, 1>(bytes, lane, blocks, rows, first_block, 1, sums);
  } else if (num_rows == 1 && slice.matrix.type == GgmlType::kBF16) {
    FloatBody<GgmlType::kBF16, 1>(bytes, lane, blocks, rows, first_block, 1, sums);
  } else {
    const Rows copy = rows;  // a call needs it in memory
    float acc[kMostRows];
    SegmentDot(slice.matrix.type, bytes, lane, blocks, copy, first_block, num_rows, acc);
    for (int r = 0; r < num_rows; ++r) sums[r * 32] = acc[r];
  }
}

__device__ __forceinline__ void StoreTotal(const Params& p, const Place& place, int row, int lane,
                                           float total) {
  const Slice& slice = p.slices[place.slice];
  const int own = place.panel * 32 + lane;
  if (own >= slice.matrix.rows) return;
  p.y[static_cast<int64_t>(row) * p.num_columns + slice.column + own] = total;
}

// The sums of a panel's parts from `begin` on to `end`, in contract T's order: blocks into a
// segment, segments into a total. `sums` is [parts, group_rows, 32], the first at part `begin`.
__device__ __forceinline__ float AddParts(const Params& p, const float* sums, int begin, int end,
                                          int per_segment, int r, int lane) {
  float total = 0.0f;
  for (int part = begin; part < end;) {
    float segment = 0.0f;
    for (const int last = min(part + per_segment, end); part < last; ++part) {
      segment = __fadd_rn(segment, sums[((part - begin) * p.group_rows + r) * 32 + lane]);
    }
    total = __fadd_rn(total, segment);
  }
  return total;
}

// Panels that lie wholly in the run.
__device__ __forceinline__ void AddWholePanels(const Params& p, const Run& run, const float* sums,
                                               int first_row, int num_rows) {
  const int lane = threadIdx.x % 32;
  const int warp = threadIdx.x / 32;
  const Place first = PlaceOfPart(p, run.begin);
  int panel = p.slices[first.slice].first_panel + first.panel + (first.part > 0 ? 1 : 0);
  for (int job = 0; panel < p.num_panels; ++panel) {
    const Place place = PlaceOfPanel(p, panel);
    const int part = FirstPart(p, place);
    if (part + p.slices[place.slice].parts > run.end) return;
    for (int r = 0; r < num_rows; ++r, ++job) {
      if (job % kWarps != warp) continue;
      const float total =
          AddParts(p, sums + (part - run.begin) * p.group_rows * 32, 0, p.slices[place.slice].parts,
                   8 / p.slices[place.slice].part_blocks, r, lane);
      StoreTotal(p, place, first_row + r, lane, total);
    }
  }
}

// Whether this block is the last of those that share a panel. One thread calls it, after a barrier
// and before another: so its fences count for the block's other threads too.
__device__ __forceinline__ bool ArriveLast(const Params& p, const Place& place, int group) {
  const int part = FirstPart(p, place);
  const int parts = p.slices[place.slice].parts;
  const int blocks = RunOfPart(p, part + parts - 1) - RunOfPart(p, part) + 1;
  unsigned* counter =
      arrivals + group * p.num_panels + p.slices[place.slice].first_panel + place.panel;
  __threadfence();
  const bool is_last = atomicAdd(counter, 1u) + 1 == static_cast<unsigned>(blocks);
  __threadfence();
  if (is_last) *counter = 0;
  return is_last;
}

// A panel whose sums are all in the workspace: its segments first, all loads at once, in `segments`
// of shared memory, [segments, group_rows, 32]; then the totals.
__device__ __forceinline__ void AddSharedPanel(const Params& p, const Place& place, int group,
                                               float* segments, int num_rows) {
  const int lane = threadIdx.x % 32;
  const int warp = threadIdx.x / 32;
  const int per_segment = 8 / p.slices[place.slice].part_blocks;
  const int count = (p.slices[place.slice].parts + per_segment - 1) / per_segment;
  const float* sums =
      p.workspace +
      (static_cast<int64_t>(group) * p.num_parts + FirstPart(p, place)) * p.group_rows * 32;
  for (int job = warp; job < count * num_rows; job += kWarps) {
    const int r = job / count;
    const int s = job - r * count;
    const int begin = s * per_segment;
    const int parts = min(per_segment, p.slices[place.slice].parts - begin);
    float values[8];
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      values[i] = i < parts ? __ldcg(sums + ((begin + i) * p.group_rows + r) * 32 + lane) : 0.0f;
    }
    float segment = 0.0f;
#pragma unroll
    for (int i = 0; i < 8; ++i) segment = __fadd_rn(segment, values[i]);  // + 0 changes none
    segments[(s * p.group_rows + r) * 32 + lane] = segment;
  }
  __syncthreads();
  for (int r = warp; r < num_rows; r += kWarps) {
    const float total = AddParts(p, segments, 0, count, 1, r, lane);
    StoreTotal(p, place, group * p.group_rows + r, lane, total);
  }
  __syncthreads();
}

// Adds what a run's warps have left in shared memory and in the workspace.
__device__ __forceinline__ void AddRun(const Params& p, const Run& run, int group, float* sums,
                                       int num_rows) {
  __shared__ bool is_last[2];
  const Place first = PlaceOfPart(p, run.begin);
  const Place last = PlaceOfPart(p, run.end - 1);
  const int begin = FirstPart(p, first);
  const bool is_cut = p.mode == Mode::kParts;
  const bool first_cut =
      is_cut && (first.part > 0 || begin + p.slices[first.slice].parts > run.end);
  const bool last_cut =
      is_cut && last.part + 1 < p.slices[last.slice].parts && begin != FirstPart(p, last);
  __syncthreads();
  if (threadIdx.x == 0) is_last[0] = first_cut && ArriveLast(p, first, group);
  if (threadIdx.x == 32) is_last[1] = last_cut && ArriveLast(p, last, group);
  AddWholePanels(p, run, sums, group * p.group_rows, num_rows);
  if (!first_cut && !last_cut) return;
  __syncthreads();
  if (is_last[0]) AddSharedPanel(p, first, group, sums, num_rows);
  if (is_last[1]) AddSharedPanel(p, last, group, sums, num_rows);
}

// The run's share of the group's rows that do not count.
__device__ __forceinline__ void ZeroDeadRows(const Params& p, int first_row, int num_live,
                                             int number) {
  const int live = min(max(num_live - first_row, 0), p.group_rows);
  const int count = (min(p.group_rows, p.num_rows - first_row) - live) * p.num_columns;
  float* y = p.y + static_cast<int64_t>(first_row + live) * p.num_columns;
  const int thread = number * static_cast<int>(blockDim.x) + static_cast<int>(threadIdx.x);
  const int threads = p.num_runs * static_cast<int>(blockDim.x);
  if (p.num_columns % 4 == 0) {
#pragma unroll 1
    for (int i = thread; i < count / 4; i += threads) {
      reinterpret_cast<float4*>(y)[i] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    }
  } else {
#pragma unroll 1
    for (int i = thread; i < count; i += threads) y[i] = 0.0f;
  }
}

__device__ __forceinline__ void StageGrids(const Params& p, unsigned char* shared) {
#pragma unroll 1
  for (int i = 0; i < p.num_slices; ++i) {
    const Slice& slice = p.slices[i];
    if (!slice.stages_grid) continue;
    StageGrid(slice.matrix.type, slice.grid_copies,
              reinterpret_cast<uint32_t*>(shared + slice.grid_at), threadIdx.x, blockDim.x);
  }
}

// Where a warp leaves a part's sums: in shared memory, or for other blocks where its panel is cut.
__device__ __forceinline__ float* SumsOfPart(const Params& p, const Run& run, const Walk& walk,
                                             int group, float* sums) {
  if (p.mode == Mode::kWarps) return sums + threadIdx.x / 32 * p.group_rows * 32;
  const int first = walk.at - walk.place.part;
  if (first >= run.begin && first + p.slices[walk.place.slice].parts <= run.end) {
    return sums + (walk.at - run.begin) * p.group_rows * 32;
  }
  return p.workspace + (static_cast<int64_t>(group) * p.num_parts + walk.at) * p.group_rows * 32;
}

// Where Mode::kWarps: adds a part's sums to the panel's totals, and writes those after the last.
__device__ __forceinline__ void AddToPanel(const Params& p, const Place& place, const float* sums,
                                           float* totals, int first_row, int num_rows, int lane) {
  const bool is_last = place.part + 1 == p.slices[place.slice].parts;
  for (int r = 0; r < num_rows; ++r) {
    const float before = place.part == 0 ? 0.0f : totals[r * 32];
    const float total = __fadd_rn(before, sums[r * 32]);
    totals[r * 32] = total;
    if (is_last) StoreTotal(p, place, first_row + r, lane, total);
  }
}

// What a block knows of its work.
struct Job {
  Run run;
  int group, first_row, num_rows;
  Rows rows;  // without a code book
  unsigned char* shared;

  __device__ __forceinline__ Rows RowsFor(const Slice& slice) const {
    Rows own = rows;
    own.grid = reinterpret_cast<const uint32_t*>(shared + slice.grid_at);
    own.grid_copies = slice.grid_copies;
    return own;
  }
};

// A kernel's own type, whose products are compiled in: of a single row, and of several where no
// code book takes the registers.
struct NoHot {};

template <typename Hot>
__device__ __forceinline__ bool IsHot(const Params& p, const Job& job, const Walk& walk) {
  return (job.num_rows == 1 || GridEntries(Hot::kType) == 0) && !walk.Done() &&
         p.width % 256 == 0 && p.slices[walk.place.slice].matrix.type == Hot::kType;
}

// The warp's parts up to the first of another type (a panel has one type). A part's words are asked
// for before the sum of the one before it is put away. Nothing here is a call, which would push
// them out of the registers.
template <typename Hot>
__device__ __forceinline__ void MultiplyHot(const Params& p, const Job& job, float* sums, int lane,
                                            Walk* walk) {
  RawWords<SegmentWords<Hot>(8)> raw;
  LoadWords(BytesOf(p, walk->place), lane, &raw);
  float total = 0.0f;  // Mode::kWarps: of the panel so far
  for (bool more = true; more;) {
    const Walk done = *walk;
    walk->Next(p);
    PrefetchPart(p, *walk, lane);
    const Rows rows = job.RowsFor(p.slices[done.place.slice]);
    float sum;
    LoadedSums<Hot, 1, 8>(&raw, lane, rows, 8 * done.place.part, 1, &sum);
    more = IsHot<Hot>(p, job, *walk);
    if (more) LoadWords(BytesOf(p, walk->place), lane, &raw);
    if (p.mode == Mode::kWarps) {
      total = __fadd_rn(done.place.part == 0 ? 0.0f : total, sum);
      const bool is_last = done.place.part + 1 == p.slices[done.place.slice].parts;
      if (is_last) StoreTotal(p, done.place, job.first_row, lane, total);
    } else {
      SumsOfPart(p, job.run, done, job.group, sums)[lane] = sum;
    }
  }
}

// The same for several rows.
template <typename Hot>
__device__ __forceinline__ void MultiplyHotRows(const Params& p, const Job& job, float* sums,
                                                int lane, Walk* walk) {
  RawWords<SegmentWords<Hot>(8)> raw;
  LoadWords(BytesOf(p, walk->place), lane, &raw);
  for (bool more = true; more;) {
    const Walk done = *walk;
    walk->Next(p);
    PrefetchPart(p, *walk, lane);
    float* to = SumsOfPart(p, job.run, done, job.group, sums) + lane;
    SumsInto<Hot>(&raw, job.rows, done.place.part, job.num_rows, to);
    more = IsHot<Hot>(p, job, *walk);
    if (more) LoadWords(BytesOf(p, walk->place), lane, &raw);
    if (p.mode == Mode::kWarps) {
      AddToPanel(p, done.place, to, to + kWarps * p.group_rows * 32, job.first_row, job.num_rows,
                 lane);
    }
  }
}

template <typename Hot>
__global__ void __launch_bounds__(kWarps * 32, 1) Kernel(const __grid_constant__ Params p) {
  STRATA_SHARED(unsigned char, shared);
  const int group = static_cast<int>(blockIdx.x);  // neighbours share weights
  const int number = static_cast<int>(blockIdx.y);
  const int lane = threadIdx.x % 32;
  const int first_row = group * p.group_rows;
  const float* x = p.x + static_cast<int64_t>(first_row) * p.width;
  const int num_live = min(*p.live, p.num_rows);
  const Run run = RunOf(p, number);
  Walk walk(p, run);
  PrefetchPart(p, walk, lane);
  WaitForKernelBefore();
  LetNextKernelBegin();
  const FirstQuads quads(x, p.quantised ? p.width : 0);
  ZeroDeadRows(p, first_row, num_live, number);
  if (first_row >= num_live) return;
  const QuantizedShared q = QuantizedAt(shared, p.group_rows, p.width);
  const Job job = {run,
                   group,
                   first_row,
                   min(p.group_rows, num_live - first_row),
                   {q.codes, q.scales, q.sums, x, p.width, nullptr, 0},
                   shared};
  StageGrids(p, shared);
  if (p.quantised) {
    quads.Quantize(x, job.num_rows, p.width, q);
    __syncthreads();
  }

  float* sums = reinterpret_cast<float*>(shared + p.sums_at);
  while (!walk.Done()) {
    if constexpr (!std::is_same_v<Hot, NoHot>) {
      if (IsHot<Hot>(p, job, walk)) {
        if constexpr (GridEntries(Hot::kType) == 0) {
          if (job.num_rows > 1) MultiplyHotRows<Hot>(p, job, sums, lane, &walk);
        }
        if (job.num_rows == 1) MultiplyHot<Hot>(p, job, sums, lane, &walk);
      }
      if (walk.Done()) break;
    }
    Walk next = walk;
    next.Next(p);
    PrefetchPart(p, next, lane);
    float* to = SumsOfPart(p, run, walk, group, sums) + lane;
    MultiplyPart(p, walk.place, lane, job.RowsFor(p.slices[walk.place.slice]), job.num_rows, to);
    if (p.mode == Mode::kWarps) {
      AddToPanel(p, walk.place, to, to + kWarps * p.group_rows * 32, first_row, job.num_rows, lane);
    }
    walk = next;
  }
  if (p.mode != Mode::kWarps) AddRun(p, run, group, sums, job.num_rows);
}

}  // namespace strata::matmul
