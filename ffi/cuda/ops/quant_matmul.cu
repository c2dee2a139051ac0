#include <algorithm>

#include "cuda/ops/quant_matmul_parts.cuh"
#include "cuda/ops/quant_matmul_rows.h"
#include "cuda/ops/quant_matmul_tiles.h"

namespace strata {
namespace {

using matmul::Kernel;
using matmul::kWarps;
using matmul::Mode;
using matmul::Params;
using matmul::Slice;

constexpr int64_t kSharedBudget = 96 * 1024;  // what every supported card gives a block
constexpr int kGridBudget = 32 * 1024;        // of it for code books, if they can do with less

int64_t CeilDiv(int64_t a, int64_t b) { return (a + b - 1) / b; }

// `segments`: of a launch, each the work of a warp for a row.
int GroupRows(int64_t num_rows, int64_t width, int64_t segments) {
  int64_t rows = RowsOfBlock(num_rows, CeilDiv(segments, kWarps));
  while (rows > 1 && QuantizedBytes(rows, width) > 64 * 1024) rows = (rows + 1) / 2;
  return static_cast<int>(rows);
}

// Blocks of 32 values of a part: float32 has the longest, whose loads come one after the other.
int PartBlocks(const DeviceMatrix& matrix, Mode mode) {
  return matrix.type->type == GgmlType::kF32 && mode == Mode::kParts ? 1 : 8;
}

int64_t PartsOfPanel(const DeviceMatrix& matrix, Mode mode) {
  return CeilDiv(matrix.cols / 32, PartBlocks(matrix, mode));
}

using Matrices = std::vector<const DeviceMatrix*>;

// The code books of a launch, one for each type that has one, with as many copies as fit.
int GridBytesOf(const Matrices& matrices, int most_copies, Params* p) {
  int bytes = 0;
  for (size_t i = 0; i < matrices.size(); ++i) {
    const GgmlType type = matrices[i]->type->type;
    const auto same = [&](const DeviceMatrix* m) { return m->type->type == type; };
    const size_t first = static_cast<size_t>(std::find_if(matrices.begin(), matrices.end(), same) -
                                             matrices.begin());
    const int copies = std::min(GridCopies(type), most_copies);
    if (p != nullptr) {
      Slice& slice = p->slices[i];
      slice.grid_copies = copies;
      slice.stages_grid = copies > 0 && first == i;
      slice.grid_at = first == i ? bytes : p->slices[first].grid_at;
    }
    if (first == i) bytes += GridBytes(type, copies);
  }
  return bytes;
}

// How a launch is cut.
struct Cut {
  Mode mode;
  int64_t group_rows, groups, panels, parts, runs;
  int64_t sums;  // of a block: parts whose sums lie in shared memory
  int most_copies;
  int64_t grid_bytes, row_bytes;  // of shared memory

  int64_t SumsBytes() const { return sums * group_rows * 32 * 4; }
};

// One group of activation rows meets all panels, so a launch has groups * panels of work. Where
// that is more than a panel for every warp of the card, warps work alone: no barrier, no sum of
// others. Where it is less than 8 panels for a block, whole panels would leave some blocks with up
// to an eighth more than their share, so runs end anywhere; with several groups, whose sums take
// much memory, only where it is less than 2.
Cut CutOf(int64_t num_rows, const Matrices& matrices) {
  Cut cut = {};
  const int64_t processors = Multiprocessors();
  const int64_t width = matrices.front()->cols;
  const int64_t segments = CeilDiv(width, 256);
  for (const DeviceMatrix* matrix : matrices) cut.panels += matrix->panels();
  cut.group_rows = GroupRows(num_rows, width, cut.panels * segments);
  cut.groups = CeilDiv(num_rows, cut.group_rows);
  for (const DeviceMatrix* matrix : matrices) {
    if (matrix->quantised()) cut.row_bytes = QuantizedBytes(cut.group_rows, width);
  }
  cut.row_bytes = CeilDiv(cut.row_bytes, 16) * 16;
  cut.most_copies = 8;
  while (cut.most_copies > 1 && GridBytesOf(matrices, cut.most_copies, nullptr) > kGridBudget) {
    cut.most_copies /= 2;
  }
  cut.grid_bytes = GridBytesOf(matrices, cut.most_copies, nullptr);

  const int64_t room = std::max<int64_t>(
      (kSharedBudget - cut.row_bytes - cut.grid_bytes) / (cut.group_rows * 32 * 4), segments);
  const int64_t work = cut.groups * cut.panels;
  const int64_t few = (cut.groups == 1 ? 8 : 2) * processors;
  cut.mode = 2 * work >= 3 * processors * kWarps                     ? Mode::kWarps
             : work >= std::min<int64_t>(few, matmul::kMostCounters) ? Mode::kPanels
                                                                     : Mode::kParts;
  for (const DeviceMatrix* matrix : matrices) {
    cut.parts += matrix->panels() * PartsOfPanel(*matrix, cut.mode);
  }
  if (cut.mode == Mode::kWarps) {
    cut.runs = cut.groups == 1 ? processors : CeilDiv(cut.panels, kWarps);
    cut.runs = std::min(cut.runs, cut.panels);
    cut.sums = 2 * kWarps;
  } else if (cut.mode == Mode::kPanels) {
    const int64_t of_run = std::min(room / segments, CeilDiv(work, 4 * processors));
    cut.runs = CeilDiv(cut.panels, std::max<int64_t>(of_run, 1));
    cut.sums = CeilDiv(cut.panels, cut.runs) * segments;
  } else {
    cut.runs = std::max(CeilDiv(processors, cut.groups), CeilDiv(cut.parts, room));
    cut.runs = std::min(cut.runs, cut.parts);
    cut.sums = std::max(CeilDiv(cut.parts, cut.runs), segments);
  }
  return cut;
}

void FillSlices(const Matrices& matrices, const Cut& cut, Params* p) {
  for (const DeviceMatrix* matrix : matrices) {
    Slice& slice = p->slices[p->num_slices++];
    slice.matrix = ViewOf(*matrix);
    slice.first_panel = p->num_panels;
    slice.first_part = p->num_parts;
    slice.column = p->num_columns;
    slice.parts = static_cast<int32_t>(PartsOfPanel(*matrix, cut.mode));
    slice.part_blocks = PartBlocks(*matrix, cut.mode);
    slice.part_bytes = static_cast<int32_t>(matrix->unit_bytes / 8 * slice.part_blocks);
    p->num_panels += static_cast<int32_t>(matrix->panels());
    p->num_parts += static_cast<int32_t>(matrix->panels()) * slice.parts;
    p->num_columns += static_cast<int32_t>(matrix->rows);
    p->quantised = p->quantised || matrix->quantised();
  }
  GridBytesOf(matrices, cut.most_copies, p);
}

// The quantised type with the most bytes: its products are compiled into the kernel.
GgmlType MainType(const Matrices& matrices) {
  const DeviceMatrix* most = matrices.front();
  for (const DeviceMatrix* matrix : matrices) {
    const bool counts = matrix->quantised() && matrix->cols % 256 == 0;
    if (counts && (!most->quantised() || matrix->bytes_each > most->bytes_each)) most = matrix;
  }
  return most->type->type;
}

}  // namespace

int64_t QuantMatmulWorkspace(int64_t num_rows, const std::vector<const DeviceMatrix*>& matrices) {
  if (num_rows > kMostWindowRows) return QuantMatmulTilesWorkspace(num_rows, matrices);
  const Cut cut = CutOf(num_rows, matrices);
  if (cut.mode != Mode::kParts) return 1;
  return cut.groups * cut.parts * cut.group_rows * 32;
}

std::string QuantMatmul(const QuantMatmulArgs& args, cudaStream_t stream) {
  if (args.num_rows > kMostWindowRows) return QuantMatmulTiles(args, stream);
  if (TakesRows(args)) return QuantMatmulRows(args, stream);
  const Cut cut = CutOf(args.num_rows, args.matrices);
  Params p = {};
  FillSlices(args.matrices, cut, &p);
  p.mode = cut.mode;
  p.x = args.x;
  p.live = args.live;
  p.y = args.y;
  p.workspace = args.workspace;
  p.num_rows = static_cast<int32_t>(args.num_rows);
  p.width = static_cast<int32_t>(args.width);
  p.num_runs = static_cast<int32_t>(cut.runs);
  p.group_rows = static_cast<int32_t>(cut.group_rows);
  for (Slice& slice : p.slices) slice.grid_at += static_cast<int32_t>(cut.row_bytes);
  p.sums_at = static_cast<int32_t>(cut.row_bytes + cut.grid_bytes);
  Shape launch;
  launch.grid = dim3(static_cast<unsigned>(cut.groups), static_cast<unsigned>(cut.runs));
  launch.block = dim3(32 * kWarps);
  launch.shared_bytes = static_cast<size_t>(p.sums_at + cut.SumsBytes());
  launch.stream = stream;
  switch (MainType(args.matrices)) {
#define STRATA_CASE(name) \
  case GgmlType::k##name: \
    return LaunchOverlapping(Kernel<Decode##name>, launch, p);
    STRATA_CASE(Q8_0)
    STRATA_CASE(Q6_K)
    STRATA_CASE(Q5_K)
    STRATA_CASE(Q4_K)
    STRATA_CASE(IQ4_NL)
    STRATA_CASE(IQ4_XS)
    STRATA_CASE(IQ3_S)
#undef STRATA_CASE
    default:
      return LaunchOverlapping(Kernel<matmul::NoHot>, launch, p);
  }
}

}  // namespace strata
