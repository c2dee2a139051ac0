#include <algorithm>

#include "cuda/group_units.h"
#include "cuda/ops/quant_matmul_floats.h"
#include "cuda/ops/quant_matmul_groups.cuh"
#include "cuda/ops/quant_matmul_tiles.cuh"
#include "cuda/ops/quant_matmul_tiles.h"

namespace strata {
namespace {

using matmul_tiles::Decoded;
using matmul_tiles::kColumns;
using matmul_tiles::Params;
using matmul_tiles::Piece;
using tiles::HasMinimum;
using tiles::IsSplit;
using tiles::QuantizedRows;
using tiles::RoundUp;

using Matrices = std::vector<const DeviceMatrix*>;

// Codes of a pass over the matrices: larger ones are decoded and multiplied in several passes.
constexpr int64_t kMostCodes = int64_t{48} << 20;

int64_t CeilDiv(int64_t a, int64_t b) { return (a + b - 1) / b; }

// Bytes of workspace for one decoded column.
int64_t ColumnBytes(Form form, int64_t values) {
  return values + values / 32 * 4 + (HasMinimum(form) ? values / 32 * 4 : 0) +
         (IsSplit(form) ? values / 16 * 4 : 0);
}

// Some panels of a matrix.
struct Part {
  const DeviceMatrix* matrix;
  int64_t first_panel;
  int64_t num_panels;
  int64_t column;  // of the result

  int64_t columns() const { return RoundUp(num_panels * 32, kColumns); }
};

// What is decoded and multiplied at once: parts of one form.
struct Pass {
  Form form;
  std::vector<Part> parts;
  int64_t columns = 0;
};

std::vector<Pass> PassesOf(const Matrices& matrices) {
  std::vector<Pass> passes;
  const int64_t values = QuantizedRows::Values(matrices.front()->cols);
  const int64_t most = std::max<int64_t>(kMostCodes / values / kColumns, 1) * kColumns;
  for (const Form form : {Form::kPlain, Form::kMin, Form::kSplit, Form::kSplitMin}) {
    int64_t column = 0;
    passes.push_back({form, {}, 0});
    for (const DeviceMatrix* matrix : matrices) {
      for (int64_t panel = 0; panel < matrix->panels() && matrix->type->form == form;) {
        if (passes.back().columns == most) passes.push_back({form, {}, 0});
        Pass& pass = passes.back();
        const int64_t count = std::min(matrix->panels() - panel, (most - pass.columns) / 32);
        pass.parts.push_back({matrix, panel, count, column + panel * 32});
        pass.columns += pass.parts.back().columns();
        panel += count;
      }
      column += matrix->rows;
    }
    if (passes.back().parts.empty()) passes.pop_back();
  }
  return passes;
}

std::string LaunchDecode(const Part& part, const Decoded& to, cudaStream_t stream) {
  Shape shape;
  shape.grid =
      dim3(static_cast<unsigned>(part.num_panels), static_cast<unsigned>(CeilDiv(to.values, 256)));
  shape.block = dim3(matmul_tiles::kDecodeThreads);
  shape.stream = stream;
  const PanelMatrix matrix = ViewOf(*part.matrix);
  const int first = static_cast<int>(part.first_panel);
  switch (part.matrix->type->type) {
#define STRATA_CASE(name) \
  case GgmlType::k##name: \
    return Launch(matmul_tiles::DecodeKernel<Decode##name>, shape, matrix, first, to);
    STRATA_QUANTISED_TYPES(STRATA_CASE)
#undef STRATA_CASE
    default:
      return "not a quantised type";
  }
}

// Places a part's decoded weights at `*at` and behind.
Decoded PlaceDecoded(Form form, int64_t columns, int64_t values, unsigned char** at) {
  Decoded to = {};
  to.columns = columns;
  to.values = values;
  const auto take = [&](int64_t bytes) {
    unsigned char* begin = *at;
    *at += bytes;
    return begin;
  };
  to.codes = reinterpret_cast<int8_t*>(take(columns * values));
  to.d = reinterpret_cast<float*>(take(columns * values / 8));
  if (HasMinimum(form)) to.m = reinterpret_cast<float*>(take(columns * values / 8));
  if (IsSplit(form)) to.factors = reinterpret_cast<uint32_t*>(take(columns * values / 4));
  return to;
}

template <Form kForm>
std::string LaunchProducts(const Params& p, int64_t columns, cudaStream_t stream) {
  Shape shape;
  shape.grid = dim3(static_cast<unsigned>(CeilDiv(p.num_rows, matmul_tiles::kRows)),
                    static_cast<unsigned>(columns / kColumns));
  shape.shared_bytes = 2 * tiles::Stage<kForm, matmul_tiles::kRows, kColumns>::kBytes;
  shape.stream = stream;
  if constexpr (!IsSplit(kForm)) {
    if (HasGroupUnits()) {
      shape.block = dim3(matmul_tiles::kGroupThreads);
      shape.shared_bytes += kGroupAlignment;
      return Launch(matmul_tiles::GroupProductKernel<kForm>, shape, p);
    }
  }
  shape.block = dim3(matmul_tiles::kThreads);
  return Launch(matmul_tiles::ProductKernel<kForm>, shape, p);
}

std::string RunPass(const Pass& pass, Params p, unsigned char* workspace, cudaStream_t stream) {
  int64_t tile = 0;
  for (const Part& part : pass.parts) {
    Piece& piece = p.pieces[p.num_pieces++];
    piece.weights = PlaceDecoded(pass.form, part.columns(), p.x.values, &workspace);
    piece.first_tile = static_cast<int32_t>(tile);
    piece.num_columns = static_cast<int32_t>(
        std::min(part.matrix->rows - part.first_panel * 32, part.num_panels * 32));
    piece.column = static_cast<int32_t>(part.column);
    tile += part.columns() / kColumns;
    const std::string error = LaunchDecode(part, piece.weights, stream);
    if (!error.empty()) return error;
  }
  switch (pass.form) {
    case Form::kPlain:
      return LaunchProducts<Form::kPlain>(p, pass.columns, stream);
    case Form::kMin:
      return LaunchProducts<Form::kMin>(p, pass.columns, stream);
    case Form::kSplit:
      return LaunchProducts<Form::kSplit>(p, pass.columns, stream);
    default:
      return LaunchProducts<Form::kSplitMin>(p, pass.columns, stream);
  }
}

std::string RunQuantised(const QuantMatmulArgs& args, int64_t num_columns, cudaStream_t stream) {
  const std::vector<Pass> passes = PassesOf(args.matrices);
  if (passes.empty()) return "";
  Params p = {};
  p.num_rows = static_cast<int32_t>(args.num_rows);
  p.num_columns = static_cast<int32_t>(num_columns);
  p.live = args.live;
  p.y = args.y;
  unsigned char* workspace = reinterpret_cast<unsigned char*>(args.workspace);
  p.x = QuantizedRows::At(workspace, args.num_rows, args.width);
  workspace += QuantizedRows::Bytes(args.num_rows, args.width);
  std::string error =
      tiles::QuantizeTileRows(args.x, args.live, args.num_rows, args.width, p.x, stream);
  for (const Pass& pass : passes) {
    if (error.empty()) error = RunPass(pass, p, workspace, stream);
  }
  return error;
}

// The matrices of one unquantised type.
template <GgmlType kType>
std::string RunFloat(const QuantMatmulArgs& args, int64_t num_columns, cudaStream_t stream) {
  if (HasFloatGroups(args.matrices, kType)) return FloatGroups(args, kType, num_columns, stream);
  matmul_tiles::FloatParams p = {};
  p.x = args.x;
  p.live = args.live;
  p.y = args.y;
  p.num_rows = static_cast<int32_t>(args.num_rows);
  p.num_columns = static_cast<int32_t>(num_columns);
  int64_t tiles = 0, column = 0;
  for (const DeviceMatrix* matrix : args.matrices) {
    if (matrix->type->type == kType) {
      p.pieces[p.num_pieces++] = {ViewOf(*matrix), static_cast<int32_t>(tiles),
                                  static_cast<int32_t>(column)};
      tiles += CeilDiv(matrix->rows, floats::kTileColumns);
    }
    column += matrix->rows;
  }
  if (tiles == 0) return "";
  Shape shape;
  shape.grid = dim3(static_cast<unsigned>(tiles),
                    static_cast<unsigned>(CeilDiv(args.num_rows, floats::kTileRows)));
  shape.block = dim3(floats::kThreads);
  shape.shared_bytes = floats::kShared<kType>;
  shape.stream = stream;
  return Launch(matmul_tiles::FloatKernel<kType>, shape, p);
}

}  // namespace

int64_t QuantMatmulTilesWorkspace(int64_t num_rows, const Matrices& matrices) {
  const int64_t width = matrices.front()->cols;
  int64_t most = 0;
  for (const Pass& pass : PassesOf(matrices)) {
    most = std::max(most, pass.columns * ColumnBytes(pass.form, QuantizedRows::Values(width)));
  }
  if (most > 0) most += QuantizedRows::Bytes(num_rows, width);
  most = std::max(most, FloatGroupsWorkspace(matrices));
  return std::max<int64_t>(most / 4, 1);
}

std::string QuantMatmulTiles(const QuantMatmulArgs& args, cudaStream_t stream) {
  int64_t num_columns = 0;
  for (const DeviceMatrix* matrix : args.matrices) num_columns += matrix->rows;
  std::string error = RunQuantised(args, num_columns, stream);
  if (error.empty()) error = RunFloat<GgmlType::kBF16>(args, num_columns, stream);
  if (error.empty()) error = RunFloat<GgmlType::kF16>(args, num_columns, stream);
  if (error.empty()) error = RunFloat<GgmlType::kF32>(args, num_columns, stream);
  return error;
}

}  // namespace strata
