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
#include "cuda/ops/expert_ffn_any.cuh"
#include "cuda/ops/expert_ffn_doors.cuh"
#include "cuda/ops/expert_ffn_down.cuh"
#include "cuda/ops/expert_ffn_gate_up.cuh"
#include "cuda/ops/expert_ffn_mailbox.cuh"
#include "cuda/ops/expert_ffn_parts.cuh"
#include "cuda/ops/expert_ffn_tiles.h"
#include "cuda/tile_rows.h"

namespace strata {
namespace {

constexpr int64_t Padded(int64_t count) { return (count + 15) / 16 * 16; }

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

// Whether the first kernel may begin early. With a peer it stands behind events and copies, which
// it does not wait for by itself.
bool GateUpOverlaps(const ExpertFfnArgs& a) { return a.peer_rows == nullptr && a.rows == nullptr; }

// Whether the second one may: nothing may lie between the two.
bool DownOverlaps(const ExpertFfnArgs& a) { return GateUpOverlaps(a) || a.bell.tellers > 0; }

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
    p.bell = a.bell;
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

int64_t MostBlocks(const ExpertFfnArgs& a, int kernel) {
  return a.most_blocks[kernel] > 0 ? a.most_blocks[kernel] : Multiprocessors();
}

template <bool kDoors>
bool HasInlineGateUp(const ExpertFfnArgs& a) {
  return InlineGateUp<kDoors>(a.routed->gate.type->type).kernel != nullptr &&
         a.routed->up.type == a.routed->gate.type && IsQ8(*a.shared_gate) && IsQ8(*a.shared_up) &&
         a.routed->gate.rows == a.shared_gate->rows && a.width % 256 == 0 &&
         (a.width + 255) / 256 <= kPairWarps;
}

template <bool kDoors>
std::string LaunchGateUp(const ExpertFfnArgs& a, FfnParams p, cudaStream_t stream) {
  const int64_t segments = (a.width + 255) / 256;
  const int64_t panels = p.hidden_width / 32;
  Shape shape;
  shape.stream = stream;
  if (HasInlineGateUp<kDoors>(a)) {
    const Inlined inlined = InlineGateUp<kDoors>(p.gate.type);
    const int64_t rings = kDoors && a.mailbox.box != nullptr;  // by a block of its own
    const int64_t items = a.num_rows * (a.num_active + 1) * panels + rings;
    const AheadPlaces ahead(static_cast<int>(2 * segments), p.num_rows, p.num_active, p.width,
                            inlined.ahead_book_bytes, inlined.slot_bytes);
    if (a.num_rows <= kMostRows && ahead.bytes <= MostSharedBytes()) {
      shape.grid = dim3(static_cast<unsigned>(std::min<int64_t>(items, MostBlocks(a, 0) + rings)));
      shape.block = dim3(static_cast<unsigned>(2 * 32 * segments));
      shape.shared_bytes = static_cast<size_t>(ahead.bytes);
      return LaunchOf(inlined.ahead, shape, GateUpOverlaps(a), p);
    }
    const GateUpShared plain(segments, inlined.book_bytes, a.num_rows * a.num_active);
    shape.grid = dim3(static_cast<unsigned>(std::min<int64_t>(items, 2 * MostBlocks(a, 0))));
    shape.block = dim3(static_cast<unsigned>(32 * segments));
    shape.shared_bytes = static_cast<size_t>(plain.bytes);
    return LaunchOf(inlined.kernel, shape, GateUpOverlaps(a), p);
  }
  shape.grid = dim3(static_cast<unsigned>(panels), static_cast<unsigned>(a.num_active + 1),
                    static_cast<unsigned>(a.num_rows));
  shape.block = dim3(static_cast<unsigned>(32 * std::min<int64_t>(2 * segments, 10)));
  shape.shared_bytes = QuantizedBytes(1, a.width) + static_cast<size_t>(2 * segments * 32 * 4);
  shape.shared_bytes = (shape.shared_bytes + 15) / 16 * 16;
  p.grids_at = static_cast<int32_t>(shape.shared_bytes);
  shape.shared_bytes += std::max(GridSharedBytes(a.routed->gate) + GridSharedBytes(a.routed->up),
                                 GridSharedBytes(*a.shared_gate) + GridSharedBytes(*a.shared_up));
  return LaunchOf(GateUpKernel<kDoors>, shape, GateUpOverlaps(a), p);
}

// The kernel built for layers like this one, and its launch; null where there is none or no room.
struct DownLaunch {
  void (*kernel)(const FfnParams, const DownPlaces) = nullptr;
  Shape shape;
  DownPlaces places = {};
};

template <bool kDoors>
DownLaunch InlineDownLaunch(const ExpertFfnArgs& a, const FfnParams& p) {
  DownLaunch launch;
  const int64_t hidden = p.hidden_width;
  const InlinedDown inlined = InlineDown<kDoors>(p.down.type);
  if (inlined.kernel == nullptr || !IsQ8(*a.shared_down) || p.routed_hidden != p.shared_hidden ||
      hidden % 128 != 0 || hidden < 256 || a.num_active >= 32) {
    return launch;
  }
  const int64_t jobs = (a.num_active + 1) * ((hidden + 255) / 256);
  const int64_t blocks = std::min<int64_t>(a.num_rows * p.by_columns.divisor, MostBlocks(a, 1));
  for (int64_t warps = std::min<int64_t>(jobs, kDownWarps); warps > 0; --warps) {
    launch.places = PlacesOf(p, warps, inlined.slot_bytes, blocks);
    if (launch.places.bytes > MostSharedBytes()) continue;
    launch.shape.grid = dim3(static_cast<unsigned>(blocks));
    launch.shape.block = dim3(static_cast<unsigned>(32 * warps));
    launch.shape.shared_bytes = static_cast<size_t>(launch.places.bytes);
    launch.kernel = inlined.kernel;
    break;
  }
  return launch;
}

template <bool kDoors>
std::string LaunchDown(const ExpertFfnArgs& a, FfnParams p, cudaStream_t stream) {
  DownLaunch inlined = InlineDownLaunch<kDoors>(a, p);
  if (inlined.kernel != nullptr) {
    inlined.shape.stream = stream;
    return LaunchOf(inlined.kernel, inlined.shape, DownOverlaps(a), p, inlined.places);
  }
  if (a.bell.tellers > 0) return "the second kernel does not know of the peer's bell";
  const int64_t hidden = p.hidden_width;
  const int64_t jobs = (a.num_active + 1) * ((hidden + 255) / 256);
  const int64_t panels = (a.width + 31) / 32;
  Shape shape;
  shape.stream = stream;
  shape.grid = dim3(static_cast<unsigned>(panels), static_cast<unsigned>(a.num_rows));
  shape.block = dim3(static_cast<unsigned>(32 * std::min<int64_t>(jobs, kMostWarps)));
  shape.shared_bytes = static_cast<size_t>(jobs * 32 * 4);
  p.hidden_at = static_cast<int32_t>(shape.shared_bytes);
  shape.shared_bytes += (QuantizedBytes(a.num_active + 1, hidden) + 15) / 16 * 16;
  p.down_grids_at = static_cast<int32_t>(shape.shared_bytes);
  shape.shared_bytes += GridSharedBytes(a.routed->down) + GridSharedBytes(*a.shared_down);
  return LaunchOf(DownKernel<kDoors>, shape, DownOverlaps(a), p);
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

int64_t DownBlocks(const ExpertFfnArgs& a) {
  if (!a.doors || !HasInlineGateUp<true>(a)) return 0;
  const DownLaunch launch = InlineDownLaunch<true>(a, ParamsOf(a));
  return launch.kernel == nullptr ? 0 : launch.shape.grid.x;
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
