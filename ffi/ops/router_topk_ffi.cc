// Host op; not graph-safe. XLA's side of router_topk.

#include "common/check.h"
#include "common/numerics.h"
#include "ops/handlers.h"
#include "ops/router_topk.h"

namespace strata {
namespace {

namespace ffi = xla::ffi;

ffi::Error Handle(ffi::BufferR2<ffi::F32> logits, ffi::BufferR0<ffi::S32> live,
                  ffi::ResultBufferR2<ffi::S32> ids, ffi::ResultBufferR2<ffi::F32> weights,
                  ffi::ResultBufferR1<ffi::F32> shared) {
  const FloatMode mode;
  const int64_t num_rows = logits.dimensions()[0];
  const int64_t num_active = ids->dimensions()[1];
  const int64_t num_experts = logits.dimensions()[1] - 1;
  const int64_t num_live = *live.typed_data();
  STRATA_CHECK_ARG("router_topk", num_active <= num_experts,
                   std::to_string(num_active) + " of " + std::to_string(num_experts) + " experts");
  STRATA_CHECK_ARG("router_topk", num_live >= 0 && num_live <= num_rows,
                   std::to_string(num_live) + " live rows of " + std::to_string(num_rows));
  RouterTopk({logits.typed_data(), ids->typed_data(), weights->typed_data(), shared->typed_data(),
              num_rows, num_live, num_experts, num_active});
  return ffi::Error::Success();
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(RouterTopkFfi, Caught("router_topk", Handle),
                              ffi::Ffi::Bind()
                                  .Arg<ffi::BufferR2<ffi::F32>>()    // logits
                                  .Arg<ffi::BufferR0<ffi::S32>>()    // live
                                  .Ret<ffi::BufferR2<ffi::S32>>()    // ids
                                  .Ret<ffi::BufferR2<ffi::F32>>()    // weights
                                  .Ret<ffi::BufferR1<ffi::F32>>());  // shared

}  // namespace strata
