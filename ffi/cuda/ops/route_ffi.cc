// Graph-safe. XLA's side of route.

#include "common/check.h"
#include "cuda/handlers.h"
#include "cuda/ops/route.h"
#include "cuda/ops/router_topk.h"

namespace strata {
namespace {

namespace ffi = xla::ffi;

ffi::Error Handle(StreamArgument stream, ffi::BufferR2<ffi::F32> x, ffi::BufferR0<ffi::S32> live,
                  ffi::ResultBufferR2<ffi::S32> ids, ffi::ResultBufferR2<ffi::F32> weights,
                  ffi::ResultBufferR1<ffi::F32> shared, ffi::ResultBufferR1<ffi::U8> workspace,
                  int64_t store, int64_t layer, int64_t num_experts,
                  ffi::Span<const int64_t> roles) {
  const auto held = FindDeviceStore(store);
  STRATA_CHECK_ARG("route", held != nullptr, "store " + std::to_string(store) + " is closed");
  STRATA_CHECK_ARG("route", roles.size() == 2,
                   std::to_string(roles.size()) +
                       " roles, expected the router's and the shared "
                       "expert's");
  RouteArgs args = {};
  args.router = held->Get(roles[0], layer);
  args.shared_router = held->Get(roles[1], layer);
  args.num_rows = x.dimensions()[0];
  args.width = x.dimensions()[1];
  args.num_active = ids->dimensions()[1];
  STRATA_CHECK_ARG(
      "route",
      args.router != nullptr && args.shared_router != nullptr && args.router->cols == args.width &&
          args.shared_router->cols == args.width && args.router->rows == num_experts &&
          args.shared_router->rows == 1 && args.width % 32 == 0,
      "layer " + std::to_string(layer) + " has no router of " + std::to_string(num_experts) +
          " experts and " + std::to_string(args.width) + " columns, in whole blocks of 32");
  STRATA_CHECK_ARG("route",
                   args.num_active <= args.router->rows && args.router->rows <= kMostExperts,
                   std::to_string(args.num_active) + " of " + std::to_string(args.router->rows) +
                       " experts, at most " + std::to_string(kMostExperts) + " expected on a GPU");
  const int64_t bytes = 4 * RouteWorkspace(args.num_rows, *args.router, *args.shared_router);
  STRATA_CHECK_ARG("route", static_cast<int64_t>(workspace->size_bytes()) >= bytes,
                   "workspace of " + std::to_string(workspace->size_bytes()) + " bytes, expected " +
                       std::to_string(bytes));
  args.x = x.typed_data();
  args.live = live.typed_data();
  args.ids = ids->typed_data();
  args.weights = weights->typed_data();
  args.shared = shared->typed_data();
  args.workspace = reinterpret_cast<float*>(workspace->typed_data());
  const std::string error = Route(args, StreamOf(stream));
  return error.empty() ? ffi::Error::Success() : ffi::Error::Internal("route: " + error);
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(RouteFfi, Caught("route", Handle),
                              ffi::Ffi::Bind()
                                  .Ctx<StreamContext>()
                                  .Arg<ffi::BufferR2<ffi::F32>>()  // x
                                  .Arg<ffi::BufferR0<ffi::S32>>()  // live
                                  .Ret<ffi::BufferR2<ffi::S32>>()  // ids
                                  .Ret<ffi::BufferR2<ffi::F32>>()  // weights
                                  .Ret<ffi::BufferR1<ffi::F32>>()  // shared
                                  .Ret<ffi::BufferR1<ffi::U8>>()   // workspace
                                  .Attr<int64_t>("store")
                                  .Attr<int64_t>("layer")
                                  .Attr<int64_t>("num_experts")
                                  .Attr<ffi::Span<const int64_t>>("roles"),
                              {ffi::Traits::kCmdBufferCompatible});

}  // namespace strata
