// Host op; not graph-safe. XLA's side of embed_rows.

#include "common/check.h"
#include "common/numerics.h"
#include "ops/embed_rows.h"
#include "ops/handlers.h"

namespace strata {
namespace {

namespace ffi = xla::ffi;

ffi::Error Handle(ffi::BufferR1<ffi::S32> ids, ffi::BufferR0<ffi::S32> live,
                  ffi::ResultBufferR2<ffi::F32> out, int64_t store, int64_t role) {
  const FloatMode mode;
  const auto held = FindStore(store);
  STRATA_CHECK_ARG("embed_rows", held != nullptr, "store " + std::to_string(store) + " is closed");
  const Matrix* table = held->Get(role, 0);
  STRATA_CHECK_ARG("embed_rows", table != nullptr && table->cols == out->dimensions()[1],
                   "role " + std::to_string(role) + " has no table of " +
                       std::to_string(out->dimensions()[1]) + " columns");
  const int64_t num_rows = ids.dimensions()[0];
  const int64_t num_live = *live.typed_data();
  STRATA_CHECK_ARG("embed_rows", num_live >= 0 && num_live <= num_rows,
                   std::to_string(num_live) + " live rows of " + std::to_string(num_rows));
  for (int64_t t = 0; t < num_live; ++t) {
    const int32_t id = ids.typed_data()[t];
    STRATA_CHECK_ARG("embed_rows", id >= 0 && id < table->rows,
                     "ids[" + std::to_string(t) + "] is " + std::to_string(id) + ", outside [0, " +
                         std::to_string(table->rows) + ")");
  }
  EmbedRows({ids.typed_data(), out->typed_data(), num_rows, num_live, table});
  return ffi::Error::Success();
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(EmbedRowsFfi, Caught("embed_rows", Handle),
                              ffi::Ffi::Bind()
                                  .Arg<ffi::BufferR1<ffi::S32>>()  // ids
                                  .Arg<ffi::BufferR0<ffi::S32>>()  // live
                                  .Ret<ffi::BufferR2<ffi::F32>>()  // out
                                  .Attr<int64_t>("store")
                                  .Attr<int64_t>("role"));

}  // namespace strata
