// Host op; not graph-safe. XLA's side of ngram_gate.

#include <algorithm>

#include "common/check.h"
#include "common/in_place.h"
#include "common/numerics.h"
#include "ops/handlers.h"
#include "ops/ngram_gate.h"

namespace strata {
namespace {

namespace ffi = xla::ffi;

ffi::Error Handle(ffi::BufferR2<ffi::F32> key_value, ffi::BufferR2<ffi::F32> norm_key,
                  ffi::BufferR2<ffi::F32> norm_query, ffi::BufferR2<ffi::F32> norm_conv,
                  ffi::BufferR2<ffi::F32> conv_weight, ffi::BufferR3<ffi::F32> streams,
                  ffi::BufferR2<ffi::F32> conv_state, ffi::BufferR2<ffi::F32> pending,
                  ffi::BufferR0<ffi::S32> kept, ffi::BufferR0<ffi::S32> certain,
                  ffi::BufferR0<ffi::S32> live, ffi::ResultBufferR3<ffi::F32> new_streams,
                  ffi::ResultBufferR2<ffi::F32> new_conv_state,
                  ffi::ResultBufferR2<ffi::F32> new_pending, int64_t dilation, float eps) {
  const FloatMode mode;
  NgramGateArgs args = {};
  args.num_live = *live.typed_data();
  args.num_certain = std::min<int64_t>(*certain.typed_data(), args.num_live);
  args.num_kept = *kept.typed_data();
  args.num_streams = streams.dimensions()[1];
  args.width = streams.dimensions()[2];
  args.num_taps = conv_weight.dimensions()[0];
  args.dilation = dilation;
  args.eps = eps;
  STRATA_CHECK_ARG(
      "ngram_gate",
      args.width % 16 == 0 && args.num_taps > 0 && dilation > 0 &&
          HasShape(key_value, {streams.dimensions()[0], (args.num_streams + 1) * args.width}) &&
          HasShape(norm_key, {args.num_streams, args.width}) &&
          HasShape(norm_query, {args.num_streams, args.width}) &&
          HasShape(norm_conv, {args.num_streams, args.width}) &&
          conv_weight.dimensions()[1] == args.num_streams * args.width &&
          HasShape(conv_state, {(args.num_taps - 1) * dilation, args.num_streams * args.width}) &&
          pending.dimensions()[1] == args.num_streams * args.width,
      "shapes of key_value, the norms, conv_weight, conv_state, pending and streams do not "
      "belong together");
  STRATA_CHECK_ARG(
      "ngram_gate", args.num_live >= 0 && args.num_live <= streams.dimensions()[0],
      std::to_string(args.num_live) + " live rows of " + std::to_string(streams.dimensions()[0]));
  const int64_t drafts = pending.dimensions()[0];
  STRATA_CHECK_ARG("ngram_gate",
                   args.num_certain >= 0 && args.num_live - args.num_certain <= drafts &&
                       args.num_kept >= 0 && args.num_kept <= drafts,
                   std::to_string(args.num_certain) + " certain rows of " +
                       std::to_string(args.num_live) + " after " + std::to_string(args.num_kept) +
                       " drafts, at most " + std::to_string(drafts) + " drafts expected");
  args.key_value = key_value.typed_data();
  args.norm_key = norm_key.typed_data();
  args.norm_query = norm_query.typed_data();
  args.norm_conv = norm_conv.typed_data();
  args.conv_weight = conv_weight.typed_data();
  args.streams = InPlace(streams, new_streams);
  args.conv_state = InPlace(conv_state, new_conv_state);
  args.pending = InPlace(pending, new_pending);
  NgramGate(args);
  return ffi::Error::Success();
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(NgramGateFfi, Caught("ngram_gate", Handle),
                              ffi::Ffi::Bind()
                                  .Arg<ffi::BufferR2<ffi::F32>>()  // key_value
                                  .Arg<ffi::BufferR2<ffi::F32>>()  // norm_key
                                  .Arg<ffi::BufferR2<ffi::F32>>()  // norm_query
                                  .Arg<ffi::BufferR2<ffi::F32>>()  // norm_conv
                                  .Arg<ffi::BufferR2<ffi::F32>>()  // conv_weight
                                  .Arg<ffi::BufferR3<ffi::F32>>()  // streams
                                  .Arg<ffi::BufferR2<ffi::F32>>()  // conv_state
                                  .Arg<ffi::BufferR2<ffi::F32>>()  // pending
                                  .Arg<ffi::BufferR0<ffi::S32>>()  // kept
                                  .Arg<ffi::BufferR0<ffi::S32>>()  // certain
                                  .Arg<ffi::BufferR0<ffi::S32>>()  // live
                                  .Ret<ffi::BufferR3<ffi::F32>>()  // new_streams
                                  .Ret<ffi::BufferR2<ffi::F32>>()  // new_conv_state
                                  .Ret<ffi::BufferR2<ffi::F32>>()  // new_pending
                                  .Attr<int64_t>("dilation")
                                  .Attr<float>("eps"));

}  // namespace strata
