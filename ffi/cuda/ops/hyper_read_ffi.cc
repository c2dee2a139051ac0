// Graph-safe. XLA's side of hyper_read.

#include "common/check.h"
#include "cuda/handlers.h"
#include "cuda/ops/hyper_read.h"

namespace strata {
namespace {

namespace ffi = xla::ffi;

bool Fits(const HyperReadArgs& a, bool injected) {
  const int64_t wide = a.num_streams * a.width;
  return a.down != nullptr && a.up != nullptr && a.down->cols == wide && a.up->rows == wide &&
         a.up->cols == a.down->rows && a.down->rows % 32 == 0 && a.width % 32 == 0 &&
         (a.inject != nullptr) == injected &&
         (a.inject == nullptr || (a.inject->cols == wide && a.inject->rows == a.num_streams));
}

ffi::Error Handle(StreamArgument stream, ffi::BufferR3<ffi::F32> streams, ffi::BufferR2<ffi::F32> y,
                  ffi::BufferR2<ffi::F32> beta, ffi::BufferR2<ffi::F32> norm,
                  ffi::BufferR0<ffi::S32> live, ffi::ResultBufferR3<ffi::F32> new_streams,
                  ffi::ResultBufferR2<ffi::F32> x, ffi::ResultBufferR2<ffi::F32> next_beta,
                  ffi::ResultBufferR1<ffi::U8> workspace, int64_t store, int64_t layer,
                  ffi::Span<const int64_t> roles, float eps) {
  const auto held = FindDeviceStore(store);
  STRATA_CHECK_ARG("hyper_read", held != nullptr, "store " + std::to_string(store) + " is closed");
  STRATA_CHECK_ARG("hyper_read", roles.size() == 3, "expected roles down, inject (or -1), up");
  HyperReadArgs args = {};
  args.num_rows = streams.dimensions()[0];
  args.num_streams = streams.dimensions()[1];
  args.width = streams.dimensions()[2];
  args.eps = eps;
  args.down = held->Get(roles[0], layer);
  args.inject = held->Get(roles[1], layer);
  args.up = held->Get(roles[2], layer);
  STRATA_CHECK_ARG("hyper_read", Fits(args, roles[1] >= 0),
                   "the matrices of layer " + std::to_string(layer) + " do not fit " +
                       std::to_string(args.num_streams) + " streams of " +
                       std::to_string(args.width) + " (whole blocks of 32)");
  STRATA_CHECK_ARG("hyper_read",
                   HasShape(y, {args.num_rows, args.width}) &&
                       HasShape(beta, {args.num_rows, args.num_streams}) &&
                       HasShape(norm, {args.num_streams, args.width}),
                   "shapes of streams, y, beta and norm do not belong together");
  const int64_t floats =
      HyperReadWorkspace(args.num_rows, args.num_streams, args.width, args.down->rows);
  STRATA_CHECK_ARG("hyper_read", static_cast<int64_t>(workspace->size_bytes()) >= 4 * floats,
                   "workspace of " + std::to_string(workspace->size_bytes()) + " bytes, expected " +
                       std::to_string(4 * floats));
  args.streams = streams.typed_data();
  args.new_streams = new_streams->typed_data();
  args.y = y.typed_data();
  args.beta = beta.typed_data();
  args.norm = norm.typed_data();
  args.live = live.typed_data();
  args.x = x->typed_data();
  args.next_beta = next_beta->typed_data();
  args.workspace = reinterpret_cast<float*>(workspace->typed_data());
  const std::string error = HyperRead(args, StreamOf(stream));
  return error.empty() ? ffi::Error::Success() : ffi::Error::Internal("hyper_read: " + error);
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(HyperReadFfi, Caught("hyper_read", Handle),
                              ffi::Ffi::Bind()
                                  .Ctx<StreamContext>()
                                  .Arg<ffi::BufferR3<ffi::F32>>()  // streams
                                  .Arg<ffi::BufferR2<ffi::F32>>()  // y
                                  .Arg<ffi::BufferR2<ffi::F32>>()  // beta
                                  .Arg<ffi::BufferR2<ffi::F32>>()  // norm
                                  .Arg<ffi::BufferR0<ffi::S32>>()  // live
                                  .Ret<ffi::BufferR3<ffi::F32>>()  // new_streams
                                  .Ret<ffi::BufferR2<ffi::F32>>()  // x
                                  .Ret<ffi::BufferR2<ffi::F32>>()  // next_beta
                                  .Ret<ffi::BufferR1<ffi::U8>>()   // workspace
                                  .Attr<int64_t>("store")
                                  .Attr<int64_t>("layer")
                                  .Attr<ffi::Span<const int64_t>>("roles")
                                  .Attr<float>("eps"),
                              {ffi::Traits::kCmdBufferCompatible});

}  // namespace strata
