// Host op; not graph-safe. XLA's side of expert_ffn.

#include "common/check.h"
#include "common/numerics.h"
#include "ops/expert_ffn.h"
#include "ops/handlers.h"

namespace strata {
namespace {

namespace ffi = xla::ffi;

bool Fits(const FfnMatrices& m, int64_t width) {
  return m.gate != nullptr && m.up != nullptr && m.down != nullptr && m.gate->cols == width &&
         m.up->cols == width && m.down->rows == width && m.up->rows == m.gate->rows &&
         m.down->cols == m.gate->rows && m.up->count == m.gate->count &&
         m.down->count == m.gate->count;
}

ffi::Error Handle(ffi::BufferR2<ffi::F32> x, ffi::BufferR2<ffi::S32> ids,
                  ffi::BufferR2<ffi::F32> weights, ffi::BufferR1<ffi::F32> shared_weights,
                  ffi::BufferR0<ffi::S32> live, ffi::ResultBufferR2<ffi::F32> y, int64_t store,
                  int64_t tiers, int64_t layer, ffi::Span<const int64_t> roles) {
  const FloatMode mode;
  const auto held = FindStore(store);
  STRATA_CHECK_ARG("expert_ffn", held != nullptr, "store " + std::to_string(store) + " is closed");
  STRATA_CHECK_ARG("expert_ffn", roles.size() == 6, "expected 6 roles");
  const auto get = [&](int i) { return held->Get(roles[i], layer); };
  ExpertFfnArgs args = {};
  args.num_rows = x.dimensions()[0];
  args.width = x.dimensions()[1];
  args.num_live = *live.typed_data();
  args.num_active = ids.dimensions()[1];
  args.routed = {get(0), get(1), get(2)};
  args.shared = {get(3), get(4), get(5)};
  STRATA_CHECK_ARG("expert_ffn", Fits(args.routed, args.width) && Fits(args.shared, args.width),
                   "the matrices of layer " + std::to_string(layer) + " do not fit rows of " +
                       std::to_string(args.width));
  STRATA_CHECK_ARG(
      "expert_ffn", args.num_live >= 0 && args.num_live <= args.num_rows,
      std::to_string(args.num_live) + " live rows of " + std::to_string(args.num_rows));
  STRATA_CHECK_ARG("expert_ffn",
                   ids.dimensions()[0] == args.num_rows &&
                       HasShape(weights, {args.num_rows, args.num_active}) &&
                       HasShape(shared_weights, {args.num_rows}),
                   "shapes of x, ids, weights and shared_weights do not belong together");
  args.x = x.typed_data();
  args.ids = ids.typed_data();
  args.weights = weights.typed_data();
  args.shared_weights = shared_weights.typed_data();
  args.y = y->typed_data();
  for (int64_t e = 0; e < args.num_live * args.num_active; ++e) {
    STRATA_CHECK_ARG("expert_ffn", args.ids[e] >= 0 && args.ids[e] < args.routed.gate->count,
                     "ids[" + std::to_string(e / args.num_active) + ", " +
                         std::to_string(e % args.num_active) + "] is " +
                         std::to_string(args.ids[e]) + ", outside [0, " +
                         std::to_string(args.routed.gate->count) + ")");
  }
  const auto held_tiers = tiers < 0 ? nullptr : FindTiers(tiers);
  STRATA_CHECK_ARG("expert_ffn", tiers < 0 || held_tiers != nullptr,
                   "tiers " + std::to_string(tiers) + " are closed");
  STRATA_CHECK_ARG("expert_ffn",
                   held_tiers == nullptr || (layer < held_tiers->num_layers() &&
                                             held_tiers->num_experts() == args.routed.gate->count),
                   "the tiers have no layer " + std::to_string(layer));
  args.layer = layer;
  args.tiers = held_tiers.get();
  const std::string error = ExpertFfn(args);
  if (!error.empty()) return ffi::Error::Internal("expert_ffn: " + error);
  return ffi::Error::Success();
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(ExpertFfnFfi, Caught("expert_ffn", Handle),
                              ffi::Ffi::Bind()
                                  .Arg<ffi::BufferR2<ffi::F32>>()  // x
                                  .Arg<ffi::BufferR2<ffi::S32>>()  // ids
                                  .Arg<ffi::BufferR2<ffi::F32>>()  // weights
                                  .Arg<ffi::BufferR1<ffi::F32>>()  // shared_weights
                                  .Arg<ffi::BufferR0<ffi::S32>>()  // live
                                  .Ret<ffi::BufferR2<ffi::F32>>()  // y
                                  .Attr<int64_t>("store")
                                  .Attr<int64_t>("tiers")
                                  .Attr<int64_t>("layer")
                                  .Attr<ffi::Span<const int64_t>>("roles"));

}  // namespace strata
