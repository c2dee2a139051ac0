#include <algorithm>

#include "cuda/ops/quant_matmul.h"
#include "cuda/products.cuh"

namespace strata {
namespace {

constexpr int kMostWarps = 16;
constexpr int64_t kTargetBlocks = 264;  // two for each multiprocessor of the largest cards
constexpr int kMostPanels = 1 << 16;    // counters of arrivals

struct Slice {
  PanelMatrix matrix;
  int32_t first_panel;  // of the launch
  int32_t column;       // of the result
};

struct Params {
  Slice slices[kMostMatrices];
  int32_t num_slices;
  const float* x;
  const int32_t* live;
  float* y;
  float* workspace;  // [groups, panels, segments, group_rows, 32] where splits > 1
  int32_t num_rows;
  int32_t width;
  int32_t num_columns;
  int32_t num_panels;
  int32_t group_rows;  // activation rows a block serves, at most kMostRows
  int32_t splits;      // blocks that share the segments of a panel
  int32_t segments;
  int32_t grid_at;  // of the code book in shared memory
};

// How many blocks of a panel have left their sums. A launch leaves zeros behind, and all launches
// of a device are on its one compute stream, so no two of them count at once.
__device__ unsigned arrivals[kMostPanels];

__device__ __forceinline__ const Slice& FindSlice(const Params& p, int panel) {
  int i = 0;
  while (i + 1 < p.num_slices && panel >= p.slices[i + 1].first_panel) ++i;
  return p.slices[i];
}

// Adds the segments' sums in order and writes the panel's columns. `sums` is [segments, group_rows,
// 32]; where other blocks wrote some of it, it is read past the first-level cache.
__device__ __forceinline__ void WriteColumns(const Params& p, const Slice& slice, int panel,
                                             const float* sums, int first_row, int num_rows) {
  for (int i = threadIdx.x; i < num_rows * 32; i += blockDim.x) {
    const int lane = i % 32;
    const int r = i / 32;
    const int row = (panel - slice.first_panel) * 32 + lane;
    if (row >= slice.matrix.rows) continue;
    float total = 0.0f;
    for (int s = 0; s < p.segments; ++s) {
      const float* sum = sums + (s * p.group_rows + r) * 32 + lane;
      total = __fadd_rn(total, p.splits > 1 ? __ldcg(sum) : *sum);
    }
    p.y[static_cast<int64_t>(first_row + r) * p.num_columns + slice.column + row] = total;
  }
}

__device__ __forceinline__ void ZeroDeadRows(const Params& p, int first_row, int num_live) {
  const int first = max(first_row, num_live);
  const int last = min(first_row + p.group_rows, p.num_rows);
  const int64_t begin = static_cast<int64_t>(first) * p.num_columns;
  const int64_t end = static_cast<int64_t>(last) * p.num_columns;
  const int64_t step = static_cast<int64_t>(gridDim.x) * blockDim.x;
  for (int64_t i = begin + static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x; i < end;
       i += step) {
    p.y[i] = 0.0f;
  }
}

__global__ void __launch_bounds__(kMostWarps * 32)
    QuantMatmulKernel(const __grid_constant__ Params p) {
  STRATA_SHARED(unsigned char, shared);
  __shared__ bool last_to_arrive;
  const int panel = blockIdx.x / p.splits;
  const int split = blockIdx.x % p.splits;
  const Slice& slice = FindSlice(p, panel);
  const PanelMatrix& m = slice.matrix;
  const int lane = threadIdx.x % 32;
  const int warp = threadIdx.x / 32;
  const int warps = blockDim.x / 32;
  const int own_panel = panel - slice.first_panel;
  const int per_split = (p.segments + p.splits - 1) / p.splits;
  const int first_segment = split * per_split;
  const int end_segment = min(first_segment + per_split, p.segments);
  const uint8_t* panel_at = m.bytes + own_panel * m.panel_bytes;
  for (int s = first_segment + warp; s < end_segment; s += warps) {
    PrefetchUnit(panel_at + static_cast<int64_t>(s) * m.unit_bytes, m.unit_bytes, lane);
  }
  const int first_row = blockIdx.y * p.group_rows;
  const int num_live = *p.live;
  ZeroDeadRows(p, first_row, num_live);
  if (first_row >= num_live) return;
  const int num_rows = min(p.group_rows, num_live - first_row);
  const float* x = p.x + static_cast<int64_t>(first_row) * p.width;
  const QuantizedShared q = QuantizedAt(shared, p.group_rows, p.width);
  const int copies = StageGridOf(m.type, shared + p.grid_at);
  if (m.quantised) QuantizeRows(x, p.width, num_rows, p.width, q);  // ends with a barrier
  const Rows rows = {q.codes, q.scales, q.sums,
                     x,       p.width,  reinterpret_cast<const uint32_t*>(shared + p.grid_at),
                     copies};

  // [segments, group_rows, 32]
  float* local = reinterpret_cast<float*>(shared + QuantizedBytes(p.group_rows, p.width));
  float* sums = local;
  if (p.splits > 1) {
    sums = p.workspace + (static_cast<int64_t>(blockIdx.y) * p.num_panels + panel) * p.segments *
                             p.group_rows * 32;
  }
  for (int s = first_segment + warp; s < end_segment; s += warps) {
    float acc[kMostRows];
    MultiplySegment(m, m.bytes, own_panel, s, rows, num_rows, lane, acc);
    for (int r = 0; r < num_rows; ++r) sums[(s * p.group_rows + r) * 32 + lane] = acc[r];
  }
  if (p.splits > 1) {
    __threadfence();
    __syncthreads();
    if (threadIdx.x == 0) {
      unsigned* counter = arrivals + (blockIdx.y * p.num_panels + panel) % kMostPanels;
      const unsigned before = atomicAdd(counter, 1u);
      last_to_arrive = before + 1 == static_cast<unsigned>(p.splits);
      if (last_to_arrive) *counter = 0;
    }
    __syncthreads();
    if (!last_to_arrive) return;
    __threadfence();
  } else {
    __syncthreads();
  }
  WriteColumns(p, slice, panel, sums, first_row, num_rows);
}

int GroupRows(int64_t num_rows, int64_t width) {
  int64_t rows = std::min<int64_t>(num_rows, kMostRows);
  while (rows > 1 && QuantizedBytes(rows, width) > 64 * 1024) rows = (rows + 1) / 2;
  return static_cast<int>(rows);
}

// How a launch is cut: activation rows of a group, panels, and blocks for each panel.
struct Cut {
  int64_t group_rows, groups, panels, segments, splits;
};

Cut CutOf(int64_t num_rows, const std::vector<const DeviceMatrix*>& matrices) {
  Cut cut = {};
  const int64_t width = matrices.front()->cols;
  cut.group_rows = GroupRows(num_rows, width);
  cut.groups = (num_rows + cut.group_rows - 1) / cut.group_rows;
  for (const DeviceMatrix* matrix : matrices) cut.panels += matrix->panels();
  cut.segments = (width + 255) / 256;
  cut.splits = 1;
  if (cut.groups * cut.panels <= kMostPanels) {
    const int64_t wanted = std::min(cut.segments, (kTargetBlocks + cut.panels - 1) / cut.panels);
    const int64_t per_split = (cut.segments + wanted - 1) / wanted;
    cut.splits = (cut.segments + per_split - 1) / per_split;
  }
  return cut;
}

}  // namespace

int64_t QuantMatmulWorkspace(int64_t num_rows, const std::vector<const DeviceMatrix*>& matrices) {
  const Cut cut = CutOf(num_rows, matrices);
  if (cut.splits == 1) return 1;
  return cut.groups * cut.panels * cut.segments * cut.group_rows * 32;
}

std::string QuantMatmul(const QuantMatmulArgs& args, cudaStream_t stream) {
  const Cut cut = CutOf(args.num_rows, args.matrices);
  Params p = {};
  int64_t column = 0, panels = 0;
  size_t grid_bytes = 0;
  for (const DeviceMatrix* matrix : args.matrices) {
    grid_bytes = std::max(grid_bytes, GridSharedBytes(*matrix));
    Slice& slice = p.slices[p.num_slices++];
    slice.matrix = ViewOf(*matrix);
    slice.first_panel = static_cast<int32_t>(panels);
    slice.column = static_cast<int32_t>(column);
    panels += matrix->panels();
    column += matrix->rows;
  }
  p.x = args.x;
  p.live = args.live;
  p.y = args.y;
  p.workspace = args.workspace;
  p.num_rows = static_cast<int32_t>(args.num_rows);
  p.width = static_cast<int32_t>(args.width);
  p.num_columns = static_cast<int32_t>(column);
  p.num_panels = static_cast<int32_t>(panels);
  p.group_rows = static_cast<int32_t>(cut.group_rows);
  p.segments = static_cast<int32_t>(cut.segments);
  p.splits = static_cast<int32_t>(cut.splits);
  const int64_t per_split = (cut.segments + cut.splits - 1) / cut.splits;
  Shape launch;
  launch.grid = dim3(static_cast<unsigned>(panels * cut.splits), static_cast<unsigned>(cut.groups));
  launch.block = dim3(32 * static_cast<unsigned>(std::min<int64_t>(per_split, kMostWarps)));
  launch.shared_bytes = QuantizedBytes(cut.group_rows, args.width);
  if (cut.splits == 1) {
    launch.shared_bytes += static_cast<size_t>(cut.segments * cut.group_rows * 32 * 4);
  }
  launch.shared_bytes = (launch.shared_bytes + 15) / 16 * 16;
  p.grid_at = static_cast<int32_t>(launch.shared_bytes);
  launch.shared_bytes += grid_bytes;
  launch.stream = stream;
  return Launch(QuantMatmulKernel, launch, p);
}

}  // namespace strata
