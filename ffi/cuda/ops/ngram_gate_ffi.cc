// Graph-safe. XLA's side of ngram_gate.

#include "common/check.h"
#include "cuda/handlers.h"
#include "cuda/ops/ngram_gate.h"

namespace strata {
namespace {

namespace ffi = xla::ffi;

ffi::Error Handle(StreamArgument stream, ffi::BufferR2<ffi::F32> key_value,
                  ffi::BufferR2<ffi::F32> norm_key, ffi::BufferR2<ffi::F32> norm_query,
                  ffi::BufferR2<ffi::F32> norm_conv, ffi::BufferR2<ffi::F32> conv_weight,
                  ffi::BufferR3<ffi::F32> streams, ffi::BufferR2<ffi::F32> conv_state,
                  ffi::BufferR2<ffi::F32> pending, ffi::BufferR0<ffi::S32> kept,
                  ffi::BufferR0<ffi::S32> certain, ffi::BufferR0<ffi::S32> live,
                  ffi::ResultBufferR3<ffi::F32> new_streams,
                  ffi::ResultBufferR2<ffi::F32> new_conv_state,
                  ffi::ResultBufferR2<ffi::F32> new_pending, ffi::ResultBufferR1<ffi::U8> workspace,
                  int64_t dilation, float eps) {
  NgramGateArgs args = {};
  args.num_rows = streams.dimensions()[0];
  args.num_streams = streams.dimensions()[1];
  args.width = streams.dimensions()[2];
  args.num_taps = conv_weight.dimensions()[0];
  args.dilation = dilation;
  args.eps = eps;
  STRATA_CHECK_ARG(
      "ngram_gate",
      args.width % 16 == 0 && args.num_taps > 0 && dilation > 0 &&
          HasShape(key_value, {args.num_rows, (args.num_streams + 1) * args.width}) &&
          HasShape(norm_key, {args.num_streams, args.width}) &&
          HasShape(norm_query, {args.num_streams, args.width}) &&
          HasShape(norm_conv, {args.num_streams, args.width}) &&
          conv_weight.dimensions()[1] == args.num_streams * args.width &&
          HasShape(conv_state, {(args.num_taps - 1) * dilation, args.num_streams * args.width}) &&
          pending.dimensions()[1] == args.num_streams * args.width,
      "shapes of key_value, the norms, conv_weight, conv_state, pending and streams do not "
      "belong together");
  STRATA_CHECK_ARG(
      "ngram_gate",
      args.num_taps <= kMostNgramTaps && conv_state.dimensions()[0] <= kMostNgramHistory,
      std::to_string(args.num_taps) + " taps " + std::to_string(dilation) +
          " rows apart, at most " + std::to_string(kMostNgramTaps) + " over " +
          std::to_string(kMostNgramHistory) + " rows expected on a GPU");
  const int64_t bytes = NgramGateWorkspace(args.num_rows, args.num_streams);
  STRATA_CHECK_ARG("ngram_gate", static_cast<int64_t>(workspace->size_bytes()) >= bytes,
                   "workspace of " + std::to_string(workspace->size_bytes()) + " bytes, expected " +
                       std::to_string(bytes));
  args.key_value = key_value.typed_data();
  args.norm_key = norm_key.typed_data();
  args.norm_query = norm_query.typed_data();
  args.norm_conv = norm_conv.typed_data();
  args.conv_weight = conv_weight.typed_data();
  args.streams = streams.typed_data();
  args.conv_state = conv_state.typed_data();
  args.pending = pending.typed_data();
  args.num_pending = pending.dimensions()[0];
  args.kept = kept.typed_data();
  args.certain = certain.typed_data();
  args.live = live.typed_data();
  args.new_streams = new_streams->typed_data();
  args.new_conv_state = new_conv_state->typed_data();
  args.new_pending = new_pending->typed_data();
  args.factors = reinterpret_cast<float2*>(workspace->typed_data());
  const std::string error = NgramGate(args, StreamOf(stream));
  return error.empty() ? ffi::Error::Success() : ffi::Error::Internal("ngram_gate: " + error);
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(NgramGateFfi, Caught("ngram_gate", Handle),
                              ffi::Ffi::Bind()
                                  .Ctx<StreamContext>()
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
                                  .Ret<ffi::BufferR1<ffi::U8>>()   // workspace
                                  .Attr<int64_t>("dilation")
                                  .Attr<float>("eps"),
                              {ffi::Traits::kCmdBufferCompatible});

}  // namespace strata
