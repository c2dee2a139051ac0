// Two kernels. An *entry* is one (row, expert) pair of the router, or a row's shared expert. The
// first kernel computes 32 hidden values of an entry in a block: one quantisation block of contract
// T, so it leaves them quantised. The second adds a row's entries in the router's order, 32 columns
// in a block, so no entry's row is ever written to memory.
//
// Where an expert lies is read from the table at run time: slots of the card, or page-locked memory
// of the host that the same loads reach over the link. A swap between two steps changes the table
// and nothing else. With doors an entry may be computed elsewhere (expert_ffn_doors.cuh): the first
// kernel skips it, the second takes its row from there, in its place of the router's order.
#include <algorithm>

#include "cuda/ops/expert_ffn.h"
#include "cuda/ops/expert_ffn_ahead.cuh"
#include "cuda/ops/expert_ffn_doors.cuh"
#include "cuda/ops/expert_ffn_down.cuh"
#include "cuda/ops/expert_ffn_gate_up.cuh"
#include "cuda/ops/expert_ffn_mailbox.cuh"
#include "cuda/ops/expert_ffn_parts.cuh"
#include "cuda/ops/expert_ffn_tiles.h"
#include "cuda/tile_rows.h"

namespace strata {
namespace {

constexpr int kMostWarps = 16;

constexpr int64_t Padded(int64_t count) { return (count + 15) / 16 * 16; }

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

using Kernel = void (*)(const FfnParams);

// The kernels built for layers whose routed gate and up have this type: one for every card, and one
// for windows of few rows where there is much shared memory. Null where there is none.
struct Inlined {
  Kernel kernel;
  Kernel ahead;
  int64_t book_bytes;
  int ahead_book_bytes, slot_bytes;
};

template <typename Decode, bool kDoors>
Inlined InlinedOf() {
  return {InlineGateUpKernel<Decode, kDoors>, AheadGateUpKernel<Decode, kDoors>,
          GridBytes(Decode::kType, kBookCopies), GridBytes(Decode::kType, kMostBookCopies),
          AheadSlot<Decode>::kSize};
}

template <bool kDoors>
Inlined InlineGateUp(GgmlType type) {
  switch (type) {
#define STRATA_CASE(name) \
  case GgmlType::k##name: \
    return InlinedOf<Decode##name, kDoors>()
    STRATA_CASE(IQ3_S);
    STRATA_CASE(IQ3_XXS);
    STRATA_CASE(IQ4_XS);
    STRATA_CASE(Q4_K);
    STRATA_CASE(Q2_0);
#undef STRATA_CASE
    default:
      return {};
  }
}

struct InlinedDown {
  void (*kernel)(const FfnParams, const DownPlaces);
  int slot_bytes;
};

template <bool kDoors>
InlinedDown InlineDown(GgmlType type) {
  switch (type) {
#define STRATA_CASE(name) \
  case GgmlType::k##name: \
    return {InlineDownKernel<Decode##name, kDoors>, DownSlot<Decode##name>::kSize}
    STRATA_CASE(IQ4_NL);
    STRATA_CASE(Q5_0);
    STRATA_CASE(Q8_0);
    STRATA_CASE(Q2_0);
#undef STRATA_CASE
    default:
      return {};
  }
}

// Lays a block's shared memory out for `warps` warps; `bytes` > what a block may have where there
// is no room.
DownPlaces PlacesOf(const FfnParams& p, int64_t warps, int64_t slot_bytes, int64_t blocks) {
  const int64_t panels = p.by_columns.divisor, entries = p.num_active + 1;
  const int64_t items = (p.num_rows * panels + blocks - 1) / blocks;
  const int64_t jobs = entries * ((p.hidden_width + 255) / 256);
  DownPlaces places = {};
  places.span =
      static_cast<int32_t>(std::min<int64_t>(p.num_rows, (items + panels - 2) / panels + 1));
  places.hidden_at = static_cast<int32_t>(warps * slot_bytes);
  places.rows_at = static_cast<int32_t>(
      places.hidden_at + Padded(QuantizedBytes(places.span * entries, p.hidden_width)));
  places.sums_at = static_cast<int32_t>(places.rows_at + Padded(DownRows::Bytes(places.span)));
  const int64_t room = (MostSharedBytes() - places.sums_at) / (jobs * 32 * 4);
  places.batch = static_cast<int32_t>(std::clamp<int64_t>(room, 1, items));
  places.bytes = static_cast<int32_t>(places.sums_at + places.batch * jobs * 32 * 4);
  return places;
}

// With a peer, kernels stand beside events and other streams: there every one waits its turn.
bool Overlaps(const ExpertFfnArgs& a) { return a.peer_rows == nullptr && a.rows == nullptr; }

bool IsQ8(const DeviceMatrix& m) { return m.type->type == GgmlType::kQ8_0; }

FfnParams ParamsOf(const ExpertFfnArgs& a) {
  FfnParams p = {};
  p.x = a.x;
  p.ids = a.ids;
  p.weights = a.weights;
  p.shared_weights = a.shared_weights;
  p.live = a.live;
  p.y = a.y;
  p.experts = a.experts;
  p.usage = a.usage;
  if (a.doors) {
    p.peer_rows = a.peer_rows;
    p.homes = a.homes;
    p.mailbox = a.mailbox;
    p.latch = a.latch;
    p.rows = a.rows;
    std::copy_n(a.streamed, a.num_active + 1, p.streamed);
  }
  p.up_at = a.routed->up_at;
  p.down_at = a.routed->down_at;
  p.num_rows = static_cast<int32_t>(a.num_rows);
  p.num_active = static_cast<int32_t>(a.num_active);
  p.width = static_cast<int32_t>(a.width);
  p.routed_hidden = static_cast<int32_t>(a.routed->gate.rows);
  p.shared_hidden = static_cast<int32_t>(a.shared_gate->rows);
  p.hidden_width = std::max(p.routed_hidden, p.shared_hidden);
  p.by_panels = DividerBy(p.hidden_width / 32);
  p.by_entries = DividerBy(a.num_active + 1);
  p.by_active = DividerBy(a.num_active);
  p.by_whole = DividerBy(std::max(p.hidden_width / 256, 1));
  p.by_columns = DividerBy((a.width + 31) / 32);
  p.gate = ViewOf(a.routed->gate);
  p.up = ViewOf(a.routed->up);
  p.down = ViewOf(a.routed->down);
  p.shared_gate = ViewOf(*a.shared_gate);
  p.shared_up = ViewOf(*a.shared_up);
  p.shared_down = ViewOf(*a.shared_down);
  const int64_t entries = a.num_rows * (a.num_active + 1);
  const int64_t hidden = p.hidden_width;
  float* floats = reinterpret_cast<float*>(a.workspace);
  if (!p.down.quantised || !p.shared_down.quantised) p.hidden = floats;
  p.scales = floats + entries * hidden;
  p.codes = reinterpret_cast<int8_t*>(p.scales + Padded(entries * (hidden / 32)));
  p.sums = reinterpret_cast<int16_t*>(p.codes + entries * hidden);
  return p;
}

template <bool kDoors>
std::string LaunchGateUp(const ExpertFfnArgs& a, FfnParams p, cudaStream_t stream) {
  const int64_t segments = (a.width + 255) / 256;
  const int64_t panels = p.hidden_width / 32;
  Shape shape;
  shape.stream = stream;
  const Inlined inlined = InlineGateUp<kDoors>(p.gate.type);
  if (inlined.kernel != nullptr && p.up.type == p.gate.type && IsQ8(*a.shared_gate) &&
      IsQ8(*a.shared_up) && p.routed_hidden == p.shared_hidden && a.width % 256 == 0 &&
      segments <= kPairWarps) {
    const int64_t rings = kDoors && a.mailbox.box != nullptr;  // by a block of its own
    const int64_t items = a.num_rows * (a.num_active + 1) * panels + rings;
    const AheadPlaces ahead(static_cast<int>(2 * segments), p.num_rows, p.num_active, p.width,
                            inlined.ahead_book_bytes, inlined.slot_bytes);
    if (a.num_rows <= kMostRows && ahead.bytes <= MostSharedBytes()) {
      shape.grid = dim3(static_cast<unsigned>(std::min<int64_t>(items, Multiprocessors() + rings)));
      shape.block = dim3(static_cast<unsigned>(2 * 32 * segments));
      shape.shared_bytes = static_cast<size_t>(ahead.bytes);
      return LaunchOf(inlined.ahead, shape, Overlaps(a), p);
    }
    const GateUpShared plain(segments, inlined.book_bytes, a.num_rows * a.num_active);
    shape.grid = dim3(static_cast<unsigned>(std::min<int64_t>(items, 2 * Multiprocessors())));
    shape.block = dim3(static_cast<unsigned>(32 * segments));
    shape.shared_bytes = static_cast<size_t>(plain.bytes);
    return LaunchOf(inlined.kernel, shape, Overlaps(a), p);
  }
  shape.grid = dim3(static_cast<unsigned>(panels), static_cast<unsigned>(a.num_active + 1),
                    static_cast<unsigned>(a.num_rows));
  shape.block = dim3(static_cast<unsigned>(32 * std::min<int64_t>(2 * segments, 10)));
  shape.shared_bytes = QuantizedBytes(1, a.width) + static_cast<size_t>(2 * segments * 32 * 4);
  shape.shared_bytes = (shape.shared_bytes + 15) / 16 * 16;
  p.grids_at = static_cast<int32_t>(shape.shared_bytes);
  shape.shared_bytes += std::max(GridSharedBytes(a.routed->gate) + GridSharedBytes(a.routed->up),
                                 GridSharedBytes(*a.shared_gate) + GridSharedBytes(*a.shared_up));
  return LaunchOf(GateUpKernel<kDoors>, shape, Overlaps(a), p);
}

template <bool kDoors>
std::string LaunchDown(const ExpertFfnArgs& a, FfnParams p, cudaStream_t stream) {
  const int64_t hidden = p.hidden_width;
  const int64_t jobs = (a.num_active + 1) * ((hidden + 255) / 256);
  const int64_t panels = (a.width + 31) / 32;
  Shape shape;
  shape.stream = stream;
  const InlinedDown inlined = InlineDown<kDoors>(p.down.type);
  if (inlined.kernel != nullptr && IsQ8(*a.shared_down) && p.routed_hidden == p.shared_hidden &&
      hidden % 128 == 0 && hidden >= 256 && a.num_active < 32) {
    const int64_t blocks = std::min<int64_t>(a.num_rows * panels, Multiprocessors());
    for (int64_t warps = std::min<int64_t>(jobs, kDownWarps); warps > 0; --warps) {
      const DownPlaces places = PlacesOf(p, warps, inlined.slot_bytes, blocks);
      if (places.bytes > MostSharedBytes()) continue;
      shape.grid = dim3(static_cast<unsigned>(blocks));
      shape.block = dim3(static_cast<unsigned>(32 * warps));
      shape.shared_bytes = static_cast<size_t>(places.bytes);
      return LaunchOf(inlined.kernel, shape, Overlaps(a), p, places);
    }
  }
  shape.grid = dim3(static_cast<unsigned>(panels), static_cast<unsigned>(a.num_rows));
  shape.block = dim3(static_cast<unsigned>(32 * std::min<int64_t>(jobs, kMostWarps)));
  shape.shared_bytes = static_cast<size_t>(jobs * 32 * 4);
  p.hidden_at = static_cast<int32_t>(shape.shared_bytes);
  shape.shared_bytes += (QuantizedBytes(a.num_active + 1, hidden) + 15) / 16 * 16;
  p.down_grids_at = static_cast<int32_t>(shape.shared_bytes);
  shape.shared_bytes += GridSharedBytes(a.routed->down) + GridSharedBytes(*a.shared_down);
  return LaunchOf(DownKernel<kDoors>, shape, Overlaps(a), p);
}

}  // namespace

int64_t ExpertFfnWorkspace(int64_t num_rows, int64_t num_active, int64_t num_experts, int64_t width,
                           int64_t hidden, bool is_whole) {
  const int64_t entries = num_rows * (num_active + 1);
  const int64_t window = entries * hidden * 4 + Padded(entries * (hidden / 32)) * 4 +
                         entries * hidden + entries * (hidden / 16) * 2;
  if (num_rows <= kMostWindowRows) return window;
  return std::max(
      window, ExpertFfnTilesWorkspace(num_rows, num_active, num_experts, width, hidden, is_whole));
}

std::string ExpertGateUp(const ExpertFfnArgs& a, cudaStream_t stream) {
  const FfnParams p = ParamsOf(a);
  return a.doors ? LaunchGateUp<true>(a, p, stream) : LaunchGateUp<false>(a, p, stream);
}

std::string ExpertDown(const ExpertFfnArgs& a, cudaStream_t stream) {
  const FfnParams p = ParamsOf(a);
  return a.doors ? LaunchDown<true>(a, p, stream) : LaunchDown<false>(a, p, stream);
}

}  // namespace strata
