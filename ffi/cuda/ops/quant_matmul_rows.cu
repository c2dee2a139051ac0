#include <algorithm>

#include "cuda/ops/quant_matmul_rows.cuh"
#include "cuda/ops/quant_matmul_rows.h"

namespace strata {
namespace {

using rows::kItemRows;
using rows::kItemsAtOnce;
using rows::kMostWarps;
using rows::Params;
using rows::RowsKernel;
using rows::Slice;

using Kernel = void (*)(Params);

// A kernel and what a warp's slot takes.
struct Choice {
  Kernel kernel = nullptr;
  int slot_bytes = 0;
};

int64_t CeilDiv(int64_t a, int64_t b) { return (a + b - 1) / b; }
int64_t Padded(int64_t bytes) { return CeilDiv(bytes, 128) * 128; }

template <typename Hot>
Choice ChoiceOf() {
  return {RowsKernel<Hot>, Slot<SegmentWords<Hot>(8) * 128>::kSize};
}

// The kernel for a quantised type; none for others than these.
Choice KernelOf(GgmlType type) {
  switch (type) {
#define STRATA_CASE(name) \
  case GgmlType::k##name: \
    return ChoiceOf<Decode##name>();
    STRATA_CASE(Q8_0)
    STRATA_CASE(Q6_K)
    STRATA_CASE(Q5_K)
    STRATA_CASE(Q4_K)
    STRATA_CASE(IQ4_NL)
    STRATA_CASE(IQ4_XS)
#undef STRATA_CASE
    default:
      return {};
  }
}

// The first quantised matrix, or null.
const DeviceMatrix* FirstQuantised(const std::vector<const DeviceMatrix*>& matrices) {
  for (const DeviceMatrix* m : matrices) {
    if (m->quantised()) return m;
  }
  return nullptr;
}

void FillSlices(const QuantMatmulArgs& args, Params* p) {
  for (const bool quantised : {true, false}) {
    p->num_columns = 0;
    for (const DeviceMatrix* m : args.matrices) {
      if (m->quantised() == quantised) {
        int32_t& count = quantised ? p->num_panels : p->num_items;
        p->slices[p->num_slices++] = {ViewOf(*m), count, p->num_columns};
        count += static_cast<int32_t>(quantised ? m->panels() : CeilDiv(m->rows, kItemRows));
      }
      p->num_columns += static_cast<int32_t>(m->rows);
    }
    if (quantised) p->num_hot = p->num_slices;
  }
}

// Shared memory of a block: activations, slots, sums. Rows that do not fit are another block's,
// panels that do not fit are added up later. Returns the bytes.
int64_t Share(int64_t most, int64_t warps, int64_t blocks, Params* p) {
  const int64_t panels = std::max<int64_t>(CeilDiv(p->num_panels, blocks), 1);
  const int64_t slots = warps * p->slot_bytes;
  for (p->group_rows = std::min(p->num_rows, kMostRows);; p->group_rows = (p->group_rows + 1) / 2) {
    const int64_t staged = slots == 0 ? 0 : Padded(QuantizedBytes(p->group_rows, p->width));
    const int64_t of_panel = int64_t{p->segments} * p->group_rows * 32 * 4;
    p->slots_at = static_cast<int32_t>(staged);
    p->sums_at = static_cast<int32_t>(staged + slots);
    const int64_t of_items = p->num_items == 0 ? 0 : of_panel / 32 * kItemRows * kItemsAtOnce;
    p->panels_at_once = static_cast<int32_t>(
        std::clamp<int64_t>((most - p->sums_at - of_items) / of_panel, 1, panels));
    const int64_t of_panels = slots == 0 ? 0 : p->panels_at_once * of_panel;
    p->items_at = static_cast<int32_t>(p->sums_at + of_panels);
    const int64_t bytes = p->items_at + of_items;
    if (bytes <= most || p->group_rows == 1) return bytes;
  }
}

// The same with as many warps as there is room for, which are then in `warps`. `bytes` > what a
// block may have if there is none.
struct Room {
  int64_t warps = kMostWarps;
  int64_t bytes = 0;

  Room(int64_t blocks, Params* p) {
    const int64_t most = MostSharedBytes();
    bytes = Share(most, warps, blocks, p);
    while (bytes > most && warps > 4) {
      warps /= 2;
      bytes = Share(most, warps, blocks, p);
    }
  }
};

}  // namespace

bool TakesRows(const QuantMatmulArgs& args) {
  if (args.num_rows > kMostRows || args.width % 256 != 0) return false;
  int64_t panels = 0;
  for (const DeviceMatrix* m : args.matrices) panels += m->panels();
  if (panels >= int64_t{24} * Multiprocessors()) return false;
  const DeviceMatrix* hot = FirstQuantised(args.matrices);
  if (hot == nullptr) return true;
  for (const DeviceMatrix* m : args.matrices) {
    if (m->quantised() && m->type != hot->type) return false;
  }
  Params p = {};
  p.slot_bytes = KernelOf(hot->type->type).slot_bytes;
  p.num_rows = 1;
  p.width = static_cast<int32_t>(args.width);
  p.segments = p.width / 256;
  p.num_panels = 1;
  return p.slot_bytes > 0 && Room(1, &p).bytes <= MostSharedBytes();
}

std::string QuantMatmulRows(const QuantMatmulArgs& args, cudaStream_t stream) {
  const DeviceMatrix* hot = FirstQuantised(args.matrices);
  const Choice choice =
      hot == nullptr ? Choice{RowsKernel<rows::NoHot>, 0} : KernelOf(hot->type->type);
  Params p = {};
  p.x = args.x;
  p.live = args.live;
  p.y = args.y;
  p.num_rows = static_cast<int32_t>(args.num_rows);
  p.width = static_cast<int32_t>(args.width);
  p.segments = p.width / 256;
  p.slot_bytes = choice.slot_bytes;
  FillSlices(args, &p);
  const int64_t blocks = std::min<int64_t>(Multiprocessors(), std::max(p.num_panels, p.num_items));
  const Room room(blocks, &p);
  Shape shape;
  shape.shared_bytes = static_cast<size_t>(room.bytes);
  shape.grid =
      dim3(static_cast<unsigned>(blocks), static_cast<unsigned>(CeilDiv(p.num_rows, p.group_rows)));
  shape.block = dim3(static_cast<unsigned>(32 * room.warps));
  shape.stream = stream;
  return LaunchOverlapping(choice.kernel, shape, p);
}

}  // namespace strata
