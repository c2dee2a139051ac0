#include <algorithm>

#include "cuda/group_units.h"
#include "cuda/ops/quant_matmul_floats.cuh"
#include "cuda/ops/quant_matmul_floats.h"

namespace strata {
namespace {

using matmul_floats::kUnit;
using matmul_floats::Params;

using Matrices = std::vector<const DeviceMatrix*>;

// A tile's columns, of a type whose weights are split, and of one whose weights are not. What
// limits them is the second cache, so they are as large as the registers allow.
constexpr int kColumnsOfPlanes = 176, kColumns = 192;
constexpr int kGroups = 3, kDepth = 1;
// Tiles for so few rows and columns that larger ones would leave processors idle.
constexpr int kFewColumns = 96, kFewGroups = 2, kFewDepth = 2;

// Rows of so many tiles stay in the second cache while the columns pass.
constexpr int64_t kMostRowTiles = 11;

constexpr int64_t kMostColumnsOfOthers = 128;

// Bytes of workspace, as much as decoded weights may take: plans know of no more.
constexpr int64_t kMostPlanes = int64_t{48} << 20;

int64_t CeilDiv(int64_t a, int64_t b) { return (a + b - 1) / b; }

template <GgmlType kType>
constexpr int kPlanes = kType == GgmlType::kBF16 ? 1 : 2;

template <GgmlType kType, int kOfTile>
std::string SplitWeights(const DeviceMatrix& matrix, const Params& p, cudaStream_t stream) {
  Shape shape;
  shape.grid = dim3(static_cast<unsigned>(matrix.panels()),
                    static_cast<unsigned>(CeilDiv(matrix.cols, 128)));
  shape.block = dim3(256);
  shape.stream = stream;
  return Launch(matmul_floats::SplitWeightsKernel<kType, kOfTile>, shape, p, ViewOf(matrix),
                static_cast<int>(p.num_units));
}

template <GgmlType kType, int kOfTile, int kGroupsOf, int kDepthOf>
std::string RunTiles(const QuantMatmulArgs& args, Params p, cudaStream_t stream) {
  int64_t column = 0;
  for (const DeviceMatrix* matrix : args.matrices) {
    if (matrix->type->type == kType) {
      p.pieces[p.num_pieces++] = {matrix->bytes, matrix->panel_bytes, p.num_units,
                                  static_cast<int32_t>(matrix->rows), static_cast<int32_t>(column)};
      if constexpr (kPlanes<kType> == 2) {
        const std::string error = SplitWeights<kType, kOfTile>(*matrix, p, stream);
        if (!error.empty()) return error;
      }
      p.num_units += static_cast<int32_t>(CeilDiv(matrix->rows, kUnit<kPlanes<kType>>));
    }
    column += matrix->rows;
  }
  using Layout = matmul_floats::Layout<kPlanes<kType>, kOfTile, kGroupsOf>;
  p.column_tiles = static_cast<int32_t>(CeilDiv(p.num_units, Layout::kUnits));
  const int64_t row_tiles = CeilDiv(p.num_rows, Layout::kRows);
  p.row_tiles = static_cast<int32_t>(CeilDiv(row_tiles, CeilDiv(row_tiles, kMostRowTiles)));
  Shape shape;
  shape.grid = dim3(static_cast<unsigned>(p.column_tiles * row_tiles));
  shape.block = dim3(Layout::kThreads);
  shape.shared_bytes = Layout::kBytes;
  shape.stream = stream;
  return Launch(matmul_floats::GroupFloatKernel<kPlanes<kType>, kOfTile, kGroupsOf, kDepthOf>,
                shape, p);
}

// Columns of a type, as units of so many.
int64_t ColumnsOf(const Matrices& matrices, GgmlType type, int64_t unit) {
  int64_t columns = 0;
  for (const DeviceMatrix* matrix : matrices) {
    if (matrix->type->type == type) columns += CeilDiv(matrix->rows, unit) * unit;
  }
  return columns;
}

// Of the planes of a type's weights; the last tile is whole.
int64_t PlanesBytes(const Matrices& matrices, GgmlType type) {
  const int64_t columns = ColumnsOf(matrices, type, kUnit<2>);
  return columns == 0 ? 0 : (columns + kColumnsOfPlanes) * matrices.front()->cols * 4;
}

template <GgmlType kType>
std::string RunOf(const QuantMatmulArgs& args, const Params& p, cudaStream_t stream) {
  constexpr int kOfTile = kPlanes<kType> == 2 ? kColumnsOfPlanes : kColumns;
  const int64_t columns = ColumnsOf(args.matrices, kType, kUnit<kPlanes<kType>>);
  if (columns == 0) return "";
  const int64_t few = CeilDiv(columns, kFewColumns) *
                      CeilDiv(args.num_rows, matmul_floats::kGroupRows * kFewGroups);
  if (few > Multiprocessors()) return RunTiles<kType, kOfTile, kGroups, kDepth>(args, p, stream);
  return RunTiles<kType, kFewColumns, kFewGroups, kFewDepth>(args, p, stream);
}

}  // namespace

bool HasFloatGroups(const Matrices& matrices, GgmlType type) {
  if (!HasGroupUnits()) return false;
  if (type == GgmlType::kBF16) return ColumnsOf(matrices, type, kUnit<1>) > kMostColumnsOfOthers;
  return PlanesBytes(matrices, type) <= kMostPlanes;
}

int64_t FloatGroupsWorkspace(const Matrices& matrices) {
  int64_t most = 0;
  for (const GgmlType type : {GgmlType::kF32, GgmlType::kF16}) {
    const int64_t bytes = PlanesBytes(matrices, type);
    if (bytes <= kMostPlanes) most = std::max(most, bytes);
  }
  return most;
}

std::string FloatGroups(const QuantMatmulArgs& args, GgmlType type, int64_t num_columns,
                        cudaStream_t stream) {
  Params p = {};
  p.num_rows = static_cast<int32_t>(args.num_rows);
  p.num_columns = static_cast<int32_t>(num_columns);
  p.width = static_cast<int32_t>(args.width);
  p.x = args.x;
  p.live = args.live;
  p.y = args.y;
  p.planes = reinterpret_cast<uint8_t*>(args.workspace);
  switch (type) {
    case GgmlType::kF32:
      return RunOf<GgmlType::kF32>(args, p, stream);
    case GgmlType::kF16:
      return RunOf<GgmlType::kF16>(args, p, stream);
    case GgmlType::kBF16:
      return RunOf<GgmlType::kBF16>(args, p, stream);
    default:
      return "not a type of float values";
  }
}

}  // namespace strata
