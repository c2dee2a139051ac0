// The kernels of expert_ffn for any type: products by a call, a block for each item, and nothing
// known of it when it is compiled.
#pragma once

#include "cuda/ops/expert_ffn_doors.cuh"
#include "cuda/ops/expert_ffn_mailbox.cuh"
#include "cuda/ops/expert_ffn_parts.cuh"

namespace strata {

inline constexpr int kMostWarps = 16;

template <bool kDoors>
__global__ void __launch_bounds__(kMostWarps * 32)
    GateUpKernel(const __grid_constant__ FfnParams p) {
  STRATA_SHARED(unsigned char, shared);
  WaitForKernelBefore();
  LetNextKernelBegin();
  const int row = blockIdx.z;
  const int e = blockIdx.y;
  const int panel = blockIdx.x;
  if constexpr (kDoors) {
    const bool first = panel == 0 && e == 0 && row == 0;
    if (first && p.mailbox.box != nullptr) Ring(p);
  }
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
    const bool counts = panel == 0 && threadIdx.x == 0;
    uint64_t word = 0;
    if constexpr (kDoors) {
      const int id = lane < p.num_active ? p.ids[row * p.num_active + lane] : 0;
      const RowHomes homes = HomesOf(p, id, lane);
      word = FromLane(homes.word, e);
      if (counts) CountEntry(p, homes, e, expert, word);
      if (homes.Away(e)) return;
      if ((word & kLinked) != 0) LetLetterPass(p);
    } else {
      word = p.experts[expert];
      if (counts) atomicAdd(p.usage + expert, 1u);
    }
    gate_at = PanelsOf(word);
    up_at = gate_at + p.up_at;
  } else if (kDoors && p.rows != nullptr) {
    return;
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
  WriteHidden(p, sums, segments, row, e, panel, lane);
}

// The down matrix of an entry.
__device__ __forceinline__ const uint8_t* DownBytes(const FfnParams& p, int row, int e) {
  if (e == p.num_active) return p.shared_down.bytes;
  return PanelsOf(p.experts[p.ids[row * p.num_active + e]]) + p.down_at;
}

template <typename T>
__device__ __forceinline__ void CopyToShared(const T* from, T* to, int count) {
  for (int i = threadIdx.x; i < count; i += blockDim.x) to[i] = from[i];
}

// One column of a row's entries: the weighted sum in the router's order, or each as it is.
template <bool kDoors>
__device__ __forceinline__ void WriteColumn(const FfnParams& p, const RowHomes& homes,
                                            const float* sums, int most, int row, int column) {
  const int lane = threadIdx.x % 32;
  float y = 0.0f;
  for (int e = 0; e <= p.num_active; ++e) {
    const bool routed = e < p.num_active;
    const int segments = NumSegments(routed ? p.down : p.shared_down);
    float total = 0.0f;
    if (kDoors && routed && homes.Away(e)) {
      total = sums[e * most * 32 + lane];
    } else if (!kDoors || routed || p.rows == nullptr) {
      for (int s = 0; s < segments; ++s) total = __fadd_rn(total, sums[(e * most + s) * 32 + lane]);
    }
    if (kDoors && p.rows != nullptr) {
      const int64_t entry = static_cast<int64_t>(row) * p.num_active + e;
      if (routed && !homes.Away(e)) p.rows[entry * p.width + column] = total;
      continue;
    }
    const float weight = routed ? p.weights[row * p.num_active + e] : p.shared_weights[row];
    y = __fmaf_rn(weight, total, y);
  }
  if (!kDoors || p.rows == nullptr) p.y[static_cast<int64_t>(row) * p.width + column] = y;
}

template <bool kDoors>
__global__ void __launch_bounds__(kMostWarps * 32) DownKernel(const __grid_constant__ FfnParams p) {
  STRATA_SHARED(unsigned char, shared);
  WaitForKernelBefore();
  LetNextKernelBegin();
  const int row = blockIdx.y;
  const int panel = blockIdx.x;
  const int lane = threadIdx.x % 32;
  const int warp = threadIdx.x / 32;
  const int warps = blockDim.x / 32;
  const int column = panel * 32 + lane;
  if (kDoors && row == 0 && panel == 0) {
    TakeWords(p.latch, threadIdx.x, blockDim.x);
    if (threadIdx.x == 0) ForgetLetter(p);
  }
  bool looked = false;
  if (row >= *p.live) {
    if (warp == 0 && column < p.width && p.y != nullptr) {
      p.y[static_cast<int64_t>(row) * p.width + column] = 0.0f;
    }
    return;
  }
  RowHomes homes = {};
  if constexpr (kDoors) {
    homes = HomesOf(p, lane < p.num_active ? p.ids[row * p.num_active + lane] : 0, lane);
  }
  const auto skips = [&](int e) {
    return kDoors && (e < p.num_active ? homes.Away(e) : p.rows != nullptr);
  };
  const int entries = p.num_active + 1;
  const int most = (p.hidden_width + 255) / 256;   // segments of an entry
  float* sums = reinterpret_cast<float*>(shared);  // [entries, most, 32]
  unsigned char* grid = shared + p.down_grids_at;
  unsigned char* shared_grid = grid + GridBytes(p.down.type, GridCopies(p.down.type));
  for (int job = warp; job < entries * most; job += warps) {
    const int e = job / most;
    const int segment = job - e * most;
    const PanelMatrix& m = e < p.num_active ? p.down : p.shared_down;
    if (segment < NumSegments(m) && !skips(e)) {
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
  CopyToShared(reinterpret_cast<const uint4*>(p.codes + first * p.hidden_width),
               reinterpret_cast<uint4*>(q.codes), count / 16);
  CopyToShared(p.scales + first * (p.hidden_width / 32), q.scales, count / 32);
  CopyToShared(reinterpret_cast<const int*>(p.sums + first * (p.hidden_width / 16)),
               reinterpret_cast<int*>(q.sums), count / 32);
  __syncthreads();
  for (int job = warp; job < entries * most; job += warps) {
    const int e = job / most;
    const int segment = job - e * most;
    const bool routed = e < p.num_active;
    const PanelMatrix& m = routed ? p.down : p.shared_down;
    if (segment >= NumSegments(m) || skips(e)) continue;
    const Rows rows = {q.codes + e * p.hidden_width,
                       q.scales + e * (p.hidden_width / 32),
                       q.sums + e * (p.hidden_width / 16),
                       p.hidden == nullptr ? nullptr : p.hidden + (first + e) * p.hidden_width,
                       p.hidden_width,
                       reinterpret_cast<const uint32_t*>(routed ? grid : shared_grid),
                       routed ? copies : shared_copies};
    float acc[kMostRows];
    MultiplySegment(m, DownBytes(p, row, e), panel, segment, rows, 1, lane, acc);
    sums[job * 32 + lane] = acc[0];
  }
  if constexpr (kDoors) {
    const float* host_rows = nullptr;
    const bool first = row == 0 && panel == 0;
    if (homes.host != 0 || (first && p.mailbox.box != nullptr)) {
      AwaitRows(p, first, &looked);
      host_rows = HostRows(p);
    }
    for (int e = warp; e < p.num_active; e += warps) {
      if (!homes.Away(e) || p.rows != nullptr || column >= p.width) continue;
      sums[e * most * 32 + lane] = RemoteValue(p, homes, row, e, column, host_rows);
    }
  }
  __syncthreads();
  if (warp == 0 && column < p.width) WriteColumn<kDoors>(p, homes, sums, most, row, column);
}

}  // namespace strata
