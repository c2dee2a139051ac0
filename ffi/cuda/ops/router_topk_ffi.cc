// Graph-safe. XLA's side of router_topk.

#include "common/check.h"
#include "cuda/handlers.h"
#include "cuda/ops/router_topk.h"

namespace strata {
namespace {

namespace ffi = xla::ffi;

ffi::Error Handle(StreamArgument stream, ffi::BufferR2<ffi::F32> logits,
                  ffi::BufferR0<ffi::S32> live, ffi::ResultBufferR2<ffi::S32> ids,
                  ffi::ResultBufferR2<ffi::F32> weights, ffi::ResultBufferR1<ffi::F32> shared) {
  const int64_t num_rows = logits.dimensions()[0];
  const int64_t num_active = ids->dimensions()[1];
  const int64_t num_experts = logits.dimensions()[1] - 1;
  STRATA_CHECK_ARG("router_topk", num_active <= num_experts,
                   std::to_string(num_active) + " of " + std::to_string(num_experts) + " experts");
  STRATA_CHECK_ARG("router_topk", num_experts <= kMostExperts,
                   std::to_string(num_experts) + " experts, at most " +
                       std::to_string(kMostExperts) + " expected on a GPU");
  const std::string error =
      RouterTopk({logits.typed_data(), live.typed_data(), ids->typed_data(), weights->typed_data(),
                  shared->typed_data(), num_rows, num_experts, num_active},
                 StreamOf(stream));
  return error.empty() ? ffi::Error::Success() : ffi::Error::Internal("router_topk: " + error);
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(RouterTopkFfi, Caught("router_topk", Handle),
                              ffi::Ffi::Bind()
                                  .Ctx<StreamContext>()
                                  .Arg<ffi::BufferR2<ffi::F32>>()   // logits
                                  .Arg<ffi::BufferR0<ffi::S32>>()   // live
                                  .Ret<ffi::BufferR2<ffi::S32>>()   // ids
                                  .Ret<ffi::BufferR2<ffi::F32>>()   // weights
                                  .Ret<ffi::BufferR1<ffi::F32>>(),  // shared
                              {ffi::Traits::kCmdBufferCompatible});

}  // namespace strata
