// Host op; not graph-safe. XLA's side of quant_matmul.

#include "common/check.h"
#include "common/numerics.h"
#include "ops/handlers.h"
#include "ops/quant_matmul.h"

namespace strata {
namespace {

namespace ffi = xla::ffi;

ffi::Error Handle(ffi::BufferR2<ffi::F32> x, ffi::BufferR0<ffi::S32> live,
                  ffi::ResultBufferR2<ffi::F32> y, int64_t store, int64_t layer,
                  ffi::Span<const int64_t> roles) {
  const FloatMode mode;
  const auto weights = FindStore(store);
  STRATA_CHECK_ARG("quant_matmul", weights != nullptr,
                   "store " + std::to_string(store) + " is closed");
  const int64_t num_rows = x.dimensions()[0];
  const int64_t width = x.dimensions()[1];
  const int64_t num_live = *live.typed_data();
  STRATA_CHECK_ARG("quant_matmul", num_live >= 0 && num_live <= num_rows,
                   std::to_string(num_live) + " live rows of " + std::to_string(num_rows));
  std::vector<const Matrix*> matrices;
  int64_t columns = 0;
  for (const int64_t role : roles) {
    const Matrix* matrix = weights->Get(role, layer);
    STRATA_CHECK_ARG("quant_matmul", matrix != nullptr && matrix->cols == width,
                     "role " + std::to_string(role) + " of layer " + std::to_string(layer) +
                         " has no matrix of " + std::to_string(width) + " columns");
    columns += matrix->rows;
    matrices.push_back(matrix);
  }
  STRATA_CHECK_ARG("quant_matmul", columns == y->dimensions()[1],
                   "result of " + std::to_string(y->dimensions()[1]) + " columns, expected " +
                       std::to_string(columns));
  QuantMatmul({x.typed_data(), y->typed_data(), num_rows, num_live, width, matrices});
  return ffi::Error::Success();
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(QuantMatmulFfi, Caught("quant_matmul", Handle),
                              ffi::Ffi::Bind()
                                  .Arg<ffi::BufferR2<ffi::F32>>()  // x
                                  .Arg<ffi::BufferR0<ffi::S32>>()  // live
                                  .Ret<ffi::BufferR2<ffi::F32>>()  // y
                                  .Attr<int64_t>("store")
                                  .Attr<int64_t>("layer")
                                  .Attr<ffi::Span<const int64_t>>("roles"));

}  // namespace strata
