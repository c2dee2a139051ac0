// Entries are sorted by expert, rows quantised once; hidden values of all entries, quantised, go to
// the workspace in the groups' order. Then, a slice of columns at a time so that the workspace
// stays small, every entry's row is computed by the down matrices and each activation row's are
// added in the router's order, the shared expert's last.
#include <algorithm>

#include "cuda/ops/expert_ffn_tiles.h"
#include "cuda/ops/expert_tile_launch.h"
#include "cuda/reduce.cuh"

namespace strata {
namespace {

using expert_tiles::ExpertTile;
using expert_tiles::Groups;
using expert_tiles::kColumns;
using expert_tiles::kTileRows;
using expert_tiles::TileParams;
using tiles::QuantizedRows;
using tiles::RoundUp;

constexpr int64_t kMostSums = int64_t{64} << 20;  // bytes of all entries' rows of a slice
constexpr int kCombineThreads = 128;

int64_t CeilDiv(int64_t a, int64_t b) { return (a + b - 1) / b; }

// Columns that are computed at once.
int64_t SliceOf(int64_t entries, int64_t width) {
  const int64_t slices =
      CeilDiv(width, std::max<int64_t>(kMostSums / 4 / entries / kColumns, 1) * kColumns);
  return RoundUp(CeilDiv(width, slices), kColumns);
}

// The workspace's parts, each 16-byte aligned.
struct Layout {
  int64_t order, starts, counts, tiles, num_tiles, in, hidden, sums, bytes;

  Layout(int64_t num_rows, int64_t num_active, int64_t num_experts, int64_t width,
         int64_t hidden_width) {
    const int64_t entries = num_rows * num_active;
    int64_t at = 0;
    const auto take = [&](int64_t size) {
      const int64_t begin = at;
      at += RoundUp(size, 128);
      return begin;
    };
    order = take(4 * entries);
    starts = take(4 * num_experts);
    counts = take(4 * num_experts);
    tiles = take(static_cast<int64_t>(sizeof(ExpertTile)) *
                 expert_tiles::MostTiles(entries, num_experts));
    num_tiles = take(4);
    in = take(QuantizedRows::Bytes(num_rows, width));
    hidden = take(QuantizedRows::Bytes(entries + num_rows, hidden_width));
    sums = take(4 * (entries + num_rows) * SliceOf(entries + num_rows, width));
    bytes = at;
  }
};

struct CombineParams {
  const float* sums;
  const float* weights;
  const float* shared_weights;
  const int32_t* live;
  float* y;
  int32_t num_rows, num_active, width;
  int32_t first_column, slice;
};

// Four columns of a row a thread.
__global__ void __launch_bounds__(kCombineThreads)
    CombineKernel(const __grid_constant__ CombineParams p) {
  const int row = blockIdx.x;
  const int at = (blockIdx.y * kCombineThreads + threadIdx.x) * 4;
  if (at >= p.slice || p.first_column + at >= p.width) return;
  float4 y = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
  if (row < LiveRows(*p.live, p.num_rows)) {
    for (int e = 0; e <= p.num_active; ++e) {
      const bool routed = e < p.num_active;
      const int64_t entry = routed ? static_cast<int64_t>(row) * p.num_active + e
                                   : static_cast<int64_t>(p.num_rows) * p.num_active + row;
      const float weight = routed ? p.weights[row * p.num_active + e] : p.shared_weights[row];
      const float4 sum = *reinterpret_cast<const float4*>(p.sums + entry * p.slice + at);
      y.x = __fmaf_rn(weight, sum.x, y.x);
      y.y = __fmaf_rn(weight, sum.y, y.y);
      y.z = __fmaf_rn(weight, sum.z, y.z);
      y.w = __fmaf_rn(weight, sum.w, y.w);
    }
  }
  float* to = p.y + row * static_cast<int64_t>(p.width) + p.first_column + at;
  *reinterpret_cast<float4*>(to) = y;
}

std::string LaunchCombine(const ExpertFfnArgs& a, const TileParams& down, cudaStream_t stream) {
  const CombineParams p = {down.sums,
                           a.weights,
                           a.shared_weights,
                           a.live,
                           a.y,
                           down.num_rows,
                           down.num_active,
                           static_cast<int32_t>(a.width),
                           down.first_column,
                           down.slice};
  Shape shape;
  shape.grid = dim3(static_cast<unsigned>(a.num_rows),
                    static_cast<unsigned>(CeilDiv(p.slice, 4 * kCombineThreads)));
  shape.block = dim3(kCombineThreads);
  shape.stream = stream;
  return Launch(CombineKernel, shape, p);
}

// A launch's experts: the routed ones, or the shared one.
TileParams Routed(TileParams p, const ExpertFfnArgs& a, bool down) {
  p.experts = a.experts;
  p.first = ViewOf(down ? a.routed->down : a.routed->gate);
  p.first_at = down ? a.routed->down_at : 0;
  p.second = ViewOf(a.routed->up);
  p.second_at = a.routed->up_at;
  return p;
}

TileParams Shared(TileParams p, const ExpertFfnArgs& a, bool down) {
  p.experts = nullptr;
  p.first = ViewOf(down ? *a.shared_down : *a.shared_gate);
  p.second = ViewOf(*a.shared_up);
  return p;
}

int64_t HiddenOf(const ExpertFfnArgs& a) {
  return std::max(a.routed->gate.rows, a.shared_gate->rows);
}

}  // namespace

bool HasExpertTiles(const ExpertFfnArgs& a) {
  return a.routed->gate.quantised() && a.routed->up.quantised() && a.routed->down.quantised() &&
         a.shared_gate->quantised() && a.shared_up->quantised() && a.shared_down->quantised();
}

int64_t ExpertFfnTilesWorkspace(int64_t num_rows, int64_t num_active, int64_t num_experts,
                                int64_t width, int64_t hidden) {
  return Layout(num_rows, num_active, num_experts, width, hidden).bytes;
}

std::string ExpertFfnTiles(const ExpertFfnArgs& a, cudaStream_t stream) {
  const int64_t entries = a.num_rows * a.num_active;
  const int64_t hidden = HiddenOf(a);
  const Layout at(a.num_rows, a.num_active, a.num_experts, a.width, hidden);
  TileParams p = {};
  p.groups.order = reinterpret_cast<int32_t*>(a.workspace + at.order);
  p.groups.starts = reinterpret_cast<int32_t*>(a.workspace + at.starts);
  p.groups.counts = reinterpret_cast<int32_t*>(a.workspace + at.counts);
  p.groups.tiles = reinterpret_cast<ExpertTile*>(a.workspace + at.tiles);
  p.groups.num_tiles = reinterpret_cast<int32_t*>(a.workspace + at.num_tiles);
  p.live = a.live;
  p.num_rows = static_cast<int32_t>(a.num_rows);
  p.num_active = static_cast<int32_t>(a.num_active);
  p.shared_first = static_cast<int32_t>(entries);
  p.in = QuantizedRows::At(a.workspace + at.in, a.num_rows, a.width);
  p.out = QuantizedRows::At(a.workspace + at.hidden, entries + a.num_rows, hidden);
  const int64_t tiles = expert_tiles::MostTiles(entries, a.num_experts);
  const int64_t shared_tiles = CeilDiv(a.num_rows, kTileRows);

  std::string error = tiles::QuantizeTileRows(a.x, a.live, a.num_rows, a.width, p.in, stream);
  if (error.empty()) {
    error = expert_tiles::GroupEntries(a.ids, a.live, a.num_rows, a.num_active, a.num_experts,
                                       p.groups, {a.usage, a.homes, a.experts}, stream);
  }
  if (error.empty()) error = expert_tiles::LaunchGateUp(Routed(p, a, false), tiles, stream);
  if (error.empty()) error = expert_tiles::LaunchGateUp(Shared(p, a, false), shared_tiles, stream);
  p.in = p.out;
  p.sums = reinterpret_cast<float*>(a.workspace + at.sums);
  p.slice = static_cast<int32_t>(SliceOf(entries + a.num_rows, a.width));
  for (; p.first_column < a.width && error.empty(); p.first_column += p.slice) {
    error = expert_tiles::LaunchDown(Routed(p, a, true), tiles, stream);
    if (error.empty()) error = expert_tiles::LaunchDown(Shared(p, a, true), shared_tiles, stream);
    if (error.empty()) error = LaunchCombine(a, p, stream);
  }
  return error;
}

}  // namespace strata
