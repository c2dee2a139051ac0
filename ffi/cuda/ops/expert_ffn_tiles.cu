// Entries are sorted by expert, rows quantised once; hidden values of all entries, quantised, go to
// the workspace in the groups' order. Then, a slice of columns at a time so that the workspace
// stays small, every entry's row is computed by the down matrices and each activation row's are
// added in the router's order, the shared expert's last.
//
// With a ring (expert_ring.h) a group of experts goes through both products before the next one, so
// that its slots come back, and there is one slice. So it is with a peer that computes rows of the
// same tile meanwhile (peer_tiles.h): it stores them among the others, before they are added.
#include <algorithm>

#include "cuda/ops/expert_ffn_tiles.h"
#include "cuda/ops/expert_gate.h"
#include "cuda/ops/expert_tile_launch.h"
#include "cuda/ops/expert_wide_tiles.h"
#include "cuda/peer_tiles.h"
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

// Entries' rows of a slice, in bytes, and slices: what is written there is read again soon, but
// each slice ends with blocks that wait for the last one.
#if defined(STRATA_EMULATE)
constexpr int64_t kSliceBytes = int64_t{256} << 10;  // tests have few entries
#else
constexpr int64_t kSliceBytes = int64_t{64} << 20;
#endif
constexpr int64_t kMostSlices = 4;
constexpr int kCombineThreads = 128;

int64_t CeilDiv(int64_t a, int64_t b) { return (a + b - 1) / b; }

// Columns that are computed at once. `is_whole`: all of them, for an expert that is computed in
// parts would hold its slot of a ring until the last.
int64_t SliceOf(int64_t entries, int64_t width, bool is_whole) {
  const int64_t wanted = is_whole ? 1 : CeilDiv(entries * width * 4, kSliceBytes);
  return RoundUp(CeilDiv(width, std::min(wanted, kMostSlices)), kColumns);
}

// The workspace's parts, each 16-byte aligned.
struct Layout {
  int64_t order, starts, counts, tiles, first_tiles, addresses, in, hidden, sums, bytes;

  Layout(int64_t num_rows, int64_t num_active, int64_t num_experts, int64_t width,
         int64_t hidden_width, bool is_whole) {
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
    first_tiles = take(4 * (num_experts + 1));
    addresses = take(8 * num_experts);
    in = take(QuantizedRows::Bytes(num_rows, width));
    hidden = take(QuantizedRows::Bytes(entries + num_rows, hidden_width));
    sums = take(4 * (entries + num_rows) * SliceOf(entries + num_rows, width, is_whole));
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
                                int64_t width, int64_t hidden, bool is_whole) {
  return Layout(num_rows, num_active, num_experts, width, hidden, is_whole).bytes;
}

namespace {

// One call: what its launches share, and the launches.
struct Call {
  const ExpertFfnArgs& a;
  cudaStream_t stream;
  bool is_whole;
  int64_t entries;
  TileParams p = {};
  expert_tiles::GateArgs gate;

  Call(const ExpertFfnArgs& args, cudaStream_t on)
      : a(args),
        stream(on),
        is_whole(args.ring.state != nullptr || args.peer_tiles != nullptr),
        entries(args.num_rows * args.num_active) {
    const int64_t hidden = HiddenOf(a);
    const Layout at(a.num_rows, a.num_active, a.num_experts, a.width, hidden, is_whole);
    p.groups.order = reinterpret_cast<int32_t*>(a.workspace + at.order);
    p.groups.starts = reinterpret_cast<int32_t*>(a.workspace + at.starts);
    p.groups.counts = reinterpret_cast<int32_t*>(a.workspace + at.counts);
    p.groups.tiles = reinterpret_cast<ExpertTile*>(a.workspace + at.tiles);
    p.groups.first_tiles = reinterpret_cast<int32_t*>(a.workspace + at.first_tiles);
    p.live = a.live;
    p.num_rows = static_cast<int32_t>(a.num_rows);
    p.num_active = static_cast<int32_t>(a.num_active);
    p.shared_first = static_cast<int32_t>(entries);
    p.in = QuantizedRows::At(a.workspace + at.in, a.num_rows, a.width);
    p.out = QuantizedRows::At(a.workspace + at.hidden, entries + a.num_rows, hidden);
    p.sums = reinterpret_cast<float*>(a.workspace + at.sums);
    p.slice = static_cast<int32_t>(SliceOf(entries + a.num_rows, a.width, is_whole));
    gate.ring = a.ring;
    gate.words = a.experts;
    gate.counts = p.groups.counts;
    gate.live = a.live;
    gate.addresses = reinterpret_cast<uint64_t*>(a.workspace + at.addresses);
    gate.homes = a.homes;
    gate.stage = a.stage;
    gate.num_rows = p.num_rows;
    gate.num_experts = static_cast<int32_t>(a.num_experts);
    SetTileRows();
    if (a.peer_tiles == nullptr) return;
    gate.part = expert_tiles::GatePart::kPrimarys;
    gate.taken = a.peer_tiles->taken(a.layer);
    gate.taken_min_rows = a.peer_tiles->taken_min_rows();
  }

  // Entries of a tile of the routed experts; kernels that take fewer at once take it in parts, and
  // read the weights for each.
  void SetTileRows() {
    const ExpertShape& routed = *a.routed;
    const bool up = expert_tiles::HasWideGateUp(ViewOf(routed.gate), ViewOf(routed.up),
                                                expert_tiles::GateUpValues(p));
    const bool down =
        expert_tiles::HasWideDown(ViewOf(routed.down), expert_tiles::DownValues(Down()));
    p.groups.tile_rows = up || down ? expert_tiles::kWideRows : kTileRows;
    gate.tile_rows = up && down ? expert_tiles::kWideRows : kTileRows;
  }

  // Whether experts lie where their words say, all of them in the device's memory.
  bool IsPlain() const { return a.homes == nullptr && !is_whole; }

  TileParams Routed(int64_t group, bool down) const {
    return expert_tiles::RoutedParams(
        down ? Down() : p, *a.routed, IsPlain() ? a.experts : gate.addresses,
        expert_tiles::RangeOf(a.num_experts, a.ring.groups, group), a.ring.groups == 1, down);
  }

  // The second kernel reads what the first one wrote.
  TileParams Down() const {
    TileParams d = p;
    d.in = p.out;
    return d;
  }

  std::string Prepare() const {
    std::string error = Mark(a.timeline, Phase::kGroup, stream);
    if (!error.empty()) return error;
    error = tiles::QuantizeTileRows(a.x, a.live, a.num_rows, a.width, p.in, stream);
    if (!error.empty()) return error;
    error =
        expert_tiles::GroupEntries(a.ids, a.live, a.num_rows, a.num_active, a.num_experts, p.groups,
                                   {a.usage, a.homes, a.experts, a.peer_tiles != nullptr}, stream);
    const bool has_ring = a.ring.state != nullptr;
    return error.empty() && has_ring ? expert_tiles::TellRouting(gate, stream) : error;
  }

  // The peer's part begins when entries are grouped, and ends before rows are added.
  std::string ForkPeer() const {
    if (a.peer_tiles == nullptr) return "";
    PeerTileCall call;
    call.routed = a.routed;
    call.groups = p.groups;
    call.in = p.in;
    call.words = a.experts;
    call.live = a.live;
    call.sums = p.sums;
    call.slice = p.slice;
    call.num_rows = a.num_rows;
    call.num_active = a.num_active;
    call.num_experts = a.num_experts;
    call.layer = a.layer;
    return a.peer_tiles->Fork(call, stream);
  }

  std::string JoinPeer() const {
    if (a.peer_tiles == nullptr) return "";
    const std::string error = Mark(a.timeline, Phase::kPeer, stream);
    return error.empty() ? a.peer_tiles->Join(stream) : error;
  }

  // Of so many experts.
  int64_t MostTilesOf(int64_t experts) const {
    return expert_tiles::MostTiles(entries, experts, p.groups.tile_rows);
  }

  // The shared expert's hidden values come first: they wait for nobody.
  std::string GateUp(int64_t group) const {
    const int64_t most = std::min(a.num_experts, CeilDiv(a.num_experts, a.ring.groups));
    std::string error;
    if (group == 0) {
      error = Mark(a.timeline, Phase::kGateUp, stream);
      if (!error.empty()) return error;
      error =
          expert_tiles::LaunchGateUp(Shared(p, a, false), CeilDiv(a.num_rows, kTileRows), stream);
    }
    if (error.empty()) error = Mark(a.timeline, Phase::kWait, stream);
    if (error.empty() && !IsPlain()) error = expert_tiles::AwaitGroup(gate, group, stream);
    if (error.empty()) error = Mark(a.timeline, Phase::kGateUp, stream);
    if (!error.empty()) return error;
    return expert_tiles::LaunchGateUp(Routed(group, false), MostTilesOf(most), stream);
  }

  // Of the slice that begins at p.first_column.
  std::string RoutedDown(int64_t group) const {
    const int64_t most = std::min(a.num_experts, CeilDiv(a.num_experts, a.ring.groups));
    const std::string error = Mark(a.timeline, Phase::kDown, stream);
    if (!error.empty()) return error;
    return expert_tiles::LaunchDown(Routed(group, true), MostTilesOf(most), stream);
  }

  std::string SharedDownAndCombine() const {
    std::string error =
        expert_tiles::LaunchDown(Shared(Down(), a, true), CeilDiv(a.num_rows, kTileRows), stream);
    if (error.empty()) error = JoinPeer();
    if (!error.empty()) return error;
    const std::string problem = Mark(a.timeline, Phase::kCombine, stream);
    return problem.empty() ? LaunchCombine(a, p, stream) : problem;
  }
};

}  // namespace

std::string ExpertFfnTiles(const ExpertFfnArgs& a, cudaStream_t stream) {
  Call call(a, stream);
  std::string error = call.Prepare();
  if (error.empty()) error = call.ForkPeer();
  for (int64_t group = 0; group < a.ring.groups && error.empty(); ++group) {
    error = call.GateUp(group);
    if (error.empty() && call.is_whole) error = call.RoutedDown(group);
  }
  if (error.empty() && a.ring.state != nullptr) error = expert_tiles::LeaveRing(call.gate, stream);
  for (; call.p.first_column < a.width && error.empty(); call.p.first_column += call.p.slice) {
    if (!call.is_whole) error = call.RoutedDown(0);
    if (error.empty()) error = call.SharedDownAndCombine();
  }
  return error;
}

}  // namespace strata
