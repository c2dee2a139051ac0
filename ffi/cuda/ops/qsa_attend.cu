#include <algorithm>

#include "cuda/ops/qsa_attend.h"
#include "cuda/ops/qsa_attend_combine.cuh"
#include "cuda/ops/qsa_attend_parts.cuh"
#include "cuda/ops/qsa_attend_tiles.h"

namespace strata {
namespace attend {
namespace {

// Two for each multiprocessor of an H200; where there are more parts than this, each thread block
// takes several, and dead rows cost no thread block at all.
constexpr int kMostBlocks = 264;
constexpr int64_t kRowsAtOnce = 16;

// How the work on rows is cut: slots; then key heads and groups of their query heads.
struct Cut {
  int slots;
  int tiles;   // of the longest list
  int groups;  // of a key head's query heads
  int parts;   // of a row
};

Cut CutOf(int64_t num_cells, int64_t num_blocks, int64_t ratio, int group_heads, int kv_heads) {
  const int64_t most = ratio > 0 ? std::min(num_blocks * ratio + ratio - 1, num_cells) : num_cells;
  constexpr int kMostHeads = kHeadStep * kMostHeadSteps;
  Cut cut;
  cut.tiles = std::max(1, static_cast<int>((most + kAttendTile - 1) / kAttendTile));
  cut.slots = std::min(cut.tiles, kAttendSlots);
  cut.groups = (group_heads + kMostHeads - 1) / kMostHeads;
  cut.parts = cut.slots * kv_heads * cut.groups;
  return cut;
}

__device__ Part PartAt(const QsaAttendArgs& a, const Cut& cut, int item) {
  const int all = a.num_heads / a.num_kv_heads;
  const int each = (all + cut.groups - 1) / cut.groups;
  Part part;
  part.slot = item % cut.slots;
  item /= cut.slots;
  const int first = item % cut.groups * each;
  item /= cut.groups;
  part.kv_head = item % a.num_kv_heads;
  part.row = item / a.num_kv_heads;
  part.head = part.kv_head * all + first;
  part.heads = min(all - first, each);
  return part;
}

// cells [kAttendTile] <- those of a tile of the row's list.
__device__ __forceinline__ void FetchCells(const QsaAttendArgs& a, const Part& part, int first_row,
                                           int tile, int* cells) {
  if (threadIdx.x >= kAttendTile) return;
  const int t = first_row + part.row, index = tile * kAttendTile + threadIdx.x;
  const int pos = *a.pos;
  const Entry entry = EntryAt(a, a.blocks + static_cast<int64_t>(t) * a.num_blocks, index);
  cells[threadIdx.x] = CellOf(a, entry, min(pos + t + 1, a.num_cells), index);
}

// The cells of a part's first tile, and q [kHeads, C] <- its queries, zeros behind them. The loads
// of both are under way before one is waited for.
template <int kSteps>
__device__ __forceinline__ void StartPart(const QsaAttendArgs& a, const Part& part, int first_row,
                                          float* q, AttendShared<kSteps>& shared) {
  constexpr int kHeads = kHeadStep * kSteps;
  constexpr int kVectors = (kHeads * kMostAttendDim / 4 + kAttendThreads - 1) / kAttendThreads;
  const int64_t t = first_row + part.row;
  const float* from = a.q + (t * a.num_heads + part.head) * a.head_dim;
  float4 query[kVectors];
#pragma unroll
  for (int n = 0; n < kVectors; ++n) {
    const int i = 4 * (threadIdx.x + n * kAttendThreads);
    query[n] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    if (i < part.heads * a.head_dim) query[n] = __ldg(reinterpret_cast<const float4*>(from + i));
  }
  FetchCells(a, part, first_row, part.slot, shared.cells);
#pragma unroll
  for (int n = 0; n < kVectors; ++n) {
    const int i = 4 * (threadIdx.x + n * kAttendThreads);
    if (i < kHeads * a.head_dim) *reinterpret_cast<float4*>(q + i) = query[n];
  }
}

// The slot's tiles in ascending order. All loads of a tile are under way before the first sum;
// shared.cells has the first tile's. `q` has the queries, and behind them room for half of the
// sums.
template <typename Stored, int kSteps>
__device__ __forceinline__ void AttendSlot(const QsaAttendArgs& a, const Cut& cut, int first_row,
                                           float* q, AttendShared<kSteps>& shared, float* sums,
                                           float2* stats) {
  const int thread = threadIdx.x, dim = a.head_dim;
  const Part& part = shared.part;
  const int first_value = thread / kAttendPairs * kValueCells;
  bool first_tile = true;
  for (int tile = part.slot; tile < cut.tiles; tile += kAttendSlots) {
    if (!first_tile) {
      FetchCells(a, part, first_row, tile, shared.cells);
      __syncthreads();
    }
    if (shared.cells[0] < 0) break;
    LoadedKeys<Stored> key;
    LoadedValues<Stored> value;
    LoadKeys(a, part.kv_head, shared.cells + thread / 32 * kKeyCells, key);
    LoadValues(a, part.kv_head, shared.cells + first_value, value);
    Score<Stored, kSteps>(key, q, dim, shared);
    __syncthreads();
    Softmax<kSteps>(1.0f / sqrtf(static_cast<float>(dim)), first_tile, shared);
    __syncthreads();
    float2 sum[kHeadStep * kSteps] = {};
    AddValues<Stored, kSteps>(value, first_value, shared, sum);
    const int64_t slot = static_cast<int64_t>(part.row) * cut.slots + part.slot;
    WriteSums<kSteps>(sum, dim, first_tile, sums + (slot * a.num_heads + part.head) * dim,
                      reinterpret_cast<float2*>(q + kHeadStep * kSteps * kMostAttendDim), shared);
    first_tile = false;
    __syncthreads();
  }
  if (thread < part.heads) {
    const int64_t slot = static_cast<int64_t>(part.row) * cut.slots + part.slot;
    stats[slot * a.num_heads + part.head + thread] =
        first_tile ? make_float2(-INFINITY, 0.0f)
                   : make_float2(shared.top[thread], shared.total[thread]);
  }
}

template <typename Stored, int kSteps>
__global__ void __launch_bounds__(kAttendThreads, 2)
    AttendKernel(const __grid_constant__ QsaAttendArgs a, const __grid_constant__ Cut cut,
                 float* sums, float2* stats, int first_row, int num_rows) {
  STRATA_SHARED(float, q);
  __shared__ AttendShared<kSteps> shared;
  // Between parts the loop's numbers wait in shared memory: the tiles need every register.
  const int live_rows = min(num_rows, *a.live - first_row);
  int item = blockIdx.x, items = 0;
  do {
    const Part part = PartAt(a, cut, item);
    StartPart(a, part, first_row, q, shared);  // before `live` is waited for
    if (part.row >= live_rows) return;
    if (threadIdx.x == 0) {
      shared.part = part;
      shared.next = item + static_cast<int>(gridDim.x);
      shared.items = live_rows * cut.parts;
    }
    __syncthreads();
    AttendSlot<Stored, kSteps>(a, cut, first_row, q, shared, sums, stats);
    item = shared.next;
    items = shared.items;
    __syncthreads();
  } while (item < items);
}

template <typename Stored, int kSteps>
std::string AttendRows(const QsaAttendArgs& args, const Cut& cut, int first, int rows, float* sums,
                       float2* stats, cudaStream_t stream) {
  Shape shape;
  shape.grid = dim3(static_cast<unsigned>(std::min(rows * cut.parts, kMostBlocks)));
  shape.block = dim3(kAttendThreads);
  shape.shared_bytes = sizeof(float) * 2 * kHeadStep * kSteps * kMostAttendDim;
  shape.stream = stream;
  return Launch(AttendKernel<Stored, kSteps>, shape, args, cut, sums, stats, first, rows);
}

template <typename Stored>
std::string AttendHeads(const QsaAttendArgs& args, const Cut& cut, int heads, int first, int rows,
                        float* sums, float2* stats, cudaStream_t stream) {
  switch ((heads + kHeadStep - 1) / kHeadStep) {
    case 1:
      return AttendRows<Stored, 1>(args, cut, first, rows, sums, stats, stream);
    case 2:
      return AttendRows<Stored, 2>(args, cut, first, rows, sums, stats, stream);
    default:
      return AttendRows<Stored, 3>(args, cut, first, rows, sums, stats, stream);
  }
}

// One pair of launches, for rows first..first+rows-1.
std::string Attend(const QsaAttendArgs& args, int first, int rows, cudaStream_t stream) {
  const int group_heads = args.num_heads / args.num_kv_heads;
  const Cut cut =
      CutOf(args.num_cells, args.num_blocks, args.ratio, group_heads, args.num_kv_heads);
  float* sums = args.workspace;
  float2* stats = reinterpret_cast<float2*>(sums + static_cast<int64_t>(args.rows_at_once) *
                                                       cut.slots * args.num_heads * args.head_dim);
  const int heads = (group_heads + cut.groups - 1) / cut.groups;
  std::string error;
  switch (args.cells.type) {
    case CellType::kFloat32:
      error = AttendHeads<Float32Cells>(args, cut, heads, first, rows, sums, stats, stream);
      break;
    case CellType::kFloat16:
      error = AttendHeads<Float16Cells>(args, cut, heads, first, rows, sums, stats, stream);
      break;
    default:
      error = AttendHeads<Int8Cells>(args, cut, heads, first, rows, sums, stats, stream);
  }
  if (!error.empty()) return error;
  Shape shape;
  shape.grid = dim3(static_cast<unsigned>((args.head_dim + kCombineColumns - 1) / kCombineColumns),
                    static_cast<unsigned>(args.num_heads), static_cast<unsigned>(rows));
  shape.block = dim3(kCombineThreads);
  shape.stream = stream;
  return Launch(CombineKernel, shape, args, sums, stats, cut.slots, first);
}

}  // namespace
}  // namespace attend

int64_t QsaAttendRowFloats(int64_t num_heads, int64_t head_dim, int64_t num_cells,
                           int64_t num_blocks, int64_t ratio) {
  return attend::CutOf(num_cells, num_blocks, ratio, 1, 1).slots * num_heads * (head_dim + 2);
}

int64_t QsaAttendWorkspace(int64_t num_rows, int64_t num_heads, int64_t head_dim, int64_t num_cells,
                           int64_t num_blocks, int64_t ratio) {
  return std::min(num_rows, attend::kRowsAtOnce) * static_cast<int64_t>(sizeof(float)) *
         QsaAttendRowFloats(num_heads, head_dim, num_cells, num_blocks, ratio);
}

std::string QsaAttend(const QsaAttendArgs& args, cudaStream_t stream) {
  if (QsaAttendTilesApply(args)) return QsaAttendTiles(args, stream);
  std::string error;
  for (int first = 0; first < args.num_rows && error.empty(); first += args.rows_at_once) {
    error = attend::Attend(args, first, std::min(args.rows_at_once, args.num_rows - first), stream);
  }
  return error;
}

}  // namespace strata
