// Host op; not graph-safe. XLA's side of gdn_window.

#include <algorithm>

#include "common/check.h"
#include "common/in_place.h"
#include "common/numerics.h"
#include "ops/gdn_window.h"
#include "ops/handlers.h"

namespace strata {
namespace {

namespace ffi = xla::ffi;

ffi::Error Handle(ffi::BufferR2<ffi::F32> proj, ffi::BufferR2<ffi::F32> conv_weight,
                  ffi::BufferR1<ffi::F32> decay, ffi::BufferR1<ffi::F32> dt_bias,
                  ffi::BufferR1<ffi::F32> norm_weight, ffi::BufferR2<ffi::F32> conv_state,
                  ffi::BufferR3<ffi::F32> state, ffi::BufferR2<ffi::F32> pending,
                  ffi::BufferR0<ffi::S32> kept, ffi::BufferR0<ffi::S32> certain,
                  ffi::BufferR0<ffi::S32> live, ffi::ResultBufferR2<ffi::F32> y,
                  ffi::ResultBufferR2<ffi::F32> new_conv_state,
                  ffi::ResultBufferR3<ffi::F32> new_state,
                  ffi::ResultBufferR2<ffi::F32> new_pending, int64_t key_heads, float eps) {
  const FloatMode mode;
  GdnWindowArgs args = {};
  args.num_rows = proj.dimensions()[0];
  args.num_live = *live.typed_data();
  args.num_certain = std::min<int64_t>(*certain.typed_data(), args.num_live);
  args.num_kept = *kept.typed_data();
  args.num_taps = conv_weight.dimensions()[0];
  args.key_heads = key_heads;
  args.value_heads = state.dimensions()[0];
  args.head_dim = state.dimensions()[1];
  args.eps = eps;
  const int64_t channels = conv_weight.dimensions()[1];
  STRATA_CHECK_ARG(
      "gdn_window",
      key_heads > 0 && args.value_heads % key_heads == 0 && args.head_dim % 16 == 0 &&
          channels == (2 * key_heads + args.value_heads) * args.head_dim &&
          proj.dimensions()[1] == channels + args.value_heads * (args.head_dim + 2) &&
          args.num_taps > 0 && HasShape(conv_state, {args.num_taps - 1, channels}) &&
          state.dimensions()[2] == args.head_dim &&
          pending.dimensions()[1] == channels + 2 * args.value_heads &&
          HasShape(decay, {args.value_heads}) && HasShape(dt_bias, {args.value_heads}) &&
          HasShape(norm_weight, {args.head_dim}),
      "shapes of proj, conv_weight, conv_state, state, pending, decay, dt_bias and norm_weight "
      "do not belong together");
  STRATA_CHECK_ARG(
      "gdn_window", args.num_live >= 0 && args.num_live <= args.num_rows,
      std::to_string(args.num_live) + " live rows of " + std::to_string(args.num_rows));
  const int64_t drafts = pending.dimensions()[0];
  STRATA_CHECK_ARG("gdn_window",
                   args.num_certain >= 0 && args.num_live - args.num_certain <= drafts &&
                       args.num_kept >= 0 && args.num_kept <= drafts,
                   std::to_string(args.num_certain) + " certain rows of " +
                       std::to_string(args.num_live) + " after " + std::to_string(args.num_kept) +
                       " drafts, at most " + std::to_string(drafts) + " drafts expected");
  args.proj = proj.typed_data();
  args.conv_weight = conv_weight.typed_data();
  args.decay = decay.typed_data();
  args.dt_bias = dt_bias.typed_data();
  args.norm_weight = norm_weight.typed_data();
  args.conv_state = InPlace(conv_state, new_conv_state);
  args.state = InPlace(state, new_state);
  args.pending = InPlace(pending, new_pending);
  args.y = y->typed_data();
  GdnWindow(args);
  return ffi::Error::Success();
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(GdnWindowFfi, Caught("gdn_window", Handle),
                              ffi::Ffi::Bind()
                                  .Arg<ffi::BufferR2<ffi::F32>>()  // proj
                                  .Arg<ffi::BufferR2<ffi::F32>>()  // conv_weight
                                  .Arg<ffi::BufferR1<ffi::F32>>()  // decay
                                  .Arg<ffi::BufferR1<ffi::F32>>()  // dt_bias
                                  .Arg<ffi::BufferR1<ffi::F32>>()  // norm_weight
                                  .Arg<ffi::BufferR2<ffi::F32>>()  // conv_state
                                  .Arg<ffi::BufferR3<ffi::F32>>()  // state
                                  .Arg<ffi::BufferR2<ffi::F32>>()  // pending
                                  .Arg<ffi::BufferR0<ffi::S32>>()  // kept
                                  .Arg<ffi::BufferR0<ffi::S32>>()  // certain
                                  .Arg<ffi::BufferR0<ffi::S32>>()  // live
                                  .Ret<ffi::BufferR2<ffi::F32>>()  // y
                                  .Ret<ffi::BufferR2<ffi::F32>>()  // new_conv_state
                                  .Ret<ffi::BufferR3<ffi::F32>>()  // new_state
                                  .Ret<ffi::BufferR2<ffi::F32>>()  // new_pending
                                  .Attr<int64_t>("key_heads")
                                  .Attr<float>("eps"));

}  // namespace strata
