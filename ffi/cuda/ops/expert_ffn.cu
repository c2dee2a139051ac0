// Two kernels. An *entry* is one (row, expert) pair of the router, or a row's shared expert. The
// first kernel computes 32 hidden values of an entry in a block: one quantisation block of contract
// T, so it leaves them quantised. The second adds a row's entries in the router's order, 32 columns
// in a block, so no entry's row is ever written to memory.
//
// Where an expert lies is read from the table at run time: slots of the card, or page-locked memory
// of the host that the same loads reach over the link. A swap between two steps changes the table
// and nothing else.
#include <algorithm>

#include "cuda/numerics.cuh"
#include "cuda/ops/expert_ffn.h"
#include "cuda/products.cuh"

namespace strata {
namespace {

constexpr int kMostWarps = 16;

constexpr int64_t Padded(int64_t count) { return (count + 15) / 16 * 16; }

struct Params {
  const float* x;
  const int32_t* ids;
  const float* weights;
  const float* shared_weights;
  const int32_t* live;
  float* y;
  int8_t* codes;  // [entries, hidden]
  float* scales;  // [entries, hidden / 32]
  int16_t* sums;  // [entries, hidden / 16]
  float* hidden;  // [entries, hidden]
  const uint8_t* const* experts;
  uint32_t* usage;
  int64_t up_at, down_at;
  int32_t num_rows, num_active, width, hidden_width, routed_hidden, shared_hidden;
  int32_t grids_at;   // of the code books in the first kernel's shared memory: gate's, then up's
  int32_t hidden_at;  // of the quantised hidden rows in the second's
  int32_t down_grids_at;       // there, too: down's, then the shared expert's
  PanelMatrix gate, up, down;  // of routed experts; `bytes` unused
  PanelMatrix shared_gate, shared_up, shared_down;
};

// Entry e of a row: routed ones first, then the shared.
__device__ __forceinline__ int64_t EntryIndex(const Params& p, int64_t row, int e) {
  return row * (p.num_active + 1) + e;
}

__global__ void __launch_bounds__(kMostWarps * 32) GateUpKernel(const __grid_constant__ Params p) {
  STRATA_SHARED(unsigned char, shared);
  const int row = blockIdx.z;
  const int e = blockIdx.y;
  const int panel = blockIdx.x;
  if (row >= *p.live) return;
  const bool routed = e < p.num_active;
  if (panel * 32 >= (routed ? p.routed_hidden : p.shared_hidden)) return;
  const int lane = threadIdx.x % 32;
  const int warp = threadIdx.x / 32;
  const int warps = blockDim.x / 32;
  const uint8_t* gate_at = p.shared_gate.bytes;
  const uint8_t* up_at = p.shared_up.bytes;
  if (routed) {
    const int expert = p.ids[row * p.num_active + e];
    gate_at = p.experts[expert];
    up_at = gate_at + p.up_at;
    if (panel == 0 && threadIdx.x == 0) atomicAdd(p.usage + expert, 1u);
  }
  const PanelMatrix& gate = routed ? p.gate : p.shared_gate;
  const PanelMatrix& up = routed ? p.up : p.shared_up;
  const int segments = NumSegments(gate);
  for (int job = warp; job < 2 * segments; job += warps) {
    const PanelMatrix& m = job < segments ? gate : up;
    const int segment = job < segments ? job : job - segments;
    PrefetchUnit((job < segments ? gate_at : up_at) + panel * m.panel_bytes +
                     static_cast<int64_t>(segment) * m.unit_bytes,
                 m.unit_bytes, lane);
  }
  const float* x = p.x + static_cast<int64_t>(row) * p.width;
  const QuantizedShared q = QuantizedAt(shared, 1, p.width);
  if (gate.quantised || up.quantised) QuantizeRows(x, p.width, 1, p.width, q);
  const Rows rows = {q.codes, q.scales, q.sums, x, p.width, nullptr, 0};
  Rows gate_rows = rows, up_rows = rows;
  gate_rows.grid = reinterpret_cast<const uint32_t*>(shared + p.grids_at);
  gate_rows.grid_copies = StageGridOf(gate.type, shared + p.grids_at);
  up_rows.grid = gate_rows.grid;
  up_rows.grid_copies = gate_rows.grid_copies;
  if (up.type != gate.type) {
    unsigned char* up_grid = shared + p.grids_at + GridBytes(gate.type, GridCopies(gate.type));
    up_rows.grid = reinterpret_cast<const uint32_t*>(up_grid);
    up_rows.grid_copies = StageGridOf(up.type, up_grid);
  }
  __syncthreads();
  // [gate then up, segments, 32]
  float* sums = reinterpret_cast<float*>(shared + QuantizedBytes(1, p.width));
  for (int job = warp; job < 2 * segments; job += warps) {
    const bool is_gate = job < segments;
    float acc[kMostRows];
    acc[0] = 0.0f;  // lanes past the last row
    MultiplySegment(is_gate ? gate : up, is_gate ? gate_at : up_at, panel,
                    is_gate ? job : job - segments, is_gate ? gate_rows : up_rows, 1, lane, acc);
    sums[job * 32 + lane] = acc[0];
  }
  __syncthreads();
  if (warp != 0) return;
  float g = 0.0f, u = 0.0f;
  for (int s = 0; s < segments; ++s) g = __fadd_rn(g, sums[s * 32 + lane]);
  for (int s = 0; s < segments; ++s) u = __fadd_rn(u, sums[(segments + s) * 32 + lane]);
  const float h = SiluMul(g, u);
  const int64_t entry = EntryIndex(p, row, e);
  p.hidden[entry * p.hidden_width + panel * 32 + lane] = h;
  const int64_t block = entry * (p.hidden_width / 32) + panel;
  QuantizeBlockByWarp(h, lane, p.codes + block * 32, p.scales + block, p.sums + block * 2);
}

// The down matrix of an entry.
__device__ __forceinline__ const uint8_t* DownBytes(const Params& p, int row, int e) {
  if (e == p.num_active) return p.shared_down.bytes;
  return p.experts[p.ids[row * p.num_active + e]] + p.down_at;
}

template <typename T>
__device__ __forceinline__ void CopyToShared(const T* from, T* to, int count) {
  for (int i = threadIdx.x; i < count; i += blockDim.x) to[i] = from[i];
}

__global__ void __launch_bounds__(kMostWarps * 32) DownKernel(const __grid_constant__ Params p) {
  STRATA_SHARED(unsigned char, shared);
  const int row = blockIdx.y;
  const int panel = blockIdx.x;
  const int lane = threadIdx.x % 32;
  const int warp = threadIdx.x / 32;
  const int warps = blockDim.x / 32;
  const int column = panel * 32 + lane;
  if (row >= *p.live) {
    if (warp == 0 && column < p.width) p.y[static_cast<int64_t>(row) * p.width + column] = 0.0f;
    return;
  }
  const int entries = p.num_active + 1;
  const int most = (p.hidden_width + 255) / 256;   // segments of an entry
  float* sums = reinterpret_cast<float*>(shared);  // [entries, most, 32]
  unsigned char* grid = shared + p.down_grids_at;
  unsigned char* shared_grid = grid + GridBytes(p.down.type, GridCopies(p.down.type));
  for (int job = warp; job < entries * most; job += warps) {
    const int e = job / most;
    const int segment = job - e * most;
    const PanelMatrix& m = e < p.num_active ? p.down : p.shared_down;
    if (segment < NumSegments(m)) {
      PrefetchUnit(DownBytes(p, row, e) + panel * m.panel_bytes +
                       static_cast<int64_t>(segment) * m.unit_bytes,
                   m.unit_bytes, lane);
    }
  }
  const int copies = StageGridOf(p.down.type, grid);
  const int shared_copies = StageGridOf(p.shared_down.type, shared_grid);
  // The row's hidden values, as the first kernel left them.
  const QuantizedShared q = QuantizedAt(shared + p.hidden_at, entries, p.hidden_width);
  const int64_t first = EntryIndex(p, row, 0);
  const int count = entries * p.hidden_width;
  CopyToShared(p.codes + first * p.hidden_width, q.codes, count);
  CopyToShared(p.scales + first * (p.hidden_width / 32), q.scales, count / 32);
  CopyToShared(p.sums + first * (p.hidden_width / 16), q.sums, count / 16);
  __syncthreads();
  for (int job = warp; job < entries * most; job += warps) {
    const int e = job / most;
    const int segment = job - e * most;
    const bool routed = e < p.num_active;
    const PanelMatrix& m = routed ? p.down : p.shared_down;
    if (segment >= NumSegments(m)) continue;
    const Rows rows = {q.codes + e * p.hidden_width,
                       q.scales + e * (p.hidden_width / 32),
                       q.sums + e * (p.hidden_width / 16),
                       p.hidden + (first + e) * p.hidden_width,
                       p.hidden_width,
                       reinterpret_cast<const uint32_t*>(routed ? grid : shared_grid),
                       routed ? copies : shared_copies};
    float acc[kMostRows];
    MultiplySegment(m, DownBytes(p, row, e), panel, segment, rows, 1, lane, acc);
    sums[job * 32 + lane] = acc[0];
  }
  __syncthreads();
  if (warp != 0 || column >= p.width) return;
  float y = 0.0f;
  for (int e = 0; e < entries; ++e) {
    const bool routed = e < p.num_active;
    const int segments = NumSegments(routed ? p.down : p.shared_down);
    float total = 0.0f;
    for (int s = 0; s < segments; ++s) total = __fadd_rn(total, sums[(e * most + s) * 32 + lane]);
    const float weight = routed ? p.weights[row * p.num_active + e] : p.shared_weights[row];
    y = __fmaf_rn(weight, total, y);
  }
  p.y[static_cast<int64_t>(row) * p.width + column] = y;
}

}  // namespace

int64_t ExpertFfnWorkspace(int64_t num_rows, int64_t num_active, int64_t hidden) {
  const int64_t entries = num_rows * (num_active + 1);
  return entries * hidden * 4 + Padded(entries * (hidden / 32)) * 4 + entries * hidden +
         entries * (hidden / 16) * 2;
}

std::string ExpertFfn(const ExpertFfnArgs& a, cudaStream_t stream) {
  Params p = {};
  p.x = a.x;
  p.ids = a.ids;
  p.weights = a.weights;
  p.shared_weights = a.shared_weights;
  p.live = a.live;
  p.y = a.y;
  p.experts = a.experts;
  p.usage = a.usage;
  p.up_at = a.routed->up_at;
  p.down_at = a.routed->down_at;
  p.num_rows = static_cast<int32_t>(a.num_rows);
  p.num_active = static_cast<int32_t>(a.num_active);
  p.width = static_cast<int32_t>(a.width);
  p.routed_hidden = static_cast<int32_t>(a.routed->gate.rows);
  p.shared_hidden = static_cast<int32_t>(a.shared_gate->rows);
  p.hidden_width = std::max(p.routed_hidden, p.shared_hidden);
  p.gate = ViewOf(a.routed->gate);
  p.up = ViewOf(a.routed->up);
  p.down = ViewOf(a.routed->down);
  p.shared_gate = ViewOf(*a.shared_gate);
  p.shared_up = ViewOf(*a.shared_up);
  p.shared_down = ViewOf(*a.shared_down);
  const int64_t entries = a.num_rows * (a.num_active + 1);
  const int64_t hidden = p.hidden_width;
  p.hidden = reinterpret_cast<float*>(a.workspace);
  p.scales = p.hidden + entries * hidden;
  p.codes = reinterpret_cast<int8_t*>(p.scales + Padded(entries * (hidden / 32)));
  p.sums = reinterpret_cast<int16_t*>(p.codes + entries * hidden);
  const int64_t segments = (a.width + 255) / 256;
  Shape first;
  first.grid = dim3(static_cast<unsigned>(hidden / 32), static_cast<unsigned>(a.num_active + 1),
                    static_cast<unsigned>(a.num_rows));
  first.block = dim3(static_cast<unsigned>(32 * std::min<int64_t>(2 * segments, 10)));
  first.shared_bytes = QuantizedBytes(1, a.width) + static_cast<size_t>(2 * segments * 32 * 4);
  first.shared_bytes = (first.shared_bytes + 15) / 16 * 16;
  p.grids_at = static_cast<int32_t>(first.shared_bytes);
  first.shared_bytes += std::max(GridSharedBytes(a.routed->gate) + GridSharedBytes(a.routed->up),
                                 GridSharedBytes(*a.shared_gate) + GridSharedBytes(*a.shared_up));
  first.stream = stream;
  const int64_t jobs = (a.num_active + 1) * ((hidden + 255) / 256);
  Shape second;
  second.grid = dim3(static_cast<unsigned>((a.width + 31) / 32), static_cast<unsigned>(a.num_rows));
  second.block = dim3(static_cast<unsigned>(32 * std::min<int64_t>(jobs, kMostWarps)));
  second.shared_bytes = static_cast<size_t>(jobs * 32 * 4);
  p.hidden_at = static_cast<int32_t>(second.shared_bytes);
  second.shared_bytes += (QuantizedBytes(a.num_active + 1, hidden) + 15) / 16 * 16;
  p.down_grids_at = static_cast<int32_t>(second.shared_bytes);
  second.shared_bytes += GridSharedBytes(a.routed->down) + GridSharedBytes(*a.shared_down);
  second.stream = stream;
  const std::string error = Launch(GateUpKernel, first, p);
  if (!error.empty()) return error;
  return Launch(DownKernel, second, p);
}

}  // namespace strata
