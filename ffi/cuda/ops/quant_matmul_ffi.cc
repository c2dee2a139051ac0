// Graph-safe. XLA's side of quant_matmul.

#include "common/check.h"
#include "cuda/handlers.h"
#include "cuda/ops/quant_matmul.h"

namespace strata {
namespace {

namespace ffi = xla::ffi;

ffi::Error Handle(StreamArgument stream, ffi::BufferR2<ffi::F32> x, ffi::BufferR0<ffi::S32> live,
                  ffi::ResultBufferR2<ffi::F32> y, ffi::ResultBufferR1<ffi::U8> workspace,
                  int64_t store, int64_t layer, ffi::Span<const int64_t> roles) {
  const auto held = FindDeviceStore(store);
  STRATA_CHECK_ARG("quant_matmul", held != nullptr,
                   "store " + std::to_string(store) + " is closed");
  QuantMatmulArgs args = {};
  args.num_rows = x.dimensions()[0];
  args.width = x.dimensions()[1];
  int64_t columns = 0;
  for (const int64_t role : roles) {
    const DeviceMatrix* matrix = held->Get(role, layer);
    STRATA_CHECK_ARG("quant_matmul", matrix != nullptr && matrix->cols == args.width,
                     "role " + std::to_string(role) + " of layer " + std::to_string(layer) +
                         " has no matrix of " + std::to_string(args.width) + " columns");
    columns += matrix->rows;
    args.matrices.push_back(matrix);
  }
  STRATA_CHECK_ARG("quant_matmul",
                   args.width % 32 == 0 && static_cast<int64_t>(roles.size()) <= kMostMatrices &&
                       columns == y->dimensions()[1],
                   std::to_string(roles.size()) + " matrices of " + std::to_string(columns) +
                       " rows for a result of " + std::to_string(y->dimensions()[1]) +
                       " columns; expected at most " + std::to_string(kMostMatrices) +
                       ", rows of whole blocks of 32 and as many columns");
  const int64_t floats = QuantMatmulWorkspace(args.num_rows, args.matrices);
  STRATA_CHECK_ARG("quant_matmul", static_cast<int64_t>(workspace->size_bytes()) >= 4 * floats,
                   "workspace of " + std::to_string(workspace->size_bytes()) + " bytes, expected " +
                       std::to_string(4 * floats));
  args.x = x.typed_data();
  args.live = live.typed_data();
  args.y = y->typed_data();
  args.workspace = reinterpret_cast<float*>(workspace->typed_data());
  const std::string error = QuantMatmul(args, StreamOf(stream));
  return error.empty() ? ffi::Error::Success() : ffi::Error::Internal("quant_matmul: " + error);
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(QuantMatmulFfi, Caught("quant_matmul", Handle),
                              ffi::Ffi::Bind()
                                  .Ctx<StreamContext>()
                                  .Arg<ffi::BufferR2<ffi::F32>>()  // x
                                  .Arg<ffi::BufferR0<ffi::S32>>()  // live
                                  .Ret<ffi::BufferR2<ffi::F32>>()  // y
                                  .Ret<ffi::BufferR1<ffi::U8>>()   // workspace
                                  .Attr<int64_t>("store")
                                  .Attr<int64_t>("layer")
                                  .Attr<ffi::Span<const int64_t>>("roles"),
                              {ffi::Traits::kCmdBufferCompatible});

}  // namespace strata
