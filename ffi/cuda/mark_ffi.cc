// Graph-safe. XLA's side of a timeline's marks: hands its operand on, and orders itself by it.

#include "common/check.h"
#include "cuda/device_store.h"
#include "cuda/handlers.h"

namespace strata {
namespace {

namespace ffi = xla::ffi;

ffi::Error Handle(StreamArgument stream, ffi::AnyBuffer x, ffi::Result<ffi::AnyBuffer> y,
                  int64_t store, int64_t phase) {
  const auto held = FindDeviceStore(store);
  STRATA_CHECK_ARG("mark", held != nullptr, "store " + std::to_string(store) + " is closed");
  STRATA_CHECK_ARG("mark", x.size_bytes() == y->size_bytes(), "operand and result differ in size");
  const cudaStream_t on = StreamOf(stream);
  if (y->untyped_data() != x.untyped_data()) {
    const cudaError_t copied = cudaMemcpyAsync(y->untyped_data(), x.untyped_data(), x.size_bytes(),
                                               cudaMemcpyDeviceToDevice, on);
    STRATA_CHECK_ARG("mark", copied == cudaSuccess, cudaGetErrorString(copied));
  }
  const std::string error = Mark(held->timeline(), phase, on);
  return error.empty() ? ffi::Error::Success() : ffi::Error::Internal("mark: " + error);
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(MarkFfi, Caught("mark", Handle),
                              ffi::Ffi::Bind()
                                  .Ctx<StreamContext>()
                                  .Arg<ffi::AnyBuffer>()  // x
                                  .Ret<ffi::AnyBuffer>()  // x again
                                  .Attr<int64_t>("store")
                                  .Attr<int64_t>("phase"),
                              {ffi::Traits::kCmdBufferCompatible});

}  // namespace strata
