// Graph-safe. XLA's side of embed_rows.

#include "common/check.h"
#include "cuda/handlers.h"
#include "cuda/ops/embed_rows.h"

namespace strata {
namespace {

namespace ffi = xla::ffi;

ffi::Error Handle(StreamArgument stream, ffi::BufferR1<ffi::S32> ids, ffi::BufferR0<ffi::S32> live,
                  ffi::ResultBufferR2<ffi::F32> out, int64_t store, int64_t role) {
  const auto held = FindDeviceStore(store);
  STRATA_CHECK_ARG("embed_rows", held != nullptr, "store " + std::to_string(store) + " is closed");
  const DeviceMatrix* table = held->Get(role, 0);
  STRATA_CHECK_ARG("embed_rows", table != nullptr && table->cols == out->dimensions()[1],
                   "role " + std::to_string(role) + " has no table of " +
                       std::to_string(out->dimensions()[1]) + " columns");
  const std::string error = EmbedRows({ids.typed_data(), live.typed_data(), out->typed_data(),
                                       static_cast<int64_t>(ids.dimensions()[0]), table},
                                      StreamOf(stream));
  return error.empty() ? ffi::Error::Success() : ffi::Error::Internal("embed_rows: " + error);
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(EmbedRowsFfi, Caught("embed_rows", Handle),
                              ffi::Ffi::Bind()
                                  .Ctx<StreamContext>()
                                  .Arg<ffi::BufferR1<ffi::S32>>()  // ids
                                  .Arg<ffi::BufferR0<ffi::S32>>()  // live
                                  .Ret<ffi::BufferR2<ffi::F32>>()  // out
                                  .Attr<int64_t>("store")
                                  .Attr<int64_t>("role"),
                              {ffi::Traits::kCmdBufferCompatible});

}  // namespace strata
